#!/usr/bin/env python
"""Fetches LongCrawl64, or any part of it, from a mirror: OUT/heldout.zarr and OUT/train.zarr."""

import argparse
import re
import sys
from pathlib import Path

from forgetting_transformer import command_line
from forgetting_transformer.command_line import count
from forgetting_transformer.data.tools.download import MIRROR, SPLITS, download

EPILOG = f"""\
examples:
  What evaluation needs, about 6 GB:
    scripts/download_longcrawl64.py heldout

  See what the source has of train, and how large a quarter of that is, without fetching it:
    scripts/download_longcrawl64.py train --documents 25% --dry_run

  100,000 documents for training with sequences of 16,384 tokens, a quarter of their bytes:
    scripts/download_longcrawl64.py train --documents 100000 --tokens 16384

  From another place:
    scripts/download_longcrawl64.py heldout train --source s3://my-bucket/longcrawl64
    scripts/download_longcrawl64.py train --source hf://datasets/OWNER/NAME@REVISION

sources:
  The publisher's bucket is gone. The default source is a public mirror at a fixed revision,
    {MIRROR}
  whose heldout is complete. Its train has about a tenth of the row-chunks (2,048 documents each), scattered, some of
  them with gaps. Only row-chunks with every chunk asked for are taken. Train on such a copy with
  datamodule.missing_chunks=skip; without it a missing chunk is an error.

  Killed? The same command continues. Every file is checked: its size, its checksum where the source states one, and
  that it can be decoded. OUT/<split>.sha256 lists what was checked; scripts/verify_data.py checks again.

More: docs/data.md
"""


def documents(text: str) -> int | float:
    """'100000' -> that many documents, '25%' -> 0.25, that share of the source's."""
    if match := re.fullmatch(r"(\d+(?:\.\d+)?)\s*%", text):
        share = float(match[1]) / 100
        if 0 < share <= 1:
            return share
    elif re.fullmatch(r"[\d_]+", text) and int(text) > 0:
        return int(text)
    raise argparse.ArgumentTypeError(
        f"{text!r} is neither a number of documents such as 100000 nor a share such as 25%"
    )


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = command_line.make_parser(__doc__, EPILOG)
    parser.add_argument("splits", nargs="+", choices=SPLITS, metavar="SPLIT", help="heldout, train, or both")
    parser.add_argument(
        "--out",
        type=command_line.path,
        default=Path("data/longcrawl64"),
        help="folder for the arrays (default: data/longcrawl64, so that data_dir=data trains on it)",
    )
    parser.add_argument(
        "--documents",
        type=documents,
        metavar="N|P%",
        help="fetch N documents, or P %% of the source's; rounded up to whole row-chunks (default: all)",
    )
    parser.add_argument(
        "--tokens",
        type=count,
        metavar="N",
        help="fetch only the first N tokens of each document, a multiple of 2048 (default: all 65,536)",
    )
    parser.add_argument(
        "--source",
        type=command_line.name,
        default=MIRROR,
        metavar="URL",
        help="hf://datasets/OWNER/NAME[@REVISION][/FOLDER], https://, s3://, gs:// or any other URL of fsspec; "
        "SPLIT.zarr lies below it (default: the mirror named below)",
    )
    parser.add_argument("--workers", type=count, default=16, metavar="N", help="files fetched at a time (default: 16)")
    parser.add_argument("--dry_run", action="store_true", help="only print what would be fetched")
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> None:
    args = parse_arguments(arguments)
    for split in args.splits:
        download(args.source, split, args.out, args.documents, args.tokens, args.workers, args.dry_run)


if __name__ == "__main__":
    sys.exit(command_line.run(main, "interrupted: the same command continues"))
