"""The command `atropos-engine`: its flags, and its error without the extra `engine`.

Does not import torch or transformers, so that `--help` and flag errors are immediate; `server.run` serves.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

from atroposlib.config import parse_flags
from atroposlib.errors import cli_boundary, require


class EngineConfig(BaseModel):
    model_config = ConfigDict(use_attribute_docstrings=True)

    model: str
    """Directory or Hugging Face name of a transformers causal LM."""
    host: str = "127.0.0.1"
    port: int = Field(default=9001, ge=0, le=65535)
    """0 chooses a free port."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Type of weights and cache; auto: float32 on the CPU, bfloat16 on CUDA."""
    max_num_seqs: int = Field(default=256, ge=1)
    """Sequences decoded together."""
    max_model_len: int | None = Field(default=None, ge=2)
    """Context length in tokens; None: the model's."""
    threads: int | None = Field(default=None, ge=1)
    """CPU threads of torch. None: half the cores, 1 on machines with up to 2."""
    seed: int = 0
    served_model_name: str | None = None
    """Name in the API; None: the value of --model."""
    weight_version: str = "0"
    """Label of the weights loaded at start."""


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
