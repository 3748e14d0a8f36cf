"""The settings of the engine: the flags of `atropos-engine`. Does not import torch."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field


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
