#!/usr/bin/env python
"""Turns the folder of a study into a few small files, and into tables and figures in a page.

    python -m studies.report collect output/study --study study.yaml --out output/study/report
    python -m studies.report join one/report two/report --study study.yaml --out joined
    python -m studies.report figures output/study/report
    python -m studies.report tables output/study/report my_study.md

collect writes OUT/study.json (all numbers of the tables), OUT/study.yaml (the plan of the study), OUT/positions.npz
(loss at every position) and figures: per_token_loss.png, compare.png (training), search.png (learning rates),
memory.png (of the first model with forget gates), heads.png (while models with gates were trained), differences.png
(held-out losses against the baseline), needle.png (needle in a haystack). It also works on an unfinished study and
names what it skips.

join makes one report of several: other models, variants or seeds, on one corpus, whose runs are no longer there.

figures draws those again that study.json alone suffices for.

tables replaces the text between <!-- NAME --> and <!-- end of NAME --> in a page. NAME is source, models, search,
octaves, comparison, variants, needle, downstream, claims, claim_rules, models_noise, variants_noise, MODEL_apart, or
the name of a figure followed by _figure. (studies/pages.py fills the pages in studies/.)
"""

import argparse
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from forgetting_transformer import command_line

#: Position from which models are compared document by document.
COMPARED_FROM = 256
#: Held-out texts that the share of pruned tiles is a mean of.
TEXTS = 8
#: What collect writes.
COMMAND = "studies/report.py"
FILES = ("study.json", "positions.npz", "search.png", "octaves.png", "compare.png", "per_token_loss.png", "memory.png",
         "differences.png", "heads.png", "needle.png")  # fmt: skip


