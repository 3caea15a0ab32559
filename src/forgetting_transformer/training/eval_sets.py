"""Held-out sets besides the corpus's own (`eval_sets`): opened and checked before the first step.

A set is the held-out array of a corpus's folder, whatever corpus the run trains on. Nothing else of that folder need
be there. A folder without one is a corpus of the plug-in that reads the run's own. Losses of two sets can be compared
only if both were made with the tokenizer of the training corpus, which is checked as far as the folders say which that
was.
"""

import dataclasses
import difflib
import logging
from pathlib import Path
from typing import Any

from forgetting_transformer.data import DataError, DataInfo, LongCrawl64DataModule
from forgetting_transformer.data.corpus import Corpus
from forgetting_transformer.data.storage.array_files import NoArrayError
from forgetting_transformer.data.storage.remote import is_url, join
from forgetting_transformer.data.vocabulary import Vocabulary, other_tokens
from forgetting_transformer.metric_names import FINGERPRINT, VAL_SET, name_of
from forgetting_transformer.plugins import CORPORA
from forgetting_transformer.training.config import Config, ConfigError
from forgetting_transformer.training.records.metrics import read_lines

log = logging.getLogger(__name__)

#: Keys of datamodule that hold for every set; those of remote corpora only where the corpus has them.
_SHARED = (
    "train_batch_len", "train_batch_size", "eval_tokens", "eval_batch_len", "eval_local_batch_size",
    "eval_num_workers", "missing_chunks", "cache_dir", "cache_gb",
)  # fmt: skip
_OTHER_TOKENIZER = (
    "it was made with another tokenizer; prepare it again with that of the corpus (scripts/prepare_data.py --tokenizer "
    "FOLDER)"
)


def kind_of(name: str) -> str:
    """The kind of the lines and arrays that a set's losses are written as."""
    return f"{VAL_SET}{name}"


def open_eval_sets(config: Config, corpus: Corpus, info: DataInfo) -> dict[str, Corpus]:
    """The sets of `eval_sets` by name, of which nothing but the held-out array is read; none with `skip_eval`.

    Args:
        corpus, info: what the run trains on.

    Raises:
        DataError: a set cannot be evaluated on; in one line that begins with its key and value.
    """
    sets: dict[str, Corpus] = {}
    for name, path in config.eval_sets.items() if not config.skip_eval else ():
        try:
            sets[name] = _open(config, path, corpus, info)
        except DataError as error:
            raise DataError(f"eval_sets.{name}={path}: {error}") from error
    return sets


def check_texts(config: Config, corpus: Corpus, sets: dict[str, Corpus], jsonlines: Path) -> None:
    """Compares texts and tokens: two tokenizers may have as many ids, and other tokens.

    Args:
        jsonlines: folder with what earlier starts of the run have written of the sets.

    Raises:
        DataError: parts of the corpus, or a set and the corpus, were made with different tokenizers.
        ConfigError: a set has other texts than it had so far in this run.
    """
    if config.eval_sets and config.skip_eval:
        log.warning("eval_sets is not evaluated, because of skip_eval=true; set skip_eval=false")
    if hasattr(corpus, "check_tokenizers"):
        corpus.check_tokenizers()
    for name, one in sets.items():
        if difference := other_tokens(one.folder, corpus.folder):
            raise DataError(f"eval_sets.{name}={config.eval_sets[name]}: {difference}; {_OTHER_TOKENIZER}")
    if config.resume:
        _check_same_texts(sets, jsonlines)


def _check_same_texts(sets: dict[str, Corpus], jsonlines: Path) -> None:
    """Losses on different texts under one name would be taken for one curve."""
    for name, one in sets.items():
        kind, info = kind_of(name), one.eval_info()
        file = jsonlines / f"{kind}.jsonl"
        lines = read_lines(file) if file.is_file() else []
        key = name_of(kind, FINGERPRINT)
        before = next((line for line in reversed(lines) if key in line), None)
        if before is not None and before[key] != info.fingerprint:
            raise ConfigError(
                f"eval_sets.{name} was {before.get(f'{kind}/path')} so far in this run, and {info.path} has other "
                f"texts; give them another name, as in eval_sets.{name}_2"
            )


def _open(config: Config, path: str, corpus: Corpus, info: DataInfo) -> Corpus:
    data, folder = config.datamodule, _where_is(config.data_dir, path)
    opened: Corpus
    try:
        opened = _open_array(config, folder, corpus.packed, info)
    except NoArrayError:
        if not CORPORA.plugin_of(data.name):
            raise DataError(_nothing_at(folder)) from None
        # What reads the corpus of the run reads the set too.
        data_dir, name = (folder.parent, folder.name) if isinstance(folder, Path) else folder.rstrip("/").rsplit("/", 1)
        opened = CORPORA.make(data.name, str(data_dir), dataclasses.replace(data, dataset=name))
    described = opened.eval_info()
    for what, own, other in (
        ("ids", info.vocab_size, described.vocab_size),
        ("as its BOS token", info.bos_token_id, described.bos_token_id),
        ("as its EOS token", info.eos_token_id, described.eos_token_id),
    ):
        if own != other:
            raise DataError(
                f"{described.path} has {other:,} {what}, and the corpus {info.path} has {own:,}; {_OTHER_TOKENIZER}"
            )
    return opened


def _open_array(config: Config, folder: str | Path, packed: bool, info: DataInfo) -> LongCrawl64DataModule:
    """
    Raises:
        NoArrayError: there is none. DataError: it cannot be read.
    """
    data, stated = config.datamodule, None
    if data.vocab_size is not None and data.bos_token_id is not None:
        stated = Vocabulary(info.vocab_size, info.bos_token_id, info.eos_token_id)
    options: dict[str, Any] = {key: getattr(data, key) for key in _SHARED if hasattr(data, key)}
    # What the set's manifest says goes first, and is compared below; the config's keys are those of the corpus.
    heldout = LongCrawl64DataModule(str(folder), dataset=".", packed=packed, recorded=stated, **options)
    array = heldout.array("heldout")
    if data.eval_tokens is not None:
        heldout.eval_tokens = min(data.eval_tokens, array.documents * array.doc_len)
    return heldout


def _where_is(data_dir: str, path: str) -> str | Path:
    """A URL, an absolute path, or a path in `data_dir`, which may be a URL itself."""
    if is_url(path):
        return path
    local = Path(path).expanduser()
    return join(data_dir, path) if is_url(data_dir) and not local.is_absolute() else Path(data_dir) / local


def _nothing_at(folder: str | Path) -> str:
    """That there is no held-out array, and what is near it."""
    near = [] if isinstance(folder, str) else [file.parent.name for file in folder.parent.glob("*/heldout.zarr")]
    closest = difflib.get_close_matches(Path(folder).name, near, n=1)
    hint = f"did you mean {closest[0]!r}?" if closest else "give the folder of a corpus, or its URL"
    return f"no held-out array at {folder}/heldout.zarr; {hint}"
