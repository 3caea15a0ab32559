"""Loss at every position of held-out documents, and its slope.

    L(i) = mean over sequences of -log p(token i | tokens before it)           i from 1, in nats

A model that uses all of its context has an L(i) that falls with i; where it is flat, tokens farther back are of no use
to the model. So compare models by the slope of L, not by its height, and not by the perplexity over a context, which
keeps falling long after L has become flat.

The sums are additive over sequences, so an evaluation that was stopped continues at the next sequence, with any number
of processes. Source: Lin et al., "Forgetting Transformer", ICLR 2025, section 4.

Axes: N sequences, B those of a batch, T positions, O octaves of positions.
"""

import itertools
import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from tqdm import tqdm

from forgetting_transformer.analysis import outputs
from forgetting_transformer.analysis.evaluations import FILES, from_position_loss, write_evaluation
from forgetting_transformer.analysis.plots.losses import loss_against_position
from forgetting_transformer.analysis.position_loss import (
    GROUP_OF_SEQUENCE,
    LOSS_PER_OCTAVE,
    LOSS_PER_TOKEN,
    made_with,
    octave_edges,
    slopes,
    standard_errors,
)
from forgetting_transformer.evaluation.held_out import HeldOutSequences, check_vocabulary
from forgetting_transformer.evaluation.models import (
    EvaluatedModel,
    EvaluationError,
    fingerprint,
    precision_context,
    resolve,
    token_losses,
)
from forgetting_transformer.evaluation.workers import Workers
from forgetting_transformer.files import replacing, write_json
from forgetting_transformer.training.records.loss_by_position import by_length

T = TypeVar("T")
#: Shortest context length that results report, as in the paper.
MIN_LENGTH = 512
#: Tokens that the paper evaluates on.
PAPER_TOKENS = 2**31


@dataclass
class Sums:
    """Statistics of the first sequences.

    Attributes:
        loss_T: sum of the loss at each position.
        octaves_NO: mean loss of each sequence in each octave of positions (`octave_edges`), for standard errors and for
            comparisons of models sequence by sequence.
    """

    loss_T: np.ndarray
    octaves_NO: np.ndarray

    @property
    def sequences(self) -> int:
        return len(self.octaves_NO)


def evaluate(
    model: EvaluatedModel,
    data: HeldOutSequences,
    folder: Path,
    workers: Workers,
    *,
    batch_size: int = 1,
    precision: str = "auto",
    save_interval: int = 64,
    resume: bool = True,
) -> dict[str, Any]:
    """Evaluates, or continues an evaluation, and writes `folder/results.json` and `results.npz`.

    Args:
        folder: of this model's results; `state/sums.npz` in it holds the sums so far.
        batch_size: sequences in one forward pass of one process.
        precision: "bf16" (autocast over fp32 weights), "fp32" or "auto".
        save_interval: batches of every process between two writes of the state.
        resume: continue from those sums; otherwise start again and replace it.

    Returns:
        The contents of results.json, on every process.

    Raises:
        EvaluationError: the folder holds the state of another evaluation, the corpus was made with another tokenizer,
            or a loss is not finite.
        AnalysisError: the folder holds files of others that this evaluation would replace.
    """
    check_vocabulary(model, data)
    files = [*FILES, "results.json", "results.npz", "figure.png"]
    workers.on_first(lambda: outputs.check(folder, "per_token_loss", files))
    identity = {
        "weights": fingerprint(model.model),
        "data": data.fingerprint,
        "eval_len": data.length,
        "eval_tokens": data.sequences * data.length,
        "precision": resolve(precision, workers.device),
    }
    state_file = folder / "state" / "sums.npz"

    known = workers.on_first(lambda: _read_state(state_file, identity) if resume else None)
    widths = np.diff(octave_edges(data.length)).tolist()
    sums = known or Sums(np.zeros(data.length), np.zeros((0, len(widths))))
    per_round = workers.world_size * batch_size
    starts = range(sums.sequences, data.sequences, per_round)
    edges = [[min(start + (workers.rank + n) * batch_size, data.sequences) for n in (0, 1)] for start in starts]
    batches = [range(*edge) for edge in edges]
    # Sums of this process between two saves; sequences of the others stay zero.
    loss_T = torch.zeros(data.length, dtype=torch.float64, device=workers.device)
    octaves_NO = torch.zeros(data.sequences, len(widths), dtype=torch.float64, device=workers.device)
    bar = tqdm(
        total=data.sequences, initial=sums.sequences, unit="seq", desc=model.name, disable=not workers.shows_progress
    )
    for start, mine, batch in zip(starts, batches, _read_ahead(data.read_batches(batches)), strict=True):
        if batch is not None:
            input_ids, labels = (batch[key].to(workers.device) for key in ("input_ids", "labels"))
            with precision_context(precision, workers.device):
                loss_BT = token_losses(model.model, input_ids, labels)
                loss_T += loss_BT.sum(0, dtype=torch.float64)
                octaves = [part.mean(1, dtype=torch.float64) for part in loss_BT.split(widths, dim=1)]
                octaves_NO[mine.start : mine.stop] = torch.stack(octaves, dim=1)
        end = min(start + per_round, data.sequences)
        bar.update(end - start)
        if end == data.sequences or end - sums.sequences == save_interval * per_round:
            added = workers.sum(octaves_NO[sums.sequences : end])
            if not bool(workers.sum(loss_T).isfinite().all()):
                raise EvaluationError(
                    f"{model.source}: a loss among sequences {sums.sequences:,} to {end:,} is not finite. The model "
                    "has diverged, or --precision=bf16 is too coarse for it: try --precision=fp32"
                )
            sums.loss_T += loss_T.cpu().numpy()
            sums.octaves_NO = np.concatenate([sums.octaves_NO, added.cpu().numpy()])
            loss_T.zero_()
            if workers.is_first:
                state_file.parent.mkdir(parents=True, exist_ok=True)
                _savez(state_file, identity=json.dumps(identity), **vars(sums))
    bar.close()
    results = summarise(sums, model, identity) | {"corpus": data.corpus}
    if workers.is_first:
        _write_results(folder, results, sums, data.groups())
    return results


