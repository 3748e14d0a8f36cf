"""What is chosen by a name: our own kinds, and those that installed packages register as entry points of a group."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.metadata import EntryPoint, entry_points
from typing import Any

from atroposlib.errors import ConfigError
from atroposlib.utils.wording import nearest


class Registry:
    """Names of one kind of thing (`noun`), each with the place of its class or function: `package.module:name`."""

    def __init__(self, noun: str, *, group: str, own: Mapping[str, str]) -> None:
        self._noun = noun
        self._group = group
        self._own = {name: EntryPoint(name, place, group) for name, place in own.items()}

    def checked(self, name: str) -> str:
        """Return `name`; ConfigError if there is nothing of that name. Imports nothing."""
        self._place(name)
        return name

    def load(self, name: str) -> Any:
        """Import what has that name; ConfigError if there is nothing, or a package registers what it does not have."""
        place = self._place(name)
        try:
            return place.load()
        except (ImportError, AttributeError) as error:
            raise ConfigError(
                f"{self._noun} {name!r} cannot be loaded from {place.value}: {error}"
            ) from error

    def _place(self, name: str) -> EntryPoint:
        if name in self._own:
            return self._own[name]
        known = {point.name: point for point in entry_points(group=self._group)} | self._own
        if name in known:
            return known[name]
        valid = ", ".join(sorted(known))
        hint = nearest(name, known, otherwise="")
        raise ConfigError(f"{self._noun} {name!r} is unknown; {hint and hint + ' '}valid: {valid}")
