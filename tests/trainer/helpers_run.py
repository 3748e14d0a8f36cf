"""The configuration of a run of the whole trainer, a checkpoint, and what a run needs from the hub."""

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import httpx
import torch
from safetensors.torch import save_file

from atroposlib.scored_data import ScoredGroup
from atroposlib.wire import CONTENT_TYPE_PACKED, join_packed, pack_group
from example_trainer.config import TrainerConfig
from example_trainer.contract import write_checksums
from tests.builders.rows import rows_in, tokens_by_fate

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


def send(hub_url: str, groups: Sequence[ScoredGroup], *, prefix: str = "g") -> dict[str, int]:
    """Post the groups under the ids `prefix` and a number; return the sampled tokens of each id."""
    sampled = {f"{prefix}{number}": group.num_trained for number, group in enumerate(groups)}
    for group_id, group in zip(sampled, groups, strict=True):
        body = join_packed([pack_group(group.replace(group_id=group_id))], {})
        headers = {"Content-Type": CONTENT_TYPE_PACKED}
        httpx.post(f"{hub_url}/scored_data", content=body, headers=headers).raise_for_status()
    return sampled


def ledger_of(hub_url: str) -> dict[str, int]:
    """Return the places that hold groups."""
    ledger = httpx.get(f"{hub_url}/ledger").json()
    names = ("queued", "buffered", "leased", "trained", "expired", "dead", "discarded")
    return {name: ledger[name] for name in names if ledger[name]}


def closed_ledger(hub_url: str, save_path: Path, sampled: Mapping[str, int]) -> dict[str, int]:
    """Return `ledger_of` the hub after a run, once it closes; `sampled`: the tokens of each group that was sent.

    Each group has one fate or waits at the hub, as its ledger says, and each sampled token is trained, masked by a
    reason, thrown away with its group by a reason, or waits.
    """
    fates = {row["group"]: row["fate"] for row in rows_in(save_path / "group_fates.jsonl")}
    thrown_away = {group for group, fate in fates.items() if fate in ("untrainable", "not_finite")}
    waiting = sampled.keys() - fates.keys()
    ledger = ledger_of(hub_url)
    assert ledger.get("trained", 0) == len(fates) - len(thrown_away)
    assert ledger.get("dead", 0) == len(thrown_away)
    assert sum(ledger.values()) == len(sampled) == len(fates) + len(waiting)
    received = sum(tokens_by_fate(rows_in(save_path / "metrics.jsonl")).values())
    others = sum(sampled[group] for group in thrown_away | waiting)
    assert sum(sampled.values()) == received + others
    return ledger


def make_checkpoint(path: Path, **config: Any) -> Path:
    """Write a checkpoint of one small matrix."""
    path.mkdir()
    (path / "config.json").write_text(json.dumps(config))
    weights = {"head.weight": torch.arange(6.0).reshape(2, 3)}
    save_file(weights, path / "model.safetensors")
    write_checksums(path, weights)
    return path
