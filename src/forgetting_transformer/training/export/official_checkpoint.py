"""Training checkpoints of the authors' code: read without running code from them, exported, or converted.

    OFFICIAL_DIR/config.yaml                        the composed configuration; parts are named by `_target_`
    OFFICIAL_DIR/checkpoints/step-<15 digits>.pt    weights, AdamW's state, counters; the number is training tokens
    OFFICIAL_DIR/checkpoints/step-<15 digits>.pt.done    beside it once it is whole; `.pt.keep` where it is to stay

What a class is called in `_target_` chooses one of this project's; nothing that a folder names is imported.
"""

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
import yaml
from omegaconf import OmegaConf
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.initialization import no_init_weights

from forgetting_transformer.command_line import one_line
from forgetting_transformer.files import append_durably, decode, parse_yaml, write_atomically
from forgetting_transformer.model import registry
from forgetting_transformer.training.checkpoint import Checkpointer
from forgetting_transformer.training.checkpoint.folder import Checkpoint, CheckpointError, steps_in
from forgetting_transformer.training.checkpoint.reading import check_weights
from forgetting_transformer.training.config import Config
from forgetting_transformer.training.config.continuing import as_recorded
from forgetting_transformer.training.config.parsing import parse
from forgetting_transformer.training.optimization.building import build_optimizer, undecayed_parameters
from forgetting_transformer.training.records.run_directory import RunDirectory, RunDirectoryError

#: Functions named in `schedule._target_`.
_SCHEDULES = {
    "constant_schedule": "constant",
    "warmup_cosine_decay_schedule": "warmup_cosine",
    "warmup_linear_decay_schedule": "warmup_linear",
    "warmup_one_minus_sqrt_schedule": "warmup_stable_decay",
}
_STRATEGIES = {"FSDPStrategy": "fsdp", "DDPStrategy": "ddp"}
#: Top-level keys about other folders or about exports.
_LEFT_OUT = ("fork_dir", "fork_step", "hf_load_dir", "hf_save_dir", "hf_load_step", "hydra")
#: Keys of sections that the authors' program fills in, or that must be null there.
_FILLED_IN = {
    "datamodule": ("data_dir", "rank", "world_size", "train_seq_len", "train_doc_len", "eval_seq_len", "eval_doc_len"),
    # The corpus decides the first three; the last has no effect.
    "model": ("vocab_size", "bos_token_id", "eos_token_id", "max_position_embeddings"),
}
#: Ids of GPT-2's vocabulary, and its BOS token.
_GPT2_IDS, _GPT2_BOS = 50257, 50256
#: All that such a file holds besides tensors: an array of sums, which NumPy 1 and 2 pickle under two names.
_NUMPY: list[Any] = [
    np.ndarray, np.dtype, np.dtypes.Float64DType,
    *((np.zeros(0).__reduce__()[0], f"numpy.{core}.multiarray._reconstruct") for core in ("core", "_core")),
]  # fmt: skip


def steps_of(folder: Path) -> list[int]:
    """Training tokens of the official checkpoints in `folder` that are whole."""
    files = (path.with_suffix("") for path in folder.glob("step-*.pt.done"))
    return sorted(int(file.stem.removeprefix("step-")) for file in files if file.is_file())


def load_model(directory: RunDirectory, step: int | None = None) -> tuple[Checkpoint, dict[str, Any], PreTrainedModel]:
    """The model of an official checkpoint, on the CPU in fp32 and evaluation mode, as from `export.load_checkpoint`.

    Args:
        step: training tokens; None for the newest.

    Raises:
        CheckpointError: there is none, it is damaged, or it holds what no training checkpoint needs.
    """
    checkpoint = _find(directory, step)
    config = _config(directory)
    model = _model(checkpoint, config, _read(checkpoint))
    state = {"config": as_recorded(config), "model_config": model.config.to_dict()}
    return checkpoint, state, model.eval()


