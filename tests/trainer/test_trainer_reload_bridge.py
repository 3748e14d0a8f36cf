"""`bridges/reload.py` against a small real server in the engine's place."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from atroposlib.errors import EngineProtocolError, EngineRejected, EngineUnavailable
from example_trainer.bridges.reload import ReloadBridge
from tests.trainer.helpers_reload import FakeEngine, fake_engine

UPDATE = [
    "/pause?mode=keep",
    "/collective_rpc",
    "/reset_prefix_cache?reset_running_requests=true",
    "/update_weight_version",
    "/resume",
]


def bridge_to(*engines: FakeEngine, timeout_s: float = 5.0) -> ReloadBridge:
    urls = [engine.url for engine in engines]
    return ReloadBridge(urls=urls, timeout_s=timeout_s)


def test_start_loads_the_initial_model_as_version_0(tmp_path: Path) -> None:
    with fake_engine() as engine:
        bridge_to(engine).start(tmp_path, 0)
    assert engine.calls == ["/health", *UPDATE]
    assert (engine.weights, engine.versions) == ([str(tmp_path)], ["0"])


def test_publish_reaches_every_engine_frozen(tmp_path: Path) -> None:
    with fake_engine() as one, fake_engine() as two:
        bridge_to(one, two).publish(tmp_path / "v7", 7)
    for engine in (one, two):
        assert engine.calls == UPDATE
        assert (engine.weights, engine.versions) == ([str(tmp_path / "v7")], ["7"])


def test_a_failed_reload_still_resumes_and_names_engine_route_and_answer(tmp_path: Path) -> None:
    with fake_engine() as engine:
        engine.faults["/collective_rpc"] = (500, b"shape mismatch")
        with pytest.raises(
            EngineUnavailable, match=r"/collective_rpc answered 500: shape mismatch"
        ):
            bridge_to(engine).publish(tmp_path, 1)
    assert engine.calls == [UPDATE[0], UPDATE[1], "/resume"]


def test_a_cache_of_older_weights_is_an_error(tmp_path: Path) -> None:
    with fake_engine() as engine:
        engine.faults["/reset_prefix_cache"] = (200, b'{"success": false}')
        with pytest.raises(EngineProtocolError, match="older weights"):
            bridge_to(engine).publish(tmp_path, 1)
    assert engine.calls[-1] == "/resume"


def test_missing_development_routes_name_the_switch(tmp_path: Path) -> None:
    with fake_engine() as engine:
        engine.faults["/pause"] = (404, b"Not Found")
        with pytest.raises(EngineRejected, match="VLLM_SERVER_DEV_MODE=1"):
            bridge_to(engine).publish(tmp_path, 1)
    assert engine.weights == []


def test_an_engine_without_weight_versions_is_used_and_told_about_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    with fake_engine() as engine:
        engine.faults["/update_weight_version"] = (404, b"Not Found")
        bridge = bridge_to(engine)
        for version in (1, 2):
            bridge.publish(tmp_path, version)
    assert engine.calls == [*UPDATE, *UPDATE[:3], "/resume"]
    assert sum("keeps no weight version" in r.message for r in caplog.records) == 1


def test_a_missing_engine_is_named_after_the_timeout(tmp_path: Path) -> None:
    with fake_engine() as engine:
        pass  # gone, and its port with it
    with pytest.raises(
        EngineUnavailable, match=rf"{engine.url}: /health got no answer.*--engine_url"
    ):
        bridge_to(engine, timeout_s=0.3).start(tmp_path, 0)
