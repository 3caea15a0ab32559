#!/usr/bin/env python
"""Compares several models: searches a learning rate for each, trains each at its best, and runs variants at that rate.

    python -m studies.run output_dir=output/study data_dir=data --study studies/seven_models/study.yaml
    python -m studies.run output_dir=output/study data_dir=data fabric.devices=1 hydra.launcher.jobs_per_gpu=3 \\
        --group study --models mamba2 fox_pro transformer_llama \\
        --search train.max_tokens=8388608 schedule.warmup_tokens=1048576 --seeds 0 1 2 \\
        --variants fox_pro fox_pro_rope fox_pro_no_qk_norm --variant train.max_tokens=33554432

A study is a YAML file (studies/engine/plan.py describes its keys). Options replace what it
says, and overrides are added to its own.

All jobs wait in one queue for the GPUs of this node. MODEL and VARIANT are files of configs/experiment/GROUP, and
OVERRIDE is any override of train.py. Runs are in output_dir/search/MODEL/…, output_dir/runs/MODEL_seed0 and
output_dir/variants/VARIANT_seed0. Ctrl-C or SIGTERM saves the running jobs. The same command continues them, and more
--seeds add to the finished ones. studies/seven_models/README.md shows a study.
"""

import argparse
import contextlib
import math
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

from forgetting_transformer import command_line
from forgetting_transformer.command_line import positive

ROOT = Path(__file__).resolve().parents[1]
#: What this writes into the folder of the study, beside the runs.
COMMAND = "studies/run.py"
FILES = ("study.yaml", "study.md")


