"""Items of stored rows in the types that an environment's code declares for them."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import inspect
import typing
from collections import abc
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from pydantic import BaseModel, PydanticUserError, TypeAdapter

from atroposlib.envs.hooks import EnvHooks


def item_of(env_cls: type[EnvHooks], stored: Any) -> Any:
    """Return a stored item in the type that the code declares: a NamedTuple, a dataclass, a pydantic model, a list.

    The type is that of a parameter `row` or `item` of one of its methods, or a subclass. Without one, or where the
    item does not fit it, the item stays as JSON gives it.
    """
    for kind, adapter in _item_types(env_cls):
        if dataclasses.is_dataclass(kind) and not _fits(kind, stored):
            continue
        with contextlib.suppress(ValueError, TypeError):
            return adapter.validate_python(stored)
    return stored


def _fits(kind: Any, stored: Any) -> bool:
    """Whether a dataclass has all the fields of an item; a subclass may have those that are missing."""
    return isinstance(stored, Mapping) and stored.keys() <= {
        each.name for each in dataclasses.fields(kind)
    }


class _ItemType(NamedTuple):
    kind: Any
    adapter: TypeAdapter[Any]


@functools.cache
def _item_types(env_cls: type[EnvHooks]) -> list[_ItemType]:
    """Return the types that methods declare for an item, those of the most derived class first."""
    found = []
    for declared in dict.fromkeys(_declared(env_cls)):
        for kind in (declared, *getattr(declared, "__subclasses__", list)()):
            with contextlib.suppress(PydanticUserError):
                found.append(_ItemType(kind, TypeAdapter(kind)))
    return found


def _declared(env_cls: type[EnvHooks]) -> Iterator[Any]:
    for cls in env_cls.__mro__:
        for method in filter(inspect.isfunction, vars(cls).values()):
            parameters = [*inspect.signature(method).parameters][:2]
            if not {"row", "item"}.intersection(parameters):
                continue
            try:
                declared = typing.get_type_hints(method).get(parameters[-1])
            except (NameError, TypeError):
                continue  # names that are imported for type checkers alone
            is_class = inspect.isclass(declared) and (
                dataclasses.is_dataclass(declared)
                or issubclass(declared, BaseModel)
                or (issubclass(declared, tuple) and hasattr(declared, "_fields"))
            )
            if is_class or typing.get_origin(declared) in (list, tuple, abc.Sequence):
                yield declared
