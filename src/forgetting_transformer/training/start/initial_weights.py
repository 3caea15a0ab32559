"""Weights that a new run begins with (`init_from`): of an exported model, a model of the hub, or a training run.

Only weights are taken: step, moments, counters and the order of the data are those of a new run. Rank 0 reads them, and
the others receive them from it. Configurations are read as JSON and weights from safetensors or from checkpoints, so
nothing that a source names is run.
"""

import logging
import re
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch.distributed as dist
from lightning.fabric import Fabric
from safetensors.torch import load_file
from torch import Tensor, nn

from forgetting_transformer.command_line import one_line
from forgetting_transformer.data import DataInfo
from forgetting_transformer.data.corpus import Corpus
from forgetting_transformer.data.vocabulary import other_token, tokens_of
from forgetting_transformer.files import read_json
from forgetting_transformer.hub_connection import model_folder
from forgetting_transformer.model import registry
from forgetting_transformer.model_tokenizer import load_tokenizer
from forgetting_transformer.ops.finite import check_finite
from forgetting_transformer.training.checkpoint.folder import read_newest, steps_in
from forgetting_transformer.training.checkpoint.reading import read_weights
from forgetting_transformer.training.config import Config, ConfigError
from forgetting_transformer.training.counters import Origin
from forgetting_transformer.training.export import official_checkpoint
from forgetting_transformer.training.export.mark import MARK
from forgetting_transformer.training.optimization.parameter_groups import named_by
from forgetting_transformer.training.parallel.ranks import on_rank_zero
from forgetting_transformer.training.records.run_directory import RunDirectory

log = logging.getLogger(__name__)

_FROM_THE_HUB = ["config.json", "*.safetensors", MARK, "tokenizer*", "*.txt", "*_map.json"]
#: Fields by which tensors of the same shapes are read as other heads.
_HEADS = ("num_heads", "num_kv_heads", "head_dim", "n_groups", "expand_ratio")


@dataclass
class InitialWeights:
    """Weights of a model that `init_from` names, of which `fill` takes those that fit.

    Attributes:
        fields: of the configuration of that model.
        tensors: its weights by name; on rank 0 only.
        tokenizer: folder of its tokenizer; None where there is none.
        record: where they come from, as the run's checkpoints keep it: `source`, and what else is known of it.
        fresh: tensors of the model in training that keep what was drawn for them.
        notes: what is to be told of them once there is a log; on rank 0 only.
    """

    fields: dict[str, Any]
    tensors: dict[str, Tensor]
    tokenizer: Path | None
    record: dict[str, Any]
    fresh: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def fill(self, model: nn.Module) -> None:
        """Puts them into a model on the CPU; called by all ranks, and the same on each."""
        group = dist.new_group(backend="gloo") if dist.is_initialized() and dist.get_world_size() > 1 else None
        for name, own in model.state_dict().items():
            if name in self.tensors:
                own.copy_(self.tensors.pop(name))
            if group is not None and name not in self.fresh:
                dist.broadcast(own, src=0, group=group)
        if group is not None:
            dist.destroy_process_group(group)

    def __str__(self) -> str:
        """For the start block."""
        step, tag = self.record.get("step"), self.record.get("tag")
        known = [self.record.get("weights"), step is not None and f"{step:,} tokens", tag and f"of {tag}"]
        said = ", ".join(part for part in known if part)
        fresh = f"; fresh: {', '.join(self.fresh)}" if self.fresh else ""
        return f"a new run, weights from {self.record['source']}{f' ({said})' if said else ''}{fresh}"


def on_all_ranks(config: Config, fabric: Fabric, data: Corpus, model: nn.Module, origin: Origin) -> InitialWeights:
    """Reads on rank 0, which alone needs the folder, what `init_from` has for a model; `origin` says what that is.

    Args:
        model: that the run trains; only names and shapes of its tensors are looked at, so it may be on "meta".

    Raises:
        ConfigError: it cannot be read, or does not fit and `init_allow` does not say that it need not.
    """
    mine = on_rank_zero(fabric, lambda: _read(config, model, data.train_info(), data.folder))
    told: Any = None if mine is None else replace(mine, fields={}, tensors={}, tokenizer=None, notes=[])
    told = fabric.broadcast(told)
    weights: InitialWeights = mine or told
    origin.text, origin.weights_from, origin.notes = str(weights), weights.record, weights.notes
    return weights


def _read(config: Config, model: Any, data: DataInfo, corpus: Path) -> InitialWeights:
    log.info("reading the initial weights: %s", config.init_from)
    try:
        weights = find(str(config.init_from), config.init_step)
        weights.fresh, unused = _unmatched(weights, config, model, _other_vocabulary(weights, data, corpus))
        for name in {*weights.fresh, *unused} & weights.tensors.keys():
            del weights.tensors[name]
        check_finite(weights.tensors.items(), weights.record["source"])
    except ConfigError:
        raise
    except Exception as error:  # of a file, of the hub's client, of a tokenizer
        raise ConfigError(f"init_from={config.init_from}: {one_line(error)}") from error
    if weights.fresh:
        weights.record["fresh"] = weights.fresh
        weights.notes.append(f"init_from: fresh initial weights for {', '.join(weights.fresh)}")
    if unused:
        weights.notes.append(f"init_from: not used: {', '.join(unused)}")
    return weights


