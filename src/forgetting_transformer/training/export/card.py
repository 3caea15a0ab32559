"""The card of an exported model: README.md, made of what its run left in its folder.

A card is read by strangers. It shows the settings of a short list, and of a path or URL only the last part.
"""

import logging
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from huggingface_hub import ModelCardData

from forgetting_transformer import metric_names as names
from forgetting_transformer.analysis.runs import TRAIN_WINDOW, Run
from forgetting_transformer.command_line import one_line
from forgetting_transformer.files import write_atomically

log = logging.getLogger(__name__)

CARD = "README.md"
#: Versions that a card names, of those that a start records.
_VERSIONS = ("python", "torch", "triton", "transformers", "forgetting-transformer")
#: A path or a URL. The names of a run and of a model on a hub may have a slash in them.
_PLACE = re.compile(r"(?:\w+:/|~|\.{1,2})?/[^?]*")


@dataclass(frozen=True)
class Exported:
    """A model that is exported.

    Attributes:
        config: its run's settings, as the checkpoint has them.
        origin: what the export records of the weights (folder.py): training tokens, plug-ins, the weights' source.
        model_type: of its config.json. parameters: their number.
        has_tokenizer: whether one lies beside the weights.
    """

    config: Mapping[str, Any]
    origin: Mapping[str, Any]
    model_type: str
    parameters: int
    has_tokenizer: bool

    @property
    def step(self) -> int:
        """Training tokens of the checkpoint."""
        return self.origin["checkpoint"]

    def setting(self, section: str, key: str) -> Any:
        """A setting as strangers may see it; None where the run had none."""
        value = self.config.get(section)
        return public(value.get(key)) if isinstance(value, Mapping) else None


def write(run_folder: Path, exported: Exported, folder: Path, licence: str | None) -> None:
    """Writes the card into `folder`. An export is whole without it: metrics that cannot be read cost the card.

    Args:
        licence: as the hub calls it, such as "apache-2.0"; None where nobody has chosen one.
    """
    try:
        write_atomically(folder / CARD, _card(Run(run_folder, "", until=exported.step), exported, licence))
    except ValueError as error:
        log.warning("no model card was written: %s", one_line(error))


def _card(run: Run, exported: Exported, licence: str | None) -> str:
    label = exported.setting("model", "label") or exported.setting("model", "name") or exported.model_type
    corpus = exported.setting("datamodule", "dataset")
    head = ModelCardData(
        license=licence, library_name="transformers", pipeline_tag="text-generation", tags=["forgetting-transformer"]
    )
    parts = [
        f"# {_text(public(exported.config.get('tag')) or label)}",
        f"A language model with {exported.parameters:,} parameters ({_text(label)}), trained on {exported.step:,} "
        + f"tokens{f' of {_text(corpus)}' if corpus else ''}. It is a base model: it continues text and has not learnt "
        "to follow instructions. Nothing but the losses below was measured for this card.",
        "## How to load it",
        "Install the Python package `forgetting-transformer`, which has the model classes, from a clone of its "
        "repository (no package index has it), and run",
        f"```python\n{snippet(exported)}```",
        *([] if exported.has_tokenizer else ["There is no tokenizer here: the model takes token ids."]),
        "## Losses",
        *_losses(run, exported),
        "## Training",
        "\n".join(["| | |", "|---|---|", *(f"| {name} | {_text(row)} |" for name, row in _rows(run, exported))]),
        "## Licence",
        f"The publisher of this model has chosen the licence `{licence}`."
        if licence
        else "**No licence has been chosen.** It is for the publisher of this model to choose one, with regard to the "
        "corpus and the tokenizer: export again with `save_model.py --license …`. Until then nobody else may assume a "
        "right to use the model.",
    ]
    text = "\n\n".join(part.rstrip("\n") for part in parts)
    return f"---\n{head.to_yaml()}\n---\n\n{text}\n"


