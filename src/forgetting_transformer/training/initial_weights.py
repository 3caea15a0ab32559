"""Weights that a new run begins with (`init_from`): of an exported model, of a model of the hub, or of another run.

Only weights are taken: step, moments, counters and the order of the data are those of a new run. Rank 0 reads them, and
the others receive them from it. Configurations are read as JSON and weights from safetensors, or from a run's own
checkpoints, so nothing that a source names is run.
"""

import difflib
import fnmatch
import logging
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from forgetting_transformer.analysis.model_card import averaged
from forgetting_transformer.command_line import one_line
from forgetting_transformer.data import DataError, DataInfo
from forgetting_transformer.data.regular import check_regular
from forgetting_transformer.data.tokens import other_token, tokens_of
from forgetting_transformer.files import UnreadableError, read_json, utf8_path
from forgetting_transformer.hub_connection import cached_model, only_cached
from forgetting_transformer.model import registry
from forgetting_transformer.ops.finite import check_finite
from forgetting_transformer.training.checkpoint import Checkpoint, CheckpointError, read_newest, read_weights, steps_in
from forgetting_transformer.training.config import Config, ConfigError
from forgetting_transformer.training.official_checkpoint import is_official
from forgetting_transformer.training.run_directory import RunDirectory

log = logging.getLogger(__name__)

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
#: A configuration and an index are far smaller.
_LARGEST_JSON = 1 << 28
_HUB_ID = re.compile(r"[\w-][\w.-]*/[\w.-]+")
_FROM_THE_HUB = ["config.json", "*.safetensors", INDEX, "exported_from.json", "tokenizer*", "*.txt", "*_map.json"]
#: Fields of a model's configuration that change no function of its weights; token ids are judged on their own.
_WITHOUT_EFFECT = {
    "vocab_size", "bos_token_id", "eos_token_id", "pad_token_id", "max_position_embeddings", "use_cache", "loss",
    "initializer_range", "tie_word_embeddings",
}  # fmt: skip
#: Fields by which tensors of the same shapes are read as other heads.
_HEADS = ("num_heads", "num_kv_heads", "head_dim", "n_groups", "expand_ratio")
#: Fields of a whole model that tensors have their shapes from; the first is in all of them.
_SIZES = ("hidden_size", "hidden_ratio", "intermediate_size", "num_hidden_layers")
_SHOWN = 6
#: What an export says of weights that are an average of several: steps of checkpoints, or the callback that kept it.
_AVERAGES = ("average_of", "weights")


@dataclass(frozen=True)
class Source:
    """What `init_from` names.

    Attributes:
        fields: of its model's configuration.
        shapes: of its weights, by name.
        read: gives the weights of these names.
        tokenizer: folder of its tokenizer; None where there is none.
        record: where that is, as the run's checkpoints keep it.
    """

    fields: dict[str, Any]
    shapes: dict[str, tuple[int, ...]]
    read: Callable[[list[str]], dict[str, Tensor]]
    tokenizer: Path | None
    record: dict[str, Any]


@dataclass(frozen=True)
class InitialWeights:
    """Weights for a new run.

    Attributes:
        names: of the model's tensors that they fill; tensors: those, on rank 0 only.
        fresh: the model's tensors that keep what was drawn for them.
        record: where they come from: `source`, and what else is known of it.
        notes: what is to be told of them once there is a log; on rank 0 only.
    """

    names: list[str]
    tensors: dict[str, Tensor]
    fresh: list[str]
    record: dict[str, Any]
    notes: list[str]

    def fill(self, model: nn.Module) -> None:
        """Puts them into a model on the CPU; called by all ranks, and the same on each."""
        own, group = model.state_dict(), None
        if dist.is_initialized() and dist.get_world_size() > 1:
            group = dist.new_group(backend="gloo")
        with torch.no_grad():
            for name in self.names:
                if name in self.tensors:
                    own[name].copy_(self.tensors.pop(name))
                if group is not None:
                    dist.broadcast(own[name], src=0, group=group)
        if group is not None:
            dist.destroy_process_group(group)

    def __str__(self) -> str:
        """For the start block."""
        step, tag = self.record.get("step"), self.record.get("tag")
        average = averaged(self.record)
        parts = [average, f"{step:,} tokens" if step is not None else None, f"of {tag}" if tag else None]
        known = ", ".join(part for part in parts if part)
        but = f"; fresh: {_some(self.fresh)}" if self.fresh else ""
        return f"a new run, weights from {self.record['source']}{f' ({known})' if known else ''}{but}"


