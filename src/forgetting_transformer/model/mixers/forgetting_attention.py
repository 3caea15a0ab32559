"""The attention layer of FoX, the Forgetting Transformer.

Source: Lin et al., "Forgetting Transformer: Softmax Attention with a Forget Gate", ICLR 2025. Parameter names are those
of the released checkpoints.

Axes: `forgetting_transformer/ops/__init__.py`.
"""

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import initialization as init

from forgetting_transformer.model.arguments import check_forgetting_options
from forgetting_transformer.model.attention import Pruning, attend
from forgetting_transformer.model.generation.cache import AttentionCache
from forgetting_transformer.model.layers import (
    GatedRMSNorm,
    GroupRMSNorm,
    Project,
    ShiftLinear,
    exempt_from_decay,
    project_together,
)
from forgetting_transformer.model.padding import find_padding
from forgetting_transformer.model.span import Span
from forgetting_transformer.ops.backends import OpUse
from forgetting_transformer.ops.layers.norm import ACTIVATIONS
from forgetting_transformer.ops.layers.rotary import rotate


class ForgettingAttentionLayer(nn.Module):
    """Multi-head forgetting attention, with options that make it that of FoX (Pro).

        q, k, v = W x             k and v optionally mixed with their value at the previous token (ShiftLinear)
        q, k    = RMSNorm(q), RMSNorm(k)          per head, optional; then RoPE, optional
        log f   = logsigmoid(W_f x + b_f)         one forget gate per query head and token
        o       = forgetting_attention(q, k, v, log f)
        out     = W_o (act(W_g x) · RMSNorm(o))   gate and norm per query head, each optional

    Args:
        hidden_size: E, a multiple of num_heads unless head_dim is given.
        num_heads: H, of queries, gates and outputs.
        num_kv_heads: G, a divisor of H: grouped-query attention. Keys, values, their shift and their norm have G heads,
            and query head h reads head h // (H / G). Default H.
        head_dim: D. Default E / H.
        window_size: number of keys a query sees, itself included. None is all of them.
        use_rope: rotary position embedding. FoX does without.
        rope_base: its base.
        rope_factor: divisor of its frequencies, for contexts so many times as long.
        rope_llama3: [low, high, length]: which of them, as in Llama 3.1 (`rotate`). None divides all.
        use_output_gate: multiply the output by `act(W_g x)`.
        ogate_act: "sigmoid" or "silu".
        fgate_type: "full", gates depend on the token; "bias_only", one learned gate per head; "fixed", one constant
            gate per head; "none", no forgetting (ordinary attention).
        fgate_bias_init: start the gates of "bias_only" (required for "fixed") at decay times spread
            logarithmically between the next two. Without it they start at f = 1/2.
        decay_time_min, decay_time_max: tokens after which a constant gate has let a weight fall to 1/e.
        use_output_norm: per-head RMSNorm before the output gate.
        norm_eps: its epsilon.
        qk_norm: per-head RMSNorm of queries and keys.
        qk_norm_eps: its epsilon; in the released models 1e-5, whatever their norm_eps.
        qk_norm_share_param_across_head: one weight vector `(D,)` for all heads, as in the released Pro checkpoints,
            instead of one for each.
        use_k_shift, use_v_shift: data-dependent token shift of keys, values.
        log_pruning_tolerance: ln ε < 0 switches on adaptive computation pruning: attention may skip keys that change
            the weights of a row by no more than ε in all. None computes everything.
        initializer_range: standard deviation of the linear layers' weights at the start; their biases start at 0. None
            leaves PyTorch's values, for a model that initialises all of its layers itself.
        max_position_embeddings, layer_idx: no effect; the authors' layer has these arguments too.
    """

    # What it can do besides training on whole rows: block.py explains these.
    packs_documents = True
    static_cache = True

    def __init__(
        self,
        hidden_size: int = 2048,
        num_heads: int = 32,
        num_kv_heads: int | None = None,
        window_size: int | None = None,
        max_position_embeddings: int | None = None,
        *,
        head_dim: int | None = None,
        use_rope: bool = False,
        rope_base: float = 500_000.0,
        rope_factor: float = 1.0,
        rope_llama3: Sequence[float] | None = None,
        use_output_gate: bool = False,
        ogate_act: str = "sigmoid",
        fgate_type: str = "full",
        fgate_bias_init: bool = False,
        decay_time_min: float | None = None,
        decay_time_max: float | None = None,
        use_output_norm: bool = False,
        norm_eps: float = 1e-6,
        qk_norm: bool = False,
        qk_norm_eps: float = 1e-5,
        qk_norm_share_param_across_head: bool = False,
        use_k_shift: bool = False,
        use_v_shift: bool = False,
        log_pruning_tolerance: float | None = None,
        initializer_range: float | None = 0.02,
        layer_idx: int | None = None,
    ) -> None:
        super().__init__()
        self.hidden_size, self.num_heads, self.num_kv_heads = hidden_size, num_heads, num_kv_heads
        self.window_size, self.use_rope, self.rope_base = window_size, use_rope, rope_base
        self.rope_factor, self.rope_llama3 = rope_factor, rope_llama3
        self.ogate_act, self.fgate_type, self.fgate_bias_init = ogate_act, fgate_type, fgate_bias_init
        self.decay_time_min, self.decay_time_max = decay_time_min, decay_time_max
        self.log_pruning_tolerance = log_pruning_tolerance
        check_forgetting_options(self, head_dim)
        self.head_dim, self.key_heads = head_dim or hidden_size // num_heads, num_kv_heads or num_heads
        width, kv_width = num_heads * self.head_dim, self.key_heads * self.head_dim

        self.q_proj = nn.Linear(hidden_size, width, bias=False)
        self.k_proj = _projection(hidden_size, kv_width, self.key_heads, use_k_shift)
        self.v_proj = _projection(hidden_size, kv_width, self.key_heads, use_v_shift)
        self.o_proj = nn.Linear(width, hidden_size, bias=False)
        if fgate_type == "full":
            self.fgate_proj = nn.Linear(hidden_size, num_heads, bias=True)
        elif fgate_type == "bias_only":
            self.fgate_bias = nn.Parameter(self._initial_fgate_bias())
            exempt_from_decay(self.fgate_bias)
        elif fgate_type == "fixed":
            self.register_buffer("fgate_bias", self._initial_fgate_bias())
        self.ogate_proj = nn.Linear(hidden_size, width, bias=False) if use_output_gate else None
        self.output_norm: GatedRMSNorm | None = None
        if use_output_norm:
            self.output_norm = GatedRMSNorm(num_heads, width, norm_eps, has_gate=use_output_gate, activation=ogate_act)
        self.q_norm: GroupRMSNorm | None = None
        self.k_norm: GroupRMSNorm | None = None
        if qk_norm:
            shared = qk_norm_share_param_across_head
            self.q_norm = GroupRMSNorm(num_heads, width, qk_norm_eps, shared=shared)
            self.k_norm = GroupRMSNorm(self.key_heads, kv_width, qk_norm_eps, shared=shared)
        if initializer_range is not None:
            for module in self.modules():
                if isinstance(module, nn.Linear):
                    nn.init.normal_(module.weight, std=initializer_range)
                    if module.bias is not None:
                        nn.init.zeros_(module.bias)

    def forward(
        self, hidden_states: Tensor, span: Span | None = None, *, attention_mask: Tensor | None = None
    ) -> tuple[Tensor, None, AttentionCache | None]:
        """Return the output `(B, T, E)`, None in the place of attention weights, and the cache.

        Args:
            hidden_states: T new tokens `(B, T, E)`.
            span: facts about them, from the decoder.
            attention_mask: `(B, T)`, 0 for padding, for a layer by itself, without a span.
        """
        x_BTE = hidden_states
        if span is None:
            span = Span(*find_padding(attention_mask, x_BTE, None))
        project = project_together(x_BTE, self._projections())

        # q, k, v = W x, keys and values mixed with those of the previous token; q, k = RMSNorm(q), RMSNorm(k)
        q_BTE = project(self.q_proj)
        q_BTE = q_BTE if self.q_norm is None else self.q_norm(q_BTE)
        k_BTE = self._shift_and_norm(self.k_proj, "key", self.k_norm, x_BTE, span, project)
        v_BTE = self._shift_and_norm(self.v_proj, "value", None, x_BTE, span, project)
        q_BTHD, k_BTGD, v_BTGD = (x.unflatten(-1, (-1, self.head_dim)) for x in (q_BTE, k_BTE, v_BTE))
        if self.use_rope:
            q_BTHD, k_BTGD = (self.rotate(x, span.position) for x in (q_BTHD, k_BTGD))

        # log f = logsigmoid(W_f x + b_f)
        log_fgate_BTH = None if self.fgate_type == "none" else self.log_forget_gate(x_BTE, project)

        # o_i = Σ_{j ≤ i} softmax_j(q_i·k_j / √D + Σ_{l=j+1..i} log f_l) v_j
        out_BTHD = attend(q_BTHD, k_BTGD, v_BTGD, log_fgate_BTH, span, window=self.window_size, pruning=self.pruning())

        # W_o (act(W_g x) · RMSNorm(o))
        out_BTE = out_BTHD.flatten(-2)
        gate_BTE = None if self.ogate_proj is None else project(self.ogate_proj)
        if self.output_norm is not None:
            out_BTE = self.output_norm(out_BTE, gate_BTE)
        elif gate_BTE is not None:
            out_BTE = ACTIVATIONS[self.ogate_act](gate_BTE) * out_BTE
        cache: Any = span.cache
        return self.o_proj(out_BTE), None, cache

    def rotate(self, x_BTHD: Tensor, position: int | Tensor = 0) -> Tensor:
        """Turn queries or keys by their positions, as `ops.layers.rotary.rotate`."""
        scaling = () if self.rope_factor == 1 else (self.rope_factor, *(self.rope_llama3 or ()))
        return rotate(x_BTHD, position, self.rope_base, scaling)

    def log_forget_gate(self, hidden_BTE: Tensor, project: Project | None = None) -> Tensor:
        """Natural logarithm of the forget gates `(B, T, H)`, float32. `project`: see `project_together`."""
        if self.fgate_type == "full":
            return F.logsigmoid((self.fgate_proj(hidden_BTE) if project is None else project(self.fgate_proj)).float())
        if self.fgate_type == "none":
            return torch.zeros((*hidden_BTE.shape[:2], self.num_heads), device=hidden_BTE.device)
        return F.logsigmoid(self.fgate_bias.float()).expand(*hidden_BTE.shape[:2], self.num_heads)

    def _shift_and_norm(
        self,
        projection: nn.Linear | ShiftLinear,
        name: str,
        norm: GroupRMSNorm | None,
        x_BTE: Tensor,
        span: Span,
        project: Project,
    ) -> Tensor:
        """Keys or values, with token shift and norm if they have them."""
        if not isinstance(projection, ShiftLinear):
            y_BTE = project(projection)
            return y_BTE if norm is None else norm(y_BTE)
        cache: Any = span.cache
        previous_BE = None if cache is None else cache.last_shift_state(name)
        shifted_BTE, y_BTE = projection(x_BTE, previous_BE, span.padding_BT, span.begins_BT, project, norm)
        if cache is not None:
            cache.update_shift_state(name, y_BTE)
        return shifted_BTE

    def _projections(self) -> list[nn.Linear]:
        """The linear layers whose input is the block's. Those with a number for each head come last: behind twelve
        numbers of 16 bits, kernels could not load 16 bytes at a time."""
        wide, narrow = [self.q_proj], []
        for projection in (self.k_proj, self.v_proj):
            if isinstance(projection, ShiftLinear):
                wide.append(projection.linear)
                narrow.append(projection.shift_proj)
            else:
                wide.append(projection)
        wide += [self.ogate_proj] if self.ogate_proj is not None else []
        narrow += [self.fgate_proj] if self.fgate_type == "full" else []
        return wide + narrow

    def pruning(self) -> Pruning | None:
        """Rule for keys that attention may leave out; None computes every pair."""
        if self.log_pruning_tolerance is None or self.fgate_type == "none":
            return None
        return Pruning(self.log_pruning_tolerance, None if self.q_norm is None else self.score_bound())

    @torch.no_grad()
    def score_bound(self) -> Tensor:
        """U `(H,)`, float32, with |q·k| / √D ≤ U for any text, from the weights of QK-norm; needs `qk_norm`.

        Every normalised vector is no longer than √D times its largest weight.
        """
        # (heads, D) with one weight vector per head, (1, D) if they share it
        norms: tuple[Any, Any] = self.q_norm, self.k_norm
        q_max, k_max = (norm.weight.float().abs().view(-1, self.head_dim).amax(-1) for norm in norms)
        q_max_GR = q_max.expand(self.num_heads).unflatten(0, (self.key_heads, -1))
        return (q_max_GR * k_max.expand(self.key_heads)[:, None] * math.sqrt(self.head_dim)).flatten()

    def new_cache(self) -> AttentionCache:
        return AttentionCache(self.window_size)

    @property
    def context_heads(self) -> int:
        return self.num_heads

    def op_use(self) -> OpUse:
        rule, is_gated = None, self.fgate_type != "none"
        if is_gated and self.log_pruning_tolerance is not None:
            rule = "auto" if self.q_norm is None else "threshold"
        return OpUse(
            "attention",
            self.num_heads,
            self.head_dim,
            self.head_dim,
            key_heads=self.num_kv_heads,
            is_gated=is_gated,
            window=self.window_size,
            pruning=rule,
        )

    def init_own_weights(self) -> None:
        if self.fgate_type in ("bias_only", "fixed"):
            init.copy_(self.fgate_bias, self._initial_fgate_bias())

    def _initial_fgate_bias(self) -> Tensor:
        if not self.fgate_bias_init:
            return torch.zeros(self.num_heads)
        assert self.decay_time_min is not None and self.decay_time_max is not None  # `check_forgetting_options`
        return decay_time_bias(self.num_heads, self.decay_time_min, self.decay_time_max)


def _projection(in_features: int, out_features: int, num_heads: int, use_shift: bool) -> nn.Linear | ShiftLinear:
    if use_shift:
        return ShiftLinear(in_features, out_features, num_heads)
    return nn.Linear(in_features, out_features, bias=False)


def decay_time_bias(num_heads: int, decay_time_min: float, decay_time_max: float) -> Tensor:
    """Gate biases `(H,)` for which a constant gate f = sigmoid(b) decays to 1/e after T tokens: -1/log f = T.

    T runs logarithmically from decay_time_min to decay_time_max over the heads; b = -log(exp(1/T) - 1).
    """
    log_time_H = torch.linspace(math.log(decay_time_min), math.log(decay_time_max), num_heads, dtype=torch.float64)
    return -torch.log(torch.expm1(torch.exp(-log_time_H))).float()
