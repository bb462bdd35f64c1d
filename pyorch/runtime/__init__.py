"""The native runtime: its bindings, model maps, engines and observers."""
