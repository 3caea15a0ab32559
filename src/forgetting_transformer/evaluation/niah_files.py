"""Needle in a haystack in the four steps of the paper's repository, each of which leaves files for the next.

    prompts/EXP/Huggingface_len_{L}_depth_{100 d}_prompts.json   a prompt in chat format, its text in the second message
    pred/EXP/MODEL/Huggingface_len_{L}_depth_{100 d}.txt         the answer to it; once it is whole, an empty .txt.done
    results/EXP/MODEL/OpenAI_{JUDGE}_eval.json                   name of an answer -> {"prediction", "score": 1 to 10}
    FIGURES/EXP/needle_{EXP}_{MODEL}.png, .pdf                   the heat-map

L counts tokens, d is the depth in percent.
"""

import hashlib
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from forgetting_transformer import files, model_tokenizer
from forgetting_transformer.analysis import needles
from forgetting_transformer.analysis.evaluations import Evaluation, from_needle
from forgetting_transformer.evaluation import niah_paper, official, texts
from forgetting_transformer.evaluation.generation import (
    check_settings,
    continue_greedily,
    read_json,
    write_json,
    write_text,
)
from forgetting_transformer.evaluation.judge import Judge
from forgetting_transformer.evaluation.models import EvaluatedModel, EvaluationError, fingerprint, resolve
from forgetting_transformer.evaluation.workers import Workers

#: The tokenizer that the official configs name: GPT-2's vocabulary behind JSON's escapes.
_HUB_TOKENIZER = "zhixuan-lin/longcrawl64-json-gpt2-tokenizer"
_NAME = re.compile(r"Huggingface_len_(\d+)_depth_(\d+)")


@dataclass(frozen=True)
class PromptConfig:
    """What prompts are made of; `read_prompt_config` reads it from the official YAML format.

    Attributes:
        needle, question: the text that is hidden; what ends a prompt.
        haystack_dir: folder of the essays, here or beside the config.
        lengths: tokens.
        depths: percent.
        tokenizer: folder or hub id.
        save_dir: `prompts`.
    """

    needle: str
    question: str
    haystack_dir: Path
    lengths: Sequence[int]
    depths: Sequence[int]
    tokenizer: str
    save_dir: str


def read_prompt_config(file: Path) -> PromptConfig:
    """
    Raises:
        EvaluationError: there is no such file, it is not YAML, or a key is missing or not supported; names the key.
    """
    config = read_yaml(file)

    def get(section: str | None, key: str) -> Any:
        found = config.get(section, {}) if section else config
        if not isinstance(found, dict) or found.get(key) is None:
            raise EvaluationError(f"{file} lacks the key {f'{section}.' if section else ''}{key}")
        return found[key]

    def grid(section: str, least: str, most: str) -> list[int]:
        chosen = config.get(section, {}).get("manually_select_list")
        try:
            if chosen is None:
                chosen = np.linspace(get(section, least), get(section, most), get(section, "interval"))
            return [round(float(value)) for value in chosen]
        except (TypeError, ValueError) as error:
            raise EvaluationError(
                f"{file}: {section} must give numbers: {least}, {most} and interval ({error})"
            ) from error

    kind = config.get("tokenizer", {}).get("tokenizer_type", "Huggingface")
    if kind != "Huggingface":
        raise EvaluationError(f"{file}: tokenizer.tokenizer_type={kind!r}; only Huggingface is supported")
    spacing = config.get("document_depth", {}).get("interval_type") or "linear"
    if spacing != "linear":
        raise EvaluationError(f"{file}: document_depth.interval_type={spacing!r}; only linear is supported")
    essays = Path(get("prompt", "haystack_dir"))
    if not essays.is_dir() and (file.parent / essays).is_dir():
        essays = file.parent / essays
    return PromptConfig(
        needle=get("prompt", "needle"),
        question=get("prompt", "retrieval_question"),
        haystack_dir=essays,
        lengths=grid("context", "min_len", "max_len"),
        depths=grid("document_depth", "min_percent", "max_percent"),
        tokenizer=get("tokenizer", "model_name"),
        save_dir=get(None, "save_dir"),
    )


def read_yaml(file: Path) -> dict[str, Any]:
    """
    Raises:
        EvaluationError: it is not there, or not a YAML mapping.
    """
    try:
        found = files.read_yaml(file)
    except FileNotFoundError as error:
        beside = sorted(path.name for path in file.absolute().parent.glob("*.yaml"))
        raise EvaluationError(
            f"there is no {file}; {file.absolute().parent} has {', '.join(beside) or 'no *.yaml'}"
        ) from error
    except OSError as error:
        raise EvaluationError(f"{file} cannot be read: {error.strerror}") from error
    except files.UnreadableError as error:
        raise EvaluationError(str(error)) from error
    if not isinstance(found, dict):
        raise EvaluationError(f"{file} is not a YAML mapping of keys to values")
    return found


def load_prompt_tokenizer(source: str) -> Any:
    """The tokenizer that prompts are counted with.

    Raises:
        EvaluationError: there is none.
    """
    import forgetting_transformer.model  # noqa: F401 (a folder with a model has its config, which must be known)
    from forgetting_transformer.model_tokenizer import load_tokenizer

    try:
        if source == _HUB_TOKENIZER and not Path(source).is_dir():
            return model_tokenizer.longcrawl64_tokenizer()
        return load_tokenizer(source)
    except (OSError, ValueError, KeyError) as error:
        raise EvaluationError(
            f"the tokenizer {source} cannot be loaded ({str(error).strip().splitlines()[0]}); "
            "give a folder with --tokenizer"
        ) from error


