"""Runs llama-server, with the engine as manager of the experts."""
