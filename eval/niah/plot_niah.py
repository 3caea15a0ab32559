#!/usr/bin/env python
"""Draws the ratings of eval.py: FIGURE_DIR/EXP/needle_EXP_MODEL.png (and .pdf) for every EXP and MODEL in ./results.

    cd eval/niah
    python plot_niah.py --figure_dir=figures

A dashed line marks the training length of the model.
"""

import sys
from pathlib import Path

from forgetting_transformer import command_line
from forgetting_transformer.command_line import count


def main() -> None:
    parser = command_line.make_parser(__doc__)
    parser.add_argument(
        "--figure_dir", type=command_line.path, required=True, help="folder to write to; made if needed"
    )
    parser.add_argument("--train_len", type=count, help="training length to mark; default: the one that pred.py found")
    args = parser.parse_args()

    from forgetting_transformer.evaluation import needle

    for picture in needle.draw_ratings(Path("results"), Path("pred"), args.figure_dir, args.train_len):
        print(picture)


if __name__ == "__main__":
    sys.exit(command_line.run(main))