def initial_weights(config: Config, model: nn.Module, data: DataInfo, corpus: Path) -> InitialWeights:
    """Reads what `init_from` names for a model; on one rank.

    Args:
        model: that the run trains; only names and shapes of its tensors are looked at, so it may be on "meta".
        corpus: folder that holds the corpus's tokenizer in `tokenizer/`, if it has one.

    Raises:
        ConfigError: it cannot be read, or does not fit and `init_allow` does not say that it need not.
    """
    log.info("reading the initial weights: %s", config.init_from)
    try:
        source = find(str(config.init_from), config.init_step)
        _check_heads(source, config, model)
        matching, fresh, notes = _match(source, config, model, data, corpus)
        tensors = source.read([*matching.values()])
        own = [name for name, _ in model.named_parameters() if name in matching]
        check_finite(((name, tensors[matching[name]]) for name in own), source.record["source"])
    except ConfigError:
        raise
    except (DataError, CheckpointError, OSError, ValueError, LookupError, TypeError, SafetensorError) as error:
        raise ConfigError(f"init_from={config.init_from}: {one_line(error)}") from error
    notes += _other_fields(source, model)
    record = source.record | ({"fresh": fresh} if fresh else {})
    named = {name: tensors[stored] for name, stored in matching.items()}
    return InitialWeights([*matching], named, fresh, record, [f"init_from: {note}" for note in notes])


def find(name: str, step: int | None = None) -> Source:
    """What a folder or hub id holds; of an export only names and shapes are read here.

    Args:
        step: training tokens of a run's checkpoint; None for its newest.

    Raises:
        ValueError, OSError, CheckpointError: nothing there that can be used.
    """
    folder = Path(name).expanduser()
    if not folder.exists():
        if step is not None:
            raise ValueError(f"init_step={step} chooses a checkpoint of a run, and there is no folder of this name")
        return _exported(_downloaded(name), name, revision=True)
    directory, exported = RunDirectory(folder), (folder / "config.json").is_file()
    if is_official(directory):
        raise ValueError(
            "it is a run of the authors' code; export it first, python save_model.py "
            f"--hf_load_dir={name} --hf_save_dir=…, and give the export"
        )
    if steps_in(directory.checkpoints):
        if exported and step is None:
            raise ValueError(
                "it holds both a run (checkpoints/) and an exported model (config.json); choose the run with "
                "init_step=…, or move the model's files to another folder and give that"
            )
        return _of_run(directory, step)
    if not exported:
        if folder.name == "checkpoints" or (folder / "trainer.json").is_file():
            run = folder.parent if folder.name == "checkpoints" else folder.parent.parent
            raise ValueError(
                f"it is inside of a run; give the run's output_dir, {run}, and init_step=TOKENS for one "
                "of its checkpoints"
            )
        raise ValueError(
            "it is neither a run (no checkpoints) nor an exported model (no config.json); give a run's output_dir, "
            "with init_step for one of its checkpoints, what save_model.py wrote, or a hub id"
        )
    if step is not None:
        raise ValueError(f"init_step={step} chooses a checkpoint of a run, and this is an exported model; leave it out")
    return _exported(folder, str(folder.absolute()))


