"""Ranges of numbers, and how a value outside of one is refused: in one line with what would do."""

import math
import types
import typing
from dataclasses import dataclass
from typing import Any

#: Beyond this a float64 skips whole numbers, and counts in metrics and JSON would no longer be exact.
_EXACT = 2**53


@dataclass(frozen=True)
class Range:
    """Numbers from `low` to `high`, both included unless `above` is true, which leaves `low` itself out."""

    low: float
    high: float
    above: bool = False

    def __contains__(self, value: float) -> bool:
        return (self.low < value if self.above else self.low <= value) and value <= self.high  # false for NaN

    def describe(self, whole: bool) -> str:
        """ "a whole number from 1 to 1,024", for "… must be …"."""
        kind = "a whole number" if whole else "a number"
        low = f"more than {_written(self.low)}" if self.above else f"from {_written(self.low)}"
        high = "" if self.high == math.inf else f"{' and at most' if self.above else ' to'} {_written(self.high)}"
        if not high and not self.above:
            low += " on"
        return f"{kind} {low}{high}"


#: Tokens of a run, a budget or an interval.
TOKENS = Range(1, _EXACT)
#: Things of which there may be many: sequences in a batch, ids of a vocabulary, seconds.
COUNT = Range(1, 2**31 - 1)
#: Widths and numbers of parts of a model.
SIZE = Range(1, 2**24)
#: Ratios, scales and small constants that make no sense at zero.
POSITIVE = Range(0, 1e9, above=True)


def _written(number: float) -> str:
    return f"{int(number):,}" if abs(number) < 1e16 and number == int(number) else f"{number:g}"


def refusal(value: Any, hint: Any, allowed: Range | None) -> str | None:
    """Requirement that `value` misses, as in "a whole number from 1 to 1,024"; None where it will do.

    Args:
        hint: the type of the key: bool, int, float or str, or one of these or None. Of other types nothing is checked.
        allowed: for numbers; None allows every finite one.
    """
    kinds = set(typing.get_args(hint)) if isinstance(hint, types.UnionType) else {hint}
    if not kinds <= {bool, int, float, str, type(None)} or type(value) in kinds - {int, float}:
        return None
    number = type(value) in kinds or (type(value) is int and float in kinds)
    if number and (value in allowed if allowed else math.isfinite(value)):
        return None
    if kinds & {int, float}:
        whole = float not in kinds
        expected = allowed.describe(whole) if allowed else f"a {'whole ' * whole}number"
    else:
        expected = "true or false" if bool in kinds else "text"
    return expected + " or null" * (type(None) in kinds)


def divisors(number: int) -> list[int]:
    """All of them in order, in the time that the square root takes."""
    small = [n for n in range(1, math.isqrt(number) + 1) if number % n == 0]
    return sorted({*small, *(number // n for n in small)})
