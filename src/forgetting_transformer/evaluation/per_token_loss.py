"""Loss at every position of held-out documents, and its slope.

    L(i) = mean over sequences of -log p(token i | tokens before it)           i from 1, in nats

A model that uses all of its context has an L(i) that falls with i; where it is flat, tokens farther back are of no use
to the model. What tells models apart is therefore the slope of L, not its height, and not the perplexity over a
context, which keeps falling long after L has become flat.

The sums are additive over sequences, so an evaluation that was stopped continues at the next sequence, with any number
of processes. Source: Lin et al., "Forgetting Transformer", ICLR 2025, section 4.

Axes: N sequences, B those of a batch, T positions, O octaves of positions.
"""

import dataclasses
import itertools
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset
from tqdm import tqdm

from forgetting_transformer.data.decoded_chunks import DecodedChunks, slots_for
from forgetting_transformer.data.errors import DataError
from forgetting_transformer.data.longcrawl64 import check_length, shifted
from forgetting_transformer.data.token_array import TokenArray, read_manifest
from forgetting_transformer.data.vocabulary import Vocabulary, vocabulary_of
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
from forgetting_transformer.training.loss_by_position import PositionSums, by_length

#: Shortest context length that results report, as in the paper.
MIN_LENGTH = 512
#: Tokens that the paper evaluates on.
PAPER_TOKENS = 2**31


