"""Models of the Hugging Face hub, and models on this machine."""