def write_prompts(config: PromptConfig, exp: str, tokenizer: Any, folder: Path | None) -> Path:
    """Writes a prompt for every length and depth, and returns their folder.

    Args:
        folder: of essays; None takes the config's if it is there, else Python's documentation, and says so on stderr.

    Raises:
        EvaluationError: there is no text, a length has no room for the needle, or the folder has
            prompts of another kind.
    """
    target = Path(config.save_dir) / one_folder("--exp", exp)
    text = niah_paper.find_text(folder, config.haystack_dir)
    haystack = niah_paper.Essays(tokenizer, text, bos=tokenizer.bos_token_id is not None)
    cure = "choose another --exp, or delete the folder"
    if any(target.glob("*_prompts.json")) and not (target / "settings.json").is_file():
        raise EvaluationError(f"{target} holds prompts that do not say how they were made: {cure}")
    settings = {
        "needle": config.needle,
        "question": config.question,
        "lengths": config.lengths,
        "depths": config.depths,
        "tokenizer": config.tokenizer,
        "vocabulary": _digest(sorted(tokenizer.get_vocab().items())),
        "haystack": haystack.digest,
    }
    check_settings(target, settings, cure)
    for length in config.lengths:
        for depth in config.depths:
            prompt = haystack.prompt_text(config.needle, config.question, length, depth)
            messages = [{"role": "system", "content": ""}, {"role": "user", "content": prompt}]
            write_json(target / f"Huggingface_len_{length}_depth_{100 * depth}_prompts.json", messages)
    return target


def _digest(value: object) -> str:
    return hashlib.blake2b(repr(value).encode("utf-8", "surrogatepass"), digest_size=8).hexdigest()


def answer_prompts(
    model: EvaluatedModel,
    prompts: Path,
    folder: Path,
    workers: Workers,
    *,
    max_new_tokens: int = niah_paper.MAX_NEW_TOKENS,
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
    todo = [name for name in mine if not _sentinel(folder, name).is_file()]
    for name in tqdm(todo, desc=model.name, unit="prompt", disable=not workers.shows_progress):
        ids = np.concatenate([texts.begin(model), texts.encode(model, questions[name])]).astype(np.int64)
        (answer,) = continue_greedily(model, ids[None], max_new_tokens, precision)
        write_text(folder / f"{name}.txt", answer.strip())
        _sentinel(folder, name).touch()
    workers.wait()
    return len(names)


def rate_answers(answers: Path, results: Path, question: str, reference: str, judge: Judge) -> tuple[Path, int]:
    """Has every answer rated that is whole, and writes all ratings; returns their file and how many answers have none.

    Raises:
        EvaluationError: there are no answers, or the endpoint refuses.
    """
    names = sorted((file.stem for file in answers.glob("*.txt")), key=_length_and_depth)
    whole = [name for name in names if _sentinel(answers, name).is_file()]
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
        settings = answers / exp / model / "settings.json"
        trained = read_json(settings).get("train_length") if settings.is_file() else None
        found = as_evaluation(
            read_json(file),
            model,
            exp,
            file.stem.removesuffix("_eval").removeprefix("OpenAI_"),
            train_length or trained,
        )
        several = len(list(file.parent.glob("*_eval.json"))) > 1  # judges, each of which has a picture
        stem = f"needle_{exp}_{model}" + (f"_{found.settings['judge']}" if several else "")
        pictures = [figures / exp / f"{stem}.{suffix}" for suffix in ("png", "pdf")]
        needles.draw(found, "judge", *pictures)
        yield from pictures


def as_evaluation(
    ratings: Mapping[str, Mapping[str, Any]], model: str, exp: str, judge: str, train_length: int | None
) -> Evaluation:
    """Ratings by name of the answer, as an evaluation."""
    records = []
    for name, entry in ratings.items():
        length, depth = _length_and_depth(name)
        records.append({"length": length, "depth": depth / 10_000, "judge": entry["score"]})
    model = official.display_name(model)
    return from_needle({"model": model, "mode": exp, "train_length": train_length, "judge": judge, "records": records})


def one_folder(flag: str, name: str) -> str:
    """A name that a folder gets.

    Raises:
        EvaluationError: it is a path.
    """
    if name in (".", "..") or "/" in name or "\\" in name:
        raise EvaluationError(f"{flag}={name!r} names a folder; it must not contain a path separator")
    return name


def _question(file: Path) -> str:
    messages = read_json(file)
    try:
        return messages[1]["content"]
    except (LookupError, TypeError) as error:
        raise EvaluationError(
            f"{file} is not a prompt as prompt.py writes it; delete it and run prompt.py again"
        ) from error


def _sentinel(folder: Path, name: str) -> Path:
    return folder / f"{name}.txt.done"


def _length_and_depth(name: str) -> tuple[int, int]:
    found = _NAME.match(name)
    if found is None:
        raise EvaluationError(
            f"{name}.txt is not named as pred.py names answers, Huggingface_len_L_depth_D.txt; move it elsewhere"
        )
    return int(found[1]), int(found[2])
