"""Fields of published configurations that change nothing here: a run refuses other values before it begins."""

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from forgetting_transformer.model import registry
from tests.model.small_models import small

OTHERS = [
    ("forgetting_transformer", "attention_bias", True, "false"),
    ("forgetting_transformer", "elementwise_affine", False, "true"),
    ("forgetting_transformer", "elementwise_affine", None, "true"),
    ("transformer", "attention_bias", True, "false"),
    ("transformer", "elementwise_affine", False, "true"),
    ("delta_net", "use_output_norm", False, "true"),
    ("delta_net", "attn_mode", "parallel", "chunk or fused_chunk or fused_recurrent"),
    ("hgrn2", "attn_mode", "parallel", "chunk or fused_chunk or fused_recurrent"),
    ("hgrn2", "conv_size", 3, "4"),
    ("hgrn2", "elementwise_affine", False, "true"),
    ("mamba2", "time_step_rank", 96, "auto"),
    ("mamba2", "residual_in_fp32", False, "true"),
]


@pytest.mark.parametrize(("name", "field", "value", "neutral"), OTHERS)
def test_a_value_without_effect_is_refused_with_the_neutral_one(name, field, value, neutral):
    with pytest.raises(ValueError) as refused:
        registry.build_config(name, **{field: value})
    config_class = registry.get(name).config_class.__name__
    assert str(refused.value) == f"{field} is {value!r}, which has no effect in {config_class}; it must be {neutral}"


@pytest.mark.parametrize("name", registry.model_names())
def test_the_neutral_values_are_accepted_and_the_default_is_one_of_them(name):
    config_class = registry.get(name).config_class
    assert {field for other, field, *_ in OTHERS if other == name} == set(config_class.neutral_values)
    for field, values in config_class.neutral_values.items():
        assert getattr(config_class(), field) in values
        assert all(getattr(registry.build_config(name, **{field: value}), field) == value for value in values)


@pytest.mark.parametrize(("name", "field", "value", "neutral"), OTHERS)
def test_a_published_model_with_such_a_value_loads_and_computes_the_same(name, field, value, neutral, tmp_path):
    model = small(name)
    ids = torch.arange(9)[None]
    want = model(input_ids=ids).logits
    setattr(model.config, field, value)
    model.save_pretrained(tmp_path)
    assert getattr(AutoConfig.from_pretrained(tmp_path), field) == value
    torch.testing.assert_close(AutoModelForCausalLM.from_pretrained(tmp_path)(input_ids=ids).logits, want)
