#!/usr/bin/env python
"""Turns the results of studies/run.py into a few small files, and into tables and figures in a page.

    python -m studies.report collect output/study --data_path data/python_code --position_loss output/positions \\
        --speed output/speed/*.json --out output/report
    python -m studies.report tables output/report my_study.md
    python -m studies.report join output/report other_machine/report --out output/joined
    python -m studies.report recipes output/recipes --out recipes.jsonl

collect writes OUT/study.json (all numbers of the tables), OUT/study.yaml (the plan of the study), OUT/positions.npz
(loss at every position) and figures: per_token_loss.png, compare.png (training), search.png (learning rates),
memory.png (of the first model with forget gates), heads.png (while models with gates were trained), differences.png
(held-out losses against the baseline), needle.png (needle in a haystack, of every model that was asked). It also works
on an unfinished study and names what it skips.

tables replaces the text between <!-- NAME --> and <!-- end of NAME --> in a page. NAME is source, models, search,
octaves, positions, comparison, variants, equal_loss, needle, downstream, claims, claim_rules, models_noise,
variants_noise, or the name of a figure followed by _figure. The page links to the figures in their folder.
(studies/pages.py fills the pages in studies/.)

join makes one report of several, whose runs were made in other places or at other times on the same corpus: other
models, variants, or seeds of the same models with the same settings. Intervals and verdicts are computed again. Runs
that were made again with the same losses in all bits count once, and bring what was missing, such as answers to tasks.
compare.png and memory.png, which need the runs, stay with the reports that were joined.
"""

import argparse
import json
import math
import shutil
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from forgetting_transformer import command_line
from forgetting_transformer.command_line import count

if TYPE_CHECKING:
    from forgetting_transformer.analysis import position_loss

#: Position from which models are compared document by document.
COMPARED_FROM = 256
#: What collect writes, besides study.yaml.
COMMAND = "studies/report.py"
FILES = ("study.json", "positions.npz", "search.png", "octaves.png", "compare.png", "per_token_loss.png", "memory.png",
         "differences.png", "heads.png", "needle.png")  # fmt: skip


