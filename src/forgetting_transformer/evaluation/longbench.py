"""LongBench (v1): the fourteen English sets that the paper uses, with its prompts, its truncation and its scores.

Prompts and lengths of answers are the benchmark's, github.com/THUDM/LongBench (MIT licence; Bai et al., 2023):

- a prompt that is too long keeps its first and its last half, which are made text and encoded again;
- answers are greedy, and their first line alone counts;
- scores: F1 of words (question answering), ROUGE-L (summaries), found class among the classes found (TREC), similarity
  of the first line that is code (code); the best over the reference answers, times 100.

LongBench-E has further examples for eleven of them, equally many of each length, and a score for each range of lengths.

The benchmark's own code differs in three points: it cuts prompts in tokens, an answer for SAMSum ends at a line break,
and only for TREC, TriviaQA and SAMSum does the first line of an answer alone count.

Files, below the current folder:

    pred/MODEL/<set>.jsonl           the answers, in the order of the examples, and an empty .jsonl.done beside them
    pred/MODEL/result.json           set -> score
    pred/MODEL/evaluation.json       the same with standard errors (analysis/evaluations.py)
    pred_e/MODEL/…                   the same for LongBench-E, set -> range of lengths -> score
"""

import difflib
import json
import re
import string
import zipfile
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from forgetting_transformer.analysis import tables
from forgetting_transformer.analysis.evaluations import from_longbench, read_json, write_evaluation
from forgetting_transformer.analysis.published import longbench_by_length, longbench_table
from forgetting_transformer.analysis.statistics import mean_and_error
from forgetting_transformer.console import how_to_install
from forgetting_transformer.data.storage.hub import only_cached
from forgetting_transformer.evaluation.generation import answer, begin, read_records
from forgetting_transformer.evaluation.models import EvaluatedModel, EvaluationError, folder_name
from forgetting_transformer.evaluation.workers import Workers
from forgetting_transformer.files import parse_json_lines, write_atomically, write_json

HUB_ID, ARCHIVE = "THUDM/LongBench", "data.zip"


def f1(prediction: str, answer: str, _classes: Sequence[str] = ()) -> float:
    """F1 of the bags of words, without case, punctuation and articles."""
    got, wanted = _normalised_words(prediction), _normalised_words(answer)
    common = sum((Counter(got) & Counter(wanted)).values())
    if common == 0:
        return 0.0
    precision, recall = common / len(got), common / len(wanted)
    return 2 * precision * recall / (precision + recall)


def rouge_l(prediction: str, answer: str, _classes: Sequence[str] = ()) -> float:
    """F of ROUGE-L as the package `rouge` computes it; 0 where that has nothing to compare."""
    try:
        from rouge import Rouge
    except ImportError as error:
        raise EvaluationError(
            f"LongBench's summaries are scored with the package rouge: {how_to_install('eval')}"
        ) from error
    try:
        return Rouge(metrics=["rouge-l"]).get_scores([prediction], [answer], avg=True)["rouge-l"]["f"]
    except (ValueError, RecursionError):
        return 0.0


def classification(prediction: str, answer: str, classes: Sequence[str] = ()) -> float:
    """1/n if the answer is among the n classes that the prediction names, else 0.

    Classes that are part of the answer's own name do not count as named.
    """
    named = [name for name in classes if name in prediction and (name == answer or name not in answer)]
    return 1 / len(named) if answer in named else 0.0


def code_similarity(prediction: str, answer: str, _classes: Sequence[str] = ()) -> float:
    """Similarity of the prediction's line of code to the answer, in whole percent; 0 without such a line.

    The benchmark takes fuzzywuzzy's ratio, which is that of `difflib` unless another package is installed.
    """
    return round(100 * difflib.SequenceMatcher(None, code_line(prediction) or "", answer).ratio()) / 100


def code_line(prediction: str) -> str | None:
    """The first line without #, // or `, which the benchmark takes for signs of a comment or a fence; None without one.

    It may be an empty line: only those at the very beginning of the prediction are skipped.
    """
    lines = prediction.lstrip("\n").split("\n")
    return next((line for line in lines if not any(mark in line for mark in ("`", "#", "//"))), None)


