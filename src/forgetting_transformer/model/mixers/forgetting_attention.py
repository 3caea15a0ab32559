"""FoX, the Forgetting Transformer, in its LLaMA and Pro variants.

Source: Lin et al., "Forgetting Transformer: Softmax Attention with a Forget Gate", ICLR 2025. Parameter names, config
keys and `model_type` are those of the released checkpoints. The Transformer (Pro) baseline is this class with
`fgate_type="none"` and `use_rope=True`.

Axes: `forgetting_transformer/ops/__init__.py`.
"""

import math
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, ClassVar, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import initialization as init

from forgetting_transformer.model.cache import DecoderCache, ForgettingAttentionCache, one_cache
from forgetting_transformer.model.decoder import DecoderForCausalLM, DecoderModel
from forgetting_transformer.model.layers import (
    AttentionMaps,
    GatedRMSNorm,
    GroupRMSNorm,
    ShiftLinear,
    apply_linear,
    attention_maps,
    exempt_from_decay,
    linear_together,
)
from forgetting_transformer.model.mixers.transformer import AttentionConfig, check_attention_options
from forgetting_transformer.model.padding import find_seq_start, padding_mask, positions_in_documents
from forgetting_transformer.ops import context
from forgetting_transformer.ops.attention import causal_attention
from forgetting_transformer.ops.backends import OpUse
from forgetting_transformer.ops.forgetting_attention import forgetting_attention, forgetting_attention_decode
from forgetting_transformer.ops.layers.norm import ACTIVATIONS
from forgetting_transformer.ops.layers.rotary import rotate

FGATE_TYPES = ("full", "bias_only", "fixed", "none")
# Fixed in the released models, whatever their norm_eps.
QK_NORM_EPS = 1e-5
# The op for decoding serves up to this many new tokens: one, or the guesses of assisted generation.
MAX_DECODED_TOKENS = 16


