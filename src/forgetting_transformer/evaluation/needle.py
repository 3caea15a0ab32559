"""Needle in a haystack: a sentence hidden in a long text, and a question that only this sentence answers.

Standard mode hides the answer alone; easy mode hides the question with it, so that the text has the words of the query
(Qin et al., 2024; Lin et al., "Forgetting Transformer", ICLR 2025, section 4.3).

    needle    standard: {statement} {answer}.          easy: {question} Answer: {statement} {answer}.
    query     Answer the following question: {question} Answer: {statement}

Two kinds of prompts:

- `Haystack` counts in tokens of the model under test. A prompt has exactly its nominal length: the
  beginning-of-sequence token, text, needle and query together.
- `Essays` makes those of the paper (modes paper, paper_easy; zhixuan-lin/forgetting-transformer, eval/niah). The essays
  are joined without anything between them and cut to L tokens, of which the beginning-of-sequence token is one, then
  shortened so that with the needle they have L - 200. The needle follows the last token "." before its depth. As text,
  the quiz sentence and the question come after it. A prompt named after L therefore has about L - 200 tokens and those
  of the quiz, which are 59 with GPT-2's vocabulary.

The paper's essays are Paul Graham's, which have no free licence. Without a text, the haystack is the reference
documentation that comes with Python.

`evaluate` asks and scores with both kinds. `write_prompts`, `answer_prompts`, `rate_answers` and `draw_ratings` are the
four steps of the paper's repository, each of which leaves files for the next (L in tokens, d the depth in percent):

    prompts/EXP/Huggingface_len_{L}_depth_{100 d}_prompts.json   a prompt in chat format, its text in the second message
    pred/EXP/MODEL/Huggingface_len_{L}_depth_{100 d}.txt         the answer to it; once it is whole, an empty .txt.done
    results/EXP/MODEL/OpenAI_{JUDGE}_eval.json                   name of an answer -> {"prediction", "score": 1 to 10}
    FIGURES/EXP/needle_{EXP}_{MODEL}.png, .pdf                   the heat-map

The callback `needle` is a small test of the model that is being trained:

    python train.py … callbacks=[needle] callbacks.needle.interval=1000000000

It generates nothing: one forward pass over prompt and answer gives the loss of the answer, which falls long before a
model can write it, and whether greedy decoding would give it word for word. Writes needle.jsonl, for every length L:

    needle/length_<L>/loss              of the answer, nats per token, mean over depths and samples
    needle/length_<L>/loss_without      the same with no needle in the text: what the model guesses without looking
    needle/length_<L>/accuracy          share of prompts whose answer greedy decoding gives, token for token
    needle/length_<L>/…_stderr          standard errors of these means over prompts
    needle/mode, depths, samples        the keys of the config; a line with others is a point of another curve

Axes: B prompts, T tokens of a prompt, K tokens of an answer, S = T + K - 1.
"""

import hashlib
import itertools
import logging
import re
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor
from tqdm import tqdm

from forgetting_transformer import files, plugins
from forgetting_transformer import metric_names as names
from forgetting_transformer.analysis import evaluations, known_models
from forgetting_transformer.analysis.plots.heatmaps import draw_needles
from forgetting_transformer.analysis.statistics import mean_and_error
from forgetting_transformer.command_line import one_line
from forgetting_transformer.data import model_tokenizer
from forgetting_transformer.evaluation.generation import answer, append_record, begin, check_settings, read_records
from forgetting_transformer.evaluation.held_out import read_documents
from forgetting_transformer.evaluation.in_training import EvaluationCallback, beat, evaluated_model, precision, team
from forgetting_transformer.evaluation.models import EvaluatedModel, EvaluationError, folder_name, precision_context
from forgetting_transformer.evaluation.workers import Workers
from forgetting_transformer.training.config import ConfigError, Count, Text, Tokens
from forgetting_transformer.training.interface import TrainerInterface

