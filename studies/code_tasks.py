#!/usr/bin/env python
"""Makes a downstream task of the held-out texts of a corpus of code, for a machine without a network.

    python -m studies.code_tasks --data_path data/python_code --out output/tasks
    python eval/lm_eval_harness/run_lm_eval.py --model_path runs/fox --include_path output/tasks --tasks next_line \\
        --save_dir output/lm_eval

OUT receives next_line.yaml and next_line.jsonl, a task of lm_eval: which of four lines comes next? The wrong ones are
lines of the same text that are indented like the true one. OUT may be moved. The same corpus gives the same questions,
on texts that no model was trained on.

Two kinds of folders are refused: one that has such files of others, and one with other questions, because answers to
them may be there.
"""

import argparse
import json
import math
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from forgetting_transformer import command_line
from forgetting_transformer.analysis import outputs
from forgetting_transformer.command_line import count
from forgetting_transformer.data.model_tokenizer import load_tokenizer
from forgetting_transformer.evaluation.held_out import find_heldout, open_heldout
from forgetting_transformer.evaluation.models import EvaluationError
from forgetting_transformer.files import write_atomically

COMMAND = "studies/code_tasks.py"
FILES = ("next_line.jsonl", "next_line.py", "next_line.yaml")
#: Characters before the line that is asked for: at most, and at least.
MOST, FEWEST = 1_500, 400
#: Wrong choices beside the true line.
_WRONG = 3
#: lm_eval takes the path of a data file from the current folder, and only `!function` from the folder of the task.
_PLACE = '''\
"""Folder of the questions of next_line.yaml. Made by studies/code_tasks.py."""

from pathlib import Path

FILE = str(Path(__file__).with_name("next_line.jsonl"))
'''
_TASK = """\
# Which of four lines of code comes next? Made by studies/code_tasks.py; chance is 25 %.
task: next_line
dataset_path: json
dataset_kwargs:
  data_files:
    test: !function next_line.FILE
output_type: multiple_choice
test_split: test
doc_to_text: code
doc_to_choice: choices
doc_to_target: label
target_delimiter: ""
metric_list:
  - metric: acc
    aggregation: mean
    higher_is_better: true
  - metric: acc_norm
    aggregation: mean
    higher_is_better: true
"""


def make_tasks(data_path: str | Path, out: Path, questions: int) -> int:
    """Writes the task into a folder, and returns how many questions it has.

    Questions that are there already stay: models have answered them, and answers to others are not comparable.

    Args:
        data_path: folder of a corpus with its tokenizer.
        questions: how many at most, spread evenly over the held-out rows.

    Raises:
        AnalysisError: the folder holds a file of such a name that is somebody else's.
        EvaluationError: the corpus has no tokenizer, its texts have no line to ask for, or the folder has other
            questions.
        DataError: the corpus has no held-out texts.
    """
    folder = find_heldout(data_path)
    if not (folder / "tokenizer").is_dir():
        raise EvaluationError(
            f"{folder} has no tokenizer, so that its texts cannot be read: name a corpus that has one"
        )
    outputs.check(out, COMMAND, FILES)
    tokenizer, data = load_tokenizer(folder / "tokenizer"), open_heldout(folder)
    per_row = math.ceil(questions / data.sequences)
    asked: list[dict[str, Any]] = []
    for row in range(data.sequences):
        text = tokenizer.decode(data.read(row)[0].tolist(), skip_special_tokens=True)
        asked += ask(text, per_row, np.random.default_rng(row))
    # Evenly over the rows, if there are a few too many.
    kept = [asked[i] for i in np.linspace(0, len(asked) - 1, min(questions, len(asked))).round().astype(int)]
    if not kept:
        raise EvaluationError(f"the held-out texts of {folder} have no line of code to ask for")
    new = {
        "next_line.jsonl": _lines(map(_for_lm_eval, kept)),
        "next_line.py": _PLACE,
        "next_line.yaml": _TASK,
    }
    for file in (out / name for name in new):
        if file.exists() and file.read_text(encoding="utf-8") != new[file.name]:
            raise EvaluationError(
                f"{file} has other questions than the {len(kept)} of --questions={questions}: choose another --out, or "
                "move the folder and the answers to its questions away"
            )
    with outputs.writing(out, COMMAND) as written:
        for name, text in new.items():
            write_atomically(written / name, text)
    return len(kept)


def ask(text: str, count: int, random: np.random.Generator) -> Iterator[dict[str, Any]]:
    """Up to `count` questions about a text: the text `before` a line, the `line`, and `wrong` ones."""
    lines = text.split("\n")
    starts = np.cumsum([0, *(len(line) + 1 for line in lines)])
    by_indent: dict[int, list[int]] = {}
    for number, line in enumerate(lines[1:-1], start=1):  # the first and the last may be cut
        if is_code(line):
            by_indent.setdefault(_indent(line), []).append(number)
    eligible = [
        number
        for numbers in by_indent.values()
        for number in numbers
        if starts[number] >= FEWEST and len({lines[other] for other in numbers} - {lines[number]}) >= _WRONG
    ]
    for number in sorted(random.permutation(sorted(eligible))[:count].tolist()):
        line = lines[number]
        others = sorted({lines[other] for other in by_indent[_indent(line)]} - {line})
        wrong = [others[i] for i in random.permutation(len(others))[:_WRONG]]
        yield {
            "before": text[: starts[number]],
            "line": line,
            "wrong": wrong,
            "place": int(random.integers(_WRONG + 1)),
        }


def is_code(line: str) -> bool:
    """Whether a line is worth asking for: code of some length, and no comment or text in it."""
    found = line.strip()
    has_marks = any(mark in found for mark in ("#", "`", "//", '"""', "'''"))
    return 10 <= len(found) <= 120 and not has_marks and any(mark in found for mark in "=(.:")


def _indent(line: str) -> int:
    return len(line) - len(line.lstrip())


def _last(text: str, characters: int) -> str:
    """Whole lines at the end of a text."""
    return text if len(text) <= characters else text[-characters:].partition("\n")[2]


def _for_lm_eval(question: dict[str, Any]) -> dict[str, Any]:
    place = question["place"]
    choices = [*question["wrong"][:place], question["line"], *question["wrong"][place:]]
    return {"code": _last(question["before"], MOST), "choices": choices, "label": place}


def _lines(rows: Iterable[dict[str, Any]]) -> str:
    return "".join(f"{json.dumps(row)}\n" for row in rows)


def parse_args(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--data_path", type=command_line.name, required=True, help="folder of a corpus with heldout.zarr and tokenizer"
    )
    parser.add_argument("--questions", type=count, default=500, help="at most; default %(default)s")
    parser.add_argument("--out", type=command_line.path, required=True, metavar="DIR")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> None:
    args = parse_args(argv)
    print(f"{make_tasks(args.data_path, args.out, args.questions)} questions in {args.out}")


if __name__ == "__main__":
    sys.exit(command_line.run(main))
