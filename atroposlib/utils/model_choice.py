"""What trainer and engine check before they load a model: its directory, and the device."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from atroposlib.errors import ConfigError

if TYPE_CHECKING:
    import torch


def check_model_path(name: str, *, flag: str) -> None:
    """Raise ConfigError for a path without a checkpoint; accept names on the Hugging Face hub."""
    path = Path(name).expanduser()
    is_path = name.startswith(("/", ".", "~")) or name.count("/") > 1 or path.exists()
    if is_path and not (path / "config.json").is_file():
        found = "has no config.json" if path.is_dir() else "does not exist"
        raise ConfigError(f"{flag} {name}: this directory {found}; give a checkpoint directory")


def torch_device(name: str) -> torch.device:
    """Return the device of `--device`, by default cuda if available; raise ConfigError if it is not."""
    import torch

    has_cuda = torch.cuda.is_available()
    if name == "auto":
        return torch.device("cuda" if has_cuda else "cpu")
    if name != "cpu" and not has_cuda:
        raise ConfigError(f"--device {name}: torch sees no CUDA device; use --device cpu")
    return torch.device(name)