log = logging.getLogger(__name__)

#: The paper's modes -> which needle is hidden.
PAPER_MODES = {"paper": "standard", "paper_easy": "easy"}
PAPER_NEW_TOKENS = 1024
ESSAYS = "PaulGrahamEssays"
#: Heat-maps, each with the name of its score.
_PICTURES = ("words.png", "exact.png")
# Distance that the needle may move back from its depth to the end of a sentence, as a part of the text.
_SENTENCE_REACH = 0.05
_QUIZ = (
    "\n\nThere is an important piece of information hidden inside the above document. Now that you've read the "
    "document, I will quiz you about it. Answer the following question: "
)
_BUFFER = 200  # tokens that the paper sets aside for the question and the answer
_NO_TEXT = "the haystack is empty: its files hold no text that the tokenizer can encode"


@dataclass(frozen=True)
class Needle:
    """Needle and question. The defaults are the sentence of most needle tests.

    Attributes:
        question: the question.
        statement: beginning of the answer, with which the query ends.
        answer: the right continuation.
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
        """The query: the question, and the beginning of its answer."""
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
        sample: number of the stretch of the haystack.
    """

    length: int
    depth: float
    sample: int


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
            raise EvaluationError(_NO_TEXT)
        kinds, where = np.unique(ids, return_inverse=True)
        pieces = model.require_tokenizer().batch_decode([[int(kind)] for kind in kinds])
        ends = np.array([piece.rstrip(" ").endswith((".", "\n")) for piece in pieces])
        self.model, self.tokens = model, ids.astype(np.int64)
        #: `(N,)`, True for tokens that end a sentence or a line.
        self.is_end = ends[where]
        self.digest = _digest(self.tokens.tobytes())

    def prompt(self, needle: Needle, mode: str | None, cell: Cell) -> np.ndarray:
        """The prompt of a cell, `(cell.length,)` int64; with `mode` None nothing is hidden in the text.

        The needle goes after the last end of a sentence before its depth, if there is one near. A text that is too
        short begins again where it ends.

        Raises:
            EvaluationError: the length has no room for needle, query and some text.
        """
        hidden = "" if mode is None else needle.text(mode)
        needle_ids, query_ids = (self.model.encode(text) for text in (hidden, needle.query))
        room = cell.length - len(self.model.first) - len(needle_ids) - len(query_ids)
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
        return np.concatenate([self.model.first, text[:place], needle_ids, text[place:], query_ids]).astype(np.int64)


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
        self.digest = _digest(text)
        self._ids = self._encode(text)
        self._beginnings: dict[int, list[int]] = {}
        if not self._ids:
            raise EvaluationError(_NO_TEXT)

    def context(self, needle: str, length: int, depth: float) -> str:
        """The essays with the hidden needle.

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
        """A whole prompt; the model continues its end, `asked`."""
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


def read_texts(folder: Path | None, between: str) -> str:
    """The `.txt` files of a folder, in the order of their names. (The official script takes the file system's order.)

    Without a folder it is Python's reference documentation, 465 kB of English in Python 3.11.

    Raises:
        EvaluationError: the folder is not there, or holds no text.
    """
    if folder is None:
        from pydoc_data.topics import topics

        return "".join(topics[name] for name in sorted(topics))
    texts = [path.read_text(encoding="utf-8", errors="replace") for path in sorted(folder.glob("*.txt"))]
    if not any(text.strip() for text in texts):
        raise EvaluationError(f"there is no text in {folder}: give a folder with .txt files")
    return between.join(texts)


def find_essays(chosen: Path | None, expected: Path) -> str:
    """The texts of the chosen folder, else of the expected one, else Python's documentation, with a warning."""
    folder = chosen or (expected if expected.is_dir() else None)
    if folder is None:
        print(
            f"warning: there is no folder {expected}, so the haystack is Python's documentation and scores are not the "
            "paper's. github.com/zhixuan-lin/forgetting-transformer has the essays in "
            f"eval/niah/{ESSAYS}: copy that folder here",
            file=sys.stderr,
        )
    return read_texts(folder, between="")


def find_haystack(
    model: EvaluatedModel,
    mode: str,
    folder: Path | None,
    essays: Path,
    data_path: str | None,
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
        return Haystack(model, read_documents(model, data_path, needed))
    return Haystack(model, model.encode(read_texts(folder, between="\n\n")))


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
    """Answers every cell of the grid that has no answer in `folder/answers.*.jsonl`, and scores all of them.

    scores.json gets every prediction with its scores, and words.png and exact.png are their heat-maps.

    Returns:
        A record per cell: length, depth, sample, prediction, `exact` and `words` (0 to 1).
    """
    settings = {"mode": mode, **vars(needle), "max_new_tokens": max_new_tokens, "haystack": haystack.digest}
    begin(model, folder, workers, precision, settings, "niah", [*_PICTURES, "scores.json"])
    cells = grid(lengths, depths, samples)

    def prompt_of(n: int) -> np.ndarray:
        return haystack.prompt(needle, mode, cells[n])

    file, keys = folder / "answers", [*map(str, cells)]
    predictions = answer(model, file, keys, prompt_of, max_new_tokens, workers, precision, batch_size)
    records = []
    for cell, prediction in zip(cells, predictions, strict=True):
        scores = {name: match(prediction, needle.answer) for name, match in _SCORES.items()}
        records.append({**vars(cell), "prediction": prediction, **scores})
    if workers.is_first:
        shape = {"lengths": lengths, "depths": depths, "train_length": model.train_length}
        found = {"model": model.name, "mode": mode, **shape, "records": records}
        evaluation = evaluations.from_needle(found)

        def write_more(new: Path) -> None:
            files.write_json(new / "scores.json", found)
            for name in _PICTURES:
                draw_needles(evaluation, Path(name).stem, new / name)

        evaluations.write_evaluation(evaluation, folder, write_more)
    return records


def _digest(value: object) -> str:
    data = value if isinstance(value, bytes) else repr(value).encode("utf-8", "surrogatepass")
    return hashlib.blake2b(data, digest_size=8).hexdigest()


# The paper's steps
# -------------------------------------------------------------------------------------------------------------

#: The tokenizer that the official configs name: GPT-2's vocabulary behind JSON's escapes.
_HUB_TOKENIZER = "zhixuan-lin/longcrawl64-json-gpt2-tokenizer"


class ConfigFile(dict[str, Any]):
    """A YAML file of the official format: its values by keys with dots; keys without a value are left out.

    Raises:
        EvaluationError: there is no such file, or `config[key]` is not in it. UnreadableError: it is not YAML.
    """

    def __init__(self, file: Path) -> None:
        self.file, folder = file, file.absolute().parent
        if not file.is_file():
            beside = ", ".join(sorted(path.name for path in folder.glob("*.yaml")))
            raise EvaluationError(f"there is no {file}; {folder} has {beside or 'no *.yaml'}")
        content = files.read_yaml(file)
        values = files.flatten(content) if isinstance(content, dict) else {}
        super().__init__({key: value for key, value in values.items() if value is not None})

    def __missing__(self, key: str) -> Any:
        raise EvaluationError(f"{self.file} lacks the key {key}")


def numbers_of(config: ConfigFile, section: str, least: str, most: str) -> list[int]:
    """Lengths or depths: those that a config lists, or evenly spaced ones.

    Raises:
        EvaluationError: there is no such key.
    """
    chosen = config.get(f"{section}.manually_select_list")
    if chosen is None:
        chosen = np.linspace(*(config[f"{section}.{key}"] for key in (least, most, "interval")))
    return [round(float(value)) for value in chosen]


def write_prompts(file: Path, exp: str, tokenizer: str | None = None, folder: Path | None = None) -> tuple[Path, int]:
    """Writes a prompt for every length and depth of an official config, and returns their folder and how many they are.

    Args:
        tokenizer: folder or hub id; None takes the config's.
        folder: of essays; None takes the config's if it is there, else Python's documentation, and says so on stderr.

    Raises:
        EvaluationError: the config lacks a key, there is no tokenizer or no text, a length has no room for the needle,
            or the folder has prompts of another kind.
    """
    config = ConfigFile(file)
    for key, supported in (("tokenizer.tokenizer_type", "Huggingface"), ("document_depth.interval_type", "linear")):
        if config.get(key) not in (None, supported):
            raise EvaluationError(f"{file}: {key}={config.get(key)!r}; only {supported} is supported")
    needle, asked = config["prompt.needle"], config["prompt.retrieval_question"]
    lengths = numbers_of(config, "context", "min_len", "max_len")
    depths = numbers_of(config, "document_depth", "min_percent", "max_percent")
    target = Path(config["save_dir"]) / folder_name("--exp", exp)
    essays = Path(config["prompt.haystack_dir"])
    if not essays.is_dir():
        essays = file.parent / essays
    source = tokenizer or config["tokenizer.model_name"]
    try:
        is_official = source == _HUB_TOKENIZER and not Path(source).is_dir()
        counted = model_tokenizer.longcrawl64_tokenizer() if is_official else model_tokenizer.load_tokenizer(source)
    except (OSError, ValueError, KeyError) as error:
        raise EvaluationError(
            f"the tokenizer {source} cannot be loaded ({one_line(error)}); give a folder with --tokenizer"
        ) from error
    haystack = Essays(counted, find_essays(folder, essays), counted.bos_token_id)
    settings = {"needle": needle, "question": asked, "lengths": lengths, "depths": depths, "tokenizer": source}
    settings |= {"vocabulary": _digest(sorted(counted.get_vocab().items())), "haystack": haystack.digest}
    check_settings(target, settings)
    for length, depth in itertools.product(lengths, depths):
        prompt = haystack.prompt_text(needle, asked, length, depth)
        messages = [{"role": "system", "content": ""}, {"role": "user", "content": prompt}]
        files.write_json(target / f"Huggingface_len_{length}_depth_{100 * depth}_prompts.json", messages)
    return target, len(lengths) * len(depths)


def answer_prompts(
    model: EvaluatedModel,
    prompts: Path,
    folder: Path,
    workers: Workers,
    *,
    max_new_tokens: int = PAPER_NEW_TOKENS,
    precision: str = "auto",
) -> int:
    """Answers the prompts of a folder greedily and returns how many they are.

    Args:
        folder: for the answers. Those of an unfinished start are in `unfinished` in it, and `settings.json` says how
            they were made.

    Raises:
        EvaluationError: there are no prompts, or the folder holds answers of another model or to other prompts.
    """
    asked = _by_cell(prompts, "_prompts.json")
    if not asked:
        made = ", ".join(sorted(path.name for path in prompts.parent.glob("*/"))) or "none"
        raise EvaluationError(f"there are no prompts in {prompts} (--exp; made so far: {made}); run prompt.py first")
    questions = {name: evaluations.read_json(prompts / f"{name}_prompts.json")[1]["content"] for name in asked}
    digest = _digest(sorted(questions.items()))
    settings = {"prompts": digest, "max_new_tokens": max_new_tokens, "train_length": model.train_length}
    begin(model, folder, workers, precision, settings)

    def prompt_of(n: int) -> np.ndarray:
        return np.concatenate([model.first, model.encode(questions[asked[n]])])

    parts = folder / "unfinished" / "answers"
    answers = answer(model, parts, asked, prompt_of, max_new_tokens, workers, precision)
    if workers.is_first:
        for name, text in zip(asked, answers, strict=True):
            files.write_atomically(folder / f"{name}.txt", text.strip())
            (folder / f"{name}.txt.done").touch()
    return len(asked)


def _by_cell(folder: Path, ending: str) -> list[str]:
    """Names of the files of a folder that are called Huggingface_len_L_depth_D and the ending, short prompts first."""
    found = [file.name.removesuffix(ending) for file in folder.glob(f"Huggingface_len_*_depth_*{ending}")]
    return sorted(found, key=_length_and_depth)


def _length_and_depth(name: str) -> list[int]:
    return [int(number) for number in re.findall(r"\d+", name)]


# Ratings
# -------------------------------------------------------------------------------------------------------------

_RATING = re.compile(r"\[\[\s*(10|[1-9])\s*\]\]")
_SECONDS, _TRIES = 60.0, 5  # for one rating
_PROMPT = """You grade the answer of a small language model to a question. The model only continues text: whatever \
follows its answer, such as repetitions or unrelated sentences, does not count against it.

Question: {question}
Reference answer: {reference}
The model's answer: {answer}

Compare the model's answer with the reference answer only. Give a whole number from 1 to 10: 10 if it says all that \
the reference says, 1 if it says nothing of it, numbers between for parts of it. Write one sentence of explanation, \
then the rating in double square brackets, such as [[4]]."""


@dataclass(frozen=True)
class Judge:
    """A language model behind an OpenAI-compatible endpoint that rates answers.

    Every rating is kept in a file under a hash of its request, so that no request is made, or paid for, twice. A failed
    request is repeated at growing intervals.

    Attributes:
        base_url: such as https://api.openai.com/v1 or http://localhost:8000/v1; `/chat/completions` is added.
        model: its name at the endpoint.
        cache: JSON-lines file of ratings.
        api_key: sent as a bearer token if there is one.
    """

    base_url: str
    model: str
    cache: Path
    api_key: str | None = None

    def rate(self, question: str, reference: str, answer: str) -> int | None:
        """A rating of 1 to 10, or None with a warning where the endpoint gave none.

        Raises:
            EvaluationError: the endpoint refuses, or after all tries nothing answers at its address.
        """
        import httpx

        prompt = _PROMPT.format(question=question, reference=reference, answer=answer)
        key = hashlib.sha256(f"{self.base_url}\n{self.model}\n{prompt}".encode()).hexdigest()
        known = {record["key"]: record["rating"] for record in read_records(self.cache)}
        if key in known:
            return known[key]
        body = {"model": self.model, "temperature": 0, "messages": [{"role": "user", "content": prompt}]}
        headers = {"Authorization": f"Bearer {self.api_key}"} if self.api_key else {}
        url, failure = f"{self.base_url.rstrip('/')}/chat/completions", ""
        for number in range(_TRIES):
            time.sleep(2.0**number if number else 0)
            try:
                response = httpx.post(url, json=body, headers=headers, timeout=_SECONDS)
                if response.status_code in (401, 403, 404):
                    said = f"answers {response.status_code}"
                    break  # neither this request again nor the others would succeed
                reply = response.raise_for_status().json()["choices"][0]["message"]["content"] or ""
                rating = int(_RATING.findall(reply)[-1])
                append_record(self.cache, {"key": key, "rating": rating})
                return rating
            except httpx.ConnectError as error:
                said = f"cannot be reached ({error})"
            except (httpx.HTTPError, ValueError, LookupError, TypeError) as error:
                failure = f"{type(error).__name__}: {error}"
        else:
            if failure:
                log.warning("an answer has no rating from 1 to 10 in double brackets: %s", failure)
                return None
        raise EvaluationError(
            f"{url} {said} for the model {self.model!r}: check --judge_url, --judge_model and the key. Ratings "
            "so far are kept"
        )


def rate_answers(answers: Path, results: Path, question: str, reference: str, judge: Judge) -> tuple[Path, int]:
    """Has every answer rated and writes all ratings; returns their file and how many answers have none.

    Raises:
        EvaluationError: there are no answers, or the endpoint refuses.
    """
    found = _by_cell(answers, ".txt")
    if not found:
        raise EvaluationError(f"there are no answers in {answers}; run pred.py with the same --exp and --model first")
    rated = {}
    for name in tqdm(found, desc="ratings", disable=not sys.stderr.isatty()):
        prediction = (answers / f"{name}.txt").read_text(encoding="utf-8").strip()
        rated[name] = {"prediction": prediction, "score": judge.rate(question, reference, prediction)}
    file = results / f"OpenAI_{judge.model.replace('/', '_')}_eval.json"
    files.write_json(file, rated)
    return file, sum(entry["score"] is None for entry in rated.values())


def draw_ratings(results: Path, answers: Path, figures: Path) -> Iterator[Path]:
    """Draws the ratings of every experiment and model, and yields the pictures.

    Args:
        results, answers: the folders that `rate_answers` and `answer_prompts` wrote to, above those of an experiment.

    Raises:
        EvaluationError: there are no ratings.
    """
    ratings = sorted(results.glob("*/*/*_eval.json"))
    if not ratings:
        raise EvaluationError(
            f"there is no EXP/MODEL/*_eval.json in {results.absolute()}; run eval.py first, from the same folder"
        )
    for file in ratings:
        exp, model = file.parent.parent.name, file.parent.name
        judge = file.stem.removesuffix("_eval").removeprefix("OpenAI_")
        settings = answers / exp / model / "settings.json"
        trained = evaluations.read_json(settings)["train_length"] if settings.is_file() else None
        cells = [(*_length_and_depth(name), entry["score"]) for name, entry in evaluations.read_json(file).items()]
        records = [{"length": length, "depth": depth / 10_000, "judge": score} for length, depth, score in cells]
        about = {"model": known_models.display_name(model), "mode": exp, "train_length": trained}
        several = len(list(file.parent.glob("*_eval.json"))) > 1  # judges, each of which has a picture
        stem = f"needle_{exp}_{model}" + (f"_{judge}" if several else "")
        pictures = [figures / exp / f"{stem}.{suffix}" for suffix in ("png", "pdf")]
        draw_needles(evaluations.from_needle({**about, "judge": judge, "records": records}), "judge", *pictures)
        yield from pictures


# In training
# -------------------------------------------------------------------------------------------------------------


@dataclass
class NeedleConfig:
    #: Training tokens between tests; the last one follows config.final_eval.
    interval: Tokens
    #: Tokens of a prompt with its answer; null: as in training, and half of that if there is room.
    lengths: Annotated[list[Count], Field(min_length=1)] | None = None
    #: Places of the needle, 0 (beginning of the text) to 1 (end).
    depths: Annotated[list[Annotated[float, Field(ge=0, le=1)]], Field(min_length=1)] = field(
        default_factory=lambda: [0.0, 0.25, 0.5, 0.75, 1.0]
    )
    #: Stretches of text for each length and depth.
    samples: Count = 4
    #: "easy" hides the question with its answer, "standard" the answer alone.
    mode: Literal["easy", "standard"] = "easy"
    #: Needle and question; the question's answer begins with the statement.
    question: Text = Needle.question
    statement: Text = Needle.statement
    answer: Text = Needle.answer
    #: Prompts in one forward pass of one rank.
    batch_size: Count = 4
    #: Folder or hub id; null: the corpus's.
    tokenizer: Text | None = None


@plugins.CALLBACKS.register("needle", config=NeedleConfig, free=[plugins.ALL])
class NeedleTest(EvaluationCallback):
    kind = names.NEEDLE

    def prepare(self, trainer: TrainerInterface) -> None:
        """Makes all prompts."""
        config, length = self.config, trainer.config.datamodule.train_batch_len
        model, self._workers = evaluated_model(trainer, "needle", config.tokenizer), team(trainer)
        needle = Needle(config.question, config.statement, config.answer)
        self._model, self._answer_K = model, model.encode(f" {needle.answer}")
        around = (needle.text(config.mode), needle.query)
        least = len(model.first) + len(self._answer_K) + 1 + sum(len(model.encode(text)) for text in around)
        lengths = sorted({*(config.lengths or [length, *[length // 2] * (length // 2 >= least)])})
        if lengths[0] < least:
            raise ConfigError(
                f"callbacks.needle.lengths={config.lengths or 'null'} has prompts of {lengths[0]} tokens, and needle, "
                f"question and answer alone have {least - 1}; give lengths of {least} or more"
            )
        trainer.data.eval_info()  # which raises an error if nothing is held out
        texts: list[np.ndarray] = []
        for batch in trainer.data.eval_loader(0, 1):  # alike on every rank
            ids = batch["labels"][batch["weight"] > 0].flatten().numpy()
            texts.append(ids[~np.isin(ids, [*model.first, *model.eos_token_ids])])
            if sum(map(len, texts)) >= config.samples * lengths[-1]:
                break
        haystack = Haystack(model, np.concatenate(texts))
        #: Tokens of a prompt with its answer, and whether there is a needle in it -> the prompts, `(N, T)`.
        self._prompts: dict[tuple[int, bool], np.ndarray] = {}
        for length in lengths:
            for mode, depths in ((config.mode, sorted({*config.depths})), (None, [0])):
                cells = grid([length - len(self._answer_K)], depths, config.samples)
                self._prompts[length, mode is not None] = np.stack([haystack.prompt(needle, mode, c) for c in cells])

    def evaluate(self, trainer: TrainerInterface) -> dict[str, Any]:
        workers, size = self._workers, self.config.batch_size
        batches = [(key, n) for key, prompts in self._prompts.items() for n in range(0, len(prompts), size)]
        scores = {
            key: torch.zeros(2, len(prompts), dtype=torch.float64, device=trainer.fabric.device)
            for key, prompts in self._prompts.items()
        }
        for start in range(0, len(batches), workers.world_size):
            beat(trainer)  # as often on every rank, whether it has a batch or not
            for key, n in batches[start + workers.rank :][:1]:
                prompts_BT = self._prompts[key][n : n + size]
                losses_BK, right_BK = answer_losses(self._model, prompts_BT, self._answer_K, precision(trainer))
                scores[key][:, n : n + size] = torch.stack([losses_BK.mean(1), right_BK.all(1).double()])
        values: dict[str, Any] = {}
        for (length, has_needle), scores_2N in scores.items():
            if workers.world_size > 1:
                trainer.sum_over_ranks(scores_2N)
            means = (names.ANSWER_LOSS, names.ACCURACY) if has_needle else (names.LOSS_WITHOUT_NEEDLE,)
            for name, scores_N in zip(means, scores_2N.cpu().numpy(), strict=False):
                at = names.name_of(names.NEEDLE, f"{names.LENGTH}{length}", name)
                values[at], error = mean_and_error(scores_N)
                values |= {} if error is None else {f"{at}{names.STANDARD_ERROR}": error}
        depths = " ".join(f"{100 * depth:g}" for depth in sorted({*self.config.depths}))
        test = {names.MODE: self.config.mode, names.DEPTHS: depths, names.PROMPTS: self.config.samples}
        return values | test


def answer_losses(
    model: EvaluatedModel, prompts_BT: np.ndarray, answer_K: np.ndarray, precision: str
) -> tuple[Tensor, Tensor]:
    """Losses of the answer after each prompt, in one forward pass.

    Args:
        answer_K: token ids `(K,)` that should follow every prompt.

    Returns:
        `(B, K)`: the loss of every token of the answer in nats, float64, and whether it is the most likely one. Greedy
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
