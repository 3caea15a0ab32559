"""Initial weights of a new run from an exported model or one on the hub (`init_from`).

Only weights are taken: step, moments, counters and the order of the data are those of a new run. Rank 0 reads them, and
the others receive them from it. Only config.json and safetensors are read, so nothing that a source names is run.
"""

import logging
from pathlib import Path
from typing import Any

import torch.distributed as dist
from lightning.fabric import Fabric
from torch import Tensor, nn

from forgetting_transformer.command_line import one_line
from forgetting_transformer.data import DataInfo
from forgetting_transformer.data.corpus import Corpus
from forgetting_transformer.data.model_tokenizer import load_tokenizer
from forgetting_transformer.data.vocabulary import other_token, tokens_of
from forgetting_transformer.files import read_json
from forgetting_transformer.ops.finite import check_finite
from forgetting_transformer.training.config import Config, ConfigError
from forgetting_transformer.training.counters import Origin
from forgetting_transformer.training.export.folder import MARK, find_model, read_mark, read_weights
from forgetting_transformer.training.optimization.building import named_by
from forgetting_transformer.training.parallel.ranks import on_rank_zero

log = logging.getLogger(__name__)

_FROM_THE_HUB = ["config.json", "*.safetensors", MARK, "tokenizer*", "*.txt", "*_map.json"]
#: Fields by which tensors of the same shapes are read as other heads.
_HEADS = ("num_heads", "num_kv_heads", "head_dim", "n_groups", "expand_ratio")


def read(
    config: Config, fabric: Fabric, data: Corpus, model: nn.Module, origin: Origin
) -> tuple[dict[str, Tensor], list[str]]:
    """Reads the weights of `init_from` for a model on rank 0, which alone needs the folder; describes them in `origin`.

    Args:
        model: that the run trains; only names and shapes of its tensors are looked at, so it may be on "meta".

    Returns:
        Tensors by name, on rank 0 only; and the names of the model's tensors that keep what is drawn for them.

    Raises:
        ConfigError: it cannot be read, or does not fit and `init_allow` does not allow that.
    """
    found = on_rank_zero(fabric, lambda: _read(config, model, data.train_info(), data.folder))
    tensors, fresh, text = found or ({}, [], "")
    fresh, origin.text = fabric.broadcast((fresh, text))
    return tensors, fresh


def fill(model: nn.Module, tensors: dict[str, Tensor], fresh: list[str]) -> None:
    """Copies what `read` returned into a model on the CPU; called by all ranks, and the same on each."""
    group = dist.new_group(backend="gloo") if dist.is_initialized() and dist.get_world_size() > 1 else None
    for name, own in model.state_dict().items():
        if name in tensors:
            own.copy_(tensors.pop(name))
        if group is not None and name not in fresh:
            dist.broadcast(own, src=0, group=group)
    if group is not None:
        dist.destroy_process_group(group)


def _read(config: Config, model: Any, data: DataInfo, corpus: Path) -> tuple[dict[str, Tensor], list[str], str]:
    log.info("reading the initial weights: %s", config.init_from)
    try:
        source = str(config.init_from)
        folder = find_model(source, _FROM_THE_HUB)
        is_local = folder == Path(source).expanduser()
        where = str(folder.absolute()) if is_local else f"{source}, revision {folder.name}"
        fields, tensors = read_json(folder / "config.json"), read_weights(folder)
        _check_heads(fields, config, model)
        fresh, unused = _unmatched(tensors, fields, config, model, _other_vocabulary(folder, fields, data, corpus))
        fitting = {name: tensor for name, tensor in tensors.items() if name not in {*fresh, *unused}}
        check_finite(fitting.items(), where)
    except ConfigError:
        raise
    except Exception as error:  # of a damaged file, of the hub's client, of a tokenizer
        raise ConfigError(f"init_from={config.init_from}: {one_line(error)}") from error
    mark, lists = read_mark(folder), {"fresh": fresh, "not used": unused}
    known = f" ({mark['checkpoint']:,} tokens, of {mark['tag']})" if mark else ""
    rest = "".join(f"; {title}: {', '.join(names)}" for title, names in lists.items() if names)
    return fitting, fresh, f"a new run, weights from {where}{known}{rest}"


