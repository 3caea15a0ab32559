"""The stages of a corpus: tokenizer, token stream, split, arrays, manifest; after a kill, the stages that are left.

All work happens beside `OUT` (output.py). Each stage leaves a file when it is complete, and a run begins with the first
stage whose file is missing.
"""

import dataclasses
import json
import math
import os
import shutil
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator
from concurrent.futures import Executor
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import Any

import numpy as np

from forgetting_transformer.command_line import installed_versions
from forgetting_transformer.data.errors import DataError, cannot_write
from forgetting_transformer.data.prepare import layout, near_duplicates, sources, stream, tokenizers, writing
from forgetting_transformer.data.prepare.output import MANIFEST, OutputFolder
from forgetting_transformer.data.prepare.settings import CorpusSettings
from forgetting_transformer.data.prepare.shards import open_pool
from forgetting_transformer.data.tools.progress import progress
from forgetting_transformer.files import write_json

FORMAT_VERSION = 1
ARRAYS = ("train", "heldout")
#: Packages whose versions the manifest names.
PACKAGES = ("forgetting-transformer", "tokenizers", "transformers", "numpy", "zarr", "datasketch")


def prepare_corpus(settings: CorpusSettings, out: Path | str, workers: int = 1, force: bool = False) -> dict[str, Any]:
    """Build the corpus `settings` describe in the folder `out` and return its manifest.

    Continues an interrupted run; logs that nothing is to be done if `out` already has the finished corpus.

    Args:
        out: a folder that is not there, or is empty, or holds a corpus of this program and nothing else.
        workers: processes that encode and write; the result does not depend on it.
        force: build it again, also with other settings. The new corpus replaces the one in `out` when it is complete;
            until then that one stays as it is. An unfinished corpus of other settings is started over.

    Raises:
        DataError: with cause and fix. Finished work is kept, and so is the corpus in `out`.
    """
    out = Path(os.path.abspath(out))
    place = OutputFolder(out.resolve() if out.is_symlink() else out)
    try:
        with place.only_run():
            return _prepare(settings, place, workers, force)
    except BrokenProcessPool as error:
        raise DataError(
            "a worker process died, most often for lack of memory. Run the same command again with fewer --workers: "
            "it continues where it stopped."
        ) from error
    except OSError as error:
        raise cannot_write(error, place.work) from error


def _prepare(settings: CorpusSettings, place: OutputFolder, workers: int, force: bool) -> dict[str, Any]:
    published = place.publish(force)  # which a killed run had completed
    finished = place.finished()
    if finished is not None and not force:
        settings.refuse_if_different(finished["settings"], place.out)
        if not published:
            print(f"{place.out} already holds this corpus; its inputs were not read again (--force builds it again).")
            return finished
    if finished is None or not published or settings.different_from(finished["settings"]):  # else it was all but done
        place.finished(replaced=True)
        _begin_or_continue(settings, place, force)
        with open_pool(workers) as pool:
            write_json(place.new / MANIFEST, _Building(settings, place, pool, workers).manifest())
        place.publish(force)
    manifest = place.finished()
    assert manifest is not None  # it was published
    print("\n".join(summary_lines(manifest)))
    return manifest


def _begin_or_continue(settings: CorpusSettings, place: OutputFolder, force: bool) -> None:
    """Leaves the settings, and finished stages of the corpus, in `place`."""
    if place.begun.exists():
        written = json.loads(place.begun.read_text())
        if not settings.different_from(written):
            print(f"continuing the unfinished corpus in {place.work}")
            return
        if not force and any(log.stat().st_size for log in place.work.glob("*/shards.jsonl")):
            settings.refuse_if_different(written, place.work)
    place.begin(settings.as_json())


