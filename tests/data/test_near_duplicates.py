"""scripts/prepare_data.py --dedup: near-duplicates of earlier texts are left out before anything is held out."""

import random

import pytest

from forgetting_transformer.data.prepare import shards
from forgetting_transformer.data.prepare.sources import NEAR_DUPLICATE
from tests.data import corpus_helpers
from tests.data.corpus_helpers import WORDS, write_tree

pytest.importorskip("datasketch", reason="needs the data extra")


def words_of(seed, count):
    pick = random.Random(seed)
    return [f"{pick.choice(WORDS)}{pick.randrange(1000)}" for _ in range(count)]


def changed(words, every):
    """The text with one word in `every` replaced, which changes five times as many runs of five words."""
    return " ".join("other" if i % every == every // 2 else word for i, word in enumerate(words))


@pytest.fixture
def tree(tmp_path):
    """Twelve texts; copies of three of them with few changes, of one with many; an exact copy; two without words."""
    texts = {f"a/{i:02}.txt": " ".join(words_of(i, 400)) for i in range(12)}
    texts |= {f"b/near{i}.txt": changed(words_of(i, 400), every=200) for i in range(3)}
    texts |= {"b/far.txt": changed(words_of(3, 400), every=10), "b/same.txt": texts["a/05.txt"]}
    texts |= {"c/dots.txt": "... ...\n" * 5, "c/dashes.txt": "--- ---\n" * 5}
    return write_tree(tmp_path / "in", texts)


def prepare(tree, out, **changes):
    return corpus_helpers.prepare(out, tree, **{"doc_len": 256, "heldout_docs": 8, "dedup": 0.8} | changes)


def test_near_duplicates_are_left_out_and_counted_apart_from_exact_ones(tree, tmp_path, monkeypatch):
    manifest = prepare(tree, tmp_path / "out")
    assert manifest["dropped"] == {"duplicate of an earlier text": 1, NEAR_DUPLICATE: 3}
    assert manifest["texts"] == 12 + 1 + 2 and manifest["settings"]["dedup_words"] == 5
    monkeypatch.setattr(shards, "SHARD_BYTES", 4000)
    assert prepare(tree, tmp_path / "two", workers=2)["arrays"] == manifest["arrays"]
    # One word in ten changed leaves half of the runs, a third of all runs of both.
    assert prepare(tree, tmp_path / "more", dedup=0.5, dedup_words=1)["dropped"][NEAR_DUPLICATE] == 4
