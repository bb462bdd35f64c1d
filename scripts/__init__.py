"""Programs of the checkout, which no wheel has."""
