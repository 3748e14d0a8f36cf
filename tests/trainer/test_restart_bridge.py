"""`bridges/restart.py` with processes of the scripted engine."""

import logging
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest

from atroposlib.errors import EngineError
from example_trainer.bridges.restart import RestartBridge
from example_trainer.vllm_process import EngineProcess
from tests.builders.programs import wait_until
from tests.processes import free_port
from tests.trainer.helpers_run import make_checkpoint

WATCH_S = 0.05
NEVER_HEALTHY = ["--script", '{"faults": [{"kind": "status", "path": "/health"}]}']
NO_VERSIONS = ["--without=/update_weight_version"]


def dies_of(reason: str) -> list[str]:
    """Return flags with which an engine ends and has the reason in its log."""
    return [f"--port={reason}"]


class Engines:
    """Makes engines on one port and remembers them; `options` by the model's name, else for all."""

    def __init__(self, directory: Path) -> None:
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.directory = directory
        self.options: list[str] = []
        self.options_of: dict[str, list[str]] = {}
        self.made: list[EngineProcess] = []

    def __call__(self, model: Path) -> EngineProcess:
        argv = [sys.executable, "-m", "atroposlib.inference.scripted_engine", f"--port={self.port}"]
        engine = EngineProcess(
            [*argv, f"--model={model}", *self.options_of.get(model.name, self.options)],
            url=self.url,
            log_path=self.directory / f"engine_{model.name}.log",
        )
        self.made.append(engine)
        return engine

    def served(self) -> tuple[str, str] | None:
        """Return the model and the version of the engine that runs; None if none answers."""
        try:
            model = httpx.get(f"{self.url}/v1/models").json()["data"][0]["id"]
            return model, httpx.get(f"{self.url}/weight_info").json()["weight_version"]
        except httpx.TransportError:
            return None

    def kill_last(self) -> None:
        pid = self.made[-1].pid
        assert pid is not None
        os.kill(pid, signal.SIGKILL)


@pytest.fixture
def engines(tmp_path: Path) -> Iterator[Engines]:
    engines = Engines(tmp_path)
    yield engines
    for engine in engines.made:
        engine.stop()


@pytest.fixture
def make_version(tmp_path: Path) -> Callable[[int], Path]:
    return lambda version: make_checkpoint(tmp_path / f"version_{version}")


@pytest.fixture
def base(make_version: Callable[[int], Path]) -> Path:
    return make_version(0)


@pytest.fixture
def checkpoint(make_version: Callable[[int], Path]) -> Path:
    return make_version(1)


@pytest.fixture
def bridge(engines: Engines) -> Iterator[RestartBridge]:
    bridge = RestartBridge(start_engine=engines, watch_interval_s=WATCH_S)
    yield bridge
    bridge.close()


def test_each_publish_replaces_the_engine_and_names_the_version(
    engines: Engines, bridge: RestartBridge, base: Path, checkpoint: Path
) -> None:
    bridge.start(base, 0)
    assert engines.served() == (str(base), "0")
    assert bridge.publish(checkpoint, 1) == 1
    assert engines.served() == (str(checkpoint), "1")
    assert [engine.pid is not None for engine in engines.made] == [False, True]
    bridge.close()
    assert [engine.pid is not None for engine in engines.made] == [False, False]
    bridge.close()  # harmless


def test_refused_version_is_an_error(engines: Engines, base: Path) -> None:
    refuses = '{"faults": [{"kind": "status", "path": "/update_weight_version", "status": 400}]}'
    engines.options = ["--script", refuses]
    bridge = RestartBridge(start_engine=engines)
    with pytest.raises(EngineError, match="answered 400.*scripted failure"):
        bridge.start(base, 0)
    bridge.close()
    assert engines.made[0].pid is None


def test_checkpoint_without_a_model_leaves_the_old_engine_running(
    engines: Engines, bridge: RestartBridge, base: Path, tmp_path: Path
) -> None:
    bridge.start(base, 0)
    pid = engines.made[0].pid
    with pytest.raises(EngineError, match=r"lacks config\.json"):
        bridge.publish(tmp_path / "nothing", 1)
    assert engines.served() == (str(base), "0")
    assert [engine.pid for engine in engines.made] == [pid]


