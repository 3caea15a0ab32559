"""Texts to evaluate on, as token ids of the model: files, folders of files, held-out documents of a corpus."""

from pathlib import Path

import numpy as np

from forgetting_transformer import model_tokenizer
from forgetting_transformer.data.vocabulary import Vocabulary
from forgetting_transformer.evaluation.models import EvaluatedModel, EvaluationError
from forgetting_transformer.evaluation.per_token_loss import check_vocabulary, find_heldout, open_heldout

TEXT_SUFFIXES = (".txt", ".md", ".py")


def read_tokens(
    model: EvaluatedModel, text: Path | None, data_path: str | None, dataset: str, document: int, max_length: int
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
    elif data_path is None:
        raise EvaluationError("no text is given: set --text, or --data_path and --dataset")
    else:
        data = open_heldout(find_heldout(data_path, dataset), recorded=vocabulary_of_model(model))
        check_vocabulary(model, data)
        if not 0 <= document < data.sequences:
            raise EvaluationError(f"--document={document}: {data.array.path} has documents 0 to {data.sequences - 1}")
        ids = data.read(document)[0].astype(np.int64)
    if len(ids) == 0:
        raise EvaluationError(f"--text={text} is empty")
    check_ids(model, ids)
    return np.concatenate([begin(model), ids])[:max_length]


def vocabulary_of_model(model: EvaluatedModel) -> Vocabulary:
    """What a corpus that does not say was made with, if it is the model's."""
    return Vocabulary(model.model.config.get_text_config().vocab_size, model.bos_token_id or 0)


def encode(model: EvaluatedModel, text: str) -> list[int]:
    """Token ids of a text: `model_tokenizer.encode`."""
    return model_tokenizer.encode(model.require_tokenizer(), text)


def begin(model: EvaluatedModel) -> np.ndarray:
    """What every sequence of training began with: the beginning-of-sequence token, nothing where there is none."""
    bos = model.bos_token_id
    return np.array([] if bos is None else [bos], dtype=np.int64)


def without_bounds(model: EvaluatedModel, ids: np.ndarray) -> np.ndarray:
    """The tokens `(N,)` of a corpus's texts, less those that begin and end a text."""
    return ids[~np.isin(ids, [*begin(model), *model.eos_token_ids])]


def read_folder(folder: Path) -> list[str]:
    """The texts of a folder and the folders in it, in the order of their paths.

    Raises:
        EvaluationError: it is not there, or holds no text.
    """
    if not folder.is_dir():
        raise EvaluationError(f"there is no folder {folder}: give a folder of texts")
    files = sorted(path for path in folder.rglob("*") if path.suffix in TEXT_SUFFIXES and path.is_file())
    texts = [file.read_text(encoding="utf-8", errors="replace") for file in files]
    if not any(text.strip() for text in texts):
        raise EvaluationError(f"{folder} holds no text: put files there that end in {', '.join(TEXT_SUFFIXES)}")
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
