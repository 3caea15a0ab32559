"""Every key of the whole config, fed nonsense: the run is built, or refused in one line with key, value and fix."""

import dataclasses
import math
import random
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from omegaconf import OmegaConf
from pydantic import TypeAdapter

from forgetting_transformer.data import DataError, DataInfo
from forgetting_transformer.files import flatten
from forgetting_transformer.model import registry
from forgetting_transformer.model.arguments import RANGES
from forgetting_transformer.training import setup
from forgetting_transformer.training.config import ConfigError
from forgetting_transformer.training.config.parsing import config_class, parse
from forgetting_transformer.training.config.parsing import keys_of as known
from forgetting_transformer.training.records.run_directory import RunDirectoryError
from forgetting_transformer.training.trainer import Trainer
from tests.training.conftest import command_line
from tests.training.test_config import composed

NONSENSE = [0, -1, math.nan, math.inf, "text", 1e23, [1]]


@pytest.fixture
def nonsense(request) -> Callable[[], list]:
    """One of the values for every key, drawn with a seed that is printed; all of them with --all."""
    if request.config.getoption("--all"):
        return lambda: NONSENSE
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    generator = random.Random(seed)
    return lambda: generator.sample(NONSENSE, 1)


#: What may be 0 or inf: the numbers of the config for which that means something, and names of any text.
ALLOWED = {
    "optimizer.lr": [0],
    "optimizer.weight_decay": [0],
    "schedule.init_lr": [0],
    "schedule.end_lr": [0],
    "schedule.warmup_tokens": [0],
    "train.max_grad_norm": [math.inf, 1e23],
    "datamodule.train_num_workers": [0],
    "datamodule.eval_num_workers": [0],
    "datamodule.bos_token_id": [0],
    "datamodule.eos_token_id": [0],
    "seed": [0, -1],
    "model.config.log_pruning_tolerance": [-1],
}


@pytest.fixture(scope="module")
def base() -> dict:
    """The composed config of the demo on the tiny corpus, references between keys left as they are."""
    overrides = [each for each in command_line({"data_dir": "data"}, Path("out")) if "total_tokens" not in each]
    overrides += ["datamodule.train_num_workers=0", "train.max_tokens=1280", "fabric.accelerator=cpu"]
    return OmegaConf.to_container(composed(*overrides), resolve=False)


def set_key(config: dict, key: str, value: object) -> OmegaConf:
    config = OmegaConf.create(config)
    OmegaConf.update(config, key, value, merge=False)
    return config


def assert_says_what_to_do(error: Exception, key: str, value: object) -> None:
    said = str(error)
    assert "\n" not in said, said
    assert key.rpartition(".")[2] in said, said
    given = value[0] if isinstance(value, list) else value
    # A key that is on or off reads -1 as on.
    assert str(given) in said.replace(",", "") or (given == -1 and f"{key}=true" in said), said
    assert any(
        word in said
        for word in ("must", "use ", "choose", "Set ", "set ", "more than", "give ", "unset", "cannot write", "None")
    ), said


def is_numeric(hint: object) -> bool:
    return {"integer", "number"} & set(re.findall(r"'type': '(\w+)'", str(TypeAdapter(hint).json_schema()))) != set()


def keys_of(config: dict) -> list[str]:
    return sorted(flatten(OmegaConf.to_container(OmegaConf.create(config), resolve=True, throw_on_missing=False)))


@pytest.mark.slow
def test_every_key_takes_nonsense_or_says_in_one_line_what_it_wants(base, corpus, tmp_path, monkeypatch, nonsense):
    """From the composed config to a trainer that could make its first step, in this process."""
    monkeypatch.chdir(tmp_path)  # where a run whose output_dir is "text" goes
    monkeypatch.setattr(setup, "start_logging", lambda *_: None)
    torch.set_num_threads(1)
    wrong, number = [], 0
    for key in keys_of(base):
        for value in nonsense():
            number += 1
            config = set_key(base | {"data_dir": str(corpus), "output_dir": str(tmp_path / str(number))}, key, value)
            try:
                parsed = parse(config)
                Trainer(parsed).close()
                item = known(config_class({})).get(key)
                numeric = item is not None and is_numeric(item.type)
                if (numeric or key in ALLOWED) and value not in ALLOWED.get(key, []):
                    wrong.append(f"{key}={value} was accepted")
            except (ConfigError, DataError, RunDirectoryError) as error:
                try:
                    assert value not in ALLOWED.get(key, []), f"it should be allowed: {error}"
                    assert_says_what_to_do(error, key, value)
                except AssertionError as complaint:
                    wrong.append(f"{key}={value}: {complaint.args[0]}")
            except BaseException as error:
                wrong.append(f"{key}={value}: {type(error).__name__}: {error}")
    assert not wrong, f"{len(wrong)} of {number}:\n" + "\n".join(wrong)


DATA = DataInfo("tiny", 64, 0, 96, 64, 32, 4, 192, 6144, "", None)


def test_every_numeric_key_has_a_range():
    numeric = {key: item.type for key, item in known(config_class({})).items() if is_numeric(item.type)}
    schemas = {key: TypeAdapter(hint).json_schema() for key, hint in numeric.items()}
    assert len(schemas) > 30
    without = {key for key, schema in schemas.items() if not re.search(r"'(ge|minimum|exclusiveMinimum)'", str(schema))}
    assert not without
    fields = {
        field.name
        for entry in registry.MODELS.values()
        if entry.config_class.__module__.startswith("forgetting_transformer")
        for field in dataclasses.fields(entry.config_class)
        if {int, float} & {field.type, *getattr(field.type, "__args__", ())}
    }
    assert not fields - set(RANGES) - {"time_step_limit"}


@pytest.mark.parametrize("value", [2.5, True])
def test_half_a_layer_is_refused(base, value):
    with pytest.raises(ConfigError, match=f"num_hidden_layers.*{value}.*must be a whole number from 1"):
        setup.model_config(parse(set_key(base, "model.config.num_hidden_layers", value)), DATA)
    with pytest.raises(ConfigError, match=f"log_interval={value} must be a (whole )?number"):
        parse(set_key(base, "log_interval", value))


def test_the_loss_of_hugging_face_is_not_for_training_here(base):
    """It would shift the labels a second time."""
    with pytest.raises(ConfigError, match=r"model\.config\.loss is 'causal_lm'.*leave it out"):
        setup.model_config(parse(set_key(base, "model.config.loss", "causal_lm")), DATA)
    with pytest.raises(ConfigError, match=r"model\.config: loss is 'causl_lm'; it must be one of"):
        setup.model_config(parse(set_key(base, "model.config.loss", "causl_lm")), DATA)


def test_whole_numbers_may_be_written_as_floats(base):
    """1e9 tokens is how people write it; what follows from the key follows the number."""
    config = parse(set_key(set_key(base, "train.max_tokens", 1e9), "eval_interval", "${train.max_tokens}"))
    assert type(config.train.max_tokens) is int and config.train.max_tokens == config.eval_interval == 10**9
