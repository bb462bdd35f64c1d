"""Measures speed under budgets and memory limits, against llama.cpp and the roofline.

The measured processes import this package too, so this file imports nothing.
"""
