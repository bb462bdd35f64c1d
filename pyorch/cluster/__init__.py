"""Several servers that share one model's experts."""
