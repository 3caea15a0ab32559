#!/usr/bin/env python
r"""Imports a training checkpoint of the authors' code as a run of this project, which can then be continued.

    python scripts/import_checkpoint.py OFFICIAL_DIR OUTPUT_DIR
    fabric run train.py --devices 4 +experiment/… output_dir=OUTPUT_DIR data_dir=… \
        model.config.log_pruning_tolerance=null

OFFICIAL_DIR is the output_dir of the authors' train.py: config.yaml, and checkpoints/step-*.pt with a .pt.done beside
it. OUTPUT_DIR receives the weights, AdamW's moments, the counters and the sums of loss by position. The counters
determine the position in the data and the learning rate. The import changes nothing in OFFICIAL_DIR and runs no code
that its files name. It needs memory for the weights (4 bytes per parameter) and disk space for 12 bytes per parameter.
The run continues with the same numbers up to rounding, not bitwise (docs/coming_from_the_paper.md).

An export needs no import: save_model.py --hf_load_dir=OFFICIAL_DIR.
"""

import logging
import sys
import warnings

from forgetting_transformer import command_line
from forgetting_transformer.command_line import step


def main() -> None:
    parser = command_line.make_parser(__doc__)
    parser.add_argument("official_dir", type=command_line.path, help="output_dir of a run of the authors' code")
    parser.add_argument("output_dir", type=command_line.path, help="folder of the run to make")
    parser.add_argument("--step", type=step, help="training tokens of the checkpoint; without it the newest")
    arguments = parser.parse_args()
    # torch warns of a checkpoint that one process writes.
    warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable or uninitialized")
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(message)s")

    from forgetting_transformer.training.export.official_checkpoint import import_run

    written, config = import_run(arguments.official_dir, arguments.output_dir, arguments.step)
    print(f"{written.path} holds the run at {written.step:,} of {config.train.max_tokens:,} tokens")
    print(f"continue it with the run's own command and output_dir={arguments.output_dir}", end="")
    unpruned = (
        config.model.config.get("fgate_type") != "none" and config.model.config.get("log_pruning_tolerance", 0) is None
    )
    print(" model.config.log_pruning_tolerance=null, as it was trained" if unpruned else "")


if __name__ == "__main__":
    sys.exit(command_line.run(main, "interrupted: the same command imports again"))
