#!/usr/bin/env python
"""Measures the loss at every position of held-out documents.

    python eval/per_token_loss/run_per_token_loss.py --model_path output/hf/fox --data_path data/longcrawl64 \\
        --save_dir output/per_token_loss
    fabric run eval/per_token_loss/run_per_token_loss.py --devices 4 --model_path …     # or torchrun --nproc-per-node 4

MODEL_PATH is an export of save_model.py, a training run's output_dir, or a hub id. Writes SAVE_DIR/MODEL/results.json
and results.npz. The same command continues after a kill, on any number of GPUs. plot_per_token_loss.py draws results.
"""

import argparse
import sys

from forgetting_transformer import command_line
from forgetting_transformer.command_line import at_least, count, number
from forgetting_transformer.evaluation import options
from forgetting_transformer.ranges import TOKENS


def parse_args() -> argparse.Namespace:
    parser = command_line.make_parser(__doc__)
    options.add_model(parser)
    parser.add_argument(
        "--data_path", type=command_line.name, required=True, help="folder of a corpus, with heldout.zarr"
    )
    parser.add_argument(
        "--corpus",
        nargs="+",
        default=[],
        metavar=("NAME", "KEY=VALUE"),
        help="datamodule.name of a plug-in that reads DATA_PATH, and further keys of datamodule",
    )
    parser.add_argument("--save_dir", type=command_line.path, required=True, help="results go to SAVE_DIR/MODEL")
    parser.add_argument("--eval_len", type=at_least(2), help="tokens of a sequence; default whole documents")
    parser.add_argument(
        "--eval_tokens",
        type=token_count,
        help="tokens to evaluate on, or `all`; default 2147483648 (2^31) as in the paper, or all if there are fewer",
    )
    parser.add_argument(
        "--local_batch_size", type=count, default=1, help="sequences per forward pass of a process; default %(default)s"
    )
    parser.add_argument("--save_interval", type=count, default=64, help="batches between two writes of the state")
    parser.add_argument("--resume", action=argparse.BooleanOptionalAction, default=True, help="continue; the default")
    return parser.parse_args()


def token_count(text: str) -> int | str:
    """A number of tokens, or "all"."""
    return text if text == "all" else number(TOKENS, whole=True)(text)


def main() -> None:
    args = parse_args()

    from forgetting_transformer.analysis import position_loss
    from forgetting_transformer.evaluation import held_out, per_token_loss
    from forgetting_transformer.evaluation.workers import run

    def evaluate(model, workers):
        data = held_out.open_data(
            model,
            args.data_path,
            args.corpus,
            length=args.eval_len,
            tokens=None if args.eval_tokens == "all" else args.eval_tokens,
            at_most=per_token_loss.PAPER_TOKENS if args.eval_tokens is None else None,
        )
        folder = args.save_dir / model.name
        results = per_token_loss.evaluate(
            model,
            data,
            folder,
            workers,
            batch_size=args.local_batch_size,
            precision=args.precision,
            save_interval=args.save_interval,
            resume=args.resume,
        )
        if workers.is_first:
            table = position_loss.slope_table([(model.name, results)])
            loss = results[f"val/loss_avg_len_{data.length}"]
            said = f"{loss:.4f} nats per token ({results['eval_tokens']:,} tokens)"
            print(f"loss over {data.length:,} positions: {said}; {folder}/results.json")
            print(f"\n{table.markdown()}")

    run(args, evaluate)


if __name__ == "__main__":
    sys.exit(command_line.run(main))
