#!/usr/bin/env python
"""Draws the forget gates and attention maps of a FoX on one text.

    python eval/forget_gates/run_forget_gates.py --model_path output/hf/fox --text essay.txt --out output/gates
    python eval/forget_gates/run_forget_gates.py --model_path runs/fox --data_path data/longcrawl64 --document 3 \\
        --max_length 16384 --layers 0,8,16,23 --heads 0,1,2,3 --out output/gates

MODEL_PATH is an export of save_model.py, a training run's output_dir, or a hub id. OUT receives:

gates.png       forget-gate matrix F of the chosen heads: the share of token j's weight that remains at token i
attention.png   their attention weights; weights below 0.5 stay white, as in the paper
memory.png      memory length of every head: tokens after which its decay reaches 1/e, median over the text
evaluation.json memory length, and the share of tiles that pruning skips, for every head
"""

import sys

from forgetting_transformer import command_line
from forgetting_transformer.command_line import at_least
from forgetting_transformer.evaluation import options


def main() -> None:
    parser = command_line.make_parser(__doc__)
    options.add_model(parser)
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--text", type=command_line.path, help="a text file")
    source.add_argument(
        "--data_path", type=command_line.name, help="folder of a corpus with heldout.zarr: a document of it"
    )
    parser.add_argument("--document", type=at_least(0), default=0, help="its number; default %(default)s")
    parser.add_argument("--max_length", type=at_least(2), default=16384, help="tokens read; default %(default)s")
    parser.add_argument(
        "--layers", type=command_line.whole_numbers, help="to draw, such as 0,8,16,23; default four, evenly spaced"
    )
    parser.add_argument(
        "--heads", type=command_line.whole_numbers, help="to draw, of each layer; default the first four"
    )
    parser.add_argument(
        "--out", type=command_line.path, required=True, metavar="DIR", help="folder to write to; made if needed"
    )
    args = parser.parse_args()

    from forgetting_transformer.evaluation import forget_gates
    from forgetting_transformer.evaluation.held_out import find_heldout, read_tokens
    from forgetting_transformer.evaluation.workers import run

    def evaluate(model, workers):
        tokens = read_tokens(model, args.text, args.data_path, args.document, args.max_length)
        corpus = "" if args.text else find_heldout(args.data_path).resolve().name
        heads = forget_gates.evaluate(
            model,
            tokens,
            str(args.text) if args.text else f"held-out document {args.document} of {corpus}",
            args.out,
            layers=args.layers,
            heads=args.heads,
            precision=args.precision,
        )
        skipped = f"pruning skips {100 * sum(head.pruned for head in heads) / len(heads):.1f} % of the tiles"
        print(f"{len(tokens):,} tokens, {len(heads)} heads: {skipped}. Figures in {args.out}")

    run(args, evaluate)


if __name__ == "__main__":
    sys.exit(command_line.run(main))
