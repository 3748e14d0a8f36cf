"""Functions of the original's command lines, for environments that build their own.

`python env.py serve` does not use them: flags are read by `atroposlib.config`.
"""

from __future__ import annotations

import copy
import functools
import json
import sys
from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel, create_model

from atroposlib.config import merge


def get_prefixed_pydantic_model(base_model: type[BaseModel], prefix: str) -> type[BaseModel]:
    """Return a model with the fields of `base_model`, each name preceded by `prefix`; constraints are kept.

    >>> class Limits(BaseModel):
    ...     size: int = 4
    >>> list(get_prefixed_pydantic_model(Limits, "env.").model_fields)
    ['env.size']
    """
    fields: dict[str, Any] = {
        f"{prefix}{name}": (field.annotation, copy.copy(field))
        for name, field in base_model.model_fields.items()
    }
    return create_model(f"{prefix.rstrip('.').capitalize()}{base_model.__name__}", **fields)


def merge_dicts(*dicts: Mapping[str, Any]) -> dict[str, Any]:
    """Return the dicts merged recursively; later ones override earlier ones.

    >>> merge_dicts({"a": {"x": 1}}, {"a": {"y": 2}})
    {'a': {'x': 1, 'y': 2}}
    """
    empty: dict[str, Any] = {}
    return functools.reduce(merge, dicts, empty)


def extract_namespace(model: BaseModel | Mapping[str, Any], prefix: str) -> dict[str, Any]:
    """Return the entries whose names begin with `prefix`, with the prefix removed.

    >>> extract_namespace({"env.size": 4, "slurm": True}, "env.")
    {'size': 4}
    """
    items = model.model_dump() if isinstance(model, BaseModel) else model
    return {
        key.removeprefix(prefix): value for key, value in items.items() if key.startswith(prefix)
    }


def adjust_model_defaults(
    model_class: type[BaseModel], defaults: BaseModel | Mapping[str, Any]
) -> type[BaseModel]:
    """Return a subclass of `model_class` whose fields default to the values in `defaults`."""
    values: dict[str, Any] = dict(defaults)
    fields: dict[str, Any] = {}
    for name, field in model_class.model_fields.items():
        if name in values:
            changed = copy.copy(field)
            changed.default, changed.default_factory = values[name], None
            fields[name] = (field.annotation, changed)
    return create_model(model_class.__name__, __base__=model_class, **fields)


def get_double_dash_flags() -> dict[str, Any]:
    """Return the `--flag`s on this process's command line, without the dashes.

    A flag without a value is True, the text `None` is None, lists and objects are parsed as JSON, negative numbers are
    values; anything else stays text for pydantic to convert.
    """
    flags: dict[str, Any] = {}
    rest = sys.argv[1:]
    while rest:
        word = rest.pop(0)
        if not word.startswith("--") or word == "--":
            continue
        name, equals, text = word[2:].partition("=")
        if equals:
            flags[name] = _value(text)
        elif rest and (not rest[0].startswith("-") or _is_number(rest[0])):
            flags[name] = _value(rest.pop(0))
        else:
            flags[name] = True
    return flags


def _value(text: str) -> Any:
    if text == "None":
        return None
    if text.startswith(("[", "{")):
        try:
            return json.loads(text)
        except ValueError:
            return text
    return text


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True
