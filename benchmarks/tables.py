"""Turns files of results (cases.py) into tables and numbers of the documentation. studies/pages.py inserts them.

A table uses all files whose names match its pattern in benchmarks/results. A new file with the same name replaces an
old one; rows of a newer Triton take the place of the same rows of an older one.
"""

import json
import re
import statistics
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from cases import device_name
from scaling import compared_with

from forgetting_transformer.analysis.tables import markdown_table

RESULTS = Path(__file__).resolve().parent / "results"
#: How experiments are called, in the order of the tables; the size is left out.
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
GATES = {"half": "all ½", "spread": "time constants 4…10⁶", "one": "all 1"}
#: The override that turns pruning off.
NO_PRUNING = "model.config.log_pruning_tolerance=null"
PACKAGES = {"torch": "PyTorch", "triton": "Triton", "fla-core": "fla-core"}
PARTS = {
    "train": "`train.py`",
    "step": "a step with the weights it trained",
    "step_unpruned": "the same, pruning off",
}
CODES = {"ours": "ours", "fla": "flash-linear-attention", "hf": "Hugging Face"}
STRATEGIES = {
    "one": "one GPU alone",
    "one_graphs": "one GPU alone, CUDA graphs",
    "ddp": "`ddp`",
    "ddp_graphs": "`ddp`, CUDA graphs",
    "fsdp": "`fsdp`, freed after use",
    "fsdp_kept": "`fsdp`, gathered once a step",
    "context": "`strategy.context`",
}

Row = Mapping[str, Any]


class Results:
    """The files of RESULTS that match a pattern, oldest Triton first."""

    def __init__(self, pattern: str) -> None:
        files = [json.loads(file.read_text(encoding="utf-8")) for file in sorted(RESULTS.glob(pattern))]
        if not files:
            raise FileNotFoundError(f"{RESULTS / pattern}: no such file of results; a table needs it")
        self.files = sorted(files, key=lambda file: _version(triton(file)))

    def rows(self, **wanted: Any) -> list[dict[str, Any]]:
        """Rows of all files with these values, each with its file's Triton, device and date under these names."""
        found = (
            {**row, "triton": triton(file), "device": _device(file), "date": file["environment"].get("date", "")}
            for file in self.files
            for row in file["rows"]
        )
        return [row for row in found if all(row.get(key) == value for key, value in wanted.items())]

    def row(self, **wanted: Any) -> dict[str, Any]:
        """The only row with these values, or that of the newest Triton."""
        rows = self.rows(**wanted)
        if not rows:
            raise LookupError(f"no file of results has a row with {wanted}")
        return rows[-1]

    @property
    def source(self) -> str:
        """Commands, and on what, with what and when they were run."""
        commands = dict.fromkeys(file["environment"]["command"] for file in self.files)
        lines = ["```bash", *(line for line in commands if line.startswith("python ")), "```", ""]
        if len(lines) == 3:
            lines = []
        made = list(dict.fromkeys(map(describe, self.files)))
        return "\n".join([*lines, *(made if len(made) == 1 else (f"* {text}" for text in made))])


def describe(file: Row) -> str:
    """Where the numbers of a file come from, in a sentence or two."""
    place = file["environment"]
    hardware, versions = place["hardware"], place["versions"]
    parts = [device_name(place)]
    parts += [f"driver {hardware['driver']}"] if hardware.get("driver") else []
    parts += [f"{name} {versions[key]}" for key, name in PACKAGES.items() if versions.get(key)]
    parts += [place["date"][:10]]
    parts += (
        [f"commit {place['commit'][:7]}{' with changes' if place.get('changed') else ''}"] if place["commit"] else []
    )
    text = f"{', '.join(parts)}."
    return f"{text} {file['source'][0].upper()}{file['source'][1:]}." if "source" in file else text


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


