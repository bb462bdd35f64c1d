"""The real llama-server, with experts under an engine."""
