"""Execution of a run: compilation, CUDA graphs, the backend of each op, the peak rate of a GPU; preflight."""