def whole_run(results: Results) -> str:
    """Speeds of a run of train.py, and of steps with the weights it trained."""
    rows = [
        [
            _sized_name(row["experiment"]),
            PARTS[row["part"]],
            _optional(row.get("tokens"), lambda n: f"{n / 1e6:.0f}M"),
            f"{row['tokens_per_second']:,.0f}",
            _optional(row.get("tokens_per_second_at_the_end"), "{:,.0f}".format),
            _percent(row.get("mfu")),
            _optional(row.get("first_loss_seconds"), "{:.0f}".format),
        ]
        for row in results.rows()
    ]
    names = ["model", "what", "tokens trained", "tokens/s", "in the last quarter", "MFU", "first loss after s"]
    return table(names, rows)


def steps(results: Results) -> str:
    """Whole steps of one micro-batch: of each model the newest row, with the commit that measured it."""
    found: dict[str, tuple[tuple, list[str]]] = {}
    for file in sorted(results.files, key=lambda file: file["environment"]["date"]):
        place = file["environment"]
        for row in _told(file):
            name = f"{name_of(row['experiment'])}{', no pruning' * _unpruned(row)}"
            name += ", CUDA graphs" * bool(row.get("cuda_graphs"))
            commit = f"{place['commit'][:7]}{' with changes' * bool(place['changed'])}"
            found[name] = (_order(row["experiment"]), _unpruned(row)), [name, commit, *_speed(row)]
    cells = [cells for _, cells in sorted(found.values(), key=lambda row: row[0])]
    return table(["model", "commit", "ms per step", "tokens/s", "MFU", "memory GB"], cells)


def graphs(results: Results) -> str:
    """Steps with `train.cuda_graphs` and without, a row for each model and micro-batch."""
    found: dict[tuple[int, int, str], dict[bool, Row]] = {}
    for file in results.files:
        for row in _told(file):
            key = (row["tokens_per_step"], _order(row["experiment"]), _sized_name(row["experiment"]))
            found.setdefault(key, {})[row["cuda_graphs"]] = row
    rows = []
    for (tokens, _, name), pair in sorted(found.items(), key=lambda item: item[0]):
        without, with_graphs = (_speed(pair[used])[:2] if used in pair else ["", ""] for used in (False, True))
        speeds = [row["tokens_per_second"] for _, row in sorted(pair.items()) if row.get("status", "ok") == "ok"]
        gain = f"{speeds[1] / speeds[0]:.2f}" if len(speeds) == 2 else ""
        columns = [cell for both in zip(without, with_graphs, strict=True) for cell in both]
        rows.append([name, f"{tokens:,}", *columns, gain])
    names = ["model", "tokens of the micro-batch", "ms per step", "with graphs", "tokens/s", "with graphs"]
    return table([*names, "times as fast"], rows)


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


def peers(results: Results, steps: Results) -> str:
    """Whole steps of our models and of other packages' models of the same sizes; or why there are none.

    Where peers.py measured other packages alone, ours are those that the same commit has in `steps`, from the same GPU.
    """
    rows = []
    for row in sorted(
        [*results.rows(), *_ours(results, steps)],
        key=lambda row: (_order(row["experiment"]), [*CODES].index(row["code"])),
    ):
        remark = row.get("remark") or ""
        speed = _speed(row)
        if row["status"] != "ok":
            # The first sentence: a package's error may go on for long.
            reason = row["status"].split(". ")[0].removeprefix("failed: RuntimeError: ")
            speed, remark = [""] * 4, "; ".join(filter(None, [reason, remark]))
        rows.append(
            [name_of(row["experiment"]), CODES[row["code"]], "yes" if row["compiled"] else "no", *speed, remark]
        )
    return table(["model", "code", "compiled", "ms per step", "tokens/s", "MFU", "memory GB", "remark"], rows)


def _ours(results: Results, steps: Results) -> list[dict[str, Any]]:
    """Rows of `steps` for the models of other packages that have none of ours beside them."""
    missing = {row["experiment"] for row in results.rows()} - {row["experiment"] for row in results.rows(code="ours")}
    made = {(device_name(file["environment"]), file["environment"]["commit"]) for file in results.files}
    found = []
    for file in steps.files:
        if (device_name(file["environment"]), file["environment"]["commit"]) in made:
            for row in _told(file):
                remark = "CUDA graphs" if row["cuda_graphs"] else None
                is_measured = row["experiment"] in missing and row.get("status", "ok") == "ok"
                found += [row | {"code": "ours", "remark": remark}] if is_measured else []
    return found


