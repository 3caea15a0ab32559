"""The configuration of a training run: every key that all runs have, with its type, meaning and unit.

YAML files under `configs/` fill these dataclasses. The keys of a component (an optimizer, a corpus, a callback) are
those of the dataclass that it registers (plugins.py). parsing.py puts the dataclasses of a run's components together
and fills them; continuing.py says which keys may differ when a run is continued. A section's own `check` refuses values
that do not fit together; the function `check` refuses what so many processes cannot do. All intervals, budgets and
schedule lengths are in training tokens of the whole job.
"""

import math
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from omegaconf import MISSING

from forgetting_transformer.metric_names import VAL_SET
from forgetting_transformer.ranges import COUNT, SIZE, TOKENS, Range, divisors, expected, one_of, within
from forgetting_transformer.training.records.run_directory import KINDS


class ConfigError(ValueError):
    """The configuration cannot be run; the message names the key, the value and the fix."""


#: Learning rates. Zero is allowed: it trains nothing, which is a way to measure speed and to look at the data.
LEARNING_RATE = Range(0, 1000)
_WORKERS = Range(0, 1024)
#: Of one of `eval_sets`.
_SET_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,39}")
_DEVICES = Range(1, 1024)
#: Steps of a trace: one of a large model has tens of thousands of events.
_TRACED_STEPS = 100


@dataclass
class FabricConfig:
    #: Processes on this node: a number or "auto". Under `fabric run` its own --devices decides; leave this alone.
    devices: Any = "auto"
    #: Under `fabric run` its own --accelerator decides.
    accelerator: str = one_of("auto", "cpu", "cuda", "gpu")
    #: "bf16-mixed": fp32 weights and optimizer, bf16 matrix products.
    precision: str = one_of(
        "bf16-mixed",
        "32-true",
        because="bf16-true would keep weights and AdamW's moments in bf16, too coarse for pretraining",
    )
    #: Most FLOP/s that one device can do at this precision (dense), the denominator of MFU. null: what
    #: training/execution/hardware.py knows; a device it does not know has no MFU.
    peak_flops: float | None = within(Range(1, 1e21), None)

    def check(self) -> None:
        devices, accelerator = self.devices, self.accelerator
        problem = f"fabric.devices={devices!r} must be a number of processes, a list of GPUs, or 'auto'"
        if isinstance(devices, list):
            numbered = all(type(n) is int and 0 <= n < _DEVICES.high for n in devices)
            if not devices or not numbered or len({*devices}) < len(devices):
                raise ConfigError(f"{problem}; GPUs are numbered from 0")
            if accelerator == "cpu":
                raise ConfigError(
                    f"fabric.devices={devices} lists GPUs; with fabric.accelerator=cpu give a number of processes"
                )
        elif devices in (-1, "-1"):
            if accelerator == "cpu":
                raise ConfigError(
                    f"fabric.devices={devices} means all GPUs; with fabric.accelerator=cpu give a number, or 'auto'"
                )
        elif devices != "auto" and not (re.fullmatch(r"[1-9]\d{0,5}", str(devices)) and int(devices) in _DEVICES):
            raise ConfigError(f"{problem}; a number is {expected(int, _DEVICES)}")


