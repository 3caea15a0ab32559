#!/usr/bin/env python
"""Lets a language model rate the answers of pred.py from 1 to 10: results/EXP/MODEL/OpenAI_JUDGE_eval.json.

    cd eval/niah
    python eval.py --exp max_len_32k_easy --model fox-pro-760m-longcrawl64-48b --api-key $API_KEY
    python eval.py --exp max_len_32k_easy --model fox --judge_url http://localhost:8000/v1 --judge_model my-model

Without --api-key the key comes from OPENAI_API_KEY, where other users of the machine cannot read it. Ratings are stored
in ratings.jsonl beside the results; the same command repeats only failed requests. run_niah.py scores without a judge.
"""

import os
import sys
from pathlib import Path

from forgetting_transformer import command_line


def main() -> None:
    parser = command_line.make_parser(__doc__)
    parser.add_argument("--exp", type=command_line.name, required=True, help="as in pred.py")
    parser.add_argument("--model", type=command_line.name, required=True, help="as in pred.py")
    parser.add_argument("--api-key", help="key of the endpoint; default the environment variable OPENAI_API_KEY")
    parser.add_argument(
        "--judge_url",
        default=os.environ.get("OPENAI_BASE_URL") or "https://api.openai.com/v1",
        help="default the environment variable OPENAI_BASE_URL, or OpenAI's; here %(default)s",
    )
    parser.add_argument(
        "--judge_model", type=command_line.name, help="as the endpoint calls it; default config-eval.yaml's"
    )
    args = parser.parse_args()

    from forgetting_transformer.evaluation.models import folder_name
    from forgetting_transformer.evaluation.needle import ConfigFile, Judge, rate_answers

    config = ConfigFile(Path(__file__).with_name("config-eval.yaml"))
    place = Path(folder_name("--exp", args.exp), folder_name("--model", args.model))
    answers, results = (Path(config[key]) / place for key in ("pred_dir", "save_dir"))
    judge = Judge(
        args.judge_url,
        args.judge_model or config["model.model_name"],
        results / "ratings.jsonl",
        args.api_key or os.environ.get("OPENAI_API_KEY") or None,
    )
    question, reference = config["prompt.retrieval_question"], config["prompt.needle"].strip()
    file, failed = rate_answers(answers, results, question, reference, judge)
    print(file)
    if failed:
        sys.exit(f"{failed} answers have no rating, for the reasons above. The same command asks again")


if __name__ == "__main__":
    sys.exit(command_line.run(main))