def starts(results: Results) -> str:
    """Seconds from the command to the first loss of `train.py`, and the stages that take most of them."""
    rows = []
    for file in results.files:
        for row in file["rows"]:
            devices = (
                f"{file['settings']['devices']}{' with launch.py' * (file['settings']['launcher'] == 'launch.py')}"
            )
            cells = [name_of(row["experiment"]), devices, row["caches"]]
            if row["status"] != "ok":
                rows.append([*cells, _reason(row), "", "", "", ""])
                continue
            stages = row["stages"]
            model = stages["self-test"] + stages["model"]
            parts = (row["first_line_seconds"], row["launcher_seconds"], stages["imports"], model, stages["first step"])
            rows.append([*cells, *map("{:.1f}".format, parts)])
    names = ["model", "GPUs", "caches", "first loss after s", "launcher", "imports", "self-test and model"]
    return table([*names, "first step"], rows)


def scaling(results: Results) -> str:
    """Steps on several GPUs under each strategy, beside one GPU alone with the same tokens per step."""
    rows = []
    for file in results.files:
        batch, length = file["settings"]["batch_size"], file["settings"]["seq_len"]
        for row in file["rows"]:
            model = f"{_sized_name(row['experiment'])}{', no pruning' * (NO_PRUNING in file['settings']['overrides'])}"
            devices = f"{'1 of ' * row['case'].startswith('one')}{file['settings']['devices']}"
            case = [model, devices, f"{row['micro_batches']} × {batch}", STRATEGIES[row["case"]]]
            if row["status"] != "ok":
                rows.append([*case, "", _reason(row), "", "", "", "", "", ""])
                continue
            one, rate = compared_with(row, file["rows"]), row["tokens_per_second"]
            rows.append([
                *case,
                f"{1000 * row['micro_batches'] * batch * length / rate:.1f}", f"{rate:,.0f}",
                _percent(one and rate / one["tokens_per_second"]), _percent(row.get("mfu")),
                *(_optional(row.get(f"{key}_ms"), "{:.1f}".format) for key in ("exposed", "hidden", "idle")),
                _gigabytes(row["peak_memory_bytes"]),
            ])  # fmt: skip
    names = ["model", "GPUs", "micro-batches", "strategy", "ms per step", "tokens/s of a GPU", "of one alone", "MFU"]
    return table([*names, "exposed ms", "hidden ms", "idle ms", "memory GB"], rows)


def _told(file: Row) -> list[dict[str, Any]]:
    """Rows of steps, each with the experiment of its own model: `model=NAME` chooses another than the file's.

    A row without a measurement says of its case only the experiment; the rest is in the command.
    """
    settings = file["settings"]
    overrides = settings.get("overrides") or ()
    chosen = [override.removeprefix("model=") for override in overrides if override.startswith("model=")]
    rows = []
    for row in file["rows"]:
        case = {"experiment": f"{chosen[-1]}/{row['experiment'].partition('/')[2]}"} if chosen else {}
        if row.get("status", "ok") != "ok":
            case |= {
                "pruned": NO_PRUNING not in overrides,
                "cuda_graphs": "train.cuda_graphs=true" in overrides,
                "tokens_per_step": settings["seq_len"] * settings["batch_size"],
            }
        rows.append({**row, **case})
    return rows


def _speed(row: Row) -> list[str]:
    """Milliseconds of a step, tokens per second, MFU and memory; or why there are none."""
    if row.get("status", "ok") != "ok":
        return ["", _reason(row), "", ""]
    ms = f"{statistics.median(row['step_seconds']) * 1e3:.1f}"
    memory = _gigabytes(row.get("peak_memory_bytes"))
    return [ms, f"{row['tokens_per_second']:,.0f}", _percent(row.get("mfu")), memory]


def _reason(row: Row) -> str:
    """Why a row has no measurement, for a cell."""
    return " ".join(row["status"].replace("|", "/").split())


