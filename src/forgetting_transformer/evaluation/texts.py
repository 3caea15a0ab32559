"""Texts to evaluate on, as token ids of the model: files, folders of files, held-out documents of a corpus."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np

from forgetting_transformer import model_tokenizer
from forgetting_transformer.data.corpus import Corpus
from forgetting_transformer.data.vocabulary import Vocabulary
from forgetting_transformer.evaluation.held_out import HeldOut, check_vocabulary, find_heldout, open_heldout
from forgetting_transformer.evaluation.models import EvaluatedModel, EvaluationError

TEXT_SUFFIXES = (".txt", ".md", ".py")


def read_tokens(
    model: EvaluatedModel, text: Path | None, data_path: str, dataset: str, document: int, max_length: int
) -> np.ndarray:
    """One text as `(T,)` int64, T ≤ max_length, the beginning-of-sequence token first.

    Args:
        text: a file, in UTF-8; or
        data_path, dataset, document: a held-out document of a corpus that was made with the model's tokenizer.

    Raises:
        EvaluationError: no such file or document, or an empty one.
    """
    if text is not None:
        if not text.is_file():
            raise EvaluationError(f"--text={text}: no such file")
        ids = np.array(encode(model, text.read_text(encoding="utf-8", errors="replace")), dtype=np.int64)
    else:
        data = _open(model, data_path, dataset)
        if document >= data.sequences:
            raise EvaluationError(f"--document={document}: {data.array.path} has documents 0 to {data.sequences - 1}")
        ids = data.read(document)[0].astype(np.int64)
    if len(ids) == 0:
        raise EvaluationError(f"--text={text} is empty")
    check_ids(model, ids)
    return np.concatenate([begin(model), ids])[:max_length]


def read_heldout(model: EvaluatedModel, data_path: str, dataset: str, needed: int) -> np.ndarray:
    """Held-out documents of a corpus that was made with the model's tokenizer, as many as make `needed` tokens."""
    data = _open(model, data_path, dataset)
    documents = min(data.sequences, -(-needed // data.length))
    ids = np.concatenate([data.read(n)[0] for n in range(documents)]).astype(np.int64)
    check_ids(model, ids)
    return ids


def _open(model: EvaluatedModel, data_path: str, dataset: str) -> HeldOut:
    # A corpus that does not say what it was made with is taken to be the model's.
    recorded = Vocabulary(model.model.config.get_text_config().vocab_size, model.bos_token_id or 0)
    data = open_heldout(find_heldout(data_path, dataset), recorded=recorded)
    check_vocabulary(model, data)
    return data


def encode(model: EvaluatedModel, text: str) -> list[int]:
    """Token ids of a text: `model_tokenizer.encode`."""
    return model_tokenizer.encode(model.require_tokenizer(), text)


def begin(model: EvaluatedModel) -> np.ndarray:
    """The beginning-of-sequence token, with which every sequence of training began; nothing where there is none."""
    bos = model.bos_token_id
    return np.array([] if bos is None else [bos], dtype=np.int64)


def read_folder(folder: Path, pattern: str = "**/*") -> list[str]:
    """The texts of a folder and the folders in it, in the order of their paths.

    Args:
        pattern: of their paths; "*.txt" takes no other kind, and none of the folders in it.

    Raises:
        EvaluationError: it is not there, or holds no text.
    """
    if not folder.is_dir():
        raise EvaluationError(f"there is no folder {folder}: give a folder of texts")
    files = sorted(path for path in folder.glob(pattern) if path.suffix in TEXT_SUFFIXES and path.is_file())
    texts = [file.read_text(encoding="utf-8", errors="replace") for file in files]
    if not any(text.strip() for text in texts):
        raise EvaluationError(f"{folder} holds no text: put .txt files there")
    return texts


def check_ids(model: EvaluatedModel, ids: np.ndarray) -> None:
    """Refuses tokens that the model does not know.

    Raises:
        EvaluationError: naming the first of them.
    """
    vocab_size = model.model.config.get_text_config().vocab_size
    if ids.size and int(ids.max()) >= vocab_size:
        raise EvaluationError(
            f"token {int(ids.max())} is not among the {vocab_size:,} of {model.source}: the text "
            "was tokenised for another model"
        )


def held_out_rows(corpus: Corpus, model: EvaluatedModel) -> Iterator[np.ndarray]:
    """Held-out sequences of a corpus in training, alike on every rank, less the tokens that begin and end a text.

    Raises:
        DataError: nothing is held out. EvaluationError: a token is not the model's.
    """
    corpus.eval_info()
    for batch in corpus.eval_loader(0, 1):
        for ids in batch["labels"][batch["weight"] > 0].numpy():
            kept = ids[~np.isin(ids, [*begin(model), *model.eos_token_ids])]
            check_ids(model, kept)
            yield kept
