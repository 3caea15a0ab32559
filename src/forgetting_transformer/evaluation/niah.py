"""Needle in a haystack: a sentence hidden in a long text, and a question that only this sentence answers.

Standard mode hides the answer alone; easy mode hides the question with it, so that the model meets the very words it is
asked with (Qin et al., 2024; Lin et al., "Forgetting Transformer", ICLR 2025, section 4.3).

    needle    standard: {statement} {answer}.          easy: {question} Answer: {statement} {answer}.
    query     Answer the following question: {question} Answer: {statement}

Everything is counted in tokens of the model under test, and a prompt has exactly the length it is named after: the
beginning-of-sequence token, text, needle and query together. niah_paper.py has the paper's own prompts.

Axes: B prompts, T tokens of a prompt, K tokens of an answer, S = T + K - 1.
"""

import hashlib
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from tqdm import tqdm

from forgetting_transformer.analysis import evaluations, needles, outputs
from forgetting_transformer.evaluation import texts
from forgetting_transformer.evaluation.generation import check_settings, continue_greedily, read_json, write_json
from forgetting_transformer.evaluation.judge import Judge
from forgetting_transformer.evaluation.models import (
    EvaluatedModel,
    EvaluationError,
    fingerprint,
    precision_context,
    resolve,
)
from forgetting_transformer.evaluation.per_token_loss import check_vocabulary, find_heldout, open_heldout
from forgetting_transformer.evaluation.workers import Workers

MODES = ("standard", "easy")
#: Heat-maps that `write_results` draws, each called as its score.
PICTURES = ("words.png", "exact.png")
#: Who writes the ratings.
_JUDGING = "eval/niah/judge_niah.py"
# How far back the needle may move from its depth to the end of a sentence, as a part of the text.
_SENTENCE_REACH = 0.05


@dataclass(frozen=True)
class Needle:
    """What is hidden and asked. The defaults are the sentence of most needle tests.

    Attributes:
        question: what is asked.
        statement: how the answer begins; the query ends with it.
        answer: what the model should continue with.
    """

    question: str = "What is the best thing to do in San Francisco?"
    statement: str = "The best thing to do in San Francisco is"
    answer: str = "eat a sandwich and sit in Dolores Park on a sunny day"

    def text(self, mode: str) -> str:
        """The needle."""
        if mode not in MODES:
            raise EvaluationError(f"--mode={mode!r}; it must be one of {', '.join(MODES)}")
        asked = f"{self.question} Answer: " if mode == "easy" else ""
        return f"\n{asked}{self.statement} {self.answer}.\n"

    @property
    def query(self) -> str:
        return f"\n\nAnswer the following question: {self.question} Answer: {self.statement}"


@dataclass(frozen=True)
class Cell:
    """One prompt of the grid.

    Attributes:
        length: tokens of the prompt.
        depth: where the needle is, 0 (beginning of the text) to 1 (end).
        sample: which stretch of the haystack is used.
    """

    length: int
    depth: float
    sample: int

    @property
    def file_name(self) -> str:
        return f"length_{self.length}_depth_{100 * self.depth:.1f}_sample_{self.sample}.json"


def grid(lengths: Sequence[int], depths: Sequence[float], samples: int) -> list[Cell]:
    """All cells, short prompts first, so that results come early."""
    return [Cell(length, depth, sample) for length in sorted(lengths) for depth in depths for sample in range(samples)]