def import_run(official_dir: Path, output_dir: Path, step: int | None = None) -> tuple[Checkpoint, Config]:
    """Makes `output_dir` a run that continues the authors' run from a checkpoint: weights, moments, counters, rate.

    Args:
        step: training tokens of the checkpoint; None for the newest.

    Returns:
        the checkpoint that was written, and the configuration that the run had.

    Raises:
        CheckpointError: there is none, it is damaged or does not belong to its configuration.
        RunDirectoryError: `output_dir` is not empty of runs.
    """
    source, target = RunDirectory(official_dir), RunDirectory(output_dir)
    checkpoint, config = _find(source, step), _config(source)
    config.output_dir = str(target.root)
    saved, length = _read(checkpoint), config.datamodule.train_batch_len
    with _reading(checkpoint.path):
        window = torch.from_numpy(saved["window_loss_per_token"])
        counters = {name: saved[name] for name in ("token_count", "batch_count", "total_time", "update_time")}
        sequences = torch.tensor(saved["window_seq_count"], dtype=torch.float64)
        tokens = saved["batch_count"] * config.datamodule.train_batch_size * length
        if not saved["token_count"] == checkpoint.step == tokens or window.shape != (length,):
            raise ValueError(
                f"it counts {saved['token_count']} tokens in {saved['batch_count']} batches and {len(window)} "
                f"positions, config.yaml has batches of {config.datamodule.train_batch_size} x {length} tokens"
            )
    model = _model(checkpoint, config, saved)
    if model.config.bos_token_id is None:
        raise CheckpointError(
            f"{checkpoint.path} was not imported: its vocabulary of {model.config.vocab_size:,} ids is not "
            "LongCrawl64's, so the first token of a sequence is not known; begin a run with its export (init_from)"
        )
    optimizer = build_optimizer(model, undecayed_parameters(model, config.train), config.optimizer)
    optimizer.state.update(_moments(checkpoint, saved, model, config))
    state = {
        **counters,
        # The authors' code counts none.
        "flop_count": round(saved["token_count"] * model.config.flops_per_token(length)),
        "config": as_recorded(config),
        "model_config": model.config.to_dict(),
        # The corpus is not recorded there, nor is how the run computed.
        "data_fingerprint": None,
        "data_checksums": None,
        "execution": None,
        "world_size": 1,
        "environment": {"imported_from": str(checkpoint.path.absolute())},
    }
    callback_state = {
        "loss_by_position.loss_T": window,
        "loss_by_position.sequences": sequences,
    }
    target.check_ours(resume=True)
    if target.is_run or steps_in(target.checkpoints) or steps_of(target.checkpoints):
        raise RunDirectoryError(f"{target.root} holds a run already; choose another folder for the imported one")
    target.acquire()
    try:
        target.checkpoints.mkdir(parents=True, exist_ok=True)
        writer = Checkpointer(target.checkpoints, config.checkpoint_keep_last)
        writer.save(checkpoint.step, model, optimizer, state, callback_state, checkpoint.permanent)
        written = writer.take_result(wait=True)
        if written is not None and written.error:
            raise written.error
        target.jsonlines.mkdir(parents=True, exist_ok=True)
        append_durably(target.saves, f'{{"step": {checkpoint.step}}}\n'.encode())
        write_atomically(target.config, yaml.safe_dump(as_recorded(config), sort_keys=False))
    finally:
        target.release()
    path = target.checkpoints / f"step-{checkpoint.step:015d}"
    return Checkpoint(path, checkpoint.step, checkpoint.permanent), config


def _find(directory: RunDirectory, step: int | None) -> Checkpoint:
    steps = steps_of(directory.checkpoints)
    if not steps or step not in (None, *steps):
        wanted = "no checkpoint of the authors' code" + ("" if step is None else f" at step {step}")
        raise CheckpointError(
            f"{wanted} in {directory.checkpoints}: it holds {steps or 'no step-*.pt with a .pt.done beside it'}"
        )
    step = steps[-1] if step is None else step
    path = directory.checkpoints / f"step-{step:015d}.pt"
    return Checkpoint(path, step, path.with_name(f"{path.name}.keep").is_file())


def _config(directory: RunDirectory) -> Config:
    """The configuration of an official run, in this project's keys."""
    with _reading(directory.config):
        text = decode(directory.config.read_bytes(), directory.config)
        if "${" in text:
            raise ValueError("it refers to other values with ${…}, and the authors' code writes values")
        return parse(OmegaConf.create(_translated(parse_yaml(text, directory.config))))


