"""Loss at every position of held-out documents, and its slope.

    L(i) = mean over sequences of -log p(token i | tokens before it)           i from 1, in nats

A model that uses all of its context has an L(i) that falls with i; where it is flat, tokens farther back are of no use
to the model. What tells models apart is therefore the slope of L, not its height, and not the perplexity over a
context, which keeps falling long after L has become flat.

The sums are additive over sequences, so an evaluation that was stopped continues at the next sequence, with any number
of processes. Source: Lin et al., "Forgetting Transformer", ICLR 2025, section 4.

Axes: N sequences, B those of a batch, T positions, O octaves of positions.
"""

import datetime
import itertools
import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset
from tqdm import tqdm

from forgetting_transformer.analysis.evaluations import (
    check_folder,
    from_position_loss,
    write_evaluation,
)
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
from forgetting_transformer.data.worker import hand_over, received
from forgetting_transformer.evaluation.held_out import HeldOut, HeldOutSequences, check_vocabulary
from forgetting_transformer.evaluation.models import (
    EvaluatedModel,
    EvaluationError,
    fingerprint,
    is_own,
    precision_context,
    resolve,
    token_losses,
)
from forgetting_transformer.evaluation.workers import Workers
from forgetting_transformer.files import replacing, write_json
from forgetting_transformer.training.parallel.ranks import Ranks
from forgetting_transformer.training.records.loss_by_position import by_length

#: Shortest context length that results report, as in the paper.
MIN_LENGTH = 512
#: Tokens that the paper evaluates on.
PAPER_TOKENS = 2**31


@dataclass
class Sums:
    """Statistics of the first sequences.

    Attributes:
        loss_T: sum of the loss at each position.
        octaves_NO: mean loss of each sequence in each octave of positions (`octave_edges`): what standard errors, and
            comparisons of models sequence by sequence, are computed from.
    """

    loss_T: np.ndarray
    octaves_NO: np.ndarray

    @property
    def sequences(self) -> int:
        return len(self.octaves_NO)

    @classmethod
    def empty(cls, length: int) -> "Sums":
        return cls(np.zeros(length), np.zeros((0, len(octave_edges(length)) - 1)))


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
    context: int = 1,
) -> dict[str, Any]:
    """Evaluates, or continues an evaluation, and writes `folder/results.json` and `results.npz`.

    Args:
        folder: of this model's results; `state/sums.npz` in it holds the sums so far.
        batch_size: sequences in one forward pass of one process, or of the processes that share sequences.
        precision: "bf16" (autocast over fp32 weights), "fp32" or "auto".
        save_interval: batches of every process between two writes of the state.
        resume: continue from those sums; otherwise start again and replace it.
        context: so many processes share each sequence and have equal parts of it. The results do not depend on it.

    Returns:
        What results.json holds, on every process.

    Raises:
        EvaluationError: the folder holds the state of another evaluation, the corpus was made with another tokenizer,
            sequences cannot be shared like that, or a loss is not finite.
        AnalysisError: the folder holds files of others that this evaluation would replace.
    """
    check_vocabulary(model, data)
    check_context(context, model, data, workers.world_size)
    ranks = Ranks(workers.rank, workers.world_size, context, datetime.timedelta(hours=12))
    own = ranks.part(data.length)
    workers.on_first(lambda: check_folder(folder, "per_token_loss", "results.json", "results.npz", "figure.png"))
    identity = {
        "weights": fingerprint(model.model),
        "data": data.fingerprint,
        "eval_len": data.length,
        "eval_tokens": data.sequences * data.length,
        "precision": resolve(precision, workers.device),
    }
    state_file = folder / "state" / "sums.npz"

    known = workers.on_first(lambda: _read_state(state_file, identity) if resume else None)
    sums = known or Sums.empty(data.length)
    begun = sums.sequences
    octaves_TO = _octave_means(data.length).to(workers.device)
    per_round = ranks.data_size * batch_size
    # What this process adds between two saves.
    most = min(save_interval * per_round, data.sequences - sums.sequences)
    loss_T = torch.zeros(data.length, dtype=torch.float64, device=workers.device)
    octaves_NO = torch.zeros(most, octaves_TO.shape[1], dtype=torch.float64, device=workers.device)
    rounds = math.ceil((data.sequences - sums.sequences) / per_round)
    first = sums.sequences + ranks.data_rank * batch_size
    batches = [
        range(min(begin, data.sequences), min(begin + batch_size, data.sequences))
        for begin in range(first, first + rounds * per_round, per_round)
    ]
    on_gpu = workers.device.type == "cuda"
    ahead = int(on_gpu and isinstance(data, HeldOut))  # a loader of a plug-in may have workers itself
    loader = DataLoader(
        _Batches(data, batches),
        batch_size=None,
        num_workers=ahead,
        collate_fn=hand_over if ahead else None,
        pin_memory=on_gpu,
    )
    bar = tqdm(
        total=data.sequences, initial=sums.sequences, unit="seq", desc=model.name, disable=not workers.shows_progress
    )
    for number, (mine, batch) in enumerate(zip(batches, received(iter(loader)), strict=True), start=1):
        if batch is not None:
            parts = ranks.part_of(batch)
            input_ids, labels = (parts[key].to(workers.device, non_blocking=True) for key in ("input_ids", "labels"))
            with precision_context(precision, workers.device), ranks.share():
                loss_BT = token_losses(model.model, input_ids, labels)
                loss_T[own] += loss_BT.sum(0, dtype=torch.float64)
                begin = mine.start - sums.sequences
                octaves_NO[begin : begin + len(loss_BT)] = loss_BT.double() @ octaves_TO[own]
        bar.update(min(per_round, data.sequences - bar.n))
        if number % save_interval == 0 or number == rounds:
            workers.sum(loss_T)
            workers.sum(octaves_NO)
            done = min(number * per_round + begun, data.sequences) - sums.sequences
            if not bool(loss_T.isfinite().all()):
                raise EvaluationError(
                    f"{model.source}: a loss among sequences {sums.sequences:,} to {sums.sequences + done:,} is not "
                    "finite. The model has diverged, or --precision=bf16 is too coarse for it: try --precision=fp32"
                )
            sums.loss_T += loss_T.cpu().numpy()
            sums.octaves_NO = np.concatenate([sums.octaves_NO, octaves_NO[:done].cpu().numpy()])
            loss_T.zero_()
            octaves_NO.zero_()
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
    length = loss_T.size
    results: dict[str, Any] = {
        "eval_tokens": sums.sequences * length,
        "eval_len": length,
        "model": model.name,
        "source": model.source,
        "train_length": model.train_length,
        "train_tokens": model.train_tokens,
        "seed": model.seed,
        "weights": identity["weights"],
        "data": identity["data"],
        "precision": identity["precision"],
    }
    results |= by_length("val", loss_T, MIN_LENGTH)
    results["loss_standard_error"] = standard_errors(length, sums.octaves_NO)
    results["slope"] = slopes(loss_T.size, sums.octaves_NO)
    return results