@dataclass(frozen=True)
class HeldOut:
    """Sequences of a corpus's held-out documents: `length` tokens each, in the order of the array."""

    array: TokenArray
    bos_token_id: int
    length: int
    sequences: int

    def read(self, sequence: int, kept: DecodedChunks | None = None) -> np.ndarray:
        """Tokens `(1, length)` of one sequence."""
        document, column = divmod(sequence, self.array.doc_len // self.length)
        return self.array.read(document, document + 1, column * self.length, (column + 1) * self.length, kept)


def find_heldout(data_path: str | Path, dataset: str = "longcrawl64") -> Path:
    """The folder that holds `heldout.zarr`: `data_path` itself, or `data_path/dataset`.

    Raises:
        DataError: neither does.
    """
    data_path = Path(data_path).expanduser()
    candidates = [data_path, data_path / dataset]
    if data_path.is_dir():
        inside = [path.parent for path in data_path.glob("*/heldout.zarr")]
        candidates += inside if len(inside) == 1 else []
    for folder in candidates:
        if (folder / "heldout.zarr").is_dir():
            return folder
    raise DataError(
        f"no heldout.zarr in {data_path} and none in {data_path / dataset}: set --data_path to a corpus's folder (or "
        f"to the "
        "folder that holds it, with --dataset its name). docs/prepare_data.md says how to make one"
    )


def open_heldout(
    folder: Path,
    length: int | None = None,
    tokens: int | None = None,
    vocab_size: int | None = None,
    bos_token_id: int | None = None,
    recorded: Vocabulary | None = None,
    at_most: int | None = None,
) -> HeldOut:
    """Opens held-out documents; only `heldout.zarr` need be there.

    Args:
        folder: of the corpus.
        length: tokens in a sequence, a divisor of the documents' length; default whole documents.
        tokens: tokens to evaluate on, rounded down to whole sequences; default all.
        vocab_size, bos_token_id: of the tokenizer that made the corpus; default what its manifest says, or
            LongCrawl64's.
        recorded: of a model that is known to read this corpus, where the corpus does not say.
        at_most: where `tokens` is None, not all tokens but this many, if there are more.

    Raises:
        DataError: naming the flag and what the corpus has.
    """
    found: list[Vocabulary] = []

    def size(doc_len: int) -> int:
        stated = Vocabulary(vocab_size, bos_token_id)
        found.append(vocabulary_of(folder, "heldout", doc_len, read_manifest(folder), stated, recorded, prefix="--"))
        return found[0].size

    array = TokenArray(folder / "heldout.zarr", size)
    length = length or array.doc_len
    check_length("--eval_len", length, array)
    available = array.documents * array.doc_len
    wanted = min(available, at_most or available) if tokens is None else tokens
    if not length <= wanted <= available:
        raise DataError(
            f"--eval_tokens={wanted:,} must be between one sequence ({length:,} tokens) and all {available:,} tokens "
            f"of {array.path}; --eval_tokens all takes them all"
        )
    return HeldOut(array, found[0].bos_token_id, length, wanted // length)


def check_vocabulary(model: EvaluatedModel, data: HeldOut) -> None:
    """Refuses a corpus of another tokenizer than the model's, whose losses would mean nothing.

    Raises:
        EvaluationError: saying in what the two differ, their sizes or their BOS tokens.
    """
    from forgetting_transformer.model_tokenizer import check_size_and_bos

    vocab_size, bos = model.model.config.get_text_config().vocab_size, model.bos_token_id
    if bos is not None and bos >= vocab_size:  # a default of transformers for another vocabulary
        bos = None
    try:
        check_size_and_bos(data.array.vocab_size, data.bos_token_id, vocab_size, bos)
    except ValueError as error:
        raise EvaluationError(
            f"the corpus {data.array.path} was made with another tokenizer than {model.source} reads: {error}"
        ) from error


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


def octave_edges(length: int) -> list[int]:
    """Edges [0, …, length/4, length/2, length) of position ranges that each double the one before; the first is short."""
    edges = [length]
    while edges[0] >= 16:
        edges.insert(0, edges[0] // 2)
    return [0, *edges]


def evaluate(
    model: EvaluatedModel,
    data: HeldOut,
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
        What results.json holds, on every process.

    Raises:
        EvaluationError: the folder holds the state of another evaluation, the corpus was made with another tokenizer,
            or a loss is not finite.
    """
    check_vocabulary(model, data)
    identity = {
        "weights": fingerprint(model.model),
        "data": data.array.fingerprint,
        "eval_len": data.length,
        "eval_tokens": data.sequences * data.length,
        "precision": resolve(precision, workers.device),
    }
    state_file = folder / "state" / "sums.npz"

    def known_sums() -> Sums | None:
        _move_old_state(folder / "state.npz", state_file)
        return _read_state(state_file, identity) if resume else None

    sums = workers.on_first(known_sums) or Sums.empty(data.length)
    begun = sums.sequences
    octaves = _octave_means(data.length).to(workers.device)
    per_round = workers.world_size * batch_size
    # One tensor for all sums, so that the processes meet once per save.
    part = _Part.zeros(data.length, save_interval * per_round, octaves.shape[1], workers.device)
    rounds = math.ceil((data.sequences - sums.sequences) / per_round)
    first = sums.sequences + workers.rank * batch_size
    batches = [
        range(min(begin, data.sequences), min(begin + batch_size, data.sequences))
        for begin in range(first, first + rounds * per_round, per_round)
    ]
    on_gpu = workers.device.type == "cuda"
    loader = DataLoader(
        _Batches(data, batches), batch_size=None, shuffle=False, num_workers=int(on_gpu), pin_memory=on_gpu
    )
    bar = tqdm(
        total=data.sequences, initial=sums.sequences, unit="seq", desc=model.name, disable=not workers.shows_progress
    )
    for number, (mine, batch) in enumerate(zip(batches, loader, strict=True), start=1):
        if batch is not None:
            input_ids, labels = (batch[key].to(workers.device, non_blocking=True) for key in ("input_ids", "labels"))
            with precision_context(precision, workers.device):
                part.add(token_losses(model.model, input_ids, labels), octaves, mine.start - sums.sequences)
        bar.update(min(per_round, data.sequences - bar.n))
        if number % save_interval == 0 or number == rounds:
            workers.sum(part.flat)
            done = min(number * per_round + begun, data.sequences) - sums.sequences
            if not bool(torch.isfinite(part.flat).all()):
                raise EvaluationError(
                    f"{model.source}: a loss among sequences {sums.sequences:,} to {sums.sequences + done:,} is not "
                    "finite. The model has diverged, or --precision=bf16 is too coarse for it: try --precision=fp32"
                )
            part.move_to(sums, done)
            if workers.is_first:
                _write_state(state_file, sums, identity)
    bar.close()
    results = summarise(sums, model, identity)
    if workers.is_first:
        _write_results(folder, results, sums)
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
        "weights": identity["weights"],
        "data": identity["data"],
        "precision": identity["precision"],
    }
    results |= by_length("val", loss_T, MIN_LENGTH)
    results["slope"] = [vars(entry) for entry in slopes(sums)]
    return results


@dataclass(frozen=True)
class Slope:
    """How fast L falls around one position.

    Attributes:
        position: i; the octaves [i/2, i) and [i, 2i) are compared.
        before, after: mean loss in each, nats.
        per_doubling: after - before, nats: negative where the model profits from a context of i to 2i tokens.
        standard_error: of that, from the differences within sequences; None for a single sequence.
        per_token: dL/di, the same divided by the distance of the octaves' centres, nats per token.
    """

    position: int
    before: float
    after: float
    per_doubling: float
    standard_error: float | None
    per_token: float


def slopes(sums: Sums) -> list[Slope]:
    """The slope of L between every two neighbouring octaves. Sequences count as independent."""
    edges, mean_O = octave_edges(sums.loss_T.size), sums.octaves_NO.mean(0)
    found = []
    for o in range(len(mean_O) - 1):
        change, error = _mean_and_error(sums.octaves_NO[:, o + 1] - sums.octaves_NO[:, o])
        distance = (edges[o + 2] - edges[o]) / 2
        found.append(Slope(edges[o + 1], float(mean_O[o]), float(mean_O[o + 1]), change, error, change / distance))
    return found


def _mean_and_error(values_N: np.ndarray) -> tuple[float, float | None]:
    """The mean and its standard error, None for a single value."""
    n = len(values_N)
    return float(values_N.mean()), float(values_N.std(ddof=1) / math.sqrt(n)) if n > 1 else None


@dataclass(frozen=True)
class Result:
    """One evaluation as read back from its folder; `octaves_NO` as in `Sums`, None in files of other programs."""

    name: str
    loss_T: np.ndarray
    summary: dict[str, Any]
    octaves_NO: np.ndarray | None = None


def read_result(path: Path, name: str | None = None) -> Result:
    """Reads a result: its folder, its `results.npz`, or a folder above exactly one such file.

    Raises:
        EvaluationError: there is none, there are several, or it is damaged.
    """
    file = path
    if path.is_dir():
        files = sorted(path.rglob("results.npz"))
        if len(files) != 1:
            listed = ", ".join(str(f.parent) for f in files) or "none"
            raise EvaluationError(f"{path}: expected one results.npz in or under it, found {listed}; name one of them")
        file = files[0]
    try:
        with np.load(file, allow_pickle=False) as arrays:
            loss_T = np.asarray(arrays["val/loss_per_token"], dtype=np.float64)
            octaves_NO = arrays.get("val/loss_per_octave")
    except (OSError, ValueError, KeyError, EOFError) as error:
        raise EvaluationError(f"{file}: cannot read the array 'val/loss_per_token' ({error})") from error
    summary_file = file.with_suffix(".json")
    summary = json.loads(summary_file.read_text(encoding="utf-8")) if summary_file.is_file() else {}
    return Result(name or summary.get("model") or file.parent.name, loss_T, summary, octaves_NO)


def read_named(text: str) -> Result:
    """Reads `[NAME=]PATH`, as on a command line."""
    name, separator, path = text.partition("=")
    return read_result(Path(path), name) if separator and not Path(text).exists() else read_result(Path(text))


def group_seeds(results: Sequence[Result]) -> dict[str, np.ndarray]:
    """Curves for a figure: `(T,)` for a name that occurs once, `(seeds, T)` for one that occurs again.

    Raises:
        EvaluationError: seeds of one model have curves of different lengths.
    """
    curves: dict[str, list[np.ndarray]] = {}
    for result in results:
        curves.setdefault(result.name, []).append(result.loss_T)
    for name, losses in curves.items():
        if len({loss.size for loss in losses}) > 1:
            raise EvaluationError(
                f"the results called {name!r} have {', '.join(str(loss.size) for loss in losses)} positions: seeds of "
                f"one "
                "model must be evaluated at one length. Give different models different names, NAME=FOLDER"
            )
    return {name: losses[0] if len(losses) == 1 else np.stack(losses) for name, losses in curves.items()}


def name_documents(results: Sequence[Result]) -> list[Result]:
    """The results, with names that say on what they were evaluated if that is not the same for all.

    Curves over other documents differ by more than models do.
    """
    seen = {(result.summary.get("data"), result.summary.get("eval_tokens")) for result in results}
    if len(seen) <= 1:
        return list(results)
    corpora = {data for data, _ in seen}
    named = []
    for result in results:
        data, tokens = result.summary.get("data"), result.summary.get("eval_tokens")
        on = ["tokens not known" if tokens is None else f"{tokens:,} tokens"]
        on += [f"corpus {str(data)[:6]}"] if len(corpora) > 1 and data else []
        named.append(dataclasses.replace(result, name=f"{result.name} ({', '.join(on)})"))
    return named


def unique_names(results: Sequence[Result]) -> dict[str, dict[str, Any]]:
    """Summaries by name, numbered where a name occurs again."""
    named: dict[str, dict[str, Any]] = {}
    for result in results:
        number = 1
        while (name := result.name if number == 1 else f"{result.name} ({number})") in named:
            number += 1
        named[name] = result.summary
    return named


def slope_table(results: Mapping[str, Mapping[str, Any]]) -> str:
    """Markdown: the slope of every model at every power-of-two fraction of its length, with standard errors."""
    lines = [
        "| Model | at position i | loss in [i/2, i) | loss in [i, 2i) | change per doubling (nats) | dL/di (nats per "
        "1,000 tokens) |",
        "|---|---:|---:|---:|---:|---:|",
    ]
    for name, summary in results.items():
        for entry in summary.get("slope", []):
            change = _with_error(entry["per_doubling"], entry["standard_error"])
            lines.append(
                f"| {name} | {entry['position']:,} | {entry['before']:.4f} | {entry['after']:.4f} | {change} | "
                f"{1000 * entry['per_token']:+.4f} |"
            )
    return "\n".join(lines) + "\n"


def compare(results: Sequence[Result], from_position: int = 1) -> list[dict[str, Any]]:
    """Every model against the first, sequence by sequence; nothing of a model that was not evaluated on the same sequences.

    Documents differ much more than models do. On the same documents that cancels, so a difference of two models is
    known much better than either model's slope. Results of one name are seeds, and are averaged first.

    Args:
        results: of at least one model.
        from_position: octaves that begin before it are left out.

    Returns:
        Per model and octave `begin` to `end` of positions: the mean difference in `loss`, and in its `change` from the
        octave before (nats), each with its standard error over sequences, which is None for a single one.
    """
    by_name: dict[str, list[Result]] = {}
    for result in results:
        by_name.setdefault(result.name, []).append(result)
    first, *others = by_name
    rows = []
    for name in others:
        group = by_name[first] + by_name[name]
        same = {
            (r.summary.get("data"), r.loss_T.size, None if r.octaves_NO is None else len(r.octaves_NO)) for r in group
        }
        if len(same) > 1 or None in next(iter(same)):
            continue
        edges = octave_edges(group[0].loss_T.size)
        one, two = (
            np.mean([r.octaves_NO for r in by_name[key] if r.octaves_NO is not None], axis=0) for key in (first, name)
        )
        difference_NO = two - one
        for o in (o for o in range(1, difference_NO.shape[1]) if edges[o] >= from_position):
            row = {"model": name, "against": first, "begin": int(edges[o]), "end": int(edges[o + 1])}
            row["loss"], row["loss_error"] = _mean_and_error(difference_NO[:, o])
            row["change"], row["change_error"] = _mean_and_error(difference_NO[:, o] - difference_NO[:, o - 1])
            rows.append(row)
    return rows


def comparison_table(rows: Sequence[Mapping[str, Any]]) -> str:
    """Markdown of what `compare` found; "" if that is nothing."""
    lines = [
        "| Model | against | positions | difference in loss (nats) | difference in change per doubling (nats) |",
        "|---|---|---|---:|---:|",
    ]
    for row in rows:
        loss, change = (_with_error(row[key], row[f"{key}_error"]) for key in ("loss", "change"))
        positions = f"{row['begin']:,} to {row['end']:,}"
        lines.append(f"| {row['model']} | {row['against']} | {positions} | {loss} | {change} |")
    return "\n".join(lines) + "\n" if rows else ""


def check_extrapolates(model: EvaluatedModel, data: HeldOut) -> None:
    """Refuses an evaluation that never goes beyond the training length.

    Raises:
        EvaluationError: that, or the training length is not known.
    """
    if model.train_length is None:
        raise EvaluationError(f"{model.source} does not say at which sequence length it was trained: set --train_len")
    if data.length <= model.train_length:
        raise EvaluationError(
            f"--preset=extrapolation: documents of {data.array.path} have {data.length:,} tokens and {model.source} "
            f"was trained on {model.train_length:,}; choose a corpus of longer documents"
        )


def extrapolation_table(results: Mapping[str, Mapping[str, Any]]) -> str:
    """Markdown: what every doubling of the context from the training length on does to the loss.

    A change counts as one where it is more than two standard errors.
    """
    lines = [
        "| Model | trained at | context from → to | loss before → after (nats) | change (nats) | |",
        "|---|---:|---|---|---:|---|",
    ]
    for name, summary in results.items():
        train_length = summary["train_length"]
        for entry in summary["slope"]:
            if entry["position"] < train_length:
                continue
            error, change = entry["standard_error"], entry["per_doubling"]
            verdict = "one sequence: no standard error"
            if error is not None:
                falls = "falls: the added context helps" if change < 0 else "rises: the added context hurts"
                verdict = falls if abs(change) > 2 * error else "flat within two standard errors"
            lines.append(
                f"| {name} | {train_length:,} | {entry['position']:,} → {2 * entry['position']:,} | "
                f"{entry['before']:.4f} → {entry['after']:.4f} | {_with_error(change, error)} | {verdict} |"
            )
    return "\n".join(lines) + "\n"


def _with_error(value: float, error: float | None) -> str:
    return f"{value:+.4f}" if error is None else f"{value:+.4f} ± {error:.4f}"


class _Batches(Dataset):
    """Batch number of this process -> inputs and labels; None where the others have work and this one has not."""

    def __init__(self, data: HeldOut, batches: Sequence[range]) -> None:
        self.data, self.batches = data, batches
        # Documents that follow each other share chunks, and all their columns are read. One process reads.
        array, longest = data.array, max(map(len, batches), default=1)
        slots = slots_for(array.chunk_shape, max(1, longest), array.doc_len, array.doc_len, array.stored_documents)
        self.kept = DecodedChunks(array.chunk_shape, slots, None)

    def __len__(self) -> int:
        return len(self.batches)

    def __getitem__(self, number: int) -> dict[str, Tensor] | None:
        sequences = self.batches[number]
        if not sequences:
            return None
        return shifted(np.concatenate([self.data.read(n, self.kept) for n in sequences]), self.data.bos_token_id)


class _Part:
    """What this process adds between two saves, as views into one float64 vector on the device."""

    def __init__(self, flat: Tensor, length: int, octaves: int) -> None:
        self.flat = flat
        sums, rows = flat.split([length + 1, flat.numel() - length - 1])
        self._sums = PositionSums(sums)
        self._octaves_NO = rows.view(-1, octaves)

    @classmethod
    def zeros(cls, length: int, sequences: int, octaves: int, device: torch.device) -> "_Part":
        flat = torch.zeros(length + 1 + sequences * octaves, dtype=torch.float64, device=device)
        return cls(flat, length, octaves)

    def add(self, loss_BT: Tensor, octaves_TO: Tensor, first: int) -> None:
        """Adds sequences, the first of which is number `first` since the last save."""
        self._sums.add(loss_BT)
        self._octaves_NO[first : first + len(loss_BT)] = loss_BT.double() @ octaves_TO

    def move_to(self, sums: Sums, sequences: int) -> None:
        sums.loss_T += self._sums.loss_T.cpu().numpy()
        sums.octaves_NO = np.concatenate([sums.octaves_NO, self._octaves_NO[:sequences].cpu().numpy()])
        self.flat.zero_()


def _octave_means(length: int) -> Tensor:
    """The matrix `(T, O)` that takes losses at positions to means over octaves."""
    edges = octave_edges(length)
    matrix = torch.zeros(length, len(edges) - 1, dtype=torch.float64)
    for o, (begin, end) in enumerate(itertools.pairwise(edges)):
        matrix[begin:end, o] = 1 / (end - begin)
    return matrix


def _move_old_state(old: Path, file: Path) -> None:
    """Earlier versions kept the sums beside the results, where programs that expect a single npz file met two."""
    if old.is_file() and not file.exists():
        file.parent.mkdir(exist_ok=True)
        old.replace(file)


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
                f"another "
                "--save_dir or --model name, or start again with --no-resume"
            )
    if sums.sequences * identity["eval_len"] > identity["eval_tokens"]:
        raise EvaluationError(
            f"{file} already covers {sums.sequences * identity['eval_len']:,} tokens, more than "
            f"--eval_tokens={identity['eval_tokens']:,}; ask for at least as many (--eval_tokens all), or start again "
            f"with "
            "--no-resume"
        )
    return sums


def _write_state(file: Path, sums: Sums, identity: dict[str, Any]) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    _savez(file, identity=json.dumps(identity), **vars(sums))


def _write_results(folder: Path, results: dict[str, Any], sums: Sums) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    numbers = {key: value for key, value in results.items() if isinstance(value, (int, float))}
    arrays = {"val/loss_per_token": sums.loss_T / sums.sequences, "val/loss_per_octave": sums.octaves_NO}
    _savez(folder / "results.npz", **numbers, **arrays)
    write_json(folder / "results.json", results)


def _savez(file: Path, **arrays: Any) -> None:
    with replacing(file) as stream:
        np.savez(stream, **arrays)
