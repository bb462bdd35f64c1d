"""Several servers that share the experts of one model."""
