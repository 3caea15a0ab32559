#!/usr/bin/env python
"""Averages the weights of several checkpoints of a run, and writes the result as an exported model.

    python scripts/average_checkpoints.py RUN --last 2                      the newest two, to the folder RUN-average
    python scripts/average_checkpoints.py RUN --steps 524288 1048576 --out output/hf/mean

RUN is the output_dir of a run, of which nothing is changed. The result is what save_model.py writes: evaluations,
scripts/generate.py and init_from take it. A second call replaces it. Sums are in float64.
"""

import logging
import sys

from forgetting_transformer import command_line
from forgetting_transformer.command_line import count, step


def main() -> None:
    parser = command_line.make_parser(__doc__)
    parser.add_argument("run", type=command_line.path, metavar="RUN", help="output_dir of a training run")
    which = parser.add_mutually_exclusive_group(required=True)
    which.add_argument("--last", type=count, help="how many checkpoints, the newest ones")
    which.add_argument("--steps", type=step, nargs="+", help="training tokens of each checkpoint")
    parser.add_argument("--out", type=command_line.path, help="folder to write; default RUN-average")
    parser.add_argument("--tokenizer", type=command_line.name, help="folder or hub id, if the run has no tokenizer")
    parser.add_argument("--replace", action="store_true", help="replace an export of another run; refused without it")
    command_line.add_plugins(parser)
    arguments = parser.parse_args()
    if arguments.last is not None and arguments.last < 2:
        parser.error(f"--last={arguments.last}: an average is of 2 checkpoints at least; save_model.py exports one")
    if arguments.steps is not None and len({*arguments.steps}) < max(2, len(arguments.steps)):
        parser.error(f"--steps={arguments.steps} must name 2 different checkpoints at least, and each once")
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(message)s")

    import transformers

    from forgetting_transformer.training.checkpoint.folder import CheckpointError
    from forgetting_transformer.training.export import ExportError
    from forgetting_transformer.training.export.averaging import average

    transformers.utils.logging.disable_progress_bar()
    run = arguments.run.absolute()
    out = arguments.out or run.with_name(f"{run.name}-average")
    try:
        print(average(arguments.run, out, arguments.last, arguments.steps, arguments.tokenizer, arguments.replace))
    except (CheckpointError, ExportError) as error:
        sys.exit(f"{type(error).__name__}: {error}")


if __name__ == "__main__":
    sys.exit(command_line.run(main, "interrupted: the same command averages again"))