def _of_run(directory: RunDirectory, step: int | None) -> Source:
    def read(checkpoint: Checkpoint) -> tuple[Checkpoint, dict[str, Any], dict[str, Tensor]]:
        return checkpoint, checkpoint.trainer_state(), read_weights(checkpoint)

    found = read_newest(directory.checkpoints, read, step)
    if found is None:
        wanted = "it holds no valid checkpoint" if step is None else f"it holds no valid checkpoint at init_step={step}"
        raise ValueError(f"{wanted}, only {steps_in(directory.checkpoints)} (the log says what is wrong with one)")
    checkpoint, state, tensors = found
    return Source(
        state["model_config"],
        {name: tuple(tensor.shape) for name, tensor in tensors.items()},
        lambda names: {name: tensors[name] for name in names},
        directory.tokenizer if directory.tokenizer.is_dir() else None,
        {"source": str(directory.root), "step": checkpoint.step, "tag": state["config"].get("tag")},
    )


def _downloaded(name: str) -> Path:
    """The folder of the cache that holds a model of the hub.

    Raises:
        ValueError: it is no hub id, or neither the cache nor the hub has it.
    """
    from huggingface_hub import snapshot_download

    if not _HUB_ID.fullmatch(name):
        raise ValueError("there is no such folder; give a run's output_dir, what save_model.py wrote, or a hub id")
    try:
        return cached_model(name) if only_cached() else Path(snapshot_download(name, allow_patterns=_FROM_THE_HUB))
    except Exception as error:  # of the client, or of what carries its requests
        raise ValueError(
            f"there is no such folder, and the hub's model of this name cannot be had ({one_line(error)}); without a "
            f"network run `hf download {name} --local-dir FOLDER` elsewhere and give that folder"
        ) from error


def _exported(folder: Path, source: str, revision: bool = False) -> Source:
    fields = _json(folder / "config.json")
    files = _files(folder)
    shapes: dict[str, tuple[int, ...]] = {}
    holds: dict[str, Path] = {}
    for file in files:
        check_regular(file, 1 << 60)
        try:
            with utf8_path(file) as path, safe_open(path, "pt") as opened:
                for name in opened.keys():  # noqa: SIM118 (it is no dictionary)
                    shapes[name], holds[name] = tuple(opened.get_slice(name).get_shape()), file
        except SafetensorError as error:
            raise ValueError(f"{file.name} is damaged ({one_line(error)}); export or download it again") from error

    def read(names: list[str]) -> dict[str, Tensor]:
        found: dict[str, Tensor] = {}
        for file in files:
            with utf8_path(file) as path, safe_open(path, "pt") as opened:
                found |= {name: opened.get_tensor(name) for name in names if holds[name] == file}
        return found

    record: dict[str, Any] = {"source": source}
    if revision:
        record["revision"] = folder.name
    if (folder / "exported_from.json").is_file():
        mark = _json(folder / "exported_from.json")
        names = {"step": "checkpoint"} | {key: key for key in ("tag", *_AVERAGES)}
        record |= {key: mark[old] for key, old in names.items() if mark.get(old) is not None}
    has_tokenizer = any((folder / name).is_file() for name in ("tokenizer.json", "tokenizer_config.json"))
    return Source(fields, shapes, read, folder if has_tokenizer else None, record)


def _files(folder: Path) -> list[Path]:
    """The files of weights of an exported model.

    Raises:
        ValueError: there are none, or the index names files outside of the folder or that are not there.
    """
    if (folder / WEIGHTS).is_file():
        return [folder / WEIGHTS]
    if not (folder / INDEX).is_file():
        pickled = next(folder.glob("*.bin"), None)
        why = f"; {pickled.name} is a pickle, which is never read" if pickled else ""
        raise ValueError(f"{folder} holds no {WEIGHTS}{why}: save the model as safetensors")
    names = sorted({*_json(folder / INDEX)["weight_map"].values()})
    for name in names:
        if not isinstance(name, str) or "/" in name or not name.endswith(".safetensors"):
            raise ValueError(f"{INDEX} names {name!r}, which is no safetensors file of this folder")
        if not (folder / name).is_file():
            raise ValueError(f"{name} is missing, which {INDEX} names; download all of its files")
    return [folder / name for name in names]


