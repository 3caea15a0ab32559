#!/usr/bin/env python
"""Draws the forget gates and attention maps of a FoX on one text.

    python eval/forget_gates/run_forget_gates.py --model_path output/hf/fox --text essay.txt --out output/gates
    python eval/forget_gates/run_forget_gates.py --model_path runs/fox --data_path data/longcrawl64 --document 3 \\
        --max_length 16384 --layers 0,8,16,23 --heads 0,1,2,3 --over_training --out output/gates

MODEL_PATH is an export of save_model.py, a training run's output_dir, or a hub id. OUT receives:

gates.png       forget-gate matrix F of the chosen heads: the share of token j's weight that remains at token i
attention.png   their attention weights; weights below --threshold stay white
memory.png      memory length of every head: tokens after which its decay reaches 1/e, median over the text
heads.json      memory length, and the share of tiles that pruning skips, for every head
training.png    with --over_training and a run's output_dir: both at each of its checkpoints (also training.json)
"""

import argparse
import logging
import sys
from pathlib import Path

from forgetting_transformer import command_line
from forgetting_transformer.command_line import at_least, log_of_small, number, step
from forgetting_transformer.ranges import Range


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--model_path", type=command_line.name, required=True, help="exported folder, output_dir of a run, or hub id"
    )
    command_line.add_plugins(parser)
    parser.add_argument("--step", type=step, help="training tokens of a run's checkpoint; default the newest valid one")
    parser.add_argument("--tokenizer", type=command_line.name, help="folder or hub id, for a model without a tokenizer")
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--text", type=command_line.path, help="a text file")
    source.add_argument(
        "--data_path", type=command_line.name, help="folder of a corpus with heldout.zarr: a document of it"
    )
    parser.add_argument(
        "--dataset", type=command_line.name, default="longcrawl64", help="the corpus, if --data_path holds several"
    )
    parser.add_argument("--document", type=at_least(0), default=0, help="its number; default %(default)s")
    parser.add_argument("--max_length", type=at_least(2), default=16384, help="tokens read; default %(default)s")
    parser.add_argument(
        "--layers", type=command_line.whole_numbers, help="to draw, such as 0,8,16,23; default four, evenly spaced"
    )
    parser.add_argument(
        "--heads", type=command_line.whole_numbers, help="to draw, of each layer; default the first four"
    )
    parser.add_argument("--pixels", type=at_least(8), default=256, help="side of a picture; default %(default)s")
    parser.add_argument(
        "--threshold",
        type=number(Range(0, 1)),
        default=0.5,
        help="attention weights below it are not drawn; default %(default)s",
    )
    parser.add_argument(
        "--log_pruning_tolerance",
        type=log_of_small,
        default=-10.0,
        help="ln ε of pruning, for models that do not set it; default %(default)s",
    )
    parser.add_argument(
        "--over_training", action="store_true", help="memory lengths and pruned shares at every checkpoint of a run"
    )
    parser.add_argument("--precision", default="auto", choices=["auto", "bf16", "fp32"])
    parser.add_argument("--device", help="cpu, cuda or cuda:N; default: a GPU if available")
    parser.add_argument(
        "--out", type=command_line.path, required=True, metavar="DIR", help="folder to write to; made if needed"
    )
    return parser.parse_args()


def main() -> None:
    args = parse_args()
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(message)s")

    import transformers

    from forgetting_transformer.analysis import AnalysisError
    from forgetting_transformer.data import DataError
    from forgetting_transformer.evaluation.models import EvaluationError

    transformers.utils.logging.disable_progress_bar()
    try:
        run(args)
    except (AnalysisError, EvaluationError, DataError) as error:
        sys.exit(f"error: {error}")


