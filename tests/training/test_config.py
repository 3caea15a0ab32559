"""Configs: every experiment composes, unknown keys and impossible arithmetic are refused with the fix."""

import dataclasses
import functools
import json
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf

from forgetting_transformer.composition import for_hydra
from forgetting_transformer.files import flatten
from forgetting_transformer.model import DecoderForCausalLM, registry
from forgetting_transformer.training.config import Config, ConfigError, ModelConfig
from forgetting_transformer.training.config.checks import check
from forgetting_transformer.training.config.continuing import changes_that_alter_the_run
from forgetting_transformer.training.config.parsing import config_class, keys_of, parse
from forgetting_transformer.training.optimization.building import undecayed_parameters
from forgetting_transformer.training.optimization.schedule import build_schedule

CONFIGS = Path(__file__).parents[2] / "configs"
EXPERIMENTS = sorted(str(p.relative_to(CONFIGS).with_suffix("")) for p in CONFIGS.glob("experiment/**/*.yaml"))


@functools.cache
def composed(*overrides: str):
    with initialize_config_dir(str(CONFIGS), version_base="1.3"):
        return compose("config", overrides=[*overrides, "output_dir=out", "data_dir=data"])


def experiment(path: str, *overrides: str):
    group, name = path.rsplit("/", 1)
    return parse(composed(f"+{group}={name}", *overrides))


#: Keys that only some files of a group have.
OF_ONE_CHOICE = ("strategy.keep_gathered",)


@pytest.mark.parametrize("path", EXPERIMENTS)
def test_every_experiment_composes_and_can_run(path):
    written = composed("+{}={}".format(*path.rsplit("/", 1)))
    mentioned = flatten(OmegaConf.to_container(written))
    # Hydra refuses to override a key that no file mentions: every key of the schema can be set without a plus sign,
    # but for those that only another choice than the default has.
    keys = keys_of(config_class({}))
    assert not [key for key in keys if key not in mentioned and key not in ("model.config", *OF_ONE_CHOICE)]
    config = parse(written)
    for world_size in (1, 4):
        check(config, world_size)
    build_schedule(config.schedule, config.optimizer.lr)(0)
    model_config = registry.build_config(config.model.name, **config.model.config)
    # A padding token's embedding is not trained, and the data may use every token.
    assert model_config.pad_token_id is None
    if "/longcrawl64/" in path:
        assert_is_the_papers(path.removeprefix("experiment/longcrawl64/"), config)


def test_every_group_file_has_only_known_keys():
    """Group files that no experiment chooses are loaded too: one of each group at a time."""
    groups: dict[str, list[str]] = {}
    for file in sorted(CONFIGS.glob("[!e]*/*.yaml")):
        if file.parent.name != "recipe":  # these are part of experiments, which the test above composes
            groups.setdefault(file.parent.name, []).append(file.stem)
    for number in range(max(map(len, groups.values()))):
        chosen = {group: names[number % len(names)] for group, names in groups.items()}
        needed = ["train.max_tokens=9", "train.grad_acc_tokens=1", "optimizer.lr=1"]
        needed += ["datamodule.train_batch_len=64", "datamodule.train_batch_size=8"]
        needed += ["schedule.decay_tokens=1"] * (chosen["schedule"] in ("warmup_stable_decay", "warmup_one_minus_sqrt"))
        needed += ["model.config.rope_base=1"] * (chosen["model"] == "transformer")
        needed += ["datamodule.dataset=x"] * (chosen["datamodule"] != "longcrawl64")
        needed += ["datamodule.parts={x: 1}"] * (chosen["datamodule"] == "mixture")
        needed += ["callbacks.lm_eval.tasks=[a]"] * (chosen["callbacks"] == "lm_eval")
        choices = [f"{group}={name}" for group, name in chosen.items()]
        experiment("experiment/longcrawl64/forgetting_transformer/pro_125m_2b", *choices, *needed)


class Row(NamedTuple):
    """One published experiment; published_models.json has the fields of its model."""

    lr: float
    tokens: int
    micro_tokens: int  # of one micro-batch; the results do not depend on it, apart from rounding
    parameters: int  # without the input embedding
    body: int  # without input embedding and output layer
    undecayed: int | None = None  # parameters without weight decay


