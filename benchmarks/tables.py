"""Turns files of results (record.py) into tables and numbers of the documentation. studies/pages.py inserts them.

A table uses all files whose names match its pattern in benchmarks/results. A new file with the same name replaces an
old one, and one with another name adds a column or rows, for example for another Triton.
"""

import json
import re
import statistics
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from record import device_name
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
    "demo/fox_pro": "FoX (Pro)",
    "demo/fox_llama": "FoX (LLaMA)",
    "demo/transformer_pro": "Transformer (Pro)",
    "demo/transformer_llama": "Transformer (LLaMA)",
    "demo/transformer_swa": "Transformer (window)",
    "demo/mamba2": "Mamba-2",
    "demo/hgrn2": "HGRN2",
    "demo/delta_net": "DeltaNet",
    "demo/gated_delta_net": "Gated DeltaNet",
    "demo/kda": "KDA",
    "demo/path_fox": "PaTH-FoX",
    "demo/samba": "Samba",
}
GATES = {"half": "all ½", "spread": "time constants 4…10⁶", "one": "all 1"}
#: The override that turns pruning off.
NO_PRUNING = "model.config.log_pruning_tolerance=null"
PACKAGES = {"torch": "PyTorch", "triton": "Triton", "fla-core": "fla-core"}
PARTS = {
    "train": "`train.py`",
    "train_unpruned": "`train.py`, pruning off",
    "step": "a step with the weights it trained",
    "step_unpruned": "the same, pruning off",
}


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


def describe(file: Mapping[str, Any]) -> str:
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


def triton(file: Mapping[str, Any]) -> str:
    return file["environment"]["versions"].get("triton") or ""


def _device(file: Mapping[str, Any]) -> str:
    return device_name(file["environment"]) if "hardware" in file["environment"] else ""


def _version(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split(".") if part.isdigit())


def name_of(experiment: str) -> str:
    """How an experiment is called."""
    return next((name for start, name in NAMES.items() if experiment.startswith(start)), experiment)


def _sized_name(experiment: str) -> str:
    """The same with the number of parameters, as in "FoX (Pro) 125M"."""
    size = re.search(r"_(\d+)m(_|$)", experiment) or re.search(r"/(\d+)m(_|$)", experiment)
    return f"{name_of(experiment)} {size[1]}M" if size else f"{name_of(experiment)}, demo"


def _order(experiment: str) -> int:
    return next((i for i, start in enumerate(NAMES) if experiment.startswith(start)), len(NAMES))


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Markdown. Columns of numbers after the first are aligned right; columns without any value are omitted."""
    columns = [[row[i] for row in rows if row[i]] for i in range(1, len(header))]
    alignment = "".join("r" if all(cell[0].isdigit() for cell in column) else "l" for column in columns)
    return markdown_table(header, rows, f"l{alignment}")


def _shape(row: Mapping[str, Any]) -> str:
    return ",".join(str(n) for n in row["shape"])


def _optional(value: float | None, text: Callable[[float], str]) -> str:
    return "" if value is None else text(value)


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


# Training.


def whole_run(results: Results) -> str:
    """What a run of train.py gets, and steps with the weights it trained."""
    several = len({row["triton"] for row in results.rows()}) > 1
    rows = []
    for row in results.rows():
        end, first = row.get("tokens_per_second_at_the_end"), row.get("first_loss_seconds")
        rows.append([
            _sized_name(row["experiment"]), PARTS[row["part"]], row["triton"] if several else "",
            _optional(row.get("tokens"), lambda n: f"{n / 1e6:.0f}M"), f"{row['tokens_per_second']:,.0f}",
            _optional(end, lambda x: f"{x:,.0f}"), _optional(row.get("mfu"), lambda x: f"{x * 100:.1f} %"),
            _optional(first, lambda x: f"{x:.0f}"),
        ])  # fmt: skip
    header = [
        "model",
        "what",
        "Triton",
        "tokens trained",
        "tokens/s",
        "in the last quarter",
        "MFU",
        "first loss after s",
    ]
    return table(header, rows)


def whole_models(results: Results) -> str:
    """One micro-batch of every architecture, with the weights of initialisation."""

    def key(row: Mapping[str, Any]) -> tuple:
        return _order(row["experiment"]), row.get("compiled") is False, _unpruned(row), not row["checkpointing"]

    kinds = {True: ", compiled", False: ", eager", None: ""}
    rows = []
    for row in sorted((row for row in results.rows() if not row.get("trained")), key=key):
        name = f"{name_of(row['experiment'])}{kinds[row.get('compiled')]}{', no pruning' if _unpruned(row) else ''}"
        cells = [name, "yes" if row["checkpointing"] else "no"]
        if row["status"] == "ok":
            ms = statistics.median(row["step_seconds"]) * 1e3
            mfu, memory = row["mfu"], row["peak_memory_bytes"]
            cells += [f"{ms:,.1f}", f"{row['tokens_per_second']:,.0f}", _optional(mfu, lambda x: f"{x * 100:.1f} %")]
            cells += [_optional(memory, lambda x: f"{x / 1e9:.1f}")]
        else:
            cells += ["", row["status"], "", ""]
        rows.append(cells)
    return table(["model", "activation checkpointing", "ms per step", "tokens/s", "MFU", "memory GB"], rows)


def steps(results: Results) -> str:
    """Whole steps of one micro-batch, a row per commit that measured the model, the oldest first."""
    rows = []
    for file in results.files:
        place = file["environment"]
        for row in _told(file):
            name = f"{name_of(row['experiment'])}{', no pruning' if _unpruned(row) else ''}"
            if file["settings"].get("attention") == "cudnn":
                name += " with cuDNN's attention"
            if row.get("cuda_graphs"):
                name += ", CUDA graphs"
            commit = f"{place['commit'][:7]}{' with changes' if place['changed'] else ''}"
            mfu = _optional(row.get("mfu"), lambda x: f"{x * 100:.1f} %")
            memory = _optional(row.get("peak_memory_bytes"), lambda x: f"{x / 1e9:.1f}")
            order = (_order(row["experiment"]), _unpruned(row), place["date"])
            rows.append((order, [name, commit, *_speed(row), mfu, memory]))
    cells = [cells for _, cells in sorted(rows, key=lambda row: row[0])]
    return table(["model", "commit", "ms per step", "tokens/s", "MFU", "memory GB"], cells)


def _told(file: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Rows of steps, each with the experiment of its own model.

    A row without a measurement says of its case only the experiment; the rest is in the command.
    """
    rows = []
    for row in file["rows"]:
        case = {"experiment": _experiment(row["experiment"], file["settings"].get("overrides") or ())}
        if row.get("status", "ok") != "ok":
            settings = file["settings"]
            case |= {
                "pruned": NO_PRUNING not in settings["overrides"],
                "cuda_graphs": "train.cuda_graphs=true" in settings["overrides"],
                "tokens_per_step": settings["seq_len"] * settings["batch_size"],
            }
        rows.append({**row, **case})
    return rows


