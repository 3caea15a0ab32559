"""The parts of a run, each built by one function: model, optimizer, log files. parts.py puts them together."""

import contextlib
import hashlib
import inspect
import logging
import os
import random
import shutil
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import torch
from torch import nn
from transformers.initialization import no_init_weights

from forgetting_transformer import console
from forgetting_transformer.data import DataInfo
from forgetting_transformer.data.checksums import list_name
from forgetting_transformer.data.corpus import Corpus
from forgetting_transformer.model import registry
from forgetting_transformer.model.config import DecoderConfig
from forgetting_transformer.plugins import CORPORA, OPTIMIZERS
from forgetting_transformer.training.config import Config, ConfigError, DataModuleConfig, OptimizerConfig
from forgetting_transformer.training.faults import status
from forgetting_transformer.training.parallel import gpus
from forgetting_transformer.training.records.logs import LogFile, TerminalHandler
from forgetting_transformer.training.records.run_directory import RunDirectory, RunDirectoryError
from forgetting_transformer.training.start import initialisation
from forgetting_transformer.training.start.start_block import human_count

if TYPE_CHECKING:  # an export takes parts from here too, and importing Fabric takes seconds
    from lightning.fabric import Fabric

log = logging.getLogger(__name__)
#: Parameters from which on training on a CPU by accident is worth a warning.
LARGE = 100_000_000
T = TypeVar("T")


def on_rank_zero(fabric: "Fabric", action: Callable[[], T]) -> T | None:
    """Rank 0 acts, the others wait; if it fails, every rank raises the same error instead of waiting for ever."""
    result, error = None, None
    if fabric.is_global_zero:
        try:
            result = action()
        except Exception as failure:
            error = failure
    error = fabric.broadcast(error)
    if error is not None:
        raise error
    return result


def claim_early(directory: RunDirectory, resume: bool) -> None:
    """Rank 0 takes the run's folder before anything can fail, so that whatever fails is written there.

    If it cannot, all ranks must hear of it and do so later, when they are connected and it is tried once more.
    """
    if console.rank() != 0:
        return
    with contextlib.suppress(RunDirectoryError):
        status.claim(directory, resume)
        if resume:
            start_logging(directory, 0)


def start_logging(directory: RunDirectory, rank: int) -> None:
    """Every rank writes `logs/rank-<k>.log`; rank 0 speaks on the terminal, the others only to warn."""
    directory.make(directory.logs)
    root = logging.getLogger()
    root.setLevel(logging.INFO)
    for handler in list(root.handlers):
        root.removeHandler(handler)
        handler.close()
    file = LogFile(directory.logs / f"rank-{rank}.log")
    terminal = TerminalHandler(logging.INFO if rank == 0 else logging.WARNING)
    for handler in (file, terminal):
        handler.setFormatter(console.log_format(rank))
        root.addHandler(handler)
    logging.captureWarnings(True)
    # Said by torch at every checkpoint of a run on one process, where it is meant.
    warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable or uninitialized")
    # Said by newer releases of transformers of the only name that older ones have.
    warnings.filterwarnings("ignore", message=".*gradient_checkpointing_enable.* is deprecated")
    sys.excepthook = _log_uncaught


def _log_uncaught(kind: type[BaseException], error: BaseException, trace: Any) -> None:
    log.critical("the run stopped", exc_info=(kind, error, trace))


def build_data(data_dir: str, config: DataModuleConfig) -> Corpus:
    return CORPORA.make(config.name, data_dir, config)


def list_held_to(checkpoint: str, state: dict[str, Any], data: DataInfo, rank: int) -> str | None:
    """The hash of the list of checksums that a continued run and its later checkpoints must match; None without one.

    A list that is gone does not stop the run. Rank 0 warns that contents are not checked any more. A list that comes
    back later must be the one that the run began with.

    Args:
        checkpoint: its name, for messages. state: what its trainer.json holds. data: the corpus as it is now.
    """
    listed = state.get("data_checksums")
    if listed and not data.checksums and rank == 0:
        folder, _, array = data.path.rpartition("/")
        log.warning(
            "the contents of the corpus are not checked any more: %s was trained with a list of checksums (its hash "
            "%s), and %s/%s is gone. Copy this file back, and every chunk is compared with it again",
            *(checkpoint, listed, folder, list_name(array)),
        )
    return data.checksums or listed


