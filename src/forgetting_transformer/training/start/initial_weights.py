"""Weights that a new run begins with (`init_from`): of an exported model, a model of the hub, or a training run.

Only weights are taken: step, moments, counters and the order of the data are those of a new run. Rank 0 reads them, and
the others receive them from it. Configurations are read as JSON and weights from safetensors or from checkpoints, so
nothing that a source names is run.
"""

import logging
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from huggingface_hub import snapshot_download
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from forgetting_transformer.command_line import one_line
from forgetting_transformer.data import DataError, DataInfo
from forgetting_transformer.data.vocabulary import other_token, tokens_of
from forgetting_transformer.files import read_json, utf8_path
from forgetting_transformer.hub_connection import cached_model, only_cached
from forgetting_transformer.model import registry
from forgetting_transformer.model_tokenizer import load_tokenizer
from forgetting_transformer.ops.finite import check_finite
from forgetting_transformer.training.checkpoint.folder import Checkpoint, CheckpointError, read_newest, steps_in
from forgetting_transformer.training.checkpoint.reading import read_weights
from forgetting_transformer.training.config import Config, ConfigError
from forgetting_transformer.training.export import official_checkpoint
from forgetting_transformer.training.export.folder import MARK
from forgetting_transformer.training.optimization.parameter_groups import named_by
from forgetting_transformer.training.records.run_directory import RunDirectory

log = logging.getLogger(__name__)

_HUB_ID = re.compile(r"[\w-][\w.-]*/[\w.-]+")
_FROM_THE_HUB = ["config.json", "*.safetensors", MARK, "tokenizer*", "*.txt", "*_map.json"]
#: Fields of a model's configuration that change no function of its weights; token ids are judged on their own.
_WITHOUT_EFFECT = {
    "vocab_size", "bos_token_id", "eos_token_id", "pad_token_id", "max_position_embeddings", "use_cache", "loss",
    "initializer_range", "tie_word_embeddings",
}  # fmt: skip
#: Fields by which tensors of the same shapes are read as other heads.
_HEADS = ("num_heads", "num_kv_heads", "head_dim", "n_groups", "expand_ratio")
_SHOWN = 6


class Source(NamedTuple):
    """A model that `init_from` names.

    Attributes:
        fields: of its configuration. tensors: its weights by name.
        tokenizer: folder of its tokenizer; None where there is none.
        record: where it is, as the run's checkpoints keep it.
    """

    fields: dict[str, Any]
    tensors: dict[str, Tensor]
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
        parts = [self.record.get("weights"), f"{step:,} tokens" if step is not None else None, tag and f"of {tag}"]
        known = ", ".join(part for part in parts if part)
        but = f"; fresh: {_some(self.fresh)}" if self.fresh else ""
        return f"a new run, weights from {self.record['source']}{f' ({known})' if known else ''}{but}"


def initial_weights(config: Config, model: Any, data: DataInfo, corpus: Path) -> InitialWeights:
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
        stored_as, reasons = _match(source, config, model, _other_vocabulary(source, data, corpus))
        taken = {name: source.tensors[stored] for name, stored in stored_as.items()}
        check_finite(((n, taken[n]) for n, _ in model.named_parameters() if n in taken), source.record["source"])
    except ConfigError:
        raise
    except (
        DataError, CheckpointError, OSError, ValueError, LookupError, TypeError, AttributeError, SafetensorError,
    ) as error:  # fmt: skip
        raise ConfigError(f"init_from={config.init_from}: {one_line(error)}") from error
    fresh = sorted(reasons.keys() & model.state_dict().keys())
    unused, changes = sorted(reasons.keys() - {*fresh}), _other_fields(source, model)
    notes = {
        "fresh initial weights for ": fresh,
        "not used: ": unused,
        "this model has other settings than that of the weights: ": changes,
    }
    said = [f"init_from: {what}{', '.join(names)}" for what, names in notes.items() if names]
    return InitialWeights([*taken], taken, fresh, source.record | ({"fresh": fresh} if fresh else {}), said)


