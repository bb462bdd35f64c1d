"""Advice before a model is used: what this machine would make of it at each budget, and what would help."""
