"""A manifest in words."""

import math
from collections import Counter
from typing import Any


def summary_lines(manifest: dict[str, Any]) -> list[str]:
    """What was made and what was left out, for people."""
    train, heldout = manifest["arrays"]["train"], manifest["arrays"]["heldout"]
    entropy, roundtrip = manifest["unigram_entropy_nats"], manifest["tokenizer"]["roundtrip"]
    lines = [
        f"{manifest['texts']:,} texts, {manifest['bytes']:,} bytes in {manifest['seconds']:.0f} s",
        f"train.zarr    {train['documents']:,} documents × {manifest['doc_len']:,} = {train['tokens']:,} tokens",
        f"heldout.zarr  {heldout['documents']:,} documents × {manifest['doc_len']:,} = {heldout['tokens']:,} tokens, "
        f"{manifest['split']['groups_heldout']:,} of {manifest['split']['groups']:,} source groups",
        f"tokenizer     {manifest['tokenizer']['name']}: {manifest['vocab_size']:,} ids, "
        f"{manifest['bytes_per_token']:.2f} bytes per token, unigram entropy {entropy:.3f} nats per token "
        f"(perplexity {math.exp(entropy):,.0f})",
    ]
    dropped = Counter(manifest["dropped"])
    for name, count in manifest["dropped_tokens"].items():
        dropped[f"tokens at the end of {name} that fill no row"] = count
    lines += [f"dropped       {count:,} × {reason}" for reason, count in dropped.items() if count]
    if manifest["stopped_early"]:
        lines.append(f"stopped at --max_bytes {manifest['settings']['max_bytes']:,}; the rest was not read")
    if roundtrip["lossy"]:
        lines.append(
            f"WARNING: the tokenizer is lossy: {roundtrip['lossy']:,} of {roundtrip['checked']:,} "
            "samples decode to another text"
        )
    if manifest["split"]["a_text_is_on_both_sides"]:
        lines.append(
            "WARNING: the texts are too large to hold out whole: the end of one text is in heldout.zarr, "
            "its beginning in train.zarr"
        )
    return lines
