"""Architectures: a file each, with the mixer, its configuration and its model classes.

`forgetting_attention` is FoX and the Transformer (Pro), `transformer` the Transformer (LLaMA). `recurrent` and
`state_space` hold what recurrent architectures share.
"""
