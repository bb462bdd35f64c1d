"""Models on the Hugging Face hub, and what of them lies on this machine."""
