"""`bridges/reload.py` against small real servers in the place of vLLM and SGLang."""

import json
import logging
import threading
from pathlib import Path
from typing import Any

import pytest

from atroposlib.errors import EngineError, EngineProtocolError, EngineRejected, EngineUnavailable
from example_trainer.bridges.control import Control
from example_trainer.bridges.engines import identify
from example_trainer.bridges.running import ReloadBridge
from tests.trainer.helpers_engine import RecordedEngine, recorded_engine
from tests.trainer.helpers_run import make_checkpoint

VLLM = [
    "/pause?mode=keep",
    "/collective_rpc",
    "/reset_prefix_cache?reset_running_requests=true",
    "/update_weight_version",
    "/resume",
]
SGLANG = [
    "/pause_generation",
    "/update_weights_from_disk",
    "/flush_cache",
    "/update_weight_version",
    "/continue_generation",
]


def bridge_to(*engines: RecordedEngine, timeout_s: float = 5.0) -> ReloadBridge:
    urls = [engine.url for engine in engines]
    return ReloadBridge(urls=urls, timeout_s=timeout_s)


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    return make_checkpoint(tmp_path / "version_1")


def test_start_loads_the_initial_model_as_version_0(checkpoint: Path) -> None:
    with recorded_engine() as engine:
        bridge_to(engine).start(checkpoint, 0)
    assert engine.calls == ["/health", *VLLM]
    assert (engine.weights, engine.versions) == ([str(checkpoint)], ["0"])


def test_publish_reaches_engines_of_both_kinds_frozen(checkpoint: Path) -> None:
    with recorded_engine() as one, recorded_engine("sglang") as two, recorded_engine() as three:
        assert bridge_to(one, two, three).publish(checkpoint, 7) == 7
    assert [one.calls, two.calls, three.calls] == [VLLM, SGLANG, VLLM]
    for engine in (one, two, three):
        assert set(engine.weights) == {str(checkpoint)}
        assert set(engine.versions) == {"7"}


@pytest.mark.parametrize(("kind", "first"), [("vllm", "default"), ("vllm", "0"), ("sglang", "x")])
def test_an_engine_that_was_restarted_gets_the_published_weights_again(
    kind: str, first: str, checkpoint: Path
) -> None:
    """`atropos-engine` starts with version "0", vLLM and SGLang with "default"."""
    with recorded_engine(kind) as restarted, recorded_engine() as newer, recorded_engine() as gone:
        bridge = bridge_to(gone, restarted, newer)
        bridge.publish(checkpoint, 7)
        restarted.restart_as(first)
        newer.restart_as("8")  # by the trainer that resumed this run
        gone.faults["/health"] = (503, b"asleep")
        for _ in range(2):
            with pytest.raises(EngineUnavailable, match=f"{gone.url}.*asleep"):
                bridge.check()
        assert (restarted.weights, restarted.versions[-1]) == ([str(checkpoint)], "7")
        assert newer.weights == []


def test_sglang_is_never_asked_to_flush_inside_an_update(checkpoint: Path) -> None:
    with recorded_engine("sglang") as engine:
        bridge_to(engine).publish(checkpoint, 7)
    update = dict(engine.bodies)["/update_weights_from_disk"]
    assert update["flush_cache"] is False
    assert dict(engine.bodies)["/pause_generation"] == {"mode": "retract"}


def test_sglang_that_cannot_flush_its_cache_is_used_and_told_about_once(
    checkpoint: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with recorded_engine("sglang") as engine:
        engine.faults["/flush_cache"] = (400, b"Flush cache failed.")
        bridge = bridge_to(engine)
        for version in (1, 2):
            bridge.publish(checkpoint, version)
    assert engine.versions[-1] == "2"
    assert sum("of older weights" in r.message for r in caplog.records) == 1


def test_sglang_is_known_by_its_routes_where_the_list_of_routes_is_hidden(checkpoint: Path) -> None:
    with recorded_engine("sglang") as engine:
        engine.faults["/openapi.json"] = (404, b"Not Found")
        bridge_to(engine).publish(checkpoint, 1)
    assert engine.calls == SGLANG
    with recorded_engine() as engine:
        engine.faults["/openapi.json"] = (404, b"Not Found")
        bridge_to(engine).publish(checkpoint, 1)
    assert engine.calls[-len(VLLM) :] == VLLM


def test_a_checkpoint_that_is_not_complete_reaches_no_engine(tmp_path: Path) -> None:
    """vLLM does not survive a reload that fails."""
    index = {"weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors"}}
    partial = tmp_path / "partial"
    partial.mkdir()
    (partial / "config.json").write_text("{}")
    with recorded_engine() as engine:
        bridge = bridge_to(engine)
        with pytest.raises(EngineError, match=r"nothing cannot be read: it lacks config\.json"):
            bridge.publish(tmp_path / "nothing", 1)
        with pytest.raises(EngineError, match=r"lacks model\.safetensors"):
            bridge.publish(partial, 1)
        (partial / "model.safetensors.index.json").write_text(json.dumps(index))
        (partial / "model-1.safetensors").write_bytes(b"half")
        with pytest.raises(EngineError, match=r"lacks model-2\.safetensors"):
            bridge.publish(partial, 1)
    assert engine.calls == []