def find(name: str, step: int | None = None) -> Source:
    """The model of a folder or hub id.

    Args:
        step: training tokens of a run's checkpoint; None for its newest.

    Raises:
        ValueError, OSError, CheckpointError: nothing there that can be used.
    """
    folder = Path(name).expanduser()
    directory = RunDirectory(folder)
    official = official_checkpoint.is_official(directory)
    if official or steps_in(directory.checkpoints):
        return _of_run(directory, step, official)
    if step is not None:
        raise ValueError(f"init_step={step} chooses a checkpoint of a run, and this is none; leave it out")
    if (folder / "config.json").is_file():
        return _exported(folder, {"source": str(folder.absolute())})
    if folder.exists():
        raise ValueError(
            "it is neither a run (no checkpoints) nor an exported model (no config.json); give a run's output_dir, "
            "with init_step for one of its checkpoints, what save_model.py wrote, or a hub id"
        )
    downloaded = _downloaded(name)
    return _exported(downloaded, {"source": name, "revision": downloaded.name})


def _of_run(directory: RunDirectory, step: int | None, official: bool) -> Source:
    def read(checkpoint: Checkpoint) -> tuple[Checkpoint, dict[str, Any], dict[str, Tensor]]:
        return checkpoint, checkpoint.trainer_state(), read_weights(checkpoint)

    if official:
        checkpoint, state, model = official_checkpoint.load_model(directory, step)
        tensors = model.state_dict()
    else:
        found = read_newest(directory.checkpoints, read, step)
        if found is None:
            wanted = "no valid checkpoint" if step is None else f"no valid checkpoint at init_step={step}"
            raise ValueError(
                f"it holds {wanted}, only {steps_in(directory.checkpoints)} (the log says what is wrong with one)"
            )
        checkpoint, state, tensors = found
    tokenizer = directory.tokenizer if directory.tokenizer.is_dir() else None
    record = {"source": str(directory.root), "step": checkpoint.step, "tag": state["config"].get("tag")}
    return Source(state["model_config"], tensors, tokenizer, record)


def _downloaded(name: str) -> Path:
    """The folder of the cache that holds a model of the hub.

    Raises:
        ValueError: it is no hub id, or neither the cache nor the hub has it.
    """
    if not _HUB_ID.fullmatch(name):
        raise ValueError("there is no such folder; give a run's output_dir, what save_model.py wrote, or a hub id")
    try:
        return cached_model(name) if only_cached() else Path(snapshot_download(name, allow_patterns=_FROM_THE_HUB))
    except Exception as error:  # of the client, or of what carries its requests
        raise ValueError(
            f"there is no such folder, and the hub's model of this name cannot be had ({one_line(error)}); without a "
            f"network run `hf download {name} --local-dir FOLDER` elsewhere and give that folder"
        ) from error


def _exported(folder: Path, record: dict[str, Any]) -> Source:
    tensors: dict[str, Tensor] = {}
    for file in sorted(folder.glob("*.safetensors")):
        try:
            with utf8_path(file) as path:
                tensors |= load_file(path)
        except SafetensorError as error:
            raise ValueError(f"{file.name} is damaged ({one_line(error)}); export or download it again") from error
    if not tensors:
        raise ValueError(f"{folder} holds no weights as safetensors, and nothing else is read; save the model as such")
    if (folder / MARK).is_file():
        mark = read_json(folder / MARK)
        names = {"step": "checkpoint", "tag": "tag", "weights": "weights"}
        record |= {key: mark[name] for key, name in names.items() if mark.get(name) is not None}
    has_tokenizer = any((folder / name).is_file() for name in ("tokenizer.json", "tokenizer_config.json"))
    return Source(read_json(folder / "config.json"), tensors, folder if has_tokenizer else None, record)


