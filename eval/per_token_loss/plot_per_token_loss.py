#!/usr/bin/env python
"""Draws and tabulates results of run_per_token_loss.py.

    python eval/per_token_loss/plot_per_token_loss.py output/per_token_loss/fox output/per_token_loss/llama \\
        --out output/figures
    … "FoX=results/fox_seed0" "FoX=results/fox_seed1" "Transformer=results/llama_seed0"        # seeds with one name
    python eval/per_token_loss/plot_per_token_loss.py --result_dir results --figure_dir figures

RESULT is [NAME=]FOLDER. Results with the same NAME are seeds of one model: their mean is drawn and their range shaded.
Without a NAME they are different models, whose names must differ.
OUT/per_token_loss.png (and .pdf) shows the smoothed L(i) on the left and perplexity by context length on the right,
with the training length marked. OUT/slopes.md gives the change of the loss with every doubling of the context.
OUT/comparison.md and OUT/differences.png (and .pdf) compare every model with the first on the same documents, which is
much more precise than either model's slope.

--result_dir takes all models below it. --figure_dir names the figure as the paper's repository does:
main_loss_64k_line.png (and .pdf), whatever the length.
"""

import sys

from forgetting_transformer import command_line
from forgetting_transformer.analysis import known_models, outputs, position_loss
from forgetting_transformer.analysis.evaluations import named_folders
from forgetting_transformer.analysis.plots.losses import loss_against_position, loss_differences
from forgetting_transformer.files import write_atomically


def main() -> None:
    parser = command_line.make_parser(__doc__)
    parser.add_argument(
        "results", type=command_line.name, nargs="*", metavar="RESULT", help="[NAME=]FOLDER with results.npz"
    )
    parser.add_argument("--result_dir", type=command_line.path, help="all models whose results are in this folder")
    target = parser.add_mutually_exclusive_group(required=True)
    target.add_argument("--out", type=command_line.path, metavar="DIR", help="folder to write to; made if needed")
    target.add_argument("--figure_dir", type=command_line.path, help="the same, with the official name of the figure")
    args = parser.parse_args()
    if not args.results and args.result_dir is None:
        parser.error("give RESULT folders, or --result_dir")
    out = args.out or args.figure_dir
    stem = "per_token_loss" if args.out else "main_loss_64k_line"
    try:
        found = known_models.results_in(args.result_dir, "results.npz") if args.result_dir else []
        named = named_folders([*args.results, *found])
        results = [position_loss.read_result(folder, name) for name, folder in named]
        if len({(result.summary.get("data"), result.summary.get("eval_tokens")) for result in results}) > 1:
            print(
                "warning: not all of these were evaluated on the same documents, so their curves differ by texts too",
                file=sys.stderr,
            )
        curves = position_loss.group_seeds(results)
        lengths = {result.name: result.summary.get("train_length") for result in results}
        compared = position_loss.compare(results)
        conditions = position_loss.made_with([result.summary for result in results])
        tables = {"slopes.md": position_loss.slope_table([(result.name, result.summary) for result in results])}
        if compared:
            tables["comparison.md"] = position_loss.comparison_table(compared)
        with outputs.writing(out, "plot_per_token_loss.py") as new:
            for suffix in ("png", "pdf"):
                loss_against_position(curves, new / f"{stem}.{suffix}", lengths, conditions)
                if compared:
                    loss_differences(compared, new / f"differences.{suffix}", conditions, lengths)
            for name, table in tables.items():
                write_atomically(new / name, f"{table.markdown()}\n", durable=False)
            pictures = sorted(path.name for path in new.iterdir() if path.suffix != ".md")
    except ValueError as error:
        sys.exit(f"error: {error}")
    print("\n".join(str(out / name) for name in pictures))
    for name, table in tables.items():
        print(f"{out / name}\n\n{table.markdown()}\n")


if __name__ == "__main__":
    sys.exit(command_line.run(main))
