"""Greedy continuations of prompts, and files that several processes may fill and a later start continues."""

import json
import logging
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from forgetting_transformer.analysis.evaluations import read_json
from forgetting_transformer.evaluation.models import EvaluatedModel, EvaluationError, precision_context
from forgetting_transformer.files import write_atomically


def continue_greedily(
    model: EvaluatedModel,
    prompts_BT: np.ndarray,
    max_new_tokens: int,
    precision: str = "auto",
    *,
    stop_ids: Sequence[int] = (),
    min_new_tokens: int = 0,
) -> list[str]:
    """The likeliest next token again and again, for prompts of one length; special tokens are left out of the texts.

    Args:
        prompts_BT: token ids `(B, T)`.
        stop_ids: tokens that end a continuation, besides the model's own end-of-text token.
        min_new_tokens: tokens before which nothing ends it.
    """
    tokenizer = model.require_tokenizer()
    # It warns of texts longer than those of training, which are what is asked for here.
    logging.getLogger("transformers.generation.stopping_criteria").setLevel(logging.ERROR)
    own, pad = model.eos_token_ids, tokenizer.pad_token_id
    eos = sorted({*own, *stop_ids})
    input_ids = torch.from_numpy(prompts_BT).to(model.device)
    options: dict[str, Any] = {"min_new_tokens": min_new_tokens} if min_new_tokens else {}
    with precision_context(precision, model.device):
        output = model.model.generate(
            input_ids,
            attention_mask=torch.ones_like(input_ids),
            max_new_tokens=max_new_tokens,
            do_sample=False,
            num_beams=1,
            eos_token_id=eos or None,
            pad_token_id=pad if pad is not None else own[0] if own else 0,
            **options,
        )
    return tokenizer.batch_decode(output[:, input_ids.shape[1] :], skip_special_tokens=True)


def check_settings(
    folder: Path,
    settings: dict[str, Any],
    cure: str = "choose another --save_dir or --model name, or delete the folder",
) -> None:
    """Writes the settings of an evaluation beside its results, or refuses to mix results of others with them.

    Args:
        cure: what to do then.

    Raises:
        EvaluationError: the folder holds results made with other settings; names the first that differs.
    """
    file = folder / "settings.json"
    settings = json.loads(json.dumps(settings))
    if not file.exists() and (folder / "results.json").exists():
        raise EvaluationError(f"{folder}/results.json is of something else, as no settings.json lies beside it: {cure}")
    # What a start left that failed before its first result stands in nobody's way.
    if file.is_file() and any(path.is_file() and path != file for path in folder.rglob("*")):
        stored = read_json(file)
        for key in sorted(stored.keys() | settings.keys()):
            if stored.get(key) != settings.get(key):
                raise EvaluationError(
                    f"{folder} holds results with {key}={stored.get(key)!r}, this evaluation has "
                    f"{settings.get(key)!r}: {cure}"
                )
        return
    write_json(file, settings)


def write_json(file: Path, value: Any) -> None:
    """Writes a file that is whole or not there, and makes its folder."""
    write_text(file, json.dumps(value, indent=1, ensure_ascii=False) + "\n")


def write_text(file: Path, text: str) -> None:
    """The same of a text."""
    file.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(file, text)


def read_records(file: Path) -> list[dict[str, Any]]:
    """The objects of a JSON-lines file; a last line that a crash cut short is left out."""
    if not file.is_file():
        return []
    records = []
    for line in file.read_text(encoding="utf-8", errors="replace").split("\n"):
        try:
            records.append(json.loads(line))
        except json.JSONDecodeError:
            continue
    return records


def append_record(file: Path, record: dict[str, Any]) -> None:
    """Adds a line to a JSON-lines file, after ending one that a crash cut short."""
    file.parent.mkdir(parents=True, exist_ok=True)
    with file.open("ab+") as stream:
        if stream.tell() > 0:
            stream.seek(-1, os.SEEK_END)
            if stream.read(1) != b"\n":
                stream.write(b"\n")
        stream.write(json.dumps(record, ensure_ascii=False).encode() + b"\n")
