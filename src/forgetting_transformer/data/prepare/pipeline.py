"""The order of things: tokenizer, token stream, split, arrays, manifest; and what is left to do after a kill.

All work happens beside `OUT` (output.py). Each stage leaves a file when it is complete, and a run begins with the first
stage whose file is missing.
"""

import dataclasses
import json
import os
import shutil
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Executor
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import Any

import numpy as np

from forgetting_transformer.data.prepare import near_duplicates, packing, sources, stream, tokenizers, writing
from forgetting_transformer.data.prepare.errors import CorpusError, writing_under
from forgetting_transformer.data.prepare.near_duplicates import NearDuplicates
from forgetting_transformer.data.prepare.output import MANIFEST, Place, read_manifest
from forgetting_transformer.data.prepare.pool import open_pool
from forgetting_transformer.data.prepare.settings import LAYOUT_SETTINGS, CorpusSettings
from forgetting_transformer.data.prepare.summary import summary_lines
from forgetting_transformer.files import write_json
from forgetting_transformer.progress import Progress
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
        CorpusError: with what is wrong and how to fix it. Finished work is kept, and so is the corpus in `out`.
    """
    out = Path(os.path.abspath(out))
    place = Place(out.resolve() if out.is_symlink() else out)
    try:
        with writing_under(place.work), place.only_run():
            return _prepare(settings, place, workers, force, say)
    except BrokenProcessPool as error:
        raise CorpusError(
            "a worker process died, most often for lack of memory. Run the same command again with fewer --workers: "
            "it continues where it stopped."
        ) from error


def _prepare(settings: CorpusSettings, place: Place, workers: int, force: bool, say: Say) -> dict[str, Any]:
    published = place.publish(force)  # which a killed run had completed
    finished = place.finished()
    same = finished is not None and not settings.different_from(finished["settings"])
    if finished is not None and not force:
        settings.refuse_if_different(finished["settings"], place.out)
        if not published:
            say(f"{place.out} already holds this corpus; its inputs were not read again (--force builds it again).")
            if place.begun.exists():
                say(f"{place.work} holds an unfinished one that is to replace it: --force goes on with it.")
            return finished
    if not (published and same):  # else this command was all but done
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
    # Mistakes are found before anything is deleted, and before hours of work.
    place.check_movable()
    sources.check_inputs(settings)
    tally = sources.Tally()
    if settings.inputs and not sources.has_files(settings, place.out, tally):
        raise _nothing_to_read(settings, tally)
    if settings.dedup is not None:
        near_duplicates.check_installed()
    if settings.tokenizer != "bytes" and not settings.tokenizer.startswith("train:"):
        tokenizers.load(settings.tokenizer)
    place.begin(settings.as_json() | {"force": force})


# The stages ---------------------------------------------------------------------------------------------------


def _build(settings: CorpusSettings, place: Place, workers: int) -> dict[str, Any]:
    started = time.monotonic()
    # One worker works in this process, which may hold the encoder and the layout of an earlier corpus of this folder.
    stream.load_encoder.cache_clear()
    writing.load_layout.cache_clear()
    with open_pool(workers) as pool:
        near = _find_near_duplicates(settings, place, pool, workers)
        info = _make_tokenizer(settings, place, near)
        counted = _make_stream(settings, place, info, near, pool, workers)
        split = _split(settings, place.work)
        arrays, entropy = _make_arrays(settings, split, place, info, pool, workers)
    seconds = time.monotonic() - started
    n_tokens = counted["stream_tokens"]
    dropped_tokens = {name: getattr(split, name).n_tokens_dropped for name in ARRAYS}
    return {
        "format_version": FORMAT_VERSION,
        "doc_len": settings.doc_len,
        "vocab_size": info.vocab_size,
        "bos_token_id": info.bos_token_id,
        "eos_token_id": info.eos_token_id,
        "unigram_entropy_nats": entropy,
        "bytes_per_token": counted["bytes"] / n_tokens,
        "texts": counted["texts"],
        "bytes": counted["bytes"],
        "arrays": arrays,
        "tokenizer": {"kind": info.kind, "name": settings.tokenizer, "roundtrip": counted["roundtrip"]},
        "settings": settings.as_json(),
        "sources": counted["sources"],
        "input_hash": counted["input_hash"],
        "stopped_early": counted["stopped_early"],
        "split": {
            "groups": split.n_groups,
            "groups_heldout": split.n_groups_heldout,
            # Rows of one group are alike: what differs between models is known less well than the rows would say.
            "group_of_heldout_row": split.heldout.spans_of_rows().tolist(),
            "a_text_is_on_both_sides": split.cut_text,
        },
        "dropped": counted["dropped"],
        "dropped_tokens": dropped_tokens,
        "seconds": round(seconds, 1),
        "versions": installed_versions(PACKAGES),
    }


def _find_near_duplicates(
    settings: CorpusSettings, place: Place, pool: Executor, workers: int
) -> NearDuplicates | None:
    """None where nobody asked for it."""
    if settings.dedup is None:
        return None
    complete = place.work / "near_duplicates.json"
    if not complete.exists():
        with Progress("looking for near-duplicates", sources.input_bytes(settings, place.out), "B") as progress:
            found = near_duplicates.find(settings, place.out, place.work / "sketches", pool, workers, progress)
        write_json(complete, found.as_json())
    return NearDuplicates.from_json(json.loads(complete.read_text()))


def _make_tokenizer(settings: CorpusSettings, place: Place, near: NearDuplicates | None) -> tokenizers.TokenizerInfo:
    folder, described = place.new / "tokenizer", place.work / "tokenizer.json"
    if not described.exists():
        shutil.rmtree(folder, ignore_errors=True)
        input_hash = None
        if settings.tokenizer == "bytes":
            tokenizers.save_built(tokenizers.byte_tokenizer(), folder)
        elif settings.tokenizer.startswith("train:"):
            sample, input_hash = _take_sample(settings, place.out, near)
            trained = tokenizers.train_tokenizer(sample.texts(), settings.trained_vocab_size())
            tokenizers.save_built(trained, folder)
        else:
            tokenizers.save_loaded(settings.tokenizer, folder)
        info = tokenizers.describe(folder, settings)
        write_json(described, {"info": dataclasses.asdict(info), "input_hash": input_hash})
    return tokenizers.TokenizerInfo(**json.loads(described.read_text())["info"])


def _take_sample(settings: CorpusSettings, out: Path, near: NearDuplicates | None) -> tuple[tokenizers.Sample, str]:
    """Read the whole input once; also return its hash, to notice if it changes before it is encoded."""
    sample, digests, tally = tokenizers.Sample(), [], sources.Tally()
    with Progress("sampling text for the tokenizer", sources.input_bytes(settings, out), "B") as progress:
        for shard in stream.make_shards(_pieces(settings, out, tally, near)):
            digests.append(shard.digest)
            for piece in shard.pieces:
                sample.add(piece.text)
            progress.advance(shard.n_bytes)
    if not digests:
        raise _nothing_to_read(settings, tally)
    return sample, stream.combined_digest(digests)


def _pieces(
    settings: CorpusSettings, out: Path, tally: sources.Tally, near: NearDuplicates | None
) -> Iterator[sources.Piece]:
    """All text that stays."""
    if near is None:
        yield from sources.read_pieces(settings, out, tally)
        return
    yield from sources.read_pieces(settings, out, tally, near.digests)
    if tally.kept.hexdigest() != near.kept:
        raise CorpusError(
            "the input changed after near-duplicates were looked for in it. Delete the unfinished corpus, "
            f"{Place(out).work}, and run the same command again."
        )


def _make_stream(
    settings: CorpusSettings,
    place: Place,
    info: tokenizers.TokenizerInfo,
    near: NearDuplicates | None,
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
        pieces = _pieces(settings, place.out, tally, near)
        texts = stream.write_stream(pieces, log, place.new / "tokenizer", info, pool, workers, progress)
    if len(texts.tokens) == 0:
        raise _nothing_to_read(settings, tally)
    input_hash = stream.combined_digest(shard["digest"] for shard in log.shards)
    if json.loads((place.work / "tokenizer.json").read_text())["input_hash"] not in (None, input_hash):
        raise CorpusError(
            "the input changed after the tokenizer was trained on it. Delete the unfinished corpus, "
            f"{place.work}, and run the same command again."
        )
    np.savez(place.work / "texts.npz", tokens=texts.tokens, shared=texts.shared)
    counted = {
        "texts": tally.total("texts"),
        "bytes": tally.total("bytes"),
        "stream_tokens": int(texts.tokens.sum()),
        "sources": {name: dict(counts) for name, counts in tally.per_input.items()},
        "dropped": dict(sorted(tally.dropped.items())),
        "stopped_early": tally.stopped_early,
        "input_hash": f"blake2b:{input_hash}",
        # Beginnings of shards that were decoded again, and how many of them came out different.
        "roundtrip": {"checked": len(log.shards), "lossy": sum(not shard["reversible"] for shard in log.shards)},
    }
    write_json(complete, counted)
    return counted


def _nothing_to_read(settings: CorpusSettings, tally: sources.Tally) -> CorpusError:
    dropped = ", ".join(f"{count:,} × {reason}" for reason, count in sorted(tally.dropped.items()))
    return CorpusError(
        f"found no text in {settings.dataset or ', '.join(settings.inputs)}. Left out: {dropped or 'nothing'}. "
        "Check the paths, --glob, --exclude and --text_field."
    )


def _split(settings: CorpusSettings, work: Path) -> packing.Split:
    with np.load(work / "texts.npz") as file:
        texts = stream.TextTable(file["tokens"], file["shared"])
    split = packing.make_split(texts, settings)
    for name in ARRAYS:
        getattr(split, name).save(work / f"{name}.layout.npz")
    return split


def _make_arrays(
    settings: CorpusSettings,
    split: packing.Split,
    place: Place,
    info: tokenizers.TokenizerInfo,
    pool: Executor,
    workers: int,
) -> tuple[dict[str, Any], float]:
    """Write and read back both arrays; return their part of the manifest, and train's unigram entropy."""
    layouts = {name: getattr(split, name) for name in ARRAYS}
    forms = {name: _array_format(settings, layout, info.dtype) for name, layout in layouts.items()}
    n_rows = sum(layout.n_documents for layout in layouts.values())
    with Progress("writing arrays", n_rows, "documents") as progress:
        for name, form in forms.items():
            layout, tokens = place.work / f"{name}.layout.npz", place.work / "stream" / "tokens.bin"
            writing.write_array(place.new / f"{name}.zarr", layout, tokens, form, pool, workers, progress)
    arrays, facts = {}, {}
    with Progress("reading arrays back", n_rows, "documents") as progress:
        for name, form in forms.items():
            facts[name] = writing.read_back(place.new / f"{name}.zarr", info.vocab_size, form.chunk_docs, progress)
            writing.list_checksums(place.new / f"{name}.zarr", workers)
            arrays[name] = {
                "documents": layouts[name].n_documents,
                "tokens": layouts[name].n_documents * settings.doc_len,
                "max_token_id": facts[name].max_token_id,
                "content_hash": facts[name].content_hash,
                "chunk_docs": form.chunk_docs,
                "chunk_tokens": form.chunk_tokens,
            }
    return arrays, _entropy_nats(facts["train"].counts)


def _array_format(settings: CorpusSettings, layout: packing.Layout, dtype: np.dtype) -> writing.ArrayFormat:
    chunk_docs = settings.chunk_docs or writing.choose_chunk_docs(layout.n_documents)
    chunk_tokens = settings.chunk_tokens or min(writing.PAPER_CHUNK_TOKENS, settings.doc_len)
    return writing.ArrayFormat(settings.zarr_format, min(chunk_docs, layout.n_documents), chunk_tokens, dtype)


def _entropy_nats(counts: np.ndarray) -> float:
    """Entropy of the distribution of ids, in nats per token: the loss of a model that knows only frequencies."""
    share = counts[counts > 0] / counts.sum()
    return float(-(share * np.log(share)).sum())
