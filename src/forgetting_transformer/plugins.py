"""Registries: what a config names and where its code is. Plug-ins add to them without a change to this package.

    from forgetting_transformer import plugins
    from forgetting_transformer.ranges import Range, within
    from forgetting_transformer.training.config import OptimizerConfig

    @dataclass
    class LionConfig(OptimizerConfig):  # has `name` and `lr`
        beta: float = within(Range(0, 1), 0.9)

    @plugins.OPTIMIZERS.register("lion", config=LionConfig)
    def build(model, undecayed, config): ...

A component of this package is listed by the module that registers it, which is imported when the name is first asked
for: so `callbacks: [lm_eval]` reaches an evaluation though training imports none, and reading a config loads no PyTorch.
A module that registers therefore imports PyTorch inside its functions.

What a component's keys may be is said once, in the dataclass that it registers. `training.config.parse` merges it into
the configuration: keys that it does not have are refused with the closest one, `within` and `one_of` (ranges.py) hold
values to what they declare, and rules between keys stand in a method `check(self)` that raises ValueError. Its keys
decide what the weights become, and a run does not continue with other ones, unless `free` lists them.

- An optimizer, a corpus: section `optimizer` or `datamodule`, chosen by its key `name`. The dataclass derives from
  OptimizerConfig or DataModuleConfig in training/config.py. `configs/optimizer/lion.yaml` lists the keys and makes the
  name a choice: `optimizer=lion optimizer.beta=0.95`.
- A callback: `callbacks=[lm_eval,gates]` on the command line chooses files of the group `configs/callbacks`. Each has
  one section, named like the callback, with its keys, and these are overridden there: `callbacks.lm_eval.tasks=[…]`.

      # configs/callbacks/lm_eval.yaml
      lm_eval:
        tasks: [arc_easy]
        interval: 1000000000

  An experiment chooses with `override /callbacks: [lm_eval]` in its defaults. `callbacks: [lm_eval]` in a plain config
  is understood too. Code finds them in `config.callbacks`: `vars(config.callbacks)` is a dictionary from name to the
  instance of the callback's dataclass, in the order in which they were named. Without a dataclass there are no keys.

A plug-in is a module or package that registers its components when it is imported. It is named on the command line
(`plugins=[my_lab]`) or is the entry point of an installed package (group "forgetting_transformer.plugins"). Nothing is
imported because a run's folder names it.
"""

import dataclasses
import difflib
import importlib
from collections.abc import Callable, Iterable
from typing import Any, Generic, TypeVar

T = TypeVar("T")
#: In `free`: all keys of the section, and for a callback whether it is there at all.
ALL = "*"


class UnknownComponentError(ValueError):
    """A name that nothing has registered; the message names the key, the names there are and the fix."""


@dataclasses.dataclass(frozen=True)
class Component(Generic[T]):
    """What one name stands for.

    Attributes:
        name: what configs call it.
        build: the registered function or class.
        config: a dataclass of the keys that its config section has; None where there are none beside the name.
        free: keys of that section that may differ when a run is continued, or ALL. All others forbid it.
        plugin: the module whose import registered it, "" for this package.
    """

    name: str
    build: T
    config: type | None = None
    free: tuple[str, ...] = ()
    plugin: str = ""


class Registry(Generic[T]):
    """The components of one kind by name.

    Args:
        key: the config key that names one, such as "optimizer.name".
        builtin: name: the module of this package that registers it when it is imported.
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
            known = self._components.get(name)
            ours = self._builtin.get(name, getattr(build, "__module__", None)) == getattr(build, "__module__", None)
            if not ours or (known is not None and known.build is not build):
                raise ValueError(f"{self.key}={name!r} is registered already; choose another name")
            self._components[name] = Component(name, build, config, tuple(free), _importing[-1] if _importing else "")
            return build

        return add

    def names(self) -> list[str]:
        """All names, sorted, of this package and of the plug-ins that are loaded."""
        return sorted({*self._builtin, *self._components})

    def __contains__(self, name: object) -> bool:
        return name in self._builtin or name in self._components

    def get(self, name: str) -> Component[T]:
        """
        Raises:
            UnknownComponentError: nothing is registered under `name`.
        """
        found = self._components.get(name) if isinstance(name, str) else None
        if found is None and isinstance(name, str) and name in self._builtin:
            importlib.import_module(self._builtin[name])
            found = self._components[name]
        if found is None:
            close = difflib.get_close_matches(str(name), self.names(), 1)
            hint = f"did you mean {close[0]!r}? Otherwise" if close else f"use {', '.join([*self.names(), 'or'])}"
            plug_in = "name the plug-in that has it: plugins=[…]"
            raise UnknownComponentError(f"{self.key}={name!r} is unknown; {hint} {plug_in}")
        return found


#: The plug-ins that are being imported, the innermost last.
_importing: list[str] = []

OPTIMIZERS: Registry[Callable[..., Any]] = Registry(
    "optimizer.name", {"adamw": "forgetting_transformer.training.optimizers"}
)
CORPORA: Registry[Callable[..., Any]] = Registry(
    "datamodule.name", dict.fromkeys(("longcrawl64", "packed", "mixture"), "forgetting_transformer.training.corpora")
)
CALLBACKS: Registry[Callable[..., Any]] = Registry(
    "callbacks",
    {
        "gate_statistics": "forgetting_transformer.evaluation.gate_statistics",
        "lm_eval": "forgetting_transformer.evaluation.lm_eval_callback",
    },
)