def model_config(config: Config, data: DataInfo) -> DecoderConfig:
    """The configuration of the model, with what the corpus decides.

    Raises:
        ConfigError: an architecture that is not there, a field that it does not have or a value that the field cannot
            have, or a vocabulary that is not the data's.
    """
    try:
        registry.get(config.model.name)
    except ValueError as error:
        raise ConfigError(str(error)) from error
    fields = dict(config.model.config)
    decided = {"vocab_size": data.vocab_size, "bos_token_id": data.bos_token_id, "eos_token_id": data.eos_token_id}
    for key, value in decided.items():
        if fields.get(key) not in (None, value):
            raise ConfigError(
                f"model.config.{key}={fields[key]} is not the corpus's {value}; leave it unset, the data decides it, "
                f"or set datamodule.{key}={fields[key]} if the corpus's manifest is wrong or silent"
            )
    fields |= decided
    try:
        found = registry.build_config(config.model.name, **fields)
    except (KeyError, TypeError, ValueError) as error:
        raise ConfigError(f"model.config: {error.args[0]}") from error
    if found.loss != "per_token":
        raise ConfigError(
            f"model.config.loss is {found.loss!r}, which is for Hugging Face's Trainer; training here needs "
            f"'per_token', leave it out"
        )
    return found


def build_model(config: Config, data: DataInfo, initialise: bool = True) -> nn.Module:
    """The model on the CPU, with the same initial weights whatever the device, strategy and number of processes.

    Args:
        initialise: False leaves the weights as memory is, for a checkpoint to fill.

    Raises:
        ConfigError: a field the architecture does not have, or a vocabulary that is not the data's.
    """
    fields = model_config(config, data)
    with no_init_weights():
        model = registry.get(config.model.name).lm_class(fields)
    # Left out above together with the weights.
    model.tie_weights(recompute_mapping=False)
    if initialise:
        initialisation.initialise(model, config.seed)
    if config.train.gradient_checkpointing:
        model.gradient_checkpointing_enable()
        # Meant for frozen embeddings. Without gradients, in an evaluation, it would give the first block another kind
        # of input, for which torch.compile compiles everything once more.
        model.disable_input_require_grads()
    if config.train.block_inputs_on_host:
        model.keep_block_inputs_on_host()
    return model


def outline(config: Config, data: DataInfo) -> nn.Module:
    """The model without memory for its weights, to look at.

    Raises:
        ConfigError: as `build_model`.
    """
    fields = model_config(config, data)
    with torch.device("meta"):
        return registry.get(config.model.name).lm_class(fields)


def check_packs(model: Any, config: Config) -> None:
    """
    Raises:
        ConfigError: the corpus packs documents, and the model would carry a state from one into the next.
    """
    stateful = model.stateful_mixers() if hasattr(model, "stateful_mixers") else [type(model).__name__]
    if stateful:
        raise ConfigError(
            f"datamodule.name={config.datamodule.name} keeps documents apart, and model.name={config.model.name} would "
            f"carry a state from one into the next ({', '.join(stateful)}); use "
            "datamodule=corpus, or FoX, a Transformer, Mamba-2 or Samba"
        )