class ForgettingAttentionLayer(nn.Module):
    """Multi-head forgetting attention with the parts that make up FoX (Pro).

        q, k, v = W x             k and v optionally mixed with their value at the previous token (ShiftLinear)
        q, k    = RMSNorm(q), RMSNorm(k)          per head, optional; then RoPE, optional
        log f   = logsigmoid(W_f x + b_f)         one forget gate per head and token
        o       = forgetting_attention(q, k, v, log f)
        out     = W_o (act(W_g x) · RMSNorm(o))   gate and norm per head, each optional

    Args:
        hidden_size: E, a multiple of num_heads.
        num_heads: H.
        num_kv_heads: None or num_heads; grouped-query attention is not supported.
        use_rope: rotary position embedding. FoX does without.
        rope_base: its base.
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
        qk_norm_share_param_across_head: one weight vector `(D,)` for all heads, as in the released Pro checkpoints,
            instead of `(E,)`.
        use_k_shift, use_v_shift: data-dependent token shift of keys, values.
        log_pruning_tolerance: ln ε < 0 switches on adaptive computation pruning: attention may skip what
            changes the weights of a row by no more than ε in all. None computes everything.
        initializer_range: standard deviation of the linear layers' weights at the start; their biases start at 0. None
            leaves PyTorch's values, for a model that initialises all of its layers itself.
        layer_idx: number of this layer's entry in a `DecoderCache` passed as `past_key_values`.
        window_size: must be None; FoX has no sliding window.
        max_position_embeddings: no effect: positions are not limited. The authors' layer has this argument too.
    """

    gives_attentions = True
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
        use_rope: bool = False,
        rope_base: float = 500_000.0,
        use_output_gate: bool = False,
        ogate_act: str = "sigmoid",
        fgate_type: str = "full",
        fgate_bias_init: bool = False,
        decay_time_min: float | None = None,
        decay_time_max: float | None = None,
        use_output_norm: bool = False,
        norm_eps: float = 1e-6,
        qk_norm: bool = False,
        qk_norm_share_param_across_head: bool = False,
        use_k_shift: bool = False,
        use_v_shift: bool = False,
        log_pruning_tolerance: float | None = None,
        initializer_range: float | None = 0.02,
        layer_idx: int | None = None,
    ) -> None:
        super().__init__()
        if window_size is not None:
            raise ValueError(f"window_size is {window_size}; FoX has no sliding window, leave it None")
        self.hidden_size, self.num_heads, self.num_kv_heads = hidden_size, num_heads, num_kv_heads
        self.use_rope, self.rope_base = use_rope, rope_base
        self.ogate_act, self.fgate_type, self.fgate_bias_init = ogate_act, fgate_type, fgate_bias_init
        self.decay_time_min, self.decay_time_max = decay_time_min, decay_time_max
        self.log_pruning_tolerance, self.layer_idx = log_pruning_tolerance, layer_idx
        _check_options(self)
        self.head_dim = hidden_size // num_heads

        self.q_proj = nn.Linear(hidden_size, hidden_size, bias=False)
        self.k_proj = _projection(hidden_size, num_heads, use_k_shift)
        self.v_proj = _projection(hidden_size, num_heads, use_v_shift)
        self.o_proj = nn.Linear(hidden_size, hidden_size, bias=False)
        if fgate_type == "full":
            self.fgate_proj = nn.Linear(hidden_size, num_heads, bias=True)
        elif fgate_type == "bias_only":
            self.fgate_bias = nn.Parameter(self._initial_fgate_bias())
            exempt_from_decay(self.fgate_bias)
        elif fgate_type == "fixed":
            self.register_buffer("fgate_bias", self._initial_fgate_bias())
        self.ogate_proj = nn.Linear(hidden_size, hidden_size, bias=False) if use_output_gate else None
        self.output_norm: GatedRMSNorm | None = None
        if use_output_norm:
            self.output_norm = GatedRMSNorm(
                num_heads, hidden_size, norm_eps, has_gate=use_output_gate, activation=ogate_act
            )
        self.q_norm: GroupRMSNorm | None = None
        self.k_norm: GroupRMSNorm | None = None
        if qk_norm:
            shared = qk_norm_share_param_across_head
            self.q_norm = GroupRMSNorm(num_heads, hidden_size, QK_NORM_EPS, shared=shared)
            self.k_norm = GroupRMSNorm(num_heads, hidden_size, QK_NORM_EPS, shared=shared)
        if initializer_range is not None:
            for module in self.modules():
                if isinstance(module, nn.Linear):
                    nn.init.normal_(module.weight, std=initializer_range)
                    if module.bias is not None:
                        nn.init.zeros_(module.bias)

    def init_own_weights(self) -> None:
        if self.fgate_type in ("bias_only", "fixed"):
            init.copy_(self.fgate_bias, self._initial_fgate_bias())

    def _initial_fgate_bias(self) -> Tensor:
        if not self.fgate_bias_init:
            return torch.zeros(self.num_heads)
        assert self.decay_time_min is not None and self.decay_time_max is not None  # `_check_options`
        return decay_time_bias(self.num_heads, self.decay_time_min, self.decay_time_max)

    @property
    def context_heads(self) -> int:
        return self.num_heads

    def op_use(self) -> OpUse:
        is_gated = self.fgate_type != "none"
        pruning = None
        if is_gated and self.log_pruning_tolerance is not None:
            pruning = "auto" if self.q_norm is None else "threshold"
        return OpUse("attention", self.num_heads, self.head_dim, self.head_dim, is_gated=is_gated, pruning=pruning)

    def new_cache(self) -> ForgettingAttentionCache:
        return ForgettingAttentionCache(keeps_key_norm=self.log_pruning_tolerance is not None and self.q_norm is None)

    def forward(
        self,
        hidden_states: Tensor,
        seq_start_B: Tensor | None = None,
        cache: ForgettingAttentionCache | None = None,
        *,
        position_BT: Tensor | None = None,
        attention_mask: Tensor | None = None,
        past_key_values: ForgettingAttentionCache | DecoderCache | None = None,
        use_cache: bool = False,
        output_attentions: bool = False,
        cu_seqlens: Tensor | None = None,
    ) -> tuple[Tensor, AttentionMaps | None, ForgettingAttentionCache | None]:
        """Return the output `(B, T, E)`, the maps if they are asked for, and the cache.

        Args:
            hidden_states: T new tokens `(B, T, E)`.
            seq_start_B: index of the first real token, counted from the first cached one; None without left padding.
            cache: what `new_cache` returned, holding the tokens before these. Extended in place.
            position_BT: rotary positions `(B, T)` or `(1, T)`. Default: the number of tokens before each.
            output_attentions: also return `AttentionMaps`.
            attention_mask, past_key_values: the same as seq_start_B and cache, as the authors' layer takes them: a mask
                `(B, N)` with 0 for left padding; a layer's cache, or a model's, in which this layer
                has the number `layer_idx`.
            use_cache: with no cache given, start one.
            cu_seqlens: of packed documents, as `DecoderModel.forward` passes it; for B = 1 and without a cache. Where
                processes share sequences (`ops/context.py`), of whole ones, and for any B.

        Raises:
            ValueError: something is given in both ways, or the mask does not fit.
        """
        hidden_BTE = hidden_states
        cache = self._given_cache(cache, past_key_values, use_cache)
        num_past = 0 if cache is None else cache.get_seq_length()
        if attention_mask is not None:
            if seq_start_B is not None:
                raise ValueError("seq_start_B and attention_mask are both given; they say the same, leave one out")
            # A layer's cache does not remember where sequences start, so the mask is believed at every call.
            num_padding_B = (attention_mask == 0).sum(-1)
            seq_start_B = find_seq_start(attention_mask, hidden_BTE, num_past, num_padding_B, allow_right=cache is None)
        padding_BT = padding_mask(hidden_BTE, seq_start_B, cache)

        begins_BT = None if cu_seqlens is None else positions_in_documents(cu_seqlens, hidden_BTE) == 0
        together = linear_together(hidden_BTE, self._projections())
        given = (hidden_BTE, padding_BT, cache, begins_BT, together)
        q_BTE = self._project(self.q_proj, "query", self.q_norm, *given)
        k_BTE = self._project(self.k_proj, "key", self.k_norm, *given)
        v_BTE = self._project(self.v_proj, "value", None, *given)
        q_BTHD, k_BTHD = self._split_heads(q_BTE), self._split_heads(k_BTE)
        if self.use_rope:
            position = num_past if position_BT is None else position_BT
            q_BTHD, k_BTHD = rotate(q_BTHD, position, self.rope_base), rotate(k_BTHD, position, self.rope_base)
        packed = cu_seqlens is not None
        log_fgate_BTH = self.log_forget_gate(hidden_BTE, together)
        order = self._order_of_heads(log_fgate_BTH, cu_seqlens)
        q_BHTD, k_BHND, v_BHND, log_fgate_BHN = (
            context.to_heads(x, packed, order).transpose(1, 2)
            for x in (q_BTHD, k_BTHD, self._split_heads(v_BTE), log_fgate_BTH)
        )
        if cache is not None:
            if padding_BT is not None:
                # Whatever padding holds must not enter the running sum and the largest norm.
                log_fgate_BHN = log_fgate_BHN.masked_fill(padding_BT[:, None], 0)
                k_BHND = k_BHND.masked_fill(padding_BT[:, None, :, None], 0)
            k_BHND, v_BHND = cache.update(k_BHND, v_BHND, log_fgate_BHN)

        if self.fgate_type == "none" and (cache is None or cache.place is None):
            length_first = (x.transpose(1, 2) for x in (q_BHTD, k_BHND, v_BHND))
            out_BTHD = causal_attention(*length_first, seq_start=seq_start_B, cu_seqlens=cu_seqlens)
        else:
            out_BHTD = self._attend(q_BHTD, k_BHND, v_BHND, log_fgate_BHN, seq_start_B, cache, cu_seqlens, order)
            out_BTHD = out_BHTD.transpose(1, 2)
        out_BTE = context.to_sequence(out_BTHD, len(hidden_BTE), order).flatten(-2)
        gate_BTE = None if self.ogate_proj is None else apply_linear(self.ogate_proj, hidden_BTE, together)
        if self.output_norm is not None:
            out_BTE = self.output_norm(out_BTE, gate_BTE)
        elif gate_BTE is not None:
            out_BTE = ACTIVATIONS[self.ogate_act](gate_BTE) * out_BTE
        maps = None
        if output_attentions:
            all_log_fgate_BHN = log_fgate_BHN if cache is None else cache.log_fgate
            maps = attention_maps(q_BHTD, k_BHND, all_log_fgate_BHN, seq_start_B)
        return self.o_proj(out_BTE), maps, cache

    def _given_cache(
        self,
        cache: ForgettingAttentionCache | None,
        past_key_values: ForgettingAttentionCache | DecoderCache | None,
        use_cache: bool,
    ) -> ForgettingAttentionCache | None:
        cache = one_cache(past_key_values, cache)
        if isinstance(cache, DecoderCache):
            if self.layer_idx is None:
                raise ValueError(
                    "past_key_values is a model's cache; make the layer with layer_idx=…, or pass layer.new_cache()"
                )
            if not cache.is_writing:
                cache.make_dynamic()
            return cast(ForgettingAttentionCache, cache.layers[self.layer_idx])
        return self.new_cache() if cache is None and use_cache else cache

    def _attend(
        self,
        q_BHTD: Tensor,
        k_BHND: Tensor,
        v_BHND: Tensor,
        log_fgate_BHT: Tensor,
        seq_start_B: Tensor | None,
        cache: ForgettingAttentionCache | None,
        cu_seqlens: Tensor | None,
        order: context.Order | None,
    ) -> Tensor:
        """Forgetting attention from the new tokens to all, `(B, H, T, D)`."""
        num_new, num_keys = q_BHTD.shape[2], k_BHND.shape[2]
        options: dict[str, Any] = {"head_first": True, "seq_start": seq_start_B}
        out: Any
        if num_new < num_keys:
            assert cache is not None
            inputs = (q_BHTD, k_BHND, v_BHND, cache.running)
            wants_gradient = torch.is_grad_enabled() and any(x.requires_grad for x in inputs)
            if num_new <= MAX_DECODED_TOKENS and not wants_gradient:
                options["adaptive_threshold"] = self._decoding_threshold(q_BHTD, k_BHND, cache)
                options["seq_end"] = None if cache.place is None else cache.place.end_B
                out = forgetting_attention_decode(*inputs, **options)
                return out
            assert cache.log_fgate is not None
            log_fgate_BHT = cache.log_fgate
        options |= {"cu_seqlens": cu_seqlens, **self._pruning_options(num_keys, order)}
        out = forgetting_attention(q_BHTD, k_BHND, v_BHND, log_fgate_BHT, **options)
        return out

    def log_forget_gate(
        self, hidden_BTE: Tensor, together: Mapping[nn.Module, Tensor] = MappingProxyType({})
    ) -> Tensor:
        """Natural logarithm of the forget gates `(B, T, H)`, float32. `together`: see `linear_together`."""
        if self.fgate_type == "full":
            return F.logsigmoid(apply_linear(self.fgate_proj, hidden_BTE, together).float())
        if self.fgate_type == "none":
            return torch.zeros((*hidden_BTE.shape[:2], self.num_heads), device=hidden_BTE.device)
        return F.logsigmoid(self.fgate_bias.float()).expand(*hidden_BTE.shape[:2], self.num_heads)

    def _projections(self) -> list[nn.Linear]:
        """The linear layers whose input is the block's."""
        linears = [self.q_proj]
        for projection in (self.k_proj, self.v_proj):
            if isinstance(projection, ShiftLinear):
                linears += [projection.linear, projection.shift_proj]
            else:
                linears.append(projection)
        linears += [self.fgate_proj] if self.fgate_type == "full" else []
        linears += [self.ogate_proj] if self.ogate_proj is not None else []
        return linears

    def _project(
        self,
        projection: nn.Linear | ShiftLinear,
        name: str,
        norm: GroupRMSNorm | None,
        hidden_BTE: Tensor,
        padding_BT: Tensor | None,
        cache: ForgettingAttentionCache | None,
        begins_BT: Tensor | None,
        together: Mapping[nn.Module, Tensor],
    ) -> Tensor:
        """Apply the projection of queries, keys or values, with token shift and norm if it has them."""
        if not isinstance(projection, ShiftLinear):
            y_BTE = apply_linear(projection, hidden_BTE, together)
            return y_BTE if norm is None else norm(y_BTE)
        previous_BE = None if cache is None else cache.last_shift_state(name)
        shifted_BTE, y_BTE = projection(hidden_BTE, previous_BE, padding_BT, begins_BT, together, norm)
        if cache is not None:
            cache.update_shift_state(name, y_BTE)
        return shifted_BTE

    def _split_heads(self, x_BTE: Tensor) -> Tensor:
        return x_BTE.unflatten(-1, (self.num_heads, self.head_dim))

    @torch.no_grad()
    def _pruning_options(self, num_keys: int, order: context.Order | None = None) -> dict[str, Any]:
        """What the op may skip, as its keyword arguments.

        If all scores lie in [-U, U], a pair whose bias is below -(2U + ln N) + ln ε has a softmax weight below ε/N, so
        all such pairs of a row together less than ε. QK-norm bounds every normalised vector by √D times its largest
        weight. Without it the op finds bounds in the vectors at hand.
        """
        if self.log_pruning_tolerance is None:
            return {}
        if self.q_norm is None:
            return {"adaptive_threshold": "auto", "log_tolerance": self.log_pruning_tolerance}
        return {"adaptive_threshold": context.own_heads(self._threshold(num_keys), order)}

    def _threshold(self, num_keys: int) -> Tensor:
        """The decay bias `(H,)` beyond which pairs are left out where QK-norm bounds the scores."""
        assert self.log_pruning_tolerance is not None
        return self.log_pruning_tolerance - (2 * self.score_bound() + math.log(num_keys))

    @torch.no_grad()
    def _order_of_heads(self, log_fgate_BTH: Tensor, cu_seqlens: Tensor | None) -> context.Order | None:
        """Which process takes which heads, where pruning leaves some heads more to do than others."""
        if self.log_pruning_tolerance is None or self.fgate_type == "none" or (shared := context.active()) is None:
            return None
        length = log_fgate_BTH.shape[1] * shared.size
        threshold = None if self.q_norm is None else self._threshold(length)
        return context.even_order(log_fgate_BTH, threshold, cu_seqlens)

    @torch.no_grad()
    def score_bound(self) -> Tensor:
        """U `(H,)`, float32, with |q·k| / √D ≤ U for any text, from the weights of QK-norm; needs `qk_norm`."""
        # (H, D) with one weight vector per head, (1, D) if they share it
        norms: tuple[Any, Any] = self.q_norm, self.k_norm
        q_max, k_max = (norm.weight.float().abs().view(-1, self.head_dim).amax(-1) for norm in norms)
        return (q_max * k_max * math.sqrt(self.head_dim)).expand(self.num_heads)

    @torch.no_grad()
    def _decoding_threshold(self, q_BHTD: Tensor, k_BHND: Tensor, cache: ForgettingAttentionCache) -> Tensor | None:
        """What decoding may skip, `(B, H)` or `(H,)`: as `_pruning_options`, without reading any old key.

        Without QK-norm: no score of query i is above U_i = |q_i|·max|k|/√D, and its own key has s_ii and no bias. So
        what has a bias below ln ε - ln N - (U_i - s_ii) has a weight below ε/N.
        """
        if self.log_pruning_tolerance is None or self.q_norm is not None:
            return self._pruning_options(k_BHND.shape[2]).get("adaptive_threshold")
        assert cache.max_key_norm is not None  # caches of layers without QK-norm have it
        k_new = k_BHND[:, :, -q_BHTD.shape[2] :] if cache.place is None else k_BHND.index_select(2, cache.place.new)
        q, k_new = q_BHTD.float(), k_new.float()
        excess_BHT = q.norm(dim=-1) * cache.max_key_norm[..., None] - (q * k_new).sum(-1)
        # Queries in padding may be NaN, and what they skip does not matter.
        excess_BH = excess_BHT.nan_to_num(nan=0.0).amax(-1).clamp(min=0) / math.sqrt(self.head_dim)
        return self.log_pruning_tolerance - math.log(k_BHND.shape[2]) - excess_BH


