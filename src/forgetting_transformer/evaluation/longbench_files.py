"""LongBench in the steps of the paper's repository: answers in files, and scores of what the files hold.

pred/MODEL/<set>.jsonl           the answers, in the order of the examples, and an empty file .jsonl.done beside them
pred/MODEL/result.json           set -> score as the paper's code scores, by the first line of every answer
pred/MODEL/result_benchmark.json set -> score by LongBench's own rules
pred_e/MODEL/…                   the same for LongBench-E, set -> range of lengths -> score
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from forgetting_transformer.evaluation import longbench
from forgetting_transformer.evaluation.generation import check_settings, read_records, write_json, write_text
from forgetting_transformer.evaluation.models import EvaluatedModel, EvaluationError, fingerprint, resolve
from forgetting_transformer.evaluation.workers import Workers

#: result.json's scores are the paper's, those of the other file the benchmark's.
RESULTS = {"result.json": True, "result_benchmark.json": False}


def folder_of(model: str, even: bool) -> Path:
    """Where answers and scores of a model are, below the current folder.

    Raises:
        EvaluationError: the name is a path.
    """
    if model in (".", "..") or "/" in model or "\\" in model:
        raise EvaluationError(f"--model={model!r} names a folder of results; it must not contain a path separator")
    return Path("pred_e" if even else "pred") / model


def answer_sets(
    model: EvaluatedModel,
    folder: Path,
    workers: Workers,
    *,
    sets: Sequence[str],
    data: Path | None,
    max_length: int,
    even: bool = False,
    precision: str = "auto",
    limit: int | None = None,
) -> None:
    """Answers the sets that have no `.jsonl.done` yet; answers of an unfinished set are in `folder/unfinished`.

    Args:
        data, even: as in `longbench.read_examples`.
        max_length: tokens of a prompt.
        limit: examples of each set, for a quick look; None for all.

    Raises:
        EvaluationError: a set's data is missing, or the folder holds answers of other settings.
    """
    todo = [name for name in sets if not _done(folder / f"{name}.jsonl").is_file()]
    if todo:
        longbench.read_examples(todo[0], data, even)  # missing data is said before anything is written
    settings = {"max_length": max_length, "precision": resolve(precision, workers.device), "limit": limit}
    settings = {"weights": fingerprint(model.model), **settings}
    cure = "choose another --model name, or delete the folder"
    workers.on_first(lambda: check_settings(folder, settings, cure))
    for name in todo:
        file = folder / f"{name}.jsonl"
        examples = longbench.read_examples(name, data, even)[:limit]
        parts = folder / "unfinished"
        records = longbench.answer(model, name, examples, max_length, parts, workers, precision, as_in_paper=True)
        if workers.is_first:
            write_text(file, "".join(f"{json.dumps(record, ensure_ascii=False)}\n" for record in records))
            _done(file).touch()
        workers.wait()


def score_sets(folder: Path, even: bool = False) -> tuple[dict[str, dict[str, Any]], list[str]]:
    """Scores every finished set of a folder and writes the files of `RESULTS`.

    Returns:
        File -> its scores, and the paper's sets that are not finished.

    Raises:
        EvaluationError: no set is.
    """
    answers = {name: folder / f"{name}.jsonl" for name in longbench.SETS}
    finished = {name: read_records(file) for name, file in answers.items() if _done(file).is_file()}
    if not any(finished.values()):
        raise EvaluationError(
            f"no finished set in {folder} (<set>.jsonl.done); run pred.py with the same --model first"
        )
    missing = [name for name in longbench.choose_sets(None, even) if name not in finished]
    score = longbench.score_by_length if even else longbench.score
    scores = {
        file: {name: score(name, records, as_in_paper) for name, records in finished.items() if records}
        for file, as_in_paper in RESULTS.items()
    }
    for file, found in scores.items():
        write_json(folder / file, found)
    return scores, missing


def _done(file: Path) -> Path:
    return file.with_name(f"{file.name}.done")
