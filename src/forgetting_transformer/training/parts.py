"""The parts of a run and the order in which they are made. trainer.py trains with them."""

import contextlib
import dataclasses
import logging
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any, cast

import torch
from lightning.fabric.strategies import DDPStrategy, ModelParallelStrategy
from torch import nn

from forgetting_transformer.data.mixture import MixtureDataModule
from forgetting_transformer.data.tools.download import fetching
from forgetting_transformer.ops.selftest import Backend
from forgetting_transformer.training import setup
from forgetting_transformer.training.checkpoint import Checkpointer
from forgetting_transformer.training.clock import Clock
from forgetting_transformer.training.config import Config, ConfigError, check
from forgetting_transformer.training.config.continuing import recorded
from forgetting_transformer.training.counters import Counters
from forgetting_transformer.training.eval_sets import check_same_texts, check_tokenizers, open_eval_sets
from forgetting_transformer.training.execution import choice as execution
from forgetting_transformer.training.execution import graphs
from forgetting_transformer.training.execution.compilation import Compilation
from forgetting_transformer.training.execution.graphs import Graphs, check_device
from forgetting_transformer.training.execution.kernel_choice import choose_on_all_ranks
from forgetting_transformer.training.faults import status
from forgetting_transformer.training.faults.corruption import Comparison
from forgetting_transformer.training.faults.peers import Peers
from forgetting_transformer.training.faults.sentinel import Sentinel
from forgetting_transformer.training.faults.step_guard import StepGuard
from forgetting_transformer.training.faults.stop import Vote
from forgetting_transformer.training.optimization.parameter_groups import undecayed_parameters
from forgetting_transformer.training.optimization.schedule import build_schedule
from forgetting_transformer.training.parallel.launch import launch
from forgetting_transformer.training.parallel.ranks import Ranks
from forgetting_transformer.training.records.run_directory import RunDirectory
from forgetting_transformer.training.saving import Saver
from forgetting_transformer.training.start.initial_weights import InitialWeights, initial_weights
from forgetting_transformer.training.start.provenance import describe
from forgetting_transformer.training.start.resume import find_checkpoint, load_checkpoint

log = logging.getLogger(__name__)
#: How long the writer of a checkpoint on one rank waits for those on others. It is not what ends the wait for a writer
#: that hangs: the sentinel does, and knows a slow one from it.
_LET_WRITERS_WAIT = timedelta(days=7)


