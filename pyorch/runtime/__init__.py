"""The native runtime: model maps, engines, and their callbacks."""
