"""The card of an exported model: README.md with a figure, made of what its run left in its folder.

What speaks of the checkpoint stands in a marked part, which every export renews. All else is the publisher's to edit:
the header, and words before and after that part. The first mark has a hash of the part, so that an edited one is known.

A card is read by strangers. It holds no path, URL, host name, password or key of the one who trained the model, and
whatever a run was called is shown as text, never as markup.
"""

import dataclasses
import hashlib
import html
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from forgetting_transformer.analysis.runs import TRAIN_WINDOW, Run, read_run
from forgetting_transformer.files import UnreadableError, parse_yaml
from forgetting_transformer.redaction import REDACTED, redact

CARD, FIGURE = "README.md", "training_loss.png"
#: Sections and keys that say where things are or who trained, and nothing of the model.
_PRIVATE = {"wandb", "output_dir", "data_dir", "resume", "preflight"}
#: Names of keys whose text is a secret, and texts that look like keys of known services.
_SECRET_KEY = re.compile(r"secret|passw|credential|auth|api_?key|(^|_)(token|key)$", re.I)
_SECRET = re.compile(
    r"\b(?:hf_|ghp_|gho_|github_pat_|glpat-|sk-|xox[a-z]-|AKIA|wandb_)[\w-]{10,}|\b[0-9a-f]{40}\b", re.I
)
#: Versions that a card names, of those that a start records.
_VERSIONS = (
    "python",
    "torch",
    "triton",
    "lightning",
    "transformers",
    "flash-linear-attention",
    "forgetting-transformer",
)
#: Names of settings whose text is what somebody called something, and no place.
_NAMES = {"tag", "exp", "label"}
#: Of such a text, words that are a path or a URL.
_PLACE = re.compile(r"\S*://\S+|(?<!\S)(?:~|\.{1,2})?[/\\]\S+|(?<!\S)[A-Za-z]:[\\/]\S*")
_MARKED = re.compile(
    r"<!-- (?P<hash>[0-9a-f]{16}): every export renews what stands from here to the end mark -->\n"
    r"(?P<part>.*?)<!-- (?P=hash): end -->\n?",
    re.S,
)
_HEADER = re.compile(r"\A---\n(.*?)^---\n", re.S | re.M)
_MODULE = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*")


@dataclass(frozen=True)
class Exported:
    """What an export knows of its model.

    Attributes:
        step: training tokens of the checkpoint.
        config: the run's settings, as the checkpoint has them.
        model_type: of its config.json.
        parameters: their number.
        has_tokenizer: whether one lies beside the weights.
        plugins: modules that must be imported before the model can be loaded.
        model_id: what the card loads: the model's name on the hub, or "." for the folder of the card.
        origin: what the export records of the weights: `weights_from` where their run began with others, and more.
    """

    step: int
    config: Mapping[str, Any]
    model_type: str
    parameters: int
    has_tokenizer: bool
    plugins: Sequence[str] = ()
    model_id: str = "."
    origin: Mapping[str, Any] = field(default_factory=dict)


def draw_figure(run_folder: Path, exported: Exported, path: Path) -> bool:
    """Draws the losses of the run up to the checkpoint; False where it logged none.

    Raises:
        ValueError: the run's metrics cannot be read.
    """
    # Both load matplotlib, which reading an export does not need.
    from forgetting_transformer.analysis.conditions import conditions
    from forgetting_transformer.analysis.plots.losses import loss_against_tokens

    run = _run_until(run_folder, exported)
    if not any(math.isfinite(loss) for loss in (*run.train_loss, *run.heldout_loss)):
        return False
    loss_against_tokens([run], path, run.unigram_entropy, conditions([run]))
    return True