class _Building:
    """The stages of one corpus. Each stores its result in `place` and reads it there after a kill."""

    def __init__(self, settings: CorpusSettings, place: OutputFolder, pool: Executor, workers: int) -> None:
        self.settings, self.place, self.pool, self.workers = settings, place, pool, workers
        self.stream = place.work / "stream"

    def manifest(self) -> dict[str, Any]:
        """Manifest of the corpus: all else is written before it returns."""
        started, settings = time.monotonic(), self.settings
        tokenizers.encoder.cache_clear()  # the worker may be this process, which may have worked in this folder before
        # A tokenizer that is not trained comes first: it may be missing, and loading it takes the least time.
        info = None if settings.tokenizer.startswith("train:") else self.tokenizer(set())
        near = self.near_duplicates()
        info = info or self.tokenizer(near)
        counted = self.tokens(info, near)
        with np.load(self.place.work / "texts.npz") as file:
            split = layout.make_split(stream.TextTable(file["tokens"], file["shared"]), settings)
        arrays, entropy = self.arrays(split, info)
        return {
            "format_version": FORMAT_VERSION,
            "doc_len": settings.doc_len,
            "vocab_size": info.vocab_size,
            "bos_token_id": info.bos_token_id,
            "eos_token_id": info.eos_token_id,
            "unigram_entropy_nats": entropy,
            "bytes_per_token": counted["bytes"] / counted.pop("stream_tokens"),
            "tokenizer": {"kind": info.kind, "name": settings.tokenizer, "lossless": info.lossless},
            "arrays": arrays,
            "settings": settings.as_json(),
            **counted,
            "split": {
                "groups": split.n_groups,
                "groups_heldout": split.n_groups_heldout,
                # Rows of one group are alike, so differences between models have larger errors than independent rows
                # would give.
                "group_of_heldout_row": split.heldout.spans_of_rows().tolist(),
                "a_text_is_on_both_sides": split.cut_text,
            },
            "dropped_tokens": {name: getattr(split, name).n_tokens_dropped for name in ARRAYS},
            "seconds": round(time.monotonic() - started, 1),
            "versions": installed_versions(PACKAGES),
        }

    def _once(self, name: str, make: Callable[[], Any]) -> Any:
        """Result of `make`, from its file if a start before made it."""
        complete = self.place.work / name
        if not complete.exists():
            write_json(complete, make())
        return json.loads(complete.read_text())

    def _input(self, near: Collection[bytes] = ()) -> sources.InputPass:
        return sources.InputPass(self.settings, self.place.out, near)

    def near_duplicates(self) -> set[bytes]:
        """Digests of the texts to leave out; none without `dedup`."""
        if self.settings.dedup is None:
            return set()

        def find() -> list[str]:
            texts = _counted("looking for near-duplicates", self._input().distinct_texts())
            near = near_duplicates.find(texts, self.settings, self.place.work / "sketches", self.pool, self.workers)
            return sorted(digest.hex() for digest in near)

        return set(map(bytes.fromhex, self._once("near_duplicates.json", find)))

    def tokenizer(self, near: set[bytes]) -> tokenizers.TokenizerInfo:
        folder = self.place.new / "tokenizer"

        def save() -> dict[str, Any]:
            shutil.rmtree(folder, ignore_errors=True)
            pieces = self._pieces("sampling text for the tokenizer", self._input(near))
            return dataclasses.asdict(tokenizers.make(self.settings, (piece.text for piece in pieces), folder))

        return tokenizers.TokenizerInfo(**self._once("tokenizer.json", save))

    def tokens(self, info: tokenizers.TokenizerInfo, near: set[bytes]) -> dict[str, Any]:
        """Encodes all texts; returns the counts."""

        def encode() -> dict[str, Any]:
            read, tokenizer = self._input(near), self.place.new / "tokenizer"
            pieces = self._pieces("tokenising", read)
            texts = stream.write_stream(pieces, self.stream, tokenizer, info, self.pool, self.workers)
            np.savez(self.place.work / "texts.npz", tokens=texts.tokens, shared=texts.shared)
            return {
                "texts": read.texts,
                "bytes": read.bytes,
                "stream_tokens": int(texts.tokens.sum()),
                "stopped_early": read.stopped_early,
                "dropped": dict(sorted(read.dropped.items())),
            }

        return self._once("stream.json", encode)

    def arrays(self, split: layout.Split, info: tokenizers.TokenizerInfo) -> tuple[dict[str, Any], float]:
        """Writes and reads back both arrays; returns their part of the manifest, and train's unigram entropy."""
        arrays, entropy = {}, {}
        for name in ARRAYS:
            path, rows = self.place.new / f"{name}.zarr", getattr(split, name)
            tokens = self.stream / "tokens.bin"
            writing.write_array(path, rows, self.settings, info.dtype, tokens, self.pool, self.workers)
            content_hash, entropy[name] = writing.read_back(path, info.vocab_size, f"reading {path.name} back")
            n_tokens = rows.n_documents * rows.doc_len
            arrays[name] = {"documents": rows.n_documents, "tokens": n_tokens, "content_hash": content_hash}
        return arrays, entropy["train"]

    def _pieces(self, title: str, read: sources.InputPass) -> Iterator[sources.Piece]:
        """Yields all texts that stay, in pieces.

        Raises:
            DataError: there is none.
        """
        yield from _counted(title, read.pieces())
        if not read.texts:
            dropped = ", ".join(f"{count:,} × {reason}" for reason, count in sorted(read.dropped.items()))
            raise DataError(
                f"found no text in {self.settings.dataset or ', '.join(self.settings.inputs)}. Left out: "
                f"{dropped or 'nothing'}. Check the paths, --glob, --exclude and --text_field."
            )


def _counted(title: str, items: Iterable[Any]) -> Iterator[Any]:
    """Texts, or pieces of them, with a bar of the bytes that were taken."""
    with progress(title, None, "B") as bar:
        for item in items:
            bar.update(item.n_bytes)
            yield item


def summary_lines(manifest: dict[str, Any]) -> list[str]:
    """Lines of a report on the corpus and on skipped inputs."""
    train, heldout = manifest["arrays"]["train"], manifest["arrays"]["heldout"]
    entropy = manifest["unigram_entropy_nats"]
    lines = [
        f"{manifest['texts']:,} texts, {manifest['bytes']:,} bytes in {manifest['seconds']:.0f} s",
        f"train.zarr    {train['documents']:,} documents × {manifest['doc_len']:,} = {train['tokens']:,} tokens",
        f"heldout.zarr  {heldout['documents']:,} documents × {manifest['doc_len']:,} = {heldout['tokens']:,} tokens, "
        f"{manifest['split']['groups_heldout']:,} of {manifest['split']['groups']:,} source groups",
        f"tokenizer     {manifest['tokenizer']['name']}: {manifest['vocab_size']:,} ids, "
        f"{manifest['bytes_per_token']:.2f} bytes per token, unigram entropy {entropy:.3f} nats per token "
        f"(perplexity {math.exp(entropy):,.0f})",
    ]
    dropped = Counter(manifest["dropped"])
    for name, count in manifest["dropped_tokens"].items():
        dropped[f"tokens at the end of {name} that fill no row"] = count
    lines += [f"dropped       {count:,} × {reason}" for reason, count in dropped.items() if count]
    if manifest["stopped_early"]:
        lines.append(f"stopped at --max_bytes {manifest['settings']['max_bytes']:,}; the rest was not read")
    if not manifest["tokenizer"]["lossless"]:
        lines.append("WARNING: the tokenizer is lossy: ids do not decode to the same text")
    if manifest["split"]["a_text_is_on_both_sides"]:
        lines.append(
            "WARNING: the texts are too large to hold out whole: the end of one text is in heldout.zarr, "
            "its beginning in train.zarr"
        )
    return lines