def snippet(exported: Exported) -> str:
    """Python code that loads the model and, with a tokenizer, lets it write."""
    lines = ["import forgetting_transformer.model  # registers the model classes"]
    if exported.setting("datamodule", "dataset") == "longcrawl64":
        lines.append("import forgetting_transformer.tokenizer  # registers LongCrawl64's tokenizer")
    for name in exported.origin.get("plugins", ()):
        lines.append(f"import {name}  # a plug-in that registers what the model needs")
    auto = "AutoModelForCausalLM, AutoTokenizer" if exported.has_tokenizer else "AutoModelForCausalLM"
    lines += [
        f"from transformers import {auto}",
        "",
        'model_id = "."  # the folder of this file',
        "model = AutoModelForCausalLM.from_pretrained(model_id)",
    ]
    if exported.has_tokenizer:
        lines += [
            "tokenizer = AutoTokenizer.from_pretrained(model_id)",
            'prompt = tokenizer("One day", return_tensors="pt")',
            "output_ids = model.generate(**prompt, max_new_tokens=32)",
            "print(tokenizer.decode(output_ids[0], skip_special_tokens=True))",
        ]
    return "\n".join(lines) + "\n"


def public(value: Any) -> Any:
    """A setting as strangers may see it: of a path or URL its last part, without what follows a `?`."""
    if isinstance(value, Mapping):
        return {key: public(inner) for key, inner in value.items()}
    place = _PLACE.match(value) if isinstance(value, str) else None
    return place[0].rstrip("/").rpartition("/")[2] if place else value


def _losses(run: Run, exported: Exported) -> list[str]:
    rows = []
    tokens = run.last(names.VAL).get(names.name_of(names.VAL, names.TOKENS_EVALUATED))
    of = f"mean over {tokens:,} held-out tokens, " if tokens else ""
    if run.heldout.tokens.size:
        step, loss = run.heldout.tokens[-1], run.final_loss(heldout=True)
        rows.append(("held-out", loss, f"{of}after {step:,} training tokens"))
    train = run.train_loss_at(exported.step)
    if math.isfinite(train):
        rows.append(("training", train, f"mean over the last {TRAIN_WINDOW:.0%} of the tokens, as logged"))
    if not rows:
        return ["The run left no record of its losses."]
    lines = ["| loss | nats per token | perplexity | |", "|---|---:|---:|---|"]
    lines += [
        f"| {name} | {loss:.4f} | {f'{math.exp(loss):,.2f}' if loss < 20 else ''} | {what} |"
        for name, loss, what in rows
    ]
    return ["\n".join(lines)]


def _rows(run: Run, exported: Exported) -> list[tuple[str, str]]:
    """Rows of the table; what is not known is left out."""
    known = exported.setting
    length, batch = known("datamodule", "train_batch_len"), known("datamodule", "train_batch_size")
    # Later starts had no part in the checkpoint.
    starts = [start for start in run.starts if start.get("step", 0) < exported.step] or run.starts[:1]
    machines = [(start.get("world_size", 1), (start.get("machine") or {}).get("device")) for start in starts]
    newest = starts[-1] if starts else {}
    versions, git = newest.get("versions") or {}, newest.get("git") or {}
    rows = {
        "architecture": f"{known('model', 'label') or known('model', 'name')} ({exported.model_type})",
        "corpus": known("datamodule", "dataset"),
        "fingerprint of the corpus": run.info("train_data").get("fingerprint"),
        "training tokens": f"{exported.step:,}",
        "batch": f"{batch:,} sequences of {length:,} tokens" if batch and length else None,
        "started from": _began_with(exported),
        "optimizer": known("optimizer", "name"),
        "peak learning rate": known("optimizer", "lr"),
        "schedule": known("schedule", "name"),
        "seed": exported.config.get("seed"),
        "precision": known("fabric", "precision"),
        "hardware": "; ".join(dict.fromkeys(f"{count} × {device}" for count, device in machines if device)),
        "versions": ", ".join(f"{name} {versions[name]}" for name in _VERSIONS if name in versions),
        "code": f"commit {git['commit'][:12]}{', with uncommitted changes' * bool(git.get('patch'))}"
        if git.get("commit")
        else None,
    }
    return [(name, str(value)) for name, value in rows.items() if value not in (None, "")]


def _began_with(exported: Exported) -> str | None:
    weights = exported.origin.get("weights_from")
    fork, step = exported.config.get("fork_dir"), exported.config.get("fork_step")
    if isinstance(weights, Mapping):
        return "the weights of " + ", ".join(str(weights[key]) for key in ("source", "revision") if key in weights)
    return f"{public(fork)} at {step:,} tokens" if fork and step else None


def _text(value: Any) -> str:
    """A value in one line, which no cell of a table ends."""
    return " ".join(str(value).split()).replace("|", r"\|")
