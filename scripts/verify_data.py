#!/usr/bin/env python
"""Checks a corpus on disk before training on it: metadata, missing chunks, decoding, token ids, rows of zeros."""

import argparse
import sys

from forgetting_transformer import command_line
from forgetting_transformer.command_line import count, number
from forgetting_transformer.data.errors import DataError
from forgetting_transformer.data.tools.verify import verify
from forgetting_transformer.data.vocabulary import GPT2_VOCAB_SIZE, read_manifest
from forgetting_transformer.ranges import Range

EPILOG = """\
examples:
  scripts/verify_data.py data/longcrawl64
  scripts/verify_data.py data/longcrawl64/heldout.zarr --share 0.05
  scripts/verify_data.py data/longcrawl64/train.zarr --missing_chunks skip

what is checked:
  metadata        a Zarr array (documents, doc_len) of uint16 or uint32, with codecs that are safe to run
  presence        a file for every chunk; which row-chunks have them all
  contents        every file (or --share of them, evenly spread) decodes to a chunk of the right shape; ids are below
                  the vocabulary's size; no document is all zeros within a file, as Zarr returns for missing chunks
  checksums       files match train.sha256, heldout.sha256. A sound array without such a list gets one: from then on
                  training compares every chunk with it
  content hash    all tokens match manifest.json (scripts/prepare_data.py writes it)

Exit code: 0 if the data can be trained on, 1 if not.
"""


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = command_line.make_parser(__doc__, EPILOG)
    parser.add_argument(
        "paths",
        nargs="+",
        type=command_line.path,
        metavar="PATH",
        help="folders of a corpus, or arrays in them (NAME.zarr)",
    )
    parser.add_argument(
        "--missing_chunks",
        choices=("error", "skip"),
        default="error",
        help="skip: the copy is sparse on purpose, so holes are counted and are no error (default: error)",
    )
    parser.add_argument(
        "--share",
        type=number(Range(0, 1, above=True)),
        default=1.0,
        metavar="P",
        help="decode this share of the files (default: 1, all)",
    )
    parser.add_argument(
        "--vocab_size", type=count, metavar="N", help="default: from manifest.json, else GPT-2's 50,257"
    )
    parser.add_argument("--workers", type=count, default=4, metavar="N", help="threads (default: 4)")
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> int:
    args = parse_arguments(arguments)
    sound = True
    for path in args.paths:
        arrays = [path] if path.suffix == ".zarr" else sorted(path.glob("*.zarr"))
        if not arrays:
            raise DataError(f"no arrays (NAME.zarr) in {path}; give a corpus's folder, as in data/python, or an array")
        for array in arrays:
            vocab_size = args.vocab_size or read_manifest(array.parent).get("vocab_size", GPT2_VOCAB_SIZE)
            table, is_sound = verify(array, vocab_size, args.missing_chunks, args.share, args.workers)
            print(table)
            sound &= is_sound
    print("sound" if sound else "NOT sound: see the lines with !")
    return 0 if sound else 1


if __name__ == "__main__":
    sys.exit(command_line.run(main))
