"""The configuration of a training run: every key that all runs have, with its type, meaning and unit.

YAML files under `configs/` fill these dataclasses. The keys of a component (an optimizer, a corpus, a callback) are
those of the dataclass that it registers (plugins.py). types.py has the types and ranges of values. checks.py refuses
what several sections, or so many processes, cannot do. parsing.py puts the dataclasses of a run's components together
and has pydantic fill them. official_names.py translates the authors' keys and finds the closest name. continuing.py
lists the keys that may differ when a run is continued. All intervals, budgets and schedule lengths are in training
tokens of the whole job.
"""

from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field

from forgetting_transformer.command_line import CommandError
from forgetting_transformer.training.config.types import (
    Count,
    Devices,
    LearningRate,
    Positive,
    Size,
    Switch,
    Text,
    TokenId,
    Tokens,
    TokensOrZero,
    Workers,
)


class ConfigError(CommandError, ValueError):
    """The configuration cannot be run; the message names the key, the value and the fix."""


@dataclass(kw_only=True)
class FabricConfig:
    #: Processes on this node: a number or "auto". Under `fabric run` its own --devices decides; leave this alone.
    devices: Devices = "auto"
    #: Under `fabric run` its own --accelerator decides.
    accelerator: Literal["auto", "cpu", "cuda", "gpu"] = "auto"
    #: "bf16-mixed": fp32 weights and optimizer, bf16 matrix products. Weights and moments in bf16 would be too coarse
    #: for pretraining.
    precision: Literal["bf16-mixed", "32-true"] = "bf16-mixed"
    #: Most FLOP/s that one device can do at this precision (dense), the denominator of MFU. null: what
    #: training/execution/hardware.py knows; a device it does not know has no MFU.
    peak_flops: Annotated[float, Field(ge=1, le=1e21)] | None = None


@dataclass(kw_only=True)
class TrainConfig:
    #: Tokens to train on.
    max_tokens: Tokens
    #: Tokens of a micro-batch, which a rank puts through the model at a time: whole sequences, at least one. With
    #: strategy.context, the ranks that share sequences put it through together.
    grad_acc_tokens: Tokens
    #: Parameters that are trained, by name or pattern, as in ["*.fgate_proj.*"]; the others stay as they are. []: all.
    only: list[str] = field(default_factory=list)
    #: Gradients are scaled down to this global L2 norm. inf: never.
    max_grad_norm: Annotated[float, Field(gt=0)] = 1.0
    #: An update whose loss or gradient is not finite is left out; after this many in a row the run saves and stops.
    max_bad_steps: Count = 10
    #: Recompute each block's activations in the backward pass instead of keeping them.
    gradient_checkpointing: bool = False
    #: With gradient_checkpointing, keep block inputs in the host's memory until the backward pass. Without effect on a
    #: CPU.
    block_inputs_on_host: bool = False
    #: torch.compile blocks and loss: fuses operations between matrix products; the first step takes longer. true, false
    #: or "auto": on for CUDA, off elsewhere; a run that continues keeps its choice.
    compile: Switch = "auto"
    #: Record the compiled blocks as CUDA graphs and replay them: faster where the host is slower than the GPU, as with
    #: a small model; bitwise the same. One GPU, or several with DDP; without activation checkpointing. true, false or
    #: "auto": on where that is so and a micro-batch is small enough for the host to limit the speed (graphs.py).
    cuda_graphs: Switch = "auto"
    #: Whether biases, norm weights and convolution kernels are decayed.
    bias_weight_decay: bool = False
    normalization_weight_decay: bool = False
    conv_weight_decay: bool = True
    #: [a, b]: write a trace of steps a to b of this start, on every rank, into `traces/`. Step 1 is the first of the
    #: start and compiles. A few steps are enough: each has tens of thousands of events. null: none.
    profile_steps: Annotated[list[Count], Field(min_length=2, max_length=2)] | None = None

    def __post_init__(self) -> None:
        if self.block_inputs_on_host and not self.gradient_checkpointing:
            raise ConfigError(
                "train.block_inputs_on_host=true moves what activation checkpointing keeps; set "
                "train.gradient_checkpointing=true too"
            )
        if self.profile_steps and self.profile_steps[0] > self.profile_steps[1]:
            raise ConfigError(
                f"train.profile_steps={self.profile_steps} must be [first, last], as in train.profile_steps=[10,12]"
            )


