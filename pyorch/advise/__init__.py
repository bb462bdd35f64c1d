"""Advice before a model is used: its estimated speed on this machine at each budget, and sidecars that would help."""