def _experiment(experiment: str, overrides: Sequence[str]) -> str:
    """An experiment with the folder of the model that is measured, which may be another one: model=NAME."""
    chosen = [override.removeprefix("model=") for override in overrides if override.startswith("model=")]
    return f"{chosen[-1]}/{experiment.partition('/')[2]}" if chosen else experiment


def _speed(row: Mapping[str, Any]) -> list[str]:
    """Milliseconds of a step and tokens per second, or why there are none."""
    if row.get("status", "ok") != "ok":
        return ["", _reason(row)]
    return [f"{statistics.median(row['step_seconds']) * 1e3:.1f}", f"{row['tokens_per_second']:,.0f}"]


def _reason(row: Mapping[str, Any]) -> str:
    """Why a row has no measurement, for a cell."""
    return " ".join(row["status"].replace("|", "/").split())


def graphs(results: Results) -> str:
    """Steps with `train.cuda_graphs` and without, a row for each model and micro-batch."""
    found: dict[tuple[int, int, str], dict[bool, dict[str, Any]]] = {}
    for file in results.files:
        for row in _told(file):
            key = (row["tokens_per_step"], _order(row["experiment"]), _sized_name(row["experiment"]))
            found.setdefault(key, {})[row["cuda_graphs"]] = row
    rows = []
    for (tokens, _, name), pair in sorted(found.items(), key=lambda item: item[0]):
        (ms, speed), (graphs_ms, graphs_speed) = (
            _speed(pair[used]) if used in pair else ["", ""] for used in (False, True)
        )
        measured = [row["tokens_per_second"] for row in pair.values() if row.get("status", "ok") == "ok"]
        gain = f"{pair[True]['tokens_per_second'] / pair[False]['tokens_per_second']:.2f}" if len(measured) == 2 else ""
        rows.append([name, f"{tokens:,}", ms, graphs_ms, speed, graphs_speed, gain])
    header = [
        "model", "tokens of the micro-batch", "ms per step", "with graphs", "tokens/s", "with graphs", "times as fast",
    ]  # fmt: skip
    return table(header, rows)


def memory(results: Results) -> str:
    """Peaks of training steps on long sequences."""
    rows = []
    for file in results.files:
        for row in sorted(file["rows"], key=lambda row: (row["seq_len"], row["inputs"])):
            cells = [_sized_name(file["settings"]["experiment"]), f"{row['seq_len']:,}", row["inputs"]]
            found = f"{row['peak_memory_bytes'] / 1e9:.1f}" if row["status"] == "ok" else row["status"]
            seconds = row.get("step_seconds")
            rows.append([*cells, found, _optional(seconds, lambda x: f"{statistics.median(x):.2f}")])
    return table(["model", "tokens", "block inputs on the", "peak GB", "s per step"], rows)