class Parts:
    """Everything that training needs, on one rank. Whatever can be refused is refused before the first step.

    Args:
        sentinel: around all of it; peers: who fails first. Default: of this start's own.
        directory: of the run; default what the config says.
    """

    def __init__(
        self,
        config: Config,
        sentinel: Sentinel | None = None,
        directory: RunDirectory | None = None,
        peers: Peers | None = None,
    ) -> None:
        self.startup, self.clock = Clock("imports"), Clock("start")
        self.config = config
        self.sentinel = sentinel or Sentinel(config.strategy.timeout_seconds)
        self.directory = directory or RunDirectory(config.output_dir)
        self.begin("processes")
        setup.claim_early(self.directory, config.resume)
        self.fabric = launch(config)
        self.peers = peers or Peers()
        self.peers.join(self.fabric.global_rank, self.fabric.world_size)
        check(config, self.fabric.world_size)
        check_device(config.train.cuda_graphs, self.fabric.device)
        timeout = timedelta(seconds=config.strategy.timeout_seconds)
        #: What of a batch this rank trains on.
        self.ranks = Ranks(self.fabric.global_rank, self.fabric.world_size, config.strategy.context, timeout)
        self.begin("data")
        self.schedule = build_schedule(config.schedule, config.optimizer.lr)
        setup.on_rank_zero(self.fabric, lambda: status.claim(self.directory, config.resume))
        if config.resume:
            setup.start_logging(self.directory, self.fabric.global_rank)

        log.info("reading the corpus: %s in %s", config.datamodule.dataset, config.data_dir)
        self.data = setup.build_data(config.data_dir, config.datamodule)
        self.data_info = self.data.train_info()
        self._check_budget()
        self.eval_sets = open_eval_sets(config, self.data, self.data_info, self.ranks.data_size)
        if config.eval_sets or isinstance(self.data, MixtureDataModule):
            setup.on_rank_zero(self.fabric, self._check_texts)  # on one rank: what lies at a URL is fetched
        self.begin("compiler")
        setup.warn_without_gpu(config, self.data_info, self.fabric.device)
        self.compilation = Compilation(
            config,
            self.data_info.vocab_size,
            self.fabric.device,
            self.fabric.global_rank,
            self.fabric.world_size,
        )
        self.begin("checkpoint")
        self.checkpointer = Checkpointer(
            self.directory.checkpoints,
            config.checkpoint_keep_last,
            self.fabric.global_rank,
            self.fabric.world_size,
            _LET_WRITERS_WAIT,
            config.checkpoint_background,
            self.directory.last_checkpoint,
        )
        self.checkpointer.watch = self.sentinel.waiting_for
        self.checkpointer.forked = config.fork_dir is not None
        self.vote = Vote(self.fabric.world_size, timeout)
        checkpoint, forked = find_checkpoint(config, self.checkpointer, self.fabric)
        self.begin("self-test")
        log.info("building the model: %s", config.model.name)
        # Drawing initial weights takes one core, and testing kernels waits for compilers.
        with ThreadPoolExecutor(1, "model") as thread:
            outline = setup.outline(config, self.data_info)
            if self.data.packed:
                setup.check_packs(outline, config)
            setup.check_shares(outline, config)
            weights = self._initial_weights(outline) if config.init_from and checkpoint is None else None
            draws = checkpoint is None and (weights is None or bool(weights.fresh))
            building = thread.submit(setup.build_model, config, self.data_info, initialise=draws)
            #: op: what runs it, tested here and now.
            self.backends = self._choose_backends(outline)
            self.begin("model")
            model: Any = building.result()
        if weights is not None:
            weights.fill(model)
        lengths = self.data.train_lengths().items()
        self.flops_per_token = sum(share * model.config.flops_per_token(length) for length, share in lengths)
        self.begin("strategy")
        self.undecayed = undecayed_parameters(model, config.train)
        # Order matters: the optimizer must see the parameters that the strategy leaves behind.
        self.model = self.fabric.setup_module(model)
        optimizer = setup.build_optimizer(self.model.module, self.undecayed, config.optimizer)
        self.optimizer = cast(Any, self.fabric.setup_optimizers(optimizer))
        setup.check_optimizer_owns(self.model, self.optimizer, config.optimizer.name)
        self.begin("checkpoint")
        if not config.resume:
            # Only now: a command that is refused must leave the old run where it was.
            setup.on_rank_zero(self.fabric, self._move_aside)
            setup.start_logging(self.directory, self.fabric.global_rank)

        #: Where the weights come from, for people.
        self.origin = "a new run" if weights is None else str(weights)
        #: The same for files: what `init_from` was when the run began; None if nothing.
        self.weights_from: dict[str, Any] | None = None if weights is None else weights.record
        for note in weights.notes if weights is not None else ():
            log.warning("%s", note)
        #: The code and machine that this process runs, asked once: the code on disk may change while it runs.
        self.environment = describe(self.fabric.device)
        self.resolved: dict[str, Any] = recorded(config)
        self.counters = Counters()
        #: Compares what all ranks should hold alike; None where there is nothing to compare, or not wanted.
        self.comparison = self._comparison()
        self.guard = StepGuard(self.fabric.device, config.train.spike_factor)
        #: What the checkpoint that this start continues from was trained with.
        self.before: execution.Execution | None = None
        #: The hash of the corpus's list of checksums, or of the one that the run began with.
        self.data_checksums = self.data_info.checksums
        #: Kinds of lines that callbacks of this start, or of an earlier one, have written.
        self.kinds: set[str] = set()
        self.directory.make(self.directory.checkpoints)
        setup.on_rank_zero(self.fabric, self.checkpointer.clean)
        #: What this start goes on from, of this run or of another.
        self.checkpoint = checkpoint
        #: What callbacks left in the checkpoint.
        self.callback_state = {} if checkpoint is None else load_checkpoint(self, checkpoint, forked)
        self.saver = Saver(self.checkpointer, None if checkpoint is None or forked else checkpoint.step)
        self.execution = execution.choose(
            config.train.compile, self.fabric.device, self.before, self.backends, self.fabric.global_rank
        )
        self.graphs = self._graphs(self.model.module)
        self.compilation.compile(self.model.module if self.compiled else None)
        self.begin("logs")

    def _graphs(self, model: Any) -> Graphs:
        """Those of the run, on or off."""
        world_size, ddp = self.fabric.world_size, isinstance(self.fabric.strategy, DDPStrategy)
        checkpointing = self.config.train.gradient_checkpointing
        possible = graphs.are_possible(self.compiled, checkpointing, world_size, ddp, self.ranks.sharing)
        flops = graphs.flops_in_a_block(self.config, world_size, self.flops_per_token, model.config.num_hidden_layers)
        wanted = graphs.choose(self.config, self.fabric.device, possible, flops)
        return Graphs(wanted, self.compiled, model.parameters(), reduced=ddp)

    def begin(self, stage: str) -> None:
        """The start comes to `stage`."""
        self.startup.switch(stage)
        self.sentinel.starting(stage)

    @property
    def last_good_checkpoint(self) -> str:
        """Sentence on the checkpoint that a later start can go on from."""
        return self.saver.last_good_checkpoint

    @property
    def compiled(self) -> bool:
        """Whether blocks and loss are compiled: what `train.compile` came to."""
        return self.execution.compile

    def uncompiled(self) -> contextlib.AbstractContextManager[Any]:
        """In it nothing compiled runs: for forward passes of many lengths, or with hooks on submodules."""
        return torch.compiler.set_stance("force_eager") if self.compiled else contextlib.nullcontext()

    def _comparison(self) -> Comparison | None:
        strategy, shards = self.fabric.strategy, 1
        if isinstance(strategy, ModelParallelStrategy):
            shards = strategy.device_mesh.shape[1]
        same = self.fabric.world_size > shards
        return Comparison(self.fabric.world_size, shards) if same and self.config.strategy.compare_steps else None

    def _initial_weights(self, model: nn.Module) -> InitialWeights:
        """What `init_from` has for the model; its tensors are on rank 0 only, which alone needs the folder."""
        found = setup.on_rank_zero(
            self.fabric, lambda: initial_weights(self.config, model, self.data_info, self.data.folder)
        )
        shared: Any = self.fabric.broadcast(None if found is None else dataclasses.replace(found, tensors={}, notes=[]))
        return found if found is not None else shared

    def _choose_backends(self, model: nn.Module) -> dict[str, Backend]:
        config = self.config
        if self.fabric.device.type == "cuda":
            log.info("testing the kernels")
        dtype = torch.float32 if config.fabric.precision == "32-true" else torch.bfloat16
        lengths = [config.datamodule.train_batch_len, *([] if config.skip_eval else [config.datamodule.eval_batch_len])]
        return choose_on_all_ranks(model, dtype, self.fabric.device, lengths, self.data.packed)

    def _check_texts(self) -> None:
        if isinstance(self.data, MixtureDataModule):
            self.data.check_tokenizers()
        check_tokenizers(self.eval_sets, self.data, self.config)
        if self.config.resume:
            check_same_texts(self.eval_sets, self.directory.jsonlines)
        if self.config.eval_sets and self.config.skip_eval:
            log.warning("eval_sets is not evaluated, because of skip_eval=true; set skip_eval=false")

    def _check_budget(self) -> None:
        """Checks held-out data, the token budget and the cache of a remote corpus now, not after hours of training."""
        info, config = self.data_info, self.config
        # With `repeat`, a mixture begins its parts again one by one, also within a batch.
        if info.total_batches < 1 and not isinstance(self.data, MixtureDataModule):
            data = config.datamodule
            raise ConfigError(
                f"{info.path} has no batch of {data.train_batch_size} sequences of {data.train_batch_len:,} tokens; "
                "lower datamodule.train_batch_size or datamodule.train_batch_len, or use a larger corpus"
            )
        if config.train.max_tokens > info.total_tokens and not config.datamodule.repeat:
            # A run that goes on needs the corpus it began with.
            goes_on = config.resume and any(self.directory.checkpoints.glob("step-*"))
            more = None if goes_on else fetching(info, config.train.max_tokens)
            raise ConfigError(
                f"train.max_tokens={config.train.max_tokens:,} is more than the {info.total_tokens:,} tokens of "
                f"{info.path} at this batch shape; lower it, or set datamodule.repeat=true to read the data again"
                + (f", or fetch {more}" if more else "")
            )
        if not config.skip_eval:
            self.data.eval_info()
        self.data.check_cache(self.ranks.data_size, evaluates=not config.skip_eval)

    def _move_aside(self) -> None:
        if moved := status.move_aside(self.directory):
            log.warning("resume=false: what the run in %s had written is now in %s", self.directory.root, moved)
