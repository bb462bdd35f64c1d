"""Programs that reproduce figures and tables of papers, and compare baselines: they use pyorch, and are not in it."""