def _unpruned(row: Row) -> bool:
    """Whether a model that could prune did not."""
    return row["experiment"].startswith("forgetting_transformer") and row.get("pruned") is False


def name_of(experiment: str) -> str:
    """How an experiment is called."""
    return next((name for start, name in NAMES.items() if experiment.startswith(start)), experiment)


def _sized_name(experiment: str) -> str:
    """The same with the number of parameters, as in "FoX (Pro) 125M"."""
    size = re.search(r"[_/](\d+)m(_|$)", experiment)
    return f"{name_of(experiment)} {size[1]}M" if size else name_of(experiment)


def _order(experiment: str) -> int:
    return next((i for i, start in enumerate(NAMES) if experiment.startswith(start)), len(NAMES))


# Kernels.


def attention_kernels(results: Results) -> str:
    """Attention alone, each kernel with the newest Triton that measured it."""
    shapes = list(dict.fromkeys(_shape(row) for row in results.rows(table="kernels")))
    newest = {(shapes.index(_shape(row)), row["kernel"]): row for row in results.rows(table="kernels")}
    rows = [
        [
            shapes[shape], kernel, row["triton"] if "orgetting attention" in kernel else "",
            f"{row['forward_ms']:.2f}", f"{row['backward_ms']:.2f}", f"{row['tflops']:.0f}",
            *(_optional(row.get(key), "{:.2f}".format) for key in ("graph_ms", "queued_ms")),
        ]
        for (shape, kernel), row in sorted(newest.items(), key=lambda item: item[0][0])
    ]  # fmt: skip
    names = ["B,T,H,D", "kernel", "Triton", "forward ms", "backward ms", "both TFLOP/s", "graph ms", "queued ms"]
    return table(names, rows)


def attention_pruning(results: Results) -> str:
    """Pruned and unpruned attention, each case with the newest Triton that measured it."""
    newest = {(_shape(row), row["gates"], row["bounds"]): row for row in results.rows(table="pruning")}
    rows = []
    for (shape, gates, bounds), row in newest.items():
        both = ("{:.2f} + {:.2f}".format(*row[key]) for key in ("full_ms", "pruned_ms"))
        shares = (_percent(row[key]) for key in ("skipped", "search"))
        rows.append([shape, GATES[gates], bounds, *both, f"{row['speedup']:.2f}", *shares])
    return table(["B,T,H,D", "gates", "bounds", "full ms", "pruned ms", "speed-up", "skipped", "search"], rows)


def recurrences(results: Results) -> str:
    """Recurrences alone, each kernel with the newest Triton that measured it."""
    newest = {(row["op"], row["wanted"]): row for row in results.rows()}
    rows = [
        [
            op, _shape(row), row["backend"], row["triton"],
            f"{row['forward_ms']:.2f}", f"{row['backward_ms']:.2f}", f"{row['error']:.1e}",
        ]
        for (op, _), row in sorted(newest.items())
    ]  # fmt: skip
    return table(["op", "H,K,V", "backend", "Triton", "forward ms", "backward ms", "error"], rows)


def decoding(results: Results) -> str:
    """One token against a cache: microseconds of every kernel, per shape, with the newest Triton."""
    titles = {"half": "ours, f = ½, pruned", "cudnn": "cuDNN, no gate", "flash": "FlashAttention, no gate"}
    titles["whole"] = "the training kernel"
    kernels: dict[str, dict[str, Row]] = {}
    for row in results.rows():
        kernels.setdefault(_shape(row).replace(",", ", "), {})[row["kernel"]] = row
    rows = []
    for shape, here in kernels.items():
        ours = here["decode"]
        others = (here.get(kernel, {}).get("us") for kernel in titles)
        times = [_optional(us, lambda x: f"{x:,.0f}" if x >= 300 else f"{x:.1f}") for us in others]
        rows.append([shape, f"{ours['us']:.1f} ({ours['share_of_peak'] * 100:.0f} %)", *times])
    return table(["B, query heads, key heads, D, N", "ours", *titles.values()], rows)


# Data, checkpoints and interruptions.


