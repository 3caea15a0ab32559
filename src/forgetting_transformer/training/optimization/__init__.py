"""Updates of parameters: learning rates, optimizers, which parameters decay."""