def parse_args(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("overrides", nargs="*", metavar="OVERRIDE", help="override of every run, as in key=value")
    parser.add_argument(
        "--study", type=command_line.path, metavar="YAML", help="file that says what the study compares"
    )
    parser.add_argument("--group", help="folder of configs/experiment with the models; required without --study")
    parser.add_argument(
        "--models",
        nargs="+",
        metavar="MODEL",
        help="experiments to compare, the slowest first; required without --study",
    )
    parser.add_argument("--search", nargs="+", default=[], metavar="OVERRIDE", help="overrides of the searches")
    parser.add_argument(
        "--guess", type=positive, metavar="RATE", help="learning rate where searches start; default: each config's rate"
    )
    parser.add_argument(
        "--rates",
        nargs="+",
        default=[],
        metavar="MODEL=RATE",
        help="learning rates that are known, as in mamba2=5e-3: these models are not searched",
    )
    parser.add_argument(
        "--seeds",
        nargs="+",
        type=command_line.seed,
        metavar="N",
        help="seeds of runs and variants; searches use the first, which must stay the first if you add seeds. Three or "
        "more show how much of a difference is noise. Default: the config's seed",
    )
    parser.add_argument(
        "--variants",
        nargs="+",
        action="append",
        default=[],
        metavar=("MODEL", "VARIANT"),
        help="experiments to run at MODEL's learning rate, which may include MODEL itself; may be repeated, also for "
        "the same MODEL",
    )
    parser.add_argument("--variant", nargs="+", default=[], metavar="OVERRIDE", help="overrides of the variants")
    parser.add_argument("--no_variants", action="store_true", help="leave out the variants of --study")
    parser.add_argument(
        "--no_runs",
        action="store_true",
        help="leave out the runs of the models, for example because another folder has them: only variants, at known "
        "rates. `studies/report.py join` makes one report of both",
    )
    args = parser.parse_intermixed_args(argv)
    try:
        rates = [known_rate(given) for given in args.rates]
    except ValueError as error:
        parser.error(str(error))
    args.rates = dict(rates)
    if len(args.rates) < len(rates):
        parser.error(f"--rates {' '.join(f'{model}={rate:g}' for model, rate in rates)} names a model twice")
    if args.rates and (given := [override for override in args.overrides if override.startswith("optimizer.lr=")]):
        parser.error(f"{given[0]} and --rates both set the learning rate; leave one out")
    if args.study is not None:
        try:
            add_plan(args)
        except ValueError as error:
            parser.error(str(error))
    if args.group is None or not args.models:
        parser.error("the following arguments are required: --study, or --group and --models")
    return args


def known_rate(given: str) -> tuple[str, float]:
    """
    Raises:
        ValueError: the text is not MODEL=RATE.
    """
    model, _, rate = given.partition("=")
    with contextlib.suppress(ValueError):
        if model and 0 < float(rate) < math.inf:
            return model, float(rate)
    raise ValueError(f"--rates {given} must be MODEL=RATE with a positive rate, as in mamba2=5e-3")


def add_plan(args: argparse.Namespace) -> None:
    """Puts what --study says where the command line says nothing else.

    Raises:
        AnalysisError: the file is no study.
    """
    from studies.engine.plan import read_plan

    plan = read_plan(args.study)
    args.group = args.group or plan.group
    args.models = args.models or plan.start_order
    args.seeds = args.seeds or list(plan.seeds)
    args.guess = plan.start_rate if args.guess is None else args.guess
    args.rates = {model: rate for model, rate in plan.learning_rates.items() if model in args.models} | args.rates
    args.overrides = on_top(plan.overrides_of("runs"), args.overrides)
    args.search = on_top(plan.overrides_of("search"), args.search)
    args.variant = on_top(plan.overrides_of("variants"), args.variant)
    if not args.variants and not args.no_variants:
        groups = {model: names for model, names in plan.variants.items() if model in args.models}
        if not args.variant:  # then a model's run is what the model would be among its variants
            groups = {model: [name for name in names if name != model] for model, names in groups.items()}
        args.variants = [[model, *names] for model, names in groups.items() if names]


def on_top(overrides: Sequence[str], given: Sequence[str]) -> list[str]:
    """Overrides with those given after them, each key once."""
    keys = {override.partition("=")[0] for override in given}
    return [*(one for one in overrides if one.partition("=")[0] not in keys), *given]


def main(argv: Sequence[str] | None = None) -> int:
    args = parse_args(argv)
    # Only now, so that --help is quick.
    from forgetting_transformer.analysis import AnalysisError, outputs
    from forgetting_transformer.files import write_atomically
    from forgetting_transformer.sweep import SweepError, runner
    from forgetting_transformer.sweep.composition import Composer
    from forgetting_transformer.training import ConfigError
    from studies.engine.queue import Study, unfinished

    def experiment(name: str) -> list[str]:
        return [f"+experiment/{args.group}={name}"]

    try:
        for model in {model for model in args.models if args.models.count(model) > 1}:
            raise SweepError(f"--models names {model} twice")
        variants = merged_variants(args.variants)
        if args.seeds and (given := [override for override in args.overrides if override.startswith("seed=")]):
            raise SweepError(
                f"{given[0]} and --seeds {' '.join(map(str, args.seeds))} both set the seed; leave one out"
            )
        composer = Composer(ROOT / "configs", args.overrides)
        shared = [o for o in composer.task_overrides if not o.startswith(("output_dir=", "seed="))]
        base = composer.compose([*experiment(args.models[0]), *composer.task_overrides])
        study = Study(
            ROOT / "train.py",
            composer.compose,
            Path(base.output_dir).expanduser().absolute(),
            {model: experiment(model) for model in args.models},
            shared,
            args.search,
            args.seeds or [base.seed],
            args.guess,
            {model: {name: experiment(name) for name in names} for model, names in variants.items()},
            args.variant,
            args.rates,
            not args.no_runs,
        )

        def is_old(file: Path) -> bool:
            """Whether an earlier version, which kept no list of its files, may have written it."""
            if file.name == "study.md":
                return file.read_text(encoding="utf-8", errors="replace").startswith("| job ")
            return args.study is not None and file.read_bytes() == args.study.read_bytes()

        if study.folder.is_dir():
            outputs.check(study.folder, COMMAND, FILES if args.study is not None else FILES[1:], is_old)
        results = study.run(composer.machine())
    except (SweepError, ConfigError, AnalysisError) as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return 1
    failures = [f"{model}: its search stopped, and it was not run: {why}" for model, why in study.failures.items()]
    text = "\n\n".join([runner.summary(results), *failures])
    with outputs.writing(study.folder, COMMAND, is_old) as new:
        write_atomically(new / "study.md", f"{text}\n", durable=False)
        if args.study is not None:
            shutil.copyfile(args.study, new / "study.yaml")
    print(f"\n{text}\n")
    left = unfinished(results)
    if left:
        jobs = "1 job is not finished; the same command goes on with it"
        if len(left) > 1:
            jobs = f"{len(left)} jobs are not finished; the same command goes on with them"
        print(jobs, file=sys.stderr)
    return 1 if left or failures else 0


def merged_variants(given: Sequence[Sequence[str]]) -> dict[str, list[str]]:
    """Model -> its variants, of all --variants that name it.

    Raises:
        SweepError: one of them names no variant, or one variant twice.
    """
    from forgetting_transformer.sweep import SweepError

    merged: dict[str, list[str]] = {}
    for model, *names in given:
        if not names:
            raise SweepError(f"--variants {model} names no variant: --variants MODEL VARIANT …, where MODEL may be one")
        for name in names:
            if name in merged.setdefault(model, []):
                raise SweepError(f"--variants {model} names {name} twice")
            merged[model].append(name)
    return merged


if __name__ == "__main__":
    sys.exit(command_line.run(main))