def _normalised_words(text: str) -> list[str]:
    text = "".join(character for character in text.lower() if character not in string.punctuation)
    return re.sub(r"\b(a|an|the)\b", " ", text).split()


@dataclass(frozen=True)
class Set:
    """One set of the benchmark.

    Attributes:
        prompt: filled with an example's `context` and `input`.
        max_new_tokens: longest answer.
        score: of a prediction against one reference answer, 0 to 1; the third argument is the example's classes.
    """

    prompt: str
    max_new_tokens: int
    score: Callable[[str, str, Sequence[str]], float]


_PASSAGES = (
    "Answer the question based on the given passages. Only give me the answer and do not output any other words."
    "\n\nThe following are given passages.\n{context}\n\n"
    "Answer the question based on the given passages. Only give me the answer and do not output any other words."
    "\n\nQuestion: {input}\nAnswer:"
)
# "asconcisely" is the benchmark's own spelling, and part of the prompt.
_STORY = "asconcisely as you can, using a single phrase if possible. Do not provide any explanation.\n\n"
_ARTICLE = (
    "as concisely as you can, using a single phrase or sentence if possible. If the question cannot be answered based "
    'on the information in the article, write "unanswerable". If the question is a yes/no question, answer "yes", '
    '"no", or "unanswerable". Do not provide any explanation.\n\n'
)

#: The sets, in the order of the paper's Table 2.
SETS: dict[str, Set] = {
    "narrativeqa": Set(
        "You are given a story, which can be either a novel or a movie script, and a question. Answer the question "
        + _STORY
        + "Story: {context}\n\nNow, answer the question based on the story "
        + _STORY
        + "Question: {input}\n\nAnswer:",
        128,
        f1,
    ),
    "qasper": Set(
        "You are given a scientific article and a question. Answer the question "
        + _ARTICLE
        + "Article: {context}\n\n Answer the question based on the above article "
        + _ARTICLE
        + "Question: {input}\n\nAnswer:",
        128,
        f1,
    ),
    "multifieldqa_en": Set(
        "Read the following text and answer briefly.\n\n{context}\n\nNow, answer the following question based on the "
        "above text, only give me the answer and do not output any other words.\n\nQuestion: {input}\nAnswer:",
        64,
        f1,
    ),
    "hotpotqa": Set(_PASSAGES, 32, f1),
    "2wikimqa": Set(_PASSAGES, 32, f1),
    "musique": Set(_PASSAGES, 32, f1),
    "gov_report": Set(
        "You are given a report by a government agency. Write a one-page summary of the "
        "report.\n\nReport:\n{context}\n\nNow, write a one-page summary of the report.\n\nSummary:",
        512,
        rouge_l,
    ),
    "qmsum": Set(
        "You are given a meeting transcript and a query containing a question or instruction. Answer the query in one "
        "or more sentences.\n\nTranscript:\n{context}\n\nNow, answer the query based on the above meeting transcript "
        "in one or more sentences.\n\nQuery: {input}\nAnswer:",
        512,
        rouge_l,
    ),
    "multi_news": Set(
        "You are given several news passages. Write a one-page summary of all news. \n\nNews:\n{context}\n\n"
        "Now, write a one-page summary of all the news.\n\nSummary:",
        512,
        rouge_l,
    ),
    "trec": Set(
        "Please determine the type of the question below. Here are some examples of questions.\n\n{context}\n{input}",
        64,
        classification,
    ),
    "triviaqa": Set(
        "Answer the question based on the given passage. Only give me the answer and do not output any other words. "
        "The following are some examples.\n\n{context}\n\n{input}",
        32,
        f1,
    ),
    "samsum": Set(
        "Summarize the dialogue into a few short sentences. The following are some examples.\n\n{context}\n\n{input}",
        128,
        rouge_l,
    ),
    "lcc": Set("Please complete the code given below. \n{context}Next line of code:\n", 64, code_similarity),
    "repobench-p": Set(
        "Please complete the code given below. \n{context}{input}Next line of code:\n",
        64,
        code_similarity,
    ),
}
#: Sets of LongBench-E.
E_SETS = tuple(name for name in SETS if name not in ("narrativeqa", "musique", "qmsum"))
#: LongBench-E's ranges of lengths: name -> first length beyond, in words.
RANGES = {"0-4k": 4000, "4-8k": 8000, "8k+": float("inf")}