def _match(
    source: Source, config: Config, model: Any, other_vocabulary: str | None
) -> tuple[dict[str, str], dict[str, str]]:
    """Stored tensor for each of the model's that it fills; and why others are left out or stay fresh.

    Raises:
        ConfigError: tensors do not match, and `init_allow` does not name them; or it names none.
    """
    _check_heads(source, config, model)
    parameters = dict(model.named_parameters())  # tied ones once
    tied = {name for name in model.state_dict() if name not in parameters} - {name for name, _ in model.named_buffers()}
    own = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items() if name not in tied}
    head = next(name for name, _ in model.named_parameters(remove_duplicate=False) if name.startswith("lm_head."))
    embeddings = next(name for name in parameters if parameters[name] is model.get_input_embeddings().weight)
    stored_as = {name: name for name in source.tensors}
    if source.fields.get("tie_word_embeddings") is True and embeddings in stored_as:
        # One tensor under two names, of which files hold the first.
        stored_as[head] = embeddings
        if head in tied:
            del stored_as[head]
    shapes = {name: tuple(source.tensors[stored].shape) for name, stored in stored_as.items()}
    reasons = {name: "missing" for name in own.keys() - shapes.keys()}
    reasons |= {name: "unexpected" for name in shapes.keys() - own.keys()}
    reasons |= {
        name: f"of another shape, {shapes[name]} instead of {own[name]}"
        for name in own.keys() & shapes.keys()
        if own[name] != shapes[name]
    }
    if other_vocabulary:
        reasons |= {name: reasons.get(name, "of other tokens") for name in {embeddings, head} & own.keys()}
    if refused := sorted(
        reasons.keys()
        - named_by("init_allow", config.init_allow, {*own, *shapes}, "tensor of the model or of init_from")
    ):
        listed = _some([f"{name} is {reasons[name]}" for name in refused], "; ")
        why = f"it has another vocabulary than the corpus ({other_vocabulary}); " if other_vocabulary else ""
        fix = "a corpus of its tokenizer" if why and len(refused) <= 2 else "the model that it was trained as"
        names = ",".join(refused) if len(refused) <= _SHOWN else "…"
        raise ConfigError(
            f"init_from={config.init_from} does not fit: {why}{listed}. Train {fix}, or let these begin with fresh "
            f"weights, and leave unexpected ones out, with init_allow=[{names}]"
        )
    return {name: stored_as[name] for name in own if name not in reasons}, reasons


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
    for block in range(min(theirs.num_hidden_layers, model.config.num_hidden_layers)):
        before, now = (whole.mixer_config(block) for whole in (theirs, model.config))
        pairs = zip(_HEADS, _heads(before), _heads(now), strict=True)
        wrong = [f"{key}={old} (not {new})" for key, old, new in pairs if old != new]
        if wrong and type(before) is type(now):
            raise ConfigError(
                f"init_from={config.init_from} does not fit: set what its model was trained with in model.config: "
                f"{', '.join(wrong)} in block {block}"
            )


def _heads(mixer: Any) -> list[Any]:
    attention = getattr(mixer, "attn", None)  # of Samba
    heads = attention if isinstance(attention, Mapping) else {}
    return [heads.get(key, getattr(mixer, key, None)) for key in _HEADS]


def _some(names: list[str], separator: str = ", ") -> str:
    return separator.join(names[:_SHOWN]) + (f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else "")


def _other_vocabulary(source: Source, data: DataInfo, corpus: Path) -> str | None:
    """Difference between its tokens and the corpus's, in words; None where there is none, as far as is known."""
    size, bos = source.fields.get("vocab_size"), source.fields.get("bos_token_id")
    if size != data.vocab_size:
        return f"{size} ids, and the corpus {data.vocab_size}"
    if bos is not None and bos != data.bos_token_id:
        return f"its BOS token is {bos}, and the corpus's {data.bos_token_id}"
    ours = tokens_of(corpus)
    if source.tokenizer is None or ours is None:
        return None
    theirs = {id: token for token, id in load_tokenizer(source.tokenizer).get_vocab().items()}
    return other_token(ours, theirs, f"{source.tokenizer}")


def _other_fields(source: Source, model: Any) -> list[str]:
    """Fields that shape no tensor and differ: the config's make another function of the same weights."""
    own = model.config.to_dict()
    known = registry.fields_of(type(model.config)) - _WITHOUT_EFFECT | {"model_type"}
    return [
        f"{key}: {source.fields[key]} -> {own[key]}"
        for key in sorted(known & own.keys() & source.fields.keys())
        if source.fields[key] != own[key]
    ]
