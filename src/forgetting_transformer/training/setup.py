"""Parts of a trainer, in the order in which it builds them: processes, corpus, model and kernels, CUDA graphs."""

import contextlib
import hashlib
import logging
import random
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import torch
from lightning.fabric import Fabric
from lightning.fabric.strategies import DDPStrategy
from transformers.initialization import no_init_weights

from forgetting_transformer import console
from forgetting_transformer.data import DataInfo
from forgetting_transformer.data.corpus import Corpus
from forgetting_transformer.model import registry
from forgetting_transformer.model.config import DecoderConfig
from forgetting_transformer.ops.selftest import Backend
from forgetting_transformer.plugins import CORPORA
from forgetting_transformer.training.config import Config, ConfigError, checks
from forgetting_transformer.training.counters import Origin
from forgetting_transformer.training.execution import compilation, graphs, hardware
from forgetting_transformer.training.execution.choice import choose_on_all_ranks
from forgetting_transformer.training.faults.failures import Supervisor
from forgetting_transformer.training.initialisation import from_seed
from forgetting_transformer.training.optimization.building import train_only
from forgetting_transformer.training.parallel.launch import launch
from forgetting_transformer.training.parallel.ranks import on_rank_zero
from forgetting_transformer.training.records.logs import start_logging
from forgetting_transformer.training.records.run_directory import RunDirectory, RunDirectoryError

log = logging.getLogger(__name__)


def connect(config: Config, supervisor: Supervisor) -> Fabric:
    """Starts and connects the processes of the job, which then hold the run's folder.

    Rank 0 takes the folder before anything can fail, so that whatever fails is written there.

    Raises:
        ConfigError: so many processes cannot do what the config asks.
        RunDirectoryError: another run is writing there, or it is no place for a run; on every rank.
    """
    if console.rank() == 0:
        with contextlib.suppress(RunDirectoryError):  # reported below, on all ranks
            supervisor.directory.claim(config.resume)
            if config.resume:
                start_logging(supervisor.directory, 0)
    fabric = launch(config)
    supervisor.peers.join(fabric.global_rank, fabric.world_size)
    checks.check(config, fabric.world_size)
    graphs.check_possible(config, fabric.device, fabric.world_size, compiled=config.train.compile is not False)
    on_rank_zero(fabric, lambda: supervisor.directory.claim(config.resume))
    if config.resume:
        start_logging(supervisor.directory, fabric.global_rank)
    return fabric


def open_data(config: Config, directory: RunDirectory, fabric: Fabric) -> Corpus:
    """The corpus, checked now and not after hours.

    Raises:
        DataError, ConfigError: the corpus cannot be trained on, or is too small.
    """
    log.info("reading the corpus: %s in %s", config.datamodule.dataset, config.data_dir)
    data = CORPORA.get(config.datamodule.name).build(config.data_dir, config.datamodule)
    checks.check_budget(config, directory, data.train_info())
    if not config.skip_eval:
        data.eval_info()  # for its errors
    if hasattr(data, "check_tokenizers"):
        on_rank_zero(fabric, data.check_tokenizers)  # on one rank: what lies at a URL is fetched
    return data


