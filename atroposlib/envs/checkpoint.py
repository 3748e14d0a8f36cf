"""Environment checkpoints: `<dir>/env_checkpoints/<registered name>/step-<N>.json`, written atomically."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from atroposlib.errors import ConfigError
from atroposlib.utils.files import replace_file


def checkpoint_folder(checkpoint_dir: str, registered_name: str) -> Path:
    """Return the folder of one environment's checkpoints."""
    return Path(checkpoint_dir) / "env_checkpoints" / registered_name


def save(folder: Path, step: int, data: dict[str, Any]) -> None:
    """Write `data` for `step`; a reader sees the whole file or none."""
    replace_file(folder / f"step-{step}.json", json.dumps(data, default=_plain))


def load(folder: Path, step: int) -> dict[str, Any]:
    """Return the newest data saved at or before `step`; {} when there is none."""
    steps = [int(p.stem[5:]) for p in folder.glob("step-*.json") if p.stem[5:].isdigit()]
    usable = [found for found in steps if found <= step]
    if not usable:
        return {}
    path = folder / f"step-{max(usable)}.json"
    data = json.loads(path.read_text(encoding="utf-8"))
    if not isinstance(data, dict):
        raise ConfigError(
            f"the environment checkpoint {path} holds {type(data).__name__}, not a dict"
        )
    return data


def _plain(value: Any) -> Any:
    """Convert numpy and torch values to numbers and lists, sets to lists; TypeError for other types."""
    if isinstance(value, set | frozenset):
        return sorted(value)
    if callable(getattr(value, "tolist", None)):
        return value.tolist()
    raise TypeError(f"an environment checkpoint is JSON; {type(value).__name__} is not")
