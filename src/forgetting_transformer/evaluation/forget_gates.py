"""Forget gates of a trained model on one text: matrices, maps, memory lengths, and the share that pruning skips.

    F_ij = Π_{l=j+1..i} f_l                  how much of token j's weight is left at token i
    A_ij = softmax_j(s·q_i·k_j + log F_ij)   the attention weights

Both are T × T a head. They are computed in strips of rows and reduced to the picture's pixels at once, so that a text
of 16k tokens needs no more memory than a strip and the picture.

During training of a FoX, the callback `gate_statistics` measures how far back each head sees and what pruning skips:

    python train.py … callbacks=[gate_statistics] callbacks.gate_statistics.interval=1000000000

It writes gates.jsonl: `gates/layer_<l>/head_<h>`, the memory length of a head in tokens (`memory_lengths`), mean over
the first held-out batch of every rank; `gates/shortest`, `gates/median` and `gates/longest` of all heads. For a model
that prunes also `gates/pruned`, the share of tiles that pruning skips, mean over heads and the same texts. Heads of a
Transformer (Pro) have no gates: their memory length is the whole context, as the log states.

Axes: `forgetting_transformer/ops/__init__.py`. P is the pixels of a picture's side.
"""

import contextlib
import logging
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from forgetting_transformer import metric_names as names
from forgetting_transformer import plugins
from forgetting_transformer.analysis import evaluations, outputs
from forgetting_transformer.analysis.evaluations import Number
from forgetting_transformer.analysis.plots import heatmaps
from forgetting_transformer.analysis.tables import format_tokens
from forgetting_transformer.data.corpus import model_inputs
from forgetting_transformer.evaluation.generation import check_settings
from forgetting_transformer.evaluation.in_training import EvaluationCallback
from forgetting_transformer.evaluation.models import EvaluatedModel, EvaluationError, precision_context
from forgetting_transformer.model.mixers.forgetting_attention import ForgettingAttentionLayer
from forgetting_transformer.ops.forgetting_attention.reference import score_bounds, skipped_share
from forgetting_transformer.training.config import Tokens
from forgetting_transformer.training.interface import TrainerInterface

log = logging.getLogger(__name__)

#: Entries of a strip of a T × T matrix in memory at once: 64 MiB in float32.
_STRIP_ENTRIES = 2**24
#: Side of a picture of a matrix.
_PIXELS = 256
#: Attention weights below this stay white in pictures, as in the paper.
_LEAST_WEIGHT = 0.5
#: ln ε of pruning for models that do not prune.
_TOLERANCE = -10.0


@dataclass(frozen=True)
class AttentionInputs:
    """Inputs of one layer's attention for one text.

    Attributes:
        layer: index of the block.
        q_HTD, k_HTD: after normalisation and rotation, float32. Keys that a group of heads
            shares are repeated for each.
        log_fgate_HT: float64, so that sums over a long text are exact enough to be compared.
        score_bound_H: U with |s·q_i·k_j| ≤ U for all pairs, by the weights of QK-norm, which hold for every text. None
            without QK-norm.
        tolerance: ln ε of the model's pruning, None if it is off.
    """

    layer: int
    q_HTD: Tensor
    k_HTD: Tensor
    log_fgate_HT: Tensor
    score_bound_H: Tensor | None
    tolerance: float | None

    @property
    def scale(self) -> float:
        return 1 / math.sqrt(self.q_HTD.shape[-1])


def attention_layers(model: Any) -> dict[int, ForgettingAttentionLayer]:
    """The forgetting-attention layers of a model that see all keys, by block index.

    Raises:
        EvaluationError: it has none.
    """
    blocks = enumerate(model.decoder.layers) if hasattr(model, "decoder") else []
    mixers = {i: block.sequence_mixer for i, block in blocks}
    found = {
        i: mixer
        for i, mixer in mixers.items()
        if isinstance(mixer, ForgettingAttentionLayer) and mixer.window_size is None
    }
    if not found:
        raise EvaluationError(
            f"{type(model).__name__} has no forgetting-attention layer that sees all keys (without window_size); this "
            "evaluation is for FoX, and for Transformers, whose gates are all 1"
        )
    return found


