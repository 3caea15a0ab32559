"""The card of an exported model: README.md, from the files of its run.

A card is read by strangers. It shows the settings of a short list, and of a path or URL only the last part.
"""

import logging
import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from forgetting_transformer import metric_names as names
from forgetting_transformer.analysis.runs import TRAIN_WINDOW, Run
from forgetting_transformer.command_line import one_line
from forgetting_transformer.files import flatten, write_atomically

log = logging.getLogger(__name__)

CARD = "README.md"
_SETTINGS = (
    "model.name", "model.label", "datamodule.dataset", "datamodule.train_batch_size", "datamodule.train_batch_len",
    "optimizer.name", "optimizer.lr", "schedule.name", "seed", "fabric.precision", "fork_dir", "fork_step",
)  # fmt: skip
#: A path or a URL. The names of a run and of a model on a hub may have a slash in them.
_PLACE = re.compile(r"(?:\w+:/|~|\.{1,2})?/[^?]*")
_TEXT = """---
library_name: transformers
pipeline_tag: text-generation
tags: [forgetting-transformer]
---

# {title}

A language model with {parameters:,} parameters, trained on {tokens:,} tokens. It is a base model: it continues text and
has not learnt to follow instructions. Nothing but the losses below was measured for this card.

## How to load it

Install the Python package `forgetting-transformer`, which has the model classes, from a clone of its repository. Then:

```python
{snippet}```

## Losses

{losses}

## Training

| | |
|---|---|
{rows}

## Licence

None has been chosen while the lines above name none (`license: …`); until then nobody else may assume a right to use
this model. Its publisher may choose one, with regard to the corpus and the tokenizer.
"""


def write(
    folder: Path,
    run_folder: Path,
    config: Mapping[str, Any],
    origin: Mapping[str, Any],
    parameters: int,
    has_tokenizer: bool,
) -> None:
    """Writes the card into `folder`. An export is whole without it: metrics that cannot be read cost the card.

    Args:
        config: the run's settings, as the checkpoint has them.
        origin: what the export records of the weights (folder.py): training tokens, plug-ins, the weights' source.
    """
    tokens, known = origin["checkpoint"], {key: public(value) for key, value in flatten(dict(config)).items()}
    source = ", ".join(map(str, origin.get("weights_from", {}).values()))
    rows = {key: known.get(key) for key in _SETTINGS} | {"init_from": source}
    try:
        losses = _losses(Run(run_folder, "", until=tokens), tokens)
    except ValueError as error:
        log.warning("no model card was written: %s", one_line(error))
        return
    text = _TEXT.format(
        title=known.get("tag") or known.get("model.name"),
        parameters=parameters,
        tokens=tokens,
        snippet=snippet(origin.get("plugins", ()), known.get("datamodule.dataset"), has_tokenizer),
        losses=losses,
        rows="\n".join(f"| {name} | {_cell(value)} |" for name, value in rows.items() if value not in (None, "")),
    )
    write_atomically(folder / CARD, text)


def snippet(plugins: Sequence[str], dataset: str | None, has_tokenizer: bool) -> str:
    """Python code that loads the model and, with a tokenizer, lets it write."""
    lines = ["import forgetting_transformer.model  # registers the model classes"]
    if dataset == "longcrawl64":
        lines.append("import forgetting_transformer.tokenizer  # registers LongCrawl64's tokenizer")
    lines += [f"import {name}  # a plug-in that the model needs" for name in plugins]
    lines += [
        "from transformers import AutoModelForCausalLM, AutoTokenizer",
        "",
        'model_id = "."  # the folder of this file',
        "model = AutoModelForCausalLM.from_pretrained(model_id)",
    ]
    if not has_tokenizer:
        return "\n".join([*lines, "# There is no tokenizer here: the model takes token ids.", ""])
    lines += [
        "tokenizer = AutoTokenizer.from_pretrained(model_id)",
        'prompt = tokenizer("One day", return_tensors="pt")',
        "output_ids = model.generate(**prompt, max_new_tokens=32)",
        "print(tokenizer.decode(output_ids[0], skip_special_tokens=True))",
    ]
    return "\n".join([*lines, ""])


def public(value: Any) -> Any:
    """A setting for strangers: of a path or URL its last part, without its query."""
    if isinstance(value, Mapping):
        return {key: public(inner) for key, inner in value.items()}
    place = _PLACE.match(value) if isinstance(value, str) else None
    return place[0].rstrip("/").rpartition("/")[2] if place else value


def _losses(run: Run, tokens: int) -> str:
    """
    Raises:
        ValueError: the run's metrics cannot be read.
    """
    lines = []
    if run.heldout.tokens.size:
        of = run.last(names.VAL).get(names.name_of(names.VAL, names.TOKENS_EVALUATED))
        what = f"mean over {of:,} held-out tokens, " if of else ""
        loss = run.final_loss(heldout=True)
        lines.append(f"| held-out | {loss:.4f} | {what}after {run.heldout.tokens[-1]:,} training tokens |")
    if math.isfinite(loss := run.train_loss_at(tokens)):
        lines.append(f"| training | {loss:.4f} | mean over the last {TRAIN_WINDOW:.0%} of the tokens, as logged |")
    if not lines:
        return "The run left no record of its losses."
    return "\n".join(["| loss | nats per token | |", "|---|---:|---|", *lines])


def _cell(value: Any) -> str:
    """A value in one line that does not end the cell of a table."""
    return " ".join(str(value).split()).replace("|", r"\|")