def model_and_kernels(
    config: Config, fabric: Fabric, data: Corpus, origin: Origin, begin: Callable[[str], None]
) -> tuple[Any, dict[str, Backend]]:
    """The model on the CPU, with initial weights unless a checkpoint has them; and the backend of each op, tested here.

    Initial weights are drawn while kernels are tested and the first step is compiled: the one takes a core, the others
    wait for compilers.

    Args:
        origin: gets facts about the weights of `init_from`.
        begin: called when the stage "model" of the start begins.
    """
    log.info("building the model: %s", config.model.name)
    info = data.train_info()
    with ThreadPoolExecutor(1, "model") as thread:
        empty = build_model(config, info, initialise=False, device="meta")
        hardware.warn_without_gpu(config, fabric.device, empty)
        checks.check_sequences(empty, config, data.packed)
        given: dict[str, Any] | None = None  # weights of `init_from`
        fresh: list[str] = []  # names of those that it lacks
        if config.init_from and origin.checkpoint is None:
            from forgetting_transformer.training.initialisation import from_model

            given, fresh = from_model.read(config, fabric, data, empty, origin)
        draws = origin.checkpoint is None and (given is None or bool(fresh))
        building = thread.submit(build_model, config, info, initialise=draws)
        dtype = torch.float32 if config.fabric.precision == "32-true" else torch.bfloat16
        lengths = [config.datamodule.train_batch_len, *([] if config.skip_eval else [config.datamodule.eval_batch_len])]
        if fabric.device.type == "cuda":
            log.info("testing the kernels")
        with compilation.compiling(config, fabric, empty, data.packed):
            backends = choose_on_all_ranks(empty, dtype, fabric.device, lengths, data.packed)
        begin("model")
        model = building.result()
    if given is not None:
        from_model.fill(model, given, fresh)
    return model, backends


def model_config(config: Config, data: DataInfo) -> DecoderConfig:
    """The configuration of the model, with the fields that the corpus decides.

    Raises:
        ConfigError: an architecture that is not there, a field that it does not have or a value that the field cannot
            have, or a vocabulary that is not the data's.
    """
    try:
        registry.get(config.model.name)
    except ValueError as error:
        raise ConfigError(str(error)) from error
    decided = {"vocab_size": data.vocab_size, "bos_token_id": data.bos_token_id, "eos_token_id": data.eos_token_id}
    checks.check_decided(config.model.config, decided)
    try:
        built = registry.build_config(config.model.name, **config.model.config | decided)
    except (KeyError, TypeError, ValueError) as error:
        raise ConfigError(f"model.config: {error.args[0]}") from error
    if built.loss != "per_token":
        raise ConfigError(
            f"model.config.loss is {built.loss!r}, which is for Hugging Face's Trainer; training here needs "
            f"'per_token', leave it out"
        )
    return built


def build_model(config: Config, data: DataInfo, initialise: bool = True, device: str = "cpu") -> Any:
    """The model, with the same initial weights whatever strategy and number of processes.

    Args:
        initialise: False leaves the weights as memory is, for a checkpoint to fill.
        device: "meta" gives the weights no memory, for a model to look at, with `initialise=False`.

    Raises:
        ConfigError: as `model_config`.
    """
    fields = model_config(config, data)
    with torch.device(device), no_init_weights():
        model: Any = registry.get(config.model.name).lm_class(fields)
    # Left out above together with the weights.
    model.tie_weights(recompute_mapping=False)
    train_only(model, config.train.only)
    if config.train.gradient_checkpointing:
        model.checkpoint_activations(True)
    if config.train.block_inputs_on_host:
        model.keep_block_inputs_on_host()
    if initialise:
        from_seed.initialise(model, config.seed)
    return model


def graphs_of(config: Config, fabric: Fabric, model: Any, compiled: bool, flops_per_token: float) -> graphs.Graphs:
    """CUDA graphs of a run whose model is set up, on or off (`train.cuda_graphs`)."""
    flops = graphs.flops_in_a_block(config, fabric.world_size, flops_per_token, model.config.num_hidden_layers)
    wanted = graphs.choose(config, fabric.device, fabric.world_size, compiled, flops)
    return graphs.Graphs(wanted, model.parameters(), reduced=isinstance(fabric.strategy, DDPStrategy))


def synchronize(device: torch.device) -> None:
    """Waits until the device has finished its work; a CPU always has."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def seed_step(seed: int, batch: int, rank: int) -> None:
    """Makes random numbers a function of (seed, step, rank): there is nothing to save, and a resume repeats them."""
    digest = hashlib.blake2b(f"{seed}/{batch}/{rank}".encode(), digest_size=4).digest()
    number = int.from_bytes(digest, "little")
    random.seed(number)
    np.random.seed(number)
    torch.manual_seed(number)
