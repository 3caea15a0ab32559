"""One HTML page about runs: curves, tables, and configurations side by side. It needs no other file and no network.

Everything comes from what runs and evaluations left on disk; what a run does not have yet is left out. All texts are
escaped: a run's name or configuration cannot put anything on the page but text.
"""

import base64
import html
import json
import math
import re
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from forgetting_transformer import metric_names as names
from forgetting_transformer.analysis import AnalysisError, outputs, run_figures
from forgetting_transformer.analysis.evaluations import Evaluation, number_table, read_evaluations
from forgetting_transformer.analysis.plots.style import DOTS_PER_INCH
from forgetting_transformer.analysis.published import lm_eval_table, longbench_table
from forgetting_transformer.analysis.runs import Run
from forgetting_transformer.analysis.tables import Table, format_tokens, has_numbers, plain_number, score_table
from forgetting_transformer.files import flatten

#: Kinds of evaluations, in the order of the page, and the tables of those that have one.
_TITLES = {
    "per_token_loss": "Loss at every position, evaluated",
    "niah": "Needle in a haystack",
    "forget_gates": "Forget gates",
    "lm_eval_harness": "lm-evaluation-harness",
    "longbench": "LongBench",
}
_TABLES: dict[str, Callable] = {"lm_eval_harness": lm_eval_table, "longbench": longbench_table}
_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; color: #222; max-width: 76rem; margin: 2rem auto; padding: 0 1rem; }
h1 { font-size: 1.6rem; } h2 { font-size: 1.2rem; margin-top: 2.2rem; border-bottom: 1px solid #ccc; }
h1, h2, p, summary, td { overflow-wrap: anywhere; }
.table { overflow-x: auto; } table { border-collapse: collapse; font-size: 0.9rem; margin: 0.8rem 0; }
th, td { padding: 0.25rem 0.6rem; border-bottom: 1px solid #e4e4e4; text-align: left; vertical-align: top; }
td.number { text-align: right; font-variant-numeric: tabular-nums; white-space: nowrap; }
tr.differs td { background: #fff3cd; }
img { max-width: 100%; height: auto; } .note { color: #666; font-size: 0.9rem; }
"""
#: Width of a picture on the page by inches of the figure; so all texts have one size.
_PIXELS_PER_INCH = 120


def write_report(run_dirs: Sequence[Path], results: Sequence[Path], out: Path) -> None:
    """Writes report.html.

    Args:
        run_dirs: output_dirs of runs.
        results: folders with results of evaluations, at any depth.
        out: the folder of the page.

    Raises:
        AnalysisError: nothing to report, a folder that is not a run's or without results, a damaged file, or a page
            that cannot be written.
    """
    for folder in results:
        if not read_evaluations([folder]):
            raise AnalysisError(f"--results {folder}: there are no results of evaluations in it")
    if not run_dirs and not results:
        raise AnalysisError("nothing to report: give the output_dir of a run, or --results FOLDER")
    runs = run_figures.read_runs(run_dirs) if run_dirs else []
    with tempfile.TemporaryDirectory() as temporary:
        drawn = run_figures.draw_runs(runs, Path(temporary))
        figures = {title: _embedded(file, title) for title, file in drawn.items()}
    sections = {
        "Runs": _overview(runs),
        **figures,
        **_evaluations(results),
        "Configurations": _configurations(runs),
    }
    body = "\n".join(f"<h2>{html.escape(title)}</h2>\n{content}" for title, content in sections.items() if content)
    title = html.escape("Report: " + (", ".join(run.name for run in runs) or ", ".join(map(str, results))))
    page = (
        f'<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8"><title>{title}</title>'
        f'<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<style>{_STYLE}</style></head>\n<body><h1>{title}</h1>\n{body}\n</body></html>\n"
    )
    with outputs.writing(out, "scripts/report.py") as new:
        (new / "report.html").write_text(page, encoding="utf-8", errors="backslashreplace")


def _overview(runs: Sequence[Run]) -> str:
    """A column for each run, and a row for each number that any run has."""
    columns = [_facts(run) for run in runs]
    rows = [[fact, *(column[fact] for column in columns)] for fact in (columns[0] if columns else ())]
    rows = [row for row in rows if any(cell != "–" for cell in row[1:])]
    return _table(Table(["", *(run.name for run in runs)], rows, "l" + "r" * len(runs)))


def _facts(run: Run) -> dict[str, str]:
    info, start = run.info("model"), run.starts[-1] if run.starts else {}
    train, heldout, speed, goodput = (
        run.last(kind) for kind in (names.TRAIN, names.VAL, names.THROUGHPUT, names.GOODPUT)
    )
    loss, memory = heldout.get(names.name_of(names.VAL, names.LOSS)), speed.get(names.PEAK_MEMORY)
    hours = goodput.get(names.name_of(names.GOODPUT, names.HOURS))
    return {
        "Model": run.setting("model", "label") or run.setting("model", "name") or "–",
        "Parameters": _count(info.get("total_params")),
        "without input embedding": _count(info.get("non_embedding_params")),
        "Tokens": _count(train.get("step")),
        "Training loss, last logged": _number(train.get(names.TRAIN_LOSS)),
        "Held-out loss": _number(loss),
        "Held-out perplexity": _number(None if loss is None else math.exp(min(loss, 700.0)), 2),
        "Tokens/s": _number(speed.get(names.per_second("token_count", "total", "cum")), 0),
        "MFU": _percent(speed.get(names.mfu("total", "cum"))),
        "Peak memory": "–" if memory is None else f"{memory / 1e9:.3g} GB",
        "Wall time": _wall_time(hours),
        "of it in steps": _percent(goodput.get(names.name_of(names.GOODPUT, "steps"))),
        "Commit": ((start.get("git") or {}).get("commit") or "–")[:10],
        "Device": run.device or "–",
    }


def _evaluations(folders: Sequence[Path]) -> dict[str, str]:
    """A section per kind of evaluation in the folders."""
    found = read_evaluations(folders)
    sections = {}
    for kind in dict.fromkeys((*_TITLES, *(one.kind for one in found))):
        models: dict[str, Evaluation] = {}
        for one in (one for one in found if one.kind == kind):
            again = sum(other.model == one.model for other in models.values())
            models[f"{one.model} ({again + 1})" if again else one.model] = one
        content = _scores(models, kind)
        for name, one in models.items():
            content += "".join(_embedded(file, f"{name}, {file.stem}") for file in sorted(one.folder.glob("*.png")))
            content += _folded(f"Numbers of {name}", _table(number_table(one)))
        sections[_TITLES.get(kind, kind)] = content
    return sections


def _scores(models: Mapping[str, Evaluation], kind: str) -> str:
    """The table of all models; of LongBench-E each model has numbers by length, and no row here."""
    of_models = {name: [one] for name, one in models.items() if not any(number.at for number in one.numbers)}
    rows, columns = _TABLES[kind](of_models) if of_models and kind in _TABLES else ({}, [])
    return _table(score_table(rows, columns)) if has_numbers(rows, columns) else ""


def _configurations(runs: Sequence[Run]) -> str:
    """The keys in which runs differ, and those on which all agree, folded away."""
    if not runs:
        return ""
    configs = [
        {key: json.dumps(value, default=str, ensure_ascii=False) for key, value in flatten(run.config).items()}
        for run in runs
    ]
    keys = dict.fromkeys(key for config in configs for key in config)
    rows = [[key, *(config.get(key, "– not there –") for config in configs)] for key in keys]
    different = [row for row in rows if len({*row[1:]}) > 1]
    same = sorted(row for row in rows if row not in different)
    header, alignment = ["Key", *(run.name for run in runs)], "l" * (len(runs) + 1)
    if len(runs) == 1:
        return _folded("All keys", _table(Table(header, same, alignment)))
    note = f"<p class='note'>{len(different)} keys differ, {len(same)} agree.</p>"
    agreed = _folded("Keys on which all agree", _table(Table(header, same, alignment)))
    return note + _table(Table(header, different, alignment), mark=True) + agreed


def _embedded(file: Path, description: str) -> str:
    """A PNG; one of the same resolution as all figures here has texts of the same size."""
    picture = file.read_bytes()
    width = round(int.from_bytes(picture[16:20]) * _PIXELS_PER_INCH / DOTS_PER_INCH)
    data = base64.b64encode(picture).decode()
    return f'<p><img alt="{html.escape(description)}" width="{width}" src="data:image/png;base64,{data}"></p>\n'


def _folded(summary: str, content: str) -> str:
    return f"<details><summary>{html.escape(summary)}</summary>{content}</details>\n"


def _table(table: Table, mark: bool = False) -> str:
    """A table as HTML; "" if it has no rows.

    Args:
        table: aligned "l", or "r" for numbers.
        mark: every row is one of differences.
    """
    if not table.rows:
        return ""
    kinds = [' class="number"' if kind == "r" else "" for kind in table.alignment]
    head = "".join(f"<th>{html.escape(text)}</th>" for text in table.header)
    begin = '<tr class="differs">' if mark else "<tr>"
    rows = (
        begin + "".join(f"<td{kind}>{_cell(text)}</td>" for kind, text in zip(kinds, row, strict=True)) + "</tr>\n"
        for row in table.rows
    )
    return f'<div class="table"><table><tr>{head}</tr>\n{"".join(rows)}</table></div>\n'


def _cell(text: str) -> str:
    """Escapes a cell; `**…**` is bold and `<u>…</u>` underlined, as in a table of scores."""
    for pattern, tag in ((r"\*\*(.*)\*\*", "b"), (r"<u>(.*)</u>", "u")):
        if found := re.fullmatch(pattern, text):
            return f"<{tag}>{html.escape(found[1])}</{tag}>"
    return html.escape(text)


def _wall_time(hours: float | None) -> str:
    if hours is None:
        return "–"
    return f"{plain_number(hours, 3)} h" if hours >= 0.1 else f"{60 * hours:.2g} min"


def _count(value: float | None) -> str:
    return "–" if value is None else format_tokens(value)


def _number(value: float | None, digits: int = 4) -> str:
    return "–" if value is None else f"{value:,.{digits}f}" if abs(value) < 1e6 else f"{value:.1e}"


def _percent(value: float | None) -> str:
    return "–" if value is None else f"{100 * value:.1f} %"
