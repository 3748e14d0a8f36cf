"""Two real vLLMs that tests share: a start takes 30 to 70 s."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests.processes import free_port
from tests.tiny_model import make_tiny_model
from tests.vllm.helpers_vllm import in_float32, vllm_engine, vllm_python
from tests.vllm.taught_model import MAX_LENGTH, make_taught_model


class ServedRequest(NamedTuple):
    """A running vLLM and the checkpoint it serves, under its path as the name."""

    url: str
    """Without /v1."""
    model: Path


@pytest.fixture(scope="session")
def served_model(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServedRequest]:
    """A vLLM that serves `tests.vllm.taught_model`; its weights never change.

    It offers the token routes, so servers that look for them use them; test_vllm_loop.py runs without.
    """
    vllm_python()
    directory = tmp_path_factory.mktemp("served")
    model = make_taught_model(directory / "model")
    engine = vllm_engine(
        model,
        port=free_port(),
        log_path=directory / "engine.log",
        max_model_len=MAX_LENGTH,
        extra_args=["--enable-scale-out"],
    )
    with engine:
        yield ServedRequest(engine.url, model)


@pytest.fixture(scope="session")
def model(served_model: ServedRequest) -> Any:
    """The weights of `served_model` in transformers."""
    return in_float32(served_model.model)


@pytest.fixture(scope="session")
def reloadable_model(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServedRequest]:
    """A vLLM on `tests.tiny_model` whose weights each test replaces; a trainer that starts loads its own."""
    directory = tmp_path_factory.mktemp("reloadable")
    model = make_tiny_model(directory / "model")
    with vllm_engine(model, port=free_port(), log_path=directory / "engine.log") as engine:
        yield ServedRequest(engine.url, model)
