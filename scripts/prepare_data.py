#!/usr/bin/env python
"""Turns your own texts into the arrays that training reads: OUT/train.zarr, OUT/heldout.zarr, OUT/tokenizer."""

import argparse
import os
import re
import sys

from forgetting_transformer import command_line
from forgetting_transformer.command_line import count, number, seed
from forgetting_transformer.data.prepare import CorpusSettings, prepare_corpus
from forgetting_transformer.data.prepare.settings import (
    DEFAULT_DEDUP,
    DEFAULT_DEDUP_WORDS,
    DEFAULT_HELDOUT_FRACTION,
)
from forgetting_transformer.ranges import Range

EPILOG = """\
examples:
  Python sources, with a small vocabulary trained on them:
    scripts/prepare_data.py ~/projects --glob '*.py' --tokenizer train:4096 --doc_len 4096 --out data/python

  JSON Lines and Parquet, recognised by their suffix; the text is under the key "content":
    scripts/prepare_data.py crawl/*.jsonl.gz books.parquet --text_field content --tokenizer gpt2 --out data/crawl

  A data set from the Hugging Face hub, the first 10 GB of it, without any learned tokenizer:
    scripts/prepare_data.py --dataset HuggingFaceFW/fineweb-edu --dataset_config sample-10BT \\
        --max_bytes 10GB --tokenizer bytes --out data/fineweb

Texts are joined, an end-of-text token after each, and cut into rows of --doc_len tokens. Whole folders or files are
held out, so heldout.zarr shares no text with train.zarr.

Killed? The same command continues. Finished? The same command does nothing. The arrays do not depend on --workers.

More, also on what is read and what --force does: docs/data.md
"""

UNITS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12}


def number_of_bytes(text: str) -> int:
    """'30MB' -> 30_000_000; also plain numbers, and K, G, T."""
    match = re.fullmatch(r"(\d[\d_]{,20}(?:\.\d+)?)\s*([KMGT]?)B?", text.strip(), flags=re.IGNORECASE)
    amount = int(float(match[1].rstrip("_")) * UNITS[match[2].upper()]) if match else 0
    if amount < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not an amount of bytes such as 500000, 30MB or 1.5GB")
    return amount


def available_cpus() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = command_line.make_parser(__doc__, EPILOG)
    add = parser.add_argument_group("input").add_argument
    add(
        "inputs",
        type=command_line.name,
        nargs="*",
        help="files and folders; .jsonl, .jsonl.gz and .parquet hold records, all else is text",
    )
    add(
        "--glob",
        action="append",
        default=[],
        metavar="PATTERN",
        dest="include",
        help="take only these files from folders, for example '*.py' (repeatable; with a slash: path below the input)",
    )
    add(
        "--exclude",
        action="append",
        default=[],
        metavar="PATTERN",
        help="leave out files and folders, for example tests (repeatable)",
    )
    add("--text_field", default="text", metavar="KEY", help="JSON key or Parquet column with the text (default: text)")
    add("--dataset", type=command_line.name, metavar="ID", help="a Hugging Face data set instead of files")
    add("--dataset_config", metavar="NAME", help="its configuration, where it has several")
    add("--split", default="train", dest="dataset_split", metavar="NAME", help="its split (default: train)")
    add("--max_bytes", type=number_of_bytes, metavar="N", help="stop after this much text, for example 30MB")
    add("--keep_duplicates", action="store_true", help="keep texts that are equal to an earlier one")
    add(
        "--dedup",
        type=number(Range(0.5, 1)),
        nargs="?",
        const=DEFAULT_DEDUP,
        metavar="SIMILARITY",
        help="also leave out texts that resemble an earlier one: the share of runs of words that two texts have in "
        f"common, estimated by MinHash, is at least SIMILARITY (default: {DEFAULT_DEDUP})",
    )
    add(
        "--dedup_words",
        type=count,
        metavar="N",
        help=f"words of such a run (default: {DEFAULT_DEDUP_WORDS})",
    )

    add = parser.add_argument_group("output").add_argument
    add("--out", required=True, type=command_line.path, help="folder for the arrays, the tokenizer and manifest.json")
    add(
        "--tokenizer",
        type=command_line.name,
        default="train:32768",
        metavar="NAME",
        help="hub id or local folder; bytes; or train:N, byte-level BPE of N ids trained on the input "
        "(default: train:32768); more than 65,536 ids are stored as uint32, else as uint16",
    )
    add("--doc_len", type=count, default=65536, metavar="TOKENS", help="tokens per row (default: 65536)")
    add(
        "--heldout_fraction",
        type=number(Range(0, 1, above=True)),
        metavar="SHARE",
        help=f"about this share of the rows is held out (default: {DEFAULT_HELDOUT_FRACTION})",
    )
    add("--heldout_docs", type=count, metavar="ROWS", help="or exactly this many rows")
    add("--seed", type=seed, default=0, help="seed of the order of rows and of the held-out choice (default: 0)")
    add(
        "--chunk_docs",
        type=count,
        metavar="ROWS",
        help="rows per chunk (default: 16 to 2048, by the size of the corpus; LongCrawl64 has 2048)",
    )
    add("--chunk_tokens", type=count, metavar="TOKENS", help="tokens per chunk (default: 2048, or --doc_len if less)")

    add = parser.add_argument_group("running").add_argument
    add("--workers", type=count, default=available_cpus(), metavar="N", help="processes (default: one per CPU)")
    add(
        "--force",
        action="store_true",
        help="build again, and replace the corpus in OUT once the new one is complete; never files of others",
    )
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> None:
    options = vars(parse_arguments(arguments))
    out, workers, force = options.pop("out"), options.pop("workers"), options.pop("force")
    for name in ("inputs", "include", "exclude"):
        options[name] = tuple(options[name])
    prepare_corpus(CorpusSettings(**options), out, workers, force)


if __name__ == "__main__":
    sys.exit(command_line.run(main, "interrupted: the same command continues"))
