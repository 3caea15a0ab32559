"""Needle in a haystack in the four steps of the paper's repository, each of which leaves files for the next.

    prompts/EXP/Huggingface_len_{L}_depth_{100 d}_prompts.json   a prompt in chat format, its text in the second message
    pred/EXP/MODEL/Huggingface_len_{L}_depth_{100 d}.txt         the answer to it; once it is whole, an empty .txt.done
    results/EXP/MODEL/OpenAI_{JUDGE}_eval.json                   name of an answer -> {"prediction", "score": 1 to 10}
    FIGURES/EXP/needle_{EXP}_{MODEL}.png, .pdf                   the heat-map

L counts tokens, d is the depth in percent.
"""

import hashlib
import itertools
import json
import re
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import numpy as np
from tqdm import tqdm

from forgetting_transformer import files, model_tokenizer
from forgetting_transformer.analysis.evaluations import from_needle, read_json
from forgetting_transformer.analysis.plots.heatmaps import draw_needles
from forgetting_transformer.evaluation import niah, official, texts
from forgetting_transformer.evaluation.generation import (
    append_record,
    check_settings,
    continue_greedily,
    read_records,
    write_json,
    write_text,
)
from forgetting_transformer.evaluation.models import (
    EvaluatedModel,
    EvaluationError,
    fingerprint,
    folder_name,
    resolve,
)
from forgetting_transformer.evaluation.workers import Workers

#: The tokenizer that the official configs name: GPT-2's vocabulary behind JSON's escapes.
_HUB_TOKENIZER = "zhixuan-lin/longcrawl64-json-gpt2-tokenizer"
_NAME = re.compile(r"Huggingface_len_(\d+)_depth_(\d+)")


class ConfigFile:
    """A YAML file of the official format; keys have dots.

    Raises:
        EvaluationError: there is no such file, or it is not a YAML mapping.
    """

    def __init__(self, file: Path) -> None:
        self.file = file
        try:
            self._content = files.read_yaml(file)
        except FileNotFoundError as error:
            beside = sorted(path.name for path in file.absolute().parent.glob("*.yaml"))
            raise EvaluationError(
                f"there is no {file}; {file.absolute().parent} has {', '.join(beside) or 'no *.yaml'}"
            ) from error
        except files.UnreadableError as error:
            raise EvaluationError(str(error)) from error
        if not isinstance(self._content, dict):
            raise EvaluationError(f"{file} is not a YAML mapping of keys to values")

    def get(self, key: str) -> Any:
        """The value, None where there is none."""
        value: Any = self._content
        for part in key.split("."):
            value = value.get(part) if isinstance(value, dict) else None
        return value

    def need(self, key: str) -> Any:
        """The value.

        Raises:
            EvaluationError: there is none.
        """
        if (value := self.get(key)) is None:
            raise EvaluationError(f"{self.file} lacks the key {key}")
        return value


def grid(config: ConfigFile, section: str, least: str, most: str) -> list[int]:
    """Lengths or depths: those that a config lists, or evenly spaced ones.

    Raises:
        EvaluationError: there is no such key, or no number.
    """
    chosen = config.get(f"{section}.manually_select_list")
    try:
        if chosen is None:
            chosen = np.linspace(*(config.need(f"{section}.{key}") for key in (least, most, "interval")))
        return [round(float(value)) for value in chosen]
    except TypeError as error:
        raise EvaluationError(
            f"{config.file}: {section} must give numbers: {least}, {most} and interval ({error})"
        ) from error


def load_prompt_tokenizer(source: str) -> Any:
    """The tokenizer that prompts are counted with.

    Raises:
        EvaluationError: there is none.
    """
    try:
        if source == _HUB_TOKENIZER and not Path(source).is_dir():
            return model_tokenizer.longcrawl64_tokenizer()
        return model_tokenizer.load_tokenizer(source)
    except (OSError, ValueError, KeyError) as error:
        raise EvaluationError(
            f"the tokenizer {source} cannot be loaded ({str(error).strip().splitlines()[0]}); "
            "give a folder with --tokenizer"
        ) from error


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
    needle, asked = config.need("prompt.needle"), config.need("prompt.retrieval_question")
    lengths = grid(config, "context", "min_len", "max_len")
    depths = grid(config, "document_depth", "min_percent", "max_percent")
    target = Path(config.need("save_dir")) / folder_name("--exp", exp)
    essays = Path(config.need("prompt.haystack_dir"))
    if not essays.is_dir() and (file.parent / essays).is_dir():
        essays = file.parent / essays
    source = tokenizer or config.need("tokenizer.model_name")
    counted = load_prompt_tokenizer(source)
    haystack = niah.Essays(counted, niah.find_essays(folder, essays), counted.bos_token_id)
    cure = "choose another --exp, or delete the folder"
    if any(target.glob("*_prompts.json")) and not (target / "settings.json").is_file():
        raise EvaluationError(f"{target} holds prompts that do not say how they were made: {cure}")
    settings = {
        "needle": needle,
        "question": asked,
        "lengths": lengths,
        "depths": depths,
        "tokenizer": source,
        "vocabulary": _digest(sorted(counted.get_vocab().items())),
        "haystack": haystack.digest,
    }
    check_settings(target, settings, cure)
    for length, depth in itertools.product(lengths, depths):
        prompt = haystack.prompt_text(needle, asked, length, depth)
        messages = [{"role": "system", "content": ""}, {"role": "user", "content": prompt}]
        write_json(target / f"Huggingface_len_{length}_depth_{100 * depth}_prompts.json", messages)
    return target, len(lengths) * len(depths)