def _json(file: Path) -> dict[str, Any]:
    check_regular(file, _LARGEST_JSON)
    try:
        found = read_json(file)
    except UnreadableError as error:
        raise ValueError(f"{file.name} is damaged ({error})") from error
    if not isinstance(found, dict):
        raise ValueError(f"{file.name} is damaged (it holds a {type(found).__name__})")
    return found


def _match(
    source: Source, config: Config, model: Any, data: DataInfo, corpus: Path
) -> tuple[dict[str, str], list[str], list[str]]:
    """Which stored tensor fills which of the model's, which of the model's keep their fresh weights, and notes on both.

    Raises:
        ConfigError: tensors do not match, and `init_allow` does not name them; or it names none.
    """
    parameters = dict(model.named_parameters())  # tied ones once
    tied = {name for name in model.state_dict() if name not in parameters} - {name for name, _ in model.named_buffers()}
    own = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items() if name not in tied}
    head = next(name for name, _ in model.named_parameters(remove_duplicate=False) if name.startswith("lm_head."))
    embeddings = next(name for name in parameters if parameters[name] is model.get_input_embeddings().weight)
    shapes, stored_as = dict(source.shapes), {name: name for name in source.shapes}
    if source.fields.get("tie_word_embeddings") is True and embeddings in shapes:
        # One tensor under two names, of which files hold the first.
        shapes[head], stored_as[head] = shapes[embeddings], embeddings
        if head in tied:
            del shapes[head]
    reasons = {name: "missing" for name in own.keys() - shapes.keys()}
    reasons |= {name: "unexpected" for name in shapes.keys() - own.keys()}
    reasons |= {name: "of another shape" for name in own.keys() & shapes.keys() if own[name] != shapes[name]}
    vocabulary = _other_vocabulary(source, data, corpus)
    if vocabulary:
        reasons |= {name: reasons.get(name, "of other tokens") for name in {embeddings, head} & own.keys()}
    allowed = _allowed(config.init_allow, {*own, *shapes})
    if refused := sorted(reasons.keys() - allowed):
        described = {
            name: f"{name} {shapes[name]} instead of {own[name]}" if reasons[name] == "of another shape" else name
            for name in refused
        }
        raise ConfigError(_refusal(config, reasons, described, vocabulary))
    fresh, unused = sorted(reasons.keys() & own.keys()), sorted(reasons.keys() - own.keys())
    notes = [f"fresh initial weights for {', '.join(fresh)}"] if fresh else []
    notes += [f"not used: {', '.join(unused)}"] if unused else []
    matching = allowed - reasons.keys()
    notes += [f"init_allow covers {_some(sorted(matching))}, which fit and are taken"] if matching else []
    return {name: stored_as[name] for name in own if name not in reasons}, fresh, notes


def _check_heads(source: Source, config: Config, model: Any) -> None:
    """
    Raises:
        ConfigError: the model would read the weights of a mixer as those of other heads; shapes need not show it.
    """
    own_kind = type(model.config)
    if source.fields.get("model_type") != own_kind.model_type:
        return  # what two architectures share has other names than their mixers
    # Files leave out what has its default.
    theirs = own_kind(**{key: source.fields[key] for key in registry.fields_of(own_kind) & source.fields.keys()})
    heads: dict[str, str] = {}
    settable: dict[str, str] = {}
    for block in range(min(theirs.num_hidden_layers, model.config.num_hidden_layers)):
        before, now = (whole.mixer_config(block) for whole in (theirs, model.config))
        if type(before) is not type(now):
            continue
        pattern = getattr(model.config, "pattern", None)  # of a hybrid
        section = f"model.config.mixers.{pattern[block % len(pattern)]}" if pattern else "model.config"
        heads = _differing(_HEADS, before, now, section) | heads
        # A dimension of heads may follow from other fields, which are the ones to set.
        fields = [key for key in _HEADS if key in registry.fields_of(type(now))]
        settable = _differing(fields, before, now, section) | settable
        attention, own = (getattr(mixer, "attn", None) for mixer in (before, now))  # of Samba
        if isinstance(attention, Mapping) and isinstance(own, Mapping):
            found = _differing(_HEADS, SimpleNamespace(**attention), SimpleNamespace(**own), f"{section}.attn")
            heads, settable = found | heads, found | settable
    if heads:
        # With init_allow, what the other sizes shape may be meant to begin fresh.
        sizes = [key for key in _SIZES[: 1 if config.init_allow else None] if key in registry.fields_of(own_kind)]
        listed = _differing(sizes, theirs, model.config, "model.config") | settable or heads
        raise ConfigError(
            f"init_from={config.init_from} does not fit; set what its model was trained with: "
            f"{', '.join(listed.values())}"
        )