# The pieces of a step of FoX (Pro) 760M in the order of the table: how its kernels are called, and the least that it
# has to do: floating-point operations, or bytes, of `_Sizes`. The first pattern that fits has the kernel.
_ATTENTION_BACKWARD = "^(backward|delta|finish|query_gradient|key_gradient|gate_sum|gate_gradient)_kernel$"
PIECES: list[tuple[str, str, Callable[["_Sizes"], float] | None, Callable[["_Sizes"], float] | None]] = [
    ("attention, forward", "^(forward|stretch|running|bound)_kernel$", lambda of: of.pairs, None),
    ("attention, backward", _ATTENTION_BACKWARD, lambda of: 2.5 * of.pairs, None),
    ("matrix products", "nvjet|gemm|cublas|cutlass", lambda of: 6 * of.tokens * of.matrices, None),
    # Queries, keys and values: an input and an output forward; an input and two gradients backward.
    ("token shift and norms of heads", "^shift_norm_", None, lambda of: 3 * (2 + 3) * of.activation(of.width)),
    ("output norm and gate", "^norm_(forward|backward)_kernel$", None, lambda of: (3 + 5) * of.activation(of.width)),
    ("SwiGLU", "^swiglu_", None, lambda of: (3 + 5) * of.activation(of.mlp)),
    # Per block 6 and 12 bytes forward, 14 and 16 backward: the stream and its gradient have 4 bytes an element.
    ("norms of the residual stream", "^(residual_norm_|sum_kernel$)", None, lambda of: 24 * of.activation(of.width)),
    ("loss", "log_softmax|nll_loss", None, lambda of: 3 * 2 * of.tokens * of.vocabulary),
    # The gradient is read for its norm; then read with the weight and two moments, of which three are written.
    ("clipping and AdamW", "multi_tensor_apply|lpnorm", None, lambda of: 4 * 8 * of.parameters),
]
_REST = "casts, copies, embedding, gates and sums that PyTorch and TorchInductor make"
FLOPS, BANDWIDTH = 700e12, 4.25e12


class _Sizes:
    """Of a step of `forgetting_transformer/pro_760m_16b`."""

    layers, width, mlp = 24, 1536, 3584

    def __init__(self, row: Mapping[str, Any], settings: Mapping[str, Any]) -> None:
        self.tokens, self.parameters, self.vocabulary = (
            row["tokens_per_step"],
            row["parameters"],
            settings["vocab_size"],
        )
        self.matrices = self.parameters - self.vocabulary * self.width
        # Two products per pair of a query and a key that it sees, each of two operations per channel.
        self.pairs = 4 * self.layers * self.width * self.tokens * (settings["seq_len"] + 1) / 2

    def activation(self, width: int) -> int:
        """Bytes of a tensor of all layers, `(tokens, width)` each, in 16 bits."""
        return 2 * self.layers * self.tokens * width


def pieces(results: Results) -> str:
    """Kernels of a step of FoX (Pro), pruned and not, by what they do, beside the least time for it.

    Only rows whose kernels have names of their own: before, SwiGLU, norms and attention shared some.
    """
    found: dict[bool, tuple[dict[str, float], float]] = {}
    for file in sorted(results.files, key=lambda file: file["environment"]["date"]):
        for row in file["rows"]:
            names = [kernel["name"] for kernel in row.get("kernels", ())]
            if name_of(row["experiment"]) != "FoX (Pro)" or not any(name.startswith("swiglu_") for name in names):
                continue
            sizes, ms = _Sizes(row, file["settings"]), dict.fromkeys([*(piece[0] for piece in PIECES), _REST], 0.0)
            for kernel in row["kernels"]:
                ms[piece_of(kernel["name"])] += kernel["ms"]
            found[_unpruned(row)] = ms, statistics.median(row["step_seconds"]) * 1e3
    if not found:
        raise LookupError("no file of results has a step of FoX (Pro) with kernels that have names of their own")
    rows = []
    for name, _, flops, bytes_ in PIECES:
        limit = flops(sizes) / FLOPS if flops else bytes_(sizes) / BANDWIDTH if bytes_ else 0.0
        rows.append([name, *(f"{ms[name]:.1f}" for ms, _ in found.values()), f"{limit * 1e3:.1f}"])
    rows.append([_REST, *(f"{ms[_REST]:.1f}" for ms, _ in found.values()), ""])
    rows.append(["all kernels", *(f"{sum(ms.values()):.1f}" for ms, _ in found.values()), ""])
    rows.append(["a step", *(f"{step:.1f}" for _, step in found.values()), ""])
    header = ["piece", *("ms, not pruned" if unpruned else "ms, pruned" for unpruned in found)]
    header.append(f"limit ms, {FLOPS / 1e12:.0f} TFLOP/s or {BANDWIDTH / 1e12:.2f} TB/s")
    return table(header, rows)


def piece_of(kernel: str) -> str:
    """The piece of a step that a kernel belongs to, from its name in a profile."""
    return next((name for name, pattern, *_ in PIECES if re.search(pattern, kernel)), _REST)


def _unpruned(row: Mapping[str, Any]) -> bool:
    """Of a model that could prune."""
    return row["experiment"].startswith("forgetting_transformer") and row.get("pruned") is False