def _digest(value: object) -> str:
    return hashlib.blake2b(repr(value).encode("utf-8", "surrogatepass"), digest_size=8).hexdigest()


def answer_prompts(
    model: EvaluatedModel,
    prompts: Path,
    folder: Path,
    workers: Workers,
    *,
    max_new_tokens: int = niah.PAPER_NEW_TOKENS,
    precision: str = "auto",
) -> int:
    """Answers the prompts of a folder that have no `.txt.done` yet, greedily; returns how many prompts there are.

    Args:
        folder: for the answers; `settings.json` in it says how they were made.

    Raises:
        EvaluationError: there are no prompts, or the folder holds answers of another model or to other prompts.
    """
    files = {match[0]: file for file in prompts.glob("*_prompts.json") if (match := _NAME.match(file.name))}
    if not files:
        made = ", ".join(sorted(path.name for path in prompts.parent.glob("*/"))) or "none"
        raise EvaluationError(f"there are no prompts in {prompts} (--exp; made so far: {made}); run prompt.py first")
    names = sorted(files, key=_length_and_depth)
    questions = {name: _question(files[name]) for name in names}
    settings = {
        "weights": fingerprint(model.model),
        "prompts": _digest(sorted(questions.items())),
        "max_new_tokens": max_new_tokens,
        "precision": resolve(precision, workers.device),
        "train_length": model.train_length,
    }
    cure = "delete the folder, or choose another --model name or --exp"
    workers.on_first(lambda: check_settings(folder, settings, cure))
    mine = [name for number, name in enumerate(names) if number % workers.world_size == workers.rank]
    todo = [name for name in mine if not _done(folder, name).is_file()]
    for name in tqdm(todo, desc=model.name, unit="prompt", disable=not workers.shows_progress):
        ids = np.concatenate([texts.begin(model), texts.encode(model, questions[name])]).astype(np.int64)
        (answer,) = continue_greedily(model, ids[None], max_new_tokens, precision)
        write_text(folder / f"{name}.txt", answer.strip())
        _done(folder, name).touch()
    workers.wait()
    return len(names)


def _question(file: Path) -> str:
    messages = read_json(file)
    try:
        return messages[1]["content"]
    except (LookupError, TypeError) as error:
        raise EvaluationError(
            f"{file} is not a prompt as prompt.py writes it; delete it and run prompt.py again"
        ) from error


def _done(folder: Path, name: str) -> Path:
    return folder / f"{name}.txt.done"


def _length_and_depth(name: str) -> tuple[int, int]:
    match = _NAME.match(name)
    if match is None:
        raise EvaluationError(
            f"{name}.txt is not named as pred.py names answers, Huggingface_len_L_depth_D.txt; move it elsewhere"
        )
    return int(match[1]), int(match[2])


# Ratings
# -------------------------------------------------------------------------------------------------------------