@dataclass(kw_only=True)
class EvalConfig:
    #: Loss is reported over prefixes of the sequence: full length, half, a quarter, … down to this many tokens.
    min_val_length: Count = 512


@dataclass(kw_only=True)
class WandbConfig:
    project: str = "forgetting-transformer"
    #: "offline": files only.
    mode: Literal["offline", "online", "disabled"] = "offline"
    #: Folder for wandb's own files; null is `output_dir`.
    log_dir: Text | None = None


@dataclass(kw_only=True)
class StrategyConfig:
    #: "auto" (one process: none; several: ddp), "ddp" or "fsdp" (weights, gradients and moments sharded by block over
    #: all processes; one process has nothing to shard and uses none).
    name: Literal["auto", "ddp", "fsdp"] = "auto"
    #: fsdp: gather weights once a step and keep them until its last backward pass, instead of gathering each
    #: block before and after its use. "auto": where they take at most a twentieth of a GPU's memory.
    keep_gathered: Switch = "auto"
    #: Ranks that share each sequence, each with one part; groups of them are data parallel.
    context: Annotated[int, Field(ge=1, le=1024)] = 1
    #: Seconds without a step after which a rank counts as hanging and ends; also the timeout of collective operations.
    #: Each stage of the start, and a checkpoint that is waited for, may take half an hour more.
    timeout_seconds: Annotated[int, Field(ge=1, le=10**8)] = 1800
    #: ddp: steps between comparisons of weights and moments over the ranks, which hold the same unless memory or a GPU
    #: failed; they are compared before every checkpoint too. null: never.
    compare_steps: Annotated[int, Field(ge=1, le=10**8)] | None = 100


@dataclass(kw_only=True)
class OptimizerConfig:
    """Keys of every optimizer. training/optimization/optimizers.py has those of this package, with their own keys."""

    name: str = "adamw"
    #: Peak learning rate. 0 trains nothing.
    lr: LearningRate
    #: Factor of the learning rate of the parameters in `lr_scale_for`, by name or pattern, as in ["*.fgate_proj.*"].
    lr_scale: Positive = 1.0
    lr_scale_for: list[str] = field(default_factory=list)


@dataclass(kw_only=True)
class ScheduleConfig:
    #: A name in plugins.SCHEDULES; those of this package are in training/optimization/schedule.py.
    name: str
    #: Tokens of linear warm-up from init_lr to optimizer.lr.
    warmup_tokens: TokensOrZero = 0
    #: warmup_cosine and warmup_linear: tokens at which end_lr is reached, warm-up included.
    #: warmup_stable_decay: tokens of the whole run; the decay ends there.
    total_tokens: Tokens | None = None
    #: warmup_stable_decay: tokens of the final decay.
    decay_tokens: Tokens | None = None
    init_lr: LearningRate = 0.0
    end_lr: LearningRate = 0.0


@dataclass(kw_only=True)
class DataModuleConfig:
    """Keys of every corpus. Corpora of this package are in training/config/corpora.py, with their own keys."""

    name: str = "longcrawl64"
    #: Folder of the corpus in `data_dir`.
    dataset: Text = "longcrawl64"
    #: Tokens of a sequence, and sequences of a global batch.
    train_batch_len: Count
    train_batch_size: Count
    train_num_workers: Workers = 1
    #: Held-out tokens that an evaluation reads; null: all.
    eval_tokens: Tokens | None = None
    eval_batch_len: Count
    eval_local_batch_size: Count
    eval_num_workers: Workers = 1
    #: null: as the corpus states it.
    vocab_size: Count | None = None
    bos_token_id: TokenId | None = None
    #: null: as the corpus states it, else BOS.
    eos_token_id: TokenId | None = None
    #: Read the data again, in the same order, after one pass.
    repeat: bool = False


