"""Exports: folders in the format of Hugging Face, made of a run's checkpoints.

contents.py     model and tokenizer of a checkpoint
folder.py       the folder, and what an export may overwrite
card.py         its model card
averaging.py    the mean of several checkpoints
forget_gates.py a pretrained Transformer as a FoX
hub.py          upload to the Hugging Face hub
"""

from forgetting_transformer.training.export.contents import build_from_checkpoint, load_checkpoint, tokenizer_of_run
from forgetting_transformer.training.export.folder import MARK, ExportError, export, origin_of, read_mark

__all__ = [
    "MARK", "ExportError", "build_from_checkpoint", "export", "load_checkpoint", "origin_of", "read_mark",
    "tokenizer_of_run",
]  # fmt: skip
