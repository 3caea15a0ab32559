"""Exports: folders in the format of Hugging Face, made of a run's checkpoints.

folder.py       model and tokenizer of a checkpoint; the folder, its mark, and what an export may overwrite
card.py         its model card
forget_gates.py a pretrained Transformer as a FoX
official_checkpoint.py  checkpoints of the authors' code, exported or continued
"""

from forgetting_transformer.training.export.folder import (
    MARK,
    ExportError,
    export,
    load_checkpoint,
    origin_of,
    read_mark,
    tokenizer_of_run,
)

__all__ = ["MARK", "ExportError", "export", "load_checkpoint", "origin_of", "read_mark", "tokenizer_of_run"]