def _projection(hidden_size: int, num_heads: int, use_shift: bool) -> nn.Linear | ShiftLinear:
    if use_shift:
        return ShiftLinear(hidden_size, hidden_size, num_heads)
    return nn.Linear(hidden_size, hidden_size, bias=False)


def decay_time_bias(num_heads: int, decay_time_min: float, decay_time_max: float) -> Tensor:
    """Gate biases `(H,)` for which a constant gate f = sigmoid(b) decays to 1/e after T tokens: -1/log f = T.

    T runs logarithmically from decay_time_min to decay_time_max over the heads; b = -log(exp(1/T) - 1).
    """
    log_time_H = torch.linspace(math.log(decay_time_min), math.log(decay_time_max), num_heads, dtype=torch.float64)
    return -torch.log(torch.expm1(torch.exp(-log_time_H))).float()


def _check_options(options: "ForgettingAttentionLayer | ForgettingTransformerConfig") -> None:
    """Refuse options that do not fit together, naming the key and what to do."""
    check_attention_options(options.hidden_size, options.num_heads, None, None, options.use_rope)
    if options.num_kv_heads not in (None, options.num_heads):
        raise ValueError(
            f"num_kv_heads is {options.num_kv_heads}; FoX has no grouped-query attention, leave it None (or "
            f"num_heads = {options.num_heads})"
        )
    if options.ogate_act not in ACTIVATIONS:
        raise ValueError(f"ogate_act is {options.ogate_act!r}; it must be one of {', '.join(ACTIVATIONS)}")
    if options.fgate_type not in FGATE_TYPES:
        raise ValueError(f"fgate_type is {options.fgate_type!r}; it must be one of {', '.join(FGATE_TYPES)}")
    if options.fgate_bias_init and options.fgate_type not in ("bias_only", "fixed"):
        raise ValueError(
            f"fgate_bias_init is for fgate_type bias_only and fixed; with {options.fgate_type!r} set it to False"
        )
    if options.fgate_type == "fixed" and not options.fgate_bias_init:
        raise ValueError("fgate_type 'fixed' takes its gates from decay times: set fgate_bias_init=True")
    shortest, longest = options.decay_time_min, options.decay_time_max
    if options.fgate_bias_init:
        if shortest is None or longest is None or not 0 < shortest <= longest:
            raise ValueError(
                f"decay_time_min, decay_time_max are {shortest}, {longest} (tokens); fgate_bias_init needs "
                "0 < decay_time_min <= decay_time_max"
            )
    elif shortest is not None or longest is not None:
        raise ValueError(
            "decay_time_min and decay_time_max have no effect without fgate_bias_init=True; leave them None"
        )
    if options.log_pruning_tolerance is not None and not options.log_pruning_tolerance < 0:
        raise ValueError(
            f"log_pruning_tolerance is {options.log_pruning_tolerance}; it is ln ε of a small ε, so negative (-10), "
            "or None for off"
        )


