"""Components that are not of this package: their keys are held to what they declare, as those of this package are."""

import dataclasses
import importlib
import sys
from collections.abc import Iterator
from typing import Annotated, ClassVar, Literal

import pytest
from omegaconf import OmegaConf
from pydantic import Field

from forgetting_transformer import plugins
from forgetting_transformer.plugins import CALLBACKS, CORPORA, OPTIMIZERS
from forgetting_transformer.training.config import Config, ConfigError, OptimizerConfig
from forgetting_transformer.training.config.continuing import changes_that_alter_the_run
from forgetting_transformer.training.config.parsing import keys_of, parse
from tests.tiny import tiny_config
from tests.training.conftest import changed


@dataclasses.dataclass
class LionConfig(OptimizerConfig):
    beta: Annotated[float, Field(ge=0, le=1)] = 0.9
    signs: Literal["all", "none"] = "all"
    log_every: int = 5

    def __post_init__(self) -> None:
        if self.signs == "none" and self.beta > 0.5:
            raise ValueError(f"optimizer.beta={self.beta} is too large for optimizer.signs=none; use at most 0.5")


@dataclasses.dataclass
class ProbeConfig:
    tasks: list[str]
    interval: Annotated[int, Field(ge=1, le=100)] = 10


@pytest.fixture
def added(monkeypatch) -> Iterator[None]:
    """Components as a plug-in registers them, for the time of a test."""
    for registry in (OPTIMIZERS, CALLBACKS, CORPORA):
        for name in registry.names():
            registry.get(name)  # what is imported while the copy is in place would be gone after it
        monkeypatch.setattr(registry, "_components", dict(registry._components))
    OPTIMIZERS.register("lion", config=LionConfig, free=("log_every",))(lambda *_: None)
    CALLBACKS.register("probe", config=ProbeConfig, free=("interval",))(lambda *_: None)
    CALLBACKS.register("gauge", config=ProbeConfig, free=(plugins.ALL,))(lambda *_: None)
    CALLBACKS.register("bell")(lambda *_: None)
    yield


@pytest.fixture
def config(added, tmp_path) -> dict:
    return changed(
        tiny_config(tmp_path / "run", tmp_path / "data"), optimizer__name="lion", callbacks__probe={"tasks": ["a"]}
    )


def parsed(config: dict, **changes) -> Config:
    return parse(OmegaConf.create(changed(config, **changes)))


def test_sections_are_of_the_dataclasses_that_the_components_registered(config):
    found = parsed(config, optimizer__beta=0.25, callbacks__bell=None)
    assert isinstance(found.optimizer, LionConfig) and found.optimizer.beta == 0.25
    assert vars(found.callbacks)["probe"] == ProbeConfig(["a"], 10) and list(vars(found.callbacks)) == ["probe", "bell"]
    assert {"optimizer.beta", "callbacks.probe.tasks", "datamodule.cache_gb"} <= set(keys_of(type(found)))
    assert parse(OmegaConf.create(dataclasses.asdict(found))) == found, "config.yaml is read back as it was"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"optimizer__name": "lionn"},
            "optimizer.name='lionn' is unknown; did you mean 'lion'. Otherwise name the plug-in that has it: ",
        ),
        ({"datamodule__name": "nope"}, "datamodule.name='nope' is unknown; use longcrawl64, .*or name the plug-in"),
        ({"schedule__name": "cosine"}, "schedule.name='cosine' is unknown; .*warmup_cosine"),
        ({"callbacks__prob": {}}, "callbacks='prob' is unknown; did you mean 'probe'?"),
        ({"callbacks": 3}, r"callbacks=3 must be a list of names, as in callbacks=\[a,b\]"),
        ({"optimizer__bta": 1}, "unknown config key 'optimizer.bta'; did you mean 'optimizer.beta'?"),
        ({"optimizer__beta": 2}, "optimizer.beta=2 must be less than or equal to 1"),
        ({"optimizer__signs": "some"}, "optimizer.signs=some must be 'all' or 'none'"),
        ({"optimizer__signs": "none"}, "optimizer.beta=0.9 is too large for optimizer.signs=none; use at most 0.5"),
        ({"callbacks__probe__intervall": 1}, "did you mean 'callbacks.probe.interval'?"),
        ({"callbacks__probe": {}}, "no value for callbacks.probe.tasks: give it on the command line"),
        ({"callbacks__bell": {"tone": 1}}, "unknown config key 'callbacks.bell.tone'"),
    ],
)
def test_what_a_component_does_not_take_is_refused_in_one_line(config, changes, message):
    with pytest.raises(ConfigError, match=message.replace("?", ".")) as refused:
        parsed(config, **changes)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("hint", "message"),
    [
        (OptimizerConfig | type, r"mine has the type .*, which no YAML file has; use "),
        (list[Iterator], r"mine has the type list\[collections.abc.Iterator\], which no YAML file has; use "),
        (tuple[float, float], r"mine has the type tuple\[float, float\], which no YAML file has; use "),
        ("Missing", r"the types of its keys cannot be read \(NameError: name 'Missing' is not defined\)"),
    ],
)
def test_a_key_of_a_type_that_no_config_holds_is_named_with_its_class(config, hint, message):
    keys = dataclasses.make_dataclass("Keys", [("mine", hint)], namespace={"__module__": __name__})
    CALLBACKS.register("typed", config=keys)(lambda *_: None)
    with pytest.raises(ConfigError, match=rf"^callbacks\.typed: {__name__}.Keys: {message}"):
        parsed(config, callbacks__typed={"mine": 1})