# fmt: off
PAPER = {
    "forgetting_transformer/llama_125m_2b": Row(2e-3, 2_684_354_560, 65536, 123_661_968, 85_064_592),
    "forgetting_transformer/llama_360m_7b": Row(2e-3, 7_516_192_768, 16384, 360_188_288, 308_725_120),
    "forgetting_transformer/llama_760m_16b": Row(1e-3, 16_106_127_360, 16384, 757_632_576, 680_437_824, 75_840),
    "forgetting_transformer/llama_760m_48b": Row(1e-3, 48_318_382_080, 16384, 757_632_576, 680_437_824),
    "forgetting_transformer/pro_125m_2b": Row(2e-3, 2_684_354_560, 65536, 123_910_800, 85_313_424),
    "forgetting_transformer/pro_360m_7b": Row(2e-3, 7_516_192_768, 16384, 367_339_904, 315_876_736),
    "forgetting_transformer/pro_760m_16b": Row(1e-3, 16_106_127_360, 16384, 759_512_640, 682_317_888, 186_432),
    "forgetting_transformer/pro_760m_48b": Row(2e-3, 48_318_382_080, 16384, 759_512_640, 682_317_888),
    "transformer/llama_125m_2b": Row(2e-3, 2_684_354_560, 65536, 123_551_232, 84_953_856),
    "transformer/llama_360m_7b": Row(2e-3, 7_516_192_768, 16384, 359_794_688, 308_331_520),
    "transformer/llama_760m_16b": Row(1e-3, 16_106_127_360, 16384, 756_747_264, 679_552_512, 75_264),
    "transformer/llama_760m_48b": Row(5e-4, 48_318_382_080, 16384, 756_747_264, 679_552_512),
    "transformer/pro_125m_2b": Row(2e-3, 2_684_354_560, 65536, 123_800_064, 85_202_688),
    "transformer/pro_360m_7b": Row(2e-3, 7_516_192_768, 16384, 366_946_304, 315_483_136),
    "transformer/pro_760m_16b": Row(1e-3, 16_106_127_360, 16384, 757_742_592, 680_547_840),
    "transformer/pro_760m_48b": Row(1e-3, 48_318_382_080, 16384, 757_742_592, 680_547_840),
    "transformer_swa/760m_16b": Row(1e-3, 16_106_127_360, 16384, 756_747_264, 679_552_512),
    "mamba2/125m_2b": Row(2e-3, 2_684_354_560, 65536, 128_965_824, 90_368_448),
    "mamba2/360m_7b": Row(2e-3, 7_516_192_768, 16384, 368_314_880, 316_851_712),
    "mamba2/760m_16b": Row(1e-3, 16_106_127_360, 16384, 780_113_664, 702_918_912, 389_376),
    "mamba2/760m_48b": Row(2e-3, 48_318_382_080, 16384, 780_113_664, 702_918_912),
    "hgrn2/125m_2b": Row(2e-3, 2_684_354_560, 65536, 123_569_664, 84_972_288),
    "hgrn2/360m_7b": Row(2e-3, 7_516_192_768, 16384, 359_843_840, 308_380_672),
    "hgrn2/760m_16b": Row(1e-3, 16_106_127_360, 16384, 756_820_992, 679_626_240, 148_992),
    "hgrn2/760m_48b": Row(2e-3, 48_318_382_080, 16384, 756_820_992, 679_626_240),
    "delta_net/125m_2b": Row(2e-3, 2_684_354_560, 16384, 123_718_656, 85_121_280),
    "delta_net/360m_7b": Row(2e-3, 7_516_192_768, 16384, 360_289_280, 308_826_112),
    "delta_net/760m_16b": Row(1e-3, 16_106_127_360, 16384, 757_635_072, 680_440_320, 78_336),
    "delta_net/760m_48b": Row(1e-3, 48_318_382_080, 16384, 757_635_072, 680_440_320),
    "samba/760m_16b": Row(1e-3, 16_106_127_360, 16384, 765_852_672, 688_657_920, 775_680),
}
# fmt: on


def test_the_papers_experiments_are_all_there_and_no_others():
    assert {f"experiment/longcrawl64/{name}" for name in PAPER} == {p for p in EXPERIMENTS if "/longcrawl64/" in p}


