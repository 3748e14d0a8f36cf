"""`bridges/restart.py` with a small real server in the engine's place."""

from __future__ import annotations

import socket
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from atroposlib.errors import EngineError
from example_trainer.bridges.restart import RestartBridge
from example_trainer.vllm_process import EngineProcess

FAKE_ENGINE = Path(__file__).with_name("fake_engine.py")


class Engines:
    """Makes fake engines on one port and remembers them."""

    def __init__(self, directory: Path) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = int(probe.getsockname()[1])
        self.url = f"http://127.0.0.1:{self.port}"
        self.directory = directory
        self.options: list[str] = []
        self.made: list[EngineProcess] = []

    def __call__(self, model: Path, version: int) -> EngineProcess:
        argv = [sys.executable, str(FAKE_ENGINE), str(self.port), "--model", str(model)]
        engine = EngineProcess(
            [*argv, *self.options], url=self.url, log_path=self.directory / f"engine_{version}.log"
        )
        self.made.append(engine)
        return engine

    def served_model(self) -> str:
        return str(httpx.get(f"{self.url}/health").json()["model"])


@pytest.fixture
def engines(tmp_path: Path) -> Iterator[Engines]:
    engines = Engines(tmp_path)
    yield engines
    for engine in engines.made:
        engine.stop()


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    path = tmp_path / "step_1"
    path.mkdir()
    (path / "config.json").write_text("{}")
    return path


def test_each_publish_replaces_the_engine_and_names_the_version(
    engines: Engines, checkpoint: Path, tmp_path: Path
) -> None:
    engines.options = ["--versions", str(tmp_path / "versions")]
    bridge = RestartBridge(start_engine=engines)
    bridge.start(Path("org/base"), 0)
    assert engines.served_model() == "org/base"
    bridge.publish(checkpoint, 1)
    assert engines.served_model() == str(checkpoint)
    assert (tmp_path / "versions").read_text().splitlines() == ["org/base 0", f"{checkpoint} 1"]
    assert [engine.pid is not None for engine in engines.made] == [False, True]
    bridge.close()
    assert [engine.pid is not None for engine in engines.made] == [False, False]
    bridge.close()  # harmless


def test_engine_without_versions_is_used_all_the_same(engines: Engines, checkpoint: Path) -> None:
    bridge = RestartBridge(start_engine=engines)
    bridge.start(Path("base"), 0)
    bridge.publish(checkpoint, 1)
    assert engines.served_model() == str(checkpoint)
    bridge.close()


def test_refused_version_is_an_error(engines: Engines) -> None:
    engines.options = ["--versions", "refuse"]
    bridge = RestartBridge(start_engine=engines)
    with pytest.raises(EngineError, match="answered 400.*new_version is missing"):
        bridge.start(Path("base"), 0)
    bridge.close()
    assert engines.made[0].pid is None


def test_checkpoint_without_a_model_leaves_the_old_engine_running(
    engines: Engines, tmp_path: Path
) -> None:
    bridge = RestartBridge(start_engine=engines)
    bridge.start(Path("base"), 0)
    with pytest.raises(EngineError, match="holds no config.json"):
        bridge.publish(tmp_path / "nothing", 1)
    assert engines.served_model() == "base"
    bridge.close()


def test_engine_that_does_not_come_back_is_an_error_with_its_log(
    engines: Engines, checkpoint: Path
) -> None:
    bridge = RestartBridge(start_engine=engines)
    bridge.start(Path("base"), 0)
    engines.options = ["--die", "out of memory"]
    with pytest.raises(EngineError, match="out of memory"):
        bridge.publish(checkpoint, 1)
    bridge.close()


def test_engine_that_is_already_started_is_taken_as_it_is(engines: Engines) -> None:
    def started(model: Path, version: int) -> EngineProcess:
        engine = engines(model, version)
        engine.start()
        return engine

    bridge = RestartBridge(start_engine=started)
    bridge.start(Path("base"), 0)
    assert engines.served_model() == "base"
    bridge.close()
