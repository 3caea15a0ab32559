"""Keys that may differ when a run is continued: all that do not affect its weights."""

import dataclasses
from typing import TYPE_CHECKING, Any

from forgetting_transformer import plugins
from forgetting_transformer.console import redact_tree
from forgetting_transformer.files import flatten
from forgetting_transformer.plugins import ALL
from forgetting_transformer.training.config import Config, ConfigError
from forgetting_transformer.training.config.parsing import components_of, config_class, keys_of

if TYPE_CHECKING:
    from forgetting_transformer.data import DataInfo


#: Keys that may differ between the starts in one output_dir: places, division of the work, reports. So may the free
#: keys of components. Everything else decides what the weights become, so a change of it is refused on resume.
FREE_KEYS = (
    "output_dir", "data_dir", "plugins", "resume", "fork_dir", "fork_step", "exp", "tag", "model.label", "wandb",
    "fabric.devices", "fabric.accelerator", "fabric.peak_flops", "strategy", "scale", "train.max_tokens",
    "train.grad_acc_tokens", "train.gradient_checkpointing", "train.block_inputs_on_host", "train.compile",
    "train.cuda_graphs", "train.max_bad_steps", "train.profile_steps", "checkpoint_background", "preflight",
    "log_interval", "train_eval_interval", "eval_interval", "skip_eval", "final_eval",
    "checkpoint_interval", "checkpoint_keep_interval", "checkpoint_keep_last", "eval",
    "datamodule.train_num_workers", "datamodule.eval_tokens", "datamodule.eval_batch_len",
    "datamodule.eval_local_batch_size", "datamodule.eval_num_workers", "datamodule.dataset", "datamodule.repeat",
    "datamodule.missing_chunks", "datamodule.cache_dir", "datamodule.cache_gb",
    # Without effect on the model: other tools read it as the training length.
    "model.config.max_position_embeddings",
)  # fmt: skip


def decisive(config: dict[str, Any]) -> dict[str, Any]:
    """The part of a resolved config that decides the weights: flat, without free keys, with defaults for newer keys."""
    flat = flatten(config)
    values = {key: item.default for key, item in keys_of(config_class(config)).items()} | flat
    free = [*FREE_KEYS]
    for section, component in components_of(config).items():
        free += [section if key == ALL else f"{section}.{key}" for key in component.free]
    return {
        key: value
        for key, value in values.items()
        if key != "callbacks" and not any(key == name or key.startswith(f"{name}.") for name in free)
    }


def changes_that_alter_the_run(before: dict[str, Any], now: dict[str, Any]) -> list[str]:
    """Lines "key: old -> new" for every key that is not free and differs between two resolved configs.

    A key that is younger than the old config counts as its default there.
    """
    old, new = decisive(before), decisive(now)
    return [
        f"{key}: {old.get(key, '(absent)')} -> {new.get(key, '(absent)')}"
        for key in sorted(old.keys() | new.keys())
        if old.get(key, None) != new.get(key, None)
    ]


def as_recorded(config: Config) -> dict[str, Any]:
    """The configuration for files and wandb: without passwords of URLs."""
    return redact_tree(dataclasses.asdict(config))


def check_continues(
    checkpoint: str, state: dict[str, Any], config: Config, data: "DataInfo", forked: bool = False
) -> None:
    """Refuses changed keys that would change the run; a fork may change all but those that its position depends on.

    Args:
        checkpoint: its name, for messages. state: contents of its trainer.json. data: the corpus as it is now.

    Raises:
        ConfigError: naming every such key, its old and its new value.
    """
    before, after = state["config"], dataclasses.asdict(config)
    if said := plugins.missing(before.get("plugins"), f"{checkpoint}: this run"):
        raise ConfigError(said)
    before, after = ({**whole, "model": _with_defaults(whole["model"])} for whole in (before, after))
    if model := state.get("model_config"):
        # Null stands for the corpus's own value, so the resolved values are compared.
        for key in ("vocab_size", "bos_token_id", "eos_token_id"):
            before = {**before, "datamodule": {**before["datamodule"], key: model.get(key)}}
            after["datamodule"][key] = getattr(data, key)
    changes = changes_that_alter_the_run(before, after)
    if forked:
        shape = ("datamodule.train_batch_len", "datamodule.train_batch_size", "model.")
        changes = [change for change in changes if change.startswith(shape)]
    fork, now = (before["fork_dir"], before["fork_step"]), (config.fork_dir, config.fork_step)
    if not forked and config.fork_dir and fork != now:
        changes.append(f"fork_dir, fork_step: {fork} -> {now}")
    listed = state.get("data_checksums")
    if listed and data.checksums and listed != data.checksums:
        changes.append(f"the corpus's list of checksums (its hash {listed} -> {data.checksums}): {data.path}")
    # A checkpoint that was imported from the authors' code does not name its corpus.
    if state["data_fingerprint"] not in (None, data.fingerprint):
        changes.append(f"the corpus (fingerprint {state['data_fingerprint']} -> {data.fingerprint}): {data.path}")
    if changes:
        advice = (
            "Undo these changes to continue it, or choose another output_dir (with fork_dir and fork_step to continue "
            "from it, or init_from an export of it), or start over with resume=false and without fork_dir"
        )
        if forked:
            advice = "A fork keeps the model and the shape of a batch: undo these changes, or give init_from an export"
        listed = "\n  ".join(changes)
        raise ConfigError(f"{checkpoint} was trained with other settings:\n  {listed}\n{advice}")


def _with_defaults(model: dict[str, Any]) -> dict[str, Any]:
    """A section `model` in which every field of the architecture's configuration has its value, listed or not."""
    from forgetting_transformer.model import registry  # loads PyTorch, which a run that continues has done

    if model["name"] not in registry.MODELS:
        return model
    kind = registry.MODELS[model["name"]].config_class
    defaults = {f.name: f.default for f in dataclasses.fields(kind) if f.default is not dataclasses.MISSING}
    return {**model, "config": kind.fields_in_use(defaults | model["config"])}
