"""One training step of a run once more, on one device, to look at it: its text, losses, gradients and forget gates.

Tokens and weights come from where the run had them: the order of the data is arithmetic, and the weights are those of
the newest checkpoint before the step. If that is not the step right before, the weights are somewhat older than those
the run had; the result says by how many steps.
"""

import dataclasses
import re
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import torch
from omegaconf import OmegaConf
from torch import Tensor, nn
from transformers import PreTrainedTokenizerBase

from forgetting_transformer.data.corpus import Place, model_inputs
from forgetting_transformer.training import setup
from forgetting_transformer.training.checkpoint import Checkpoint, CheckpointError, load_weights, read_newest, steps_in
from forgetting_transformer.training.config import ConfigError
from forgetting_transformer.training.initial_weights import recorded_weights
from forgetting_transformer.training.parsing import parse
from forgetting_transformer.training.run_directory import RunDirectory


@dataclasses.dataclass
class Replay:
    """What `replay` found. Losses in nats per token, norms before clipping."""

    step: int
    batch: int
    where: Place
    #: Training tokens of the checkpoint used; 0 for the initial weights. And how many steps that is before the step.
    checkpoint_step: int
    steps_before: int
    input_ids_BT: np.ndarray
    labels_BT: np.ndarray
    loss_BT: np.ndarray
    grad_norm: float
    #: By layer ("embeddings", "layer 0", …, "norm", "lm_head"), in the order of the model.
    layers: list[dict[str, Any]]


def _load_before(folder: Path, step: int, model: nn.Module) -> Checkpoint | None:
    """Fills `model` with the newest checkpoint at or before `step`; None if there is none that can be read."""

    def load(checkpoint: Checkpoint) -> Checkpoint:
        load_weights(checkpoint, model)
        return checkpoint

    earlier = [candidate for candidate in steps_in(folder) if candidate <= step]
    return next(filter(None, (read_newest(folder, load, candidate) for candidate in reversed(earlier))), None)


