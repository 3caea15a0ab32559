"""Turns files of results (cases.py) into tables and numbers of the documentation. studies/pages.py inserts them.

A table uses all files whose names match its pattern in benchmarks/results, without the rows that measured nothing.
"""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from cases import device_name, split

from forgetting_transformer.analysis.tables import markdown_table

RESULTS = Path(__file__).resolve().parent / "results"
#: Names of experiments without their size.
NAMES = {
    "forgetting_transformer/pro": "FoX (Pro)",
    "forgetting_transformer/llama": "FoX (LLaMA)",
    "transformer/pro": "Transformer (Pro)",
    "transformer/llama": "Transformer (LLaMA)",
    "transformer_swa/": "Transformer, window 2,048",
    "hgrn2/": "HGRN2",
    "delta_net/": "DeltaNet",
    "gated_delta_net/": "Gated DeltaNet",
    "kda/": "KDA",
    "path_fox/": "PaTH-FoX",
    "mamba2/": "Mamba-2",
    "samba/": "Samba",
}
#: Overrides of experiments, and how tables name them.
OVERRIDES = {"model.config.log_pruning_tolerance=null": "no pruning", "train.cuda_graphs=false": "no graphs"}
PACKAGES = {"torch": "PyTorch", "triton": "Triton", "fla-core": "fla-core"}

Row = Mapping[str, Any]


class Results:
    """The files of RESULTS that match this pattern."""

    def __init__(self, pattern: str) -> None:
        paths = sorted(RESULTS.glob(pattern))
        if not paths:
            raise FileNotFoundError(f"{RESULTS / pattern}: no such file of results; a table needs it")
        self.names = [path.stem for path in paths]
        self.files = [json.loads(path.read_text(encoding="utf-8")) for path in paths]
        for file in self.files:
            file["rows"] = [row for row in file["rows"] if row.get("status", "ok") == "ok"]

    def rows(self, **wanted: Any) -> list[dict[str, Any]]:
        """Rows of all files with these values."""
        rows = (row for file in self.files for row in file["rows"])
        return [row for row in rows if all(row.get(key) == value for key, value in wanted.items())]

    def row(self, **wanted: Any) -> dict[str, Any]:
        """The only row with these values."""
        (row,) = self.rows(**wanted)
        return row

    @property
    def conditions(self) -> str:
        """On what and with what the files were measured, and links to them from a page in docs/."""
        made = [_hardware_and_versions(file) for file in self.files]
        parts = (" or ".join(dict.fromkeys(found[key] for found in made if key in found)) for key in made[0])
        links = (f"[{name}](../benchmarks/results/{name}.json)" for name in self.names)
        return f"{', '.join(parts)}. Files: {', '.join(links)}."


def _hardware_and_versions(file: Row) -> dict[str, str]:
    place = file["environment"]
    driver, versions = place["hardware"].get("driver"), place["versions"]
    found = {"device": device_name(place)} | ({"driver": f"driver {driver}"} if driver else {})
    return found | {key: f"{name} {versions[key]}" for key, name in PACKAGES.items() if versions.get(key)}


def files() -> str:
    """Every file of results, with the command that made it and what its note says."""
    lines = []
    for path in sorted(RESULTS.glob("*.json")):
        file = json.loads(path.read_text(encoding="utf-8"))
        place = file["environment"]
        made = ", ".join(filter(None, [place["date"][:10], (place["commit"] or "")[:7]]))
        line = f"- `{path.stem}` ({made}): `{place['command']}`"
        lines.append(f"{line} ({file['note']})" if "note" in file else line)
    return "\n".join(lines)


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Markdown. Columns of numbers after the first are aligned right; columns without any value are omitted."""
    columns = [[row[i] for row in rows if row[i]] for i in range(1, len(header))]
    alignment = "".join("r" if all(cell[0].isdigit() for cell in column) else "l" for column in columns)
    return markdown_table(header, rows, f"l{alignment}")


# Whole steps.


def steps(results: Results) -> str:
    """Whole steps of one micro-batch, a row per model."""
    rows = [
        [
            model_name(row["experiment"]),
            _rate(row),
            "yes" if row.get("cuda_graphs") else "",
            _percent(row.get("mfu")),
            _gigabytes(row.get("peak_memory_bytes")),
        ]
        for row in results.rows()
    ]
    return table(["model", "tokens/s", "CUDA graphs", "MFU", "memory GB"], rows)


def authors(results: Results) -> str:
    """The paper authors' code and ours, each mode beside the same mode."""
    rows = []
    for pruned in (True, False):
        for checkpointing in (False, True):
            case = {"pruned": pruned, "checkpointing": checkpointing}
            theirs, ours = (results.row(code=code, **case)["tokens_per_second"] for code in ("authors", "ours"))
            cells = ["yes" if pruned else "no", "yes" if checkpointing else "no"]
            rows.append([*cells, f"{theirs:,.0f}", f"{ours:,.0f}", f"{ours / theirs:.2f}"])
    return table(["pruned", "activation checkpointing", "authors' tokens/s", "ours", "ratio"], rows)


def _rate(row: Row) -> str:
    return f"{row['tokens_per_second']:,.0f}"


def model_name(experiment: str) -> str:
    """Name of an experiment in tables, with its size and what its own overrides change.

    Example:
        `delta_net/760m_16b model=kda` is "KDA 760M".
    """
    name, overrides = split(experiment)
    for override in overrides:
        if override.startswith("model="):
            name = f"{override.removeprefix('model=')}/{name.partition('/')[2]}"
    size = re.search(r"[_/](\d+)m(_|$)", name)
    words = [next((text for start, text in NAMES.items() if name.startswith(start)), name)]
    words += [f"{size[1]}M"] if size else []
    return ", ".join([" ".join(words), *(text for key, text in OVERRIDES.items() if key in overrides)])


# Kernels.


def attention(results: Results) -> str:
    """TFLOP/s of attention alone, forward and backward."""
    speeds = {(row["kernel"], _shape(row)): row["tflops"] for row in results.rows(table="kernels")}
    kernels, shapes = (list(dict.fromkeys(key[i] for key in speeds)) for i in (0, 1))
    rows = [
        [kernel, *(_optional(speeds.get((kernel, shape)), lambda speed: f"{speed:.0f}") for shape in shapes)]
        for kernel in kernels
    ]
    return table(["kernel", *shapes], rows)


def layouts(results: Results) -> str:
    """Time of forward and backward for a computed tile of 128 × 128 pairs, in times that of the full kernel."""
    ratios = {(row["layout"], _shape(row)): row["ratio"][-1] for row in results.rows(table="layouts")}
    names, shapes = (list(dict.fromkeys(key[i] for key in ratios)) for i in (0, 1))
    rows = [
        [name, *(_optional(ratios.get((name, shape)), lambda ratio: f"{ratio:.2f}") for shape in shapes)]
        for name in names
    ]
    return table(["layout", *shapes], rows)


# Cells.


def _optional(value: Any, text: Callable[[Any], str]) -> str:
    return "" if value is None else text(value)


def _percent(share: float | None) -> str:
    return _optional(share, lambda x: f"{x * 100:.1f} %")


def _gigabytes(size: float | None) -> str:
    return _optional(size, lambda x: f"{x / 1e9:.1f}")


def _shape(row: Row) -> str:
    return ",".join(str(n) for n in row["shape"])
