"""Packing: which groups of texts are held out, and in which rows."""

import numpy as np

from forgetting_transformer.data.prepare import CorpusSettings
from forgetting_transformer.data.prepare.layout import choose_groups, find_groups, make_split
from forgetting_transformer.data.prepare.stream import TextTable, _n_shared


def table(texts: dict[str, int]) -> TextTable:
    """Texts by path, in the order given, with their lengths in tokens."""
    paths = [tuple(path.split("/")) for path in texts]
    shared = [_n_shared(a, b) for a, b in zip([(), *paths], paths, strict=False)]
    return TextTable(np.array(list(texts.values())), np.array(shared, dtype=np.uint16))


def settings(**changed: object) -> CorpusSettings:
    return CorpusSettings(**{"inputs": ("a",), "tokenizer": "bytes", "doc_len": 10, **changed})


def test_groups_are_the_largest_folders_that_are_small_enough():
    texts = {"in/a/x/1": 3, "in/a/x/2": 3, "in/a/y/1": 3, "in/b/1": 5, "in/b/2": 5, "in/c": 90, "in/d/1": 1}
    # At most 10 tokens: a (9) and b (10) and d whole, c alone although it is larger.
    assert find_groups(table(texts), 10).tolist() == [0, 3, 5, 6]
    # At most 6: a is divided into x and y, b into its files.
    assert find_groups(table(texts), 6).tolist() == [0, 2, 3, 4, 5, 6]
    assert find_groups(table(texts), 1000).tolist() == [0]
    # A group ends where a folder ends, even if the next has a child of the same name.
    assert find_groups(table({"in/a/x/1": 4, "in/b/x/1": 4, "other/b/x/1": 4}), 8).tolist() == [0, 2]


def test_held_out_groups_come_near_the_target():
    sizes = np.random.default_rng(0).integers(1, 100, size=5_000)
    for seed in range(20):
        chosen, missing = choose_groups(sizes, 2_000, seed)
        assert missing == 0
        assert 2_000 <= sizes[chosen].sum() <= 2_250
    assert len({choose_groups(sizes, 2_000, seed)[0].tobytes() for seed in range(20)}) == 20


def test_the_end_of_a_text_is_held_out_where_no_whole_one_fits():
    lengths = [1, 1, 60, 60, 60]
    split = make_split(table({f"in/{n}": length for n, length in enumerate(lengths)}), settings(heldout_docs=1))
    assert split.cut_text and split.n_groups_heldout == 2
    spans = [*zip(split.heldout.starts.tolist(), split.heldout.stops.tolist(), strict=True)]
    assert spans == [(0, 1), (1, 2), (54, 62)], "ten tokens: two short texts, and the end of a long one"


def test_order_of_rows_is_a_permutation_and_fixed_for_ever():
    order = make_split(table({f"in/{i}": 10 for i in range(12)}), settings(heldout_docs=2, seed=3)).train.order
    assert order.tolist() == [0, 4, 9, 7, 1, 5, 6, 3, 8, 2]


def test_each_held_out_row_names_the_group_that_holds_its_middle():
    texts = {f"in/{folder}/{i}": 7 for folder in "abcdefghij" for i in range(8)}
    split = make_split(table(texts), settings(heldout_docs=20))
    group_of_token = np.repeat(np.arange(len(split.heldout.starts)), split.heldout.stops - split.heldout.starts)
    expected = [group_of_token[row * 10 + 5] for row in split.heldout.order]
    assert split.heldout.spans_of_rows().tolist() == expected and len(set(expected)) > 1
