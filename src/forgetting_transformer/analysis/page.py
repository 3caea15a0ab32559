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
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from forgetting_transformer.analysis import tables
from forgetting_transformer.analysis.conditions import conditions, shown_names
from forgetting_transformer.analysis.plots.losses import loss_against_position, loss_against_tokens, loss_differences
from forgetting_transformer.analysis.plots.style import format_tokens
from forgetting_transformer.analysis.plots.training import has_metrics, norms, training_metrics
from forgetting_transformer.analysis.runs import Run, flatten, read_logged_run, read_position_loss, read_run
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
# A table wider than the page would scroll or be cut, so words break, and on a narrow screen every row is a block of its own
# whose cells say what they are.
_STYLE = """
* { box-sizing: border-box; }
body { font: 15px/1.5 system-ui, sans-serif; color: #222; max-width: 76rem; margin: 2rem auto; padding: 0 1rem; }
h1, h2, p, summary { overflow-wrap: anywhere; }
h1 { font-size: 1.6rem; } h2 { font-size: 1.2rem; margin-top: 2.2rem; border-bottom: 1px solid #ccc; }
table { border-collapse: collapse; font-size: 0.9rem; max-width: 100%; margin: 0.8rem 0; }
th, td { padding: 0.25rem 0.6rem; border-bottom: 1px solid #e4e4e4; text-align: left; vertical-align: top;
  overflow-wrap: anywhere; }
td.number { text-align: right; font-variant-numeric: tabular-nums; }
td.text { white-space: pre-wrap; font-family: ui-monospace, monospace; font-size: 0.85em; }
tr.differs td { background: #fff3cd; }
img { max-width: 100%; height: auto; } code { font-size: 0.95em; } .note { color: #666; font-size: 0.9rem; }
@media (max-width: 700px) {
  table, tbody, tr, td { display: block; width: 100%; }
  tr { border: 1px solid #ddd; margin-bottom: 0.6rem; } tr.head { display: none; }
  td { display: grid; grid-template-columns: 42% 1fr; gap: 0.6rem; } td.number { text-align: left; }
  td::before { content: attr(data-head); color: #666; font-family: system-ui, sans-serif; overflow-wrap: anywhere; }
  td:first-child { display: block; font-weight: 600; background: #f6f6f6; } td:first-child::before { content: none; }
  td.text { display: block; } td.text::before { display: block; }
}
"""
#: Columns beyond which a table with fewer rows than columns is turned, so that it is long and not wide.
_COLUMNS = 7
#: Pixels of the page for each pixel of a picture.
_PICTURE_SCALE = 0.6
#: Answers shown of one model and evaluation.
_ANSWERS = 6


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
        names = shown_names(run_dirs) if run_dirs else []
        runs = dict(zip(names, run_dirs, strict=True))
        sections = [
            ("Runs", _overview(runs)),
            *_training(runs, left_out),
            ("Loss at every position, in training", _position_curves(runs, left_out)),
            # The same names as above, which have the same colours.
            *_evaluations(results, left_out, {folder.resolve().name: name for name, folder in runs.items()}),
            ("Configurations", _configurations(runs)),
        ]
    except (ValueError, OSError, yaml.YAMLError) as error:
        raise EvaluationError(str(error)) from error
    body = "\n".join(f"<h2>{html.escape(title)}</h2>\n{content}" for title, content in sections if content)
    title = "Report: " + (", ".join(names) or ", ".join(map(str, results)))
    page = (
        f'<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8"><title>{html.escape(title)}</title>'
        f'<meta name="viewport" content="width=device-width, initial-scale=1">'
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


def _training(runs: Mapping[str, Path], left_out: list[str]) -> list[tuple[str, str]]:
    """The sections of what runs log while they train."""
    logged = _collect(runs, read_logged_run, left_out)
    made_with = conditions(logged)
    entropies = {run.unigram_entropy for run in logged}
    entropy = entropies.pop() if len(entropies) == 1 else None
    sections = []
    if any(map(_has_loss, logged)):
        picture = _picture(lambda path: loss_against_tokens(logged, path, entropy, made_with), "loss against tokens")
        sections.append(("Loss against training tokens", picture))
    if any(map(has_metrics, logged)):
        picture = _picture(lambda path: training_metrics(logged, path, made_with), "learning rate, norms, speed, time")
        sections.append(("Learning rate, gradient norm, throughput and wall time", picture))
    blocks = [run for run in logged if run.weight_norms]
    if blocks:
        pictures = {run.name: _picture(_norms_of(run), f"norms of {run.name}, block by block") for run in blocks}
        folded = [f"<details><summary>{html.escape(name)}</summary>{one}</details>\n" for name, one in pictures.items()]
        sections.append(("Norms of weights and gradients", "".join(folded if len(blocks) > 1 else pictures.values())))
    return sections


def _norms_of(run: Run) -> Callable[[Path], None]:
    return lambda path: norms(run, path, conditions([run]))


def _has_loss(history: Run) -> bool:
    return bool(np.isfinite(history.train_loss).any() or np.isfinite(history.heldout_loss).any())


def _position_curves(runs: Mapping[str, Path], left_out: list[str]) -> str:
    found = _collect(runs, read_position_loss, left_out)
    if not found:
        return ""
    curves, lengths = {}, {}
    for curve in found:
        source = "held-out" if curve.source == "val" else "training batches"
        name = f"{curve.name} ({source}, after {format_tokens(float(f'{curve.train_tokens:.3g}'))} tokens)"
        config = read_run(runs[curve.name]).config
        curves[name], lengths[name] = curve.loss, config.get("datamodule", {}).get("train_batch_len")
    made_with = conditions([read_run(folder) for folder in runs.values()])
    return _picture(
        lambda path: loss_against_position(curves, path, lengths, conditions=made_with), "loss at every position"
    )


def _evaluations(folders: Sequence[Path], left_out: list[str], names: Mapping[str, str]) -> list[tuple[str, str]]:
    """A section per kind of evaluation found in the folders; `names` are those of the page for models called otherwise."""
    losses, harness_rows, longbench_rows, needles, gates = [], {}, {}, [], []
    longbench_folders: dict[str, Path] = {}
    for file in sorted(file for folder in folders for file in folder.rglob("*") if file.is_file()):
        if file.name == "results.npz":
            loss = per_token_loss.read_result(file)
            losses.append(dataclasses.replace(loss, name=names.get(loss.name, loss.name)))
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
                name = _free_name(names.get(file.parent.name, file.parent.name), kind)
                kind[name] = content
                longbench_folders |= {name: file.parent} if kind is longbench_rows else {}
    sections = []
    if losses:
        losses = _one_length_a_name(losses)
        curves = per_token_loss.group_seeds(losses)
        lengths = {loss.name: loss.summary.get("train_length") for loss in losses}
        picture = _picture(lambda path: loss_against_position(curves, path, lengths), "loss at every position")
        table = per_token_loss.slope_table(per_token_loss.unique_names(losses))
        compared = per_token_loss.compare(losses)
        if compared:
            picture += _picture(
                lambda path: loss_differences(compared, path, train_length=lengths), "differences in loss by position"
            )
            picture += _from_markdown(per_token_loss.comparison_table(compared))
        sections.append(("Loss at every position, evaluated", picture + _from_markdown(table)))
    if needles:
        sections.append(("Needle in a haystack", "".join(_needle(folder, names) for folder in needles)))
    if gates:
        sections.append(("Forget gates", "".join(_gates(file) for file in gates)))
    if harness_rows:
        sections.append(
            ("lm-evaluation-harness", _scores(*harness_tables.table(harness_rows), "lm-evaluation-harness"))
        )
    if longbench_rows:
        errors = {name: _errors(folder) for name, folder in longbench_folders.items()}
        scores = _scores(*longbench.table(longbench_rows, errors), "LongBench")
        answers = "".join(_longbench_answers(name, folder) for name, folder in longbench_folders.items())
        sections.append(("LongBench", scores + answers))
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


def _errors(folder: Path) -> dict[str, float | None]:
    """Standard errors of LongBench's scores; {} for results of earlier versions."""
    file = folder / longbench.ERRORS
    return read_json(file) if file.is_file() else {}


def _scores(rows: Mapping[str, Mapping[str, float]], columns: Sequence[tables.Column], title: str) -> str:
    table = _from_markdown(tables.markdown(rows, columns))
    if not tables.has_numbers(rows, columns):
        return table
    return _picture(lambda path: tables.draw_scores(rows, columns, path, title), f"{title}, task by task") + table


def _needle(folder: Path, names: Mapping[str, str]) -> str:
    score = "judge" if (folder / "judge.json").is_file() else "words"
    results = read_json(folder / ("judge.json" if score == "judge" else "scores.json"))
    results["model"] = names.get(results["model"], results["model"])
    picture = _picture(lambda path: niah.draw_grid(results, score, path), f"needle in a haystack, {results['model']}")
    answers = [
        [f"{one['length']:,} tokens, depth {one['depth']:.0%}", f"{one.get(score) or 0:.2f}", one["prediction"]]
        for one in _spread(results["records"])
    ]
    return picture + _answers(results["model"], ["Prompt", f"Score ({score})", "Answer"], answers)


def _longbench_answers(model: str, folder: Path) -> str:
    """The first answer of each set."""
    firsts = [(file.name.split(".")[0], _lines(file)[:1]) for file in sorted((folder / "pred").glob("*.0.jsonl"))]
    found = [(name, json.loads(line)) for name, lines in firsts for line in lines if name in longbench.SETS]
    rows = [[longbench.SETS[name].title, " / ".join(one["answers"]), one["pred"]] for name, one in _spread(found)]
    return _answers(model, ["Set", "Reference", "Answer"], rows)


def _spread(items: Sequence[Any]) -> list[Any]:
    """A few of them, evenly spaced."""
    return [items[i] for i in np.unique(np.linspace(0, len(items) - 1, _ANSWERS).round().astype(int))] if items else []


def _answers(model: str, head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Texts that a model wrote, folded away; the last column is the text."""
    if not rows:
        return ""
    table = _table(head, rows, texts={len(head) - 1})
    return f"<details><summary>What {html.escape(model)} answered</summary>{table}</details>\n"


def _lines(file: Path) -> list[str]:
    return file.read_text(encoding="utf-8").splitlines()


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
    return f'<p><img alt="{html.escape(description)}"{_width(picture)} src="data:image/png;base64,{data}"></p>\n'


def _width(picture: bytes) -> str:
    """So wide that texts in all pictures have one size; "" where the file is no PNG."""
    is_png = picture.startswith(b"\x89PNG\r\n\x1a\n")
    return f' width="{round(_PICTURE_SCALE * int.from_bytes(picture[16:20]))}"' if is_png else ""


def _table(head: Sequence[str], rows: Sequence[Sequence[str]], mark: bool = False, texts: Collection[int] = ()) -> str:
    """Rows as HTML; a table that would be wide is turned.

    Args:
        mark: every row is one of differences.
        texts: columns whose line breaks and spaces are kept.
    """
    if len(head) > max(_COLUMNS, len(rows) + 1):
        head, *rows = zip(head, *rows, strict=True)
    lines = ['<table><tr class="head">', *(f"<th>{_cell(text)}</th>" for text in head), "</tr>\n"]
    for row in rows:
        lines.append('<tr class="differs">' if mark else "<tr>")
        for number, (name, text) in enumerate(zip(head, row, strict=True)):
            kind = ' class="text"' if number in texts else _kind(text)
            lines.append(f'<td{kind} data-head="{html.escape(name)}">{_cell(text)}</td>')
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
