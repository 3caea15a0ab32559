"""The Transformer baselines: window, grouped heads, layout of the checkpoints, initialisation, FLOPs, weight decay."""

import math

import pytest
import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from forgetting_transformer.model import TransformerConfig, TransformerForCausalLM
from forgetting_transformer.training.config import TrainConfig
from forgetting_transformer.training.optimization.parameter_groups import undecayed_parameters
from tests.model.small_models import PRO, small, small_model


@pytest.fixture
def ids() -> Tensor:
    return torch.randint(0, 61, (2, 12), generator=torch.Generator().manual_seed(0))


def meta_model(**fields) -> TransformerForCausalLM:
    with torch.device("meta"):
        return TransformerForCausalLM(TransformerConfig(vocab_size=50257, **fields))


AT_760M = {"hidden_size": 1536, "num_hidden_layers": 24, "num_heads": 12}


@pytest.mark.parametrize(
    "fields, non_embedding",
    [
        ({"hidden_size": 768, "num_hidden_layers": 12, "num_heads": 12}, 123_551_232),
        ({"hidden_size": 1024, "num_hidden_layers": 24, "num_heads": 16}, 359_794_688),
        (AT_760M, 756_747_264),
        ({**AT_760M, "window_size": 2048}, 756_747_264),
    ],
)
def test_parameter_counts_of_the_published_experiments(fields, non_embedding):
    total = sum(p.numel() for p in meta_model(**fields).parameters())
    assert total == non_embedding + 50257 * fields["hidden_size"]


def test_state_dict_of_the_760m_model():
    shapes = {name: tuple(x.shape) for name, x in meta_model(**AT_760M).state_dict().items()}
    layer = {
        "attn_norm.weight": (1536,),
        "attn.q_proj.weight": (1536, 1536),
        "attn.k_proj.weight": (1536, 1536),
        "attn.v_proj.weight": (1536, 1536),
        "attn.o_proj.weight": (1536, 1536),
        "mlp_norm.weight": (1536,),
        "mlp.gate_proj.weight": (8192, 1536),
        "mlp.down_proj.weight": (1536, 4096),
    }
    want = {"model.embeddings.weight": (50257, 1536), "model.norm.weight": (1536,), "lm_head.weight": (50257, 1536)}
    want |= {f"model.layers.{i}.{name}": shape for i in range(24) for name, shape in layer.items()}
    assert shapes == want


def test_undecayed_total_at_760m_is_the_papers():
    model = meta_model(**AT_760M)
    undecayed = undecayed_parameters(model, TrainConfig(max_tokens=1, grad_acc_tokens=1))
    assert sum(model.get_parameter(name).numel() for name in undecayed) == 75_264


def test_initialisation():
    torch.manual_seed(0)
    config = TransformerConfig(vocab_size=512, hidden_size=256, num_hidden_layers=2, num_heads=4)
    for name, p in TransformerForCausalLM(config).named_parameters():
        if p.ndim == 2:
            assert p.std().item() == pytest.approx(0.02, rel=0.1), name
            assert abs(p.mean().item()) < 0.002, name
        else:
            assert "norm" in name and (p == 1).all(), name


def test_without_rope_the_order_of_earlier_tokens_does_not_matter():
    ids = torch.tensor([[3, 7, 11, 5], [7, 3, 11, 5]])
    one_layer = {"num_hidden_layers": 1}
    for use_rope in (False, True):
        first, second = small("transformer", use_rope=use_rope, **one_layer)(input_ids=ids).logits[:, -1]
        assert torch.allclose(first, second, atol=1e-4) != use_rope


def test_transformer_pro_is_fox_pro_that_forgets_nothing(ids):
    options = {**PRO, "use_rope": True}
    without = small_model(**options, fgate_type="none")
    never = small_model(**options, fgate_type="fixed", fgate_bias_init=True, decay_time_min=1e12, decay_time_max=1e12)
    never.load_state_dict(without.state_dict(), strict=False)
    mask = torch.ones_like(ids)
    mask[0, :4] = 0
    for attention_mask in (None, mask):
        got = without(input_ids=ids, attention_mask=attention_mask).logits
        want = never(input_ids=ids, attention_mask=attention_mask).logits
        torch.testing.assert_close(got[:, 4:], want[:, 4:], rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("window", [None, 1, 7, 64, 100])
def test_flops_are_those_of_linear_layers_and_of_the_pairs_attention_needs(window):
    batch, seq_len = 2, 64
    model = small("transformer", num_heads=4, num_kv_heads=2, window_size=window)
    ids = torch.randint(0, 61, (batch, seq_len))
    with FlopCounterMode(display=False) as counter:
        model(input_ids=ids, labels=ids).loss.sum().backward()
    counted = counter.get_flop_counts()["Global"]
    linear = sum(n for op, n in counted.items() if "attention" not in str(op))
    pairs = sum(min(t, window or seq_len) for t in range(1, seq_len + 1))
    attention = 2 * 4 * 32 * pairs  # 2 layers; 2 products, 2 FLOPs each, 32 channels
    assert model.config.flops_per_token(seq_len) == pytest.approx(linear / (batch * seq_len) + 3 * attention / seq_len)
    assert model.config.flops_per_token(seq_len, training=False) == model.config.flops_per_token(seq_len) / 3


@pytest.mark.parametrize(
    "fields, message",
    [
        ({"num_heads": 3}, "hidden_size is 32; .* num_heads = 3"),
        ({"num_heads": 4, "num_kv_heads": 3}, "num_kv_heads is 3; it must divide num_heads = 4"),
        ({"num_kv_heads": 0}, "num_kv_heads is 0"),
        ({"window_size": 0}, "window_size is 0"),
        ({"hidden_size": 6}, "even head dimension"),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu'"),
        ({"hidden_ratio": None}, "intermediate_size"),
    ],
)
def test_options_that_do_not_fit_are_refused_by_name(fields, message):
    with pytest.raises(ValueError, match=message):
        small("transformer", **fields)


def test_defaults_are_the_published_ones():
    config = TransformerConfig()
    assert (config.hidden_size, config.num_hidden_layers, config.num_heads) == (2048, 24, 32)
    assert (config.rope_base, config.use_rope, config.window_size) == (5e5, True, None)
    assert config.mlp_width == 256 * math.ceil(2048 * 8 / 3 / 256)
    assert config.to_dict()["model_type"] == "transformer-project_fox"
