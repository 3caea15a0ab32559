"""Blocks with mixers of several architectures."""

from pathlib import Path

import pytest
import torch
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf

from forgetting_transformer.model import HybridConfig, registry
from tests.model.small_models import small

ROOT = Path(__file__).resolve().parents[2]

FOX = {"architecture": "forgetting_transformer", "num_heads": 2, "qk_norm": True, "use_k_shift": True}
ATTENTION = {"architecture": "transformer", "num_heads": 2}
MAMBA2 = {"architecture": "mamba2", "num_heads": 4, "head_dim": 16, "state_size": 8}


def hybrid(pattern, mixers, **fields):
    return small("hybrid", pattern=pattern, mixers=mixers, **fields)


def test_the_pattern_is_repeated_and_may_end_in_the_middle():
    model = hybrid(["mamba2", "mamba2", "fox"], {"mamba2": MAMBA2, "fox": FOX}, num_hidden_layers=5)
    kinds = [type(block.sequence_mixer).__name__ for block in model.model.layers]
    assert kinds == ["Mamba2Mixer", "Mamba2Mixer", "ForgettingAttentionLayer", "Mamba2Mixer", "Mamba2Mixer"]
    assert all(block.has_mlp for block in model.model.layers)


def test_of_one_architecture_it_is_that_architecture():
    """The same weights under the names of the other give the same loss, logits and FLOPs."""
    torch.manual_seed(1)
    fields = {key: value for key, value in FOX.items() if key != "architecture"}
    plain, mixed = small("forgetting_transformer", **fields), hybrid(["fox"], {"fox": FOX}, num_hidden_layers=2)
    names = {
        name.replace(".attn_norm.", ".mixer_norm.").replace(".attn.", ".mixer."): name for name in plain.state_dict()
    }
    mixed.load_state_dict({ours: plain.state_dict()[theirs] for ours, theirs in names.items()})
    ids = torch.randint(0, 61, (2, 19))
    assert torch.equal(mixed(input_ids=ids).logits, plain(input_ids=ids).logits)
    assert torch.equal(mixed(input_ids=ids, labels=ids).loss, plain(input_ids=ids, labels=ids).loss)
    assert mixed.config.flops_per_token(128) == plain.config.flops_per_token(128)


def test_its_flops_are_those_of_its_mixers_and_of_an_mlp_in_every_block():
    model = hybrid(["mamba2", "attention"], {"mamba2": MAMBA2, "attention": ATTENTION}, num_hidden_layers=4)
    blocks = [
        small(name, num_hidden_layers=1, **fields)
        for name, fields in [
            ("mamba2", {key: value for key, value in MAMBA2.items() if key != "architecture"}),
            ("transformer", {"num_heads": 2}),
        ]
    ]
    mixers = [block.config.mixer_flops_per_token(0, 256) for block in blocks]
    mlp, head = 2 * 3 * 32 * model.config.mlp_width, 2 * 32 * 61
    assert model.config.flops_per_token(256, training=False) == 2 * sum(mixers) + 4 * mlp + head


def test_entries_that_no_block_has_are_left_out_of_the_export(tmp_path):
    unused = {"unused": {"architecture": "mamba2", "num_heads": None}, "without_architecture": {"num_heads": 2}}
    model = hybrid(["fox"], {"fox": FOX, **unused})
    model.save_pretrained(tmp_path)
    assert HybridConfig.from_pretrained(tmp_path).mixers == {"fox": FOX}


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"pattern": []}, r"pattern is \[\]; it must list the mixers"),
        ({"pattern": "fox"}, "pattern is 'fox'; it must list the mixers"),
        ({"pattern": ["fax"]}, r"pattern has .fax., which is neither in mixers \(fox\) nor an architecture"),
        ({"mixers": {"fox": {"num_heads": 2}}}, "mixers.fox is {.num_heads.: 2}; it must have architecture, one of"),
        ({"pattern": ["fos"]}, "did you mean 'fox'"),
        ({"mixers": {"fox": {**FOX, "hidden_ratio": 2}}}, "mixers.fox has 'hidden_ratio'; set it for the whole model"),
        ({"pattern": 3 * ["fox"], "num_hidden_layers": 2}, "pattern has 3 mixers and the model 2 blocks"),
        ({"mixers": {"fox": 3}}, "mixers.fox is 3; it must have architecture"),
        ({"mixers": {"fox": {**FOX, "num_headz": 2}}}, "mixers.fox: .* no field 'num_headz'; did you mean 'num_heads'"),
        ({"mixers": {"fox": {**FOX, "num_heads": 5}}}, "mixers.fox: hidden_size is 32; it must be a multiple"),
        ({"mixers": {"fox": {**FOX, "hidden_size": 64}}}, "mixers.fox has 'hidden_size'; set it for the whole model"),
        ({"mixers": {"fox": {"architecture": "hybrid"}}}, "mixers.fox.architecture is 'hybrid'; it must be one of"),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_refused_with_the_mixer_and_the_key(fields, message):
    with pytest.raises(ValueError, match=message):
        registry.build_config("hybrid", **{"hidden_size": 32, "pattern": ["fox"], "mixers": {"fox": FOX}, **fields})


def test_only_entries_that_blocks_have_must_stay_when_a_run_continues():
    fields = {"pattern": ["fox"], "mixers": {"fox": FOX}}
    more = {"pattern": ["fox"], "mixers": {"unused": MAMBA2, "fox": FOX}}
    other = {"pattern": ["fox"], "mixers": {"fox": {**FOX, "num_heads": 4}}}
    assert HybridConfig.fields_in_use(more) == HybridConfig.fields_in_use(fields)
    assert HybridConfig.fields_in_use(other) != HybridConfig.fields_in_use(fields)


def test_layers_of_an_architecture_count_among_themselves():
    """Samba's attention is in every second of its blocks, wherever these are."""
    samba = {"architecture": "samba", "state_size": 4, "attn": {"num_heads": 2, "window_size": 4}}
    model = hybrid(["samba", "fox"], {"samba": samba, "fox": FOX}, num_hidden_layers=6)
    kinds = [type(block.sequence_mixer).__name__ for block in model.model.layers]
    fox = "ForgettingAttentionLayer"
    assert kinds == ["MambaMixer", fox, "SambaAttention", fox, "MambaMixer", fox]


@pytest.mark.parametrize("scale", ["125m_2b", "760m_16b"])
def test_the_yaml_has_sizes_for_the_architectures_by_their_own_names(scale):
    """A name without an entry has the defaults of its class, whatever the width of the model."""
    names = ["forgetting_transformer", "transformer", "gated_delta_net", "delta_net", "kda", "path_fox", "hgrn2"]
    experiment = f"+experiment/longcrawl64/forgetting_transformer=pro_{scale}"
    pattern = f"model.config.pattern=[{','.join([*names, 'mamba2', 'sliding_window'])}]"
    with initialize_config_dir(str(ROOT / "configs"), version_base="1.3"):
        composed = compose("config", overrides=[experiment, "model=hybrid", pattern, "output_dir=o", "data_dir=d"])
    config = OmegaConf.to_container(composed.model.config, resolve=True)
    assert {*names} < {*config["mixers"]}
    mixers = HybridConfig(**{**config, "vocab_size": 100})
    built = {name: mixers._mixer_config(name) for name in names}
    for name in ("forgetting_transformer", "transformer", "path_fox"):
        assert config["hidden_size"] // built[name].num_heads == 64
    for name in ("gated_delta_net", "delta_net", "kda"):
        assert config["hidden_size"] // built[name].num_heads == 128
    assert built["forgetting_transformer"].qk_norm and built["transformer"].use_rope
