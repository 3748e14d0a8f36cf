"""The configuration of a run of the whole trainer, and what it needs from the hub."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import httpx

from atroposlib.client import TrainerClient
from atroposlib.scored_data import ScoredGroup
from atroposlib.wire import CONTENT_TYPE_PACKED, join_packed, pack_group
from example_trainer.config import TrainerConfig

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
    with TrainerClient(hub_url) as hub:
        for number, group in enumerate(groups):
            body = join_packed([pack_group(group.replace(group_id=f"{prefix}{number}"))], {})
            hub._client.post(
                "/scored_data", content=body, headers={"Content-Type": CONTENT_TYPE_PACKED}
            ).raise_for_status()


def ledger_of(hub_url: str) -> dict[str, int]:
    """Return the places that hold groups."""
    ledger = httpx.get(f"{hub_url}/ledger").json()
    names = ("queued", "buffered", "leased", "trained", "expired", "dead", "discarded")
    return {name: ledger[name] for name in names if ledger[name]}
