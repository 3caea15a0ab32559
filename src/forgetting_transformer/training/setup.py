"""What a trainer works with, built in this order: processes, corpus, checkpoints, model, optimizer."""

import contextlib
import dataclasses
import hashlib
import logging
import random
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import numpy as np
import torch
from lightning.fabric import Fabric
from lightning.fabric.strategies import DDPStrategy, ModelParallelStrategy
from torch import nn
from transformers.initialization import no_init_weights

from forgetting_transformer import console
from forgetting_transformer.data import DataInfo
from forgetting_transformer.data.corpus import Corpus
from forgetting_transformer.model import registry
from forgetting_transformer.model.config import DecoderConfig
from forgetting_transformer.ops.selftest import Backend
from forgetting_transformer.plugins import CORPORA
from forgetting_transformer.training.checkpoint import Checkpointer
from forgetting_transformer.training.config import Config, ConfigError, check
from forgetting_transformer.training.counters import Origin
from forgetting_transformer.training.eval_sets import check_same_texts, check_tokenizers, open_eval_sets
from forgetting_transformer.training.execution import early, graphs
from forgetting_transformer.training.execution.choice import choose_on_all_ranks
from forgetting_transformer.training.faults import status
from forgetting_transformer.training.faults.corruption import Comparison
from forgetting_transformer.training.faults.failures import Start
from forgetting_transformer.training.faults.sentinel import Sentinel
from forgetting_transformer.training.optimization.building import build_optimizer, check_owns
from forgetting_transformer.training.optimization.parameter_groups import train_only
from forgetting_transformer.training.parallel import gpus
from forgetting_transformer.training.parallel.launch import launch
from forgetting_transformer.training.parallel.ranks import on_rank_zero
from forgetting_transformer.training.records.logs import start_logging
from forgetting_transformer.training.records.run_directory import RunDirectory, RunDirectoryError
from forgetting_transformer.training.start import initialisation

log = logging.getLogger(__name__)
#: How long the writer of a checkpoint on one rank waits for those on others. It is not what ends the wait for a writer
#: that hangs: the sentinel does, and knows a slow one from it.
_LET_WRITERS_WAIT = timedelta(days=7)


def connect(config: Config, start: Start) -> Fabric:
    """The processes of the job, connected.

    Rank 0 takes the run's folder before anything can fail, so that whatever fails is written there. If it cannot,
    `take_folder` says so on all ranks.
    """
    if console.rank() == 0:
        with contextlib.suppress(RunDirectoryError):
            status.claim(start.directory, config.resume)
            if config.resume:
                start_logging(start.directory, 0)
    fabric = launch(config)
    start.peers.join(fabric.global_rank, fabric.world_size)
    check(config, fabric.world_size)
    graphs.possible(config, fabric.device, fabric.world_size, compiled=config.train.compile is not False)
    return fabric


def take_folder(config: Config, directory: RunDirectory, fabric: Fabric) -> None:
    """
    Raises:
        RunDirectoryError: another run is writing there, or it is no place for a run.
    """
    on_rank_zero(fabric, lambda: status.claim(directory, config.resume))
    if config.resume:
        start_logging(directory, fabric.global_rank)


def move_aside(directory: RunDirectory, fabric: Fabric) -> None:
    """With resume=false: what the folder holds of a run goes into `previous/`, and the log begins."""

    def move() -> None:
        if moved := status.move_aside(directory):
            log.warning("resume=false: what the run in %s had written is now in %s", directory.root, moved)

    on_rank_zero(fabric, move)
    start_logging(directory, fabric.global_rank)


def open_data(config: Config, directory: RunDirectory, fabric: Fabric) -> tuple[Corpus, dict[str, Corpus]]:
    """The corpus and the sets of `eval_sets`, checked against the config now and not after hours of training.

    Raises:
        DataError, ConfigError: the corpus cannot be trained on, or is too small.
    """
    log.info("reading the corpus: %s in %s", config.datamodule.dataset, config.data_dir)
    data = CORPORA.make(config.datamodule.name, config.data_dir, config.datamodule)
    info = data.train_info()
    _check_budget(config, directory, info)
    if not config.skip_eval:
        data.eval_info()
    eval_sets = open_eval_sets(config, data, info)

    def check_texts() -> None:
        if hasattr(data, "check_tokenizers"):
            data.check_tokenizers()
        check_tokenizers(eval_sets, data, config)
        if config.resume:
            check_same_texts(eval_sets, directory.jsonlines)
        if config.eval_sets and config.skip_eval:
            log.warning("eval_sets is not evaluated, because of skip_eval=true; set skip_eval=false")

    on_rank_zero(fabric, check_texts)  # on one rank: what lies at a URL is fetched
    return data, eval_sets


