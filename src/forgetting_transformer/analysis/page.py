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
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from forgetting_transformer.analysis import AnalysisError, needles, position_loss, tables
from forgetting_transformer.analysis.conditions import conditions, position_label, shown_names
from forgetting_transformer.analysis.evaluations import Evaluation, read_evaluations
from forgetting_transformer.analysis.plots.evaluations import has_scores, scores_over_training
from forgetting_transformer.analysis.plots.losses import (
    loss_against_position,
    loss_against_tokens,
    loss_differences,
    loss_on_sets,
)
from forgetting_transformer.analysis.plots.style import format_tokens
from forgetting_transformer.analysis.plots.training import has_metrics, norms, training_metrics
from forgetting_transformer.analysis.published import lm_eval_table, longbench_by_length, longbench_table, sample_counts
from forgetting_transformer.analysis.runs import (
    EMA_WEIGHTS,
    Run,
    read_logged_run,
    read_own_position_losses,
    read_position_loss,
    read_run,
)
from forgetting_transformer.analysis.scores_in_training import labels, read_samples, read_scores
from forgetting_transformer.files import write_atomically
from forgetting_transformer.nested import flatten

# What run_forget_gates.py writes beside heads.json.
_GATE_PICTURES = {
    "memory.png": "memory length of every head",
    "gates.png": "forget-gate matrices",
    "attention.png": "attention maps",
}
# A table wider than the page would scroll or be cut. So long words break, and on a narrow screen every row is a block
# whose cells say what they are.
_STYLE = """
* { box-sizing: border-box; }
body { font: 15px/1.5 system-ui, sans-serif; color: #222; max-width: 76rem; margin: 2rem auto; padding: 0 1rem; }
h1, h2, p, summary { overflow-wrap: anywhere; }
h1 { font-size: 1.6rem; } h2 { font-size: 1.2rem; margin-top: 2.2rem; border-bottom: 1px solid #ccc; }
table { border-collapse: collapse; font-size: 0.9rem; max-width: 100%; margin: 0.8rem 0; }
th, td { padding: 0.25rem 0.6rem; border-bottom: 1px solid #e4e4e4; text-align: left; vertical-align: top; }
.long { overflow-wrap: anywhere; min-width: 8rem; }
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
#: Evaluations of a run whose samples are shown, the newest.
_SAMPLED = 4
#: Answers shown of one model and evaluation.
_ANSWERS = 6
#: Characters of a word that is not broken within; longer ones may be anywhere.
_UNBROKEN = 16
#: Perplexities above are shown by their power of ten.
_HUGE = 1e6


def write_report(run_dirs: Sequence[Path], results: Sequence[Path], out: Path) -> list[str]:
    """Writes the page and returns what was left out, and why.

    Args:
        run_dirs: output_dirs of runs.
        results: folders with results of evaluations, at any depth: per_token_loss, niah, forget_gates,
            lm_eval_harness, longbench.
        out: the HTML file.

    Raises:
        AnalysisError: nothing to report, a folder that is not a run's, a damaged file, or a
            page that cannot be written.
    """
    for folder in run_dirs:
        if not (folder / "config.yaml").is_file():
            raise AnalysisError(f"{folder} is not a run's output_dir: it holds no config.yaml")
    for folder in results:
        if not folder.is_dir():
            raise AnalysisError(f"--results {folder}: no such folder")
    if not run_dirs and not results:
        raise AnalysisError("nothing to report: give the output_dir of a run, or --results FOLDER")
    left_out: list[str] = []
    try:
        names = shown_names(run_dirs) if run_dirs else []
        runs = dict(zip(names, run_dirs, strict=True))
        sections = [
            ("Runs", _overview(runs)),
            *_training(runs, left_out),
            ("Loss at every position, in training", _position_curves(runs, left_out)),
            *_position_curves_of_sets(runs, left_out),
            # The same names as above, which have the same colours.
            *_evaluations(results, left_out, {folder.resolve().name: name for name, folder in runs.items()}),
            ("Configurations", _configurations(runs)),
        ]
    except (ValueError, OSError) as error:
        raise AnalysisError(str(error)) from error
    if not any(content for _, content in sections):
        raise AnalysisError("nothing to report: " + "; ".join(left_out))
    body = "\n".join(f"<h2>{html.escape(title)}</h2>\n{content}" for title, content in sections if content)
    title = "Report: " + (", ".join(names) or ", ".join(map(str, results)))
    page = (
        f'<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8"><title>{html.escape(title)}</title>'
        f'<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<style>{_STYLE}</style></head>\n<body><h1>{html.escape(title)}</h1>\n{body}\n</body></html>\n"
    )
    try:
        if out.exists() and not _is_report(out):
            raise AnalysisError(f"{out} exists and is not a page of this script; name another --out, or move it away")
        out.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(out, page, durable=False)
    except OSError as error:
        raise AnalysisError(f"cannot write {out} ({error.strerror or error}); name another --out") from error
    return left_out


def _is_report(path: Path) -> bool:
    """Whether the file begins as `write_report` begins a page."""
    with path.open("rb") as stream:
        return b"<title>Report: " in stream.read(300)


def differing(configs: Sequence[Mapping[str, Any]]) -> list[str]:
    """Keys that are not in every configuration with the same value, in the order of their first occurrence."""
    keys = dict.fromkeys(key for config in configs for key in config)
    return [key for key in keys if any(key not in config or config[key] != configs[0].get(key) for config in configs)]


def _overview(runs: Mapping[str, Path]) -> str:
    if not runs:
        return ""
    rows = []
    read = {name: read_run(folder) for name, folder in runs.items()}
    sets = list(dict.fromkeys(eval_set for run in read.values() for eval_set in run.eval_sets))
    averages = any(run.ema.tokens.size for run in read.values())
    for name, run in read.items():
        config, starts, info = run.config, run.starts, run.info("model")
        model = config.get("model", {})
        train, heldout, speed = (run.last(kind) for kind in ("train", "val", "throughput"))
        goodput = run.last("goodput")
        loss, ema = heldout.get("val/loss"), run.ema.values
        rows.append(
            [
                name,
                model.get("label") or model.get("name", "–"),
                _count(info.get("total_params")),
                _count(info.get("non_embedding_params")),
                _count(train.get("step")),
                _number(train.get("train/loss")),
                _number(loss),
                _perplexity(loss),
                *([_number(float(ema[-1]) if ema.size else None)] if averages else []),
                *(_number(run.last(f"val_{one}").get(f"val_{one}/loss")) for one in sets),
                _number(speed.get("throughput/token_count_per_second_total_cum"), 0),
                _percent(speed.get("throughput/mfu_total_cum")),
                _gigabytes(speed.get("throughput/peak_memory_bytes")),
                _hours(goodput.get("goodput/hours")),
                _percent(goodput.get("goodput/steps")),
                (starts[-1].get("git", {}).get("commit") or "–")[:10] if starts else "–",
                run.device or "–",
            ]
        )
    head = [
        "Run",
        "Model",
        "Parameters",
        "without input embedding",
        "Tokens",
        "Training loss, last logged",
        "Held-out loss",
    ]
    head += ["Held-out perplexity", *([f"Held-out loss, {EMA_WEIGHTS}"] if averages else [])]
    head += [*(f"Held-out loss, {one}" for one in sets), "Tokens/s", "MFU", "Peak memory"]
    head += ["Wall time", "of it in steps", "Commit", "Device"]
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
    if any(run.eval_sets for run in logged):
        picture = _picture(lambda path: loss_on_sets(logged, path, made_with), "loss on each held-out set")
        sections.append(("Loss on every held-out set", picture))
    if any(map(has_metrics, logged)):
        picture = _picture(lambda path: training_metrics(logged, path, made_with), "learning rate, norms, speed, time")
        sections.append(("Learning rate, gradient norm, throughput and wall time", picture))
    blocks = [run for run in logged if run.weight_norms]
    if blocks:
        pictures = {run.name: _picture(_norms_of(run), f"norms of {run.name}, block by block") for run in blocks}
        folded = [f"<details><summary>{html.escape(name)}</summary>{one}</details>\n" for name, one in pictures.items()]
        sections.append(("Norms of weights and gradients", "".join(folded if len(blocks) > 1 else pictures.values())))
    if scored := [run for run in logged if has_scores(run)]:
        picture = _picture(
            lambda path: scores_over_training(scored, path, conditions(scored)), "scores of evaluations over training"
        )
        sections.append(("Evaluations during training", picture + _newest_scores(scored)))
    sections.append(("Samples", "".join(map(_samples, logged))))
    return sections


def _newest_scores(runs: Sequence[Run]) -> str:
    """The last value of every score, with its standard error."""
    rows = []
    scores = [(run, score) for run in runs for score in read_scores(run)]
    names = labels([score for _, score in scores])
    for (run, score), name in zip(scores, names, strict=True):
        tokens, value, error = score.series.tokens[-1], score.series.values[-1], score.errors[-1]
        digits = 1 if score.unit.endswith("(%)") else 3
        shown = _number(value, digits) + (f" ± {error:.{digits}f}" if math.isfinite(error) else "")
        baseline = _number(score.baseline.values[-1], digits) if score.baseline.values.size else "–"
        unit = score.unit.replace("\n", " ")
        rows.append([run.name, name, unit, shown, baseline, _count(tokens)])
    head = ["Run", "Task", "Score", "Newest ± standard error", "Chance, or with no needle", "After tokens"]
    return _table(head, rows)


def _samples(run: Run) -> str:
    """What a run wrote at its newest samples, and before, folded away."""
    found = read_samples(run)
    parts = []
    for number, (tokens, rows) in enumerate(reversed(found)):
        columns = {"prompt": "Prompt", "text": "Continuation", "document": "The document itself"}
        columns = {key: head for key, head in columns.items() if any(key in row for row in rows)}
        cells = [[row.get(key, "") for key in columns] for row in rows]
        table = _table(list(columns.values()), cells, texts=set(range(len(columns))))
        said = f"{html.escape(run.name)}, after {_count(tokens)} tokens"
        parts.append(f"<details{' open' if number == 0 else ''}><summary>{said}</summary>{table}</details>\n")
        if number + 1 == _SAMPLED:
            break
    return "".join(parts)


def _norms_of(run: Run) -> Callable[[Path], None]:
    return lambda path: norms(run, path, conditions([run]))


def _has_loss(history: Run) -> bool:
    return bool(np.isfinite(history.train_loss).any() or np.isfinite(history.heldout_loss).any())


def _position_curves_of_sets(runs: Mapping[str, Path], left_out: list[str]) -> list[tuple[str, str]]:
    having: dict[str, dict[str, Path]] = {}
    for name, folder in runs.items():
        for eval_set in read_run(folder).eval_sets:
            having.setdefault(eval_set, {})[name] = folder
    return [
        (f"Loss at every position, in training, on {eval_set}", _position_curves(members, left_out, eval_set))
        for eval_set, members in having.items()
    ]


def _position_curves(runs: Mapping[str, Path], left_out: list[str], eval_set: str = "") -> str:
    if eval_set:
        found = _collect(runs, partial(read_position_loss, eval_set=eval_set), left_out)
    else:
        found = [curve for curves in _collect(runs, read_own_position_losses, left_out) for curve in curves]
    if not found:
        return ""
    curves, lengths = {}, {}
    for curve in found:
        name = position_label(curve)
        config = read_run(runs[curve.name]).config
        curves[name], lengths[name] = curve.loss, config.get("datamodule", {}).get("train_batch_len")
    read = [read_run(folder) for folder in runs.values()]
    made_with = conditions([run.on(eval_set) for run in read] if eval_set else read)
    return _picture(
        lambda path: loss_against_position(curves, path, lengths, conditions=made_with, of="runs"),
        "loss at every position",
    )


def _evaluations(folders: Sequence[Path], left_out: list[str], names: Mapping[str, str]) -> list[tuple[str, str]]:
    """A section per kind of evaluation in the folders; `names` are the page's for models called otherwise."""
    found, unknown = read_evaluations(folders)
    left_out += unknown
    for folder in folders:
        inside = [one.folder for one in found if one.folder.is_relative_to(folder)]
        if not inside and not any(str(folder) in reason for reason in unknown):
            left_out.append(f"{folder} holds no results of evaluations")
    of_kind: dict[str, list[Evaluation]] = {}
    for one in found:
        named = dataclasses.replace(one, model=names.get(one.model, one.model))
        kind = f"{one.kind}, by length" if any("words" in number.at for number in one.numbers) else one.kind
        of_kind.setdefault(kind, []).append(named)
    sections = {
        "Loss at every position, evaluated": _position_losses(of_kind.get("per_token_loss", []), names, left_out),
        "Needle in a haystack": "".join(map(_needle, of_kind.get("niah", []))),
        "Forget gates": "".join(map(_gates, of_kind.get("forget_gates", []))),
        "lm-evaluation-harness": _scores(of_kind.get("lm_eval_harness", []), lm_eval_table, "lm-evaluation-harness"),
        "LongBench": _scores(of_kind.get("longbench", []), longbench_table, "LongBench"),
        "LongBench-E": "".join(map(_longbench_e, of_kind.get("longbench, by length", []))),
    }
    return list(sections.items())