def against_others(others: Results, ours: Results) -> str:
    """Code that a user would take instead, with our compiled model under the same conditions."""
    rows = []
    for row in others.rows():
        case = {key: row[key] for key in ("experiment", "checkpointing", "pruned")}
        mine = ours.rows(**case, compiled=True, status="ok")
        rows.append([
            name_of(row["experiment"]), row["code"], "yes" if row["checkpointing"] else "no",
            "yes" if row["pruned"] else "no",
            f"{row['tokens_per_second']:,.0f}", f"{mine[-1]['tokens_per_second']:,.0f}" if mine else "",
        ])  # fmt: skip
    return table(["model", "other code", "activation checkpointing", "pruned", "its tokens/s", "ours"], rows)


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
    codes = {"ours": "ours", "fla": "flash-linear-attention", "hf": "Hugging Face"}
    rows = []
    for row in sorted(
        [*results.rows(), *_ours(results, steps)],
        key=lambda row: (_order(row["experiment"]), [*codes].index(row["code"])),
    ):
        cells = [name_of(row["experiment"]), codes[row["code"]], "yes" if row["compiled"] else "no"]
        remark = row.get("remark") or ""
        if row["status"] == "ok":
            ms = statistics.median(row["step_seconds"]) * 1e3
            cells += [
                f"{ms:,.1f}",
                f"{row['tokens_per_second']:,.0f}",
                _optional(row["mfu"], lambda x: f"{x * 100:.1f} %"),
            ]
            cells += [_optional(row["peak_memory_bytes"], lambda x: f"{x / 1e9:.1f}"), remark]
        else:
            # The first sentence: a package's error may go on for long.
            reason = row["status"].split(". ")[0].removeprefix("failed: RuntimeError: ")
            cells += ["", "", "", "", "; ".join(filter(None, [reason, remark]))]
        rows.append(cells)
    return table(["model", "code", "compiled", "ms per step", "tokens/s", "MFU", "memory GB", "remark"], rows)


def _ours(results: Results, steps: Results) -> list[dict[str, Any]]:
    """Rows of `steps` for the models of other packages that have none of ours beside them."""
    ours = {row["experiment"] for row in results.rows(code="ours")}
    missing = {row["experiment"] for row in results.rows()} - ours
    made = {(device_name(file["environment"]), file["environment"]["commit"]) for file in results.files}
    found = []
    for file in steps.files:
        place = file["environment"]
        if (device_name(place), place["commit"]) in made and file["settings"].get("attention") != "cudnn":
            for row in _told(file):
                remark = "CUDA graphs" if row["cuda_graphs"] else None
                ours_here = row["experiment"] in missing and row.get("status", "ok") == "ok"
                found += [row | {"code": "ours", "remark": remark}] if ours_here else []
    return found


def cold_start(results: Results) -> str:
    """Seconds from the start of a process to the end of its first step."""
    rows = []
    for file in results.files:
        for row in sorted(file["rows"], key=lambda row: (row["compiled"], _order(row["experiment"]))):
            if row.get("cold_start_seconds") is not None:
                empty = row.get("empty_kernel_cache", file["settings"]["empty_kernel_cache"])
                caches = "not recorded" if empty is None else "empty" if empty else "warm"
                compiled = "yes" if row["compiled"] else "no"
                rows.append([name_of(row["experiment"]), compiled, caches, f"{row['cold_start_seconds']:.1f}"])
    return table(["model", "compiled", "kernel caches", "seconds"], rows)


def starts(results: Results) -> str:
    """Seconds from the command to the first loss of `train.py`, and the stages that take most of them."""
    rows = []
    for file in results.files:
        for row in file["rows"]:
            devices = str(file["settings"]["devices"])
            if file["settings"].get("launcher") == "launch.py":  # the first files do not say it, and had `fabric run`
                devices += " with launch.py"
            cells = [name_of(row["experiment"]), devices, row["caches"]]
            if row["status"] != "ok":
                rows.append([*cells, _reason(row), "", "", "", ""])
                continue
            stages = row["stages"]
            model = stages["self-test"] + stages["model"]
            parts = (row["first_line_seconds"], row["launcher_seconds"], stages["imports"], model, stages["first step"])
            rows.append([*cells, *(f"{seconds:.1f}" for seconds in parts)])
    return table(
        ["model", "GPUs", "caches", "first loss after s", "launcher", "imports", "self-test and model", "first step"],
        rows,
    )


