"""The order of things: tokenizer, token stream, split, arrays, manifest; and what is left to do after a kill.

All work happens in `OUT/.work`. Each stage leaves a file when it is complete, and a run begins with the first stage
whose file is missing. The finished parts are then renamed into `OUT` (output.py), `manifest.json` last: a folder with
a manifest is a whole corpus, one without is not.
"""

import dataclasses
import json
import os
import shutil
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Executor
from concurrent.futures.process import BrokenProcessPool
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from forgetting_transformer.data.prepare import near_duplicates, output, packing, sources, stream, tokenizers, writing
from forgetting_transformer.data.prepare.errors import CorpusError, writing_under
from forgetting_transformer.data.prepare.near_duplicates import NearDuplicates
from forgetting_transformer.data.prepare.pool import open_pool
from forgetting_transformer.data.prepare.settings import LAYOUT_SETTINGS, CorpusSettings
from forgetting_transformer.data.prepare.summary import summary_lines
from forgetting_transformer.files import locked, write_atomically
from forgetting_transformer.progress import Progress
from forgetting_transformer.versions import installed_versions

FORMAT_VERSION = 1
ARRAYS = ("train", "heldout")
PACKAGES = (
    "forgetting-transformer",
    "tokenizers",
    "transformers",
    "numpy",
    "zarr",
    "datasketch",
)  # whose versions the manifest names
STREAM = "stream.json"  # in .work, when all texts are encoded
Say = Callable[[str], None]


def prepare_corpus(
    settings: CorpusSettings, out: Path | str, workers: int = 1, force: bool = False, say: Say = print
) -> dict[str, Any]:
    """Build the corpus `settings` describe in the folder `out` and return its manifest.

    Continues an interrupted run; does nothing, and says so, if `out` already holds the finished corpus.

    Args:
        workers: processes that encode and write; the result does not depend on it.
        force: build it again, also with other settings. The new corpus replaces the one in `out` when it is complete;
            until then that one stays as it is. An unfinished corpus is started over, unless it was begun with `force`
            too: then it is continued.
        say: called with each message for the user.

    Raises:
        CorpusError: with what is wrong and how to fix it. Finished work is kept, and so is the corpus in `out`.
    """
    out = Path(out).absolute()
    try:
        with writing_under(out):
            return _prepare(settings, out, workers, force, say)
    except BrokenProcessPool as error:
        raise CorpusError(
            "a worker process died, most often for lack of memory. Run the same command again with fewer --workers: "
            "it continues where it stopped."
        ) from error


def _prepare(settings: CorpusSettings, out: Path, workers: int, force: bool, say: Say) -> dict[str, Any]:
    work = out / output.WORK
    out.mkdir(parents=True, exist_ok=True)
    with _only_run(out):
        output.refuse_work_of_others(out)
        published = output.finish_what_a_kill_left(out)
        if published:
            settings = dataclasses.replace(settings)  # its tokenizer may be one that had no place until now
        finished = _finished_manifest(out)
        same = finished is not None and not settings.different_from(finished["settings"])
        if not (published and same):  # else this command was all but done
            if finished is not None and not force:
                settings.refuse_if_different(finished["settings"], out)
                waiting = _is_to_replace(work)
                if not waiting:
                    output.discard(work)  # an earlier version left it when it was killed at its end
                say(f"{out} already holds this corpus; its inputs were not read again (--force builds it again).")
                if waiting:
                    say(f"{work} holds an unfinished one that is to replace it: --force goes on with it.")
                return finished
            _begin_or_continue(settings, out, work, force, finished is not None, say)
            if not (work / output.MANIFEST).exists():
                _write_json(work / output.MANIFEST, _build_or_give_up(settings, out, work, workers))
            output.publish(out)
    manifest = json.loads((out / output.MANIFEST).read_text())
    for line in summary_lines(manifest):
        say(line)
    return manifest


# What is there already ----------------------------------------------------------------------------------------


@contextmanager
def _only_run(out: Path) -> Iterator[None]:
    """Two runs in one folder would overwrite each other; the second is refused. A kill releases the lock."""
    lock = out / output.LOCK
    with ExitStack() as stack:
        try:
            stack.enter_context(locked(lock, wait=False))
        except BlockingIOError as error:
            raise CorpusError(f"another run is preparing {out}. Wait for it, or give another --out.") from error
        stack.callback(lock.unlink)
        yield


def _finished_manifest(out: Path) -> dict[str, Any] | None:
    path = out / output.MANIFEST
    return output.read_manifest(path) if os.path.lexists(path) else None


