"""Generation: caches of past tokens (`cache.py`), the buffers they grow in (`growing.py`), single tokens as a CUDA
graph (`graph.py`), and the hooks through which transformers' `generate` gets them (`hooks.py`).
"""
