#!/usr/bin/env python
"""Draws the ratings of eval.py: FIGURE_DIR/EXP/needle_EXP_MODEL.png (and .pdf) for every EXP and MODEL in ./results.

    cd eval/niah
    python plot_niah.py --figure_dir=figures

A dashed line marks the training length of the model.
"""

import sys
from pathlib import Path

from forgetting_transformer import command_line


def main() -> None:
    parser = command_line.make_parser(__doc__)
    parser.add_argument(
        "--figure_dir", type=command_line.path, required=True, help="folder to write to; made if needed"
    )
    args = parser.parse_args()

    from forgetting_transformer.evaluation import needle

    for picture in needle.draw_ratings(Path("results"), Path("pred"), args.figure_dir):
        print(picture)


if __name__ == "__main__":
    sys.exit(command_line.run(main))