def check_shares(model: Any, config: Config) -> None:
    """
    Raises:
        ConfigError: ranks are to share sequences, and the model is not made for so many.
    """
    if (sharing := config.strategy.context) == 1:
        return
    data = config.datamodule
    length = min([data.train_batch_len, *([] if config.skip_eval else [data.eval_batch_len])])
    takes_whole = [f"{type(model).__name__} takes whole sequences only"]
    reasons_for = getattr(model, "whole_sequence_mixers", lambda size, length=None: takes_whole)
    if reasons := reasons_for(sharing, length):
        # 1 divides all heads: what is left then has none to divide.
        if reasons_for(1):
            fix = "use strategy.context=1"
        elif reasons_for(sharing):
            fix = "use a number that divides the heads, or strategy.context=1"
        else:
            fix = "use longer sequences, or a smaller strategy.context"
        raise ConfigError(
            f"strategy.context={sharing}: that many ranks cannot share a sequence of model.name={config.model.name} "
            f"({', '.join(reasons)}); {fix}"
        )


def warn_without_gpu(config: Config, data: DataInfo, device: torch.device) -> None:
    """A model of this size on a CPU is seldom meant, and would start without a complaint."""
    chosen = os.environ.get("LT_ACCELERATOR", config.fabric.accelerator)
    if device.type != "cpu" or chosen != "auto":
        return
    parameters = sum(p.numel() for p in outline(config, data).parameters())
    if parameters >= LARGE:
        log.warning(
            "no GPU was found, and %s parameters train very slowly on a CPU. %s. Choose the CPU with "
            "fabric.accelerator=cpu (`fabric run`: --accelerator cpu) if it is meant",
            human_count(parameters),
            gpus.missing(),
        )


def build_optimizer(model: nn.Module, undecayed: set[str], config: OptimizerConfig) -> torch.optim.Optimizer:
    """
    Raises:
        ConfigError: what was built is no optimizer of PyTorch's kind, which would show only when the run is continued.
    """
    optimizer = OPTIMIZERS.make(config.name, model, undecayed, config)
    if (
        not isinstance(optimizer, torch.optim.Optimizer)
        or "closure" not in inspect.signature(optimizer.step).parameters
    ):
        raise ConfigError(
            f"optimizer.name={config.name!r} made a {type(optimizer).__name__}; it must be a torch.optim.Optimizer "
            "whose step takes closure=None"
        )
    return optimizer


def check_optimizer_owns(model: nn.Module, optimizer: torch.optim.Optimizer, name: str) -> None:
    """What no optimizer holds is not trained, silently; so it is with one that was built before sharding.

    Args:
        name: what the config calls the optimizer.

    Raises:
        ConfigError: it does not hold exactly the model's parameters that need a gradient.
    """
    owned = {id(p) for group in optimizer.param_groups for p in group["params"]}
    used = {id(p): key for key, p in model.named_parameters() if p.requires_grad}
    if left_out := [key for parameter, key in used.items() if parameter not in owned]:
        first = left_out[0].removeprefix("_forward_module.").removeprefix("module.")
        raise ConfigError(
            f"optimizer.name={name!r} leaves out {len(left_out)} of the model's {len(used)} parameter tensors, such as "
            f"{first}; give it all of model.parameters()"
        )
    if foreign := len(owned - used.keys()):
        raise ConfigError(
            f"optimizer.name={name!r} holds {foreign} parameter tensors that are not the model's; give it those of "
            "model.parameters() and no copies"
        )


def synchronize(device: torch.device) -> None:
    """Waits until the device has done what it was given; a CPU has."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def seed_step(seed: int, batch: int, rank: int) -> None:
    """Random numbers of a step are a function of (seed, step, rank): nothing to save, and a resume repeats them."""
    digest = hashlib.blake2b(f"{seed}/{batch}/{rank}".encode(), digest_size=4).digest()
    number = int.from_bytes(digest, "little")
    random.seed(number)
    np.random.seed(number)
    torch.manual_seed(number)


def copy_tokenizer(data_folder: Path, directory: RunDirectory) -> None:
    """Keeps the corpus's tokenizer with the run, so that an export needs nothing but the run's folder."""
    if (data_folder / "tokenizer").is_dir() and not directory.tokenizer.exists():
        shutil.copytree(data_folder / "tokenizer", directory.tokenizer)
