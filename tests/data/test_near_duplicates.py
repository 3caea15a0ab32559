"""scripts/prepare_data.py --dedup: near-duplicates of earlier texts are left out before anything is held out."""

import functools
import json
import random
from pathlib import Path

import pytest

from forgetting_transformer.data.prepare import CorpusError, CorpusSettings, near_duplicates, prepare_corpus
from forgetting_transformer.data.prepare.sources import NEAR_DUPLICATE
from tests.data.corpus_helpers import WORDS, byte_text, rows, write_tree

pytest.importorskip("datasketch", reason="needs the data extra")


def words_of(seed: int, count: int) -> list[str]:
    pick = random.Random(seed)
    return [f"{pick.choice(WORDS)}{pick.randrange(1000)}" for _ in range(count)]


def changed(words: list[str], every: int) -> str:
    """The text with one word in `every` replaced, which changes `every`-th runs of five words five times."""
    return " ".join("other" if i % every == every // 2 else word for i, word in enumerate(words))


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """Twelve texts; copies of three of them with few changes, of one with many; an exact copy; two without words."""
    texts = {f"a/{i:02}.txt": " ".join(words_of(i, 400)) for i in range(12)}
    texts |= {f"b/near{i}.txt": changed(words_of(i, 400), every=200) for i in range(3)}
    texts |= {"b/far.txt": changed(words_of(3, 400), every=10), "b/same.txt": texts["a/05.txt"]}
    texts |= {"c/dots.txt": "... ...\n" * 5, "c/dashes.txt": "--- ---\n" * 5}
    return write_tree(tmp_path / "in", texts)


def settings(tree: Path, **changes: object) -> CorpusSettings:
    given = {"tokenizer": "bytes", "doc_len": 256, "heldout_docs": 8, "dedup": 0.8} | changes
    return CorpusSettings(inputs=(str(tree),), **given)


def prepare(tree: Path, out: Path, workers: int = 1, **changes: object) -> dict:
    return prepare_corpus(settings(tree, **changes), out, workers, say=lambda line: None)


def test_near_duplicates_are_left_out_and_counted_apart_from_exact_ones(tree: Path, tmp_path: Path) -> None:
    manifest = prepare(tree, tmp_path / "out")
    assert manifest["dropped"] == {"duplicate of an earlier text": 1, NEAR_DUPLICATE: 3}
    assert manifest["texts"] == 12 + 1 + 2
    assert manifest["settings"]["dedup"] == 0.8 and manifest["settings"]["dedup_words"] == 5
    assert manifest["versions"]["datasketch"].startswith("2.")
    text = "".join(byte_text(row) for name in ("train", "heldout") for row in rows(tmp_path / "out", name))
    assert "other" in text  # of the far copy
    assert words_of(0, 400)[0] in text


def test_without_dedup_they_stay(tree: Path, tmp_path: Path) -> None:
    assert prepare(tree, tmp_path / "out", dedup=None)["dropped"] == {"duplicate of an earlier text": 1}


def test_a_lower_similarity_leaves_out_more(tree: Path, tmp_path: Path) -> None:
    # One word in ten changed leaves half of the runs, a third of all runs of both.
    assert prepare(tree, tmp_path / "out", dedup=0.5, dedup_words=1)["dropped"][NEAR_DUPLICATE] == 4


def test_estimates_are_the_similarities_of_the_sets() -> None:
    words = words_of(0, 2000)
    other = words[:1500] + words_of(1, 500)
    one, two = near_duplicates.sketch_texts([" ".join(words), " ".join(other)], 5)
    sets = [{tuple(w[i : i + 5]) for i in range(1996)} for w in (words, other)]
    exact = len(sets[0] & sets[1]) / len(sets[0] | sets[1])
    assert (one == two).mean() == pytest.approx(exact, abs=3 * (exact * (1 - exact) / near_duplicates.SKETCH) ** 0.5)


def test_the_result_does_not_depend_on_workers_or_pieces(
    tree: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(near_duplicates, "SHARD_BYTES", 4000)
    one, two = prepare(tree, tmp_path / "one"), prepare(tree, tmp_path / "two", workers=2)
    assert one["arrays"] == two["arrays"] and one["dropped"] == two["dropped"]


def test_a_killed_search_keeps_its_sketches_and_comes_to_the_same_result(
    tree: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(near_duplicates, "SHARD_BYTES", 4000)
    sketch, calls = near_duplicates.sketch_texts, []

    def counts(bodies: list, words: int, dies_at: int = 0):
        calls.append(bodies)
        if len(calls) == dies_at:
            raise KeyboardInterrupt
        return sketch(bodies, words)

    monkeypatch.setattr(near_duplicates, "sketch_texts", counts)
    straight, total = prepare(tree, tmp_path / "straight"), len(calls)
    calls.clear()
    monkeypatch.setattr(near_duplicates, "sketch_texts", functools.partial(counts, dies_at=5))
    with pytest.raises(KeyboardInterrupt):
        prepare(tree, tmp_path / "out")
    monkeypatch.setattr(near_duplicates, "sketch_texts", counts)
    # A line of the log without its end, and a sketch without a line, as a kill leaves them.
    sketches = tmp_path / "out" / ".work" / "sketches"
    committed = len((sketches / "batches.jsonl").read_text().splitlines())
    with (sketches / "batches.jsonl").open("a") as log, (sketches / "sketches.bin").open("ab") as data:
        log.write('{"digest": "12')
        data.write(b"1234567")
    calls.clear()
    assert prepare(tree, tmp_path / "out")["arrays"] == straight["arrays"]
    assert committed > 0 and len(calls) == total - committed


def test_texts_that_changed_since_the_kill_are_sketched_again(
    tree: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(near_duplicates, "SHARD_BYTES", 4000)
    find = near_duplicates.find

    def dies(*arguments):
        find(*arguments)
        raise KeyboardInterrupt

    monkeypatch.setattr(near_duplicates, "find", dies)
    with pytest.raises(KeyboardInterrupt):
        prepare(tree, tmp_path / "out")
    monkeypatch.undo()
    monkeypatch.setattr(near_duplicates, "SHARD_BYTES", 4000)
    (tree / "a" / "06.txt").write_text(changed(words_of(4, 400), every=200))
    assert prepare(tree, tmp_path / "out")["dropped"][NEAR_DUPLICATE] == 4


def test_input_that_changes_after_the_search_is_refused(
    tree: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    find = near_duplicates.find

    def changes(*arguments):
        found = find(*arguments)
        (tree / "a" / "06.txt").write_text("something else")
        return found

    monkeypatch.setattr(near_duplicates, "find", changes)
    with pytest.raises(CorpusError, match=r"changed after near-duplicates were looked for.*--force"):
        prepare(tree, tmp_path / "out")


def test_max_bytes_counts_what_stays(tree: Path, tmp_path: Path) -> None:
    # The near-duplicates come first in reading order here, so that the limit falls behind them.
    write_tree(tree, {"0/copy.txt": changed(words_of(0, 400), every=200)})
    manifest = prepare(tree, tmp_path / "out", max_bytes=20_000, heldout_docs=4)
    assert manifest["stopped_early"] and 20_000 <= manifest["bytes"] < 25_000
    assert manifest["dropped"] == {NEAR_DUPLICATE: 1}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"dedup": 80.0}, r"--dedup must be a similarity from 0.5 to below 1, such as 0.8; got 80.0"),
        ({"dedup": None, "dedup_words": 3}, "--dedup_words 3 needs --dedup"),
        ({"keep_duplicates": True}, "--keep_duplicates keeps them: give one of them"),
    ],
)
def test_settings_that_cannot_be_are_refused(tmp_path: Path, changes: dict, message: str) -> None:
    with pytest.raises(CorpusError, match=message):
        settings(tmp_path, **changes)


def test_a_missing_library_is_named_before_anything_is_read(
    tree: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def missing(name: str) -> str:
        raise near_duplicates.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(near_duplicates.metadata, "version", missing)
    with pytest.raises(CorpusError, match=r"--dedup needs datasketch 2, and none is installed: pip install"):
        prepare(tree, tmp_path / "out")


def test_a_corpus_of_an_earlier_version_is_still_recognised(tree: Path, tmp_path: Path) -> None:
    prepare(tree, tmp_path / "out", dedup=None)
    file = tmp_path / "out" / "manifest.json"
    manifest = json.loads(file.read_text())
    for name in ("dedup", "dedup_words"):
        del manifest["settings"][name]
    file.write_text(json.dumps(manifest))
    prepare(tree, tmp_path / "out", dedup=None)
    with pytest.raises(CorpusError, match=r"dedup: None there, 0\.8 here"):
        prepare(tree, tmp_path / "out")