def replay(
    run_folder: Path, step: int, data_dir: str | None = None, device: str | None = None
) -> tuple[Replay, PreTrainedTokenizerBase | None]:
    """Runs the batch of the step that ended at `step` training tokens; also returns the run's tokenizer, if it has one.

    Raises:
        ConfigError: no step of the run ended there. CheckpointError: no run there.
    """
    directory = RunDirectory(run_folder)
    state = read_newest(directory.checkpoints, Checkpoint.trainer_state)
    if state is None:
        raise CheckpointError(f"no valid checkpoint in {directory.checkpoints}; output_dir must be that of a run")
    config = parse(OmegaConf.create(state["config"]))
    shape = config.datamodule
    shape.train_num_workers = 0  # it is one batch
    tokens = shape.train_batch_size * shape.train_batch_len
    if step < tokens or step % tokens:
        below = max(tokens, step // tokens * tokens)
        raise ConfigError(
            f"step={step:,}: steps of this run end at multiples of {tokens:,} tokens, as the lines of train.jsonl do; "
            f"use step={below} or step={below + tokens}"
        )
    data = setup.build_data(data_dir or config.data_dir, shape, setup.recorded_vocabulary(config, directory))
    chosen = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    model = setup.build_model(config, data.train_info())
    checkpoint = _load_before(directory.checkpoints, step - tokens, model)
    if checkpoint is None and config.init_from:
        # A source that trained on, or was exported again, has other weights by now.
        recorded_weights(config, state["weights_from"], model, data.train_info(), data.folder).fill(model)
    model = model.to(chosen).train()
    batch = step // tokens - 1
    where = data.locate(batch)
    item = next(iter(data.train_loader(batch, batch + 1, 0, 1)))
    setup.seed_step(config.seed, batch, 0)
    mixed = config.fabric.precision == "bf16-mixed"
    autocast = torch.autocast(chosen.type, torch.bfloat16) if mixed else nullcontext()
    gates = _Gates(model)
    losses = []
    sequences = max(1, config.train.grad_acc_tokens // shape.train_batch_len)
    starts = range(0, len(item["labels"]), sequences)
    for start in starts:
        inputs = model_inputs(item, slice(start, start + sequences))
        with autocast, gates:
            loss_bT = model(**{name: tensor.to(chosen) for name, tensor in inputs.items()}).loss
        (loss_bT.mean() / len(starts)).backward()
        losses.append(loss_bT.detach().float().cpu())
    layers = _layers(model, gates)
    checkpoint_step = checkpoint.step if checkpoint is not None else 0
    found = Replay(
        step=step,
        batch=batch,
        where=where,
        checkpoint_step=checkpoint_step,
        steps_before=(step - checkpoint_step) // tokens - 1,
        input_ids_BT=item["input_ids"].numpy(),
        labels_BT=item["labels"].numpy(),
        loss_BT=torch.cat(losses).numpy(),
        grad_norm=sum(layer["grad_norm"] ** 2 for layer in layers) ** 0.5,
        layers=layers,
    )
    return found, tokenizer_of(directory)


class _Gates:
    """Forget gates of every mixer that can name them, seen in forward passes inside `with`."""

    def __init__(self, model: nn.Module) -> None:
        self.values: dict[str, list[Tensor]] = {}
        self._listening = False  # recomputation in a backward pass would count twice
        for name, module in model.named_modules():
            if hasattr(module, "log_forget_gate"):
                module.register_forward_pre_hook(self._hook(name))

    def _hook(self, name: str):
        def hook(module: Any, arguments: tuple) -> None:
            if self._listening:
                with torch.no_grad():
                    self.values.setdefault(name, []).append(module.log_forget_gate(arguments[0]).exp().float().cpu())

        return hook

    def __enter__(self) -> None:
        self._listening = True

    def __exit__(self, *_: object) -> None:
        self._listening = False


def _layers(model: nn.Module, gates: _Gates) -> list[dict[str, Any]]:
    """Norms of weights and gradients by layer, and the distribution of its forget gates."""
    squares: dict[str, list[float]] = {}
    for name, parameter in model.named_parameters():
        sums = squares.setdefault(_layer_of(name), [0.0, 0.0, 0.0])
        sums[0] += parameter.detach().double().square().sum().item()
        if parameter.grad is not None:
            sums[1] += parameter.grad.double().square().sum().item()
            sums[2] += (~torch.isfinite(parameter.grad)).sum().item()
    layers = []
    for layer, (weights, gradients, not_finite) in squares.items():
        entry: dict[str, Any] = {"layer": layer, "weight_norm": weights**0.5, "grad_norm": gradients**0.5}
        entry["gradients_not_finite"] = int(not_finite)
        seen = [values for name, values in gates.values.items() if _layer_of(name + ".") == layer]
        if seen:
            fgate = torch.cat([value.flatten() for values in seen for value in values])
            entry |= {
                "fgate_mean": fgate.mean().item(),
                "fgate_min": fgate.min().item(),
                "fgate_median": fgate.median().item(),
                "fgate_below_half": (fgate < 0.5).float().mean().item(),
                "fgate_above_0.99": (fgate > 0.99).float().mean().item(),
            }
        layers.append(entry)
    return layers


def _layer_of(parameter: str) -> str:
    found = re.search(r"(?:^|\.)layers\.(\d+)\.", parameter)
    if found:
        return f"layer {found[1]}"
    return parameter.rpartition(".")[0].rpartition(".")[2]  # embeddings, norm, lm_head


def tokenizer_of(directory: RunDirectory) -> PreTrainedTokenizerBase | None:
    if not directory.tokenizer.is_dir():
        return None
    from forgetting_transformer.model_tokenizer import load_tokenizer

    return load_tokenizer(directory.tokenizer)
