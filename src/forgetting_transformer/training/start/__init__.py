"""Before the first step: initial weights, resume, checks and the start block."""