def _check_budget(config: Config, directory: RunDirectory, info: DataInfo) -> None:
    data = config.datamodule
    if info.total_batches < 1:
        again = (
            "" if data.repeat else " (where parts of a mixture end: set datamodule.repeat=true to read the data again)"
        )
        raise ConfigError(
            f"{info.path} has no batch of {data.train_batch_size} sequences of {data.train_batch_len:,} tokens; "
            f"lower datamodule.train_batch_size or datamodule.train_batch_len, or use a larger corpus{again}"
        )
    if config.train.max_tokens > info.total_tokens and not data.repeat:
        # A run that goes on needs the corpus it began with.
        from forgetting_transformer.data.tools.download import fetching

        goes_on = config.resume and any(directory.checkpoints.glob("step-*"))
        more = None if goes_on else fetching(info, config.train.max_tokens)
        raise ConfigError(
            f"train.max_tokens={config.train.max_tokens:,} is more than the {info.total_tokens:,} tokens of "
            f"{info.path} at this batch shape; lower it, or set datamodule.repeat=true to read the data again"
            + (f", or fetch {more}" if more else "")
        )


def checkpointer(config: Config, directory: RunDirectory, fabric: Fabric, sentinel: Sentinel) -> Checkpointer:
    found = Checkpointer(
        directory.checkpoints,
        config.checkpoint_keep_last,
        fabric.global_rank,
        fabric.world_size,
        _LET_WRITERS_WAIT,
        config.checkpoint_background,
        directory.last_checkpoint,
    )
    found.watch = sentinel.waiting_for
    found.forked = config.fork_dir is not None
    return found


def model_and_kernels(
    config: Config, fabric: Fabric, data: Corpus, origin: Origin, begin: Callable[[str], None]
) -> tuple[Any, dict[str, Backend]]:
    """The model on the CPU, with its initial weights unless a checkpoint has them; and what runs each op, tested here.

    Drawing initial weights takes one core, and testing kernels waits for compilers: both go on at once, and so does
    compiling for the first step.

    Args:
        origin: gets what is known of the weights of `init_from`.
        begin: is told where testing kernels ends.
    """
    log.info("building the model: %s", config.model.name)
    info = data.train_info()
    with ThreadPoolExecutor(1, "model") as thread:
        empty = as_trained(outline(config, info), config)
        gpus.warn_without(config, fabric.device, empty)
        _check_fits(empty, config, data.packed)
        weights = None
        if config.init_from and origin.checkpoint is None:
            weights = _initial_weights(config, fabric, data, empty)
            origin.text, origin.weights_from, origin.notes = str(weights), weights.record, weights.notes
        draws = origin.checkpoint is None and (weights is None or bool(weights.fresh))
        building = thread.submit(build_model, config, info, initialise=draws)
        with early.compiling(config, fabric, empty, data.packed):
            backends = _choose_backends(config, fabric, data, empty)
        begin("model")
        model = building.result()
    if weights is not None:
        weights.fill(model)
    return model, backends


