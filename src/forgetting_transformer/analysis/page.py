"""One HTML page about runs: curves, tables, and configurations side by side. It needs no other file and no network.

Everything comes from what runs and evaluations left on disk; what a run does not have yet is left out. All texts are
escaped: a run's name or configuration cannot put anything on the page but text.
"""

import base64
import dataclasses
import html
import json
import math
import re
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from forgetting_transformer.analysis import tables
from forgetting_transformer.analysis.plots.losses import format_tokens, loss_against_position, loss_against_tokens
from forgetting_transformer.analysis.runs import (
    Run,
    flatten,
    read_logged_run,
    read_position_loss,
    read_run,
    run_names,
)
from forgetting_transformer.evaluation import harness_tables, longbench, niah, per_token_loss
from forgetting_transformer.evaluation.generation import read_json
from forgetting_transformer.evaluation.models import EvaluationError

# What run_forget_gates.py writes beside heads.json.
_GATE_PICTURES = {
    "memory.png": "memory length of every head",
    "training.png": "memory lengths over training",
    "gates.png": "forget-gate matrices",
    "attention.png": "attention maps",
}
_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; color: #222; max-width: 70rem; margin: 2rem auto; padding: 0 1rem; }
h1 { font-size: 1.6rem; } h2 { font-size: 1.2rem; margin-top: 2.2rem; border-bottom: 1px solid #ccc; }
table { border-collapse: collapse; font-size: 0.9rem; display: block; overflow-x: auto; }
th, td { padding: 0.25rem 0.7rem; border-bottom: 1px solid #e4e4e4; text-align: left; vertical-align: top; }
td.number { text-align: right; font-variant-numeric: tabular-nums; white-space: nowrap; }
tr.differs td { background: #fff3cd; }
img { max-width: 100%; height: auto; } code { font-size: 0.95em; } .note { color: #666; font-size: 0.9rem; }
"""


def write_report(run_dirs: Sequence[Path], results: Sequence[Path], out: Path) -> list[str]:
    """Writes the page and returns what was left out, and why.

    Args:
        run_dirs: output_dirs of runs.
        results: folders with results of evaluations, at any depth: per_token_loss, niah, forget_gates, lm_eval_harness,
            longbench.
        out: the HTML file.

    Raises:
        EvaluationError: nothing to report, a folder that is not a run's, a damaged file, or a page that cannot be
            written.
    """
    for folder in run_dirs:
        if not (folder / "config.yaml").is_file():
            raise EvaluationError(f"{folder} is not a run's output_dir: it holds no config.yaml")
    for folder in results:
        if not folder.is_dir():
            raise EvaluationError(f"--results {folder}: no such folder")
    if not run_dirs and not results:
        raise EvaluationError("nothing to report: give the output_dir of a run, or --results FOLDER")
    left_out: list[str] = []
    try:
        names = run_names(run_dirs) if run_dirs else []
        runs = dict(zip(names, run_dirs, strict=True))
        sections = [
            ("Runs", _overview(runs)),
            ("Loss against training tokens", _training_curves(runs, left_out)),
            ("Loss at every position, in training", _position_curves(runs, left_out)),
            *_evaluations(results, left_out),
            ("Configurations", _configurations(runs)),
        ]
    except (ValueError, OSError, yaml.YAMLError) as error:
        raise EvaluationError(str(error)) from error
    body = "\n".join(f"<h2>{html.escape(title)}</h2>\n{content}" for title, content in sections if content)
    title = "Report: " + (", ".join(names) or ", ".join(map(str, results)))
    page = (
        f'<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8"><title>{html.escape(title)}</title>'
        f"<style>{_STYLE}</style></head>\n<body><h1>{html.escape(title)}</h1>\n{body}\n</body></html>\n"
    )
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(page, encoding="utf-8")
    except OSError as error:
        raise EvaluationError(f"cannot write --out={out} ({error.strerror or error}); name another file") from error
    return left_out


def differing(configs: Sequence[Mapping[str, Any]]) -> list[str]:
    """Keys that are not in every configuration with the same value, in the order of their first occurrence."""
    keys = dict.fromkeys(key for config in configs for key in config)
    return [key for key in keys if any(key not in config or config[key] != configs[0].get(key) for config in configs)]


def _overview(runs: Mapping[str, Path]) -> str:
    if not runs:
        return ""
    rows = []
    for name, folder in runs.items():
        run = read_run(folder)
        config, starts, info = run.config, run.starts, run.info("model")
        train, heldout, speed = (run.last(kind) for kind in ("train", "val", "throughput"))
        loss = heldout.get("val/loss")
        rows.append(
            [
                name,
                config.get("model", {}).get("name", "–"),
                _count(info.get("total_params")),
                _count(info.get("non_embedding_params")),
                _count(train.get("step")),
                _number(train.get("train/loss")),
                _number(loss),
                _number(None if loss is None else math.exp(min(loss, 700.0)), 2),
                _number(speed.get("throughput/token_count_per_second_total_cum"), 0),
                _percent(speed.get("throughput/mfu_total_cum")),
                (starts[-1].get("git", {}).get("commit") or "–")[:10] if starts else "–",
                starts[-1].get("machine", {}).get("device", "–") if starts else "–",
            ]
        )
    head = ["Run", "Model", "Parameters", "without input embedding", "Tokens", "Training loss, last", "Held-out loss"]
    head += ["Held-out perplexity", "Tokens/s", "MFU", "Commit", "Device"]
    return _table(head, rows)


def _training_curves(runs: Mapping[str, Path], left_out: list[str]) -> str:
    histories = _collect(runs, read_logged_run, left_out)
    if not any(_has_loss(history) for history in histories):
        return ""
    return _picture(lambda path: loss_against_tokens(histories, path), "loss against training tokens")


def _has_loss(history: Run) -> bool:
    return bool(np.isfinite(history.train_loss).any() or np.isfinite(history.heldout_loss).any())


def _position_curves(runs: Mapping[str, Path], left_out: list[str]) -> str:
    found = _collect(runs, read_position_loss, left_out)
    if not found:
        return ""
    curves = {
        f"{curve.name} ({'held-out' if curve.source == 'val' else 'training batches'}, after "
        f"{format_tokens(float(f'{curve.train_tokens:.3g}'))} tokens)": curve.loss
        for curve in found
    }
    return _picture(lambda path: loss_against_position(curves, path), "loss at every position")


def _evaluations(folders: Sequence[Path], left_out: list[str]) -> list[tuple[str, str]]:
    """A section per kind of evaluation found in the folders."""
    losses, harness_rows, longbench_rows, needles, gates = [], {}, {}, [], []
    for file in sorted(file for folder in folders for file in folder.rglob("*") if file.is_file()):
        if file.name == "results.npz":
            losses.append(per_token_loss.read_result(file))
        elif file.name == "scores.json":
            needles.append(file.parent)
        elif file.name == "heads.json":
            gates.append(file)
        elif file.name == "results.json" and not file.with_suffix(".npz").is_file():
            content = read_json(file)
            kind = _kind_of_results(content, harness_rows, longbench_rows)
            if kind is None:
                left_out.append(f"{file} holds no results of lm_eval_harness or longbench")
            else:
                kind[_free_name(file.parent.name, kind)] = content
    sections = []
    if losses:
        losses = _one_length_a_name(losses)
        curves = per_token_loss.group_seeds(losses)
        lengths = {loss.summary.get("train_length") for loss in losses} - {None}
        train_length = lengths.pop() if len(lengths) == 1 else None
        picture = _picture(lambda path: loss_against_position(curves, path, train_length), "loss at every position")
        table = per_token_loss.slope_table(per_token_loss.unique_names(losses))
        comparison = per_token_loss.comparison_table(per_token_loss.compare(losses))
        compared = _from_markdown(comparison) if comparison else ""
        sections.append(("Loss at every position, evaluated", picture + compared + _from_markdown(table)))
    if needles:
        sections.append(("Needle in a haystack", "".join(_needle(folder) for folder in needles)))
    if gates:
        sections.append(("Forget gates", "".join(_gates(file) for file in gates)))
    if harness_rows:
        sections.append(("lm-evaluation-harness", _scores(*harness_tables.table(harness_rows))))
    if longbench_rows:
        sections.append(("LongBench", _scores(*longbench.table(longbench_rows))))
    return sections


def _kind_of_results(content: Any, harness_rows: dict, longbench_rows: dict) -> dict | None:
    """Which table the content of a results.json belongs to."""
    if not isinstance(content, dict) or not content:
        return None
    if content.keys() <= longbench.SETS.keys():
        return longbench_rows
    return harness_rows if all(isinstance(metrics, dict) for metrics in content.values()) else None


def _one_length_a_name(losses: Sequence[per_token_loss.Result]) -> list[per_token_loss.Result]:
    """Results as they are, but with its length in the name of each where a name has several."""
    lengths: dict[str, set[int]] = {}
    for loss in losses:
        lengths.setdefault(loss.name, set()).add(loss.loss_T.size)
    return [
        loss
        if len(lengths[loss.name]) == 1
        else dataclasses.replace(loss, name=f"{loss.name}, {loss.loss_T.size:,} positions")
        for loss in losses
    ]


def _scores(rows: Mapping[str, Mapping[str, float]], columns: Sequence[tables.Column]) -> str:
    if not tables.has_numbers(rows, columns):
        return _from_markdown(tables.markdown(rows, columns))
    picture = _picture(lambda path: tables.draw_scores(rows, columns, path), "scores of the models, task by task")
    return picture + _from_markdown(tables.markdown(rows, columns))


def _needle(folder: Path) -> str:
    score = "judge" if (folder / "judge.json").is_file() else "words"
    results = read_json(folder / ("judge.json" if score == "judge" else "scores.json"))
    return _picture(lambda path: niah.draw_grid(results, score, path), f"needle in a haystack, {results['model']}")


def _gates(file: Path) -> str:
    summary = read_json(file)
    rows = [
        [
            str(head["layer"]),
            str(head["head"]),
            f"{'≥ ' * head['memory_is_bound']}{head['memory']:,.0f}",
            _percent(head["pruned"]),
        ]
        for head in summary["heads"]
    ]
    said = f"{summary['model']}, a text of {summary['tokens']:,} tokens: pruning skips {_percent(summary['pruned'])} of the tiles."
    head = ["Layer", "Head", "Memory length (tokens)", "Tiles pruned"]
    pictures = [
        _embedded(picture.read_bytes(), description)
        for name, description in _GATE_PICTURES.items()
        if (picture := file.with_name(name)).is_file()
    ]
    return f"<p>{html.escape(said)}</p>\n{''.join(pictures)}{_table(head, rows)}"


def _configurations(runs: Mapping[str, Path]) -> str:
    if not runs:
        return ""
    configs = [flatten(read_run(folder).config) for folder in runs.values()]
    different = differing(configs)
    same = sorted({key for config in configs for key in config} - set(different))

    def rows(keys: Sequence[str]) -> list[list[str]]:
        return [[key, *(_value(config, key) for config in configs)] for key in keys]

    head = ["Key", *runs]
    table = _table(head, rows(different), mark=len(configs) > 1)
    note = f"<p class='note'>{len(different)} keys differ, {len(same)} agree.</p>" if len(configs) > 1 else ""
    agreeing = _table(head, rows(same))
    label = "Keys on which all agree" if len(configs) > 1 else "All keys"
    details = f"<details><summary>{label}</summary>{agreeing}</details>" if same else ""
    return note + (table if different else "") + details


def _value(config: Mapping[str, Any], key: str) -> str:
    return json.dumps(config[key], default=str, ensure_ascii=False) if key in config else "– not there –"


def _collect(runs: Mapping[str, Path], read: Callable, left_out: list[str]) -> list:
    found = []
    for name, folder in runs.items():
        try:
            found.append(read(folder, name))
        except FileNotFoundError as error:
            left_out.append(str(error))
    return found


def _picture(draw: Callable[[Path], object], description: str) -> str:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "picture.png"
        draw(path)
        return _embedded(path.read_bytes(), description)


def _embedded(picture: bytes, description: str) -> str:
    data = base64.b64encode(picture).decode()
    return f'<p><img alt="{html.escape(description)}" src="data:image/png;base64,{data}"></p>\n'


def _table(head: Sequence[str], rows: Sequence[Sequence[str]], mark: bool = False) -> str:
    lines = ["<table><tr>", *(f"<th>{html.escape(text)}</th>" for text in head), "</tr>\n"]
    for row in rows:
        lines.append('<tr class="differs">' if mark else "<tr>")
        lines += [f"<td{_kind(text)}>{_cell(text)}</td>" for text in row]
        lines.append("</tr>\n")
    return "".join([*lines, "</table>\n"])


def _from_markdown(table: str) -> str:
    """A table of `tables.markdown` as HTML; bold and underlined cells stay so."""
    head, _, *rows = [
        [cell.strip().replace("\\|", "|") for cell in re.split(r"(?<!\\)\|", line)[1:-1]] for line in table.splitlines()
    ]
    return _table(head, rows)


def _cell(text: str) -> str:
    if text.startswith("**") and text.endswith("**"):
        return f"<b>{html.escape(text[2:-2])}</b>"
    if text.startswith("<u>") and text.endswith("</u>"):
        return f"<u>{html.escape(text[3:-4])}</u>"
    return html.escape(text)


def _kind(text: str) -> str:
    return (
        ' class="number"' if re.fullmatch(r"(\*\*|<u>)?[-+−]?[\d,.]+ ?[%BKMT]?( ± [\d.]+)?(\*\*|</u>)?", text) else ""
    )


def _free_name(name: str, taken: Mapping[str, Any]) -> str:
    number, free = 1, name
    while free in taken:
        number += 1
        free = f"{name} ({number})"
    return free


def _count(value: float | None) -> str:
    return "–" if value is None else format_tokens(float(f"{value:.4g}"))


def _number(value: float | None, digits: int = 4) -> str:
    return "–" if value is None else f"{value:,.{digits}f}"


def _percent(value: float | None) -> str:
    return "–" if value is None else f"{100 * value:.1f} %"