def summarise(sums: Sums, model: EvaluatedModel, identity: dict[str, Any]) -> dict[str, Any]:
    """The content of results.json: the paper's keys, what was evaluated, and the slope at every octave."""
    loss_T = sums.loss_T / sums.sequences
    results = identity | {"model": model.name, "seed": model.seed} | model.about
    results |= by_length("val", loss_T, MIN_LENGTH)
    results["loss_standard_error"] = standard_errors(loss_T.size, sums.octaves_NO)
    results["slope"] = slopes(loss_T.size, sums.octaves_NO)
    return results


def _read_ahead(batches: Iterator[T]) -> Iterator[T]:
    """Yields the batches; a thread reads the next one ahead."""
    with ThreadPoolExecutor(1) as reader:
        ahead = reader.submit(list, itertools.islice(batches, 1))
        while batch := ahead.result():
            ahead = reader.submit(list, itertools.islice(batches, 1))
            yield from batch


def _read_state(file: Path, identity: dict[str, Any]) -> Sums | None:
    if not file.is_file():
        return None
    try:
        with np.load(file, allow_pickle=False) as arrays:
            stored = json.loads(str(arrays["identity"]))
            sums = Sums(arrays["loss_T"].copy(), arrays["octaves_NO"].copy())
    except (OSError, ValueError, KeyError, EOFError) as error:
        raise EvaluationError(f"{file} is damaged ({error}); delete it to start this evaluation again") from error
    for key, value in identity.items():
        # With more tokens the evaluation is the same, since the first sequences are.
        if key != "eval_tokens" and stored.get(key) != value:
            raise EvaluationError(
                f"{file} belongs to an evaluation with {key}={stored.get(key)!r}, this one has {value!r}: choose "
                "another --save_dir or --model name, or start again with --no-resume"
            )
    if sums.sequences * identity["eval_len"] > identity["eval_tokens"]:
        raise EvaluationError(
            f"{file} already covers {sums.sequences * identity['eval_len']:,} tokens, more than "
            f"--eval_tokens={identity['eval_tokens']:,}; ask for at least as many (--eval_tokens all), or start again "
            "with --no-resume"
        )
    return sums


def _write_results(folder: Path, results: dict[str, Any], sums: Sums, group_N: np.ndarray | None) -> None:
    numbers = {key: value for key, value in results.items() if isinstance(value, (int, float))}
    arrays = {LOSS_PER_TOKEN: sums.loss_T / sums.sequences, LOSS_PER_OCTAVE: sums.octaves_NO}
    if group_N is not None:
        arrays[GROUP_OF_SEQUENCE] = group_N

    def write_more(new: Path) -> None:
        _savez(new / "results.npz", **numbers, **arrays)
        write_json(new / "results.json", results)
        curve = {results["model"]: arrays[LOSS_PER_TOKEN]}
        loss_against_position(curve, new / "figure.png", results["train_length"], conditions=made_with([results]))

    write_evaluation(from_position_loss(results), folder, write_more)


def _savez(file: Path, **arrays: Any) -> None:
    with replacing(file) as stream:
        np.savez(stream, **arrays)
