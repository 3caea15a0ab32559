#!/usr/bin/env python
"""Turns the folder of a study into a few small files, tables and figures.

    python -m studies.report collect output/study --study study.yaml --out output/study/report
    python -m studies.report figures output/study/report

collect writes OUT/study.json (all numbers of the tables), OUT/study.yaml (the plan of the study), octaves.png (loss by
octaves of positions) and differences.png (held-out losses against the baseline). It also works on an unfinished study
and names what it skips.

figures draws them again from study.json. studies/pages.py fills the pages in studies/.
"""

import argparse
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from forgetting_transformer import command_line
from forgetting_transformer.analysis import outputs, position_loss
from forgetting_transformer.files import write_json
from studies.engine import results
from studies.engine.figures import draw_figures
from studies.engine.plan import read_plan
from studies.engine.scores import read_downstream
from studies.engine.tables import TABLES, missing

#: Position from which models are compared document by document.
COMPARED_FROM = 256
#: Held-out texts whose loss is computed with and without pruning.
TEXTS = 8
#: Files that `collect` writes.
COMMAND = "studies/report.py"
FILES = ("study.json", "octaves.png", "differences.png")


def parse_args(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    collect = commands.add_parser("collect", help="from the folder of a study to a few small files")
    command_line.add_plugins(collect)
    collect.add_argument("folder", type=command_line.path, help="FOLDER of studies/run.py")
    collect.add_argument("--study", type=command_line.path, required=True, metavar="YAML", help="of the study")
    collect.add_argument("--out", type=command_line.path, required=True, metavar="DIR")
    figures = commands.add_parser("figures", help="again, from the numbers")
    figures.add_argument("report", type=command_line.path, help="OUT of collect")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> None:
    args = parse_args(argv)
    if args.command == "collect":
        collect(args.folder, args.study, args.out)
    else:
        with outputs.writing(args.report, COMMAND) as new:
            draw_figures(results.read_study(args.report), new)


def collect(folder: Path, yaml: Path, out: Path) -> None:
    """Writes the report of a study.

    Raises:
        AnalysisError: the YAML is no study's, the folder has no runs, or OUT has files of somebody else.
    """
    outputs.check(out, COMMAND, FILES)
    plan = read_plan(yaml)
    study = results.Study(plan, results.collect(folder, plan))
    positions = results.read_positions(study, folder / "position_loss")
    study.content.update(read_downstream(folder / "downstream", study))
    study.content["comparison"] = position_loss.compare([*positions.values()], COMPARED_FROM) if positions else []
    study.content["changes"] = results.position_changes(study, positions)
    with outputs.writing(out, COMMAND) as new:
        write_json(new / "study.json", study.content)
        if yaml.resolve() != (out / "study.yaml").resolve():
            shutil.copyfile(yaml, new / "study.yaml")
        draw_figures(study, new)
    # Last, because it runs models, which takes long: everything else is there by then.
    runs: dict[str, list[Path]] = {}
    for run, model in study.evaluated_runs():
        runs.setdefault(model, []).append(folder / "runs" / run)
    study.content["pruning_loss"] = pruning_loss(runs, folder / "data" / "python_code")
    with outputs.writing(out, COMMAND) as new:
        write_json(new / "study.json", study.content)
    for title, table in TABLES.items():
        print(f"{title}:\n\n{table(study)}\n")
    for lacking in missing(study):
        print(f"skipped: {lacking}", file=sys.stderr)


def pruning_loss(runs: dict[str, list[Path]], data_path: Path) -> dict[str, dict[str, list[float]]]:
    """Held-out losses of models that prune; {} where the corpus cannot be read.

    Returns:
        Model -> "pruned" and "unpruned", the loss of each seed in nats.
    """
    # Only where models are run: PyTorch and transformers take seconds to import.
    import torch

    from forgetting_transformer.data import DataError
    from forgetting_transformer.evaluation import forget_gates, held_out
    from forgetting_transformer.evaluation.models import (
        EvaluationError,
        load_model,
        pick_device,
        precision_context,
        token_losses,
    )

    try:
        data = held_out.open_heldout(held_out.find_heldout(str(data_path)))
    except (EvaluationError, DataError) as error:
        print(f"skipped: losses with and without pruning: {error}", file=sys.stderr)
        return {}
    # Evenly spaced, so that they come from documents all over the held-out part.
    chosen = range(0, data.sequences, max(1, data.sequences // TEXTS))[:TEXTS]
    texts = [torch.from_numpy(data.read(i)[0].astype("int64")).to(pick_device()) for i in chosen]

    def loss(model: Any) -> float:
        with torch.no_grad(), precision_context("auto", model.device):
            losses = [token_losses(model.model, ids_T[None, :-1], ids_T[None, 1:]).double().mean() for ids_T in texts]
        return sum(each.item() for each in losses) / len(losses)

    found: dict[str, dict[str, list[float]]] = {}
    for name, paths in runs.items():
        for path in paths:
            try:
                model = load_model(str(path), device=pick_device())
            except EvaluationError as error:
                print(f"skipped: the loss of {path.name} without pruning: {error}", file=sys.stderr)
                break
            if getattr(model.model.config, "log_pruning_tolerance", None) is None:
                break
            of_model = found.setdefault(name, {"pruned": [], "unpruned": []})
            of_model["pruned"].append(loss(model))
            for layer in forget_gates.attention_layers(model.model).values():
                layer.log_pruning_tolerance = None
            of_model["unpruned"].append(loss(model))
    return found


if __name__ == "__main__":
    sys.exit(command_line.run(main))