def test_tied_embeddings_are_not_reloaded_by_vllm_on_the_cpu(tmp_path: Path) -> None:
    """It would answer 200 and keep the old output layer."""
    tied = make_checkpoint(tmp_path / "tied", tie_word_embeddings=True)
    with recorded_engine() as engine:
        bridge_to(engine).publish(tied, 1)
        engine.device = "cpu"
        with pytest.raises(EngineRejected, match="tied embeddings.*--bridge restart"):
            bridge_to(engine).publish(tied, 2)
    assert engine.weights == [str(tied)]
    assert engine.calls[-1] == "/resume"


FAILS, NO_ROUTE = (500, b"shape mismatch"), (404, b"Not Found")
NO_SUCCESS = (200, b'{"success":false,"message":"shape"}')
OTHER = (200, b'{"weight_version": "3"}')


@pytest.mark.parametrize(
    ("faults", "error", "words", "num_calls"),
    [
        ({"/collective_rpc": FAILS}, EngineUnavailable, "/collective_rpc.* 500: shape mismatch", 2),
        ({"/collective_rpc": FAILS, "/resume": FAILS}, EngineUnavailable, "/collective_rpc", 2),
        ({"/reset_prefix_cache": NO_SUCCESS}, EngineProtocolError, "older weights", 3),
        ({"/pause": NO_ROUTE}, EngineRejected, "VLLM_SERVER_DEV_MODE=1", 0),
        ({"/weight_info": OTHER}, EngineProtocolError, "version '3' after version 4 was loaded", 4),
        ({"/update_weights_from_disk": NO_SUCCESS}, EngineProtocolError, "shape", 2),
    ],
    ids=str,
)
def test_a_failed_publish_names_its_cause_and_resumes_an_engine_that_was_paused(
    faults: dict[str, Any], error: type[Exception], words: str, num_calls: int, checkpoint: Path
) -> None:
    kind, calls = ("vllm", VLLM) if faults.keys().isdisjoint(SGLANG) else ("sglang", SGLANG)
    with recorded_engine(kind) as engine:
        engine.faults = faults
        with pytest.raises(error, match=f"{engine.url}.*{words}"):
            bridge_to(engine).publish(checkpoint, 4)
    assert engine.calls == [*calls[:num_calls], calls[-1] if num_calls else calls[0]]


def test_an_engine_without_weight_versions_is_used_and_told_about_once(
    checkpoint: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    with recorded_engine() as engine:
        engine.faults["/update_weight_version"] = (404, b"Not Found")
        bridge = bridge_to(engine)
        for version in (1, 2):
            bridge.publish(checkpoint, version)
    assert engine.calls == [*VLLM, *VLLM[:3], "/resume"]
    assert sum("keeps no weight version" in r.message for r in caplog.records) == 1


def test_a_missing_engine_is_named_after_the_timeout(checkpoint: Path) -> None:
    with recorded_engine() as engine:
        pass  # gone, and its port with it
    with pytest.raises(
        EngineUnavailable, match=rf"{engine.url}: /health got no answer.*--engine_url"
    ):
        bridge_to(engine, timeout_s=0.3).start(checkpoint, 0)


def test_a_run_that_is_to_stop_waits_for_no_engine(
    checkpoint: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """What kills the trainer some seconds after a signal would come before its last checkpoint."""
    stopping = threading.Event()
    with recorded_engine() as gone:
        pass
    with recorded_engine() as engine:
        urls = [gone.url, engine.url]
        bridge = ReloadBridge(urls=urls, retry_s=600.0, is_stopping=stopping.is_set)
        threading.Timer(0.3, stopping.set).start()
        bridge.publish(checkpoint, 1)
        assert engine.versions == ["1"]
    assert f"stopping without waiting for an engine: engine {gone.url}" in caplog.text


def test_one_engine_of_several_that_fails_is_named_and_the_others_have_the_weights(
    checkpoint: Path,
) -> None:
    with recorded_engine() as one, recorded_engine() as two:
        one.faults["/collective_rpc"] = (500, b"out of memory")
        with pytest.raises(EngineUnavailable, match=rf"{one.url}.*out of memory"):
            bridge_to(one, two).publish(checkpoint, 1)
    assert (one.versions, two.versions) == ([], ["1"])


def test_keys_and_values_outside_of_the_engine_are_forgotten_too() -> None:
    """Asked to where there are none, vLLM answers with a failure."""
    for outside, expected in (
        (None, VLLM[2]),
        ({"kv_connector": "x"}, f"{VLLM[2]}&reset_external=true"),
    ):
        with recorded_engine() as engine:
            config = {"vllm_config": {"kv_transfer_config": outside}}
            engine.faults["/server_info"] = (200, json.dumps(config).encode())
            control = Control(engine.url, timeout_s=5.0)
            identify(control).forget_cache()
            control.close()
            assert engine.calls == [expected]
