"""The configurations that two runs recorded in their directories, and the settings in which they differ."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from atroposlib.config import read_yaml
from atroposlib.frontend.page import Compared

_FILES = "*config.yaml"
"""`config.yaml` of the demo and of `atropos up`, `evaluate_config.yaml` of an evaluation."""


def compare_runs(one: Path, other: Path) -> Compared:
    """Return the names of two runs and the settings that differ; ConfigError for a file that is not YAML."""
    names = [path.resolve().name for path in (one, other)]
    if names[0] == names[1]:
        names = [str(path) for path in (one, other)]
    found = [_settings(path) for path in (one, other)]
    keys = list(dict.fromkeys([*found[0], *found[1]]))
    pairs = [(key, found[0].get(key), found[1].get(key)) for key in keys]
    return Compared(names, [pair for pair in pairs if pair[1] != pair[2]], num_settings=len(keys))


def _settings(run: Path) -> dict[str, str]:
    """Return each setting of a run's directory as text, by its path; {} for a run without a configuration."""
    return {
        key: value
        for path in sorted(run.glob(_FILES))
        for key, value in _leaves(read_yaml(path), "")
    }


def _leaves(value: Any, path: str) -> Iterator[tuple[str, str]]:
    """Yield the path and the text of each value.

    >>> list(_leaves({"env": {"group_size": 8, "names": ["a"]}}, ""))
    [('env.group_size', '8'), ('env.names.0', 'a')]
    """
    if isinstance(value, dict | list) and value:
        named = value.items() if isinstance(value, dict) else enumerate(value)
        for key, inner in named:
            yield from _leaves(inner, f"{path}.{key}" if path else str(key))
    else:
        yield path, str(value)
