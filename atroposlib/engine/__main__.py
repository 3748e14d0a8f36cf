"""The command `atropos-engine` (`python -m atroposlib.engine`), and its error without the extra `engine`.

Does not import torch or transformers, so that `--help` and flag errors are immediate; `server.run` serves.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

from atroposlib.config import parse_flags
from atroposlib.engine.config import EngineConfig
from atroposlib.errors import cli_boundary, require


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point: serve until a signal; 2 for a wrong flag, 1 without the extra."""
    logging.basicConfig(level=logging.INFO, format="%(levelname)s %(name)s: %(message)s")

    def command() -> int:
        config = parse_flags(
            EngineConfig,
            argv,
            prog="atropos-engine",
            description="Serve a transformers causal LM over vLLM's routes.",
        )
        require("torch", extra="engine")
        from atroposlib.engine.server import run

        return run(config)

    return cli_boundary(command)


if __name__ == "__main__":
    raise SystemExit(main())