def run(args: argparse.Namespace) -> None:
    import numpy as np
    import torch

    from forgetting_transformer.analysis import evaluations
    from forgetting_transformer.analysis.plots import heatmaps
    from forgetting_transformer.analysis.plots.style import format_tokens
    from forgetting_transformer.evaluation import forget_gates
    from forgetting_transformer.evaluation.generation import check_settings
    from forgetting_transformer.evaluation.models import EvaluationError, load_model, pick_device, precision_context
    from forgetting_transformer.evaluation.texts import read_tokens
    from forgetting_transformer.files import write_json

    more = ["gates.png", "attention.png", "memory.png", "heads.json"]
    more += ["training.png", "training.json"] if args.over_training else []
    evaluations.check_folder(args.out, "forget_gates", *more)
    source = str(Path(args.model_path).resolve()) if Path(args.model_path).exists() else args.model_path
    check_settings(args.out, {"model": source}, "choose another --out, or delete the folder")
    device = pick_device(args.device)
    model = load_model(
        args.model_path, step=args.step, tokenizer=args.tokenizer, device=device, precision=args.precision
    )
    available = forget_gates.attention_layers(model.model)
    spaced = np.linspace(0, len(available) - 1, min(4, len(available))).round().astype(int)
    layers = args.layers or [list(available)[i] for i in spaced]
    num_heads = next(iter(available.values())).num_heads
    heads = args.heads or list(range(min(4, num_heads)))
    for head in heads:
        if not 0 <= head < num_heads:
            raise EvaluationError(f"--heads={head}: the model's heads are 0 to {num_heads - 1}")
    for layer in layers:
        if layer not in available:
            known = ", ".join(map(str, available))
            raise EvaluationError(f"--layers={layer}: the model's forgetting-attention layers are {known}")
    tokens = read_tokens(model, args.text, args.data_path, args.dataset, args.document, args.max_length)
    ids = torch.from_numpy(tokens).to(model.device)

    gates, maps, reports = {}, {}, []

    def use(inputs: forget_gates.AttentionInputs) -> None:
        reports.extend(forget_gates.report_heads(inputs, args.log_pruning_tolerance))
        for head in heads if inputs.layer in layers else ():
            key = (inputs.layer, head)
            gates[key] = forget_gates.gate_matrix(inputs.log_fgate_HT[head], args.pixels).cpu().numpy()
            maps[key] = forget_gates.attention_map(inputs, head, args.pixels).cpu().numpy()

    with precision_context(args.precision, model.device):
        forget_gates.visit(model.model, ids, list(available), use)

    by_head = {(report.layer, report.head): report for report in reports}
    titles = {}
    for layer, head in gates:
        report = by_head[layer, head]
        memory = f"{'≥ ' * report.memory_is_bound}{report.memory:,.0f}" if report.memory >= 1 else "<1"
        memory += " token" if report.memory <= 1 else " tokens"
        titles[layer, head] = f"layer {layer}, head {head}\nmemory {memory}"
    name = Path(args.model_path).resolve().name
    trained = [] if model.train_tokens is None else [f"after {format_tokens(model.train_tokens)} training tokens"]
    text = str(args.text) if args.text else f"held-out document {args.document} of {Path(args.data_path).name}"
    conditions = [*trained, f"on one text of {len(ids):,} tokens, {text}"]
    pixels = [f"a pixel is the largest of its entries, {args.pixels} of them a side"] * (len(ids) > args.pixels)
    columns = ([r.layer for r in reports], [r.memory for r in reports], [r.memory_is_bound for r in reports])
    pruned = sum(report.pruned for report in reports) / len(reports)
    summary = {
        "model": model.source,
        "tokens": len(ids),
        "train_tokens": model.train_tokens,
        "pruned": pruned,
        "heads": [vars(report) for report in reports],
    }

    def draw_memory(path: Path) -> None:
        heatmaps.heads_by_layer(*columns, path, f"Memory length of every head of {name}", conditions)

    def write_more(new: Path) -> None:
        draw_memory(new / "memory.png")
        write_json(new / "heads.json", summary)
        made_with = conditions + pixels
        title, label = f"Forget gates of {name}", "decay $F_{ij}$"
        heatmaps.head_matrices(gates, new / "gates.png", len(ids), label, titles, title=title, conditions=made_with)
        title, label = f"Attention of {name}", f"attention weight $A_{{ij}}$ (below {args.threshold:g}: white)"
        heatmaps.head_matrices(maps, new / "attention.png", len(ids), label, titles, args.threshold, title, made_with)

    evaluation = evaluations.from_gates(summary)
    evaluations.write_evaluation(evaluation, args.out, evaluations.number_table(evaluation), draw_memory, write_more)
    print(
        f"{len(ids):,} tokens, {len(reports)} heads: pruning skips {100 * pruned:.1f} % of "
        f"the tiles. Figures in {args.out}"
    )

    if args.over_training:
        history = forget_gates.heads_over_training(args.model_path, ids, args.log_pruning_tolerance, args.precision)
        memory, is_bound = {}, {}
        for report in (report for entry in history for report in entry["heads"]):
            memory.setdefault((report["layer"], report["head"]), []).append(report["memory"])
            is_bound.setdefault((report["layer"], report["head"]), []).append(report["memory_is_bound"])
        tokens = [entry["train_tokens"] for entry in history]
        shares = [np.mean([report["pruned"] for report in entry["heads"]]) for entry in history]
        title = f"Memory length of every head of {name}, over training"
        with evaluations.writing(args.out, evaluation.kind) as new:
            write_json(new / "training.json", history)
            heatmaps.heads_over_training(
                tokens, memory, is_bound, shares, new / "training.png", title, conditions[len(trained) :]
            )


if __name__ == "__main__":
    sys.exit(command_line.run(main))