def parse_args(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    collect = commands.add_parser("collect", help="from the folder of a study to a few small files")
    command_line.add_plugins(collect)
    collect.add_argument("study", type=command_line.path, help="output_dir of studies/run.py")
    collect.add_argument(
        "--data_path",
        type=command_line.name,
        required=True,
        help="folder of the corpus, for the share of tiles that is pruned",
    )
    collect.add_argument(
        "--position_loss", type=command_line.path, required=True, help="save_dir of run_per_token_loss.py"
    )
    collect.add_argument(
        "--speed", type=command_line.path, nargs="*", default=[], help="files of benchmarks/training.py --out"
    )
    collect.add_argument(
        "--downstream", type=command_line.path, help="folder of the stage of that name of studies/study.sh"
    )
    collect.add_argument(
        "--documents", type=count, default=8, help="texts that the pruned share is a mean of; %(default)s"
    )
    collect.add_argument(
        "--plan", type=command_line.path, metavar="YAML", help="of the study; default STUDY/study.yaml if it is there"
    )
    collect.add_argument("--out", type=command_line.path, required=True, metavar="DIR")
    figures = commands.add_parser("figures", help="again, those that the numbers alone suffice for")
    figures.add_argument("report", type=command_line.path, help="OUT of collect")
    recipes = commands.add_parser(
        "recipes", help="final losses of runs of one model that differ in seed, rate, warm-up"
    )
    recipes.add_argument(
        "runs", type=command_line.path, nargs="+", help="output_dir of runs, or folders that hold them"
    )
    recipes.add_argument(
        "--out", type=command_line.path, required=True, metavar="FILE", help="gets a JSON line per run"
    )
    join = commands.add_parser("join", help="reports of parts of one study, into one report")
    join.add_argument("reports", type=command_line.path, nargs="+", metavar="REPORT", help="OUT of collect, or of join")
    join.add_argument(
        "--plan",
        type=command_line.path,
        metavar="YAML",
        help="of the joined study; default: what the first report says",
    )
    join.add_argument("--out", type=command_line.path, required=True, metavar="DIR")
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
    from studies.engine import tables as study_tables
    from studies.engine.marked_pages import fill_in
    from studies.engine.results import read_study

    try:
        if args.command == "collect":
            collect(args)
        elif args.command == "join":
            join(args)
        elif args.command == "figures":
            study = read_study(args.report)
            with outputs.writing(args.report, COMMAND, is_old_report) as new:
                drawn = draw_figures(study, new)
            for path in drawn:
                print(args.report / path.name)
        elif args.command == "recipes":
            if args.out.exists() and not is_recipes(args.out):
                raise AnalysisError(f"{args.out} holds something else than recipes; give another --out")
            lines = [json.dumps(line) for line in recipes_of(args.runs)]
            write_atomically(args.out, "".join(f"{line}\n" for line in lines), durable=False)
            print(f"{len(lines)} finished runs in {args.out}")
        else:
            try:
                page = fill_in(args.page.read_text(encoding="utf-8"), study_tables.sections(args.report, args.page))
            except (OSError, UnicodeDecodeError) as error:
                raise AnalysisError(f"{args.page} cannot be read: {error}; name a page with marks") from error
            try:
                write_atomically(args.page, page, durable=False)
            except OSError as error:
                raise AnalysisError(f"{args.page} cannot be written ({error.strerror or error})") from error
    except (AnalysisError, EvaluationError, DataError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


def collect(args: argparse.Namespace) -> None:
    from forgetting_transformer.analysis import comparisons, outputs
    from forgetting_transformer.analysis.conditions import conditions
    from forgetting_transformer.analysis.plots.sweeps import loss_against_tokens_and_flops
    from forgetting_transformer.data import DataError
    from forgetting_transformer.evaluation.models import EvaluationError
    from forgetting_transformer.files import write_json
    from forgetting_transformer.training.continuing import decisive
    from studies.engine import results as studies
    from studies.engine import scores as study_scores
    from studies.engine.plan import read_plan

    outputs.check(args.out, COMMAND, FILES, is_old_report)
    file = args.plan or args.study / "study.yaml"
    plan = read_plan(file) if args.plan or file.is_file() else None
    study = studies.collect(args.study, args.position_loss, args.speed, decisive, plan)
    runs = studies.runs_in(args.study, "runs", study["names"], plan.seeds if plan else ())
    positions = studies.read_positions(study, args.position_loss)
    add_positions(study, positions)
    for model in study["models"]:
        runs_of = [run for run, of in studies.evaluated_runs(study) if of == model]
        lacking = [run for run in runs_of if run not in positions]
        if 0 < len(lacking) < len(runs_of):  # `show` says so of a model that has none
            skip(f"loss at every position: {', '.join(lacking)} have none, and other seeds do")
    study |= study_scores.read_downstream(args.downstream, study)

    def name(model: str) -> str:
        return studies.display_name(study, model)

    models = [comparisons.named_model(name(model), paths) for model, paths in runs.items()]
    made_with = conditions([run for model in models for run in model.runs])
    with outputs.writing(args.out, COMMAND, is_old_report) as new:
        write_json(new / "study.json", study)
        studies.save_positions(positions, new / "positions.npz")
        if plan is not None and file != args.out / "study.yaml":
            shutil.copyfile(file, new / "study.yaml")
        draw_figures(study, new)
        if models:
            loss_against_tokens_and_flops(models, new / "compare.png", conditions=made_with)
        draw_positions(study, [*positions.values()], new)
    # Last, because it runs models, which takes long: everything else is there by then.
    try:
        with outputs.writing(args.out, COMMAND, is_old_report) as new:
            study["pruned"] = pruned_shares(
                {model: paths[0] for model, paths in runs.items()},
                args.data_path,
                args.documents,
                new / "memory.png",
                study["names"],
            )
            finished: dict[str, list[Path]] = {}
            for run, model in studies.evaluated_runs(study):
                finished.setdefault(model, []).append(args.study / "runs" / run)
            study["pruning_loss"] = {
                model: losses
                for model, paths in finished.items()
                if model in study["pruned"]
                and (losses := losses_without_pruning(paths, args.data_path, args.documents))
            }
            write_json(new / "study.json", study)
    except (EvaluationError, DataError) as error:
        skip(f"the share of tiles that is pruned: {error}")
    show(study)


def join(args: argparse.Namespace) -> None:
    from forgetting_transformer.analysis import AnalysisError, outputs
    from forgetting_transformer.files import write_json
    from studies.engine import parts as study_parts
    from studies.engine import results as studies
    from studies.engine.plan import read_plan

    if args.out.resolve() in [report.resolve() for report in args.reports]:
        raise AnalysisError(f"--out {args.out} is one of the reports, which would be lost; name another folder")
    if len({report.resolve() for report in args.reports}) < len(args.reports):
        raise AnalysisError(f"{' '.join(map(str, args.reports))} names a report twice")
    if args.plan is None and (args.out / "study.yaml").exists():
        raise AnalysisError(
            f"{args.out / 'study.yaml'} would be read as that of the joined study; give it as --plan, or choose "
            "another folder"
        )
    parts = {report: studies.read_study(report) for report in args.reports}
    plan = None if args.plan is None else read_plan(args.plan)
    study = study_parts.join({str(report): part for report, part in parts.items()}, plan)
    positions = study_parts.read_positions(parts, study)
    outputs.check(args.out, COMMAND, FILES, is_old_report)
    # In the order of the models: the first is the one that others are compared with.
    results = {run: positions[run] for run, _ in studies.evaluated_runs(study) if run in positions}
    add_positions(study, results)
    with outputs.writing(args.out, COMMAND, is_old_report) as new:
        write_json(new / "study.json", study)
        if results:
            studies.save_positions(results, new / "positions.npz")
        # Without one, study.json has the names of all parts.
        if args.plan is not None:
            shutil.copyfile(args.plan, new / "study.yaml")
        draw_figures(study, new)
        draw_positions(study, [*results.values()], new)
        made = {path.name for path in new.iterdir()}
    # What an earlier join wrote and this one has nothing for would be shown beside its tables.
    outputs.remove(args.out, COMMAND, [name for name in FILES if name not in made])
    show(study)
    for report, part in parts.items():
        evaluated = any("per_token_loss" in model for model in part["models"].values())
        if evaluated and not (report / "positions.npz").is_file():
            skip(f"loss at every position of {report}: its positions.npz is not there")
    print(f"the joined report is in {args.out}")


def add_positions(study: dict[str, Any], results: "Mapping[str, position_loss.Result]") -> None:
    """What a study says of loss at every position, of runs by the names of their folders."""
    from forgetting_transformer.analysis import position_loss
    from studies.engine import results as studies

    study["comparison"] = position_loss.compare([*results.values()], COMPARED_FROM) if results else []
    study["changes"] = studies.position_changes(study, results)


def draw_positions(study: dict[str, Any], results: "Sequence[position_loss.Result]", folder: Path) -> None:
    """Draws the loss at every position, if there is any."""
    from forgetting_transformer.analysis import position_loss
    from forgetting_transformer.analysis.plots.losses import loss_against_position

    if results:
        lengths = {result.name: result.summary.get("train_length") for result in results}
        evaluated = [model for model in study["models"].values() if "per_token_loss" in model]
        loss_against_position(
            position_loss.group_seeds(results),
            folder / "per_token_loss.png",
            lengths,
            conditions=[*position_loss.made_with([r.summary for r in results]), *made_on(study, evaluated)],
        )


def show(study: dict[str, Any]) -> None:
    """Prints all tables, and what the study lacks."""
    from studies.engine import tables as study_tables

    for title, table in study_tables.TABLES.items():
        print(f"{title}:\n\n{table(study)}\n")
    for missing in study_tables.missing(study):
        skip(missing)


def made_on(study: dict[str, Any], models: Iterable[dict[str, Any]]) -> list[str]:
    """The machines of some models of a study, for figures."""
    from studies.engine.results import machines_of

    machines = dict.fromkeys(machine for model in models for machine in machines_of(study, model))
    return [f"on {', '.join(machines)}"] if machines else []


def draw_figures(study: dict[str, Any], folder: Path) -> list[Path]:
    """Draws the figures that study.json alone suffices for, and returns them: learning rates, loss by octave,
    differences of losses, heads over training, and the needle in a haystack.
    """
    from forgetting_transformer.analysis.needles import CHANCE
    from forgetting_transformer.analysis.plots.heatmaps import score_grids
    from forgetting_transformer.analysis.plots.losses import loss_by_octave
    from forgetting_transformer.analysis.plots.sweeps import loss_against_learning_rate
    from studies.engine.figures import differences_to_baseline, heads_over_training
    from studies.engine.results import baseline_of, contrasts, counted_seeds, differences, display_name
    from studies.engine.scores import needle_grids

    figures = []
    if study["search"]:
        curves = {
            display_name(study, model): {
                float(rate): [math.inf if loss is None else loss] for rate, loss in losses.items()
            }
            for model, losses in study["search"].items()
        }
        figures.append(folder / "search.png")
        searched = study.get("search_made_with", [])
        loss_against_learning_rate(
            curves,
            study["search_loss"],
            figures[-1],
            ring_each=True,
            title=f"Learning-rate search of {len(curves)} models",
            conditions=searched
            if any(said.startswith("on ") for said in searched)
            else [*searched, *made_on(study, [{}])],
        )
    evaluated = {name: model for name, model in study["models"].items() if "per_token_loss" in model}
    octaves = {
        display_name(study, name): {entry["position"]: entry["after"] for entry in model["per_token_loss"]["slope"]}
        for name, model in evaluated.items()
    }
    if octaves and study.get("comparison"):
        tokens = {model["budget"] for model in study["models"].values()}
        seeds = sorted({seed for model in study["models"].values() for seed in model["seeds"][:1]})
        made_with = [f"{tokens.pop():,} training tokens"] if len(tokens) == 1 else []
        several = max(len(counted_seeds(model)) for model in study["models"].values())
        left = f"seed {', '.join(map(str, seeds))}"
        made_with.append(left if several == 1 else f"left: {left}; right: mean of {several} seeds")
        made_with += made_on(study, evaluated.values())
        lengths = {
            display_name(study, name): model["per_token_loss"].get("train_length", study.get("train_length"))
            for name, model in evaluated.items()
        }
        figures.append(folder / "octaves.png")
        loss_by_octave(octaves, study["comparison"], figures[-1], made_with, lengths)
    panels, families = {}, False
    for kind in ("models", "variants"):
        by_family = contrasts(study, kind)
        found = differences(by_family)
        families = families or len(by_family) > 1
        if any(not math.isnan(apart.value) for apart in found.values()):
            tokens = {model["budget"] for model in study[kind].values()}
            budget = f", {tokens.pop() / 1e6:,.3g}M tokens" if len(tokens) == 1 else ""
            most = by_family[0].seeds
            complete = all(len(counted_seeds(model)) >= most for model in study[kind].values())
            seeds = f"{'' if complete else 'up to '}{most} seed{'s' * (most != 1)}"
            panels[f"{kind}{budget}, {seeds}"] = (display_name(study, baseline_of(study, kind)), found)
    if panels:
        figures.append(folder / "differences.png")
        shown = [model for kind in ("models", "variants") for model in study[kind].values()]
        differences_to_baseline(panels, study.get("names", {}), figures[-1], made_on(study, shown), families)
    recorded = {
        name: heads
        for name, model in study["models"].items()
        if (heads := [heads for heads in model.get("heads", ()) if heads])
    }
    if recorded:
        of_models = {display_name(study, name): heads for name, heads in recorded.items()}
        lengths = {model.get("train_length") for model in study["models"].values()}
        figures.append(folder / "heads.png")
        made_with = made_on(study, [study["models"][name] for name in recorded])
        heads_over_training(of_models, figures[-1], lengths.pop() if len(lengths) == 1 else None, made_with)
    prompt_lengths, depths, grids = needle_grids(study)
    if grids:
        asked = study["needles"]
        trained = {of["train_length"] for runs in asked.values() for modes in runs.values() for of in modes.values()}
        seeds = {len(runs) for runs in asked.values()}
        several = "one seed" if seeds == {1} else f"mean of {'up to ' * (len(seeds) > 1)}{max(seeds)} seeds"
        figures.append(folder / "needle.png")
        score_grids(
            grids,
            prompt_lengths,
            depths,
            figures[-1],
            title="Needle in a haystack",
            label="share of the answer's words",
            limits=(0.0, 1.0),
            train_length=trained.pop() if len(trained) == 1 else None,
            conditions=[
                "easy mode: the needle has the question before it",
                several,
                CHANCE,
                *made_on(study, [study["models"][name] for name in asked]),
            ],
        )
    return figures


def recipes_of(folders: Sequence[Path]) -> list[dict[str, Any]]:
    """Finished runs: learning `rate`, `warmup` in steps, `seed`, the losses at the end, as a study has them, and the
    fingerprint of the `corpus`.

    Raises:
        AnalysisError: there are none, or they are of several models, which a line does not tell apart.
    """
    from forgetting_transformer.analysis import AnalysisError, comparisons
    from forgetting_transformer.analysis.runs import read_run
    from studies.engine import results as studies

    found: list[dict[str, Any]] = []
    first: tuple[Path, Any] | None = None
    for path in comparisons.find_runs(folders):
        run = read_run(path)
        config, data = run.config, run.config["datamodule"]
        if not run.finished(config["train"]["max_tokens"]):
            skip(f"{path}: not finished")
            continue
        first = first or (path, config["model"])
        if config["model"] != first[1]:
            raise AnalysisError(f"{path} is a run of another model than {first[0]}; give runs of one model")
        described = studies.describe([path])
        found.append(
            {
                "rate": config["optimizer"]["lr"],
                "warmup": round(
                    config["schedule"]["warmup_tokens"] / data["train_batch_len"] / data["train_batch_size"]
                ),
                "seed": config["seed"],
                **{key: described[key] for key in ("heldout_loss", "train_loss")},
                "corpus": run.info("train_data").get("fingerprint"),
            }
        )
    if not found:
        raise AnalysisError("none of the runs is finished; the same command writes their lines when they are")
    return sorted(found, key=lambda one: (one["rate"], one["warmup"], one["seed"]))


def is_recipes(file: Path) -> bool:
    """Whether an earlier `recipes` wrote the file, or nothing is in it."""
    try:
        lines = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
    except (OSError, ValueError):
        return False
    return all(isinstance(line, dict) and {"rate", "warmup", "seed"} <= line.keys() for line in lines)


def is_old_report(path: Path) -> bool:
    """Whether the file lies beside the numbers of a study that an earlier version collected."""
    try:
        study = json.loads(path.with_name("study.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return isinstance(study, dict) and {"models", "search", "variants"} <= study.keys()


def skip(what: str) -> None:
    print(f"skipped: {what}", file=sys.stderr)


def pruned_shares(
    runs: dict[str, Path], data_path: str, documents: int, figure: Path, names: dict[str, str]
) -> dict[str, dict[str, float]]:
    """Model -> text length -> mean share of tiles that pruning skips, for the models with forget gates.

    Draws the memory lengths of the first such model on the first whole document.
    """
    import torch

    from forgetting_transformer.analysis.conditions import conditions
    from forgetting_transformer.analysis.plots import heatmaps
    from forgetting_transformer.analysis.runs import read_run
    from forgetting_transformer.evaluation import forget_gates, per_token_loss
    from forgetting_transformer.evaluation.models import EvaluationError, load_model, pick_device

    folder = per_token_loss.find_heldout(data_path)
    document_len = per_token_loss.open_heldout(folder).length
    shares: dict[str, dict[str, float]] = {}
    for name, path in runs.items():
        try:
            model = load_model(str(path), device=pick_device())
        except EvaluationError as error:
            skip(f"the share of tiles that is pruned in {name}: {error}")
            continue
        tolerance = getattr(model.model.config, "log_pruning_tolerance", None)
        if tolerance is None:
            continue
        for length in sorted({model.train_length or document_len, document_len}):
            texts = per_token_loss.open_heldout(folder, length)
            # Evenly spaced, so that they come from documents all over the held-out part.
            chosen = range(0, texts.sequences, max(1, texts.sequences // documents))[:documents]
            ids = [torch.from_numpy(texts.read(i)[0].astype("int64")).to(model.device) for i in chosen]
            reports = [forget_gates.report_model(model.model, ids_T, tolerance) for ids_T in ids]
            heads = [head for report in reports for head in report]
            shares.setdefault(name, {})[f"{length:,}"] = sum(head.pruned for head in heads) / len(heads)
        if len(shares) == 1:
            first = reports[0]
            columns = ([h.layer for h in first], [h.memory for h in first], [h.memory_is_bound for h in first])
            title = f"Memory length of every head of {names.get(name, name)}"
            made_with = [*conditions([read_run(path)], heldout=False), f"one held-out text of {len(ids[0]):,} tokens"]
            heatmaps.heads_by_layer(*columns, figure, title, made_with)
    return shares


def losses_without_pruning(runs: Sequence[Path], data_path: str, documents: int) -> dict[str, list[float]]:
    """Held-out loss of each run with the pruning that it was trained with, and without, on the same texts, in nats.

    Returns:
        "pruned" and "unpruned", each with a loss per run; {} for models that do not prune.
    """
    import torch

    from forgetting_transformer.evaluation import forget_gates, per_token_loss
    from forgetting_transformer.evaluation.models import load_model, pick_device, precision_context, token_losses

    data = per_token_loss.open_heldout(per_token_loss.find_heldout(data_path))
    chosen = range(0, data.sequences, max(1, data.sequences // documents))[:documents]
    found: dict[str, list[float]] = {"pruned": [], "unpruned": []}
    for path in runs:
        model = load_model(str(path), device=pick_device())
        layers = forget_gates.attention_layers(model.model).values()
        if all(layer.log_pruning_tolerance is None for layer in layers):
            return {}
        for which, losses in found.items():
            if which == "unpruned":
                for layer in layers:
                    layer.log_pruning_tolerance = None
            total = 0.0
            for i in chosen:
                ids_T = torch.from_numpy(data.read(i)[0].astype("int64")).to(model.device)
                with torch.no_grad(), precision_context("auto", model.device):
                    total += token_losses(model.model, ids_T[None, :-1], ids_T[None, 1:]).double().mean().item()
            losses.append(total / len(chosen))
    return found


if __name__ == "__main__":
    sys.exit(command_line.run(main))
