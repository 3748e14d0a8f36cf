"""Builders for run files, and a short demo on a model that is made once."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import yaml

from atroposlib.api.schemas import Ledger
from atroposlib.cli.launch.status import is_closed
from tests.builders.rows import rows_in
from tests.processes import ROOT, free_port

DEMO = ROOT / "atroposlib" / "cli" / "_demo" / "demo.yaml"
NUM_STEPS = 10


def write_run(path: Path, run: dict[str, Any]) -> Path:
    path.write_text(yaml.safe_dump(run, sort_keys=False))
    return path


def short_demo(directory: Path, **changes: Any) -> Path:
    """Write the demo's run file for `NUM_STEPS` steps, with ports of its own."""
    run = yaml.safe_load(DEMO.read_text())
    run |= {"name": "short", **changes}
    run["hub"]["port"], run["engine"]["port"] = free_port(), free_port()
    run["trainer"]["flags"] |= {"num_steps": NUM_STEPS, "checkpoint_interval": 3}
    [environment] = run["environments"].values()
    environment["count"] = 2
    environment["flags"] |= {"total_steps": NUM_STEPS + 1, "max_num_workers": 16}
    return write_run(directory / "run.yaml", run)


def atropos(*arguments: object) -> list[str]:
    return [sys.executable, "-m", "atroposlib.cli.atropos", *map(str, arguments)]


def environment(**more: str) -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **more}


def make_model(out: Path) -> Path:
    """Train the demo's model until a quarter of its answers are right: about 10 s."""
    command = [sys.executable, "-m", "atroposlib.cli._demo.warm_up", f"--out={out}"]
    subprocess.run(command, check=True, env=environment(), capture_output=True)
    return out


def check_end(run_dir: Path) -> None:
    """The run took every step once, learned, and every group is in one place of the ledger."""
    steps = rows_in(run_dir / "metrics.jsonl")
    assert [step["step"] for step in steps] == list(range(1, NUM_STEPS + 1))
    rewards = [step["reward_mean"] for step in steps]
    assert sum(rewards[-4:]) / 4 > sum(rewards[:3]) / 3, rewards
    ledger = Ledger.model_validate_json((run_dir / "ledger.json").read_text())
    assert ledger.trained == NUM_STEPS * 32
    assert is_closed(ledger)