def _unmatched(
    tensors: dict[str, Tensor], fields: dict[str, Any], config: Config, model: Any, other_vocabulary: str | None
) -> tuple[list[str], list[str]]:
    """The model's tensors that stay fresh, and those of the source that are left out.

    Args:
        fields: of the configuration of the source.
        other_vocabulary: why embeddings and output layer do not fit, if they do not.

    Raises:
        ConfigError: `init_allow` does not name them, or names what is not there.
    """
    own = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    named = dict(model.named_parameters(remove_duplicate=False))
    head = next(name for name in named if name.startswith("lm_head."))
    embeddings = next(name for name in named if named[name] is model.get_input_embeddings().weight)
    if fields.get("tie_word_embeddings") is True and embeddings in tensors:
        tensors[head] = tensors[embeddings]  # one tensor under two names, of which files hold the first
        if named[head] is named[embeddings]:
            del tensors[head]
    if named[head] is named[embeddings]:
        del own[head]
    theirs = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    reasons = {name: "missing" for name in own.keys() - theirs.keys()}
    reasons |= {name: "unexpected" for name in theirs.keys() - own.keys()}
    for name in own.keys() & theirs.keys():
        if own[name] != theirs[name]:
            reasons[name] = f"of another shape, {theirs[name]} instead of {own[name]}"
        elif other_vocabulary and name in (embeddings, head):
            reasons[name] = "of other tokens"
    allowed = named_by("init_allow", config.init_allow, {*own, *theirs}, "tensor of the model or of init_from")
    if refused := sorted(reasons.keys() - allowed):
        few, more = refused[:8], f"; and {len(refused) - 8} more" * (len(refused) > 8)
        listed = "; ".join(f"{name} is {reasons[name]}" for name in few) + more
        why = f"it has another vocabulary than the corpus ({other_vocabulary}); " if other_vocabulary else ""
        raise ConfigError(
            f"init_from={config.init_from} does not fit: {why}{listed}. Train the model, and a corpus of the "
            "tokenizer, that the weights are of; or let these begin with fresh weights, and leave unexpected ones out, "
            f"with init_allow=[{','.join(few)}{',…' * bool(more)}]"
        )
    return sorted(reasons.keys() & own.keys()), sorted(reasons.keys() - own.keys())


def _check_heads(fields: dict[str, Any], config: Config, model: Any) -> None:
    """Raises ConfigError where the model would read weights as those of other heads, which shapes need not show."""
    kind = type(model.config)
    if fields.get("model_type") != kind.model_type:
        return  # what two architectures share has other names than their mixers
    # Files leave out what has its default. Samba's are in a dictionary of its configuration.
    both = (kind.from_dict(fields), model.config)
    old, new = ({**vars(known), **(getattr(known, "attn", None) or {})} for known in both)
    if wrong := [f"{key}={old.get(key)} (not {new.get(key)})" for key in _HEADS if old.get(key) != new.get(key)]:
        raise ConfigError(
            f"init_from={config.init_from} does not fit: set what its model was trained with in model.config: "
            f"{', '.join(wrong)}"
        )


def _other_vocabulary(folder: Path, fields: dict[str, Any], data: DataInfo, corpus: Path) -> str | None:
    """Difference between its tokens and the corpus's, in words; None without a known difference."""
    size, bos = fields.get("vocab_size"), fields.get("bos_token_id")
    if size != data.vocab_size:
        return f"{size} ids, and the corpus {data.vocab_size}"
    if bos is not None and bos != data.bos_token_id:
        return f"its BOS token is {bos}, and the corpus's {data.bos_token_id}"
    has_tokenizer = any((folder / name).is_file() for name in ("tokenizer.json", "tokenizer_config.json"))
    if not has_tokenizer or (ours := tokens_of(corpus)) is None:
        return None
    theirs = {id: token for token, id in load_tokenizer(folder).get_vocab().items()}
    return other_token(ours, theirs, f"{folder}")