@pytest.mark.drill
def test_a_version_that_does_not_come_up_is_rolled_back_and_a_second_in_a_row_is_an_error(
    engines: Engines,
    bridge: RestartBridge,
    base: Path,
    make_version: Callable[[int], Path],
    caplog: pytest.LogCaptureFixture,
) -> None:
    """These engines have no route for versions, as other servers have none."""
    engines.options = NO_VERSIONS
    for version in (1, 3, 4):
        engines.options_of[f"version_{version}"] = dies_of(f"out of memory {version}")
    bridge.start(base, 0)
    assert bridge.publish(make_version(1), 1) == 0
    assert engines.served() == (str(base), "default")
    assert "version 0 is served again" in caplog.text
    assert "out of memory 1" in caplog.text
    last = make_version(2)
    assert bridge.publish(last, 2) == 2
    assert engines.served() == (str(last), "default")
    assert bridge.publish(make_version(3), 3) == 2
    with pytest.raises(EngineError, match="out of memory 4"):
        bridge.publish(make_version(4), 4)


@pytest.mark.drill
def test_an_engine_that_is_killed_is_started_again_on_the_version_it_served(
    engines: Engines, bridge: RestartBridge, base: Path, checkpoint: Path
) -> None:
    bridge.start(base, 0)
    bridge.publish(checkpoint, 1)
    engines.kill_last()
    wait_until(lambda: len(engines.made) == 3 and engines.served() == (str(checkpoint), "1"))
    engines.kill_last()
    wait_until(lambda: len(engines.made) == 4)
    assert bridge.publish(checkpoint, 2) == 2  # waits for the engine that is being started
    assert engines.served() == (str(checkpoint), "2")


@pytest.mark.parametrize(
    "reason",
    [pytest.param("the disk is full", marks=pytest.mark.drill), "Not a directory"],
)
def test_an_engine_that_does_not_come_back_ends_the_run(
    engines: Engines, base: Path, caplog: pytest.LogCaptureFixture, reason: str
) -> None:
    """The trainer would wait for ever for data that cannot come: it is asked to stop, and then told why."""
    caplog.set_level(logging.ERROR)
    asked = threading.Event()
    before = signal.signal(signal.SIGTERM, lambda number, frame: asked.set())
    try:
        bridge = RestartBridge(start_engine=engines, watch_interval_s=WATCH_S)
        bridge.start(base, 0)
        if reason == "Not a directory":  # for its log
            engines.directory = base / "config.json" / "logs"
        engines.options = dies_of(reason)
        engines.kill_last()
        wait_until(asked.is_set)
        with pytest.raises(EngineError, match=f"(?s)died and could not be restarted.*{reason}"):
            bridge.close()
        bridge.close()
    finally:
        signal.signal(signal.SIGTERM, before)


def test_a_run_that_is_to_stop_waits_for_no_engine(
    engines: Engines, base: Path, checkpoint: Path
) -> None:
    """What kills the trainer some seconds after a signal would come before its last checkpoint."""
    stopping = threading.Event()
    bridge = RestartBridge(start_engine=engines, is_stopping=stopping.is_set)
    bridge.start(base, 0)
    engines.options = NEVER_HEALTHY
    threading.Timer(0.3, stopping.set).start()
    assert bridge.publish(checkpoint, 1) == 0
    bridge.close()
    assert [engine.pid for engine in engines.made] == [None, None]


def test_closing_ends_an_engine_that_is_just_being_started_again(
    engines: Engines, base: Path
) -> None:
    bridge = RestartBridge(start_engine=engines, watch_interval_s=WATCH_S)
    bridge.start(base, 0)
    engines.options = NEVER_HEALTHY
    engines.kill_last()
    wait_until(lambda: len(engines.made) == 2)
    bridge.close()
    assert [engine.pid for engine in engines.made] == [None, None]