@dataclass(kw_only=True)
class CallbacksConfig:
    """A section for each callback of the run, under its name, which `config_class` adds."""


@dataclass(kw_only=True)
class ModelConfig:
    #: A name in model.registry, such as "forgetting_transformer".
    name: str
    #: Name in tags and comparisons: several models may be one architecture with other fields. "": the model's name.
    label: str = ""
    #: The fields of that architecture's configuration class. vocab_size and token ids come from the data.
    config: dict[str, Any] = field(default_factory=dict)


@dataclass(kw_only=True)
class ScaleConfig:
    """A model size and token budget that experiments share; model and schedule files refer to it.

    Sizes of a single architecture are in its YAML, by the name of the scale (`model.sizes`).
    """

    name: str = "custom"
    hidden_size: Size | None = None
    num_hidden_layers: Size | None = None
    #: Attention heads when each has 64 or 128 dimensions.
    heads_of_64: Size | None = None
    heads_of_128: Size | None = None


@dataclass(kw_only=True)
class Config:
    __pydantic_config__ = ConfigDict(extra="forbid", coerce_numbers_to_str=True)

    model: ModelConfig
    optimizer: OptimizerConfig
    schedule: ScheduleConfig
    datamodule: DataModuleConfig
    strategy: StrategyConfig
    scale: ScaleConfig
    fabric: FabricConfig
    train: TrainConfig
    eval: EvalConfig
    wandb: WandbConfig
    #: Measurements and other work during training: name of the callback -> its keys, in the order of their calls.
    callbacks: CallbacksConfig
    #: Modules with components that are not of this package (plugins.py). The command line names them.
    plugins: list[str] = field(default_factory=list)
    #: Names recorded with the run.
    exp: str = "debug"
    tag: str = "debug"
    #: Seeds the initial weights and the random numbers of every step.
    seed: Annotated[int, Field(ge=-(2**63), lt=2**63)] = 0
    #: Folder of all files of the run; see docs/operations.md.
    output_dir: Text
    #: Folder that holds the corpus folder `datamodule.dataset`.
    data_dir: Text
    #: true: continue from the newest valid checkpoint in output_dir, if any. false: move what the run in output_dir
    #: wrote aside (into previous/) and start from the beginning.
    resume: bool = True
    #: Start a new run from the checkpoint of another run's output_dir at fork_step tokens.
    fork_dir: Text | None = None
    fork_step: Tokens | None = None
    #: Begin a new run, at step 0, with the weights of an exported model (folder or hub id). A run that continues does
    #: not read it.
    init_from: Text | None = None
    #: Tensors that need not match init_from: names, or patterns as in ["*.fgate_proj.*"]. Those of the model keep their
    #: fresh initial weights, others are left out.
    init_allow: list[str] = field(default_factory=list)
    #: Tokens between lines of training loss, throughput and norms.
    log_interval: Tokens
    #: Tokens between reports of the training loss at every position, averaged over the tokens in between.
    train_eval_interval: Tokens
    #: Tokens between evaluations on held-out documents; final_eval: one at the end too. skip_eval switches both off,
    #: except for callbacks with their own interval.
    eval_interval: Tokens
    skip_eval: bool = True
    final_eval: bool = True
    #: Tokens between checkpoints; the newest `checkpoint_keep_last` stay, and one every checkpoint_keep_interval for
    #: good.
    checkpoint_interval: Tokens
    checkpoint_keep_interval: Tokens
    checkpoint_keep_last: Count = 2
    #: true: write checkpoints in the background, from a copy in the host's memory (at least 12 bytes per parameter
    #: over all ranks of the job). false: training waits, and needs no such memory.
    checkpoint_background: bool = True
    #: true: train nothing; check data, disk and memory, time a few steps, estimate the cost of the run, and find the
    #: fastest micro-batch, with activation checkpointing and without.
    preflight: bool = False

    def sequences_at_once(self, data_size: int) -> int:
        """Sequences of a micro-batch, where a global batch has `data_size` equal shares (`Ranks.data_size`)."""
        data = self.datamodule
        return min(data.train_batch_size // data_size, max(1, self.train.grad_acc_tokens // data.train_batch_len))
