"""FoX: the published usage examples, every option, layout of the checkpoints, initialisation, FLOPs."""

import math

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM

from forgetting_transformer import forgetting_attention
from forgetting_transformer.model import (
    ForgettingAttentionLayer,
    ForgettingTransformerConfig,
    ForgettingTransformerForCausalLM,
    layers,
    registry,
)
from forgetting_transformer.model.mixers.forgetting_attention import decay_time_bias
from forgetting_transformer.model.mixers.transformer import AttentionLayer
from tests.model.small_models import GROUPED, OPTION_COMBINATIONS, PRO, small_model


def test_usage_example_of_the_op():
    batch_size, num_heads, seq_len, head_dim, dtype = 4, 12, 512, 64, torch.bfloat16
    q, k, v = (
        torch.randn((batch_size, seq_len, num_heads, head_dim), dtype=dtype, requires_grad=True) for _ in range(3)
    )
    fgate_logit = torch.randn((batch_size, seq_len, num_heads), dtype=dtype, requires_grad=True)
    log_fgate = torch.nn.functional.logsigmoid(fgate_logit.float())
    out = forgetting_attention(q, k, v, log_fgate)
    assert out.size() == (batch_size, seq_len, num_heads, head_dim)
    out.sum().backward()
    assert all(x.grad.isfinite().all() for x in (q, k, v, fgate_logit))


def test_usage_example_of_the_layer():
    x = torch.randn((2, 32, 96), requires_grad=True)
    layer = ForgettingAttentionLayer(
        hidden_size=96,
        num_heads=6,
        use_output_gate=True,
        use_output_norm=True,
        qk_norm=True,
        use_k_shift=True,
        use_v_shift=True,
    )
    out, *_ = layer(x)
    assert out.size() == x.size()
    lines = str(layer).splitlines()
    assert "  (k_proj): ShiftLinear(96, 96)" in lines
    assert "  (output_norm): GatedRMSNorm(6, 96, eps=1e-06)" in lines
    assert "  (q_norm): GroupRMSNorm(6, 96, eps=1e-05)" in lines


def test_usage_example_of_the_model():
    batch_size, seq_len, vocab_size, bos_token_id = 2, 32, 128, 0
    config = ForgettingTransformerConfig(vocab_size=vocab_size, hidden_size=96, num_hidden_layers=2, num_heads=6, **PRO)
    model = ForgettingTransformerForCausalLM(config)
    labels = torch.randint(0, vocab_size, size=(batch_size, seq_len))
    input_ids = torch.roll(labels, shifts=1, dims=-1)
    input_ids[:, 0] = bos_token_id
    out = model(input_ids=input_ids, labels=labels)
    assert out.loss.size() == (batch_size, seq_len)
    assert out.logits is None
    out = model(input_ids=input_ids)
    assert out.logits.size() == (batch_size, seq_len, vocab_size)


@pytest.mark.slow
@pytest.mark.parametrize("first", range(0, len(OPTION_COMBINATIONS), 45))
def test_every_combination_of_options_trains_and_is_causal(first):
    ids = torch.randint(0, 61, (2, 9), generator=torch.Generator().manual_seed(0))
    changed = ids.clone()
    changed[:, 6] = (ids[:, 6] + 1) % 61
    for options in OPTION_COMBINATIONS[first : first + 45]:
        model = small_model(num_hidden_layers=1, hidden_size=16, intermediate_size=16, **options)
        loss = model(input_ids=ids, labels=ids).loss
        loss.mean().backward()
        assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters()), options
        changed_loss = model(input_ids=changed, labels=ids).loss
        torch.testing.assert_close(changed_loss[:, :6], loss[:, :6])
        assert not torch.allclose(changed_loss[:, 6:], loss[:, 6:])


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"use_k_shift": True},
        {"use_v_shift": True},
        {"use_rope": True},
        {"fgate_type": "none"},
        {"use_output_gate": True},
    ],
)
def test_every_option_changes_the_output(options):
    ids = torch.arange(20)[None]
    base = small_model(use_output_norm=True)
    other = small_model(use_output_norm=True, qk_norm=True, **options)
    other.load_state_dict(base.state_dict(), strict=False)
    assert not torch.allclose(base(input_ids=ids).logits, other(input_ids=ids).logits, atol=1e-3)


def meta_model(**fields):
    with torch.device("meta"):
        return ForgettingTransformerForCausalLM(ForgettingTransformerConfig(vocab_size=50257, **fields))


