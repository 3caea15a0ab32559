"""Initial weights of a run: drawn from its seed, or those of a model (`init_from`)."""
