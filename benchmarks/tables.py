"""Turns files of results (cases.py) into tables and numbers of the documentation. studies/pages.py inserts them.

A table uses all files whose names match its pattern in benchmarks/results. A new file with the same name replaces an
old one; rows of a newer Triton take the place of the same rows of an older one. A row without a measurement is left
out.
"""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from cases import device_name
from scaling import compared_with

from forgetting_transformer.analysis.tables import markdown_table

RESULTS = Path(__file__).resolve().parent / "results"
#: Names of experiments without their size, in the order of the tables.
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
#: The override that turns pruning off.
NO_PRUNING = "model.config.log_pruning_tolerance=null"
PACKAGES = {"torch": "PyTorch", "triton": "Triton", "fla-core": "fla-core"}
#: Columns of the table of several GPUs.
SCALING_CASES = ("one", "fsdp_kept", "ddp", "one_graphs", "ddp_graphs")

Row = Mapping[str, Any]


class Results:
    """The files of RESULTS that match one of these patterns, oldest Triton first."""

    def __init__(self, *patterns: str) -> None:
        paths = [path for pattern in patterns for path in sorted(RESULTS.glob(pattern))]
        if not paths:
            raise FileNotFoundError(f"{RESULTS / patterns[0]}: no such file of results; a table needs it")
        self.names = [path.stem for path in paths]
        files = [json.loads(path.read_text(encoding="utf-8")) for path in paths]
        for file in files:
            file["rows"] = [row for row in file["rows"] if row.get("status", "ok") == "ok"]
        self.files = sorted(files, key=lambda file: _version(triton(file)))

    def rows(self, **wanted: Any) -> list[dict[str, Any]]:
        """Rows of all files with these values, each with its file's Triton and device under these names."""
        found = (
            {**row, "triton": triton(file), "device": _device(file)} for file in self.files for row in file["rows"]
        )
        return [row for row in found if all(row.get(key) == value for key, value in wanted.items())]

    def row(self, **wanted: Any) -> dict[str, Any]:
        """The only row with these values, or that of the newest Triton."""
        rows = self.rows(**wanted)
        if not rows:
            raise LookupError(f"no file of results has a row with {wanted}")
        return rows[-1]

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


def triton(file: Row) -> str:
    return file["environment"]["versions"].get("triton") or ""


def files() -> str:
    """Every file of results, with the command that made it and what its note says."""
    lines = []
    for path in sorted(RESULTS.glob("*.json")):
        file = json.loads(path.read_text(encoding="utf-8"))
        place = file["environment"]
        command = f"`{place['command']}`" if place["command"].startswith("python ") else place["command"]
        made = ", ".join(filter(None, [place["date"][:10], (place["commit"] or "")[:7]]))
        line = f"- `{path.stem}`{' *' if 'source' in file else ''} ({made}): {command}"
        lines.append(f"{line} ({file['note']})" if "note" in file else line)
    return "\n".join(lines)


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Markdown. Columns of numbers after the first are aligned right; columns without any value are omitted."""
    columns = [[row[i] for row in rows if row[i]] for i in range(1, len(header))]
    alignment = "".join("r" if all(cell[0].isdigit() for cell in column) else "l" for column in columns)
    return markdown_table(header, rows, f"l{alignment}")


# Whole steps.


def steps(results: Results) -> str:
    """Whole steps of one micro-batch, a row per model and size: without CUDA graphs and with them, newest rows only.

    MFU and memory are those of the faster of the two.
    """
    found: dict[tuple[int, bool, str], dict[bool, Row]] = {}
    for file in sorted(results.files, key=lambda file: file["environment"]["date"]):
        for row in _told(file):
            name = f"{_sized_name(row['experiment'])}{', no pruning' * _unpruned(row)}"
            key = _order(row["experiment"]), _unpruned(row), name
            found.setdefault(key, {})[row["cuda_graphs"]] = row
    rows = []
    for (*_, name), pair in sorted(found.items(), key=lambda item: item[0]):
        best = max(pair.values(), key=lambda row: row["tokens_per_second"])
        speeds = [_optional(pair.get(used), _rate) for used in (False, True)]
        rows.append([name, *speeds, _percent(best.get("mfu")), _gigabytes(best.get("peak_memory_bytes"))])
    return table(["model", "tokens/s", "with CUDA graphs", "MFU", "memory GB"], rows)


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


def scaling(results: Results) -> str:
    """Tokens per second of each of several GPUs under each strategy, and as a share of one GPU alone."""
    rows = []
    for file in results.files:
        batch, is_unpruned = file["settings"]["batch_size"], NO_PRUNING in file["settings"]["overrides"]
        measured = {(row["experiment"], row["micro_batches"], row["case"]): row for row in file["rows"]}
        for experiment, number in dict.fromkeys(key[:2] for key in measured):
            cells = []
            for case in SCALING_CASES:
                row = measured.get((experiment, number, case))
                one = row and compared_with(row, file["rows"])
                is_compared = one and not case.startswith("one")
                share = f" ({_percent(row['tokens_per_second'] / one['tokens_per_second'])})" if is_compared else ""
                cells.append(_optional(row, _rate) + share)
            name = f"{_sized_name(experiment)}{', no pruning' * is_unpruned}"
            rows.append((name, -number * batch, [name, f"{number} × {batch}", *cells]))
    rows.sort(key=lambda row: row[:2])
    names = ["model", "micro-batches", "one GPU alone", "FSDP", "DDP", "one GPU alone, graphs", "DDP, graphs"]
    return table(names, [cells for *_, cells in rows])


def _told(file: Row) -> list[dict[str, Any]]:
    """Rows of steps, each with the experiment of its model. `model=NAME` replaces the one that the file names."""
    overrides = file["settings"].get("overrides") or ()
    chosen = [override.removeprefix("model=") for override in overrides if override.startswith("model=")]
    return [
        {**row, "experiment": f"{chosen[-1]}/{row['experiment'].partition('/')[2]}"} if chosen else row
        for row in file["rows"]
    ]


def _rate(row: Row) -> str:
    return f"{row['tokens_per_second']:,.0f}"


def _unpruned(row: Row) -> bool:
    """Whether a model that could prune did not."""
    return row["experiment"].startswith("forgetting_transformer") and row.get("pruned") is False


def name_of(experiment: str) -> str:
    """Name of an experiment in tables."""
    return next((name for start, name in NAMES.items() if experiment.startswith(start)), experiment)


def _sized_name(experiment: str) -> str:
    """The same with the number of parameters, as in "FoX (Pro) 125M"."""
    size = re.search(r"[_/](\d+)m(_|$)", experiment)
    return f"{name_of(experiment)} {size[1]}M" if size else name_of(experiment)


def _order(experiment: str) -> int:
    return next((i for i, start in enumerate(NAMES) if experiment.startswith(start)), len(NAMES))


# Kernels.


def attention(results: Results) -> str:
    """TFLOP/s of attention alone, forward and backward, each kernel with the newest Triton that measured it."""
    newest = {(row["kernel"], _shape(row)): row for row in results.rows(table="kernels") if "tflops" in row}
    kernels, shapes = (list(dict.fromkeys(key[i] for key in newest)) for i in (0, 1))
    rows = [
        [kernel, *(_optional(newest.get((kernel, shape)), lambda row: f"{row['tflops']:.0f}") for shape in shapes)]
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


def _device(file: Row) -> str:
    return device_name(file["environment"]) if "hardware" in file["environment"] else ""


def _version(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split(".") if part.isdigit())
