"""Layers around the mixers: norms, token shift, short convolution, SwiGLU, rotary positions, cross entropy.

`X.py` has the op in PyTorch and chooses; `X_triton.py` has its kernels.
"""
