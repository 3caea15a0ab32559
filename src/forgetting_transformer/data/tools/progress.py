"""Progress on stderr: a bar on a terminal, and a line every ten seconds in a log file."""

import sys
from typing import Any

from tqdm import tqdm


def progress(title: str, total: int | None, unit: str) -> Any:
    """A bar to `update`, as a context manager.

    Args:
        title: of the bar, for example "tokenising".
        total: number of units, or None where unknown (compressed input).
        unit: "B" is shown with a decimal prefix (k, M, G); any other unit is shown as it is.
    """
    form: dict[str, Any] = {"dynamic_ncols": True}
    if not sys.stderr.isatty():
        form = {"mininterval": 10, "bar_format": "{l_bar}{r_bar}\n"}
    return tqdm(desc=title, total=total, unit=unit, unit_scale=unit == "B", **form)
