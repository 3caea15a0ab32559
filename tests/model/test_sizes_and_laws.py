"""Parameters, first weights, weight decay, FLOPs and refused options of every architecture, a row each."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoConfig, AutoModelForCausalLM

from forgetting_transformer.model import registry
from forgetting_transformer.model.mixers import samba
from forgetting_transformer.training.config import TrainConfig
from forgetting_transformer.training.optimization.building import undecayed_parameters
from tests.model.small_models import GROUPED, PRO, small

FOX, LLAMA = "forgetting_transformer", "transformer"
TRANSFORMER_PRO = {**PRO, "fgate_type": "none", "use_rope": True}


def on_meta(name: str, **fields):
    with torch.device("meta"):
        return registry.get(name).lm_class(registry.build_config(name, **fields))


def test_state_dict_of_samba():
    """Of the other published architectures the golden files have one."""
    model = on_meta("samba", vocab_size=61, hidden_size=64, num_hidden_layers=2, attn={"num_heads": 4})
    norms = {"mixer_norm.weight": (64,), "mlp_norm.weight": (64,)}
    mamba = {
        "A_log": (128, 16), "D": (128,), "conv1d.weight": (128, 1, 4), "conv1d.bias": (128,),
        "in_proj.weight": (256, 64), "x_proj.weight": (36, 128), "out_proj.weight": (64, 128),
        "dt_proj.weight": (128, 4), "dt_proj.bias": (128,),
    }  # fmt: skip
    blocks = [
        {**norms, **{f"mixer.{name}": shape for name, shape in mamba.items()}, "mlp.gate_proj.weight": (512, 64)},
        {**norms, **{f"mixer.{x}_proj.weight": (64, 64) for x in "qkvo"}, "mlp.gate_proj.weight": (512, 64)},
    ]
    want = {"backbone.embeddings.weight": (61, 64), "backbone.norm_f.weight": (64,), "lm_head.weight": (61, 64)}
    for i, block in enumerate(blocks):
        want |= {f"backbone.layers.{i}.{x}": shape for x, shape in {**block, "mlp.down_proj.weight": (64, 256)}.items()}
    assert {name: tuple(x.shape) for name, x in model.state_dict().items()} == want


def test_state_dicts_of_options_of_fox():
    def keys(**options) -> set[str]:
        model = small(FOX, **options)
        return {name.removeprefix("model.layers.0.attn.") for name in model.state_dict() if "0.attn." in name}

    plain = {f"{x}_proj.weight" for x in "qkvo"}
    assert keys(fgate_type="none") == plain and keys(fgate_type="bias_only") == plain | {"fgate_bias"}
    fixed = {"fgate_type": "fixed", "fgate_bias_init": True, "decay_time_min": 2, "decay_time_max": 9}
    assert keys(**fixed) == plain | {"fgate_bias"}
    assert "model.layers.0.attn.fgate_bias" not in dict(small(FOX, **fixed).named_parameters())
    grouped = small(FOX, hidden_size=64, **GROUPED, use_k_shift=True, qk_norm=True, use_output_norm=True)
    assert {name: tuple(x.shape) for name, x in grouped.model.layers[0].attn.state_dict().items()} == {
        "q_proj.weight": (64, 64), "k_proj.linear.weight": (32, 64), "k_proj.shift_proj.weight": (2, 64),
        "v_proj.weight": (32, 64), "o_proj.weight": (64, 64), "fgate_proj.weight": (4, 64), "fgate_proj.bias": (4,),
        "output_norm.weight": (64,), "q_norm.weight": (64,), "k_norm.weight": (32,),
    }  # fmt: skip


# First weights.


def normal(std: float):
    def check(p: Tensor) -> None:
        assert p.std().item() == pytest.approx(std, rel=0.1) and abs(p.mean().item()) < std / 8

    return check


def uniform(bound: float | None = None, scale: float = 1.0):
    def check(p: Tensor) -> None:
        limit = (p.shape[-1] ** -0.5 if bound is None else bound) * scale
        assert 0.97 * limit < p.abs().max().item() <= limit * 1.001
        assert p.std().item() == pytest.approx(limit / 3**0.5, rel=0.1)

    return check


def xavier(p: Tensor) -> None:
    normal(2**-2.5 * math.sqrt(2 / sum(p.shape)))(p)
    assert p.abs().max() <= 2**-2.5 * math.sqrt(6 / sum(p.shape))


def steps(p: Tensor) -> None:
    """Log-uniform step sizes."""
    step = F.softplus(p)
    assert step.min() >= 0.99e-3 and step.max() <= 0.101 and step.log().std() > 0.8


def rates(p: Tensor) -> None:
    """1, 2, 3, …"""
    torch.testing.assert_close(p.exp(), torch.arange(1.0, p.shape[-1] + 1).expand_as(p))


def rates_by_chance(p: Tensor) -> None:
    assert p.exp().min() >= 1 and p.exp().max() <= 16 and p.exp().std() > 2


def ones(p: Tensor) -> None:
    assert (p == 1).all()


def zeros(p: Tensor) -> None:
    assert (p == 0).all()


_DELTA = {"norm": ones, "conv1d": uniform(0.5), "A_log": rates_by_chance, "dt_bias": steps}
_ROOT = 2**-0.5
#: Fields, and the law of the weights whose name has a part; the first that is found counts.
LAWS = {
    FOX: ({**PRO, "num_heads": 4}, {"norm": ones, "fgate_proj.bias": zeros, "": normal(0.02)}),
    LLAMA: ({"num_heads": 4, "initializer_range": 0.1}, {"norm": ones, "": normal(0.1)}),
    "path_fox": (
        {"num_heads": 4},
        {"norm": ones, "conv1d": uniform(3**-0.5), ".bias": zeros, "": normal(0.02)},
    ),
    "gated_delta_net": ({"num_heads": 16, "expand_k": 1}, {**_DELTA, "": normal(0.02)}),
    "kda": ({"num_heads": 16}, {**_DELTA, "": normal(0.02)}),
    "delta_net": (
        {"num_heads": 16},
        {**_DELTA, "attn.": xavier, "down_proj": normal(0.01), "": normal(0.02)},
    ),
    "hgrn2": (
        {},
        {"norm": ones, "lower_bounds": zeros, "attn.": xavier, "down_proj": normal(0.01), "": normal(0.02)},
    ),
    "mamba2": (
        {"num_heads": 32, "head_dim": 16},
        {
            "norm": ones, ".D": ones, "conv1d": uniform(0.5), "A_log": rates, "dt_bias": steps,
            "out_proj": uniform(scale=_ROOT), "embeddings": normal(0.1), "": uniform(),
        },
    ),
    "samba": (
        {"attn": {"num_heads": 4}, "rescale_prenorm_residual": True},
        {
            "norm": ones, ".D": ones, "conv1d": uniform(0.5), "A_log": rates, "dt_proj.bias": steps,
            "o_proj": uniform(scale=0.5), "out_proj": uniform(scale=0.5), "down_proj": uniform(scale=0.5),
            "embeddings": normal(0.02), "": uniform(),
        },
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", LAWS)
def test_first_weights_follow_the_papers_laws(name):
    torch.manual_seed(0)
    fields, laws = LAWS[name]
    sizes = {"vocab_size": 512, "hidden_size": 256, "num_hidden_layers": 2}
    model = registry.get(name).lm_class(registry.build_config(name, **sizes, **fields))
    for parameter, p in model.named_parameters():
        next(law for part, law in laws.items() if part in parameter)(p.detach())
    undecayed = undecayed_parameters(model, TrainConfig(max_tokens=1, grad_acc_tokens=1))
    others = ("norm", "bias", "A_log", ".D", "lower_bounds")
    assert {p for p, _ in model.named_parameters() if any(part in p for part in others)} == undecayed


def test_other_laws_of_first_weights():
    tied = registry.get("mamba2").lm_class(
        registry.build_config("mamba2", vocab_size=500, hidden_size=64, num_heads=2, tie_word_embeddings=True)
    )
    assert tied.lm_head.weight is tied.backbone.embeddings.weight
    normal(0.1)(tied.lm_head.weight.detach())
    assert tied.backbone.embeddings.padding_idx is None
    samba_model = small("samba", hidden_size=256, attn={"num_heads": 4})
    uniform()(samba_model.backbone.layers[1].mixer.o_proj.weight.detach())  # without rescale_prenorm_residual


# FLOPs.

FLOPS = {
    "FoX": (FOX, {}),
    "FoX (Pro)": (FOX, PRO),
    "Transformer (Pro)": (FOX, TRANSFORMER_PRO),
    "FoX, grouped, window": (FOX, {**PRO, **GROUPED, "window_size": 7}),
    "Transformer, window of 1": (LLAMA, {**GROUPED, "window_size": 1}),
    "Transformer, longer window": (LLAMA, {"window_size": 300}),
    "Samba": ("samba", {"attn": {"num_heads": 4, "num_kv_heads": 2, "window_size": 16}}),
    "Mamba-2": ("mamba2", {"n_groups": 2}),
    "HGRN2": ("hgrn2", {}),
    "DeltaNet": ("delta_net", {"use_gate": True, "expand_v": 2}),
    "Gated DeltaNet": ("gated_delta_net", {}),
    "KDA": ("kda", {}),
    "PaTH-FoX": ("path_fox", {}),
}


def uncounted(name: str, model, length: int) -> float:
    """What PyTorch's counter does not see, per token: attention's pairs, scans, triangular systems of chunks."""
    config, blocks = model.config, model.config.num_hidden_layers
    if name in (FOX, LLAMA, "samba"):
        windows = [getattr(block.sequence_mixer, "window_size", 0) for block in model.decoder.layers]
        pairs = sum(min(t, window or length) for window in windows if window != 0 for t in range(1, length + 1))
        # Two products, two FLOPs each; six per state of Mamba.
        return 4 * config.hidden_size * pairs / length + (2 * 6 * 64 * 4 if name == "samba" else 0)
    if name == "hgrn2":  # a token's own key and value
        return blocks * 2 * 2 * (16 + 16)
    if name == "path_fox":
        return blocks * config.num_heads * 64**2
    if name == "mamba2":
        return 0
    products = 2 * config.key_size if name == "kda" else 0  # of a token's query with its own key
    return blocks * (64 * (config.key_size + config.value_size) + products)


@pytest.mark.parametrize(("name", "fields"), FLOPS.values(), ids=FLOPS)
def test_flops_are_those_that_pytorch_counts(name, fields, monkeypatch):
    monkeypatch.setattr(samba, "selective_scan", lambda x, *_, **__: (x, None))
    model, length = small(name, **fields), 256
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        model(input_ids=torch.zeros(2, length, dtype=torch.long), use_cache=False)
    counted = sum(n for op, n in counter.get_flop_counts()["Global"].items() if "attention" not in str(op))
    want = counted / (2 * length) + uncounted(name, model, length)
    assert model.config.flops_per_token(length, training=False) == pytest.approx(want)
    assert model.config.flops_per_token(length) == pytest.approx(3 * want)


# Options.

REFUSED = [
    (FOX, {"num_heads": 4, "num_kv_heads": 3}, "num_kv_heads is 3; it must divide num_heads = 4"),
    (FOX, {"window_size": 0}, "window_size is 0"),
    (FOX, {"num_heads": 3}, "hidden_size is 32"),
    (FOX, {"fgate_type": "half"}, "fgate_type is 'half'.*full, bias_only, fixed, none"),
    (FOX, {"fgate_type": "fixed"}, "fgate_bias_init=True"),
    (FOX, {"fgate_bias_init": True}, "fgate_bias_init is for fgate_type bias_only and fixed"),
    (FOX, {"fgate_type": "bias_only", "fgate_bias_init": True}, "decay_time_min, decay_time_max are None"),
    (FOX, {"decay_time_min": 2.0}, "no effect without fgate_bias_init"),
    (FOX, {"ogate_act": "relu"}, "ogate_act is 'relu'"),
    (FOX, {"hidden_act": "gelu"}, "hidden_act is 'gelu'"),
    (FOX, {"log_pruning_tolerance": 1.0}, "log_pruning_tolerance is 1.0"),
    (FOX, {"hidden_ratio": None}, "intermediate_size"),
    (FOX, {"use_rope": True, "hidden_size": 6}, "even head dimension"),
    (FOX, {"rope_factor": 8.0}, r"rope_factor, rope_llama3 are 8\.0, None, which have no effect without use_rope"),
    (LLAMA, {"num_heads": 3}, "hidden_size is 32; .* num_heads = 3"),
    ("samba", {"attn": {"num_heads": 2, "windows": 3}}, "attn has the key 'windows'; it may have num_heads"),
    ("samba", {"attn": {"window_size": 3}}, "attn has no num_heads"),
    ("samba", {"attn": {"num_heads": 3}}, r"hidden_size is 32; .* num_heads = 3"),
    ("samba", {"attn": {"num_heads": 2, "layers": [4]}}, r"attn.layers is \[4\]; it must list blocks from 0 to 3"),
    ("samba", {"time_step_rank": "half"}, "time_step_rank is 'half'"),
    ("mamba2", {"num_heads": 3}, r"num_heads · head_dim is 3 · 16 = 48; it must equal expand · hidden_size"),
    ("mamba2", {"n_groups": 3}, "num_heads is 4; it must be a multiple of n_groups = 3"),
    ("mamba2", {"rms_norm": False}, "rms_norm is False"),
    ("mamba2", {"time_step_limit": [0.1, 0.0]}, "time_step_limit is .*0 <= lower <= upper"),
    ("hgrn2", {"expand_ratio": 12}, "hidden_size must be expand_ratio · num_heads"),
    ("hgrn2", {"expand_ratio": None}, "expand_ratio and num_heads are both None"),
    ("hgrn2", {"use_short_conv": True}, "use_short_conv is True"),
    ("delta_net", {"num_heads": 3}, r"expand_k · hidden_size is 1 · 32 = 32; it must be a multiple of num_heads = 3"),
    ("delta_net", {"expand_v": 0.03125}, r"expand_v · hidden_size is 0.03125 · 32 = 1"),
    ("delta_net", {"use_short_conv": False}, "use_short_conv is False; True is the one choice"),
    ("path_fox", {"num_heads": 5}, "hidden_size is 32; it must be a multiple of num_heads = 5"),
]


@pytest.mark.parametrize(("name", "fields", "message"), REFUSED)
def test_options_that_do_not_fit_are_refused_by_name(name, fields, message):
    with pytest.raises(ValueError, match=message):
        small(name, **fields)


def test_architectures_and_fields_that_do_not_exist_are_refused_by_name():
    with pytest.raises(ValueError, match=r"model.name='fox' is unknown; use .*forgetting_transformer"):
        registry.get("fox")
    with pytest.raises(ValueError, match="no field 'hiden_size'; did you mean 'hidden_size'"):
        registry.build_config(FOX, hiden_size=64)
    with pytest.raises(ValueError, match="has no field 'state_size', which is one of mamba2, samba; it has"):
        registry.build_config(FOX, state_size=64)
    with pytest.raises(ValueError) as refused:
        registry.build_config(FOX, zzz=1)
    assert "qk_norm" in str(refused.value) and "id2label" not in str(refused.value)
    with pytest.raises(ValueError, match="registered already"):
        registry.register(FOX, *registry.get(FOX))


#: Fields of published configurations that change nothing here: name, field, another value, the neutral ones.
NEUTRAL = [
    (FOX, "attention_bias", True, "false"),
    (FOX, "elementwise_affine", None, "true"),
    (LLAMA, "attention_bias", True, "false"),
    (LLAMA, "elementwise_affine", False, "true"),
    ("delta_net", "use_output_norm", False, "true"),
    ("delta_net", "attn_mode", "parallel", "chunk or fused_chunk or fused_recurrent"),
    ("hgrn2", "attn_mode", "parallel", "chunk or fused_chunk or fused_recurrent"),
    ("hgrn2", "conv_size", 3, "4"),
    ("hgrn2", "elementwise_affine", False, "true"),
    ("samba", "time_step_scale", 2.0, "1.0"),
    ("samba", "time_step_init_scheme", "constant", "random"),
    ("mamba2", "time_step_rank", 96, "auto"),
    ("mamba2", "residual_in_fp32", False, "true"),
]


def test_the_table_of_neutral_fields_is_whole():
    for name in registry.model_names():
        config_class = registry.get(name).config_class
        assert {field for other, field, *_ in NEUTRAL if other == name} == set(config_class.neutral_values)


@pytest.mark.parametrize(("name", "field", "value", "neutral"), NEUTRAL)
def test_a_value_without_effect_is_refused_in_a_run_and_loads_from_a_published_file(
    name, field, value, neutral, tmp_path
):
    config_class = registry.get(name).config_class
    for accepted in config_class.neutral_values[field]:
        assert getattr(registry.build_config(name, **{field: accepted}), field) == accepted
    with pytest.raises(ValueError) as refused:
        registry.build_config(name, **{field: value})
    what = f"{field} is {value!r}, which has no effect in {config_class.__name__}; it must be {neutral}"
    assert str(refused.value) == what
    model, ids = small(name), torch.arange(9)[None]
    want = model(input_ids=ids).logits
    setattr(model.config, field, value)
    model.save_pretrained(tmp_path)
    assert getattr(AutoConfig.from_pretrained(tmp_path), field) == value
    torch.testing.assert_close(AutoModelForCausalLM.from_pretrained(tmp_path)(input_ids=ids).logits, want)


def test_a_published_config_of_samba_loads():
    """As the authors' code writes it: with derived fields and others that have no effect here."""
    derived = {"intermediate_size": 3072, "time_step_rank": 96, "residual_in_fp32": False, "fuse_norm": True}
    config = AutoConfig.for_model(
        "samba-project_fox",
        hidden_size=1536,
        num_hidden_layers=24,
        attn={"num_heads": 12, "window_size": 2048},
        **derived,
    )
    assert type(config).__name__ == "SambaConfig" and config.inner_size == 3072
