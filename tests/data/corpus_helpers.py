"""Small corpora on disk, what their finished arrays hold, and the loaders over them."""

import importlib.util
import json
import random
import re
from pathlib import Path
from types import ModuleType

import numpy as np
import zarr

from forgetting_transformer.data import LongCrawl64DataModule, TokenArray
from forgetting_transformer.data.prepare import CorpusSettings, prepare_corpus

WORDS = [
    *("sigma", "lambda", "forget", "gate", "of", "the", "a", "value", "key", "query", "hidden", "state", "×"),
    *("über", "naïve", "例", "token", "loss", "mean"),
]


def numbered_text(number: int, n_lines: int) -> str:
    """A text that says its number in every line, so that any row shows which texts it holds."""
    pick = random.Random(number)
    return "".join(f"<{number}> {' '.join(pick.choices(WORDS, k=5))}\n" for _ in range(n_lines))


def numbers_in(text: str) -> set[int]:
    return {int(number) for number in re.findall(r"<(\d+)>", text)}


def write_tree(root: Path, texts: dict[str, str]) -> Path:
    """Write texts under their relative paths."""
    for name, text in texts.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(text.encode())
    return root


def package_tree(root: Path, n_packages: int = 6, n_files: int = 8, n_lines: int = 12) -> Path:
    """Packages of several files each; the texts are numbered in path order."""
    texts = {
        f"package{package}/part{file}/file.txt": numbered_text(package * n_files + file, n_lines)
        for package in range(n_packages)
        for file in range(n_files)
    }
    return write_tree(root, texts)


def prepare(out: Path, *inputs: Path, workers: int = 1, force: bool = False, **settings: object) -> dict:
    """Prepare a corpus of bytes in rows of 512 unless told otherwise."""
    settings = {"tokenizer": "bytes", "doc_len": 512, **settings}
    return prepare_corpus(CorpusSettings(inputs=tuple(map(str, inputs)), **settings), out, workers, force)


def rows(out: Path, name: str) -> np.ndarray:
    """All rows of one array, through the reader that training uses."""
    manifest = json.loads((out / "manifest.json").read_text())
    array = TokenArray(out / f"{name}.zarr", manifest["vocab_size"])
    return array.read(0, array.documents, 0, array.doc_len)


def byte_text(row: np.ndarray) -> str:
    """A row of the bytes tokenizer as text; the end of a text is shown as a form feed."""
    return bytes(np.where(row == 256, 12, row).astype(np.uint8)).decode(errors="ignore")


def all_files(folder: Path) -> dict[str, bytes]:
    """Every file below `folder` except the manifest, which states the seconds it took."""
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file() and path.name != "manifest.json"
    }


def array_of(path: Path) -> zarr.Array:
    return zarr.open_array(path, mode="r")


def write_array(path: Path, tokens: np.ndarray, **options) -> None:
    with zarr.config.set({"array.write_empty_chunks": True}):
        zarr.create_array(path, data=tokens, **options)


def rewrite(path: Path, rows: object, columns: object, value: int) -> None:
    """Other tokens in files that are as whole as those they replace."""
    with zarr.config.set({"array.write_empty_chunks": True}):
        zarr.open_array(path, mode="r+")[rows, columns] = value


#: Options of a corpus of GPT-2's ids that is read in the training process.
OPTIONS = {
    "train_batch_len": 48,
    "train_batch_size": 4,
    "train_num_workers": 0,
    "eval_batch_len": 48,
    "eval_local_batch_size": 2,
    "eval_num_workers": 0,
    "vocab_size": 50_257,
    "bos_token_id": 50_256,
}


def module(data_dir: object, **changes) -> LongCrawl64DataModule:
    return LongCrawl64DataModule(str(data_dir), **OPTIONS | changes)


def labels(data: LongCrawl64DataModule, first: int, last: int, rank: int = 0, world_size: int = 1) -> np.ndarray:
    """Labels of the batches [first, last), one below the other."""
    return np.concatenate([batch["labels"].numpy() for batch in data.train_loader(first, last, rank, world_size)])


def script(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, Path(__file__).parents[2] / "scripts" / f"{name}.py")
    assert spec is not None and spec.loader is not None
    found = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(found)
    return found