def scaling(results: Results) -> str:
    """Steps on several GPUs under each strategy, beside one GPU alone with the same tokens per step."""
    names = {
        "one": "one GPU alone", "ddp": "`ddp`", "ddp_rebuilt": "DDP as PyTorch has it", "fsdp_plain": "`fsdp` of 0.2.0",
        "fsdp": "`fsdp`, freed after use", "fsdp_kept": "`fsdp`, gathered once a step",
        "one_graphs": "one GPU alone, CUDA graphs", "ddp_graphs": "`ddp`, CUDA graphs",
    }  # fmt: skip
    rows = []
    for file in results.files:
        for row in file["rows"]:
            batch = file["settings"].get("batch_size", 1)  # the first files do not say it
            model = _sized_name(row["experiment"])
            if NO_PRUNING in file["settings"]["overrides"]:
                model += ", no pruning"
            devices = f"{'1 of ' * row['case'].startswith('one')}{file['settings']['devices']}"
            case = [model, devices, f"{row['micro_batches']} × {batch}", names[row["case"]]]
            if row["status"] != "ok":
                rows.append([*case, "", _reason(row), "", "", "", "", "", ""])
                continue
            one = compared_with(row, file["rows"])
            tokens = row["micro_batches"] * batch * file["settings"]["seq_len"]
            rows.append([
                *case,
                f"{1000 * tokens / row['tokens_per_second']:.1f}", f"{row['tokens_per_second']:,.0f}",
                _optional(one and row["tokens_per_second"] / one["tokens_per_second"], lambda x: f"{x * 100:.1f} %"),
                _optional(row.get("mfu"), lambda x: f"{x * 100:.1f} %"),  # the first files do not have it
                *(_optional(row.get(f"{key}_ms"), "{:.1f}".format) for key in ("exposed", "hidden", "idle")),
                _optional(row["peak_memory_bytes"], lambda size: f"{size / 1e9:.1f}"),
            ])  # fmt: skip
    header = ["model", "GPUs", "micro-batches", "strategy", "ms per step", "tokens/s of a GPU", "of one alone", "MFU"]
    return table([*header, "exposed ms", "hidden ms", "idle ms", "memory GB"], rows)


#: Columns of benchmarks/interruptions.py.
INTERRUPTIONS = (
    "check", "devices", "first step s", "to the end s", "exit code", "steps lost", "tokens", "losses", "remark",
)  # fmt: skip