def _position_losses(evaluations: Sequence[Evaluation], names: Mapping[str, str], left_out: list[str]) -> str:
    if not evaluations:
        return ""
    losses = [position_loss.read_result(one.folder / "results.npz") for one in evaluations]
    losses = [dataclasses.replace(one, name=names.get(one.name, one.name)) for one in losses]
    losses, repeats = position_loss.without_repeats(losses)
    left_out += repeats
    losses = position_loss.told_apart(_one_length_a_name(losses))
    curves = position_loss.group_seeds(losses)
    lengths = {loss.name: loss.summary.get("train_length") for loss in losses}
    conditions = position_loss.made_with([loss.summary for loss in losses])
    content = _picture(
        lambda path: loss_against_position(curves, path, lengths, conditions=conditions), "loss at every position"
    )
    compared = position_loss.compare(losses)
    if compared:
        content += _picture(
            lambda path: loss_differences(compared, path, conditions, lengths), "differences in loss by position"
        )
        content += _html(position_loss.comparison_table(compared))
    return content + _html(position_loss.slope_table(position_loss.unique_names(losses)))


def _one_length_a_name(losses: Sequence[position_loss.Result]) -> list[position_loss.Result]:
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


def _scores(evaluations: Sequence[Evaluation], table: Callable, title: str) -> str:
    """The table of all models, its picture, and some of what they answered."""
    models: dict[str, list[Evaluation]] = {}
    for one in evaluations:
        models[_free_name(one.model, models)] = [one]
    if not models:
        return ""
    rows, columns = table(models)
    return _table_of_scores(rows, columns, title, made_with=sample_counts(models)) + "".join(map(_answers, evaluations))