class ForgettingTransformerConfig(AttentionConfig):
    """Configuration of FoX. Fields of attention: see `ForgettingAttentionLayer`.

    FoX (Pro) sets hidden_ratio to 3.5, to pay for its output gates.

    Accepted so that published config.json files load, without effect: window_size, for training with None only; and
    what `AttentionConfig` accepts.
    """

    model_type = "forgetting_transformer-project_fox"
    neutral_values: ClassVar[Mapping[str, Sequence[Any]]] = {**AttentionConfig.neutral_values, "window_size": (None,)}

    use_rope: bool = False
    use_output_gate: bool = False
    ogate_act: str = "sigmoid"
    fgate_type: str = "full"
    fgate_bias_init: bool = False
    decay_time_min: float | None = None
    decay_time_max: float | None = None
    use_output_norm: bool = False
    qk_norm: bool = False
    qk_norm_share_param_across_head: bool = False
    use_k_shift: bool = False
    use_v_shift: bool = False
    log_pruning_tolerance: float | None = None

    def __post_init__(self, **kwargs: Any) -> None:
        _check_options(self)
        super().__post_init__(**kwargs)

    def build_mixer(self, layer_idx: int) -> ForgettingAttentionLayer:
        return self.build_from_fields(
            ForgettingAttentionLayer, window_size=None, initializer_range=None, layer_idx=layer_idx
        )

    def mixer_flops_per_token(self, layer_idx: int, seq_len: int) -> float:
        """Linear layers: 2·weights. Attention: 2·E for q·k and 2·E for the weighted sum, over (T+1)/2 keys."""
        width, heads = self.hidden_size, self.num_heads
        weights = 4 * width * width  # q, k, v, o
        weights += width * width * self.use_output_gate
        weights += width * heads * ((self.fgate_type == "full") + self.use_k_shift + self.use_v_shift)
        return 2 * weights + 4 * width * (seq_len + 1) / 2


class ForgettingTransformerModel(DecoderModel):
    """FoX without its output layer."""

    config_class = ForgettingTransformerConfig


class ForgettingTransformerForCausalLM(DecoderForCausalLM):
    """FoX as a language model."""

    model_class: ClassVar = ForgettingTransformerModel