def card(run_folder: Path, exported: Exported, with_figure: bool, licence: str | None = None) -> str:
    """The text of README.md.

    Args:
        licence: as the hub calls it, such as "apache-2.0"; None where nobody has chosen one.

    Raises:
        ValueError: the run's metrics cannot be read.
    """
    run = _run_until(run_folder, exported)
    config, label = run.config, _text(_at(run.config, "model", "label") or _at(run.config, "model", "name"))
    corpus = _at(config, "datamodule", "dataset")
    head = {
        **({"license": licence} if licence else {}),
        "library_name": "transformers",
        "pipeline_tag": "text-generation",
        "tags": ["forgetting-transformer", re.sub(r"[^\w.-]+", "-", _plain(_at(config, "model", "label") or ""))[:60]],
    }
    parts = [
        f"A language model with {exported.parameters:,} parameters ({label}), trained on {exported.step:,} tokens"
        + (f" of {_text(corpus)}. " if corpus else ". ")
        + "It is a base model: it continues text and has not learnt to follow instructions.",
        "## How to load it",
        "Install the Python package `forgetting-transformer`, which has the model classes, from a clone of its "
        "repository (no package index has it), and run",
        f"```python\n{snippet(exported)}```",
        *([] if exported.has_tokenizer else ["There is no tokenizer here: the model takes token ids."]),
        "## Losses",
        *_losses(run, exported),
        *([f"![Training and held-out loss against training tokens]({FIGURE})"] if with_figure else []),
        "## Training",
        _table(_training(run, exported)),
        "<details><summary>Configuration of the run</summary>",
        _fenced(yaml.safe_dump(config, sort_keys=False, allow_unicode=True)),
        "Places of files, names of machines and accounts are left out.\n\n</details>",
        "## Limits",
        "Nothing but the losses above was measured for this card. The model may repeat what stands in its corpus, "
        "errors and offensive text included.",
        "## Licence",
        f"The publisher of this model has chosen the licence `{_plain(licence)}`."
        if licence
        else "**No licence has been chosen.** It is for the publisher of this model to choose one, with regard to the "
        "corpus and the tokenizer: export again with `save_model.py --license …`, or add a line `license: …` to the "
        "header of this file. Until then nobody else may assume a right to use the model.",
    ]
    part = "\n\n".join(part.rstrip("\n") for part in parts) + "\n"
    known = _hash(part)
    return (
        f"---\n{yaml.safe_dump(head, sort_keys=False, allow_unicode=True)}---\n\n# {_text(run.name)}\n\n"
        f"<!-- {known}: every export renews what stands from here to the end mark -->\n{part}<!-- {known}: end -->\n"
    )


def renewed(text: str, fresh: str) -> str | None:
    """A card that was edited, with the marked part of a new one; None where its own was edited, or there is none.

    Its header gets the licence of the new one, if that has one.
    """
    found, new = list(_MARKED.finditer(text)), _MARKED.search(fresh)
    if len(found) != 1 or new is None or _hash(found[0]["part"]) != found[0]["hash"]:
        return None
    (old,) = found
    text = text[: old.start()] + new[0] + text[old.end() :]
    licence, header = licence_of(fresh), _HEADER.match(text)
    if licence is None or header is None or licence_of(text) == licence:
        return text
    kept = re.sub(r"^license:.*\n", "", header[1], flags=re.M)
    return f"---\nlicense: {licence}\n{kept}---\n{text[header.end() :]}"


def licence_of(text: str) -> str | None:
    """What the header of a card names as its licence; None where it names none."""
    header = _HEADER.match(text)
    try:
        found = parse_yaml(header[1], "the header") if header else None
    except UnreadableError:
        return None
    licence = found.get("license") if isinstance(found, dict) else None
    return licence if isinstance(licence, str) and licence else None


def _hash(part: str) -> str:
    return hashlib.sha256(part.encode()).hexdigest()[:16]