@dataclass
class TrainConfig:
    #: Tokens to train on.
    max_tokens: int = within(TOKENS)
    #: Tokens that one rank puts through the model at a time; a rank's share of the batch is split into such pieces. Of
    #: whole sequences: with strategy.context, what the ranks that share them put through it together.
    grad_acc_tokens: int = within(TOKENS)
    #: Gradients are scaled down to this global L2 norm. inf: never.
    max_grad_norm: float = within(Range(0, math.inf, above=True), 1.0)
    #: An update whose loss or gradient is not finite is left out; after this many in a row the run stops, saved.
    max_bad_steps: int = within(COUNT, 10)
    #: Also leave out updates whose gradient norm, before clipping, is more than this many times the median of the last
    #: 128. null: never.
    spike_factor: float | None = within(
        Range(1, 1e9, above=True, otherwise="null for never; 1 and less would leave out ordinary steps, 10 is usual"),
        None,
    )
    #: Recompute each block's activations in the backward pass instead of keeping them.
    gradient_checkpointing: bool = False
    #: With it, keep what blocks start from in the host's memory until the backward pass. Without effect on a CPU.
    block_inputs_on_host: bool = False
    #: torch.compile blocks and loss: fuses what lies between matrix products; the first step takes longer. true, false
    #: or "auto": on for CUDA, off elsewhere; a run that continues does as it did before.
    compile: Any = one_of("auto", True, False)
    #: Record the compiled blocks as CUDA graphs and replay them: faster where the host is slower than the GPU, as with
    #: a small model; bitwise the same. One GPU, or several with DDP; without activation checkpointing. true, false or
    #: "auto": on where that is so and a micro-batch is small enough for the host to limit the speed (graphs.py).
    cuda_graphs: Any = one_of("auto", True, False)
    #: Whether biases, norm weights and convolution kernels are decayed.
    bias_weight_decay: bool = False
    normalization_weight_decay: bool = False
    conv_weight_decay: bool = True
    #: [a, b]: write a trace of steps a to b of this start, on every rank, into `traces/`. Step 1 is the first of the
    #: start and compiles. null: none.
    profile_steps: list[int] | None = None

    def check(self) -> None:
        if self.block_inputs_on_host and not self.gradient_checkpointing:
            raise ConfigError(
                "train.block_inputs_on_host=true moves what activation checkpointing keeps; set "
                "train.gradient_checkpointing=true too"
            )
        if self.cuda_graphs is True and self.compile is False:
            raise ConfigError(
                "train.cuda_graphs=true records compiled blocks, and train.compile=false compiles nothing; set "
                "train.cuda_graphs=false, or train.compile=auto"
            )
        if self.cuda_graphs is True and self.gradient_checkpointing:
            raise ConfigError(
                "train.cuda_graphs=true does not work with train.gradient_checkpointing=true; set one of them to false"
            )
        steps = self.profile_steps
        if steps is not None and not (len(steps) == 2 and 1 <= steps[0] <= steps[1] < steps[0] + _TRACED_STEPS):
            raise ConfigError(
                f"train.profile_steps={steps} must be [first, last] with 1 <= first <= last, at most {_TRACED_STEPS} "
                "steps, as in train.profile_steps=[10,12]"
            )


@dataclass
class EvalConfig:
    #: Loss is reported over prefixes of the sequence: full length, half, a quarter, … down to this many tokens.
    min_val_length: int = within(COUNT, 512)


@dataclass
class WandbConfig:
    project: str = "forgetting-transformer"
    #: "offline": files only.
    mode: str = one_of("offline", "online", "disabled")
    #: Folder for wandb's own files; null is `output_dir`.
    log_dir: str | None = None


@dataclass
class StrategyConfig:
    #: "auto" (one process: none; several: ddp), "ddp", "fsdp" (weights, gradients and moments sharded by block over all
    #: processes) or "hsdp" (sharded within a node, replicated between nodes).
    name: str = one_of("auto", "ddp", "fsdp", "hsdp")
    #: hsdp: processes that share one copy of the model. null: those of a node.
    shard_size: int | None = within(Range(1, _DEVICES.high * 1024), None)
    #: fsdp and hsdp: gather weights once a step and keep them until its last backward pass, instead of gathering each
    #: block before and after its use. "auto": where they take at most a twentieth of a GPU's memory.
    keep_gathered: Any = one_of("auto", True, False)
    #: So many ranks share each sequence, every one a part of it; the rest of the world is data parallel.
    context: int = within(Range(1, _DEVICES.high), 1)
    #: Seconds without a step, or without a byte written of a checkpoint that is waited for, after which a rank is stuck
    #: and ends itself; so long it waits for the others in a collective operation. The start has half an hour more.
    timeout_seconds: int = within(Range(1, 10**8), 1800)
    #: ddp and hsdp: steps between comparisons of weights and moments over the ranks that hold the same unless memory or
    #: a GPU failed; they are compared before every checkpoint too. null: never.
    compare_steps: int | None = within(Range(1, 10**8), 100)