def find(name: str, step: int | None = None) -> InitialWeights:
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
    if folder.exists() or not re.fullmatch(r"[\w-][\w.-]*/[\w.-]+", name):
        raise ValueError(
            "there is neither a run (checkpoints) nor an exported model (config.json); give a run's output_dir, what "
            "save_model.py wrote, or a hub id"
        )
    try:
        downloaded = model_folder(name, _FROM_THE_HUB)
    except ValueError as error:
        raise ValueError(f"there is no such folder, and {error}") from error
    return _exported(downloaded, {"source": name, "revision": downloaded.name})


def _of_run(directory: RunDirectory, step: int | None, official: bool) -> InitialWeights:
    if official:
        checkpoint, state, model = official_checkpoint.load_model(directory, step)
        tensors = model.state_dict()
    else:
        checkpoint, state, tensors = read_newest(
            directory.checkpoints, lambda c: (c, c.trainer_state(), read_weights(c)), step
        )
    tokenizer = directory.tokenizer if directory.tokenizer.is_dir() else None
    record = {"source": str(directory.root), "step": checkpoint.step, "tag": state["config"].get("tag")}
    return InitialWeights(state["model_config"], tensors, tokenizer, record)


def _exported(folder: Path, record: dict[str, Any]) -> InitialWeights:
    tensors: dict[str, Tensor] = {}
    for file in sorted(folder.glob("*.safetensors")):
        try:
            tensors |= load_file(file)
        except Exception as error:
            raise ValueError(f"{file.name} is damaged ({one_line(error)}); export or download it again") from error
    if not tensors:
        raise ValueError(f"{folder} holds no weights as safetensors, and nothing else is read; save the model as such")
    if (folder / MARK).is_file():
        mark = read_json(folder / MARK)
        names = {"step": "checkpoint", "tag": "tag", "weights": "weights"}
        record |= {key: mark[name] for key, name in names.items() if mark.get(name) is not None}
    has_tokenizer = any((folder / name).is_file() for name in ("tokenizer.json", "tokenizer_config.json"))
    return InitialWeights(read_json(folder / "config.json"), tensors, folder if has_tokenizer else None, record)


def _unmatched(
    source: InitialWeights, config: Config, model: Any, other_vocabulary: str | None
) -> tuple[list[str], list[str]]:
    """The model's tensors that stay fresh, and those of the source that are left out.

    Raises:
        ConfigError: `init_allow` does not name them, or names what is not there.
    """
    _check_heads(source, config, model)
    own = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    named = dict(model.named_parameters(remove_duplicate=False))
    head = next(name for name in named if name.startswith("lm_head."))
    embeddings = next(name for name in named if named[name] is model.get_input_embeddings().weight)
    if source.fields.get("tie_word_embeddings") is True and embeddings in source.tensors:
        source.tensors[head] = source.tensors[embeddings]  # one tensor under two names, of which files hold the first
        if named[head] is named[embeddings]:
            del source.tensors[head]
    if named[head] is named[embeddings]:
        del own[head]
    theirs = {name: tuple(tensor.shape) for name, tensor in source.tensors.items()}
    reasons = {name: "missing" for name in own.keys() - theirs.keys()}
    reasons |= {name: "unexpected" for name in theirs.keys() - own.keys()}
    for name in own.keys() & theirs.keys():
        if own[name] != theirs[name]:
            reasons[name] = f"of another shape, {theirs[name]} instead of {own[name]}"
        elif other_vocabulary and name in (embeddings, head):
            reasons[name] = "of other tokens"
    allowed = named_by("init_allow", config.init_allow, {*own, *theirs}, "tensor of the model or of init_from")
    if refused := sorted(reasons.keys() - allowed):
        listed = "; ".join(f"{name} is {reasons[name]}" for name in refused)
        why = f"it has another vocabulary than the corpus ({other_vocabulary}); " if other_vocabulary else ""
        raise ConfigError(
            f"init_from={config.init_from} does not fit: {why}{listed}. Train the model, and a corpus of the "
            "tokenizer, that the weights are of; or let these begin with fresh weights, and leave unexpected ones out, "
            f"with init_allow=[{','.join(refused)}]"
        )
    return sorted(reasons.keys() & own.keys()), sorted(reasons.keys() - own.keys())


def _check_heads(source: InitialWeights, config: Config, model: Any) -> None:
    """
    Raises:
        ConfigError: the model would read the weights of a mixer as those of other heads; shapes need not show it.
    """
    kind = type(model.config)
    if source.fields.get("model_type") != kind.model_type:
        return  # what two architectures share has other names than their mixers
    # Files leave out what has its default.
    theirs = kind(**{key: source.fields[key] for key in registry.fields_of(kind) & source.fields.keys()})
    for block in range(min(theirs.num_hidden_layers, model.config.num_hidden_layers)):
        before, now = (whole.mixer_config(block) for whole in (theirs, model.config))
        # Samba's are in a dictionary of its configuration.
        old, new = ({**vars(mixer), **(getattr(mixer, "attn", None) or {})} for mixer in (before, now))
        wrong = [f"{key}={old.get(key)} (not {new.get(key)})" for key in _HEADS if old.get(key) != new.get(key)]
        if wrong and type(before) is type(now):
            raise ConfigError(
                f"init_from={config.init_from} does not fit: set what its model was trained with in model.config: "
                f"{', '.join(wrong)} in block {block}"
            )


def _other_vocabulary(source: InitialWeights, data: DataInfo, corpus: Path) -> str | None:
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