def _table_of_scores(
    rows: tables.Rows,
    columns: Sequence[tables.Column],
    title: str,
    first: str = "Model",
    made_with: Sequence[str] = (),
) -> str:
    table = _html(tables.score_table(rows, columns, first))
    if not tables.has_numbers(rows, columns):
        return table
    return (
        _picture(lambda path: tables.draw_scores(rows, columns, path, title, made_with), f"{title}, task by task")
        + table
    )


def _longbench_e(evaluation: Evaluation) -> str:
    title = f"LongBench-E, {evaluation.model}"
    heading = f"<h3>{html.escape(evaluation.model)}</h3>\n"
    rows, columns = longbench_by_length(evaluation)
    return heading + _table_of_scores(rows, columns, title, "Words") + _answers(evaluation)


def _needle(evaluation: Evaluation) -> str:
    score = needles.best_score(evaluation)
    draw = partial(needles.draw, evaluation, score)
    return _picture(draw, f"needle in a haystack, {evaluation.model}") + _answers(evaluation)


def _answers(evaluation: Evaluation) -> str:
    """Some of the texts that a model wrote, folded away."""
    texts = evaluation.texts
    if not texts:
        return ""
    shown = [texts[i] for i in np.unique(np.linspace(0, len(texts) - 1, _ANSWERS).round().astype(int))]
    rows = [[one["task"], one.get("wanted") or "–", _number(one.get("score"), 2), one["text"]] for one in shown]
    table = _table(["Task", "Reference", "Score", "Answer"], rows, texts={3})
    return f"<details><summary>What {html.escape(evaluation.model)} answered</summary>{table}</details>\n"


