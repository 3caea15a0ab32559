"""Registries: what a config names and where its code is. Plug-ins add to them without a change to this package.

A component of this package is listed by the module that registers it, which is imported when the name is first asked
for: so `callbacks: [lm_eval]` reaches an evaluation though training imports none, and reading a config loads no
PyTorch. A module that registers therefore imports PyTorch inside its functions.

The keys of a component are defined once, in the dataclass that it registers. pydantic checks the section against it
(training/config/parsing.py), and rules between keys are in a `__post_init__` that raises ValueError. Its keys decide
what the weights become, and a run does not continue with other ones, unless `free` lists them. The dataclass of an
optimizer, a schedule or a corpus derives from OptimizerConfig, ScheduleConfig or DataModuleConfig; that of a callback
types the section `callbacks.<name>`. docs/extend.md has an example of each with its YAML.

A plug-in is a module or package that registers its components when it is imported. It is named on the command line
(`plugins=[my_lab]`, in scripts and evaluations `--plugins my_lab`) and found in the current folder, beside train.py, on
PYTHONPATH, or installed. Its folder `configs/`, if it has one, holds choices of Hydra's groups as that of this project
does. A run records the plug-ins it was given; without them it is not continued, exported or
evaluated. Nothing is imported because a run's folder names it.
"""

import dataclasses
import difflib
import importlib
import os
import re
import sys
import traceback
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, Generic, TypeVar

T = TypeVar("T")
#: In `free`: all keys of the section, and for a callback whether it is there at all.
ALL = "*"


class UnknownComponentError(ValueError):
    """An unregistered name; the message has the key, the registered names and the fix."""


@dataclasses.dataclass(frozen=True)
class Component(Generic[T]):
    """A registered function or class.

    Attributes:
        name: what configs call it.
        build: the registered function or class.
        config: a dataclass of the keys that its config section has; None where there are none beside the name.
        free: keys of that section that may differ when a run is continued, or ALL. All others forbid it.
    """

    name: str
    build: T
    config: type | None = None
    free: tuple[str, ...] = ()


class Registry(Generic[T]):
    """The components of one kind by name.

    Args:
        key: the config key that names one, such as "optimizer.name".
        builtin: name -> the module of this package that registers it when it is imported.
    """

    def __init__(self, key: str, builtin: dict[str, str] | None = None) -> None:
        self.key = key
        self._builtin = dict(builtin or {})
        self._components: dict[str, Component[T]] = {}

    def register(self, name: str, *, config: type | None = None, free: Iterable[str] = ()) -> Callable[[T], T]:
        """Decorator: makes a function or class known as `name`.

        Raises:
            ValueError: something else has the name.
        """

        def add(build: T) -> T:
            known, module = self._components.get(name), getattr(build, "__module__", "")
            if self._builtin.get(name, module) != module or (known is not None and known.build is not build):
                raise ValueError(f"{self.key}={name!r} is registered already; choose another name")
            self._components[name] = Component(name, build, config, tuple(free))
            return build

        return add

    def names(self) -> list[str]:
        """All names, sorted, of this package and of the plug-ins that are loaded."""
        return sorted({*self._builtin, *self._components})

    def __contains__(self, name: object) -> bool:
        return name in self._builtin or name in self._components

    def get(self, name: str) -> Component[T]:
        """The component registered under `name`; raises UnknownComponentError where there is none."""
        found = self._components.get(name) if isinstance(name, str) else None
        if found is None and isinstance(name, str) and name in self._builtin:
            importlib.import_module(self._builtin[name])
            found = self._components[name]
        if found is None:
            close = difflib.get_close_matches(str(name), self.names(), 1)
            hint = f"did you mean {close[0]!r}? Otherwise" if close else f"use {', '.join([*self.names(), 'or'])}"
            plug_in = "name the plug-in that has it: plugins=[…] of a run, --plugins of a script"
            raise UnknownComponentError(f"{self.key}={name!r} is unknown; {hint} {plug_in}")
        return found


#: The plug-ins that are loaded -> their folder of configs, if they have one.
_loaded: dict[str, Path | None] = {}

