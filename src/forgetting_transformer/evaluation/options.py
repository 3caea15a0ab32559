"""Options that the scripts under eval/ share. Quick to import."""

import argparse

from forgetting_transformer import command_line
from forgetting_transformer.command_line import at_least, step


def add_model(parser: argparse.ArgumentParser, name_required: bool = False) -> None:
    """Adds the options of the model and its evaluation, which `workers.run` reads."""
    parser.add_argument(
        "--model_path", type=command_line.name, required=True, help="exported folder, output_dir of a run, or hub id"
    )
    command_line.add_plugins(parser)
    default = "" if name_required else "; default the last part of --model_path"
    parser.add_argument(
        "--model", type=command_line.name, required=name_required, help=f"name of the results' folder{default}"
    )
    parser.add_argument("--step", type=step, help="training tokens of a run's checkpoint; default the newest valid one")
    parser.add_argument("--tokenizer", type=command_line.name, help="folder or hub id, for a model without a tokenizer")
    parser.add_argument(
        "--precision", default="auto", choices=["auto", "bf16", "fp32"], help="auto: bf16 autocast on CUDA, else fp32"
    )
    device = parser.add_mutually_exclusive_group()
    device.add_argument("--device", help="cpu, cuda or cuda:N; default: a GPU if available")
    device.add_argument("--device_id", type=at_least(0), help="number of the GPU")