def _gates(evaluation: Evaluation) -> str:
    memory = {(n.at["layer"], n.at["head"]): n for n in evaluation.numbers if n.task == "memory"}

    def pruned(**at: int) -> str:
        found = evaluation.find("pruning", "pruned", **at)
        return _percent(found.value if found else None)

    rows = [
        [
            str(layer),
            str(head),
            f"{'≥ ' * number.at.get('at_least', False)}{number.value:,.0f}",
            pruned(layer=layer, head=head),
        ]
        for (layer, head), number in memory.items()
    ]
    said = (
        f"{evaluation.model}, a text of {evaluation.settings['tokens']:,} tokens: pruning skips "
        f"{pruned()} of the tiles."
    )
    pictures = [
        _embedded(picture.read_bytes(), description)
        for name, description in _GATE_PICTURES.items()
        if (picture := evaluation.folder / name).is_file()
    ]
    table = _table(["Layer", "Head", "Memory length (tokens)", "Tiles pruned"], rows)
    return f"<p>{html.escape(said)}</p>\n{''.join(pictures)}{table}"


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
    kinds = ["text" if i in texts else _kind([row[i] for row in rows]) for i in range(len(head))]
    lines = ['<table><tr class="head">', *(f"<th{_classes(text)}>{_cell(text)}</th>" for text in head), "</tr>\n"]
    for row in rows:
        lines.append('<tr class="differs">' if mark else "<tr>")
        for kind, name, text in zip(kinds, head, row, strict=True):
            shown = html.escape(text) if kind == "text" else _cell(text)
            lines.append(f'<td{_classes(text, kind)} data-head="{html.escape(name)}">{shown}</td>')
        lines.append("</tr>\n")
    return "".join([*lines, "</table>\n"])