def _differing(keys: Sequence[str], theirs: Any, own: Any, section: str) -> dict[str, str]:
    """Full key -> how to set it to their value, for those of the keys whose values differ."""
    values = {key: (getattr(theirs, key, None), getattr(own, key, None)) for key in keys}
    return {
        f"{section}.{key}": f"{section}.{key}={_as_typed(old)} (not {_as_typed(new)})"
        for key, (old, new) in values.items()
        if old != new
    }


def _as_typed(value: Any) -> str:
    return "null" if value is None else str(value)


def _allowed(patterns: list[str], names: set[str]) -> set[str]:
    """The names that `init_allow` covers.

    Raises:
        ConfigError: a pattern covers none.
    """
    allowed: set[str] = set()
    for pattern in patterns:
        covered = {name for name in names if fnmatch.fnmatchcase(name, pattern)}
        if not covered:
            near = difflib.get_close_matches(pattern, names, 1)
            hint = f"did you mean {near[0]}?" if near else "model.txt of a run lists names"
            raise ConfigError(f"init_allow={pattern} names no tensor of the model or of init_from; {hint}")
        allowed |= covered
    return allowed


def _refusal(config: Config, reasons: dict[str, str], refused: dict[str, str], vocabulary: str | None) -> str:
    """
    Args:
        refused: names of tensors, and how each is listed.
    """
    by_reason: dict[str, list[str]] = {}
    for name in refused:
        by_reason.setdefault(reasons[name], []).append(refused[name])
    listed = "; ".join(f"{reason}: {_some(names)}" for reason, names in sorted(by_reason.items()))
    names = ",".join(refused) if len(refused) <= _SHOWN else "…"
    why = f"it has another vocabulary than the corpus ({vocabulary}); " if vocabulary else ""
    fix = "a corpus of its tokenizer" if vocabulary and len(refused) <= 2 else "the model that it was trained as"
    return (
        f"init_from={config.init_from} does not fit: {why}{listed}. Train {fix}, or let these begin with fresh "
        f"weights, and leave unexpected ones out, with init_allow=[{names}]"
    )


def _some(names: list[str], most: int = _SHOWN) -> str:
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")


def _other_vocabulary(source: Source, data: DataInfo, corpus: Path) -> str | None:
    """In which way its tokens are not those of the corpus; None where they are, as far as is known."""
    size, bos = source.fields.get("vocab_size"), source.fields.get("bos_token_id")
    if size != data.vocab_size:
        return f"{size} ids, and the corpus {data.vocab_size}"
    if bos is not None and bos != data.bos_token_id:
        return f"its BOS token is {bos}, and the corpus's {data.bos_token_id}"
    ours = tokens_of(corpus)
    if source.tokenizer is None or ours is None:
        return None
    from forgetting_transformer.model_tokenizer import load_tokenizer

    theirs = {id: token for token, id in load_tokenizer(source.tokenizer).get_vocab().items()}
    return other_token(ours, theirs, f"{source.tokenizer}")


def _other_fields(source: Source, model: Any) -> list[str]:
    """A note on fields that shape no tensor and differ: the config's make another function of the same weights."""
    own = model.config.to_dict()
    known = registry.fields_of(type(model.config)) - _WITHOUT_EFFECT | {"model_type"}
    changes = [
        f"{key}: {source.fields[key]} -> {own[key]}"
        for key in sorted(known & own.keys() & source.fields.keys())
        if source.fields[key] != own[key]
    ]
    return [f"this model has other settings than that of the weights: {', '.join(changes)}"] if changes else []
