"""A real vLLM for the tests of this directory, and an oracle for what it samples."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import pytest
import torch
from transformers import AutoModelForCausalLM

from example_trainer.config import TrainerConfig
from example_trainer.vllm_process import EngineProcess, make_engine, vllm_environment

MAX_MODEL_LEN = 128
STARTUP_TIMEOUT_S = 240.0
MAX_GAP = 1e-3
"""Nats between an engine's logprob and transformers' in float32."""


class Sample(NamedTuple):
    """One completion: ids and raw logprobs of what was sampled after `prompt`."""

    prompt: list[int]
    tokens: list[int]
    logprobs: list[float]


def vllm_python() -> Path:
    """Return the Python that has vLLM, or skip saying what was not tested."""
    path = os.environ.get("ATROPOS_VLLM_PYTHON")
    if not path:
        pytest.skip(
            "REAL vLLM WAS NOT TESTED: set ATROPOS_VLLM_PYTHON to the Python of the environment that "
            ".ci/vllm_env.sh makes"
        )
    assert Path(path).exists(), f"ATROPOS_VLLM_PYTHON={path}: no such file"
    return Path(path)


def vllm_engine(
    model: Path,
    *,
    port: int,
    log_path: Path,
    max_model_len: int = MAX_MODEL_LEN,
    extra_args: Sequence[str] = (),
    env: Mapping[str, str] | None = None,
    **settings: Any,
) -> EngineProcess:
    """Return vLLM's CPU build on `model`, not yet started, as a trainer with these settings starts it."""
    config = TrainerConfig(
        model_name=str(model),
        device="cpu",
        vllm_python=str(vllm_python()),
        vllm_port=port,
        max_model_len=max_model_len,
        logprobs_mode="raw",
        **settings,
    )
    offline = {"HF_HUB_OFFLINE": "1"}
    return EngineProcess(
        make_engine(config, model, extra_args=extra_args).argv,
        url=f"http://127.0.0.1:{port}",
        env=vllm_environment(cpu=True) | offline | dict(env or {}),
        log_path=log_path,
        startup_timeout_s=STARTUP_TIMEOUT_S,
    )


def sample(
    url: str,
    model_name: str,
    prompt: list[int],
    *,
    num_samples: int,
    max_tokens: int,
    ignore_eos: bool = False,
) -> list[Sample]:
    """Sample from an engine, token ids in and out."""
    answer = httpx.post(
        f"{url}/v1/completions",
        json={
            "model": model_name,
            "prompt": prompt,
            "n": num_samples,
            "max_tokens": max_tokens,
            "temperature": 1.0,
            "ignore_eos": ignore_eos,
            "logprobs": 0,
            "return_token_ids": True,
        },
        timeout=300,
        trust_env=False,
    )
    assert answer.status_code == 200, answer.text
    return [
        Sample(prompt, choice["token_ids"], choice["logprobs"]["token_logprobs"])
        for choice in answer.json()["choices"]
    ]


def in_float32(model_dir: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)


def logprobs_of(model: Any, tokens: list[int]) -> torch.Tensor:
    """[T, V] the model's log-softmax for each position but the first, which has none."""
    with torch.inference_mode():
        logits_TV = model(torch.tensor([tokens])).logits[0, :-1]
    logprobs: torch.Tensor = logits_TV.log_softmax(-1)
    return logprobs


def gaps_per_token(found: Sample, model: Any) -> torch.Tensor:
    """Return |engine's logprob - transformers' logprob of the same token| in nats."""
    own = logprobs_of(model, found.prompt + found.tokens)[len(found.prompt) - 1 :]
    own = own.gather(1, torch.tensor(found.tokens)[:, None])[:, 0]
    return (own - torch.tensor(found.logprobs)).abs()


def largest_gap(samples: list[Sample], model_dir: Path) -> float:
    model = in_float32(model_dir)
    return float(torch.cat([gaps_per_token(found, model) for found in samples]).max())
