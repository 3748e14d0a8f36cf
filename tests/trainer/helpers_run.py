"""The configuration of a run of the whole trainer, a checkpoint, and what a run needs from the hub."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import httpx
import torch
from safetensors.torch import save_file

from atroposlib.scored_data import ScoredGroup
from atroposlib.wire import CONTENT_TYPE_PACKED, join_packed, pack_group
from example_trainer.config import TrainerConfig
from example_trainer.contract import write_checksums

Configure = Callable[..., TrainerConfig]
"""Makes the configuration of a run with a test's hub and engine; takes settings."""


def config_for(model_dir: Path, out: Path, **changes: Any) -> TrainerConfig:
    settings: dict[str, Any] = {
        "model_name": str(model_dir),
        "bridge": "reload",
        "batch_size": 4,
        "lr": 1e-3,
        "device": "cpu",
        "save_path": out / "checkpoints",
        "weights_dir": out / "weights",
        "threads": 1,
        "engine_timeout_s": 5,
    }
    return TrainerConfig(**settings | changes)


def send(hub_url: str, groups: Sequence[ScoredGroup], *, prefix: str = "g") -> None:
    """Post the groups under the ids `prefix` and a number."""
    for number, group in enumerate(groups):
        body = join_packed([pack_group(group.replace(group_id=f"{prefix}{number}"))], {})
        headers = {"Content-Type": CONTENT_TYPE_PACKED}
        httpx.post(f"{hub_url}/scored_data", content=body, headers=headers).raise_for_status()


def ledger_of(hub_url: str) -> dict[str, int]:
    """Return the places that hold groups."""
    ledger = httpx.get(f"{hub_url}/ledger").json()
    names = ("queued", "buffered", "leased", "trained", "expired", "dead", "discarded")
    return {name: ledger[name] for name in names if ledger[name]}


def make_checkpoint(path: Path, **config: Any) -> Path:
    """Write a checkpoint of one small matrix."""
    path.mkdir()
    (path / "config.json").write_text(json.dumps(config))
    weights = {"head.weight": torch.arange(6.0).reshape(2, 3)}
    save_file(weights, path / "model.safetensors")
    write_checksums(path, weights)
    return path
