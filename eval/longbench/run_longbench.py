#!/usr/bin/env python
"""Answers the fourteen English sets of LongBench that the paper uses, and scores them (pip install -e ".[eval]").

    python eval/longbench/run_longbench.py --model_path output/hf/fox --max_length 15500 --save_dir output/longbench
    torchrun --nproc-per-node 4 eval/longbench/run_longbench.py --model_path runs/fox --save_dir output/longbench
    python eval/longbench/table_longbench.py output/longbench/*                          # Markdown and LaTeX

MODEL_PATH is an export of save_model.py, a training run's output_dir, or a hub id. SAVE_DIR/MODEL receives the answers
in pred/<set>.*.jsonl and the scores in results.json. The same command computes only missing answers, on any number of
GPUs. The default of --max_length is the training length minus the tokens of the answer. The data comes from the
Hugging Face hub, or from --data_dir.
"""

import sys

from forgetting_transformer import command_line
from forgetting_transformer.command_line import at_least
from forgetting_transformer.evaluation import options


def main() -> None:
    parser = command_line.make_parser(__doc__)
    options.add_model(parser)
    options.add_longbench(parser)
    parser.add_argument("--save_dir", type=command_line.path, required=True, help="results go to SAVE_DIR/MODEL")
    parser.add_argument("--max_length", type=at_least(4), help="tokens of a prompt; longer ones lose their middle")
    args = parser.parse_args()

    from forgetting_transformer.evaluation import longbench
    from forgetting_transformer.evaluation.workers import run

    def evaluate(model, workers):
        folder = args.save_dir / model.name
        longbench.evaluate(
            model,
            folder,
            workers,
            sets=longbench.choose_sets(args.sets),
            data=args.data_dir,
            max_length=args.max_length,
            precision=args.precision,
            limit=args.limit,
        )
        if workers.is_first:
            table = (folder / "table.md").read_text(encoding="utf-8")
            print(f"{folder}/results.json\n\n{table}", end="")

    run(args, evaluate)


if __name__ == "__main__":
    sys.exit(command_line.run(main))
