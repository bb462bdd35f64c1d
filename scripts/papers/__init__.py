"""Programs that reproduce figures and tables of papers, and compare baselines. They are no part of pyorch."""