@pytest.mark.parametrize(
    "fields, non_embedding",
    [
        ({"hidden_size": 768, "num_hidden_layers": 12, "num_heads": 12}, 123_661_968),
        ({"hidden_size": 1024, "num_hidden_layers": 24, "num_heads": 16}, 360_188_288),
        ({"hidden_size": 1536, "num_hidden_layers": 24, "num_heads": 24}, 757_632_576),
        ({"hidden_size": 768, "num_hidden_layers": 12, "num_heads": 12, **PRO}, 123_910_800),
        ({"hidden_size": 1024, "num_hidden_layers": 24, "num_heads": 16, **PRO}, 367_339_904),
        ({"hidden_size": 1536, "num_hidden_layers": 24, "num_heads": 24, **PRO}, 759_512_640),
        (
            {
                "hidden_size": 1536,
                "num_hidden_layers": 24,
                "num_heads": 12,
                "fgate_type": "none",
                "use_rope": True,
                **PRO,
            },
            757_742_592,
        ),
    ],
)
def test_parameter_counts_of_the_published_experiments(fields, non_embedding):
    total = sum(p.numel() for p in meta_model(**fields).parameters())
    assert total == non_embedding + 50257 * fields["hidden_size"]


def test_state_dict_of_the_760m_pro_model():
    model = meta_model(hidden_size=1536, num_hidden_layers=24, num_heads=24, **PRO)
    shapes = {name: tuple(x.shape) for name, x in model.state_dict().items()}
    layer = {
        "attn_norm.weight": (1536,),
        "attn.q_proj.weight": (1536, 1536),
        "attn.k_proj.linear.weight": (1536, 1536),
        "attn.k_proj.shift_proj.weight": (24, 1536),
        "attn.v_proj.linear.weight": (1536, 1536),
        "attn.v_proj.shift_proj.weight": (24, 1536),
        "attn.o_proj.weight": (1536, 1536),
        "attn.fgate_proj.weight": (24, 1536),
        "attn.fgate_proj.bias": (24,),
        "attn.ogate_proj.weight": (1536, 1536),
        "attn.output_norm.weight": (1536,),
        "attn.q_norm.weight": (1536,),
        "attn.k_norm.weight": (1536,),
        "mlp_norm.weight": (1536,),
        "mlp.gate_proj.weight": (7168, 1536),
        "mlp.down_proj.weight": (1536, 3584),
    }
    want = {"model.embeddings.weight": (50257, 1536), "model.norm.weight": (1536,), "lm_head.weight": (50257, 1536)}
    want |= {f"model.layers.{i}.{name}": shape for i in range(24) for name, shape in layer.items()}
    assert shapes == want


def test_state_dict_of_the_llama_variant_and_of_constant_gates():
    def attention_keys(**options):
        return {
            name.removeprefix("model.layers.0.attn.")
            for name in small_model(**options).state_dict()
            if "0.attn." in name
        }

    plain = {f"{x}_proj.weight" for x in "qkvo"}
    assert attention_keys() == plain | {"fgate_proj.weight", "fgate_proj.bias"}
    assert attention_keys(fgate_type="none") == plain
    assert attention_keys(fgate_type="bias_only") == plain | {"fgate_bias"}
    fixed = {"fgate_type": "fixed", "fgate_bias_init": True, "decay_time_min": 2, "decay_time_max": 9}
    assert attention_keys(**fixed) == plain | {"fgate_bias"}
    assert "model.layers.0.attn.fgate_bias" not in dict(small_model(**fixed).named_parameters())
    assert small_model(fgate_type="bias_only").model.layers[0].attn.fgate_bias._no_weight_decay


def test_initialisation():
    torch.manual_seed(0)
    config = ForgettingTransformerConfig(vocab_size=512, hidden_size=256, num_hidden_layers=2, num_heads=4, **PRO)
    for name, p in ForgettingTransformerForCausalLM(config).named_parameters():
        if p.ndim == 2:
            assert p.std().item() == pytest.approx(0.02, rel=0.1), name
            assert abs(p.mean().item()) < 0.002, name
        elif "norm" in name:
            assert (p == 1).all(), name
        else:
            assert name.endswith("fgate_proj.bias") and (p == 0).all(), name


def test_decay_times_give_gates_that_decay_to_one_over_e():
    bias = decay_time_bias(4, 2, 256)
    assert bias.tolist() == pytest.approx([0.43275, 2.26047, 3.91797, 5.54322], abs=1e-5)
    assert (-1 / torch.nn.functional.logsigmoid(bias.double())).tolist() == pytest.approx(
        [2, 10.0794, 50.7968, 256], rel=1e-4
    )
    model = small_model(num_heads=4, fgate_type="bias_only", fgate_bias_init=True, decay_time_min=2, decay_time_max=256)
    assert torch.equal(model.model.layers[1].attn.fgate_bias, bias)
    assert (small_model(fgate_type="bias_only").model.layers[1].attn.fgate_bias == 0).all()


