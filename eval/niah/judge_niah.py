#!/usr/bin/env python
"""Lets a language model behind an OpenAI-compatible endpoint rate the answers of run_niah.py from 1 to 10.

    export OPENAI_API_KEY=…
    python eval/niah/judge_niah.py output/niah/fox/easy --judge_model gpt-4o-2024-08-06
    python eval/niah/judge_niah.py output/niah/fox/easy --judge_url http://localhost:8000/v1 --judge_model my-model

Writes RESULTS/judge.json and judge.png. Ratings are stored in RESULTS/judge_cache.jsonl; the same command repeats only
failed requests.
"""

import argparse
import math
import os
import sys

from forgetting_transformer import command_line
from forgetting_transformer.command_line import count


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "results", type=command_line.path, help="folder with scores.json: SAVE_DIR/MODEL/MODE of run_niah.py"
    )
    parser.add_argument(
        "--judge_url",
        default=os.environ.get("OPENAI_BASE_URL") or "https://api.openai.com/v1",
        help="default the environment variable OPENAI_BASE_URL, or OpenAI's; here %(default)s",
    )
    parser.add_argument("--judge_model", required=True, help="as the endpoint calls it")
    parser.add_argument(
        "--judge_key_variable", default="OPENAI_API_KEY", help="environment variable with the key; default %(default)s"
    )
    parser.add_argument("--tries", type=count, default=5, help="requests for one rating; default %(default)s")
    args = parser.parse_args()

    from forgetting_transformer.analysis import AnalysisError
    from forgetting_transformer.evaluation import niah
    from forgetting_transformer.evaluation.judge import Judge, key_from_environment
    from forgetting_transformer.evaluation.models import EvaluationError

    key = key_from_environment(args.judge_key_variable)
    judge = Judge(args.judge_url, args.judge_model, args.results / "judge_cache.jsonl", key, args.tries)
    try:
        failed, mean = niah.judge_records(args.results, judge)
        rated = "no answer was rated" if math.isnan(mean) else f"mean rating {mean:.2f} of 10"
        print(f"{rated}; {args.results / 'judge.png'}")
    except (EvaluationError, AnalysisError) as error:
        sys.exit(f"error: {error}")
    if failed:
        sys.exit(f"{failed} answers have no rating; {judge.cache} says why. Run the same command again to ask for them")


if __name__ == "__main__":
    sys.exit(command_line.run(main))