def _is_to_replace(work: Path) -> bool:
    """Whether .work holds what was begun with --force."""
    begun = work / output.BUILDING
    return begun.exists() and bool(output.read_object(begun).get("force"))


def _begin_or_continue(settings: CorpusSettings, out: Path, work: Path, force: bool, replaces: bool, say: Say) -> None:
    """Afterwards .work holds the settings, and what is done of the corpus; see `prepare_corpus` for `force`."""
    _refuse_to_read_work(settings, work)
    begun = work / output.BUILDING
    if begun.exists():
        written = output.read_object(begun)
        different = settings.different_from(written)
        can_continue = set(different) <= set(LAYOUT_SETTINGS) and not (different and (work / output.MANIFEST).exists())
        if not force and not can_continue and _has_work(work):
            settings.refuse_if_different(written, out)
        if can_continue and (not force or written.get("force")):
            if different:
                _delete_arrays(work)
                _write_json(begun, settings.as_json() | {"force": bool(written.get("force"))})
            changed = f", with another {', '.join(different)}" if different else ""
            say(f"continuing the unfinished corpus in {out}{changed}")
            if force and (work / STREAM).exists():
                say(f"Its texts are not read again; delete {work} to start over.")
            return
    if not replaces:
        output.refuse_unvouched_parts(out)
    _check_inputs(settings, out)
    output.discard(work)
    if work.exists():
        raise CorpusError(
            f"{work} cannot be deleted: a program may still read the corpus that was replaced. Stop it, and run the "
            "same command again."
        )
    work.mkdir()
    _write_json(begun, settings.as_json() | {"force": force})


def _refuse_to_read_work(settings: CorpusSettings, work: Path) -> None:
    for name, place in (*(("input", place) for place in settings.inputs), ("--tokenizer", settings.tokenizer)):
        if Path(place).is_relative_to(work):
            raise CorpusError(f"{name} {place} lies in {work}, which this program deletes. Copy it elsewhere.")


def _check_inputs(settings: CorpusSettings, out: Path) -> None:
    """Find mistakes before anything is deleted, and before hours of work."""
    sources.check_inputs(settings)
    tally = sources.Tally()
    if settings.inputs and not sources.has_files(settings, out, tally):
        raise _nothing_to_read(settings, tally)
    if settings.dedup is not None:
        near_duplicates.check_installed()
    if settings.tokenizer != "bytes" and not settings.tokenizer.startswith("train:"):
        tokenizers.load(settings.tokenizer)


def _has_work(work: Path) -> bool:
    """Whether texts have been encoded, or sketched for their near-duplicates."""
    files = (work / "stream" / "tokens.bin", work / "sketches" / "sketches.bin")
    return any(file.exists() and file.stat().st_size > 0 for file in files)


def _delete_arrays(work: Path) -> None:
    for name in ARRAYS:
        (work / f"{name}.blocks").unlink(missing_ok=True)  # first, so that no log outlives its array
        (work / f"{name}.sha256").unlink(missing_ok=True)
        shutil.rmtree(work / f"{name}.zarr", ignore_errors=True)


# The stages ---------------------------------------------------------------------------------------------------


class _InputChangedError(CorpusError):
    """What was found in the input no longer holds. Only the same input again, or a new beginning, helps."""


def _build_or_give_up(settings: CorpusSettings, out: Path, work: Path, workers: int) -> dict[str, Any]:
    try:
        return _build(settings, out, work, workers)
    except _InputChangedError:
        # The message says that --force starts over, so that must not continue this.
        _write_json(work / output.BUILDING, settings.as_json() | {"force": False})
        raise


def _build(settings: CorpusSettings, out: Path, work: Path, workers: int) -> dict[str, Any]:
    started = time.monotonic()
    # One worker works in this process, which may hold the encoder and the layout of an earlier corpus of this folder.
    stream.load_encoder.cache_clear()
    writing.load_layout.cache_clear()
    with open_pool(workers) as pool:
        near = _find_near_duplicates(settings, out, work, pool, workers)
        info = _make_tokenizer(settings, out, work, near)
        counted = _make_stream(settings, out, work, info, near, pool, workers)
        split = _split(settings, work)
        arrays, entropy = _make_arrays(settings, split, work, info, pool, workers)
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
    settings: CorpusSettings, out: Path, work: Path, pool: Executor, workers: int
) -> NearDuplicates | None:
    """None where nobody asked for it."""
    if settings.dedup is None:
        return None
    complete = work / "near_duplicates.json"
    if not complete.exists():
        with Progress("looking for near-duplicates", sources.input_bytes(settings, out), "B") as progress:
            found = near_duplicates.find(settings, out, work / "sketches", pool, workers, progress)
        _write_json(complete, found.as_json())
    return NearDuplicates.from_json(json.loads(complete.read_text()))


