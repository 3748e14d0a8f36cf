"""`atropos-grpo`: train a model on groups from the hub; `atropos-grpo plot`: plot a run's metrics."""

from __future__ import annotations

import logging
import signal
import subprocess
import sys
from collections.abc import Sequence
from types import FrameType
from typing import NoReturn

from atroposlib.config import parse_flags
from atroposlib.errors import cli_boundary, require
from example_trainer.config import TrainerConfig

DESCRIPTION = "GRPO trainer: batches from run-api, new weights to the engines after every step."


def main(argv: Sequence[str] | None = None) -> int:
    """Run the trainer and return its exit code: 0, 1 (failed), 2 (configuration), 130 or 143 (stopped)."""
    words = sys.argv[1:] if argv is None else list(argv)
    if words[:1] == ["plot"]:
        return subprocess.call([sys.executable, "-m", "atroposlib.cli.plot_run", *words[1:]])
    return cli_boundary(lambda: _run(words))


def start_command() -> None:
    """Set up logging and SIGTERM handling, and raise MissingDependency early."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(levelname)s %(message)s")
    logging.getLogger("httpx").setLevel(logging.WARNING)
    signal.signal(signal.SIGTERM, _stop)
    for package in ("torch", "transformers", "safetensors"):
        require(package, extra="trainer")
    require("transformers.utils.logging", extra="trainer").disable_progress_bar()


def _run(argv: Sequence[str]) -> None:
    config = parse_flags(TrainerConfig, argv, prog="atropos-grpo", description=DESCRIPTION)
    start_command()
    if config.plan:
        from example_trainer.memory import plan

        print(plan(config))  # noqa: T201
        return
    from example_trainer.training import train

    train(config)


def _stop(number: int, frame: FrameType | None) -> NoReturn:
    """Unwind as Ctrl-C does, so that the engine is stopped; ignore further signals meanwhile."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    raise SystemExit(128 + number)


if __name__ == "__main__":
    sys.exit(main())
