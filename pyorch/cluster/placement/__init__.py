"""Which server of a cluster holds which experts (DanceMoE, section III)."""