def _check_fits(model: Any, config: Config, packed: bool) -> None:
    """
    Raises:
        ConfigError: the corpus packs documents, and the model would carry a state from one into the next; or ranks are
            to share sequences, and the model is not made for so many.
    """
    kind, sharing, data = [type(model).__name__], config.strategy.context, config.datamodule
    if packed and (stateful := model.stateful_mixers() if hasattr(model, "stateful_mixers") else kind):
        raise ConfigError(
            f"datamodule.name={data.name} keeps documents apart, and model.name={config.model.name} would carry a "
            f"state from one into the next ({', '.join(stateful)}); use datamodule=corpus, or FoX, a Transformer, "
            "Mamba-2 or Samba"
        )
    length = min([data.train_batch_len, *([] if config.skip_eval else [data.eval_batch_len])])
    takes_whole = getattr(model, "whole_sequence_mixers", lambda *_: [f"{kind[0]} takes whole sequences only"])
    if sharing > 1 and (reasons := takes_whole(sharing, length)):
        raise ConfigError(
            f"strategy.context={sharing}: that many ranks cannot share a sequence of model.name={config.model.name} "
            f"({', '.join(reasons)}); use strategy.context=1, or a number that divides the heads, or longer sequences"
        )


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
        ConfigError: as `model_config`.
    """
    fields = model_config(config, data)
    with no_init_weights():
        model = registry.get(config.model.name).lm_class(fields)
    # Left out above together with the weights.
    model.tie_weights(recompute_mapping=False)
    train_only(model, config.train.only)
    if initialise:
        initialisation.initialise(model, config.seed)
    return as_trained(model, config)


def as_trained(model: Any, config: Config) -> Any:
    """The model with what `config.train` says about activations."""
    if config.train.gradient_checkpointing:
        checkpoint_activations(model, True)
    if config.train.block_inputs_on_host:
        model.keep_block_inputs_on_host()
    return model


def checkpoint_activations(model: Any, on: bool) -> None:
    """Switches the recomputing of activations."""
    if not on:
        model.gradient_checkpointing_disable()
        return
    model.gradient_checkpointing_enable()
    # Meant for frozen embeddings. Without gradients, in an evaluation, it would give the first block another kind of
    # input, for which torch.compile compiles everything once more.
    model.disable_input_require_grads()


def outline(config: Config, data: DataInfo) -> nn.Module:
    """The model without memory for its weights, to look at.

    Raises:
        ConfigError: as `model_config`.
    """
    fields = model_config(config, data)
    with torch.device("meta"):
        model = registry.get(config.model.name).lm_class(fields)
    train_only(model, config.train.only)
    return model


def _initial_weights(config: Config, fabric: Fabric, data: Corpus, model: nn.Module) -> Any:
    """What `init_from` has for the model; its tensors are on rank 0 only, which alone needs the folder."""
    from forgetting_transformer.training.start.initial_weights import initial_weights

    found = on_rank_zero(fabric, lambda: initial_weights(config, model, data.train_info(), data.folder))
    shared = fabric.broadcast(None if found is None else dataclasses.replace(found, tensors={}, notes=[]))
    return found if found is not None else shared


def _choose_backends(config: Config, fabric: Fabric, data: Corpus, model: nn.Module) -> dict[str, Backend]:
    if fabric.device.type == "cuda":
        log.info("testing the kernels")
    dtype = torch.float32 if config.fabric.precision == "32-true" else torch.bfloat16
    lengths = [config.datamodule.train_batch_len, *([] if config.skip_eval else [config.datamodule.eval_batch_len])]
    return choose_on_all_ranks(model, dtype, fabric.device, lengths, data.packed)


def model_and_optimizer(config: Config, fabric: Fabric, model: nn.Module, undecayed: set[str]) -> tuple[Any, Any]:
    """Both as Fabric's strategy wraps them. The optimizer must see the parameters that the strategy leaves behind."""
    wrapped = fabric.setup_module(model)
    optimizer: Any = fabric.setup_optimizers(build_optimizer(wrapped.module, undecayed, config.optimizer))
    check_owns(wrapped, optimizer, config.optimizer.name)
    return wrapped, optimizer


def graphs_of(config: Config, fabric: Fabric, model: Any, compiled: bool, flops_per_token: float) -> graphs.Graphs:
    """Those of a run whose model is set up, on or off."""
    flops = graphs.flops_in_a_block(config, fabric.world_size, flops_per_token, model.config.num_hidden_layers)
    wanted = graphs.choose(config, fabric.device, fabric.world_size, compiled, flops)
    return graphs.Graphs(wanted, model.parameters(), reduced=isinstance(fabric.strategy, DDPStrategy))


def comparison(fabric: Fabric, steps: int | None) -> Comparison | None:
    """Comparison of the ranks; None where no two hold the same, or without `strategy.compare_steps`."""
    strategy, shards = fabric.strategy, 1
    if isinstance(strategy, ModelParallelStrategy):
        shards = strategy.device_mesh.shape[1]
    return Comparison(fabric.world_size, shards, steps) if steps and fabric.world_size > shards else None


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