PUBLISHED = json.loads(Path(__file__).with_name("published_models.json").read_text(encoding="utf-8"))


def assert_is_the_papers(name: str, config: Config) -> None:
    row, data = PAPER[name], config.datamodule
    assert dataclasses.asdict(config.model) == PUBLISHED[name]
    assert (config.optimizer.lr, config.train.max_tokens) == (row.lr, row.tokens)
    assert config.train.grad_acc_tokens == row.micro_tokens
    assert config.optimizer.betas == [0.9, 0.95] and config.optimizer.weight_decay == 0.1
    assert config.train.max_grad_norm == 1.0
    assert (config.schedule.name, config.schedule.warmup_tokens) == ("warmup_cosine", 268_435_456)
    assert config.schedule.total_tokens == row.tokens
    assert (data.train_batch_len, data.train_batch_size, data.eval_tokens) == (16384, 32, 2**31)
    assert config.train.gradient_checkpointing == ("760m" in name)
    assert config.fabric.precision == "bf16-mixed" and config.strategy.name == "fsdp"
    lm = on_meta(config.model)
    total = sum(parameter.numel() for parameter in lm.parameters())
    embedding, head = lm.get_input_embeddings().weight, lm.get_output_embeddings().weight
    assert (total - embedding.numel(), total - embedding.numel() - head.numel()) == (row.parameters, row.body)
    if row.undecayed is not None:
        sizes = {name: parameter.numel() for name, parameter in lm.named_parameters()}
        assert sum(sizes[name] for name in undecayed_parameters(lm, config.train)) == row.undecayed


def test_sizes_of_an_architecture_are_by_scale_and_may_be_overridden():
    mamba = experiment("experiment/demo/mamba2").model.config
    assert (mamba["num_hidden_layers"], mamba["num_heads"]) == (8, 4)
    assert experiment("experiment/demo/mamba2", "model.config.num_heads=2").model.config["num_heads"] == 2
    own = experiment("experiment/demo/mamba2", "scale.name=mine", "+model.sizes.mine={num_heads: 6}")
    assert own.model.config["num_heads"] == 6 and own.model.config["num_hidden_layers"] is None


def on_meta(model: ModelConfig) -> DecoderForCausalLM:
    """The model with LongCrawl64's vocabulary and without storage."""
    with torch.device("meta"):
        return registry.get(model.name).lm_class(registry.build_config(model.name, vocab_size=50257, **model.config))


def test_every_architecture_has_a_demo():
    """What a newcomer can run on a laptop covers every architecture there is."""
    ours = {
        name for name, entry in registry.MODELS.items() if entry.lm_class.__module__.startswith("forgetting_transf")
    }
    assert ours == {experiment(path).model.name for path in EXPERIMENTS if "/demo/" in path}


def demo(*overrides: str):
    return experiment("experiment/demo/fox_pro", *overrides)


@pytest.mark.parametrize(
    ("given", "wanted"),
    [
        (["+experiment/demo=fox_pro", "-m", "seed=0,1"], ["-m", "+experiment/demo=fox_pro", "++seed=0,1"]),
        (["a.b=0", "--cfg", "job", "~tag", "--resolve"], ["--cfg", "job", "--resolve", "++a.b=0", "~tag"]),
        (["a/b=1", "--info", "defaults", "hydra.x=3"], ["--info", "defaults", "a/b=1", "hydra.x=3"]),
    ],
)
def test_options_of_hydra_may_stand_anywhere_and_keys_that_no_yaml_lists_are_let_through(given, wanted):
    assert for_hydra(given, [CONFIGS]) == wanted