def _html(table: tables.Table) -> str:
    return _table(table.header, table.rows)


def _cell(text: str) -> str:
    if text.startswith("**") and text.endswith("**"):
        return f"<b>{_breakable(text[2:-2])}</b>"
    if text.startswith("<u>") and text.endswith("</u>"):
        return f"<u>{_breakable(text[3:-4])}</u>"
    return _breakable(text)


def _words(text: str) -> list[str]:
    """The pieces between which a line may end: a name of a key or a path has no spaces."""
    return re.findall(r".+?(?:[/_.,=:-](?=[^\d])|\Z)", text, re.DOTALL)


def _breakable(text: str) -> str:
    return "<wbr>".join(map(html.escape, _words(text)))


def _classes(text: str, kind: str = "") -> str:
    is_long = any(len(part) > _UNBROKEN for word in _words(text) for part in word.split())
    found = [name for name in (kind, "long" if is_long else "") if name]
    return f' class="{" ".join(found)}"' if found else ""


def _kind(column: Sequence[str]) -> str:
    """ "number" for a column of nothing else."""
    pattern = r"(\*\*|<u>)?[-+−]?[\d,.]+(e[+-]\d+)?( ?[%BKMT]| GB| h)?( ± [\d.]+)?(\*\*|</u>)?"
    given = [text for text in column if text not in ("", "–")]
    return "number" if given and all(re.fullmatch(pattern, text) for text in given) else ""


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


def _perplexity(loss: float | None) -> str:
    value = None if loss is None else math.exp(min(loss, 700.0))
    return _number(value, 2) if value is None or value < _HUGE else f"{value:.1e}"


def _gigabytes(size: float | None) -> str:
    return "–" if size is None else f"{size / 1e9:.3g} GB"


def _hours(hours: float | None) -> str:
    return "–" if hours is None else f"{hours:,.3g} h" if hours >= 0.1 else f"{60 * hours:.2g} min"


def _percent(value: float | None) -> str:
    return "–" if value is None else f"{100 * value:.1f} %"
