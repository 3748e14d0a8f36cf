"""`atropos-grpo-run`: one engine and the trainer in one command; the engine ends with the trainer.

The engine is started once and takes new weights in place. With `--bridge restart` this is `atropos-grpo`, which starts
its engine itself.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path

from atroposlib.config import parse_flags
from atroposlib.errors import ConfigError, cli_boundary
from example_trainer.config import TrainerConfig
from example_trainer.grpo import start_command


def main(argv: Sequence[str] | None = None) -> int:
    """Run engine and trainer and return the trainer's exit code."""
    return cli_boundary(lambda: _run(argv))


def _run(argv: Sequence[str] | None) -> None:
    config = parse_flags(
        TrainerConfig,
        argv,
        prog="atropos-grpo-run",
        description="Start an engine on the model, train, and stop the engine.",
    )
    if not {"bridge", "weight_bridge_mode"} & config.model_fields_set:
        config = config.model_copy(update={"bridge": "reload"})
    if config.bridge == "reload" and config.engine_url:
        raise ConfigError(
            "--engine_url: atropos-grpo-run starts its own engine; use atropos-grpo for running ones"
        )
    start_command()
    from example_trainer.bridges import make_engine
    from example_trainer.model import check_model_path
    from example_trainer.training import train

    check_model_path(config.model_name)
    reloads = config.bridge == "reload"
    with make_engine(config, Path(config.model_name)) if reloads else nullcontext():
        train(config)


if __name__ == "__main__":
    sys.exit(main())