@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("qk_norm", [True, False])
def test_pruning_bound_holds_and_pruning_changes_nothing(qk_norm, shared):
    options = {"qk_norm": qk_norm, "qk_norm_share_param_across_head": shared}
    model = small_model(**options, log_pruning_tolerance=-10.0)
    layer = model.model.layers[0].attn
    if qk_norm:
        torch.nn.init.normal_(layer.q_norm.weight)
    norms = [layer.q_norm or torch.nn.Identity(), layer.k_norm or torch.nn.Identity()]
    q, k = (norm(torch.randn(2, 9, 32)).unflatten(-1, (2, 16)) for norm in norms)
    q, k = q.transpose(1, 2), k.transpose(1, 2)
    if qk_norm:
        largest_score = (q @ k.transpose(-1, -2)).abs().amax((-1, -2)) / math.sqrt(16)
        bound = -(layer.pruning().threshold(9) + 10 + math.log(9)) / 2
        assert (largest_score <= bound + 1e-5).all()
    else:
        assert layer.pruning().threshold(9) is None
    ids = torch.arange(20)[None]
    exact = small_model(**options)
    exact.load_state_dict(model.state_dict())
    assert torch.equal(model(input_ids=ids).logits, exact(input_ids=ids).logits)


@pytest.mark.parametrize(
    "options",
    [
        {},
        PRO,
        {**PRO, "fgate_type": "none", "use_rope": True},
        {**PRO, **GROUPED, "window_size": 7},
        {**GROUPED, "window_size": 64},
    ],
)
def test_flops_match_a_counter(options):
    batch, seq_len = 2, 64
    model = small_model(**options)
    ids = torch.randint(0, 61, (batch, seq_len))
    counter = FlopCounterMode(display=False)
    with counter:
        model(input_ids=ids, labels=ids).loss.sum().backward()
    counted = counter.get_flop_counts()["Global"]
    is_attention = {op: "attention" in str(op) for op in counted}
    linear = sum(n for op, n in counted.items() if not is_attention[op])
    config = model.config
    # Attention by itself: 2 products, 2 FLOPs each, E channels, the pairs that it needs; three times with backward.
    pairs = sum(min(t, options.get("window_size", seq_len)) for t in range(1, seq_len + 1))
    attention_per_token = config.num_hidden_layers * 4 * config.hidden_size * pairs / seq_len
    assert config.flops_per_token(seq_len) == linear / (batch * seq_len) + 3 * attention_per_token
    assert config.flops_per_token(seq_len, training=False) == config.flops_per_token(seq_len) / 3


@pytest.mark.parametrize(
    "fields, message",
    [
        ({"num_heads": 4, "num_kv_heads": 3}, "num_kv_heads is 3; it must divide num_heads = 4"),
        ({"window_size": 0}, "window_size is 0"),
        ({"num_heads": 3}, "hidden_size is 32"),
        ({"fgate_type": "half"}, "fgate_type is 'half'.*full, bias_only, fixed, none"),
        ({"fgate_type": "fixed"}, "fgate_bias_init=True"),
        ({"fgate_bias_init": True}, "fgate_bias_init is for fgate_type bias_only and fixed"),
        ({"fgate_type": "bias_only", "fgate_bias_init": True}, "decay_time_min, decay_time_max are None"),
        ({"decay_time_min": 2.0}, "no effect without fgate_bias_init"),
        ({"ogate_act": "relu"}, "ogate_act is 'relu'"),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu'"),
        ({"log_pruning_tolerance": 1.0}, "log_pruning_tolerance is 1.0"),
        ({"hidden_ratio": None}, "intermediate_size"),
        ({"use_rope": True, "hidden_size": 6}, "even head dimension"),
    ],
)
def test_options_that_do_not_fit_are_refused_by_name(fields, message):
    with pytest.raises(ValueError, match=message):
        small_model(**fields)


def test_options_without_effect_are_accepted():
    config = ForgettingTransformerConfig(
        window_size=None, elementwise_affine=True, attention_bias=False, fuse_norm=True, fuse_cross_entropy=True
    )
    assert config.to_dict()["model_type"] == "forgetting_transformer-project_fox"