def _make_tokenizer(
    settings: CorpusSettings, out: Path, work: Path, near: NearDuplicates | None
) -> tokenizers.TokenizerInfo:
    folder, described = work / "tokenizer", work / "tokenizer.json"
    if not described.exists():
        shutil.rmtree(folder, ignore_errors=True)
        input_hash = None
        if settings.tokenizer == "bytes":
            tokenizers.save_built(tokenizers.byte_tokenizer(), folder)
        elif settings.tokenizer.startswith("train:"):
            sample, input_hash = _take_sample(settings, out, near)
            trained = tokenizers.train_tokenizer(sample.texts(), settings.trained_vocab_size())
            tokenizers.save_built(trained, folder)
        else:
            tokenizers.save_loaded(settings.tokenizer, folder)
        info = tokenizers.describe(folder, settings)
        _write_json(described, {"info": dataclasses.asdict(info), "input_hash": input_hash})
    return tokenizers.TokenizerInfo(**json.loads(described.read_text())["info"])


def _take_sample(settings: CorpusSettings, out: Path, near: NearDuplicates | None) -> tuple[tokenizers.Sample, str]:
    """Read the whole input once; also return its hash, to notice if it changes before it is encoded."""
    sample, digests, tally = tokenizers.Sample(), [], sources.Tally()
    with Progress("sampling text for the tokenizer", sources.input_bytes(settings, out), "B") as progress:
        for shard in stream.make_shards(_pieces(settings, out, tally, near)):
            digests.append(shard.digest)
            for text in shard.texts:
                sample.add(text)
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
        raise _InputChangedError(
            "the input changed after near-duplicates were looked for in it. Run the same command with --force to "
            "start over."
        )


def _make_stream(
    settings: CorpusSettings,
    out: Path,
    work: Path,
    info: tokenizers.TokenizerInfo,
    near: NearDuplicates | None,
    pool: Executor,
    workers: int,
) -> dict[str, Any]:
    """Encode everything; return what was counted on the way."""
    complete = work / STREAM
    if complete.exists():
        return json.loads(complete.read_text())
    tally = sources.Tally()
    tokens = stream.TokenStream(work / "stream", info.dtype)
    with Progress("tokenising", sources.input_bytes(settings, out), "B") as progress:
        pieces = _pieces(settings, out, tally, near)
        texts = stream.write_stream(pieces, tokens, work / "tokenizer", info, pool, workers, progress)
    if len(texts.tokens) == 0:
        raise _nothing_to_read(settings, tally)
    sampled = json.loads((work / "tokenizer.json").read_text())["input_hash"]
    if sampled not in (None, tokens.fingerprint):
        raise _InputChangedError(
            "the input changed after the tokenizer was trained on it. Run the same command with --force to start over."
        )
    np.savez(work / "texts.npz", tokens=texts.tokens, shared=texts.shared)
    counted = {
        "texts": tally.total("texts"),
        "bytes": tally.total("bytes"),
        "stream_tokens": int(texts.tokens.sum()),
        "sources": {name: dict(counts) for name, counts in tally.per_input.items()},
        "dropped": dict(sorted(tally.dropped.items())),
        "stopped_early": tally.stopped_early,
        "input_hash": f"blake2b:{tokens.fingerprint}",
        "roundtrip": tokens.roundtrip,
    }
    _write_json(complete, counted)
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
    work: Path,
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
            layout_path, tokens_path = work / f"{name}.layout.npz", work / "stream" / "tokens.bin"
            writing.write_array(work / f"{name}.zarr", layout_path, tokens_path, form, pool, workers, progress)
    arrays, facts = {}, {}
    with Progress("reading arrays back", n_rows, "documents") as progress:
        for name, form in forms.items():
            facts[name] = writing.read_back(work / f"{name}.zarr", info.vocab_size, form.chunk_docs, progress)
            writing.list_checksums(work / f"{name}.zarr", workers)
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


def _write_json(path: Path, content: dict[str, Any]) -> None:
    write_atomically(path, json.dumps(content, indent=2, ensure_ascii=False) + "\n")
