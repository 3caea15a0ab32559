"""Registries: what a config names and where its code is. Plug-ins add to them without a change to this package.

    from forgetting_transformer import plugins

    @plugins.OPTIMIZERS.register("lion", config=LionConfig)
    def build(model, undecayed, config): ...

A component of this package is listed by the module that registers it, which is imported when the name is first asked
for: so `callbacks: [lm_eval]` reaches an evaluation though training imports none, and reading a config loads no PyTorch.
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


class UnknownComponentError(ValueError):
    """A name that nothing has registered; the message names the key, the names there are and the fix."""


@dataclasses.dataclass(frozen=True)
class Component(Generic[T]):
    """What one name stands for.

    Attributes:
        name: what configs call it.
        build: the registered function or class.
        config: a dataclass of the keys that its config section has; None where there are none beside the name.
        free: keys of that section that may differ when a run is continued. All others forbid it.
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
            if known is not None and known.build is not build:
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
        if name not in self._components and name in self._builtin:
            importlib.import_module(self._builtin[name])
        if name not in self._components:
            close = difflib.get_close_matches(str(name), self.names(), 1)
            hint = f"; did you mean {close[0]!r}?" if close else ""
            raise UnknownComponentError(
                f"{self.key}={name!r} is unknown{hint} (known: {', '.join(self.names())}). If a plug-in has it, name that: "
                "plugins=[…]"
            )
        return self._components[name]


#: The plug-ins that are being imported, the innermost last.
_importing: list[str] = []

OPTIMIZERS: Registry[Callable[..., Any]] = Registry("optimizer.name")
CORPORA: Registry[Callable[..., Any]] = Registry("datamodule.name")
CALLBACKS: Registry[Callable[..., Any]] = Registry("callbacks")