def reading(results: Results) -> str:
    titles = {"plain zarr": "plain Zarr, a read per batch", "kept chunks": "kept chunks"}
    rows = []
    for row in results.rows():
        rate, cpu = statistics.median(row["tokens_per_second"]) / 1e6, row["cpu_seconds_per_token"] * 1e9
        cells = [titles[row["reader"]], str(row["workers"]), f"{rate:,.1f}" if rate < 10 else f"{rate:,.0f}"]
        rows.append([*cells, f"{row['decode_factor']:.2f}", f"{cpu:,.0f}" if cpu >= 100 else f"{cpu:.1f}"])
    return table(["reader", "workers", "M tokens/s", "bytes decoded per byte used", "CPU ns per token"], rows)


def checkpoints(results: Results) -> str:
    (row,) = results.rows()
    rows = [
        [
            str(number), f"{save['bytes'] / 1e9:.1f}", f"{save['device_waits_seconds']:.2f}",
            _optional(save["write_seconds"], "{:.0f}".format), f"{save['step_seconds_meanwhile'] * 1e3:.0f}",
        ]
        for number, save in enumerate(row["saves"], 1)
    ]  # fmt: skip
    before = f"{row['step_seconds'] * 1e3:.0f}"
    names = ["save", "GB", "the GPU waits, s", "written in, s", f"ms per step meanwhile ({before} before)"]
    return table(names, rows)


def corruption(results: Results) -> str:
    """The time of digests of all weights and moments, the shortest step, and their share at the default interval."""
    rows = [
        [
            name_of(row["experiment"].removeprefix("longcrawl64/")),
            f"{row['parameters'] / 1e6:.0f}M",
            f"{row['step_seconds'] * 1e3:.0f}",
            f"{row['digest_seconds'] * 1e3:.0f}",
            _percent(row["share"], 2),
        ]
        for row in sorted(results.rows(), key=lambda row: row["parameters"])
    ]
    return table(["model", "parameters", "ms per step", "ms per comparison", "share of a run"], rows)


def interruptions(results: Results) -> str:
    """Ends and continuations of runs on several devices that were interrupted."""
    rows = []
    for file in results.files:
        straight = [row["losses"] for row in file["rows"] if row["check"] == "straight" and row["status"] == "ok"]
        for row in file["rows"]:
            losses = _optional(row.get("largest_difference"), "{:.1e}".format)
            if row["check"] == "world_sizes" and len(straight) > 1:
                losses += f" ({max(abs(a - b) for a, b in zip(*straight[:2], strict=True)):.1e})"
            said = row.get("reason", "").partition(";")[0].partition(" (seen here")[0].removeprefix("TrainingError: ")
            remark = _reason(row) if row["status"] != "ok" else said
            if row["check"] == "straight":
                remark = _optional(row.get("step_seconds"), lambda x: f"{1e3 * x:.0f} ms per step") or remark
            rows.append([
                row["check"], " → ".join(map(str, row["devices"])),
                ", ".join(f"{seconds:.1f}" for seconds in row.get("first_step_seconds", ()) if seconds),
                _optional(row.get("seconds_to_end"), "{:.1f}".format), _optional(row.get("exit_code"), str),
                _optional(row.get("steps_lost"), str), "bitwise" if row.get("bitwise") else losses, remark,
            ])  # fmt: skip
    names = ["check", "devices", "first step s", "to the end s", "exit code", "steps lost", "losses", "remark"]
    return table(names, rows)


# Cells.


def _optional(value: Any, text: Callable[[Any], str]) -> str:
    return "" if value is None else text(value)


def _percent(share: float | None, digits: int = 1) -> str:
    return _optional(share, lambda x: f"{x * 100:.{digits}f} %")


def _gigabytes(size: float | None) -> str:
    return _optional(size, lambda x: f"{x / 1e9:.1f}")


def _shape(row: Row) -> str:
    return ",".join(str(n) for n in row["shape"])


def _device(file: Row) -> str:
    return device_name(file["environment"]) if "hardware" in file["environment"] else ""


def _version(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split(".") if part.isdigit())