def check_context(context: int, model: EvaluatedModel, data: HeldOutSequences, processes: int) -> None:
    """Refuses sequences that so many processes cannot share.

    Raises:
        EvaluationError: naming what does not fit, and what to do.
    """
    if context == 1:
        return
    if processes % context:
        raise EvaluationError(
            f"--context={context} processes share a sequence, and {processes} {'is' if processes == 1 else 'are'} not "
            f"a multiple of {context}: start with torchrun --nproc-per-node {context}"
        )
    if data.length % context:
        raise EvaluationError(
            f"--context={context}: sequences of {data.length:,} tokens have no equal parts for {context} processes; "
            "choose a divisor of --eval_len"
        )
    reasons = ["not a model of this package"]
    if is_own(model.model):
        reasons = model.model.whole_sequence_mixers(context, data.length)
    if reasons:
        raise EvaluationError(
            f"--context={context}: that many processes cannot share a sequence of {model.source} ({', '.join(reasons)})"
        )


class _Batches(IterableDataset):
    """Batches of a loader, which may read them in its own process."""

    def __init__(self, data: HeldOutSequences, batches: Sequence[range]) -> None:
        self.data, self.batches = data, batches

    def __iter__(self) -> Iterator[dict[str, Tensor] | None]:
        return self.data.read_batches(self.batches)


def _octave_means(length: int) -> Tensor:
    """The matrix `(T, O)` that takes losses at positions to means over octaves."""
    edges = octave_edges(length)
    matrix = torch.zeros(length, len(edges) - 1, dtype=torch.float64)
    for o, (begin, end) in enumerate(itertools.pairwise(edges)):
        matrix[begin:end, o] = 1 / (end - begin)
    return matrix


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
        # More tokens than before is no other evaluation: the first sequences are the same.
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
