"""How parameters are changed: learning rates, optimizers, which parameters decay."""
