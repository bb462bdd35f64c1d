"""Places a model's experts on the servers of a cluster (DanceMoE, section III)."""