@dataclass
class OptimizerConfig:
    """Keys of every optimizer. training/optimization/optimizers.py has those of this package, with their own keys."""

    name: str = "adamw"
    #: Peak learning rate. 0 trains nothing.
    lr: float = within(LEARNING_RATE)


@dataclass
class ScheduleConfig:
    #: A name in plugins.SCHEDULES; those of this package are in training/optimization/schedule.py.
    name: str = MISSING
    #: Tokens of linear warm-up from init_lr to optimizer.lr.
    warmup_tokens: int = within(Range(0, TOKENS.high), 0)
    #: warmup_cosine and warmup_linear: tokens at which end_lr is reached, warm-up included.
    #: warmup_stable_decay: tokens of the whole run; the decay ends there.
    total_tokens: int | None = within(TOKENS, None)
    #: warmup_stable_decay: tokens of the final decay.
    decay_tokens: int | None = within(TOKENS, None)
    init_lr: float = within(LEARNING_RATE, 0.0)
    end_lr: float = within(LEARNING_RATE, 0.0)


@dataclass
class DataModuleConfig:
    """What every corpus has. Those of this package are in training/config/corpora.py, with their own keys."""

    name: str = "longcrawl64"
    #: Folder of the corpus in `data_dir`.
    dataset: str = "longcrawl64"
    #: Tokens of a sequence, and sequences of a global batch.
    train_batch_len: int = within(COUNT)
    train_batch_size: int = within(COUNT)
    train_num_workers: int = within(_WORKERS, 2)
    #: Held-out tokens that an evaluation reads; null: all.
    eval_tokens: int | None = within(TOKENS, None)
    eval_batch_len: int = within(COUNT)
    eval_local_batch_size: int = within(COUNT)
    eval_num_workers: int = within(_WORKERS, 2)
    #: null: what the corpus itself says.
    vocab_size: int | None = within(COUNT, None)
    bos_token_id: int | None = within(Range(0, COUNT.high), None)
    #: null: what the corpus itself says, else BOS.
    eos_token_id: int | None = within(Range(0, COUNT.high), None)
    #: Read the data again, in the same order, when it has been read once.
    repeat: bool = False


@dataclass
class CallbacksConfig:
    """A section for each callback of the run, under its name, which `config_class` adds."""


@dataclass
class ModelConfig:
    #: A name in model.registry, such as "forgetting_transformer".
    name: str = MISSING
    #: What tags and comparisons call the model: several models may be one architecture with other fields. "": its name.
    label: str = ""
    #: The fields of that architecture's configuration class. vocab_size and token ids come from the data.
    config: dict[str, Any] = field(default_factory=dict)


@dataclass
class ScaleConfig:
    """A model size and token budget that experiments share; model and schedule files refer to it.

    Sizes that are one architecture's stand in its YAML, by the name of the scale (`model.sizes`).
    """

    name: str = "custom"
    hidden_size: int | None = within(SIZE, None)
    num_hidden_layers: int | None = within(SIZE, None)
    #: Attention heads when each has 64 or 128 dimensions.
    heads_of_64: int | None = within(SIZE, None)
    heads_of_128: int | None = within(SIZE, None)