@contextlib.contextmanager
def watching(mixers: Mapping[int, ForgettingAttentionLayer], use: Callable[[AttentionInputs], None]) -> Iterator[None]:
    """Passes the inputs of attention of these layers to `use`, by block index, whenever the model runs.

    It is called after each layer, once for every sequence of the batch, in their order.
    """
    held: dict[str, Tensor] = {}
    handles = []

    def keep(name: str) -> Callable:
        def hook(_module: nn.Module, _args: tuple, out: Tensor | tuple[Tensor, ...]) -> None:
            held[name] = out[0] if isinstance(out, tuple) else out  # a shifted projection also gives what it shifted

        return hook

    def hand_over(layer: int) -> Callable:
        def hook(mixer: ForgettingAttentionLayer, args: tuple, _out: tuple) -> None:
            for inputs in _attention_inputs(layer, mixer, args[0], held.pop("q"), held.pop("k")):
                use(inputs)

        return hook

    for layer, mixer in mixers.items():
        handles += [
            (mixer.q_norm or mixer.q_proj).register_forward_hook(keep("q")),
            (mixer.k_norm or mixer.k_proj).register_forward_hook(keep("k")),
            mixer.register_forward_hook(hand_over(layer)),
        ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _attention_inputs(
    layer: int, mixer: ForgettingAttentionLayer, hidden_BTE: Tensor, q: Tensor, k: Tensor
) -> Iterator[AttentionInputs]:
    per_head = (*hidden_BTE.shape[:2], -1, mixer.head_dim)
    q_BTHD, k_BTHD = (x.float().reshape(per_head) for x in (q, k))
    if mixer.use_rope:
        q_BTHD, k_BTHD = (mixer.rotate(x) for x in (q_BTHD, k_BTHD))
    log_fgate_BTH = mixer.log_forget_gate(hidden_BTE)
    bound_H = None if mixer.q_norm is None else mixer.score_bound()
    for q_THD, k_THD, log_fgate_TH in zip(q_BTHD, k_BTHD, log_fgate_BTH, strict=True):
        # Query head h reads the keys of group h // (H / G).
        q_HTD, k_HTD = (x.repeat_interleave(mixer.num_heads // x.shape[1], 1).transpose(0, 1) for x in (q_THD, k_THD))
        yield AttentionInputs(layer, q_HTD, k_HTD, log_fgate_TH.T.double(), bound_H, mixer.log_pruning_tolerance)


def memory_lengths(log_fgate_HT: Tensor) -> tuple[Tensor, Tensor]:
    """Memory length of each head in tokens, `(H,)` float64: the median over queries of the distance at which the decay
    reaches 1/e; and whether that is a lower bound, `(H,)` bool.

    The median runs over the second half of the text, whose queries have T/2 or more tokens before them. It is a lower
    bound for a head that has not forgotten the beginning of the text at half of them.
    """
    c_HT = log_fgate_HT.double().cumsum(-1)
    length = c_HT.shape[-1]
    query_T = torch.arange(length // 2, length, device=c_HT.device)
    # F_ij ≥ 1/e where -c_j ≥ -c_i - 1, and -c never falls.
    first_HT = torch.searchsorted((-c_HT).contiguous(), (-c_HT[:, query_T] - 1).contiguous())
    is_bound_H = (first_HT == 0).double().mean(-1) >= 0.5
    return (query_T - first_HT).double().median(-1).values, is_bound_H


def pruned_share(inputs: AttentionInputs) -> Tensor:
    """Share of causal tiles (128 × 128 positions) that pruning skips, `(H,)` float64, by the model's rule: with QK-norm
    one threshold for a head, ln ε - (2U + ln T), without it the norms of the vectors of each tile."""
    log_fgate_BHT, length = inputs.log_fgate_HT[None], inputs.log_fgate_HT.shape[-1]
    tolerance = _TOLERANCE if inputs.tolerance is None else inputs.tolerance
    threshold_BH = torch.full_like(log_fgate_BHT[..., 0], tolerance)
    if inputs.score_bound_H is not None:
        threshold_BH = threshold_BH - (2 * inputs.score_bound_H.double() + math.log(length))
        return skipped_share(log_fgate_BHT, length, threshold_BH)[0]
    bounds = score_bounds(inputs.q_HTD[None], inputs.k_HTD[None], inputs.scale)
    return skipped_share(log_fgate_BHT, length, threshold_BH, bounds)[0]


def gate_matrix(log_fgate_T: Tensor, pixels: int) -> Tensor:
    """F of one head as a picture `(P, P)`, P ≤ pixels. A pixel is the largest entry it covers, 0 above the diagonal.

    Within a rectangle of F that lies below the diagonal the largest entry is its upper right corner, the earliest query
    and the latest key, so the picture needs no other one.
    """
    edges_P = _pixel_edges(len(log_fgate_T), pixels, log_fgate_T.device)
    c_T = log_fgate_T.double().cumsum(0)
    first_query_P, last_key_P = edges_P[:-1], edges_P[1:] - 1
    # On the diagonal i = j is the largest entry, 1.
    picture_PP = torch.exp(c_T[first_query_P][:, None] - c_T[last_key_P]).tril(-1)
    return (picture_PP + torch.eye(len(first_query_P), device=c_T.device, dtype=c_T.dtype)).float()


def attention_map(inputs: AttentionInputs, head: int, pixels: int) -> Tensor:
    """A of one head as a picture `(P, P)`, P ≤ pixels: each pixel is the largest weight of its pairs."""
    q_TD, k_ND = inputs.q_HTD[head], inputs.k_HTD[head]
    c_N = inputs.log_fgate_HT[head].cumsum(0)
    length = len(k_ND)
    edges_P = _pixel_edges(length, pixels, k_ND.device)
    sides = edges_P.diff().tolist()
    rows: list[Tensor] = []
    key_N = torch.arange(length, device=k_ND.device)
    pixel_N = torch.repeat_interleave(torch.arange(len(sides), device=k_ND.device), edges_P.diff())
    strip = max(1, _STRIP_ENTRIES // length)
    for begin, end in zip(edges_P[:-1].tolist(), edges_P[1:].tolist(), strict=True):
        row_P = torch.zeros(len(sides), device=k_ND.device)
        for start in range(begin, end, strip):
            query_T = key_N[start : min(start + strip, end)]
            bias_TN = (c_N[query_T][:, None] - c_N).float()
            scores_TN = inputs.scale * (q_TD[query_T] @ k_ND.T) + bias_TN
            weights_TN = scores_TN.masked_fill(key_N > query_T[:, None], -torch.inf).softmax(-1)
            row_P = row_P.scatter_reduce(0, pixel_N, weights_TN.amax(0), "amax")
        rows.append(row_P)
    return torch.stack(rows)


def _pixel_edges(length: int, pixels: int, device: torch.device) -> Tensor:
    """Edges `(P + 1,)` of P ≤ pixels nearly equal ranges of positions."""
    return torch.linspace(0, length, min(pixels, length) + 1, dtype=torch.float64, device=device).round().long()


class HeadReport(NamedTuple):
    """One head on one text: its memory length, whether that is a lower bound, the share of tiles that pruning skips."""

    layer: int
    head: int
    memory: float
    memory_is_bound: bool
    pruned: float


@torch.no_grad()
def report_heads(inputs: AttentionInputs) -> list[HeadReport]:
    """Memory length and pruned share of every head of a layer."""
    memory_H, is_bound_H = memory_lengths(inputs.log_fgate_HT)
    rows = zip(memory_H.tolist(), is_bound_H.tolist(), pruned_share(inputs).tolist(), strict=True)
    return [HeadReport(inputs.layer, head, *row) for head, row in enumerate(rows)]


def evaluate(
    model: EvaluatedModel,
    tokens_T: np.ndarray,
    text: str,
    folder: Path,
    *,
    layers: Sequence[int] | None = None,
    heads: Sequence[int] | None = None,
    precision: str = "auto",
) -> list[HeadReport]:
    """Draws gates.png, attention.png and memory.png of one text, and writes evaluation.json and table.md.

    Args:
        text: its name in the conditions.
        layers, heads: to draw; default four layers, evenly spaced, and their first four heads.

    Returns:
        Memory length and pruned share of every head.

    Raises:
        EvaluationError: the model has no such layer or head, or no forgetting attention at all.
        AnalysisError: the folder holds files of others.
    """
    files = [*evaluations.FILES, "gates.png", "attention.png", "memory.png"]
    outputs.check(folder, "forget_gates", files)
    source = str(Path(model.source).resolve()) if Path(model.source).exists() else model.source
    check_settings(folder, {"model": source})
    available = attention_layers(model.model)
    spaced = np.linspace(0, len(available) - 1, min(4, len(available))).round().astype(int)
    layers, num_heads = layers or [list(available)[i] for i in spaced], next(iter(available.values())).num_heads
    heads = heads or list(range(min(4, num_heads)))
    if wrong := [head for head in heads if head >= num_heads]:
        raise EvaluationError(f"--heads={wrong[0]}: the model's heads are 0 to {num_heads - 1}")
    if wrong := [layer for layer in layers if layer not in available]:
        known = ", ".join(map(str, available))
        raise EvaluationError(f"--layers={wrong[0]}: the model's forgetting-attention layers are {known}")
    input_ids_T = torch.from_numpy(tokens_T).to(model.device)
    gates, maps, titles = {}, {}, {}
    reports: list[HeadReport] = []

    def use(inputs: AttentionInputs) -> None:
        for report in report_heads(inputs):
            reports.append(report)
            if inputs.layer in layers and report.head in heads:
                key = (inputs.layer, report.head)
                gates[key] = gate_matrix(inputs.log_fgate_HT[report.head], _PIXELS).cpu().numpy()
                maps[key] = attention_map(inputs, report.head, _PIXELS).cpu().numpy()
                memory = f"{'≥ ' * report.memory_is_bound}{report.memory:,.0f}" if report.memory >= 1 else "<1"
                titles[key] = f"layer {key[0]}, head {key[1]}\nmemory {memory} token{'s' * (report.memory > 1)}"

    with precision_context(precision, model.device), watching(available, use):
        # The blocks alone: this evaluation needs no logits.
        model.model.decoder(input_ids=input_ids_T[None], use_cache=False)
    numbers = [Number("pruning", "pruned", sum(report.pruned for report in reports) / len(reports))]
    for report in reports:
        at = {"layer": report.layer, "head": report.head}
        bound = {"at_least": True} if report.memory_is_bound else {}
        numbers.append(Number("memory", "tokens", report.memory, at=at | bound))
        numbers.append(Number("pruning", "pruned", report.pruned, at=at))
    about = {"source": model.source, "train_tokens": model.train_tokens}
    evaluation = evaluations.Evaluation("forget_gates", model.name, numbers, about, {"tokens": len(input_ids_T)})
    trained = [] if model.train_tokens is None else [f"after {format_tokens(model.train_tokens)} training tokens"]
    conditions = [*trained, f"on one text of {len(input_ids_T):,} tokens, {text}"]
    largest = [f"a pixel is the largest of its entries, {_PIXELS} of them a side"] * (len(input_ids_T) > _PIXELS)

    def write_more(new: Path) -> None:
        columns = ([r.layer for r in reports], [r.memory for r in reports], [r.memory_is_bound for r in reports])
        title = f"Memory length of every head of {model.name}"
        heatmaps.heads_by_layer(*columns, new / "memory.png", title, conditions)
        weight = f"attention weight $A_{{ij}}$ (below {_LEAST_WEIGHT:g}: white)"
        for pictures, name, title, label, least in (
            (gates, "gates.png", "Forget gates", "decay $F_{ij}$", None),
            (maps, "attention.png", "Attention", weight, _LEAST_WEIGHT),
        ):
            title, made_with = f"{title} of {model.name}", conditions + largest
            heatmaps.head_matrices(pictures, titles, new / name, len(input_ids_T), title, label, least, made_with)

    evaluations.write_evaluation(evaluation, folder, write_more)
    return reports


@dataclass
class GateStatisticsConfig:
    #: Training tokens between measurements; the last one follows config.final_eval.
    interval: Tokens


@plugins.CALLBACKS.register("gate_statistics", config=GateStatisticsConfig, free=[plugins.ALL])
class GateStatistics(EvaluationCallback):
    kind = names.GATES

    def prepare(self, trainer: TrainerInterface) -> None:
        self._layers = attention_layers(trainer.model.module)
        if all(layer.fgate_type == "none" for layer in self._layers.values()):
            log.warning("callbacks=[gate_statistics]: no head has a gate, so each memory length is the whole context")
        trainer.data.eval_info()

    @torch.no_grad()
    def evaluate(self, trainer: TrainerInterface) -> dict[str, Any]:
        fabric = trainer.fabric
        with trainer.watchdog.reading("the corpus (datamodule.name)"):
            batch = next(iter(trainer.data.eval_loader(fabric.global_rank, fabric.world_size)))
        memory: dict[int, list[Tensor]] = {layer: [] for layer in self._layers}
        pruned: dict[int, list[Tensor]] = {layer: [] for layer in self._layers}

        def measure(inputs: AttentionInputs) -> None:
            memory[inputs.layer].append(memory_lengths(inputs.log_fgate_HT)[0])
            if inputs.tolerance is not None:
                pruned[inputs.layer].append(pruned_share(inputs))

        def means(of: dict[int, list[Tensor]]) -> Tensor:
            """`(L, H)` float64, over the sequences of all ranks."""
            mean_LH = torch.stack([torch.stack(of_layer).mean(0) for of_layer in of.values()])
            trainer.sum_over_ranks(mean_LH)
            return mean_LH / fabric.world_size

        # The whole model, which gathers shards of weights when they are needed.
        with watching(self._layers, measure):
            trainer.model(**model_inputs(fabric.to_device(batch)))
        memory_LH = means(memory)
        least, median, most = memory_LH.min().item(), memory_LH.median().item(), memory_LH.max().item()
        found = {names.SHORTEST: least, names.MEDIAN: median, names.LONGEST: most}
        for layer, row in zip(self._layers, memory_LH.tolist(), strict=True):
            found |= {names.name_of(names.GATES, f"layer_{layer}", f"head_{h}"): value for h, value in enumerate(row)}
        if all(pruned.values()):
            found[names.name_of(names.GATES, "pruned")] = means(pruned).mean().item()
        return found