def parse_args(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    collect = commands.add_parser("collect", help="from the folder of a study to a few small files")
    command_line.add_plugins(collect)
    collect.add_argument("folder", type=command_line.path, help="FOLDER of studies/run.py")
    collect.add_argument("--study", type=command_line.path, required=True, metavar="YAML", help="of the study")
    collect.add_argument("--out", type=command_line.path, required=True, metavar="DIR")
    join = commands.add_parser("join", help="reports of parts of a study whose runs are gone, into one")
    join.add_argument("reports", type=command_line.path, nargs="+", metavar="REPORT", help="OUT of collect, or of join")
    join.add_argument("--study", type=command_line.path, required=True, metavar="YAML", help="of the joined study")
    join.add_argument("--out", type=command_line.path, required=True, metavar="DIR")
    figures = commands.add_parser("figures", help="again, those that the numbers alone suffice for")
    figures.add_argument("report", type=command_line.path, help="OUT of collect")
    tables = commands.add_parser("tables", help="and figures, into a page")
    tables.add_argument("report", type=command_line.path, help="OUT of collect")
    tables.add_argument("page", type=command_line.path)
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    args = parse_args(argv)
    from forgetting_transformer.analysis import AnalysisError, outputs
    from forgetting_transformer.data import DataError
    from forgetting_transformer.evaluation.models import EvaluationError
    from forgetting_transformer.files import write_atomically
    from studies.engine.figures import draw_figures
    from studies.engine.joining import join
    from studies.engine.marked_pages import fill_in
    from studies.engine.plan import read_plan
    from studies.engine.results import read_study
    from studies.engine.tables import sections

    try:
        if args.command == "collect":
            collect(args.folder, args.study, args.out)
        elif args.command == "join":
            study, positions = join(args.reports, read_plan(args.study))
            write(study, positions, args.study, args.out)
            show(study)
        elif args.command == "figures":
            with outputs.writing(args.report, COMMAND) as new:
                draw_figures(read_study(args.report), new)
        else:
            page = fill_in(args.page.read_text(encoding="utf-8"), sections(args.report, args.page))
            write_atomically(args.page, page, durable=False)
    except (AnalysisError, EvaluationError, DataError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


def collect(folder: Path, yaml: Path, out: Path) -> None:
    """Writes the report of a study.

    Raises:
        AnalysisError: the YAML is no study's, the folder has no runs, or OUT has files of somebody else.
    """
    from forgetting_transformer.analysis import comparisons, outputs
    from forgetting_transformer.analysis.conditions import conditions
    from forgetting_transformer.analysis.plots.sweeps import loss_against_tokens_and_flops
    from forgetting_transformer.data import DataError
    from forgetting_transformer.evaluation.models import EvaluationError
    from forgetting_transformer.files import write_json
    from forgetting_transformer.training.config.continuing import decisive
    from studies.engine import results
    from studies.engine.plan import read_plan
    from studies.engine.scores import read_downstream

    outputs.check(out, COMMAND, FILES)
    plan = read_plan(yaml)
    study = results.Study(plan, results.collect(folder, plan, decisive))
    positions = results.read_positions(study, folder / "position_loss")
    study.content.update(read_downstream(folder / "downstream", study))
    write(study, positions, yaml, out)
    runs = results.runs_in(folder, "runs", plan)
    models = [comparisons.named_model(study.name(model), paths) for model, paths in runs.items()]
    if models:
        with outputs.writing(out, COMMAND) as new:
            made_with = conditions([run for model in models for run in model.runs])
            loss_against_tokens_and_flops(models, new / "compare.png", conditions=made_with)
    # Last, because it runs models, which takes long: everything else is there by then.
    try:
        with outputs.writing(out, COMMAND) as new:
            of_models = {
                model: [folder / "runs" / run for run, of in study.evaluated_runs() if of == model] for model in runs
            }
            study.content.update(pruning(study, of_models, folder / "data" / "python_code", new / "memory.png"))
            write_json(new / "study.json", study.content)
    except (EvaluationError, DataError) as error:
        print(f"skipped: the share of tiles that is pruned: {error}", file=sys.stderr)
    show(study)


def write(study: Any, positions: dict[str, Any], yaml: Path, out: Path) -> None:
    """Adds what a study says of loss at every position, and writes its numbers and figures."""
    from forgetting_transformer.analysis import outputs, position_loss
    from forgetting_transformer.files import write_json
    from studies.engine import results
    from studies.engine.figures import draw_figures, draw_positions

    study.content["comparison"] = position_loss.compare([*positions.values()], COMPARED_FROM) if positions else []
    study.content["changes"] = results.position_changes(study, positions)
    with outputs.writing(out, COMMAND) as new:
        write_json(new / "study.json", study.content)
        results.save_positions(positions, new / "positions.npz")
        if yaml.resolve() != (out / "study.yaml").resolve():
            shutil.copyfile(yaml, new / "study.yaml")
        draw_figures(study, new)
        draw_positions(study, [*positions.values()], new)


def show(study: Any) -> None:
    """Prints all tables, and what the study lacks."""
    from studies.engine.tables import TABLES, missing

    for title, table in TABLES.items():
        print(f"{title}:\n\n{table(study)}\n")
    for lacking in missing(study):
        print(f"skipped: {lacking}", file=sys.stderr)


def pruning(study: Any, runs: dict[str, list[Path]], data_path: Path, figure: Path) -> dict[str, Any]:
    """What pruning skips and changes, of models with forget gates, on held-out texts.

    Draws the memory lengths of the heads of the first such model.

    Returns:
        `pruned`: model -> text length -> mean share of tiles that pruning skips, of its first seed.
        `pruning_loss`: model -> "pruned" and "unpruned", the held-out loss of each seed in nats.

    Raises:
        EvaluationError, DataError: the corpus cannot be read.
    """
    import torch

    from forgetting_transformer.analysis.conditions import conditions
    from forgetting_transformer.analysis.plots import heatmaps
    from forgetting_transformer.analysis.runs import read_run
    from forgetting_transformer.evaluation import forget_gates, held_out
    from forgetting_transformer.evaluation.models import (
        EvaluationError,
        load_model,
        pick_device,
        precision_context,
        token_losses,
    )

    heldout = held_out.find_heldout(str(data_path))

    def texts(length: int | None = None) -> list[torch.Tensor]:
        """Evenly spaced, so that they come from documents all over the held-out part."""
        data = held_out.open_heldout(heldout, length)
        chosen = range(0, data.sequences, max(1, data.sequences // TEXTS))[:TEXTS]
        return [torch.from_numpy(data.read(i)[0].astype("int64")).to(pick_device()) for i in chosen]

    def loss(model: Any) -> float:
        with torch.no_grad(), precision_context("auto", model.device):
            losses = [token_losses(model.model, ids_T[None, :-1], ids_T[None, 1:]).double().mean() for ids_T in whole]
        return sum(each.item() for each in losses) / len(losses)

    whole = texts()
    shares: dict[str, dict[str, float]] = {}
    losses: dict[str, dict[str, list[float]]] = {}
    for name, paths in runs.items():
        for path in paths:
            try:
                model = load_model(str(path), device=pick_device())
            except EvaluationError as error:
                print(f"skipped: the share of tiles that is pruned in {path.name}: {error}", file=sys.stderr)
                break
            tolerance = getattr(model.model.config, "log_pruning_tolerance", None)
            if tolerance is None:
                break
            if name not in shares:
                for length in sorted({model.train_length or len(whole[0]), len(whole[0])}):
                    ids = texts(length)
                    reports = [forget_gates.report_model(model.model, ids_T, tolerance) for ids_T in ids]
                    heads = [head.pruned for report in reports for head in report]
                    shares.setdefault(name, {})[f"{length:,}"] = sum(heads) / len(heads)
                if len(shares) == 1:
                    first = reports[0]
                    columns = ([h.layer for h in first], [h.memory for h in first], [h.memory_is_bound for h in first])
                    made_with = [*conditions([read_run(path)], heldout=False)]
                    made_with.append(f"one held-out text of {len(ids[0]):,} tokens")
                    heatmaps.heads_by_layer(
                        *columns, figure, f"Memory length of every head of {study.name(name)}", made_with
                    )
            found = losses.setdefault(name, {"pruned": [], "unpruned": []})
            found["pruned"].append(loss(model))
            for layer in forget_gates.attention_layers(model.model).values():
                layer.log_pruning_tolerance = None
            found["unpruned"].append(loss(model))
    return {"pruned": shares, "pruning_loss": losses}


if __name__ == "__main__":
    sys.exit(command_line.run(main))
