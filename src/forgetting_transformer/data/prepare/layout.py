"""Layout of the arrays: held-out groups of texts, the tokens of each row, and the order of rows.

Each is a pure function of the table of texts, the settings and the seed; docs/data.md explains it (From texts to rows).
A group of texts that is held out together is a folder (or a file of records) with at most an eighth of the tokens to
hold out, as high up the tree as possible. A larger one is divided into its contents, down to single texts. The held-out
groups make one stream of tokens, in path order, and all others another; each is cut into rows.
"""

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from forgetting_transformer.data.errors import DataError
from forgetting_transformer.data.prepare.settings import CorpusSettings
from forgetting_transformer.data.prepare.stream import TextTable

GROUPS_HELD_OUT = 8
# If no whole text fits the wanted size, a larger held-out part is accepted up to this share of the corpus. Beyond it
# one text is cut into a part for each side.
MAX_EXCESS = 0.1


@dataclass(frozen=True)
class Layout:
    """The tokens of the stream that make the rows of one array.

    Attributes:
        starts, stops: int64, (spans,): the array's own stream is the tokens [start, stop) of all spans in order.
        order: int64, (documents,): stored row r is row order[r] of the array's own stream.
        doc_len: tokens per row.
    """

    starts: np.ndarray
    stops: np.ndarray
    order: np.ndarray
    doc_len: int

    @property
    def n_documents(self) -> int:
        return len(self.order)

    @property
    def n_tokens_dropped(self) -> int:
        """Tokens at the end of the array's own stream that fill no row."""
        return int((self.stops - self.starts).sum()) - self.n_documents * self.doc_len

    @cached_property
    def _ends(self) -> np.ndarray:
        """Ends of the spans in the stream of the array."""
        return np.cumsum(self.stops - self.starts)

    def spans_of_rows(self) -> np.ndarray:
        """For each stored row, the span of its middle token: int64 (documents,)."""
        return np.searchsorted(self._ends, self.order * self.doc_len + self.doc_len // 2, side="right")

    def stretches(self, first: int, last: int) -> list[list[tuple[int, int]]]:
        """The stretches [start, stop) of the stream that make each of the stored rows [first, last)."""
        rows = []
        for source in self.order[first:last].tolist():
            position, end = source * self.doc_len, (source + 1) * self.doc_len
            span, row = int(np.searchsorted(self._ends, position, side="right")), []
            while position < end:
                stop, span_end = int(self.stops[span]), int(self._ends[span])
                until = min(end, span_end)
                row.append((stop - (span_end - position), stop - (span_end - until)))
                position, span = until, span + 1
            rows.append(row)
        return rows


@dataclass(frozen=True)
class Split:
    """The layout of both arrays and how it came about.

    Attributes:
        n_groups, n_groups_heldout: groups in all, and those held out.
        cut_text: True if no choice of whole groups came near the wanted size: then the end of one text is held out and
            its beginning is trained on.
    """

    train: Layout
    heldout: Layout
    n_groups: int
    n_groups_heldout: int
    cut_text: bool


def make_split(texts: TextTable, settings: CorpusSettings) -> Split:
    """Choose the held-out groups and lay out the rows of both arrays.

    Raises:
        DataError: the text is too little for a row in each.
    """
    text_starts = np.concatenate([[0], np.cumsum(texts.tokens)])
    n_tokens = int(text_starts[-1])
    n_rows, n_heldout = n_tokens // settings.doc_len, settings.heldout_docs
    if n_heldout is None:
        assert settings.heldout_fraction is not None  # one of the two is set
        n_heldout = max(1, min(n_rows - 1, round(n_rows * settings.heldout_fraction)))
    fewer = f"hold out fewer (--heldout_docs {n_rows - 1:,} at most)"
    shorter = f"shorten --doc_len (to {n_tokens // 20:,}, say)" if n_tokens >= 40 else "shorten --doc_len"
    too_small = DataError(
        f"the input holds {n_tokens:,} tokens, too few for rows of --doc_len {settings.doc_len:,}, "
        f"{n_heldout:,} to hold out and one to train on. Add text, or {fewer if 1 < n_rows <= n_heldout else shorter}. "
        "The same --out then needs --force"
    )
    if n_rows <= n_heldout:
        raise too_small
    target = n_heldout * settings.doc_len

    groups = find_groups(texts, max_tokens=target // GROUPS_HELD_OUT)
    starts = text_starts[groups]
    stops = np.append(starts[1:], n_tokens)
    chosen, missing = choose_groups(stops - starts, target, settings.seed)
    held_starts, held_stops = starts[chosen], stops[chosen]
    if missing:
        stop = stops[_smallest(stops - starts, ~chosen)]
        place = np.searchsorted(held_starts, stop)
        held_starts = np.insert(held_starts, place, stop - missing)
        held_stops = np.insert(held_stops, place, stop)

    # All spans between, unless they are empty.
    train_starts, train_stops = np.concatenate([[0], held_stops]), np.append(held_starts, n_tokens)
    some = train_starts < train_stops
    train = _layout(train_starts[some], train_stops[some], settings, salt=0)
    if train.n_documents == 0:
        raise too_small
    heldout = _layout(held_starts, held_stops, settings, salt=1, max_rows=settings.heldout_docs)
    return Split(train, heldout, len(groups), int(chosen.sum()), cut_text=missing > 0)


def find_groups(texts: TextTable, max_tokens: int) -> np.ndarray:
    """First text of every group, ascending: the largest folders of at most `max_tokens`, and else single texts.

    Texts are in path order, so a folder is a range of consecutive texts, and it ends where the next text shares
    fewer path components with its predecessor than the folder is deep.
    """
    text_starts = np.concatenate([[0], np.cumsum(texts.tokens)])
    found: list[np.ndarray] = []
    to_divide = [(0, len(texts.tokens), 0)]  # texts [first, last) of one folder at this depth
    while to_divide:
        first, last, depth = to_divide.pop()
        children = first + np.flatnonzero(texts.shared[first:last] <= depth)
        ends = np.append(children[1:], last)
        whole = (text_starts[ends] - text_starts[children] <= max_tokens) | (ends - children == 1)
        found.append(children[whole])
        to_divide += [(int(a), int(b), depth + 1) for a, b in zip(children[~whole], ends[~whole], strict=True)]
    return np.sort(np.concatenate(found))


def choose_groups(sizes: np.ndarray, target: int, seed: int) -> tuple[np.ndarray, int]:
    """Chooses groups to hold out, in random order until `target` tokens are reached.

    Args:
        sizes: int64, (groups,): tokens of each.

    Returns:
        bool, (groups,): True for groups that are held out; and the number of tokens that are missing because every
        group that is left is too large to be held out whole.
    """
    chosen = np.zeros(len(sizes), dtype=bool)
    missing = target
    for group in _random_order(len(sizes), seed, salt=2).tolist():
        if missing > 0 and sizes[group] <= missing + target // GROUPS_HELD_OUT:
            chosen[group] = True
            missing -= int(sizes[group])
    if missing > 0:
        smallest = _smallest(sizes, ~chosen)
        if sizes[smallest] - missing <= MAX_EXCESS * sizes.sum():
            chosen[smallest] = True
            missing = 0
    return chosen, max(missing, 0)


def _smallest(sizes: np.ndarray, among: np.ndarray) -> int:
    return int(np.argmin(np.where(among, sizes, np.iinfo(np.int64).max)))


def _layout(
    starts: np.ndarray, stops: np.ndarray, settings: CorpusSettings, salt: int, max_rows: int | None = None
) -> Layout:
    n_rows = int((stops - starts).sum()) // settings.doc_len
    n_rows = n_rows if max_rows is None else min(n_rows, max_rows)
    return Layout(starts, stops, _random_order(n_rows, settings.seed, salt), settings.doc_len)


def _random_order(n: int, seed: int, salt: int) -> np.ndarray:
    """A permutation of 0…n-1. From raw bits, which NumPy keeps the same for ever, unlike `permutation`."""
    bits = np.random.PCG64(np.random.SeedSequence([seed, salt])).random_raw(n)
    return np.argsort(bits, kind="stable")
