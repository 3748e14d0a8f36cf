"""What tests of the trainer share: a tiny model, a fake engine, and a hub."""

from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

from atroposlib.api.server import create_app
from tests.api.helpers_api import serving
from tests.tiny_model import make_tiny_model
from tests.trainer.helpers_engine import RecordedEngine, recorded_engine
from tests.trainer.helpers_run import Configure, config_for


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(autouse=True)
def _short_polls(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ask an engine that starts more often than real ones, which take seconds."""
    monkeypatch.setattr("example_trainer.vllm_process.POLL_INTERVAL_S", 0.05)


@pytest.fixture
def engine() -> Iterator[RecordedEngine]:
    with recorded_engine() as engine:
        yield engine


@pytest.fixture
def hub_url() -> Iterator[str]:
    with serving(create_app()) as url:
        yield url


@pytest.fixture
def configure(model_dir: Path, tmp_path: Path, hub_url: str, engine: RecordedEngine) -> Configure:
    """Make the configuration of a run with this test's hub and engine."""
    return partial(config_for, model_dir, tmp_path, hub_url=hub_url, engine_url=engine.url)
