"""The native runtime: model maps, engines, and what they call."""
