"""Reward functions by name: registered ones, and those of this package's files, imported on first lookup.

A class is registered under the given name, else its own in lower case without a trailing "reward". Lookups ignore
underscores.
"""

from __future__ import annotations

import importlib
import inspect
import pkgutil
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, TypeAlias

from atroposlib.envs.reward_fns.reward_function import RewardFunction
from atroposlib.utils.wording import nearest

_PACKAGE = "atroposlib.envs.reward_fns"
_NO_REWARDS = frozenset({"registry", "reward_function", "math_worker"})
"""Modules of the package that define no reward."""

RewardFactory: TypeAlias = Callable[..., RewardFunction]


class LegacyFunctionWrapper(RewardFunction):
    """A plain function as a reward; a single number is repeated for all completions."""

    def __init__(
        self,
        func: Callable[..., Any],
        weight: float = 1.0,
        name: str | None = None,
        **config: Any,
    ) -> None:
        super().__init__(weight=weight, name=name or func.__name__, **config)
        self.func = func

    def compute(self, completions: Sequence[Any], **kwargs: Any) -> list[float]:
        values = self.func(completions, **{**self.config, **kwargs})
        if isinstance(values, int | float):
            return [float(values)] * len(completions)
        return [float(value) for value in values]


class RewardRegistry:
    """Maps names to reward factories."""

    def __init__(self) -> None:
        self._factories: dict[str, RewardFactory] = {}

    def register(self, cls: Any = None, name: str | None = None) -> Any:
        """Register a class, as `@registry.register` or `@registry.register(name="...")`."""
        if cls is None:
            return lambda decorated: self._add_class(decorated, name)
        return self._add_class(cls, name)

    def _add_class(self, cls: Any, name: str | None) -> Any:
        if not (inspect.isclass(cls) and issubclass(cls, RewardFunction)):
            raise TypeError(f"{cls!r} is not a subclass of RewardFunction; see register_function")
        self._factories[name or cls.__name__.lower().removesuffix("reward")] = cls
        return cls

    def register_function(self, name: str, function: Callable[..., Any]) -> None:
        """Register a function `(completions, **kwargs) -> values`."""
        self._factories[name] = partial(LegacyFunctionWrapper, function, name=name)

    def get(self, name: str) -> RewardFactory:
        """Return the class (or the factory of a function) of `name`; ImportError if there is none."""
        if (found := self._find(name)) is not None:
            return found
        for stem in _stems_by_likeness(name):
            self._adopt(stem)
            if (found := self._find(name)) is not None:
                return found
        raise ImportError(f"there is no reward function {name!r}; {nearest(name, self._factories)}")

    def create(self, name_or_config: str | Mapping[str, Any], **kwargs: Any) -> RewardFunction:
        """Make a reward from its name, or from `{"type": name, "params": {...}, ...}`, which overrides kwargs."""
        if isinstance(name_or_config, str):
            return self.get(name_or_config)(**kwargs)
        config = dict(name_or_config)
        if "type" not in config:
            raise ValueError(f"a reward's configuration needs a type: {dict(name_or_config)}")
        factory = self.get(config.pop("type"))
        params = config.pop("params", None) or {}
        return factory(**{**kwargs, **config, **params})

    def list_registered(self) -> list[str]:
        """Return the names registered so far; a file of the package is registered on first lookup."""
        return sorted(self._factories)

    def load_required_functions(self, config: Mapping[str, Any]) -> set[str]:
        """Import every reward function named in a configuration, and return their names."""
        names = set(_names_in(config))
        for name in names:
            self.get(name)
        return names

    def _find(self, name: str) -> RewardFactory | None:
        if name in self._factories:
            return self._factories[name]
        return next(
            (made for known, made in self._factories.items() if _key(known) == _key(name)), None
        )

    def _adopt(self, stem: str) -> None:
        """Import a file of the package; register its reward if it does not register itself."""
        module = importlib.import_module(f"{_PACKAGE}.{stem}")
        name = stem.removesuffix("_reward")
        if self._find(name) is not None:
            return
        classes = [
            cls
            for _, cls in inspect.getmembers(module, inspect.isclass)
            if cls.__module__ == module.__name__ and issubclass(cls, RewardFunction)
        ]
        named = [cls for cls in classes if _key(cls.__name__) == _key(name)]
        function = vars(module).get(stem)
        if len(classes) == 1 or named:
            self._factories[name] = (named or classes)[0]
        elif not classes and inspect.isfunction(function):
            self.register_function(name, function)


def _stems_by_likeness(name: str) -> list[str]:
    """Return the package's files that may define rewards, those called like `name` first."""
    paths = sys.modules[_PACKAGE].__path__
    stems = [info.name for info in pkgutil.iter_modules(paths) if info.name not in _NO_REWARDS]
    return sorted(stems, key=lambda stem: _key(stem) != _key(name))


def _key(name: str) -> str:
    """Return the form that all spellings of a name share.

    >>> _key("cosine_scaled_reward") == _key("CosineScaledReward") == _key("cosinescaled")
    True
    """
    return name.lower().replace("_", "").removesuffix("reward")


def _names_in(config: Mapping[str, Any]) -> Iterator[str]:
    def names(entries: Any) -> Iterator[str]:
        for entry in [entries] if isinstance(entries, str | Mapping) else entries or []:
            yield entry if isinstance(entry, str) else entry["type"]

    for key in ("reward_functions", "reward_funcs"):
        yield from names(config.get(key))
    for dataset in config.get("datasets") or []:
        for key in ("dataset_reward_funcs", "reward_funcs"):
            yield from names(dataset.get(key))
        types = dataset.get("types") or []
        for kind in types.values() if isinstance(types, Mapping) else types:
            if isinstance(kind, Mapping):
                yield from names(kind.get("reward_funcs"))


registry = RewardRegistry()
"""The registry that environments use."""