@contextlib.contextmanager
def _reading(path: Path) -> Iterator[None]:
    """Raises CheckpointError, with the file's name, for any error that a damaged or foreign file causes."""
    try:
        yield
    except Exception as error:
        said = f"{type(error).__name__}: {one_line(error)[:300]}"
        raise CheckpointError(f"{path} cannot be used, or is not what the authors' code writes ({said})") from error


def _translated(official: dict[str, Any]) -> dict[str, Any]:
    """A configuration in this project's keys. Raises what Python does where a section or a `_target_` is missing."""
    parts = {name: _split(official[name]) for name in ("optimizer", "schedule", "datamodule", "strategy", "model")}
    data, fields = parts["datamodule"][1], _split(official["model"]["config"])[1]
    names = {architecture.lm_class.__name__: name for name, architecture in registry.MODELS.items()}
    return {
        **{key: value for key, value in official.items() if key not in (*parts, *_LEFT_OUT)},
        "optimizer": parts["optimizer"][1],
        "schedule": {"name": _SCHEDULES[parts["schedule"][0]], **parts["schedule"][1]},
        "strategy": {"name": _STRATEGIES[parts["strategy"][0]]},
        "datamodule": {
            **{key: value for key, value in data.items() if key not in _FILLED_IN["datamodule"]},
            "dataset": parts["datamodule"][0].removesuffix("DataModule").lower(),
        },
        "model": {
            "name": names[parts["model"][0]],
            "config": {key: value for key, value in fields.items() if key not in _FILLED_IN["model"]},
        },
    }


def _split(section: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    """Last part of the class or function that a section names, and its other keys."""
    return section["_target_"].rpartition(".")[2], {key: value for key, value in section.items() if key != "_target_"}


def _read(checkpoint: Checkpoint) -> dict[str, Any]:
    """Contents of the file; tensors stay on disk until they are used, and no code that it refers to is run."""
    with _reading(checkpoint.path), torch.serialization.safe_globals(_NUMPY):
        return torch.load(checkpoint.path, map_location="cpu", mmap=True, weights_only=True)


def _model(checkpoint: Checkpoint, config: Config, saved: dict[str, Any]) -> PreTrainedModel:
    with _reading(checkpoint.path), no_init_weights():
        weights = saved["model"]
        vocab_size = next(len(weights[name]) for name in weights if name.endswith("embeddings.weight"))
        bos = _GPT2_BOS if vocab_size == _GPT2_IDS else None
        model = registry.get(config.model.name).lm_class(
            registry.build_config(
                config.model.name, **config.model.config, vocab_size=vocab_size, bos_token_id=bos, eos_token_id=bos
            )
        )
        model.load_state_dict(weights)
    check_weights(model, checkpoint.path)
    return model


def _moments(
    checkpoint: Checkpoint, saved: dict[str, Any], model: nn.Module, config: Config
) -> dict[Tensor, dict[str, Tensor]]:
    """AdamW's state of every parameter.

    FSDP saves it by name. DDP saves what torch's optimizer numbers: first all decayed parameters, then the others, each
    in the order of the model's weights in the same file.
    """
    parameters = dict(model.named_parameters())
    found: dict[Tensor, dict[str, Tensor]] = {}
    with _reading(checkpoint.path):
        state = saved["optimizer"]["state"]
        if all(isinstance(key, int) for key in state):
            undecayed = undecayed_parameters(model, config.train)
            order = sorted((name for name in saved["model"] if name in parameters), key=undecayed.__contains__)
            state = {name: state[number] for number, name in enumerate(order)}
        for name, parameter in parameters.items():
            moments = {moment: state[name][moment] for moment in ("exp_avg", "exp_avg_sq")}
            if any(moment.shape != parameter.shape or moment.dtype != torch.float32 for moment in moments.values()):
                raise ValueError(f"a moment of {name} does not fit the parameter")
            found[parameter] = {"step": torch.as_tensor(float(state[name]["step"]), dtype=torch.float32), **moments}
    return found
