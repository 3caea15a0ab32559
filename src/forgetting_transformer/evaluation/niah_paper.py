"""Needle in a haystack with the prompts of the paper: its essays, quiz sentence and accounting of lengths.

    essays, joined without anything between them, from the beginning again if they are too short
      -> the first L tokens, of which the beginning-of-sequence token is one
      -> without their end, so that with the needle they are L - 200 tokens
      -> the needle after the last token "." before its depth
      -> as text, and after it the quiz sentence and the question

A prompt named after the length L therefore has about L - 200 tokens and those of the quiz, which are 59 with GPT-2's
vocabulary. niah.py counts exactly. Needle, question and grid are the same in both.

The essays are Paul Graham's, which have no free licence; the paper's repository has them in
eval/niah/PaulGrahamEssays. Without them the haystack is the reference documentation that comes with Python, under
Python's licence.

Source: zhixuan-lin/forgetting-transformer, eval/niah; Lin et al., "Forgetting Transformer", ICLR 2025, section 4.3.
"""

import hashlib
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from forgetting_transformer import model_tokenizer
from forgetting_transformer.evaluation import texts
from forgetting_transformer.evaluation.models import EvaluatedModel, EvaluationError
from forgetting_transformer.evaluation.niah import Cell, Needle

#: run_niah.py's name of the mode -> which needle is hidden.
MODES = {"paper": "standard", "paper_easy": "easy"}
LENGTHS = tuple(range(1000, 32001, 3100))
DEPTHS = tuple(range(0, 101, 10))  # percent
MAX_NEW_TOKENS = 1024
ESSAYS = "PaulGrahamEssays"
_QUIZ = (
    "\n\nThere is an important piece of information hidden inside the above document. Now that you've read the "
    "document, I will quiz you about it. Answer the following question: "
)
_BUFFER = 200  # tokens that the paper sets aside for the question and the answer


def read_essays(folder: Path) -> str:
    """The `.txt` files of a folder, joined without anything between them, in the order of their names.

    The official script takes the order in which the file system lists them, which differs between machines.

    Raises:
        EvaluationError: the folder is not there, or holds no text.
    """
    if not folder.is_dir():
        raise EvaluationError(f"there is no folder {folder}: give a folder of texts, .txt files in UTF-8")
    joined = "".join(file.read_text(encoding="utf-8", errors="replace") for file in sorted(folder.glob("*.txt")))
    if not joined.strip():
        raise EvaluationError(f"{folder} holds no text: put .txt files there")
    return joined


def find_text(chosen: Path | None, expected: Path) -> str:
    """The text of a folder of essays: the chosen one, else the expected one.

    Where neither is named nor there, it is Python's documentation, and one line on stderr says so.

    Raises:
        EvaluationError: there is no text in the folder.
    """
    if chosen is not None or expected.is_dir():
        return read_essays(chosen or expected)
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


class Essays:
    """A haystack of the paper's kind.

    Args:
        tokenizer: that lengths are counted with.
        text: all essays.
        bos: whether a beginning-of-sequence token counts as the first one.

    Raises:
        EvaluationError: there is no text.
    """

    def __init__(self, tokenizer: Any, text: str, bos: bool = True) -> None:
        self.tokenizer, self.text, self.bos = tokenizer, text, bos
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

    def prompt_text(self, needle: str, question: str, length: int, depth: float) -> str:
        """A whole prompt; `question` ends it, and is what the model continues."""
        return f"{self.context(needle, length, depth)}{_QUIZ}{question}"

    def prompt(self, model: EvaluatedModel, needle: Needle, mode: str, cell: Cell) -> np.ndarray:
        """The prompt of a cell as token ids `(T,)`, where T is near `cell.length`."""
        text = self.prompt_text(needle.text(MODES[mode]), question(needle), cell.length, round(100 * cell.depth, 2))
        return np.concatenate([texts.begin(model), texts.encode(model, text)]).astype(np.int64)

    def _beginning(self, length: int) -> list[int]:
        """Tokens of the essays, which begin again where they end, when they are cut to a length."""
        kept = length - self.bos
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


def question(needle: Needle) -> str:
    """What ends a prompt: the question, and how its answer begins."""
    return f"{needle.question} Answer: {needle.statement}"
