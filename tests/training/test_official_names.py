"""Keys of the authors' configurations mean here what they mean there, on the command line and in files."""

import dataclasses
import types

import pytest

from forgetting_transformer.model import registry
from forgetting_transformer.sweep import SweepError
from forgetting_transformer.sweep.composer import compose_config
from forgetting_transformer.training.config import Config, ConfigError
from forgetting_transformer.training.config.continuing import check_continues
from forgetting_transformer.training.optimization.schedule import build_schedule

PRO = "+experiment/longcrawl64/forgetting_transformer=pro_760m_48b"


def parsed(*arguments: str) -> Config:
    return compose_config([*arguments, "output_dir=out", "data_dir=data"])


def test_the_model_of_that_name_has_the_defaults_of_the_authors_yaml():
    model = parsed(PRO, "model=forgetting_transformer").model
    fields = {field.name: field.default for field in dataclasses.fields(registry.get(model.name).config_class)}
    assert (model.config["hidden_size"], model.config["num_hidden_layers"], model.config["num_heads"]) == (1536, 24, 24)
    own = {"hidden_size", "num_hidden_layers", "num_heads", "max_position_embeddings"}
    assert model.config["max_position_embeddings"] is None and model.config["log_pruning_tolerance"] is None
    assert {name: value for name, value in model.config.items() if name not in own and value != fields[name]} == {}
    fields = parsed(PRO, "model.config.qk_norm_share_param_across_head=true").model.config
    assert fields["qk_norm_share_param_across_head"] is True, "fields need no plus"


@pytest.mark.parametrize(
    ("own", "official"),
    [
        (
            ("schedule=warmup_cosine", "schedule.init_lr=1e-5", "schedule.warmup_tokens=1000", "schedule.end_lr=1e-4",
             "optimizer.lr=0.01", "schedule.total_tokens=9000"),
            ("schedule=warmup_cosine", "schedule.init_value=1e-5", "schedule.warmup_steps=1000",
             "schedule.end_value=1e-4", "schedule.peak_value=0.01", "schedule.decay_steps=9000"),
        ),
        (
            ("schedule=warmup_linear", "schedule.warmup_tokens=1000"),
            ("schedule=warmup_linear", "schedule.warmup_steps=1e3", "schedule.decay_steps=${train.max_tokens}",
             "schedule.peak_value=${optimizer.lr}"),
        ),
        (
            ("schedule=warmup_stable_decay", "schedule.total_tokens=9000", "schedule.decay_tokens=2000",
             "schedule.warmup_tokens=10"),
            ("schedule=warmup_one_minus_sqrt", "schedule.total_steps=9000", "schedule.anneal_steps=2000",
             "schedule.warmup_steps=10"),
        ),
        (("schedule=constant", "optimizer.lr=0.5"), ("schedule=constant", "schedule.value=0.5")),
    ],
)  # fmt: skip
def test_official_schedules_are_the_same_functions_of_tokens(own, official):
    first, second = parsed(PRO, *own), parsed(PRO, *official)
    assert first == second
    rate = build_schedule(second.schedule, second.optimizer.lr)
    assert rate(0) == second.schedule.init_lr if second.schedule.name == "warmup_cosine" else rate(5) > 0


@pytest.fixture
def mine(tmp_path) -> tuple[str, str]:
    """Arguments that choose an experiment file with official keys."""
    (tmp_path / "experiment").mkdir()
    (tmp_path / "experiment/mine.yaml").write_text("""\
# @package _global_
defaults:
  - override /model: forgetting_transformer
  - override /optimizer: adamw
  - override /schedule: warmup_cosine
  - override /datamodule: longcrawl64
  - override /strategy: fsdp
  - _self_
resume: True
log_interval: 1024
train_eval_interval: 1024
checkpoint_interval: 1024
eval_interval: 1024
checkpoint_keep_interval: 1024
train: {max_tokens: 8192, grad_acc_tokens: 64, max_grad_norm: 1.0}
model: {config: {hidden_size: 64, num_hidden_layers: 2, num_heads: 2, rope_base: 500000, hidden_ratio: 3.5}}
optimizer: {lr: 0.002, betas: [0.9, 0.95], weight_decay: 0.1}
schedule: {init_value: 0.0, peak_value: "${optimizer.lr}", warmup_steps: 512, decay_steps: "${train.max_tokens}",
    end_value: 0.0}
datamodule: {train_batch_len: 64, train_batch_size: 4}
""")
    return f"hydra.searchpath=[file://{tmp_path}]", "+experiment=mine"


def test_an_experiment_file_with_official_keys_composes(mine):
    config = parsed(*mine)
    assert config.model.config["hidden_size"] == 64 and config.model.config["hidden_ratio"] == 3.5
    assert (config.optimizer.lr, config.schedule.warmup_tokens, config.schedule.total_tokens) == (0.002, 512, 8192)


def test_what_is_typed_wins_over_an_official_key_in_a_file(mine):
    """In either name: the file is the earlier of the two."""
    for lr, warmup in (("optimizer.lr", "schedule.warmup_tokens"), ("schedule.peak_value", "schedule.warmup_steps")):
        config = parsed(*mine, f"{lr}=7e-3", f"{warmup}=256")
        assert (config.optimizer.lr, config.schedule.warmup_tokens) == (7e-3, 256)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["schedule.warmup_steps=5", "schedule.warmup_tokens=6"],
         "schedule.warmup_steps is the official name of schedule.warmup_tokens"),
        (["schedule.peak_value=5", "optimizer.lr=6"], "schedule.peak_value is the official name of optimizer.lr"),
        (["schedule.anneal_steps=5"], "schedule.anneal_steps=5 has no meaning for schedule.name=warmup_cosine"),
        (["schedule=warmup_one_minus_sqrt", "schedule.anneal_steps=9", "schedule.decay_steps=5"],
         "schedule.decay_steps=5 has no meaning"),
        (["schedule.anneal_step=5"], "did you mean 'schedule.anneal_steps'?"),
        (["strategy.sharding_strategy=FULL_SHARD"], "unknown config key 'strategy.sharding_strategy'"),
        (["model=transformer"], "no value for model.config.rope_base: give it on the command line"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_one_line(arguments, message):
    with pytest.raises((ConfigError, SweepError)) as refused:
        parsed(PRO, *arguments)
    assert message in str(refused.value) and "\n" not in str(refused.value)


def test_a_field_that_is_listed_later_with_its_default_does_not_alter_the_run():
    """Runs of YAMLs that listed fewer fields go on, and what the authors' code writes lists them all."""
    tokens = {"vocab_size": 9, "bos_token_id": 0, "eos_token_id": 0}
    data = types.SimpleNamespace(**tokens, checksums=None, fingerprint="f", path="")
    state = {"config": dataclasses.asdict(parsed(PRO)), "model_config": tokens, "data_fingerprint": "f"}
    same = parsed(PRO, "model.config.fgate_bias_init=false", "model.config.tie_word_embeddings=false")
    check_continues("it", state, same, data)
    with pytest.raises(ConfigError, match=r"model\.config\.tie_word_embeddings: False -> True"):
        check_continues("it", state, parsed(PRO, "model.config.tie_word_embeddings=true"), data)
