"""The options that eval/longbench/pred.py and run_longbench.py share, and what they mean. Quick to import."""

import argparse

from forgetting_transformer import command_line
from forgetting_transformer.command_line import at_least, count, step


def add_options(parser: argparse.ArgumentParser) -> None:
    """Adds everything but `--model` and where results go."""
    parser.add_argument(
        "--model_path", type=command_line.name, required=True, help="exported folder, output_dir of a run, or hub id"
    )
    command_line.add_plugins(parser)
    parser.add_argument(
        "--max_length",
        type=at_least(4),
        help="tokens of a prompt (the paper: 15500 for models trained at 16384); longer ones lose their middle",
    )
    parser.add_argument("--e", action="store_true", help="LongBench-E: scores by ranges of lengths")
    parser.add_argument("--sets", help="separated by commas, or `all`; default: the paper's")
    parser.add_argument(
        "--data_dir",
        type=command_line.path,
        help="LongBench's data.zip, or a folder with it or with <set>.jsonl; default the hub",
    )
    parser.add_argument("--step", type=step, help="training tokens of a run's checkpoint; default the newest valid one")
    parser.add_argument("--tokenizer", type=command_line.name, help="folder or hub id, for a model without a tokenizer")
    parser.add_argument("--limit", type=count, help="examples of each set, for a quick test; default: all")
    parser.add_argument("--precision", default="auto", choices=["auto", "bf16", "fp32"])
    parser.add_argument("--device", help="cpu, cuda or cuda:N; default: a GPU if available")
