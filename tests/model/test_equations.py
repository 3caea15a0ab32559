"""Every mixer computes the equations of its paper: written out in float64, token by token or pair by pair."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from forgetting_transformer.model import ForgettingAttentionLayer
from tests.model.small_models import GROUPED, small

LENGTH = 24


def silu(x: Tensor) -> Tensor:
    return x * x.sigmoid()


def convolved(x_BTC: Tensor, taps_C1W: Tensor, bias: Tensor | float = 0.0) -> Tensor:
    width = taps_C1W.shape[-1]
    padded = F.pad(x_BTC, (0, 0, width - 1, 0))
    return bias + sum(padded[:, w : w + x_BTC.shape[1]] * taps_C1W[:, 0, w] for w in range(width))


def normalised(x: Tensor, weight: Tensor | float, eps: float = 1e-6) -> Tensor:
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * weight


def of_length_1(x: Tensor) -> Tensor:
    return x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt()


def turned(x_BTHD: Tensor, base: float) -> Tensor:
    """Rotary embedding as complex numbers, the first half of the channels real parts and the second imaginary."""
    half = x_BTHD.shape[-1] // 2
    position = torch.arange(x_BTHD.shape[1], dtype=x_BTHD.dtype)[:, None, None]
    angle = position * base ** (-torch.arange(half, dtype=x_BTHD.dtype) / half)
    z = torch.complex(x_BTHD[..., :half], x_BTHD[..., half:]) * torch.polar(torch.ones_like(angle), angle)
    return torch.cat((z.real, z.imag), -1)


def attention(layer: nn.Module, w: dict[str, Tensor], x_BTE: Tensor) -> Tensor:
    heads, size = layer.num_heads, layer.head_dim

    def project(name: str) -> Tensor:
        if f"{name}.weight" in w:
            y = x_BTE @ w[f"{name}.weight"].T
        else:
            y = x_BTE @ w[f"{name}.linear.weight"].T
            alpha = (x_BTE @ w[f"{name}.shift_proj.weight"].T).sigmoid().repeat_interleave(size, -1)
            y = alpha * F.pad(y, (0, 0, 1, 0))[:, :-1] + (1 - alpha) * y
        return y.unflatten(-1, (-1, size))

    def per_head(y: Tensor, weight: Tensor, eps: float) -> Tensor:
        return normalised(y, weight.view(-1, size) if len(weight) > size else weight, eps)

    q, k, v = project("q_proj"), project("k_proj"), project("v_proj")
    if "q_norm.weight" in w:
        q, k = per_head(q, w["q_norm.weight"], 1e-5), per_head(k, w["k_norm.weight"], 1e-5)
    if layer.use_rope:
        q, k = turned(q, layer.rope_base), turned(k, layer.rope_base)
    log_f = torch.zeros(*x_BTE.shape[:2], heads, dtype=x_BTE.dtype)
    if "fgate_proj.weight" in w:
        log_f = F.logsigmoid(x_BTE @ w["fgate_proj.weight"].T + w["fgate_proj.bias"])
    elif "fgate_bias" in w:
        log_f = log_f + F.logsigmoid(w["fgate_bias"])
    out = []
    for h in range(heads):
        for i in range(x_BTE.shape[1]):
            first = 0 if layer.window_size is None else max(0, i - layer.window_size + 1)
            keys, values = (y[:, first : i + 1, h // (heads // k.shape[2])] for y in (k, v))
            # Σ_{l=j+1..i} log f_l for j = first … i
            decay = log_f[:, first + 1 : i + 1, h].flip(1).cumsum(1).flip(1)
            scores = (keys @ q[:, i, h, :, None])[..., 0] / math.sqrt(size) + F.pad(decay, (0, 1))
            out.append((scores.softmax(-1)[..., None] * values).sum(1))
    o = torch.stack(out, 1).unflatten(1, (heads, -1)).transpose(1, 2)
    o = (per_head(o, w["output_norm.weight"], 1e-6) if "output_norm.weight" in w else o).flatten(-2)
    if "ogate_proj.weight" in w:
        gate = x_BTE @ w["ogate_proj.weight"].T
        o = o * (silu(gate) if layer.ogate_act == "silu" else gate.sigmoid())
    return o @ w["o_proj.weight"].T


def delta_rule(layer: nn.Module, w: dict[str, Tensor], x_BTE: Tensor) -> Tensor:
    """DeltaNet, Gated DeltaNet and Kimi Delta Attention, by which gates have weights."""

    def project(*names: str) -> Tensor:
        y = x_BTE
        for name in names:
            y = y @ w[f"{name}_proj.weight"].T
        return y

    def split(y: Tensor) -> Tensor:
        return y.unflatten(-1, (layer.num_heads, -1))

    q, k, v = (split(silu(convolved(project(x), w[f"{x}_conv1d.weight"]))) for x in "qkv")
    q, k, beta, gate = of_length_1(q), of_length_1(k), project("b").sigmoid(), torch.ones_like(v)
    a = torch.ones_like(k)
    if "a_proj.weight" in w:
        step, gate = (project("a") + w["dt_bias"]).exp().log1p(), silu(split(project("g")))
        a = (-w["A_log"].exp() * step).exp()[..., None].expand_as(k)
    elif "f_a_proj.weight" in w:
        step, gate = split((project("f_a", "f_b") + w["dt_bias"]).exp().log1p()), split(project("g_a", "g_b")).sigmoid()
        a = (-w["A_log"].exp()[:, None] * step).exp()
    elif "g_proj.weight" in w:
        gate = silu(split(project("g")))
    S, outs = torch.zeros(*k.shape[:1], *k.shape[2:], v.shape[-1], dtype=x_BTE.dtype), []
    for t in range(x_BTE.shape[1]):
        k_t, b_t = k[:, t, :, :, None], beta[:, t, :, None, None]
        erase = torch.eye(k.shape[-1], dtype=x_BTE.dtype) - b_t * (k_t @ k_t.mT)
        S = erase @ (a[:, t, :, :, None] * S) + b_t * (k_t @ v[:, t, :, None])
        outs.append((q[:, t, :, None] @ S)[:, :, 0] / math.sqrt(k.shape[-1]))
    return (normalised(torch.stack(outs, 1), w["o_norm.weight"]) * gate).flatten(-2) @ w["o_proj.weight"].T


def hgrn2(layer: nn.Module, w: dict[str, Tensor], x_BTE: Tensor) -> Tensor:
    q, f, v = (x_BTE @ w[f"{name}_proj.weight"].T for name in "qfi")
    q, f, v = (y.unflatten(-1, (layer.num_heads, -1)) for y in (silu(q), f.sigmoid(), v))
    S, outs = torch.zeros(*f.shape[:1], *f.shape[2:], v.shape[-1], dtype=x_BTE.dtype), []
    for t in range(x_BTE.shape[1]):
        S = f[:, t, :, :, None] * S + (1 - f[:, t, :, :, None]) * v[:, t, :, None]
        outs.append((q[:, t, :, None] @ S)[:, :, 0] / math.sqrt(layer.head_dim))
    return normalised(torch.stack(outs, 1).flatten(-2), w["g_norm.weight"]) @ w["o_proj.weight"].T


def mamba2(layer: nn.Module, w: dict[str, Tensor], x_BTE: Tensor) -> Tensor:
    heads, groups, inner = layer.num_heads, layer.n_groups, layer.inner_size
    z, xBC, dt = (x_BTE @ w["in_proj.weight"].T).split(layer.projected_sizes, -1)
    xBC = silu(convolved(xBC, w["conv1d.weight"], w["conv1d.bias"]))
    x, B, C = xBC.split(layer.conv_sizes, -1)
    x, B, C = x.unflatten(-1, (heads, -1)), B.unflatten(-1, (groups, -1)), C.unflatten(-1, (groups, -1))
    B, C = (y.repeat_interleave(heads // groups, 2) for y in (B, C))
    dt = (dt + w["dt_bias"]).exp().log1p()
    S, outs = torch.zeros(*B.shape[:1], *B.shape[2:], x.shape[-1], dtype=x_BTE.dtype), []
    for t in range(x.shape[1]):
        step = dt[:, t, :, None, None]
        S = (-step * w["A_log"].exp()[:, None, None]).exp() * S + step * B[:, t, :, :, None] * x[:, t, :, None]
        outs.append((C[:, t, :, None] @ S)[:, :, 0] + w["D"][:, None] * x[:, t])
    y = (torch.stack(outs, 1).flatten(-2) * silu(z)).unflatten(-1, (groups, -1))
    return (normalised(y, 1.0, 1e-5).flatten(-2) * w["norm.weight"]) @ w["out_proj.weight"].T[:inner]


def mamba(layer: nn.Module, w: dict[str, Tensor], x_BTE: Tensor) -> Tensor:
    x, z = (x_BTE @ w["in_proj.weight"].T).chunk(2, -1)
    x = silu(convolved(x, w["conv1d.weight"], w["conv1d.bias"]))
    sizes = [layer.time_step_rank, layer.state_size, layer.state_size]
    dt, B, C = (x @ w["x_proj.weight"].T).split(sizes, -1)
    dt = (dt @ w["dt_proj.weight"].T + w["dt_proj.bias"]).exp().log1p()
    s, outs = torch.zeros(len(x), x.shape[-1], layer.state_size, dtype=x_BTE.dtype), []
    for t in range(x.shape[1]):
        decay = (-dt[:, t, :, None] * w["A_log"].exp()).exp()
        s = decay * s + (dt[:, t] * x[:, t])[..., None] * B[:, t, None]
        outs.append((s @ C[:, t, :, None])[..., 0] + w["D"] * x[:, t])
    return (torch.stack(outs, 1) * silu(z)) @ w["out_proj.weight"].T


def path_fox(layer: nn.Module, w: dict[str, Tensor], x_BTE: Tensor) -> Tensor:
    q, k, v = (x_BTE @ w[f"{name}_proj.weight"].T for name in "qkv")
    u = silu(convolved(x_BTE @ (w["w_b_proj.weight"] @ w["w_a_proj.weight"]).T, w["w_conv1d.weight"]))
    q, k, v, u = (y.unflatten(-1, (layer.num_heads, -1)) for y in (q, k, v, u))
    u = of_length_1(u)
    beta, f = ((x_BTE @ w[f"{x}.weight"].T + w[f"{x}.bias"]).sigmoid() for x in ("b_proj", "fgate_proj"))
    outs = []
    for i in range(x_BTE.shape[1]):
        carried, decay, scores = q[:, i], torch.zeros_like(f[:, 0]), []
        for j in range(i, -1, -1):
            scores.append((carried * k[:, j]).sum(-1) / math.sqrt(q.shape[-1]) + decay)
            carried = carried - 2 * beta[:, j, :, None] * (carried * u[:, j]).sum(-1, keepdim=True) * u[:, j]
            decay = decay + f[:, j].log()
        weights = torch.stack(scores, 1).softmax(1)
        outs.append((weights[..., None] * v[:, : i + 1].flip(1)).sum(1))
    return torch.stack(outs, 1).flatten(-2) @ w["o_proj.weight"].T


DECAY_TIMES = {"fgate_bias_init": True, "decay_time_min": 2.0, "decay_time_max": 64.0}
SHIFTED = {"qk_norm": True, "use_k_shift": True, "use_v_shift": True}
FOX = {
    "llama": {},
    "grouped": {"num_kv_heads": 2},
    "one key head": {"num_kv_heads": 1, "use_k_shift": True, "use_v_shift": True},
    "window": {"window_size": 7, "use_rope": True},
    "window of one token": {"window_size": 1},
    "window as long as the sequence": {"window_size": LENGTH},
    "pro": {**SHIFTED, "use_output_gate": True, "use_output_norm": True},
    "pro, grouped, window": {**SHIFTED, "num_kv_heads": 2, "window_size": 7},
    "pro, shared norms, pruned": {
        "num_kv_heads": 2,
        "window_size": 7,
        "qk_norm": True,
        "qk_norm_share_param_across_head": True,
        "log_pruning_tolerance": -10.0,
        "use_output_gate": True,
        "ogate_act": "silu",
        "use_output_norm": True,
    },
    "pruned by norms": {"num_kv_heads": 2, "window_size": 7, "log_pruning_tolerance": -10.0},
    "no gates": {"num_kv_heads": 2, "window_size": 7, "fgate_type": "none", "use_rope": True},
    "learned gates, output gate alone": {"fgate_type": "bias_only", "use_output_gate": True, "ogate_act": "silu"},
    "fixed gates, output norm alone": {"fgate_type": "fixed", **DECAY_TIMES, "use_output_norm": True},
}
#: name: equations, and how the layer is made. Decays and gates are float32 in some layers, also where they are float64.
CASES = {
    **{
        f"FoX, {name}": (attention, lambda o=options: ForgettingAttentionLayer(32, 4, **o, initializer_range=0.4))
        for name, options in FOX.items()
    },
    "Transformer": (attention, lambda: mixer("transformer", **GROUPED, window_size=7)),
    "Samba's attention": (attention, lambda: mixer("samba", 1)),
    "Samba's Mamba": (mamba, lambda: mixer("samba")),
    "DeltaNet": (delta_rule, lambda: mixer("delta_net")),
    "DeltaNet, gated and wide": (
        delta_rule,
        lambda: mixer("delta_net", use_gate=True, expand_k=0.5, expand_v=2, conv_size=2),
    ),
    "Gated DeltaNet": (delta_rule, lambda: mixer("gated_delta_net")),
    "KDA": (delta_rule, lambda: mixer("kda")),
    "KDA, wide": (delta_rule, lambda: mixer("kda", expand_k=0.5, expand_v=2, conv_size=2)),
    "HGRN2": (hgrn2, lambda: mixer("hgrn2")),
    "Mamba-2": (mamba2, lambda: mixer("mamba2")),
    "Mamba-2, groups": (mamba2, lambda: mixer("mamba2", n_groups=2)),
    "PaTH-FoX": (path_fox, lambda: mixer("path_fox", w_rank=3, conv_size=2)),
}


def mixer(name: str, block: int = 0, **fields) -> nn.Module:
    return small(name, **fields).decoder.layers[block].sequence_mixer


@pytest.mark.parametrize(("equations", "make"), CASES.values(), ids=CASES)
def test_a_mixer_computes_its_equations_and_their_gradients(equations, make):
    """Recurrences are longer than a chunk. Noise keeps weights of norms and biases from standing in for each other."""
    torch.manual_seed(0)
    layer = make().double()
    for parameter in layer.parameters():
        parameter.data += 0.1 * torch.randn_like(parameter)
    length = LENGTH if equations is attention else 75
    x = torch.randn(2, length, 32, dtype=torch.float64, requires_grad=True)
    weight, results = torch.randn(2, length, 32, dtype=torch.float64), []
    weights = dict(layer.named_parameters()) | dict(layer.named_buffers())
    for function in (lambda: layer(x)[0], lambda: equations(layer, weights, x)):
        layer.zero_grad()
        x.grad = None
        out = function()
        (out * weight).sum().backward()
        results.append([out.detach(), x.grad.clone(), *(p.grad.clone() for p in layer.parameters())])
    for got, want in zip(*results, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-10 + 1e-5 * want.abs().max().item())


def test_gates_of_hgrn2_keep_their_precision_near_0_and_1():
    """A float32 1 - sigmoid(20) has lost every digit of a key that matters after many tokens."""
    layer = mixer("hgrn2")
    with torch.no_grad():
        layer.f_proj.weight.copy_(torch.eye(32))
        hidden = torch.full((1, 30, 32), 20.0)
        hidden[:, 15:, ::2] = -200.0
        want = hgrn2(layer, {name: x.double() for name, x in layer.state_dict().items()}, hidden.double())
        torch.testing.assert_close(layer(hidden)[0].double(), want, rtol=1e-4, atol=1e-5)


def test_mamba2_clamps_step_sizes_to_their_limits():
    hidden = torch.randn(1, 20, 32, generator=torch.manual_seed(0))
    with torch.no_grad():
        for fields, changes in (({}, True), ({"time_step_limit": [0.2, 0.2]}, False)):
            layer = mixer("mamba2", **fields)
            before = layer(hidden)[0]
            layer.in_proj.weight[-4:].mul_(-1)  # the projection to step sizes
            assert torch.allclose(layer(hidden)[0], before) != changes
