#!/usr/bin/env python
"""Makes a study: a corpus of the Python sources on this machine, its models, their evaluations, and a report.

    python -m studies.run studies/three_seeds/study.yaml output/three_seeds
    python -m studies.run studies/three_seeds/study.yaml output/three_seeds --stages train --models fox_pro --seeds 0

The YAML has the models, their training and the claims of the study (studies/engine/plan.py).
Each model gets a learning-rate search and a run at the best rate, its variants run at the same rate, and runs are
repeated with other seeds. All GPUs in CUDA_VISIBLE_DEVICES are used, or all there are. OVERRIDE is any override of
train.py, for all runs.

FOLDER gets search/, runs/, variants/, the evaluations, logs/ and report/ (study.json, tables and figures). Ctrl-C or
SIGTERM saves the running jobs. The same command continues, and further models and seeds are added to finished ones. A
study can be made on several machines: give each some of the models or seeds with the same data/, copy the parts into
one folder, and collect there.
"""

import argparse
import dataclasses
import os
import sys
from collections.abc import Sequence

from forgetting_transformer import command_line
from studies.engine.plan import read_plan
from studies.engine.stages import Stages

STAGES = ("corpus", "train", "evaluate", "downstream", "collect")


def parse_args(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = command_line.make_parser(__doc__)
    parser.add_argument("study", type=command_line.path, metavar="YAML", help="definition of the study")
    parser.add_argument("folder", type=command_line.path, metavar="FOLDER", help="folder of all its files")
    parser.add_argument("overrides", nargs="*", metavar="OVERRIDE", help="override of every run, as in key=value")
    parser.add_argument("--stages", nargs="+", choices=STAGES, default=STAGES, help="default: all, in this order")
    parser.add_argument("--models", nargs="+", metavar="MODEL", help="some of the models of the study; default all")
    parser.add_argument("--seeds", nargs="+", type=command_line.seed, metavar="N", help="default: those of the study")
    args = parser.parse_intermixed_args(argv)
    try:
        plan = read_plan(args.study)
    except ValueError as error:
        parser.error(str(error))
    if unknown := [model for model in args.models or () if model not in plan.models]:
        parser.error(f"--models {unknown[0]} is none of {', '.join(plan.models)}")
    kept = {name: title for name, title in plan.models.items() if name in (args.models or plan.models)}
    args.plan = dataclasses.replace(
        plan,
        models=kept,
        slowest_first=[name for name in plan.slowest_first if name in kept],
        variants={model: names for model, names in plan.variants.items() if model in kept},
        learning_rates={model: rate for model, rate in plan.learning_rates.items() if model in kept},
        seeds=args.seeds or plan.seeds,
    )
    return args


def main(argv: Sequence[str] | None = None) -> int:
    args = parse_args(argv)
    os.environ.setdefault("HF_HUB_OFFLINE", "1")  # for all jobs: nothing of a study is on the hub
    worked = True
    stages = Stages(args.study, args.plan, args.folder, args.overrides)
    if "train" in args.stages:
        _ = stages.queue  # what train.py would refuse is refused before the corpus is made
    for stage in (stage for stage in STAGES if stage in args.stages):
        print(f"\n== {stage}", flush=True)
        if not getattr(stages, stage)():
            print(f"== {stage}: not everything worked; see above", file=sys.stderr, flush=True)
            worked = False
    return 0 if worked else 1


if __name__ == "__main__":
    sys.exit(command_line.run(main))