@pytest.mark.parametrize(
    "options",
    [{**PRO, **GROUPED, "window_size": 7}, {**PRO, "tie_word_embeddings": True}, {"fgate_type": "bias_only"}],
)
def test_saving_and_loading_through_the_auto_classes(tmp_path, options):
    model = small_model(**options)
    model.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert type(loaded) is ForgettingTransformerForCausalLM
    assert loaded.state_dict().keys() == model.state_dict().keys()
    assert all(torch.equal(x, loaded.state_dict()[name]) for name, x in model.state_dict().items())
    assert AutoConfig.from_pretrained(tmp_path).to_dict() == loaded.config.to_dict()
    base = AutoModel.from_pretrained(tmp_path)
    ids = torch.arange(9)[None]
    with torch.no_grad():
        torch.testing.assert_close(base(input_ids=ids).last_hidden_state, model.model(input_ids=ids).last_hidden_state)
    if options.get("tie_word_embeddings"):
        assert loaded.lm_head.weight is loaded.model.embeddings.weight


def test_registry_finds_architectures_and_refuses_what_it_does_not_know():
    assert "forgetting_transformer" in registry.model_names()
    assert registry.get("forgetting_transformer").lm_class is ForgettingTransformerForCausalLM
    config = registry.build_config("forgetting_transformer", hidden_size=64, num_heads=4)
    assert isinstance(config, ForgettingTransformerConfig) and config.hidden_size == 64
    with pytest.raises(ValueError, match=r"model.name='fox' is unknown; use .*forgetting_transformer"):
        registry.get("fox")
    with pytest.raises(ValueError, match="no field 'hiden_size'; did you mean 'hidden_size'"):
        registry.build_config("forgetting_transformer", hiden_size=64)
    with pytest.raises(ValueError, match="has no field 'state_size', which is one of mamba2, samba; it has"):
        registry.build_config("forgetting_transformer", state_size=64)
    with pytest.raises(ValueError) as refused:
        registry.build_config("forgetting_transformer", zzz=1)
    assert "qk_norm" in str(refused.value) and "id2label" not in str(refused.value)
    with pytest.raises(ValueError, match="registered already"):
        registry.register("forgetting_transformer", *registry.get("forgetting_transformer"))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("layer", "separate", "together"),
    [
        (ForgettingAttentionLayer(64, 4, initializer_range=None), 5, 2),
        (ForgettingAttentionLayer(64, 4, use_output_gate=True, use_k_shift=True, use_v_shift=True, qk_norm=True), 8, 2),
        (ForgettingAttentionLayer(64, 4, fgate_type="none", use_rope=True), 4, 2),
        (AttentionLayer(64, num_heads=4, num_kv_heads=2), 4, 2),
    ],
    ids=["LLaMA", "Pro", "no gates", "grouped keys"],
)
def test_projections_of_one_input_are_one_product_for_a_compiler(monkeypatch, layer, separate, together):
    torch.manual_seed(0)
    layer.double()  # its weights are random, and sums in another order must not decide
    if isinstance(getattr(layer, "fgate_proj", None), nn.Linear):
        nn.init.normal_(layer.fgate_proj.bias)
    x, weight = torch.randn(2, 2, 40, 64, dtype=torch.float64)
    graphs = []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph

    def products(function) -> tuple[int, list[torch.Tensor]]:
        torch.compiler.reset()
        graphs.clear()
        layer.zero_grad()
        inputs = x.clone().requires_grad_()
        out = function(inputs)[0]
        (out * weight).sum().backward()
        called = [str(node.target) for graph in graphs for node in graph.graph.nodes if node.op == "call_function"]
        found = sum("linear" in name for name in called)
        return found, [out.detach(), inputs.grad, *(p.grad.clone() for p in layer.parameters())]

    _, plain = products(layer)
    compiled = torch.compile(layer, backend=backend, fullgraph=True)
    assert products(compiled)[0] == separate  # few tokens: the weights would cost more than what is computed
    monkeypatch.setattr(layers, "MIN_TOKENS_TOGETHER", 80)
    count, values = products(compiled)
    assert count == together
    for value, expected in zip(values, plain, strict=True):
        torch.testing.assert_close(value, expected, rtol=1e-10, atol=1e-10)
    handle = layer.q_proj.register_forward_hook(lambda *_: None)
    assert products(compiled)[0] == separate  # a hook must get its calls
    handle.remove()


def test_biases_of_projections_that_are_computed_together_are_added_in_float64_there(monkeypatch):
    monkeypatch.setattr(layers, "MIN_TOKENS_TOGETHER", 1)
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    linears = [torch.nn.Linear(4, 3, dtype=torch.float64) for _ in range(2)]
    x = torch.randn(1, 5, 4, dtype=torch.float64)
    for linear, y in layers.linear_together(x, linears).items():
        torch.testing.assert_close(y, linear(x), rtol=0, atol=1e-12)
