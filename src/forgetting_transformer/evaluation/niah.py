"""Needle in a haystack: a sentence hidden in a long text, and a question that only this sentence answers.

Standard mode hides the answer alone; easy mode hides the question with it, so that the model meets the very words it is
asked with (Qin et al., 2024; Lin et al., "Forgetting Transformer", ICLR 2025, section 4.3).

    needle    standard: {statement} {answer}.          easy: {question} Answer: {statement} {answer}.
    query     Answer the following question: {question} Answer: {statement}

Two kinds of prompts:

- `Haystack` counts in tokens of the model under test. A prompt has exactly the length it is named after: the
  beginning-of-sequence token, text, needle and query together.
- `Essays` makes the paper's (modes paper and paper_easy; zhixuan-lin/forgetting-transformer, eval/niah). The essays are
  joined without anything between them and cut to L tokens, of which the beginning-of-sequence token is one, then
  shortened so that with the needle they have L - 200. The needle follows the last token "." before its depth. As text,
  the quiz sentence and the question come after it. A prompt named after L therefore has about L - 200 tokens and those
  of the quiz, which are 59 with GPT-2's vocabulary.

The paper's essays are Paul Graham's, which have no free licence. Without a text, the haystack is the reference
documentation that comes with Python.
"""

import hashlib
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from forgetting_transformer import model_tokenizer
from forgetting_transformer.analysis import evaluations
from forgetting_transformer.analysis.plots.heatmaps import draw_needles
from forgetting_transformer.evaluation import texts
from forgetting_transformer.evaluation.generation import check_settings, continue_greedily, write_json
from forgetting_transformer.evaluation.models import EvaluatedModel, EvaluationError, fingerprint, resolve
from forgetting_transformer.evaluation.workers import Workers

MODES = ("standard", "easy")
#: The paper's modes -> which needle is hidden.
PAPER_MODES = {"paper": "standard", "paper_easy": "easy"}
PAPER_NEW_TOKENS = 1024
ESSAYS = "PaulGrahamEssays"
#: Heat-maps, each called as its score.
_PICTURES = ("words.png", "exact.png")
# How far back the needle may move from its depth to the end of a sentence, as a part of the text.
_SENTENCE_REACH = 0.05
_QUIZ = (
    "\n\nThere is an important piece of information hidden inside the above document. Now that you've read the "
    "document, I will quiz you about it. Answer the following question: "
)
_BUFFER = 200  # tokens that the paper sets aside for the question and the answer


@dataclass(frozen=True)
class Needle:
    """Needle and question. The defaults are the sentence of most needle tests.

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
        asked = f"{self.question} Answer: " if mode == "easy" else ""
        return f"\n{asked}{self.statement} {self.answer}.\n"

    @property
    def asked(self) -> str:
        """The question, and how its answer begins."""
        return f"{self.question} Answer: {self.statement}"

    @property
    def query(self) -> str:
        return f"\n\nAnswer the following question: {self.asked}"


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
        ids: `(N,)`.

    Raises:
        EvaluationError: there are none.
    """

    def __init__(self, model: EvaluatedModel, ids: np.ndarray) -> None:
        if len(ids) == 0:
            raise EvaluationError("the haystack is empty: its files hold no text that the tokenizer can encode")
        kinds, where = np.unique(ids, return_inverse=True)
        pieces = model.require_tokenizer().batch_decode([[int(kind)] for kind in kinds])
        ends = np.array([piece.rstrip(" ").endswith((".", "\n")) for piece in pieces])
        self.model, self.tokens = model, ids.astype(np.int64)
        #: `(N,)`, True for tokens that end a sentence or a line.
        self.is_end = ends[where]
        self.digest = hashlib.blake2b(self.tokens.tobytes(), digest_size=8).hexdigest()

    def prompt(self, needle: Needle, mode: str | None, cell: Cell) -> np.ndarray:
        """The prompt of a cell, `(cell.length,)` int64; with `mode` None nothing is hidden in the text.

        The needle goes after the last end of a sentence before its depth, if there is one near. A text that is too
        short begins again where it ends.

        Raises:
            EvaluationError: the length has no room for needle, query and some text.
        """
        first = texts.begin(self.model)
        hidden = "" if mode is None else needle.text(mode)
        needle_ids, query_ids = (np.array(texts.encode(self.model, text)) for text in (hidden, needle.query))
        room = cell.length - len(first) - len(needle_ids) - len(query_ids)
        if room < 1:
            raise EvaluationError(
                f"a prompt of {cell.length} tokens has no room for text: needle and query alone have "
                f"{cell.length - room}; choose longer --min_length"
            )
        where = np.arange(cell.sample * cell.length, cell.sample * cell.length + room) % len(self.tokens)
        text, place = self.tokens[where], round(cell.depth * room)
        if 0 < place < room:
            reach = max(0, place - max(1, round(_SENTENCE_REACH * room)))
            ends = np.flatnonzero(self.is_end[where][reach:place])
            place = reach + int(ends[-1]) + 1 if ends.size else place
        return np.concatenate([first, text[:place], needle_ids, text[place:], query_ids]).astype(np.int64)