OPTIMIZERS: Registry[Callable[..., Any]] = Registry(
    "optimizer.name", dict.fromkeys(("adamw", "muon"), "forgetting_transformer.training.optimization.optimizers")
)
CORPORA: Registry[Callable[..., Any]] = Registry(
    "datamodule.name",
    dict.fromkeys(("longcrawl64", "packed", "mixture"), "forgetting_transformer.training.config.corpora"),
)
CALLBACKS: Registry[Callable[..., Any]] = Registry(
    "callbacks",
    {
        "gate_statistics": "forgetting_transformer.evaluation.forget_gates",
        "lm_eval": "forgetting_transformer.evaluation.lm_eval_callback",
        "needle": "forgetting_transformer.evaluation.needle",
    },
)
SCHEDULES: Registry[Callable[..., Callable[[int], float]]] = Registry(
    "schedule.name",
    dict.fromkeys(
        ("constant", "warmup_cosine", "warmup_linear", "warmup_stable_decay"),
        "forgetting_transformer.training.optimization.schedule",
    ),
)
#: Their classes for causal language models; model/registry.py registers them.
MODELS: Registry[type] = Registry("model.name")


class PluginError(ValueError):
    """A plug-in cannot be loaded, or is not there; the message names it and the fix."""


def named_in(arguments: Sequence[str]) -> list[str]:
    """The plug-ins that arguments for Hydra name, as in `plugins=[my_lab]`.

    Raises:
        PluginError: the value is no list.
    """
    names: list[str] = []
    for argument in arguments:
        key, equals, value = argument.partition("=")
        if not equals or key.lstrip("+") != "plugins":
            continue
        listed = re.fullmatch(r"\[(.*)\]", value.strip("'\" "))
        if listed is None:
            raise PluginError(f"{argument} is not a list; give one of modules, as in plugins=[my_lab], or [] for none")
        names = [name for item in listed[1].split(",") if (name := item.strip("'\" "))]
    return names


def load(names: Iterable[str]) -> None:
    """Imports these plug-ins; those that are loaded already stay as they are.

    Raises:
        PluginError: there is no such module, or it raises an error on import.
    """
    for name in names:
        if not re.fullmatch(r"[^\W\d]\w*(\.[^\W\d]\w*)*", name) or name.endswith(".py"):
            raise PluginError(
                f"plugins=[{name}] is not the name of a module; give it as in `import my_lab`, without / and .py"
            )
        if (folder := os.getcwd()) not in sys.path:
            sys.path.append(folder)
        try:
            module = importlib.import_module(name)
        except (Exception, SystemExit) as error:  # a script that reads its own command line ends Python
            raise PluginError(f"plugins=[{name}]{_why_not_imported(name, error)}") from error
        file = Path(module.__file__ or "")
        has_configs = file.name == "__init__.py" and file.with_name("configs").is_dir()
        _loaded[name] = file.with_name("configs") if has_configs else None


def _why_not_imported(name: str, error: BaseException) -> str:
    if isinstance(error, ModuleNotFoundError) and f"{name}.".startswith(f"{error.name}."):
        return (
            f": there is no module {error.name!r} in the current folder ({os.getcwd()}), beside train.py, on "
            "PYTHONPATH or installed; start where its folder lies, or set PYTHONPATH to that place"
        )
    frames = traceback.extract_tb(error.__traceback__)
    where = [(f.filename, f.lineno) for f in frames if name.split(".")[0] in Path(f.filename).with_suffix("").parts]
    file, line = (error.filename, error.lineno) if isinstance(error, SyntaxError) else (where or [("", 0)])[-1]
    place = f" at {file}:{line}" if file else ""
    return f": its import failed{place}: {type(error).__name__}: {' '.join(str(error).split())}"


def loaded() -> dict[str, Path | None]:
    """The plug-ins that are loaded -> their folder of configs, if they have one."""
    return dict(_loaded)


def missing(names: Any, whose: str = "this run") -> str | None:
    """ "this run needs plugins=[my_lab]; …" where one of these plug-ins is not loaded; None where all are.

    Args:
        names: what a run or an exported model recorded; None and whatever is no list of names count as none.
    """
    needed = [name for name in names if isinstance(name, str)] if isinstance(names, list | tuple) else []
    if set(needed) <= _loaded.keys():
        return None
    together = [*_loaded, *(name for name in needed if name not in _loaded)]
    beside = f" as plugins=[{','.join(together)}]" if _loaded else ""
    return (
        f"{whose} needs plugins=[{','.join(needed)}]; add that to the command{beside}, in scripts and evaluations as "
        f"--plugins {' '.join(together)}"
    )