@dataclass
class Config:
    model: ModelConfig = field(default_factory=ModelConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)
    datamodule: DataModuleConfig = field(default_factory=DataModuleConfig)
    strategy: StrategyConfig = field(default_factory=StrategyConfig)
    scale: ScaleConfig = field(default_factory=ScaleConfig)
    fabric: FabricConfig = field(default_factory=FabricConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    eval: EvalConfig = field(default_factory=EvalConfig)
    wandb: WandbConfig = field(default_factory=WandbConfig)
    #: What is measured or done during training besides: name of the callback -> its keys, in the order of their calls.
    callbacks: CallbacksConfig = field(default_factory=CallbacksConfig)
    #: Modules with components that are not of this package (plugins.py). The command line names them.
    plugins: list[str] = field(default_factory=list)
    #: Names recorded with the run, for finding it again.
    exp: str = "debug"
    tag: str = "debug"
    #: Seeds the initial weights and the random numbers of every step.
    seed: int = within(Range(-(2**63), 2**63 - 1), 0)
    #: Everything the run writes goes here; see docs/operations.md.
    output_dir: str = MISSING
    #: Folder that holds the corpus folder `datamodule.dataset`.
    data_dir: str = MISSING
    #: true: continue from the newest valid checkpoint in output_dir, if any. false: move what the run in output_dir
    #: wrote aside (into previous/) and start from the beginning.
    resume: bool = True
    #: Start a new run from the checkpoint of another run's output_dir at fork_step tokens.
    fork_dir: str | None = None
    fork_step: int | None = within(TOKENS, None)
    #: Begin a new run, at step 0, with the weights of an exported model (folder or hub id), or of the run in this
    #: output_dir: of its newest checkpoint, or of that at init_step tokens. A run that continues does not read it.
    init_from: str | None = None
    init_step: int | None = within(TOKENS, None)
    #: Tensors that need not match init_from: names, or patterns as in ["*.fgate_proj.*"]. Those of the model keep their
    #: fresh initial weights, others are left out.
    init_allow: list[str] = field(default_factory=list)
    #: Tokens between lines of training loss, throughput and norms.
    log_interval: int = within(TOKENS)
    #: Tokens between reports of the training loss at every position, averaged over the tokens in between.
    train_eval_interval: int = within(TOKENS)
    #: Tokens between evaluations on held-out documents; skip_eval switches these off, final_eval is the one at the end.
    eval_interval: int = within(TOKENS)
    skip_eval: bool = True
    final_eval: bool = True
    #: More held-out sets: name -> the folder of a corpus, in `data_dir`, absolute or a URL, whose held-out documents
    #: are evaluated with the corpus's own. At most datamodule.eval_tokens are read of each.
    eval_sets: dict[str, str] = field(default_factory=dict)
    #: Tokens between checkpoints; the newest `checkpoint_keep_last` stay, and one every checkpoint_keep_interval for
    #: good.
    checkpoint_interval: int = within(TOKENS)
    checkpoint_keep_interval: int = within(TOKENS)
    checkpoint_keep_last: int = within(COUNT, 2)
    #: true: write checkpoints while training goes on, from a copy in the host's memory (12 bytes per parameter over all
    #: ranks of the job). false: training waits, and needs no such memory.
    checkpoint_background: bool = True
    #: true: check data, disk and memory, time a few steps, say what the run will cost, measure which micro-batch is
    #: fastest, with activation checkpointing and without, and train nothing. "check": without the measurement.
    preflight: Any = one_of(False, True, "check")

    def check(self) -> None:
        for name, path in self.eval_sets.items():
            if not _SET_NAME.fullmatch(name):
                raise ConfigError(
                    f"eval_sets: the name {name!r} must be of letters, digits, _ and -, at most 40, and begin with a "
                    "letter or a digit: files are called by it"
                )
            if f"{VAL_SET}{name}" in KINDS:
                raise ConfigError(f"eval_sets: the name {name!r} is that of a file of every run; choose another name")
            if name == "ema":  # also without the callback now: another start of the run may have it
                raise ConfigError("eval_sets: val_ema.jsonl is for the losses of callbacks=[ema]; choose another name")
            if not path.strip():
                raise ConfigError(
                    f"eval_sets.{name}={path!r} is empty (a variable that is not set?); give the folder of a corpus"
                )


def check(config: Config, world_size: int) -> None:
    """Refuses what so many processes cannot do, before anything is built.

    Raises:
        ConfigError: naming the key, the value and the fix.
    """
    data, train, sharing = config.datamodule, config.train, config.strategy.context
    _check_context(config, world_size)
    if train.cuda_graphs is True and world_size > 1 and (config.strategy.name not in ("auto", "ddp") or sharing > 1):
        raise ConfigError(
            f"train.cuda_graphs=true on {world_size} processes works with strategy=ddp and strategy.context=1 only, "
            f"and this run has strategy={config.strategy.name} and strategy.context={sharing}; leave "
            "train.cuda_graphs=auto, or set it to false"
        )
    groups, called = world_size // sharing, "processes" if sharing == 1 else f"groups of {sharing} processes"
    if data.train_batch_size % groups:
        near = divisors(data.train_batch_size)
        raise ConfigError(
            f"datamodule.train_batch_size={data.train_batch_size} sequences cannot be shared equally by {groups} "
            f"{called}; use a multiple of {groups}, or a number of {called} among {near}"
        )
    local_tokens = data.train_batch_size // groups * data.train_batch_len
    micro_tokens = min(train.grad_acc_tokens, local_tokens)
    if micro_tokens % data.train_batch_len or local_tokens % micro_tokens:
        whose = "a rank's" if sharing == 1 else f"{sharing} ranks'"
        fits = [n * data.train_batch_len for n in divisors(local_tokens // data.train_batch_len)]
        raise ConfigError(
            f"train.grad_acc_tokens={train.grad_acc_tokens:,} does not split {whose} {local_tokens:,} tokens "
            f"({data.train_batch_size // groups} sequences of {data.train_batch_len:,}) into equal pieces of whole "
            f"sequences; choose one of {fits}"
        )
    if (config.fork_dir is None) != (config.fork_step is None):
        raise ConfigError(
            f"fork_dir={config.fork_dir} and fork_step={config.fork_step} belong together: give both or neither"
        )
    if config.fork_step is not None and config.train.max_tokens <= config.fork_step:
        raise ConfigError(
            f"train.max_tokens={config.train.max_tokens:,} counts the tokens before the fork too, and "
            f"fork_step={config.fork_step:,}: nothing would be trained; set train.max_tokens above fork_step"
        )
    if config.fork_dir and not config.resume:
        raise ConfigError("fork_dir starts from a checkpoint, resume=false starts from nothing: choose one")
    if config.fork_dir and config.init_from:
        raise ConfigError(
            f"fork_dir={config.fork_dir} and init_from={config.init_from} both say what to begin with: choose fork_dir "
            "to take moments, counters and position in the data along, or init_from for the weights alone"
        )
    if config.init_from and not config.resume and _same_folder(config.init_from, config.output_dir):
        raise ConfigError(
            f"init_from={config.init_from} is the output_dir, whose run resume=false moves aside; choose another "
            "output_dir"
        )
    for key in ("init_step", "init_allow"):
        if getattr(config, key) and not config.init_from:
            raise ConfigError(f"{key}={getattr(config, key)} has no effect without init_from; give both or neither")


def _same_folder(one: str, other: str) -> bool:
    return Path(one).expanduser().absolute() == Path(other).expanduser().absolute()


def _check_context(config: Config, world_size: int) -> None:
    """
    Raises:
        ConfigError: the ranks cannot share sequences as `strategy.context` says.
    """
    if (sharing := config.strategy.context) == 1:
        return
    if world_size % sharing:
        raise ConfigError(
            f"strategy.context={sharing} ranks share a sequence, and {world_size} process"
            f"{' is' if world_size == 1 else 'es are'} not a multiple of {sharing}; use one of {divisors(world_size)}, "
            "or another number of processes"
        )
    keys = ("train_batch_len", *(() if config.skip_eval else ("eval_batch_len",)))
    for key in keys:
        if (length := getattr(config.datamodule, key)) % sharing:
            raise ConfigError(
                f"datamodule.{key}={length:,} tokens have no equal parts for strategy.context={sharing} ranks; use a "
                f"multiple of {sharing}"
            )
