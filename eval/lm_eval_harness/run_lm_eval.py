#!/usr/bin/env python
"""Runs the eleven tasks of the paper's Table 1, zero-shot, with lm-evaluation-harness (pip install -e ".[eval]").

    python eval/lm_eval_harness/run_lm_eval.py --model_path output/hf/fox --save_dir output/lm_eval --batch_size 8
    torchrun --nproc-per-node 4 eval/lm_eval_harness/run_lm_eval.py --model_path runs/fox --save_dir output/lm_eval
    python eval/lm_eval_harness/table_lm_eval.py output/lm_eval/*                        # Markdown and LaTeX

MODEL_PATH is an export of save_model.py, a training run's output_dir, or a hub id. SAVE_DIR/MODEL/results.json receives
lm_eval's results by task, after each task. The same command continues with the missing tasks. The data comes from the
Hugging Face hub. Without a network, an error says what to download and where to put it.
"""

import sys

from forgetting_transformer import command_line
from forgetting_transformer.command_line import count
from forgetting_transformer.console import how_to_install
from forgetting_transformer.evaluation import options


def main() -> None:
    parser = command_line.make_parser(__doc__)
    options.add_model(parser)
    parser.add_argument("--save_dir", type=command_line.path, required=True, help="results go to SAVE_DIR/MODEL")
    parser.add_argument("--tasks", help="lm_eval's names with commas between them; default the eleven of the paper")
    parser.add_argument(
        "--include_path", type=command_line.path, help="folder of your own task files; they can run Python"
    )
    parser.add_argument("--max_len", type=count, help="longest sequence, tokens; default the training length")
    parser.add_argument("--batch_size", type=count, default=1, help="sequences per forward pass; default %(default)s")
    parser.add_argument("--limit", type=count, help="examples of each task, for a quick test; default: all")
    args = parser.parse_args()

    from forgetting_transformer.analysis.published import TASKS
    from forgetting_transformer.evaluation.workers import run

    try:
        from forgetting_transformer.evaluation import harness
    except ImportError as error:
        sys.exit(f"error: {error}. lm-evaluation-harness is an extra: {how_to_install('eval')}")

    def evaluate(model, workers):
        folder = args.save_dir / model.name
        harness.evaluate(
            model,
            folder,
            workers,
            tasks=args.tasks.split(",") if args.tasks else TASKS,
            max_length=args.max_len,
            batch_size=args.batch_size,
            precision=args.precision,
            limit=args.limit,
            include_path=args.include_path,
        )
        if workers.is_first:
            table = (folder / "table.md").read_text(encoding="utf-8")
            print(f"{folder}/results.json\n\n{table}", end="")

    run(args, evaluate)


if __name__ == "__main__":
    sys.exit(command_line.run(main))