MIXTURE = "datamodule=mixture datamodule.train_batch_len=64 datamodule.train_batch_size=8"
#: Number of processes, overrides, what is said.
REFUSED = [
    # One is not true, and true is not one.
    (1, "train.compile=1", "^train.compile=1 must be 'auto', true or false"),
    (1, "optimizer.lr=true", "^optimizer.lr=True must be a number"),
    (1, "train.profile_steps=[5,4]", r"^train.profile_steps=\[5, 4\] must be \[first, last\]"),
    (1, "train.profile_steps=[5]", r"^train.profile_steps=\[5\] must have at least 2 items"),
    (1, "train.max_tokens=0.5", "^train.max_tokens=0.5 must be a whole number"),
    (1, "fabric.devices=0", r"^fabric.devices=0 must be a number of processes from 1 to 1,024, or 'auto' "),
    (1, "fabric.peak_flops=0", "fabric.peak_flops=0 must be greater than or equal to 1, or null"),
    (1, "fabric.precision=bf16-true", "precision=bf16-true must be 'bf16-mixed' or '32-true'"),
    (1, "train.max_tokens=???", "no value for train.max_tokens.* or choose an experiment"),
    (1, "fork_step=100", "fork_dir=null and fork_step=100 belong together"),
    (1, "init_allow=lm_head.weight", r"init_allow=lm_head.weight must be a list, as in .a, b."),
    (1, "optimizer.betas=[0.9]", r"optimizer.betas=\[0.9\] must have at least 2 items"),
    (1, MIXTURE, "no value for datamodule.parts"),
    (1, f"{MIXTURE} datamodule.parts={{words:-1}}", "datamodule.parts.words=-1 must be greater than 0"),
    (1, f"{MIXTURE} datamodule.parts=[words]", r"datamodule.parts=\['words'\] must be a mapping, as in {name: value}"),
    (1, "train.grad_acc_tokens=1000", r"=1,000 does not split .* choose one of \[512, 1024, 2048, 4096\]"),
    (1, "train.grad_acc_tokens=1536", "grad_acc_tokens=1,536"),
    (4, "datamodule.train_batch_size=6", r"train_batch_size=6 .* 4 processes; use a multiple of 4.*\[1, 2, 3, 6\]"),
    (2, "strategy.context=3", "^strategy.context=3 ranks share a sequence, and 2 processes are not a multiple"),
    (
        2,
        "strategy.context=2 datamodule.eval_batch_len=31",
        "eval_batch_len=31 tokens have no equal parts for strategy.c",
    ),
    (4, "strategy.context=2 datamodule.train_batch_size=3", "cannot be shared equally by 2 groups of 2 processes"),
    # A value that is none is refused by the key that was given it, although another key refers to that one.
    (1, "seed=", r"^seed= is empty \(a variable that is not set\?\); give a whole number"),
    (1, "fabric=", "^fabric= is a group of keys: set fabric.devices, fabric.accelerator, "),
    (1, "tag=${nope}", r"^tag=\${nope}: Interpolation key 'nope' not found; give the value itself, "),
    (1, "train.max_tokens=${oc.env:NOPE}", r"^train.max_tokens=\${oc.env:NOPE}: Environment variable 'NOPE' not found"),
]


@pytest.mark.parametrize(("world_size", "overrides", "message"), REFUSED)
def test_what_cannot_work_is_refused_with_the_fix(world_size, overrides, message):
    with pytest.raises(ConfigError, match=message) as refused:
        check(demo(*overrides.split()), world_size)
    assert "\n" not in str(refused.value)


def test_every_wrong_key_has_its_line_and_those_that_refer_to_it_have_none():
    with pytest.raises(ConfigError) as refused:
        demo("train.max_tokens=0", "+optimizer.betta=1", "seed=x", "resume=maybe")
    assert str(refused.value).splitlines() == [
        "unknown config key 'optimizer.betta'; did you mean 'optimizer.betas'?",
        "train.max_tokens=0 must be greater than or equal to 1",
        "seed=x must be a whole number",
        "resume=maybe must be true or false",
    ]


def test_only_changes_that_alter_the_run_count():
    before = {"optimizer": {"lr": 1e-3}, "log_interval": 5, "strategy": {"name": "ddp"}, "model": {"config": {"a": 1}}}
    after = {"optimizer": {"lr": 2e-3}, "log_interval": 9, "strategy": {"name": "fsdp"}, "model": {"config": {"b": 1}}}
    assert changes_that_alter_the_run(before, before | {"seed": 0}) == [], "a younger key with its default"
    assert changes_that_alter_the_run(before, after) == [
        "model.config.a: 1 -> (absent)",
        "model.config.b: (absent) -> 1",
        "optimizer.lr: 0.001 -> 0.002",
    ]