@dataclasses.dataclass
class Node:
    shared: ClassVar[tuple[int, int]] = (1, 2)
    size: int = 1
    child: "Node | None" = None


@dataclasses.dataclass
class Broken:
    size: "Missing"  # noqa: F821


def test_a_key_may_be_a_dataclass_that_holds_itself(config):
    keys = dataclasses.make_dataclass("Keys", [("mine", Node)])
    CALLBACKS.register("tree", config=keys)(lambda *_: None)
    found = parsed(config, callbacks__tree={"mine": {"size": 2, "child": {"size": 3}}})
    assert found.callbacks.tree.mine.child.size == 3
    keys = dataclasses.make_dataclass("Keys", [("mine", Broken)])
    CALLBACKS.register("broken", config=keys)(lambda *_: None)
    with pytest.raises(ConfigError, match=r"the types of its keys cannot be read .NameError: name 'Missing'"):
        parsed(config, callbacks__broken={"mine": {"size": 2}})


def test_keys_of_components_forbid_a_changed_resume_unless_they_are_free(config):
    def changes(**changes) -> list[str]:
        before, now = (dataclasses.asdict(parsed(config, **c)) for c in ({}, changes))
        return changes_that_alter_the_run(before, now)

    assert changes(optimizer__log_every=6, callbacks__probe__interval=20) == []
    assert changes(callbacks__gauge={"tasks": ["b"]}) == []
    assert changes(optimizer__beta=0.5) == ["optimizer.beta: 0.9 -> 0.5"]
    assert changes(callbacks__probe__tasks=["b"]) == ["callbacks.probe.tasks: ['a'] -> ['b']"]
    assert changes(callbacks__bell=None) == ["callbacks.bell: (absent) -> {}"]


# Plug-ins: modules from elsewhere


REGISTERS = """
from forgetting_transformer import plugins
@plugins.OPTIMIZERS.register("{name}")
def build(model, undecayed, config): ...
"""


@pytest.fixture
def elsewhere(added, tmp_path, monkeypatch):
    """A folder outside the repository that is the current one; what is loaded there is forgotten afterwards."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(plugins, "_loaded", {})
    before = set(sys.modules)
    yield tmp_path
    for name in {name for name in set(sys.modules) - before if name.startswith("lab")}:
        del sys.modules[name]


def test_a_plug_in_of_the_current_folder_is_found_and_recorded(elsewhere, config):
    (elsewhere / "lab").mkdir()
    (elsewhere / "lab/__init__.py").write_text(REGISTERS.format(name="of_lab"))
    (elsewhere / "lab/configs").mkdir()
    config = changed(config, optimizer={"name": "of_lab", "lr": 1e-3}, plugins=["lab"])
    with pytest.raises(ConfigError, match=r"optimizer.name='of_lab' is unknown; .* name the plug-in that has it"):
        parsed(config, plugins=[])
    plugins.load(["lab"])
    plugins.load(["lab"])
    assert plugins.loaded() == {"lab": elsewhere / "lab/configs"}
    found = parsed(config)
    assert found.plugins == ["lab"]
    assert "add that to the command as plugins=[lab,other]," in plugins.missing(["lab", "other"])
    plugins._loaded.clear()
    with pytest.raises(
        ConfigError, match=r"^this run needs plugins=\[lab\]; add that to the command, .*--plugins lab$"
    ):
        parse(OmegaConf.create(dataclasses.asdict(found)))


def test_a_plug_in_that_cannot_be_one_is_refused_in_one_line(elsewhere):
    for text, name, message in (
        (None, "lab", r"plugins=\[lab\]: there is no module 'lab' in the current folder \(/.*\), .*PYTHONPATH"),
        (None, "lab/x", r"plugins=\[lab/x\] is not the name of a module; give it as in `import my_lab`, without / and"),
        ("\n1 / 0", "lab", r"plugins=\[lab\]: its import failed at .*lab.py:2: ZeroDivisionError: division"),
        ("def", "lab", r"import failed at .*lab.py:1: SyntaxError"),
        (REGISTERS.format(name="lion"), "lab", r"optimizer.name='lion' is registered already; choose anot"),
    ):
        if text is not None:
            (elsewhere / "lab.py").write_text(text)
        importlib.invalidate_caches()
        with pytest.raises(plugins.PluginError, match=message) as refused:
            plugins.load([name])
        assert "\n" not in str(refused.value) and name in str(refused.value)
        assert plugins.loaded() == {}
        sys.modules.pop("lab", None)


def test_the_command_line_names_plug_ins_as_a_list():
    assert plugins.named_in(["a=b", "plugins=[lab, 'other.x']", "c"]) == ["lab", "other.x"]
    assert plugins.named_in(["plugins=[]"]) == plugins.named_in([]) == []
    for argument in ("plugins=lab", "plugins=[lab", "plugins=null", "plugins="):
        with pytest.raises(plugins.PluginError, match=r" is not a list; give one of modules, as in plugins=\[my_lab\]"):
            plugins.named_in([argument])
