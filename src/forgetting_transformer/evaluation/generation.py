"""Greedy continuations of prompts, in files that several processes may fill and a later start continues."""

import json
import logging
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tqdm import tqdm

from forgetting_transformer.analysis import evaluations, outputs
from forgetting_transformer.evaluation.models import (
    EvaluatedModel,
    EvaluationError,
    fingerprint,
    precision_context,
    resolve,
)
from forgetting_transformer.evaluation.workers import Workers
from forgetting_transformer.files import write_json


def continue_prompts(
    model: EvaluatedModel, prompts_BT: np.ndarray, max_new_tokens: int, precision: str = "auto"
) -> list[str]:
    """Greedy continuations of prompts of one length, without special tokens.

    Args:
        prompts_BT: token ids `(B, T)`.
    """
    tokenizer = model.require_tokenizer()
    # transformers warns of texts longer than those of training, which are intended here.
    logging.getLogger("transformers.generation.stopping_criteria").setLevel(logging.ERROR)
    own, pad = model.eos_token_ids, tokenizer.pad_token_id
    input_ids = torch.from_numpy(prompts_BT).to(model.device)
    with precision_context(precision, model.device):
        output = model.model.generate(
            input_ids,
            attention_mask=torch.ones_like(input_ids),
            max_new_tokens=max_new_tokens,
            do_sample=False,
            num_beams=1,
            eos_token_id=own or None,
            pad_token_id=pad if pad is not None else own[0] if own else 0,
        )
    return tokenizer.batch_decode(output[:, input_ids.shape[1] :], skip_special_tokens=True)


def answer(
    model: EvaluatedModel,
    file: Path,
    keys: Sequence[str],
    prompt_of: Callable[[int], np.ndarray],
    max_new_tokens: int,
    workers: Workers,
    precision: str,
    batch_size: int = 1,
) -> list[str]:
    """The answers to numbered prompts, in their order; prompts that some process has answered are not asked again.

    Every process adds lines to its own file, `<file>.<rank>.jsonl`.

    Args:
        keys: of the prompts, which lines name.
        prompt_of: token ids `(T,)` of a prompt by its number.
        batch_size: prompts in one batch; only those of one length share it, so that nothing is padded.

    Raises:
        EvaluationError: an answer is missing, which another process should have written.
    """

    def known() -> dict[str, str]:
        files = sorted(file.parent.glob(f"{file.name}.*.jsonl"))
        return {record["key"]: record["pred"] for one in files for record in read_records(one)}

    before = known()
    mine = [n for n in range(len(keys)) if n // batch_size % workers.world_size == workers.rank]
    todo = [n for n in mine if keys[n] not in before]
    bar = tqdm(total=len(todo), desc=f"{model.name}, {file.name}", unit="answer", disable=not workers.shows_progress)
    while todo:
        built = {n: prompt_of(n) for n in todo[:batch_size]}
        batch = [n for n in built if len(built[n]) == len(built[todo[0]])]
        todo = [n for n in todo if n not in batch]
        prompts_BT = np.stack([built[n] for n in batch])
        texts = continue_prompts(model, prompts_BT, max_new_tokens, precision)
        for n, text in zip(batch, texts, strict=True):
            own = file.with_name(f"{file.name}.{workers.rank}.jsonl")
            append_record(own, {"key": keys[n], "pred": text})
        bar.update(len(batch))
    bar.close()
    workers.wait()
    found = known()
    if missing := [key for key in keys if key not in found]:
        raise EvaluationError(f"{file}: {len(missing)} answers are missing, as that to {missing[0]}; start again")
    return [found[key] for key in keys]


def begin(
    model: EvaluatedModel,
    folder: Path,
    workers: Workers,
    precision: str,
    settings: Mapping[str, Any],
    kind: str = "",
    own: Sequence[str] = (),
) -> dict[str, Any]:
    """Continues an evaluation in a folder, or makes the folder; every process calls it.

    Args:
        settings: all that its results depend on, besides the weights and the precision.
        kind: of the evaluation, if it writes what `write_evaluation` does, and `own` files besides.

    Returns:
        All settings.

    Raises:
        EvaluationError: the folder holds results that were made with other settings, or files of others.
    """
    known = {"weights": fingerprint(model.model), "precision": resolve(precision, workers.device), **settings}

    def check() -> None:
        if kind:
            outputs.check(folder, kind, [*evaluations.FILES, *own])
        check_settings(folder, known)

    workers.on_first(check)
    return known


def check_settings(folder: Path, settings: dict[str, Any]) -> None:
    """Writes the settings of an evaluation beside its results, or refuses to mix them with those of others; makes the
    folder.

    Raises:
        EvaluationError: the folder holds results made with other settings; names the first that differs.
    """
    file, cure = folder / "settings.json", "choose another --model name, --exp or folder, or delete this one"
    settings = json.loads(json.dumps(settings))
    if not file.exists() and (folder / "results.json").exists():
        raise EvaluationError(f"{folder}/results.json has no settings.json beside it, so it is of others: {cure}")
    # Files of a start that failed before its first result may be replaced.
    if file.is_file() and any(path.is_file() and path != file for path in folder.rglob("*")):
        stored = evaluations.read_json(file)
        for key in sorted(stored.keys() | settings.keys()):
            if stored.get(key) != settings.get(key):
                raise EvaluationError(
                    f"{folder} holds results with {key}={stored.get(key)!r}, this evaluation has "
                    f"{settings.get(key)!r}: {cure}"
                )
        return
    folder.mkdir(parents=True, exist_ok=True)
    write_json(file, settings)


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
        stream.write(json.dumps(record, ensure_ascii=False).encode(errors="backslashreplace") + b"\n")
