"""Progress of one stage: a tqdm bar on a terminal, a plain line every few seconds in a log file."""

import sys
import time
from types import TracebackType

from tqdm import tqdm

SECONDS_BETWEEN_LINES = 10.0


class Progress:
    """Context manager that counts `unit`s of one stage on stderr.

    Args:
        title: what is being done, for example "tokenising".
        total: how many units there will be, or None where nobody knows (compressed input).
        unit: "B" is shown with a decimal prefix (k, M, G); any other unit is shown as it is.
    """

    def __init__(self, title: str, total: int | None, unit: str) -> None:
        self.title, self.total, self.unit = title, total, unit
        self.done = 0
        self.bar: tqdm | None = None

    def __enter__(self) -> "Progress":
        self.started = self.last_line = time.monotonic()
        if sys.stderr.isatty():
            self.bar = tqdm(total=self.total, desc=self.title, unit=self.unit, unit_scale=self.unit == "B")
        return self

    def advance(self, amount: int) -> None:
        self.done += amount
        if self.bar is not None:
            self.bar.update(amount)
        elif time.monotonic() - self.last_line > SECONDS_BETWEEN_LINES:
            self.last_line = time.monotonic()
            self._print_line()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.bar is not None:
            self.bar.close()
        elif kind is None:
            self._print_line()

    def _print_line(self) -> None:
        seconds = time.monotonic() - self.started
        total = "" if self.total is None else f" of {self._amount(self.total)}"
        rate = self.done / seconds if seconds else 0.0
        if self.total is not None and rate and self.done < self.total:
            total += f", {self._amount(round(rate))}/s, {tqdm.format_interval((self.total - self.done) / rate)} left"
        print(f"{self.title}: {self._amount(self.done)}{total}, {seconds:.0f} s", file=sys.stderr, flush=True)

    def _amount(self, count: int) -> str:
        return f"{count / 1e6:,.1f} MB" if self.unit == "B" else f"{count:,} {self.unit}"