_RATING = re.compile(r"\[\[\s*(\d{1,2})\s*\]\]")
_SECONDS = 60.0  # for one answer
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

    Every rating is kept in a file under a hash of what was asked, so that nothing is asked, or paid for, twice. A
    request that fails is tried again, longer and longer apart; what still fails is kept too, and asked again next time.

    Attributes:
        base_url: such as https://api.openai.com/v1 or http://localhost:8000/v1; `/chat/completions` is added.
        model: as the endpoint calls it.
        cache: JSON-lines file of ratings and failures.
        api_key: sent as a bearer token if there is one.
        tries: requests for one rating.
    """

    base_url: str
    model: str
    cache: Path
    api_key: str | None = None
    tries: int = 5

    def rate(self, question: str, reference: str, answer: str) -> int | None:
        """1 to 10, or None where the endpoint gave no rating; the cache says why.

        Raises:
            EvaluationError: the endpoint refuses, or after all tries nothing answers at its address.
        """
        prompt = _PROMPT.format(question=question, reference=reference, answer=answer)
        key = hashlib.sha256(f"{self.base_url}\n{self.model}\n{prompt}".encode()).hexdigest()
        known = {record["key"]: record.get("rating") for record in read_records(self.cache) if "key" in record}
        if known.get(key) is not None:
            return known[key]
        failure: Exception | None = None
        for number in range(self.tries):
            if number:
                time.sleep(2.0**number)
            try:
                reply = self._ask(prompt)
                ratings = [int(rating) for rating in _RATING.findall(reply)]
                if not ratings or not 1 <= ratings[-1] <= 10:
                    raise ValueError(f"no rating from 1 to 10 in double brackets in the reply {reply[:200]!r}")
            except EvaluationError:
                raise
            except Exception as error:  # a network has many ways to fail, and none may cost the other ratings
                failure = error
            else:
                append_record(self.cache, {"key": key, "rating": ratings[-1], "reply": reply})
                return ratings[-1]
        said = f"{type(failure).__name__}: {failure}"
        append_record(self.cache, {"key": key, "rating": None, "error": said, "tries": self.tries})
        if isinstance(failure, httpx.ConnectError):
            # It would be the same, after the same waits, for every other answer.
            raise EvaluationError(
                f"{self.base_url} cannot be reached ({said}): check --judge_url. Ratings so far are kept"
            )
        return None

    def _ask(self, prompt: str) -> str:
        body = {"model": self.model, "temperature": 0, "messages": [{"role": "user", "content": prompt}]}
        headers = {"Authorization": f"Bearer {self.api_key}"} if self.api_key else {}
        url = f"{self.base_url.rstrip('/')}/chat/completions"
        response = httpx.post(url, json=body, headers=headers, timeout=_SECONDS)
        if response.status_code in (401, 403, 404):
            # Asking again would not help, and neither would asking for the other answers.
            raise EvaluationError(
                f"{url} answers {response.status_code} for the model {self.model!r}: check "
                "--judge_url, --judge_model and the key"
            )
        response.raise_for_status()
        return json.loads(response.text)["choices"][0]["message"]["content"] or ""


def rate_answers(answers: Path, results: Path, question: str, reference: str, judge: Judge) -> tuple[Path, int]:
    """Has every answer rated that is whole, and writes all ratings; returns their file and how many answers have none.

    Raises:
        EvaluationError: there are no answers, or the endpoint refuses.
    """
    names = sorted((file.stem for file in answers.glob("*.txt")), key=_length_and_depth)
    whole = [name for name in names if _done(answers, name).is_file()]
    if not whole:
        raise EvaluationError(f"there are no answers in {answers}; run pred.py with the same --exp and --model first")
    if len(whole) < len(names):
        print(f"warning: {len(names) - len(whole)} unfinished answers in {answers} are left out", file=sys.stderr)
    rated = {}
    for name in tqdm(whole, desc="ratings", disable=not sys.stderr.isatty()):
        prediction = (answers / f"{name}.txt").read_text(encoding="utf-8").strip()
        rated[name] = {"prediction": prediction, "score": judge.rate(question, reference, prediction)}
    file = results / f"OpenAI_{judge.model.replace('/', '_')}_eval.json"
    write_json(file, rated)
    return file, sum(entry["score"] is None for entry in rated.values())


def draw_all(results: Path, answers: Path, figures: Path, train_length: int | None = None) -> Iterator[Path]:
    """Draws the ratings of every experiment and model, and yields the pictures.

    Args:
        results, answers: the folders that `rate_answers` and `answer_prompts` wrote to, above those of an experiment.
        train_length: where the answers' settings do not say it.

    Raises:
        EvaluationError: there are no ratings.
    """
    files = sorted(results.glob("*/*/*_eval.json"))
    if not files:
        raise EvaluationError(
            f"there is no EXP/MODEL/*_eval.json in {results.absolute()}; run eval.py first, from the same folder"
        )
    for file in files:
        exp, model = file.parent.parent.name, file.parent.name
        judge = file.stem.removesuffix("_eval").removeprefix("OpenAI_")
        settings = answers / exp / model / "settings.json"
        trained = read_json(settings).get("train_length") if settings.is_file() else None
        records = []
        for name, entry in read_json(file).items():
            length, depth = _length_and_depth(name)
            records.append({"length": length, "depth": depth / 10_000, "judge": entry["score"]})
        about = {"model": official.display_name(model), "mode": exp, "train_length": train_length or trained}
        several = len(list(file.parent.glob("*_eval.json"))) > 1  # judges, each of which has a picture
        stem = f"needle_{exp}_{model}" + (f"_{judge}" if several else "")
        pictures = [figures / exp / f"{stem}.{suffix}" for suffix in ("png", "pdf")]
        draw_needles(from_needle({**about, "judge": judge, "records": records}), "judge", *pictures)
        yield from pictures