def choose_sets(chosen: str | None, even: bool = False) -> list[str]:
    """The sets of a command line.

    Args:
        chosen: names with commas between them; None for all.
        even: of LongBench-E.

    Raises:
        EvaluationError: there is no such set; lists all sets.
    """
    known = E_SETS if even else tuple(SETS)
    names = list(known) if chosen is None else chosen.split(",")
    for name in names:
        if name not in known:
            raise EvaluationError(
                f"--sets={name}: the {'sets of LongBench-E' if even else 'English sets'} are {', '.join(known)}"
            )
    return names


def read_examples(name: str, data: Path | None, even: bool = False) -> list[dict[str, Any]]:
    """The examples of a set.

    Args:
        even: those of LongBench-E.
        data: the benchmark's data.zip, a folder with it, or a folder with `<set>.jsonl`; None
            fetches data.zip from the hub.

    Raises:
        EvaluationError: the set is missing; the message has the way to get it.
    """
    name = f"{name}_e" if even else name
    advice = (
        f"run `hf download --repo-type dataset {HUB_ID} {ARCHIVE} --local-dir FOLDER` on a machine with a network, "
        f"copy the folder here, and set --data_dir to it"
    )
    if data is None:
        try:
            from huggingface_hub import hf_hub_download

            data = Path(hf_hub_download(HUB_ID, ARCHIVE, repo_type="dataset", local_files_only=only_cached()))
        except (OSError, ValueError) as error:
            reason = str(error).strip().splitlines()[0]
            raise EvaluationError(f"LongBench's data cannot be downloaded ({reason}): {advice}") from error
    candidates = [data] if data.is_file() else [data / f"{name}.jsonl", data / "data" / f"{name}.jsonl", data / ARCHIVE]
    file = next((path for path in candidates if path.is_file()), None)
    if file is None:
        raise EvaluationError(f"no {name}.jsonl and no {ARCHIVE} in {data}: {advice}")
    try:
        examples = list(parse_json_lines(_content(file, name), f"{name}.jsonl"))
        for example in examples:
            _ = example["context"], example["input"], example["answers"]
    except (OSError, ValueError, KeyError, TypeError, zipfile.BadZipFile) as error:
        raise EvaluationError(
            f"{file}: {name}.jsonl is not a set of LongBench ({type(error).__name__}: {error}): {advice}"
        ) from error
    if not examples:
        raise EvaluationError(f"{file}: {name}.jsonl holds no examples: {advice}")
    return examples


def _content(file: Path, name: str) -> bytes:
    if file.suffix != ".zip":
        return file.read_bytes()
    with zipfile.ZipFile(file) as archive:  # never unpacked, so it cannot write anywhere
        return archive.read(f"data/{name}.jsonl")


def build_prompt(model: EvaluatedModel, name: str, example: Mapping[str, Any], max_length: int) -> np.ndarray:
    """Token ids `(T,)`, T near max_length at most: beginning-of-sequence token, then the prompt.

    The middle of one that is too long is left out, and the rest encoded again, which may change a few tokens.
    """
    first = model.first
    ids = model.encode(SETS[name].prompt.format(context=example["context"], input=example["input"]))
    if len(ids) > max_length - len(first):
        half, tokenizer = max_length // 2, model.require_tokenizer()
        # Half of the length counts the beginning-of-sequence token, which text has not.
        ends = ids[: half - len(first)].tolist(), ids[len(ids) - half :].tolist()
        ids = model.encode("".join(tokenizer.decode(end, skip_special_tokens=True) for end in ends))
    return np.concatenate([first, ids])


def score_example(name: str, record: Mapping[str, Any]) -> float:
    """0 to 1, the best over the reference answers, for the first line of an answer as `answer_sets` writes it."""
    prediction, classes = record["pred"].lstrip("\n").split("\n")[0], record.get("all_classes") or ()
    return max((SETS[name].score(prediction, answer, classes) for answer in record["answers"]), default=0.0)