class Essays:
    """A haystack of the paper's kind.

    Args:
        tokenizer: that lengths are counted with.
        text: all essays.
        bos_token_id: begins a prompt and counts as its first token; None for none.

    Raises:
        EvaluationError: there is no text.
    """

    def __init__(self, tokenizer: Any, text: str, bos_token_id: int | None) -> None:
        self.tokenizer, self.text = tokenizer, text
        self.first = [] if bos_token_id is None else [bos_token_id]
        self.digest = hashlib.blake2b(text.encode(), digest_size=8).hexdigest()
        self._ids = self._encode(text)
        self._beginnings: dict[int, list[int]] = {}
        if not self._ids:
            raise EvaluationError("the haystack is empty: its files hold no text that the tokenizer can encode")

    def context(self, needle: str, length: int, depth: float) -> str:
        """The essays with the needle in them.

        Args:
            needle: the text to hide.
            length: tokens that the prompt is named after.
            depth: where it is hidden, in percent of the text.

        Raises:
            EvaluationError: the length has no room for any text.
        """
        needle_ids, tokens = self._encode(needle), self._beginning(length)
        room = length - _BUFFER - len(needle_ids)
        if room < 1:
            raise EvaluationError(
                f"a prompt of {length} tokens has no room for text: the needle has {len(needle_ids)}, and {_BUFFER} "
                "are set aside for the question; choose longer --min_length"
            )
        tokens = tokens[:room]
        if depth >= 100:
            return self._decode([*tokens, *needle_ids])
        place, stops = int(len(tokens) * (depth / 100)), set(self._encode("."))
        while place > 0 and tokens[place - 1] not in stops:
            place -= 1
        return self._decode([*tokens[:place], *needle_ids, *tokens[place:]])

    def prompt_text(self, needle: str, asked: str, length: int, depth: float) -> str:
        """A whole prompt; `asked` ends it, and is what the model continues."""
        return f"{self.context(needle, length, depth)}{_QUIZ}{asked}"

    def prompt(self, needle: Needle, mode: str, cell: Cell) -> np.ndarray:
        """The prompt of a cell as token ids `(T,)`, where T is near `cell.length`."""
        hidden, depth = needle.text(PAPER_MODES[mode]), round(100 * cell.depth, 2)
        ids = self._encode(self.prompt_text(hidden, needle.asked, cell.length, depth))
        return np.array([*self.first, *ids], dtype=np.int64)

    def _beginning(self, length: int) -> list[int]:
        """Tokens of the essays, which begin again where they end, when they are cut to a length."""
        kept = length - len(self.first)
        if length not in self._beginnings:
            if len(self._ids) < kept:
                self._ids = self._encode(self.text * (kept // len(self._ids) + 2))
            # Through text and back, as there: a cut inside of a character changes its last tokens.
            self._beginnings[length] = self._encode(self._decode(self._ids[:kept]))
        return self._beginnings[length]

    def _encode(self, text: str) -> list[int]:
        return model_tokenizer.encode(self.tokenizer, text)

    def _decode(self, ids: Sequence[int]) -> str:
        return self.tokenizer.decode(list(ids), skip_special_tokens=True)


def find_essays(chosen: Path | None, expected: Path) -> str:
    """The text of a folder of essays: the chosen one, else the expected one. All `.txt` files, joined without anything
    between them, in the order of their names. (The official script takes the file system's order.)

    Where neither is named nor there, it is Python's documentation, and one line on stderr says so.

    Raises:
        EvaluationError: there is no text in the folder.
    """
    if chosen is not None or expected.is_dir():
        return "".join(texts.read_folder(chosen or expected, "*.txt"))
    print(
        f"warning: there is no folder {expected}, so the haystack is Python's documentation and scores are not the "
        "paper's. github.com/zhixuan-lin/forgetting-transformer has the essays in "
        f"eval/niah/{ESSAYS}: copy that folder here",
        file=sys.stderr,
    )
    return free_text()


def free_text() -> str:
    """Python's reference documentation, 465 kB of English in Python 3.11; other versions have other texts.

    Raises:
        EvaluationError: this Python comes without it.
    """
    try:
        from pydoc_data.topics import topics
    except ImportError as error:
        raise EvaluationError(
            "this Python comes without its documentation (the module pydoc_data): give a "
            "folder of texts with --haystack_dir"
        ) from error
    return "".join(topics[name] for name in sorted(topics))


def find_haystack(
    model: EvaluatedModel,
    mode: str,
    folder: Path | None,
    essays: Path,
    data_path: str | None,
    dataset: str,
    needed: int,
) -> Haystack | Essays:
    """The haystack of a command line: a folder of texts, held-out documents, or Python's documentation.

    Args:
        essays: where the paper's are, if they are there.
        needed: tokens of text to take from a corpus.

    Raises:
        EvaluationError: there is no text. DataError: there is no corpus.
    """
    if mode in PAPER_MODES:
        return Essays(model.require_tokenizer(), find_essays(folder, essays), model.bos_token_id)
    if data_path is not None:
        return Haystack(model, texts.read_heldout(model, data_path, dataset, needed))
    text = free_text() if folder is None else "\n\n".join(texts.read_folder(folder))
    return Haystack(model, np.array(texts.encode(model, text)))


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


_SCORES = {"exact": exact_match, "words": word_match}


def evaluate(
    model: EvaluatedModel,
    haystack: Haystack | Essays,
    folder: Path,
    workers: Workers,
    *,
    lengths: Sequence[int],
    depths: Sequence[float],
    samples: int = 1,
    needle: Needle,
    mode: str,
    max_new_tokens: int,
    batch_size: int = 1,
    precision: str = "auto",
) -> list[dict[str, Any]]:
    """Asks for every cell of the grid that has no file yet in `folder/predictions`, and scores all of them.

    scores.json gets every prediction with its scores, and words.png and exact.png are their heat-maps.

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
        evaluations.check_folder(folder, "niah", *_PICTURES, "scores.json")
        check_settings(folder, settings)

    workers.on_first(check)
    cells = grid(lengths, depths, samples)
    mine = [cell for n, cell in enumerate(cells) if n // batch_size % workers.world_size == workers.rank]
    todo = [cell for cell in mine if not (folder / "predictions" / cell.file_name).is_file()]
    bar = tqdm(total=len(todo), desc=f"{model.name}, {mode}", unit="prompt", disable=not workers.shows_progress)
    while todo:
        # Prompts of one length only: nothing is padded.
        built = [(cell, haystack.prompt(needle, mode, cell)) for cell in todo[:batch_size]]
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
        record = evaluations.read_json(folder / "predictions" / cell.file_name)
        scores = {name: match(record["prediction"], needle.answer) for name, match in _SCORES.items()}
        records.append({**record, **scores})
    if workers.is_first:
        shape = {"lengths": lengths, "depths": depths, "train_length": model.train_length}
        _write_results(folder, {"model": model.name, "mode": mode, **shape, "records": records})
    return records


def _write_results(folder: Path, scores: dict[str, Any]) -> None:
    evaluation = evaluations.from_needle(scores)

    def write_more(new: Path) -> None:
        write_json(new / "scores.json", scores)
        for name in _PICTURES:
            draw_needles(evaluation, Path(name).stem, new / name)

    def draw(path: Path) -> None:
        draw_needles(evaluation, "words", path)

    evaluations.write_evaluation(evaluation, folder, evaluations.number_table(evaluation), draw, write_more)
