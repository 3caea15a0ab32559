"""Samba against its definition written out, layout of its checkpoints, initialisation, FLOPs, weight decay."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM

from forgetting_transformer.model import SambaConfig, SambaForCausalLM, registry
from forgetting_transformer.model.mixers import samba
from forgetting_transformer.model.mixers.samba import MambaMixer, SambaAttention
from forgetting_transformer.training.config import TrainConfig
from forgetting_transformer.training.optimization.parameter_groups import undecayed_parameters
from tests.model.small_models import small


@pytest.fixture
def ids() -> Tensor:
    return torch.randint(0, 61, (2, 12), generator=torch.Generator().manual_seed(0))


def normalise(x: Tensor, weight: Tensor) -> Tensor:
    return x / (x.square().mean(-1, keepdim=True) + 1e-5).sqrt() * weight


def mamba(x_TE: Tensor, p: dict[str, Tensor]) -> Tensor:
    """The layer token by token and channel by channel, in the words of its definition."""
    inner, rank, num_states = len(p["D"]), p["dt_proj.weight"].shape[1], p["A_log"].shape[1]
    projected = x_TE @ p["in_proj.weight"].T
    inputs, gate = projected[:, :inner], projected[:, inner:]
    state = torch.zeros(inner, num_states, dtype=x_TE.dtype)
    outs = []
    for t in range(len(x_TE)):
        x = p["conv1d.bias"] + sum(inputs[t - lag] * p["conv1d.weight"][:, 0, 3 - lag] for lag in range(min(4, t + 1)))
        x = x * x.sigmoid()
        dt, b, c = (p["x_proj.weight"] @ x).split([rank, num_states, num_states])
        dt = (1 + (p["dt_proj.weight"] @ dt + p["dt_proj.bias"]).exp()).log()
        state = torch.exp(-dt[:, None] * p["A_log"].exp()) * state + torch.outer(dt * x, b)
        y = state @ c + p["D"] * x
        outs.append(p["out_proj.weight"] @ (y * gate[t] * gate[t].sigmoid()))
    return torch.stack(outs)


def turn(x: Tensor, position: int) -> Tensor:
    """Rotary embedding as complex numbers, the first half of the channels real parts and the second imaginary."""
    half = len(x) // 2
    angle = position * 500_000.0 ** (-torch.arange(half, dtype=torch.float64) / half)
    z = torch.complex(x[:half], x[half:]) * torch.polar(torch.ones_like(angle), angle)
    return torch.cat((z.real, z.imag))


def attention(x_TE: Tensor, p: dict[str, Tensor], num_heads: int, window: int) -> Tensor:
    q, k, v = ((x_TE @ p[f"{name}_proj.weight"].T).unflatten(-1, (num_heads, -1)).transpose(0, 1) for name in "qkv")
    heads = []
    for q_TD, k_TD, v_TD in zip(q, k, v, strict=True):
        rows = []
        for t in range(len(x_TE)):
            seen = range(max(0, t - window + 1), t + 1)
            scores = torch.stack([turn(q_TD[t], t) @ turn(k_TD[j], j) for j in seen]) / math.sqrt(q_TD.shape[1])
            rows.append(scores.softmax(0) @ v_TD[seen.start : seen.stop])
        heads.append(torch.stack(rows))
    return torch.cat(heads, dim=-1) @ p["o_proj.weight"].T


def by_hand(p: dict[str, Tensor], ids_T: Tensor, num_heads: int = 2, window: int = 4) -> Tensor:
    """Logits of one sequence."""

    def under(prefix: str) -> dict[str, Tensor]:
        return {name.removeprefix(prefix): x for name, x in p.items() if name.startswith(prefix)}

    x = p["backbone.embeddings.weight"][ids_T]
    for i in range(4):
        block, mixer = under(f"backbone.layers.{i}."), under(f"backbone.layers.{i}.mixer.")
        normed = normalise(x, block["mixer_norm.weight"])
        x = x + (mamba(normed, mixer) if i % 2 == 0 else attention(normed, mixer, num_heads, window))
        gate, up = (normalise(x, block["mlp_norm.weight"]) @ block["mlp.gate_proj.weight"].T).chunk(2, dim=-1)
        x = x + (gate * gate.sigmoid() * up) @ block["mlp.down_proj.weight"].T
    return normalise(x, p["backbone.norm_f.weight"]) @ p["lm_head.weight"].T


@pytest.fixture
def model() -> SambaForCausalLM:
    """Norm weights, D and biases differ between channels, so that none can stand in for another."""
    model = small("samba")
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for p in model.parameters():
            if p.ndim == 1:
                p.add_(torch.randn(p.shape, generator=generator), alpha=0.3)
    return model


def relative_error(got: Tensor, want: Tensor) -> float:
    return ((got - want).norm() / want.norm()).item()


def test_logits_and_every_gradient_equal_the_definition_in_float64(model, ids):
    weights = {name: p.detach().double().requires_grad_() for name, p in model.named_parameters()}
    want = torch.stack([by_hand(weights, ids_T) for ids_T in ids])
    F.cross_entropy(want.flatten(0, 1), ids.flatten()).backward()
    assert relative_error(model(input_ids=ids).logits, want) < 1e-5
    model(input_ids=ids, labels=ids).loss.mean().backward()
    for name, p in model.named_parameters():
        assert relative_error(p.grad, weights[name].grad) < 1e-4, name


def test_bfloat16_autocast_stays_close(model, ids):
    want = model(input_ids=ids).logits
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = model(input_ids=ids, output_hidden_states=True)
    assert relative_error(out.logits.float(), want) < 2e-2
    assert all(hidden.dtype == torch.float32 for hidden in out.hidden_states)
    assert out.past_key_values.layers[0].states["ssm"].dtype == torch.float32


def test_later_tokens_do_not_change_earlier_predictions_but_earlier_ones_do(model, ids):
    logits = model(input_ids=ids).logits
    changed = ids.clone()
    changed[:, 5] = (ids[:, 5] + 1) % 61
    is_same = torch.isclose(model(input_ids=changed).logits, logits, atol=1e-6).all(-1).all(0)
    assert is_same.tolist() == [True] * 5 + [False] * 7


ATTN = {"num_heads": 12, "num_kv_heads": 12, "window_size": 2048, "layers": None}
AT_760M = {"hidden_size": 1536, "num_hidden_layers": 24, "attn": ATTN, "rescale_prenorm_residual": True}


@pytest.fixture(scope="module")
def published() -> SambaForCausalLM:
    """The published size, without memory."""
    with torch.device("meta"):
        return SambaForCausalLM(SambaConfig(vocab_size=50257, **AT_760M))


def test_parameter_count_of_the_published_experiment(published):
    assert sum(p.numel() for p in published.parameters()) == 765_852_672 + 50257 * 1536


def test_state_dict_of_the_published_experiment(published):
    norms = {"mixer_norm.weight": (1536,), "mlp_norm.weight": (1536,)}
    even = {
        **norms,
        "mixer.A_log": (3072, 16),
        "mixer.D": (3072,),
        "mixer.conv1d.weight": (3072, 1, 4),
        "mixer.conv1d.bias": (3072,),
        "mixer.in_proj.weight": (6144, 1536),
        "mixer.x_proj.weight": (128, 3072),
        "mixer.dt_proj.weight": (3072, 96),
        "mixer.dt_proj.bias": (3072,),
        "mixer.out_proj.weight": (1536, 3072),
        "mlp.gate_proj.weight": (6144, 1536),
        "mlp.down_proj.weight": (1536, 3072),
    }
    odd = {
        **norms,
        **{f"mixer.{name}_proj.weight": (1536, 1536) for name in "qkvo"},
        "mlp.gate_proj.weight": (8192, 1536),
        "mlp.down_proj.weight": (1536, 4096),
    }
    want = {
        f"backbone.{name}": shape
        for name, shape in {"embeddings.weight": (50257, 1536), "norm_f.weight": (1536,)}.items()
    }
    want["lm_head.weight"] = (50257, 1536)
    for i in range(24):
        want |= {f"backbone.layers.{i}.{name}": shape for name, shape in (odd if i % 2 else even).items()}
    assert {name: tuple(x.shape) for name, x in published.state_dict().items()} == want


def test_undecayed_total_of_the_published_experiment(published):
    undecayed = undecayed_parameters(published, TrainConfig(max_tokens=1, grad_acc_tokens=1))
    assert sum(published.get_parameter(name).numel() for name in undecayed) == 775_680
    assert "backbone.layers.0.mixer.A_log" in undecayed and "backbone.layers.0.mixer.conv1d.weight" not in undecayed


@pytest.mark.parametrize("rescale", [True, False])
def test_initialisation(rescale):
    torch.manual_seed(0)
    config = SambaConfig(
        vocab_size=512,
        hidden_size=256,
        num_hidden_layers=2,
        attn={"num_heads": 4},
        rescale_prenorm_residual=rescale,
    )
    for name, p in SambaForCausalLM(config).named_parameters():
        if name == "backbone.embeddings.weight":
            assert p.std().item() == pytest.approx(0.02, rel=0.1)
        elif (p.ndim == 1 and "norm" in name) or name.endswith(".D"):
            assert (p == 1).all(), name
        elif name.endswith("A_log"):
            torch.testing.assert_close(p.exp(), torch.arange(1.0, 17.0).expand(512, 16))
        elif name.endswith("dt_proj.bias"):
            step = F.softplus(p)
            assert 1e-3 * 0.999 <= step.min() < 1.2e-3 and 0.08 < step.max() <= 0.1 * 1.001
            assert step.log().mean().item() == pytest.approx(math.log(1e-2), abs=0.15)
        else:
            bound = {"dt_proj.weight": 16**-0.5, "conv1d.weight": 0.5, "conv1d.bias": 0.5}.get(
                ".".join(name.split(".")[-2:]), p.shape[-1] ** -0.5
            )
            if rescale and name.split(".")[-2] in ("o_proj", "out_proj", "down_proj"):
                bound /= 2  # sqrt(2 · layers)
            assert p.abs().max().item() == pytest.approx(bound, rel=0.02), name
            assert p.std().item() == pytest.approx(bound / 3**0.5, rel=0.05), name


def test_step_size_weights_may_start_constant():
    weight = (
        small("samba", time_step_init_scheme="constant", time_step_scale=3.0).backbone.layers[0].mixer.dt_proj.weight
    )
    torch.testing.assert_close(weight, torch.full_like(weight, 3 * 2**-0.5))


@pytest.mark.parametrize(
    "attn, kinds",
    [
        ({"num_heads": 2}, "MAMA"),
        ({"num_heads": 2, "layers": [0, 3]}, "AMMA"),
        ({"num_heads": 2, "layers": []}, "MMMM"),
        (None, "MMMM"),
    ],
)
def test_which_blocks_have_attention(attn, kinds, ids):
    model = small("samba", attn=attn)
    classes = {"M": MambaMixer, "A": SambaAttention}
    assert [type(block.sequence_mixer) for block in model.backbone.layers] == [classes[kind] for kind in kinds]
    widths = {"M": 256, "A": 512}  # of the two MLPs
    model = small("samba", attn=attn, mamba_hidden_ratio=8, attn_hidden_ratio=16)
    assert [block.mlp.down_proj.in_features for block in model.backbone.layers] == [widths[kind] for kind in kinds]
    assert model(input_ids=ids, labels=ids).loss.isfinite().all()


def test_defaults_can_be_built_and_are_the_published_ones():
    with torch.device("meta"):
        model = SambaForCausalLM(SambaConfig())
    config = model.config
    assert (config.hidden_size, config.num_hidden_layers, config.time_step_rank) == (2304, 18, 144)
    assert config.to_dict()["model_type"] == "samba-project_fox"
    assert model.backbone.embeddings.padding_idx is None


def test_padding_token_has_an_embedding_like_any_other():
    model = small("samba", pad_token_id=3)
    assert model.backbone.embeddings.weight[3].norm() > 0


@pytest.mark.filterwarnings("ignore:.*gradient_checkpointing_enable.*:FutureWarning")
def test_a_training_step_reaches_every_weight_with_checkpointing_too(model, ids):
    def gradients() -> dict[str, Tensor]:
        model.zero_grad()
        model(input_ids=ids, labels=ids).loss.mean().backward()
        return {name: p.grad.clone() for name, p in model.named_parameters()}

    want = gradients()
    assert all(grad.isfinite().all() and grad.norm() > 0 for grad in want.values())
    model.train().gradient_checkpointing_enable()
    got = gradients()
    assert all(torch.equal(got[name], want[name]) for name in want)


def test_flops_are_those_of_products_and_six_per_state(monkeypatch):
    """The scan is no matrix product that a counter would see, so it is left out and added."""
    monkeypatch.setattr(samba, "selective_scan", lambda x, *_, **__: (x, None))
    batch, seq_len = 2, 64
    model = small("samba", attn={"num_heads": 4, "num_kv_heads": 2, "window_size": 16})
    with FlopCounterMode(display=False) as counter:
        model(input_ids=torch.randint(0, 61, (batch, seq_len)), use_cache=False)
    counted = counter.get_flop_counts()["Global"]
    products = sum(n for op, n in counted.items() if "attention" not in str(op)) / (batch * seq_len)
    scan = 2 * 6 * 64 * 4  # 2 Mamba blocks, 64 channels, 4 states
    attention = 2 * 4 * 32 * sum(min(t, 16) for t in range(1, seq_len + 1)) / seq_len
    assert model.config.flops_per_token(seq_len, training=False) == pytest.approx(products + scan + attention)


@pytest.mark.parametrize(
    "fields, message",
    [
        ({"attn": {"num_heads": 2, "windows": 3}}, "attn has the key 'windows'; it may have num_heads"),
        ({"attn": {"window_size": 3}}, "attn has no num_heads"),
        ({"attn": {"num_heads": 3}}, r"hidden_size is 32; .* num_heads = 3"),
        ({"attn": {"num_heads": 2, "window_size": 0}}, "window_size is 0"),
        ({"attn": {"num_heads": 2, "layers": [4]}}, r"attn.layers has 4; blocks are 0 to 3"),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu'"),
        ({"time_step_rank": "half"}, "time_step_rank is 'half'"),
        ({"time_step_init_scheme": "zero"}, "time_step_init_scheme is 'zero'"),
    ],
)
def test_options_that_do_not_fit_are_refused_by_name(fields, message):
    with pytest.raises(ValueError, match=message):
        small("samba", **fields)


@pytest.mark.parametrize("fields", [{}, {"use_bias": True, "use_conv_bias": False, "tie_word_embeddings": True}])
def test_saving_and_loading_through_the_auto_classes(tmp_path, fields):
    model = small("samba", **fields)
    model.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert type(loaded) is SambaForCausalLM
    assert loaded.state_dict().keys() == model.state_dict().keys()
    assert all(torch.equal(x, loaded.state_dict()[name]) for name, x in model.state_dict().items())
    assert AutoConfig.from_pretrained(tmp_path).to_dict() == loaded.config.to_dict()
    ids = torch.arange(9)[None]
    with torch.no_grad():
        hidden = AutoModel.from_pretrained(tmp_path)(input_ids=ids).last_hidden_state
        torch.testing.assert_close(hidden, model.backbone(input_ids=ids).last_hidden_state)


def test_a_published_config_loads():
    """As the authors' code writes it: with derived fields and others that have no effect here."""
    config = AutoConfig.for_model(
        "samba-project_fox",
        **AT_760M,
        intermediate_size=3072,
        time_step_rank=96,
        residual_in_fp32=False,
        fuse_norm=True,
    )
    assert isinstance(config, SambaConfig) and config.inner_size == 3072
    assert registry.get("samba").lm_class is SambaForCausalLM