def snippet(exported: Exported) -> str:
    """Python code that loads the model and, with a tokenizer, lets it write."""
    lines = ["import forgetting_transformer.model  # registers the model classes"]
    if _at(exported.config, "datamodule", "dataset") == "longcrawl64":
        lines.append("import forgetting_transformer.tokenizer  # registers LongCrawl64's tokenizer")
    for name in filter(_MODULE.fullmatch, exported.plugins):
        lines.append(f"import {name}  # a plug-in that registers what the model needs")
    auto = "AutoModelForCausalLM, AutoTokenizer" if exported.has_tokenizer else "AutoModelForCausalLM"
    where = "  # the folder of this file" if exported.model_id == "." else ""
    lines += [
        f"from transformers import {auto}",
        "",
        f'model_id = "{exported.model_id}"{where}',
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


def public(value: Any, host: str = "", key: str = "") -> Any:
    """A setting as strangers may see it: of a path or URL its last part, of a secret nothing.

    What a user called a run may have a slash in it; there only words that are a path or URL are cut.

    Args:
        host: name of the machine, which is hidden where it stands as a word.
        key: name of the setting.
    """
    if isinstance(value, Mapping):
        return {str(k): public(v, host, str(k)) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [public(item, host, key) for item in value]
    if not isinstance(value, str):
        return value
    if _SECRET_KEY.search(key):
        return REDACTED
    text = redact(value)
    text = _PLACE.sub(lambda found: _last_part(found[0]), text) if key in _NAMES else _last_part(text)
    text = _SECRET.sub(REDACTED, text)
    return re.sub(rf"(?<!\w){re.escape(host)}(?!\w)", REDACTED, text) if host else text


def _last_part(text: str) -> str:
    """Of a path or URL its last part."""
    if "://" in text:
        text = re.split(r"[?#]", text)[0]
    return re.split(r"[/\\]", text.rstrip("/\\"))[-1] if re.search(r"[/\\]", text) else text


def public_origin(origin: Mapping[str, Any]) -> dict[str, Any]:
    """What an export records of its weights as strangers may see it: without paths, unless of a hub."""
    found = {key: value if key == "files" else public(value) for key, value in origin.items()}
    weights = origin.get("weights_from")
    if isinstance(weights, Mapping) and "revision" in weights:  # of a hub
        found["weights_from"] |= {"source": weights.get("source"), "revision": weights["revision"]}
    return found


def _run_until(run_folder: Path, exported: Exported) -> Run:
    """The run as it was at the checkpoint, with settings that may be shown."""
    run = read_run(run_folder)
    seen, evaluated = run.train_tokens <= exported.step, run.heldout_tokens <= exported.step
    config = {key: value for key, value in exported.config.items() if key not in _PRIVATE}
    if config.get("callbacks"):  # their texts may be addresses or keys of services
        config["callbacks"] = _without_texts(config["callbacks"])
    starts = run.starts
    config = public(config)
    for host in {str((start.get("machine") or {}).get("host") or "") for start in starts}:
        config = public(config, host)
    run = dataclasses.replace(
        run,
        name=_plain(config.get("tag") or _at(config, "model", "label") or exported.model_type),
        train_tokens=run.train_tokens[seen],
        train_loss=run.train_loss[seen],
        heldout_tokens=run.heldout_tokens[evaluated],
        heldout_loss=run.heldout_loss[evaluated],
    )
    # Instead of what the files say of later starts, which had no part in the checkpoint, and of places.
    vars(run)["config"] = config
    vars(run)["starts"] = [start for start in starts if start.get("step", 0) < exported.step] or starts[:1]
    return run


def _without_texts(value: Any) -> Any:
    if not isinstance(value, dict):
        return value
    return {key: _without_texts(inner) for key, inner in value.items() if not isinstance(inner, (str, list))}


def _losses(run: Run, exported: Exported) -> list[str]:
    rows = []
    tokens = run.last("val").get("val/val_token_count")
    of = f"mean over {tokens:,} held-out tokens, " if tokens else ""
    # Those of the weights here go first.
    known = exported.origin.get("weights") == "ema" and run.ema.tokens <= exported.step
    if np.any(known):
        step, loss = run.ema.tokens[known][-1], float(run.ema.values[known][-1])
        rows.append(("held-out, moving average of the weights", loss, f"{of}after {step:,} training tokens"))
    if run.heldout_loss.size:
        rows.append(("held-out", float(run.heldout_loss[-1]), f"{of}after {run.heldout_tokens[-1]:,} training tokens"))
    train = run.train_loss_at(exported.step)
    if math.isfinite(train):
        rows.append(("training", train, f"mean over the last {TRAIN_WINDOW:.0%} of the tokens, as logged"))
    if not rows:
        return ["The run left no record of its losses."]
    lines = ["| loss | nats per token | perplexity | |", "|---|---:|---:|---|"]
    lines += [f"| {name} | {loss:.4f} | {_perplexity(loss)} | {what} |" for name, loss, what in rows]
    average = averaged(exported.origin)
    return ["\n".join(lines), *([f"These are losses of the run. The weights here are {average}."] if average else [])]


def _perplexity(loss: float) -> str:
    return f"{math.exp(loss):,.2f}" if loss < 20 else ""


def _training(run: Run, exported: Exported) -> dict[str, str]:
    """Rows of the table; what is not known is left out."""
    config, data, starts = run.config, run.info("train_data"), run.starts
    length, batch = _at(config, "datamodule", "train_batch_len"), _at(config, "datamodule", "train_batch_size")
    schedule, warmup = _at(config, "schedule", "name"), _at(config, "schedule", "warmup_tokens")
    hardware = [f"{start.get('world_size', 1)} × {_device(start)}" for start in starts if _device(start)]
    newest = starts[-1] if starts else {}
    versions = newest.get("versions") or {}
    git = newest.get("git") or {}
    rows = {
        "architecture": f"{_at(config, 'model', 'label') or _at(config, 'model', 'name')} ({exported.model_type})",
        "parameters": f"{exported.parameters:,}",
        "corpus": _at(config, "datamodule", "dataset"),
        "size of the corpus": _corpus_size(data),
        "fingerprint of the corpus": data.get("fingerprint"),
        "training tokens": f"{exported.step:,}" + _passes(exported.step, data.get("total_tokens")),
        "batch": f"{batch:,} sequences of {length:,} tokens" if batch and length else None,
        "started from": _began_with(exported),
        "weights": averaged(exported.origin),
        "optimizer": _at(config, "optimizer", "name"),
        "peak learning rate": _at(config, "optimizer", "lr"),
        "schedule": f"{schedule}, warm-up over {warmup:,} tokens" if schedule and isinstance(warmup, int) else schedule,
        "seed": config.get("seed"),
        "precision": _at(config, "fabric", "precision"),
        "hardware": "; ".join(dict.fromkeys(hardware)),
        "versions": ", ".join(f"{name} {versions[name]}" for name in _VERSIONS if name in versions),
        "code": f"commit {git['commit'][:12]}{', with uncommitted changes' * bool(git.get('patch'))}"
        if git.get("commit")
        else None,
    }
    return {name: str(value) for name, value in rows.items() if value not in (None, "")}


def _began_with(exported: Exported) -> str | None:
    weights = public_origin(exported.origin).get("weights_from")
    fork, step = exported.config.get("fork_dir"), exported.config.get("fork_step")
    if isinstance(weights, Mapping):
        average = averaged(weights)
        known = [str(weights[key]) for key in ("source", "revision") if key in weights]
        return "the weights of " + ", ".join([*known, *([average] if average else [])])
    return f"{public(fork)} at {step:,} tokens" if fork and step else None


def averaged(origin: Mapping[str, Any]) -> str | None:
    """Which average the weights of an export are, by what it records; None where they are what training ended with."""
    if steps := origin.get("average_of"):
        return f"the mean of the checkpoints at {', '.join(f'{step:,}' for step in steps)} tokens"
    kind = origin.get("weights")
    return f"the moving average {kind} of the weights in training" if kind else None


def _device(start: Mapping[str, Any]) -> str | None:
    machine = start.get("machine") or {}
    device = machine.get("device")
    # As in Run.device.
    return f"CPU ({device})" if device and device in machine.get("platform", "") else device


def _corpus_size(data: Mapping[str, Any]) -> str | None:
    documents, total = data.get("documents"), data.get("total_tokens")
    return None if not documents or not total else f"{documents:,} documents, {total:,} tokens for training"


def _passes(tokens: int, total: int | None) -> str:
    return f", {tokens / total:.1f} times the corpus" if total and tokens > total else ""


def _at(config: Mapping[str, Any], section: str, key: str) -> Any:
    value = config.get(section)
    return value.get(key) if isinstance(value, Mapping) else None


def _table(rows: Mapping[str, str]) -> str:
    return "\n".join(["| | |", "|---|---|", *(f"| {name} | {_text(value)} |" for name, value in rows.items())])


def _plain(value: Any) -> str:
    """One line without control characters, such as a heading or a tag may be."""
    return " ".join("".join(c if c.isprintable() else " " for c in str(value)).split())[:200] or "model"


def _text(value: Any) -> str:
    """A value as Markdown shows it: one line, in which nothing is markup."""
    return re.sub(r"([\\`*_{}\[\]|~$#])", r"\\\1", html.escape(_plain(value), quote=False))


def _fenced(text: str) -> str:
    """A block of code with a fence that is longer than any in the text."""
    fence = "`" * max(3, 1 + max(map(len, re.findall("`+", text)), default=0))
    return f"{fence}yaml\n{text}{fence}"
