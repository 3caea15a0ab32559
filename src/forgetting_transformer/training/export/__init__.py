"""Exports: folders in the format of Hugging Face, made of a run's checkpoints.

contents.py     model and tokenizer of a checkpoint
folder.py       the folder, its mark, and what an export may overwrite
card.py         its model card
forget_gates.py a pretrained Transformer as a FoX
official_checkpoint.py  checkpoints of the authors' code, exported or continued
"""

from forgetting_transformer.training.export.contents import load_checkpoint, tokenizer_of_run
from forgetting_transformer.training.export.folder import MARK, ExportError, export, origin_of, read_mark

__all__ = ["MARK", "ExportError", "export", "load_checkpoint", "origin_of", "read_mark", "tokenizer_of_run"]
