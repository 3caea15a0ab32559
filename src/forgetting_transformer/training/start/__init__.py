"""Before the first step: the weights to begin with, what is resumed, what is said and checked."""