def interruption_cells(row: Mapping[str, Any], rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Of a row of benchmarks/interruptions.py, among the others of its file."""
    cells = dict.fromkeys(INTERRUPTIONS, "")
    cells |= {"check": row["check"], "devices": " → ".join(map(str, row["devices"]))}
    found = {
        "first step s": ", ".join(f"{seconds:.1f}" for seconds in row.get("first_step_seconds", ()) if seconds),
        "to the end s": _optional(row.get("seconds_to_end"), "{:.1f}".format),
        "exit code": _optional(row.get("exit_code"), str),
        "steps lost": _optional(row.get("steps_lost"), str),
        "tokens": {True: "same", False: "other", None: ""}[row.get("same_tokens")],
        "losses": _interruption_losses(row, rows),
        "remark": _interruption_remark(row),
    }
    return [text.replace("|", "/").replace("\n", " ") for text in (cells | found).values()]


def _interruption_losses(row: Mapping[str, Any], rows: Sequence[Mapping[str, Any]]) -> str:
    if row.get("bitwise"):
        return "bitwise"
    if row.get("largest_difference") is None:
        return ""
    text = f"{row['largest_difference']:.1e}"
    straight = [r["losses"] for r in rows if r["check"] == "straight" and r["status"] == "ok"]
    if row["check"] != "world_sizes" or len(straight) < 2:
        return text
    return f"{text} ({max(abs(a - b) for a, b in zip(*straight[:2], strict=True)):.1e})"


def _interruption_remark(row: Mapping[str, Any]) -> str:
    if row["status"] != "ok":
        return row["status"]
    if row["check"] == "checkpoint_stall":
        beside = _optional(row["step_seconds_meanwhile"], lambda x: f", {1e3 * x:.0f} ms beside the writing")
        whole = f"{row['stall_seconds']:.2f} s lost in all; written in {row['write_seconds']:.1f} s"
        return f"{1e3 * row['step_seconds']:.0f} ms per step{beside}; {whole}"
    if row["check"] == "straight":
        return f"{1e3 * row['step_seconds']:.0f} ms per step"
    said = row.get("reason", "").partition(";")[0].partition(" (seen here")[0].removeprefix("TrainingError: ")
    return f"{said} ({row['seconds_to_status']:.0f} s)" if said and row["outcome"] == "failed" else ""


def interruptions(results: Results) -> str:
    """What becomes of runs on several devices that are interrupted."""
    cells = [interruption_cells(row, file["rows"]) for file in results.files for row in file["rows"]]
    return table(list(INTERRUPTIONS), cells)


def long_run_header(length: int) -> list[str]:
    """Columns of benchmarks/long_run.py at one length."""
    header = ["model", "run", "tokens", "GPUs", "steps", "s per step", "memory GB", "losses"]
    return [*header, *(f"loss from {begin:,}" for begin in _loss_columns(length))]


def _loss_columns(length: int) -> list[int]:
    """Where the means of a long run's losses begin: each is over two octaves, the last over that beyond the length."""
    begins = [length // 4, length]
    while begins[0] // 4 >= 256:
        begins.insert(0, begins[0] // 4)
    return begins


def long_run_cells(row: Mapping[str, Any]) -> list[str]:
    """Of a row of benchmarks/long_run.py."""
    case = [_sized_name(row["experiment"]), row["part"], f"{row['seq_len']:,}", str(row["devices"])]
    begins = _loss_columns(row["seq_len"])
    if row["status"] != "ok":
        return [*case, "", "", "", _reason(row).replace("\n", " ").replace("|", "/"), *("" for _ in begins)]
    octaves = dict(map(tuple, row["octaves"]))
    # The second of two octaves has twice as many positions.
    means = [(octaves[begin] + 2 * octaves[2 * begin]) / 3 for begin in begins[:-1]]
    losses = [*map("{:.3f}".format, means), _optional(octaves.get(begins[-1]), "{:.3f}".format)]
    if row["part"] == "beyond":
        return [*case, "", "", "", "", *losses]
    same = "bitwise" if row.get("bitwise") else _optional(row.get("largest_difference"), "{:.1e}".format)
    if row["stopped_after"] is not None:
        same = f"{same}, stopped after {row['stopped_after']}".removeprefix(", ")
    peak = _optional(row["peak_memory_bytes"], lambda size: f"{size / 1e9:.1f}")
    return [*case, str(len(row["losses"])), f"{row['step_seconds']:.2f}", peak, same, *losses]


def long_runs(results: Results) -> str:
    """Training runs on long sequences, a table per length."""
    rows = results.rows()
    lengths = sorted({row["seq_len"] for row in rows})
    made = [(length, [long_run_cells(row) for row in rows if row["seq_len"] == length]) for length in lengths]
    return "\n\n".join(table(long_run_header(length), cells) for length, cells in made)


def long_contexts(results: Results) -> str:
    """Steps on sequences that several GPUs share, beside one GPU alone."""
    rows = []
    for row in _by_length(results.rows()):
        if row["status"] != "ok":
            case = [_pruned_name(row), f"{row['tokens']:,}", str(row["context"])]
            rows.append([*case, "", _reason(row), "", "", "", "", ""])
            continue
        shared, alone = row["context"] > 1, _alone(row, results)
        gain = row["tokens_per_second"] / alone["tokens_per_second"] if shared and alone else None
        whole = 1000 * statistics.median(row["step_seconds"])
        exposed = row["exposed_ms"] / whole if shared else None
        rows.append([
            _pruned_name(row), f"{row['tokens']:,}", str(row["context"]), f"{whole / 1000:.2f}",
            f"{row['tokens_per_second']:,.0f}", _optional(gain, "{:.2f}".format),
            f"{row['attention_ms'] / whole:.0%}".replace("%", " %"),
            _optional(row["exchange_ms"] / whole if shared else None, "{:.0%}".format).replace("%", " %"),
            _optional(exposed, "{:.1%}".format).replace("%", " %"),
            _optional(row["peak_memory_bytes"], lambda size: f"{size / 1e9:.1f}"),
        ])  # fmt: skip
    header = ["model", "tokens", "GPUs", "s per step", "tokens/s", "times one GPU", "attention", "exchange", "exposed"]
    return table([*header, "memory GB"], rows)


def long_contexts_predicted(results: Results) -> str:
    """What a formula says of GPUs that share a sequence, held to those that were measured."""
    if not any(row["context"] > 1 for row in results.rows(status="ok")):
        return "Not measured on several GPUs yet: `python benchmarks/long_contexts.py`."
    rows = []
    for row in _by_length(results.rows(status="ok")):
        alone = _alone(row, results)
        # Recurrences pass states on, for which the formula does not hold.
        if row["context"] == 1 or alone is None or row["experiment"].startswith("mamba2"):
            continue
        seconds, measured = statistics.median(alone["step_seconds"]), 1000 * statistics.median(row["step_seconds"])
        rates = exchange_rates(results, row["device"])
        told = predicted_ms(alone, row, rates, row["context"])
        gains = [
            1000 * seconds * groups / predicted_ms(alone, row, rates, size, groups) for size, groups in ((8, 1), (8, 8))
        ]
        rows.append([
            _pruned_name(row), f"{row['tokens']:,}", f"{row['context']} {_kind(row['device'])}".strip(),
            f"{measured:,.0f}", f"{told:,.0f}",
            f"{told / measured - 1:+.1%}".replace("%", " %"), *(f"{gain:.1f}" for gain in gains),
        ])  # fmt: skip
    header = ["model", "tokens", "GPUs", "ms per step", "by the formula", "difference"]
    return table([*header, "8 GPUs, times one", "64 GPUs, times one"], rows)


#: Bytes per second that each GPU is assumed to send to other nodes: 400 Gb/s.
NODE_RATE = 50e9


class Rates(NamedTuple):
    """Bytes per second of a GPU within a node."""

    exchange: float
    gradients: float


def exchange_rates(results: Results, device: str) -> Rates:
    """The highest that any GPU of this kind had in a row: times in collectives contain waiting for the other GPUs."""
    shared = [row for row in results.rows(status="ok", device=device) if row["context"] > 1 and all(row["by_rank"])]
    # Recurrences pass so little on that it is a matter of latency.
    by_heads = [row for row in shared if not row["experiment"].startswith("mamba2")]
    exchange = max(row["exchange_bytes"] / min(r["exchange_ms"] for r in row["by_rank"]) for row in by_heads)
    gradients = max(
        _summed_bytes(row, row["context"]) / min(r["gradients_ms"] for r in row["by_rank"]) for row in by_heads
    )
    return Rates(1000 * exchange, 1000 * gradients)


def predicted_ms(
    alone: Mapping[str, Any], shared: Mapping[str, Any], rates: Rates, size: int, groups: int = 1
) -> float:
    """Milliseconds of a step in which each of `groups` nodes has a sequence that `size` GPUs share by heads.

    Work is divided by `size`; waiting for the host is not. A GPU sends (N - 1) / N² of what attention takes and gives.
    Gradients are summed in a ring within a node, then 1 / N of them by every GPU in a ring over nodes.

    Args:
        alone: the row of one GPU.
        shared: a row of some GPUs, for its `exchange_bytes`.
    """
    idle = alone["idle_ms"]
    work = (1000 * statistics.median(alone["step_seconds"]) - idle) / size
    sent = shared["exchange_bytes"] * shared["context"] ** 2 / (shared["context"] - 1) * (size - 1) / size**2
    sums = _summed_bytes(alone, size) / rates.gradients + _summed_bytes(alone, groups) / size / NODE_RATE
    return idle + work + 1000 * (sent / rates.exchange + sums)


def _summed_bytes(row: Mapping[str, Any], size: int) -> float:
    """What a GPU sends for a sum of fp32 gradients over `size` GPUs."""
    return 2 * (size - 1) / size * 4 * row["parameters"]


def _by_length(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Rows of long contexts by kind of GPU: model by model, pruned first, then by length and number of GPUs."""

    def key(row: Mapping[str, Any]) -> tuple:
        return row["device"], _order(row["experiment"]), row["pruned"] is False, row["tokens"], row["context"]

    # Files of several GPUs have what one does alone, too: each case is shown once, as it was measured last.
    newest = sorted(rows, key=lambda row: row["date"])
    return sorted({key(row): row for row in newest}.values(), key=key)


def _alone(row: Mapping[str, Any], results: Results) -> dict[str, Any] | None:
    """The row of one GPU of the same kind beside a row of several, as it was measured last."""
    case = {key: row[key] for key in ("experiment", "pruned", "tokens", "device")}
    found = results.rows(**case, context=1, status="ok")
    return max(found, key=lambda row: row["date"], default=None)


def _kind(device: str) -> str:
    """H100 of "NVIDIA H100 80GB HBM3"."""
    return device.removeprefix("NVIDIA ").partition(" ")[0]


def _pruned_name(row: Mapping[str, Any]) -> str:
    return f"{_sized_name(row['experiment'])}{', no pruning' if row['pruned'] is False else ''}"


def demo_losses(results: Results) -> str:
    """Training losses of the demo models after some steps, and their held-out loss."""
    rows = sorted(results.rows(part="train"), key=lambda row: _order(row["experiment"]))
    batch = rows[0]["tokens"] // rows[0]["steps"]
    steps = [24, 48, 96, 144, rows[0]["steps"]]
    cells = []
    for row in rows:
        losses = dict(map(tuple, row["losses"]))
        cells.append(
            [name_of(row["experiment"]), *(f"{losses[n * batch]:.3f}" for n in steps), f"{row['heldout_loss']:.3f}"]
        )
    first, *others = (str(n) for n in steps)
    return table(["model", f"training loss after {first} steps", *others, "held-out loss"], cells)


# Kernels.


def attention_kernels(results: Results) -> str:
    """Attention alone, for every Triton; what does not depend on Triton once."""
    shapes = list(dict.fromkeys(_shape(row) for row in results.rows(table="kernels")))
    rows = []
    for shape in shapes:
        here = [row for row in results.rows(table="kernels") if _shape(row) == shape]
        for kernel in dict.fromkeys(row["kernel"] for row in here):
            same = [row for row in here if row["kernel"] == kernel]
            needs_triton = "orgetting attention" in kernel and "in PyTorch" not in kernel
            for row in same if needs_triton else same[-1:]:
                rows.append([
                    shape, kernel, row["triton"] if needs_triton else "", f"{row['forward_ms']:.2f}",
                    f"{row['backward_ms']:.2f}", f"{row['tflops']:.0f}",
                    *(_optional(row.get(key), lambda ms: f"{ms:.2f}") for key in ("graph_ms", "queued_ms")),
                ])  # fmt: skip
    names = ["B,T,H,D", "kernel", "Triton", "forward ms", "backward ms", "both TFLOP/s", "graph ms", "queued ms"]
    return table(names, rows)


def attention_pruning(results: Results) -> str:
    """Pruned and unpruned attention: times with the newest Triton that measured a case, and the speed-up with each."""
    rows = results.rows(table="pruning")
    versions = sorted({row["triton"] for row in rows}, key=_version)
    cases: dict[tuple[str, str, str], dict[str, Any]] = {}
    for row in sorted(rows, key=lambda row: _version(row["triton"])):
        cases.setdefault((_shape(row), row["gates"], row["bounds"]), {})[row["triton"]] = row
    cells = []
    for (shape, gates, bounds), by_version in cases.items():
        newest = list(by_version.values())[-1]
        full, pruned = (
            f"{forward:.2f} + {backward:.2f}" for forward, backward in (newest["full_ms"], newest["pruned_ms"])
        )
        speedups = [_optional(by_version.get(version), lambda row: f"{row['speedup']:.2f}") for version in versions]
        shares = (f"{newest[key] * 100:.1f} %" for key in ("skipped", "search"))
        cells.append([shape, GATES[gates], bounds, full, pruned, *speedups, *shares])
    names = [f"speed-up, Triton {version}" for version in versions] if len(versions) > 1 else ["speed-up"]
    return table(["B,T,H,D", "gates", "bounds", "full ms", "pruned ms", *names, "skipped", "search"], cells)


def recurrences(results: Results) -> str:
    """Recurrences alone, for every Triton."""
    rows = [
        [
            row["op"], _shape(row), row["backend"], row["triton"],
            f"{row['forward_ms']:.2f}", f"{row['backward_ms']:.2f}",
            f"{row['error']:.1e}",
        ]
        for row in sorted(results.rows(), key=lambda row: (row["op"], row["wanted"], _version(row["triton"])))
    ]  # fmt: skip
    return table(["op", "H,K,V", "backend", "Triton", "forward ms", "backward ms", "error"], rows)


def decoding(results: Results) -> str:
    """One token against a cache: microseconds of every kernel, per shape and Triton."""
    several = len(results.files) > 1
    titles = {"half": "ours, f = ½, pruned", "cudnn": "cuDNN, no gate", "flash": "FlashAttention, no gate"}
    titles["whole"] = "the training kernel"
    rows = []
    for file in results.files:
        for shape in dict.fromkeys(_shape(row) for row in file["rows"]):
            here = {row["kernel"]: row for row in file["rows"] if _shape(row) == shape}
            ours = here["decode"]
            cells = [shape.replace(",", ", "), *([triton(file)] if several else [])]
            cells.append(f"{ours['us']:.1f} ({ours['share_of_peak'] * 100:.0f} %)")
            for kernel in titles:
                us = here.get(kernel, {}).get("us")
                cells.append(_optional(us, lambda x: f"{x:,.0f}" if x >= 300 else f"{x:.1f}"))
            rows.append(cells)
    header = ["B, query heads, key heads, D, N", *(["Triton"] if several else []), "ours", *titles.values()]
    return table(header, rows)


def errors(results: Results) -> str:
    rows = []
    for row in results.rows():
        low, high = (None if row[key] is None else f"{row[key]:.1e}" for key in ("low", "high"))
        size = f"below {high}" if low is None else high if low == high else f"{low} to {high}"
        rows.append([row["dtype"], row["gates"], row["what"], size])
    return table(["dtype", "gates", "of what", "‖Δ‖ / ‖reference‖"], rows)


# Data and checkpoints.


def reading(results: Results) -> str:
    titles = {"plain zarr": "plain Zarr, a read per batch", "kept chunks": "kept chunks"}
    rows = []
    for row in results.rows():
        rate, cpu = statistics.median(row["tokens_per_second"]) / 1e6, row["cpu_seconds_per_token"] * 1e9
        cells = [titles[row["reader"]], str(row["workers"]), f"{rate:,.1f}" if rate < 10 else f"{rate:,.0f}"]
        rows.append([*cells, f"{row['decode_factor']:.2f}", f"{cpu:,.0f}" if cpu >= 100 else f"{cpu:.1f}"])
    return table(["reader", "workers", "M tokens/s", "bytes decoded per byte used", "CPU ns per token"], rows)


def checkpoints(results: Results) -> str:
    first, *saves = results.rows()
    rows = []
    for save in saves:
        written = _optional(save["write_seconds"], lambda x: f"{x:.0f}")
        step = f"{save['step_seconds_meanwhile'] * 1e3:.0f}"
        rows.append(
            [str(save["save"]), f"{save['bytes'] / 1e9:.1f}", f"{save['device_waits_seconds']:.2f}", written, step]
        )
    before = f"{first['step_seconds'] * 1e3:.0f}"
    header = ["save", "GB", "the GPU waits, s", "written in, s", f"ms per step meanwhile ({before} before)"]
    return table(header, rows)


def corruption(results: Results) -> str:
    """The time of digests of all weights and moments, the shortest step, and their share at the default interval."""
    rows = [
        [
            name_of(row["experiment"].removeprefix("longcrawl64/")),
            f"{row['parameters'] / 1e6:.0f}M",
            f"{row['step_seconds'] * 1e3:.0f}",
            f"{row['digest_seconds'] * 1e3:.0f}",
            f"{row['share']:.2%}".replace("%", " %"),
        ]
        for row in sorted(results.rows(), key=lambda row: row["parameters"])
    ]
    return table(["model", "parameters", "ms per step", "ms per comparison", "share of a run"], rows)