def folder_of(model: str, even: bool) -> Path:
    """Folder of answers or scores of the paper's steps, below the current folder.

    Raises:
        EvaluationError: the name is a path.
    """
    return Path("pred_e" if even else "pred") / folder_name("--model", model)


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

    A line has `pred`, and of the example `answers`, `all_classes` and `length`.

    Args:
        data, even: as in `read_examples`.
        max_length: tokens of a prompt.
        limit: examples of each set, for a quick look; None for all.

    Raises:
        EvaluationError: a set's data is missing, or the folder holds answers of other settings.
    """
    todo = [name for name in sets if not _done(folder / f"{name}.jsonl").is_file()]
    if todo:
        read_examples(todo[0], data, even)  # missing data is an error before anything is written
    begin(model, folder, workers, precision, {"max_length": max_length, "limit": limit})
    for name in todo:
        file, examples = folder / f"{name}.jsonl", read_examples(name, data, even)[:limit]
        kept = [{key: example.get(key) for key in ("answers", "all_classes", "length")} for example in examples]

        def prompt_of(n: int, name: str = name, examples: Sequence[Mapping[str, Any]] = examples) -> np.ndarray:
            return build_prompt(model, name, examples[n], max_length)

        keys, parts = [str(n) for n in range(len(examples))], folder / "unfinished" / name
        texts = answer(model, parts, keys, prompt_of, SETS[name].max_new_tokens, workers, precision)
        if workers.is_first:
            records = [{"pred": text, **about} for text, about in zip(texts, kept, strict=True)]
            write_atomically(file, "".join(f"{json.dumps(record, ensure_ascii=False)}\n" for record in records))
            _done(file).touch()
        workers.wait()


def score_sets(folder: Path, even: bool = False) -> tuple[tables.Table, list[str]]:
    """Scores every finished set of a folder and writes result.json and evaluation.json.

    Returns:
        A table of the scores, and the sets that are not finished.

    Raises:
        EvaluationError: no set is. AnalysisError: the folder holds a file of one of these names that is not its own.
    """
    answers = {name: folder / f"{name}.jsonl" for name in choose_sets(None, even)}
    finished = {name: read_records(file) for name, file in answers.items() if _done(file).is_file()}
    if not any(finished.values()):
        raise EvaluationError(
            f"no finished set in {folder} (<set>.jsonl.done); "
            f"run pred.py with the same --model{' and --e' * even} first"
        )
    scores: dict[str, Any] = {}
    errors: dict[str, tuple[float | None, int]] = {}
    for name, records in finished.items():
        if even and records:
            scores[name] = score_by_length(name, records)
        elif records:
            found = np.array([100 * score_example(name, record) for record in records])
            scores[name], errors[name] = score(name, records), (mean_and_error(found)[1], len(found))
    write_json(folder / "result.json", scores)
    made_with = folder / "settings.json"  # which pred.py of the authors does not write
    settings = read_json(made_with) if made_with.is_file() else {}
    evaluation = from_longbench(scores, folder.name, errors, settings=settings)
    rows, columns = longbench_by_length(evaluation) if even else longbench_table({folder.name: [evaluation]})
    shown = [column for column in columns if column.key in scores]
    table = tables.score_table(rows, shown, "Words" if even else "Model")
    write_evaluation(evaluation, folder, table=table)
    return table, [name for name in answers if name not in finished]


def _done(file: Path) -> Path:
    return file.with_name(f"{file.name}.done")


def score(name: str, records: Sequence[Mapping[str, Any]]) -> float:
    """The score of a set, 0 to 100: the mean over its answers as `answer_sets` writes them."""
    scores = [score_example(name, record) for record in records]
    return round(100 * sum(scores) / len(scores), 2)


def score_by_length(name: str, records: Sequence[Mapping[str, Any]]) -> dict[str, float | None]:
    """The score for each range of lengths of LongBench-E; None where it has no examples."""
    found, least = {}, 0.0
    for words, beyond in RANGES.items():
        inside = [record for record in records if least <= record["length"] < beyond]
        found[words], least = score(name, inside) if inside else None, beyond
    return found