class Haystack:
    """A long text as token ids.

    Args:
        tokens: `(N,)` ids.
        is_end: `(N,)` bool, True for tokens that end a sentence or a line.
    """

    def __init__(self, tokens: np.ndarray, is_end: np.ndarray) -> None:
        self.tokens, self.is_end = tokens, is_end

    @classmethod
    def from_folder(cls, model: EvaluatedModel, folder: Path) -> "Haystack":
        """All texts of a folder, in the order of their paths, whatever the file system's."""
        return cls.from_text(model, "\n\n".join(texts.read_folder(folder)))

    @classmethod
    def from_text(cls, model: EvaluatedModel, text: str) -> "Haystack":
        """One text."""
        return cls.from_tokens(model, np.array(texts.encode(model, text)))

    @classmethod
    def from_heldout(cls, model: EvaluatedModel, data_path: str, dataset: str, needed: int) -> "Haystack":
        """Held-out documents of a corpus made with the model's tokenizer, as many as make `needed` tokens."""
        data = open_heldout(find_heldout(data_path, dataset), recorded=texts.vocabulary_of_model(model))
        check_vocabulary(model, data)
        documents = min(data.sequences, -(-needed // data.length))
        ids = np.concatenate([data.read(n)[0] for n in range(documents)]).astype(np.int64)
        texts.check_ids(model, ids)
        return cls.from_tokens(model, ids)

    @cached_property
    def digest(self) -> str:
        """A short hash of the text."""
        return hashlib.blake2b(self.tokens.tobytes(), digest_size=8).hexdigest()

    def prompt(self, model: EvaluatedModel, needle: Needle, mode: str, cell: Cell) -> np.ndarray:
        """`build_prompt`."""
        return build_prompt(model, self, needle, mode, cell)

    @classmethod
    def from_tokens(cls, model: EvaluatedModel, ids: np.ndarray) -> "Haystack":
        """A text that is token ids `(N,)` already.

        Raises:
            EvaluationError: there are none.
        """
        if len(ids) == 0:
            raise EvaluationError("the haystack is empty: its files hold no text that the tokenizer can encode")
        kinds, where = np.unique(ids, return_inverse=True)
        pieces = model.require_tokenizer().batch_decode([[int(kind)] for kind in kinds])
        ends = np.array([piece.rstrip(" ").endswith((".", "\n")) for piece in pieces])
        return cls(ids.astype(np.int64), ends[where])

    def take(self, start: int, count: int) -> tuple[np.ndarray, np.ndarray]:
        """`count` tokens from `start` on, and which of them end a sentence; the text begins again where it ends."""
        where = np.arange(start, start + count) % len(self.tokens)
        return self.tokens[where], self.is_end[where]


def build_prompt(model: EvaluatedModel, haystack: Haystack, needle: Needle, mode: str | None, cell: Cell) -> np.ndarray:
    """The prompt of a cell, `(cell.length,)` int64; with `mode` None nothing is hidden in the text.

    The needle goes after the last end of a sentence before its depth, if there is one near.

    Raises:
        EvaluationError: the length has no room for needle, query and some text.
    """
    first = texts.begin(model)
    hidden = "" if mode is None else needle.text(mode)
    needle_ids, query_ids = (np.array(texts.encode(model, text)) for text in (hidden, needle.query))
    room = cell.length - len(first) - len(needle_ids) - len(query_ids)
    if room < 1:
        raise EvaluationError(
            f"a prompt of {cell.length} tokens has no room for text: needle and query alone have "
            f"{cell.length - room}; choose longer --min_length"
        )
    text, is_end = haystack.take(cell.sample * cell.length, room)
    place = round(cell.depth * room)
    if 0 < place < room:
        reach = max(0, place - max(1, round(_SENTENCE_REACH * room)))
        ends = np.flatnonzero(is_end[reach:place])
        place = reach + int(ends[-1]) + 1 if ends.size else place
    return np.concatenate([first, text[:place], needle_ids, text[place:], query_ids]).astype(np.int64)


def answer_losses(
    model: EvaluatedModel, prompts_BT: np.ndarray, answer_K: np.ndarray, precision: str
) -> tuple[Tensor, Tensor]:
    """How surprised a model is by the answer after each prompt, in one forward pass.

    Args:
        answer_K: token ids `(K,)` that should follow every prompt.

    Returns:
        `(B, K)`: the loss of every token of the answer in nats, float64, and whether it is the likeliest one. Greedy
        decoding gives the answer where all are.
    """
    answers_BK = np.broadcast_to(answer_K, (len(prompts_BT), len(answer_K)))
    inputs_BS = np.concatenate([prompts_BT, answers_BK[:, :-1]], axis=1)
    target_BK = torch.from_numpy(answers_BK.copy()).to(model.device)
    with precision_context(precision, model.device):
        logits = model.model(
            input_ids=torch.from_numpy(inputs_BS).to(model.device), use_cache=False, logits_to_keep=len(answer_K)
        ).logits[:, -len(answer_K) :]
    losses_BK = F.cross_entropy(logits.double().transpose(1, 2), target_BK, reduction="none")
    return losses_BK, logits.argmax(-1) == target_BK


def exact_match(prediction: str, answer: str) -> float:
    """1 if the prediction begins with the answer, letter case, punctuation and spaces aside; else 0."""
    wanted = _words(answer)
    return float(_words(prediction)[: len(wanted)] == wanted)


def word_match(prediction: str, answer: str) -> float:
    """Share of the answer's words that the prediction has in the same order, 0 to 1: the longest common subsequence.

    Only as many words of the prediction count as twice the answer has: more would find common words by chance.
    """
    wanted = _words(answer)
    got = _words(prediction)[: 2 * len(wanted)]
    longest = [0] * (len(got) + 1)  # of the answer's words so far and of each beginning of the prediction
    for word in wanted:
        before = longest.copy()
        for i, other in enumerate(got):
            longest[i + 1] = before[i] + 1 if word == other else max(before[i + 1], longest[i])
    return longest[-1] / len(wanted)


def _words(text: str) -> list[str]:
    return re.findall(r"\w+", text.lower())


class Prompts(Protocol):
    """Where prompts come from: a `Haystack`, or `niah_paper.Essays`."""

    digest: str

    def prompt(self, model: EvaluatedModel, needle: Needle, mode: str, cell: Cell) -> np.ndarray:
        """The prompt of a cell as token ids `(T,)`."""


def evaluate(
    model: EvaluatedModel,
    haystack: Prompts,
    cells: Sequence[Cell],
    folder: Path,
    workers: Workers,
    *,
    needle: Needle,
    mode: str,
    max_new_tokens: int = 50,
    batch_size: int = 1,
    precision: str = "auto",
) -> list[dict[str, Any]]:
    """Asks for every cell that has no file yet in `folder/predictions`, and scores all of them.

    Returns:
        A record per cell: length, depth, sample, prediction, `exact` and `words` (0 to 1).
    """
    settings = {
        "weights": fingerprint(model.model),
        "mode": mode,
        **vars(needle),
        "max_new_tokens": max_new_tokens,
        "precision": resolve(precision, workers.device),
        "haystack": haystack.digest,
    }

    def check() -> None:
        evaluations.check_folder(folder, "niah", *PICTURES, "scores.json")
        check_settings(folder, settings)

    workers.on_first(check)
    mine = [cell for n, cell in enumerate(cells) if n // batch_size % workers.world_size == workers.rank]
    todo = [cell for cell in mine if not (folder / "predictions" / cell.file_name).is_file()]
    bar = tqdm(total=len(todo), desc=f"{model.name}, {mode}", unit="prompt", disable=not workers.shows_progress)
    while todo:
        # Prompts of one length only: nothing is padded.
        built = [(cell, haystack.prompt(model, needle, mode, cell)) for cell in todo[:batch_size]]
        batch = [cell for cell, prompt in built if len(prompt) == len(built[0][1])]
        todo = [cell for cell in todo if cell not in batch]
        prompts = np.stack([prompt for cell, prompt in built if cell in batch])
        predictions = continue_greedily(model, prompts, max_new_tokens, precision)
        for cell, prediction in zip(batch, predictions, strict=True):
            write_json(folder / "predictions" / cell.file_name, {**vars(cell), "prediction": prediction})
        bar.update(len(batch))
    bar.close()
    workers.wait()
    records = []
    for cell in cells:
        record = read_json(folder / "predictions" / cell.file_name)
        prediction = record["prediction"]
        scores = {
            "exact": exact_match(prediction, needle.answer),
            "words": word_match(prediction, needle.answer),
        }
        records.append({**record, **scores})
    return records


def judge_records(folder: Path, judge: Judge) -> tuple[int, float]:
    """Rates every record of `folder/scores.json` and writes `judge.json` and `judge.png`.

    Returns:
        How many have no rating, and the mean of the others; NaN where there is none.

    Raises:
        EvaluationError: there are no scores, or the endpoint refuses.
        AnalysisError: the folder holds a file of one of these names that is somebody else's.
    """
    scores, settings = read_json(folder / "scores.json"), read_json(folder / "settings.json")
    outputs.check(folder, _JUDGING, ("judge.json", "judge.png"), _is_old_rating)
    failed = 0
    for record in tqdm(scores["records"], desc="ratings", disable=not sys.stderr.isatty()):
        rating = judge.rate(
            settings["question"], f"{settings['statement']} {settings['answer']}.", record["prediction"]
        )
        record["judge"] = rating
        failed += rating is None
    rated = {**scores, "judge": judge.model}
    with outputs.writing(folder, _JUDGING, _is_old_rating) as new:
        write_json(new / "judge.json", rated)
        mean = needles.draw(evaluations.of_needle(rated, folder), "judge", new / "judge.png")
    return failed, mean


def _is_old_rating(path: Path) -> bool:
    """Whether it lies beside ratings of a version that kept no list of its files."""
    try:
        content = read_json(path.with_name("judge.json"))
    except EvaluationError:
        return False
    return isinstance(content, dict) and {"judge", "records", "lengths", "depths"} <= content.keys()


def write_results(folder: Path, scores: dict[str, Any]) -> tuple[float, float]:
    """Writes the scores of `evaluate` in all their forms, and the heat-map of each.

    Args:
        scores: model, mode, lengths, depths, train_length and records, for scores.json.

    Returns:
        The mean share of the answer's words, and of answers word for word, 0 to 1.
    """
    evaluation = evaluations.from_needle(scores)
    table = evaluations.number_table(evaluation)
    means: list[float] = []

    def write_more(new: Path) -> None:
        write_json(new / "scores.json", scores)
        means.extend(needles.draw(evaluation, Path(name).stem, new / name) for name in PICTURES)

    def draw(path: Path) -> None:
        needles.draw(evaluation, "words", path)

    evaluations.write_evaluation(evaluation, folder, table, draw, write_more)
    words, exact = means
    return words, exact
