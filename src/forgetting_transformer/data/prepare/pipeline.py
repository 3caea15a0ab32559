"""The order of things: tokenizer, token stream, split, arrays, manifest; and what is left to do after a kill.

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
from collections.abc import Callable, Iterator
from concurrent.futures import Executor
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import Any

import numpy as np

from forgetting_transformer.data.errors import DataError, cannot_write
from forgetting_transformer.data.prepare import near_duplicates, packing, sources, stream, tokenizers, writing
from forgetting_transformer.data.prepare.output import MANIFEST, Place, read_manifest
from forgetting_transformer.data.prepare.settings import LAYOUT_SETTINGS, CorpusSettings
from forgetting_transformer.data.prepare.shards import open_pool
from forgetting_transformer.data.tools.progress import Progress
from forgetting_transformer.files import write_atomically, write_json
from forgetting_transformer.versions import installed_versions

FORMAT_VERSION = 1
ARRAYS = ("train", "heldout")
#: Packages whose versions the manifest names.
PACKAGES = ("forgetting-transformer", "tokenizers", "transformers", "numpy", "zarr", "datasketch")
Say = Callable[[str], None]


def prepare_corpus(
    settings: CorpusSettings, out: Path | str, workers: int = 1, force: bool = False, say: Say = print
) -> dict[str, Any]:
    """Build the corpus `settings` describe in the folder `out` and return its manifest.

    Continues an interrupted run; does nothing, and says so, if `out` already holds the finished corpus.

    Args:
        out: a folder that is not there, or is empty, or holds a corpus of this program and nothing else.
        workers: processes that encode and write; the result does not depend on it.
        force: build it again, also with other settings. The new corpus replaces the one in `out` when it is complete;
            until then that one stays as it is. An unfinished corpus is started over, unless it was begun with `force`
            too: then it is continued.
        say: called with each message for the user.

    Raises:
        DataError: with what is wrong and how to fix it. Finished work is kept, and so is the corpus in `out`.
    """
    out = Path(os.path.abspath(out))
    place = Place(out.resolve() if out.is_symlink() else out)
    try:
        with place.only_run():
            return _prepare(settings, place, workers, force, say)
    except BrokenProcessPool as error:
        raise DataError(
            "a worker process died, most often for lack of memory. Run the same command again with fewer --workers: "
            "it continues where it stopped."
        ) from error
    except OSError as error:
        raise cannot_write(error, place.work) from error


def _prepare(settings: CorpusSettings, place: Place, workers: int, force: bool, say: Say) -> dict[str, Any]:
    published = place.publish(force)  # which a killed run had completed
    finished = place.finished()
    same = finished is not None and not settings.different_from(finished["settings"])
    if finished is not None and not force:
        settings.refuse_if_different(finished["settings"], place.out)
        if not published:
            say(f"{place.out} already holds this corpus; its inputs were not read again (--force builds it again).")
            return finished
    if not (published and same):  # else this command was all but done
        place.check_movable()
        _begin_or_continue(settings, place, force, say)
        write_json(place.new / MANIFEST, _build(settings, place, workers))
        place.publish(force)
    manifest = read_manifest(place.out / MANIFEST)
    for line in summary_lines(manifest):
        say(line)
    return manifest


def _begin_or_continue(settings: CorpusSettings, place: Place, force: bool, say: Say) -> None:
    """Afterwards the settings, and what is done of the corpus, lie in `place`; see `prepare_corpus` for `force`."""
    if place.begun.exists():
        written = json.loads(place.begun.read_text())
        different = settings.different_from(written)
        can_continue = set(different) <= set(LAYOUT_SETTINGS)
        has_work = any(log.stat().st_size for log in place.work.glob("*/shards.jsonl"))
        if not force and not can_continue and has_work:
            settings.refuse_if_different(written, place.work)
        if can_continue and (not force or written["force"]):
            if different:
                for name in ARRAYS:
                    shutil.rmtree(place.new / f"{name}.zarr", ignore_errors=True)
                write_json(place.begun, settings.as_json() | {"force": written["force"]})
            changed = f", with another {', '.join(different)}" if different else ""
            say(f"continuing the unfinished corpus in {place.work}{changed}")
            return
    place.begin(settings.as_json() | {"force": force})


def _build(settings: CorpusSettings, place: Place, workers: int) -> dict[str, Any]:
    started = time.monotonic()
    stream.load_encoder.cache_clear()  # one worker works in this process, which may have worked in this folder before
    with open_pool(workers) as pool:
        # One that is not trained first: it may not be there, and nothing else takes so little time.
        trained = settings.tokenizer.startswith("train:")
        info = None if trained else _make_tokenizer(settings, place, set())
        near = _find_near_duplicates(settings, place, pool, workers)
        info = info or _make_tokenizer(settings, place, near)
        counted = _make_stream(settings, place, info, near, pool, workers)
        with np.load(place.work / "texts.npz") as file:
            split = packing.make_split(stream.TextTable(file["tokens"], file["shared"]), settings)
        arrays, entropy = _make_arrays(settings, split, place, info, pool, workers)
    seconds = time.monotonic() - started
    return {
        "format_version": FORMAT_VERSION,
        "doc_len": settings.doc_len,
        "vocab_size": info.vocab_size,
        "bos_token_id": info.bos_token_id,
        "eos_token_id": info.eos_token_id,
        "unigram_entropy_nats": entropy,
        "bytes_per_token": counted["bytes"] / counted.pop("stream_tokens"),
        "tokenizer": {"kind": info.kind, "name": settings.tokenizer},
        "arrays": arrays,
        "settings": settings.as_json(),
        **counted,
        "split": {
            "groups": split.n_groups,
            "groups_heldout": split.n_groups_heldout,
            # Rows of one group are alike: what differs between models is known less well than the rows would say.
            "group_of_heldout_row": split.heldout.spans_of_rows().tolist(),
            "a_text_is_on_both_sides": split.cut_text,
        },
        "dropped_tokens": {name: getattr(split, name).n_tokens_dropped for name in ARRAYS},
        "seconds": round(seconds, 1),
        "versions": installed_versions(PACKAGES),
    }


def _find_near_duplicates(settings: CorpusSettings, place: Place, pool: Executor, workers: int) -> set[bytes]:
    """Digests of the texts to leave out; none where nobody asked for it."""
    if settings.dedup is None:
        return set()
    complete = place.work / "near_duplicates.json"
    if not complete.exists():
        with Progress("looking for near-duplicates", sources.input_bytes(settings, place.out), "B") as progress:
            near, kept = near_duplicates.find(settings, place.out, place.work / "sketches", pool, workers, progress)
        _same_texts(place, kept, first=True)
        write_json(complete, sorted(digest.hex() for digest in near))
    return set(map(bytes.fromhex, json.loads(complete.read_text())))


def _make_tokenizer(settings: CorpusSettings, place: Place, near: set[bytes]) -> tokenizers.TokenizerInfo:
    folder, described = place.new / "tokenizer", place.work / "tokenizer.json"
    if not described.exists():
        shutil.rmtree(folder, ignore_errors=True)
        if settings.tokenizer == "bytes":
            tokenizers.save_built(tokenizers.byte_tokenizer(), folder)
        elif settings.tokenizer.startswith("train:"):
            sample = tokenizers.Sample()
            with Progress("sampling text for the tokenizer", sources.input_bytes(settings, place.out), "B") as progress:
                for piece in _pieces(settings, place, sources.Tally(), near, first=True):
                    sample.add(piece.text)
                    progress.advance(piece.n_bytes)
            tokenizers.save_built(tokenizers.train_tokenizer(sample.texts(), settings.trained_vocab_size()), folder)
        else:
            tokenizers.save_loaded(settings.tokenizer, folder)
        write_json(described, dataclasses.asdict(tokenizers.describe(folder, settings)))
    return tokenizers.TokenizerInfo(**json.loads(described.read_text()))


def _pieces(
    settings: CorpusSettings, place: Place, tally: sources.Tally, near: set[bytes], first: bool = False
) -> Iterator[sources.Piece]:
    """All text that stays.

    Args:
        first: whether this may be the first reading of the input; later readings must find the same texts.

    Raises:
        DataError: there is none, or another than before.
    """
    yield from sources.read_pieces(settings, place.out, tally, near)
    if not tally.texts:
        dropped = ", ".join(f"{count:,} × {reason}" for reason, count in sorted(tally.dropped.items()))
        raise DataError(
            f"found no text in {settings.dataset or ', '.join(settings.inputs)}. Left out: {dropped or 'nothing'}. "
            "Check the paths, --glob, --exclude and --text_field."
        )
    _same_texts(place, tally.kept.hexdigest(), first)


def _same_texts(place: Place, kept: str, first: bool) -> None:
    """Compares the hash of all texts that stay with that of an earlier reading, or keeps it for later ones.

    Raises:
        DataError: they differ.
    """
    record = place.work / "texts.blake2b"
    if record.exists() and record.read_text() != kept:
        raise DataError(
            "the input changed after the tokenizer was trained on it, or near-duplicates were looked for in it. Delete "
            f"the unfinished corpus, {place.work}, and run the same command again."
        )
    if first:
        write_atomically(record, kept)


def _make_stream(
    settings: CorpusSettings,
    place: Place,
    info: tokenizers.TokenizerInfo,
    near: set[bytes],
    pool: Executor,
    workers: int,
) -> dict[str, Any]:
    """Encode everything; return what was counted on the way."""
    complete = place.work / "stream.json"
    if complete.exists():
        return json.loads(complete.read_text())
    tally = sources.Tally()
    log = stream.open_stream(place.work / "stream", info)
    with Progress("tokenising", sources.input_bytes(settings, place.out), "B") as progress:
        pieces = _pieces(settings, place, tally, near)
        texts = stream.write_stream(pieces, log, place.new / "tokenizer", info, pool, workers, progress)
    np.savez(place.work / "texts.npz", tokens=texts.tokens, shared=texts.shared)
    counted = {
        "texts": tally.texts,
        "bytes": tally.bytes,
        "stream_tokens": int(texts.tokens.sum()),
        "input_hash": f"blake2b:{stream.combined_digest(log)}",
        "stopped_early": tally.stopped_early,
        "dropped": dict(sorted(tally.dropped.items())),
    }
    write_json(complete, counted)
    return counted


def _make_arrays(
    settings: CorpusSettings,
    split: packing.Split,
    place: Place,
    info: tokenizers.TokenizerInfo,
    pool: Executor,
    workers: int,
) -> tuple[dict[str, Any], float]:
    """Write and read back both arrays; return their part of the manifest, and train's unigram entropy."""
    tokens, arrays, entropy = place.work / "stream" / "tokens.bin", {}, {}
    n_rows = sum(getattr(split, name).n_documents for name in ARRAYS)
    with Progress("writing arrays", n_rows, "documents") as progress:
        for name in ARRAYS:
            path, layout = place.new / f"{name}.zarr", getattr(split, name)
            array = writing.open_array(path, layout, settings, info.dtype)
            writing.write_array(array, path, layout, tokens, pool, workers, progress)
    with Progress("reading arrays back", n_rows, "documents") as progress:
        for name in ARRAYS:
            path = place.new / f"{name}.zarr"
            content_hash, counts = writing.read_back(path, info.vocab_size, progress)
            writing.list_checksums(path, workers)
            share = counts[counts > 0] / counts.sum()
            # In nats per token: the loss of a model that knows only frequencies.
            entropy[name] = float(-(share * np.log(share)).sum())
            arrays[name] = {
                "documents": getattr(split, name).n_documents,
                "tokens": int(counts.sum()),
                "content_hash": content_hash,
            }
    return arrays, entropy["train"]


def summary_lines(manifest: dict[str, Any]) -> list[str]:
    """Lines of a report on what was made and what was left out."""
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
    if manifest["split"]["a_text_is_on_both_sides"]:
        lines.append(
            "WARNING: the texts are too large to hold out whole: the end of one text is in heldout.zarr, "
            "its beginning in train.zarr"
        )
    return lines
