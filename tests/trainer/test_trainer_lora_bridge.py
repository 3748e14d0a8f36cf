"""`bridges/lora.py` against small real servers in the place of vLLM, SGLang and the original's server."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from atroposlib.errors import EngineProtocolError, EngineRejected, EngineUnavailable
from example_trainer.bridges import CheckpointBridge
from example_trainer.bridges.running import LoraBridge
from example_trainer.config import TrainerConfig
from example_trainer.model import Policy, load_policy
from example_trainer.weights import WeightsDirectory
from tests.trainer.helpers_engine import RecordedEngine, recorded_engine

SWAP = ["/v1/unload_lora_adapter", "/v1/load_lora_adapter", "/update_weight_version"]


@pytest.fixture(scope="module")
def policy(model_dir: Path) -> Policy:
    return policy_of(model_dir)


def policy_of(model_dir: Path) -> Policy:
    return load_policy(TrainerConfig(model_name=str(model_dir), device="cpu", lora=True))


@contextmanager
def bridge_to(
    policy: Policy, directory: Path, *engines: RecordedEngine
) -> Iterator[CheckpointBridge]:
    config = TrainerConfig(model_name="m", bridge="lora", weights_dir=directory)
    urls = [engine.url for engine in engines]
    with WeightsDirectory(config, policy) as weights:
        engines_of = LoraBridge(urls=urls, lora_name="policy", timeout_s=5.0, api_key="secret")
        bridge = CheckpointBridge(partial(weights.take, merged=False), engines_of)
        yield bridge
        bridge.close()


def test_adapters_are_on_every_linear_layer_unless_told_otherwise(policy: Policy) -> None:
    names = [name for name, _ in policy.model.named_parameters() if ".lora_A." in name]
    assert {name.split(".")[-4] for name in names} == {
        *("q_proj", "k_proj", "v_proj", "o_proj"),
        *("gate_proj", "up_proj", "down_proj"),
    }


def test_each_version_is_served_from_a_directory_of_its_own(policy: Policy, tmp_path: Path) -> None:
    """vLLM keys its prefix cache by the path: the same one again would keep keys and values of the old adapter."""
    with recorded_engine() as engine, bridge_to(policy, tmp_path, engine) as bridge:
        bridge.start(policy, 0)
        assert engine.adapters == {"policy": str(tmp_path / "adapter_0")}
        assert bridge.begin(policy, 1)() == 1
        assert engine.adapters == {"policy": str(tmp_path / "adapter_1")}
    assert engine.calls == ["/health", *SWAP, *SWAP]
    assert engine.versions == ["0", "1"]
    files = {path.name for path in (tmp_path / "adapter_1").iterdir()}
    assert {"adapter_config.json", "adapter_model.safetensors"} <= files
    assert "model.safetensors" not in files


def test_requests_in_flight_are_not_frozen_and_nothing_is_loaded_in_place(
    policy: Policy, tmp_path: Path
) -> None:
    """SGLang ends the unload when they have ended; vLLM reads what is loaded in place again in every step."""
    with (
        recorded_engine() as vllm,
        recorded_engine("sglang") as sglang,
        bridge_to(policy, tmp_path, vllm, sglang) as bridge,
    ):
        bridge.start(policy, 3)
    assert not [c for engine in (vllm, sglang) for c in engine.calls if "pause" in c]
    loads: list[dict[str, Any]] = [
        body for engine in (vllm, sglang) for route, body in engine.bodies if "/load_lora" in route
    ]
    assert loads == [{"lora_name": "policy", "lora_path": str(tmp_path / "adapter_3")}] * 2
    assert (vllm.versions, sglang.versions) == (["3"], ["3"])


def test_a_vllm_that_mixes_adapters_in_a_batch_is_drained_for_the_swap(
    policy: Policy, tmp_path: Path
) -> None:
    """It tells them apart by name, which all versions share; requests in flight are waited for, not frozen."""
    drained = ["/pause?mode=wait", *SWAP[:2], "/resume", SWAP[2]]
    with recorded_engine() as engine, bridge_to(policy, tmp_path, engine) as bridge:
        engine.max_loras = 2
        bridge.start(policy, 0)
        assert engine.calls == ["/health", *drained]
        engine.faults["/v1/load_lora_adapter"] = (500, b"rank 16 is greater than 8")
        with pytest.raises(EngineUnavailable):
            bridge.begin(policy, 1)()
        assert engine.calls[-1] == "/resume"


def test_an_engine_that_asks_for_a_key_gets_it_with_every_call(
    policy: Policy, tmp_path: Path
) -> None:
    with recorded_engine() as engine, bridge_to(policy, tmp_path, engine) as bridge:
        bridge.start(policy, 0)
        bridge.check()
        assert engine.keys == {"Bearer secret"}


def test_the_originals_server_is_asked_by_its_own_route(policy: Policy, tmp_path: Path) -> None:
    with recorded_engine("original") as engine, bridge_to(policy, tmp_path, engine) as bridge:
        bridge.start(policy, 0)
    assert engine.adapters == {"policy": str(tmp_path / "adapter_0")}


def test_vllm_that_swaps_no_adapters_is_told_the_switches(policy: Policy, tmp_path: Path) -> None:
    with recorded_engine() as engine, bridge_to(policy, tmp_path, engine) as bridge:
        engine.faults["/v1/load_lora_adapter"] = (404, b"Not Found")
        with pytest.raises(
            EngineRejected, match="--enable-lora and VLLM_ALLOW_RUNTIME_LORA_UPDATING=1"
        ):
            bridge.start(policy, 0)


def test_an_adapter_that_cannot_be_loaded_is_an_error(policy: Policy, tmp_path: Path) -> None:
    """The original prints it and continues with the old adapter."""
    with (
        recorded_engine() as vllm,
        recorded_engine("sglang") as sglang,
    ):
        with bridge_to(policy, tmp_path, vllm) as bridge:
            vllm.faults["/v1/load_lora_adapter"] = (500, b"rank 16 is greater than 8")
            with pytest.raises(EngineUnavailable, match="rank 16 is greater than 8"):
                bridge.start(policy, 0)
        with bridge_to(policy, tmp_path, sglang) as bridge:
            sglang.faults["/load_lora_adapter"] = (200, b'{"success": false, "error": "rank"}')
            with pytest.raises(EngineProtocolError, match="/load_lora_adapter failed.*rank"):
                bridge.start(policy, 0)


def test_adapters_stay_on_disk_for_requests_in_flight_but_not_for_ever(
    policy: Policy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("example_trainer.weights.KEEP_ADAPTERS", 3)
    with recorded_engine() as engine, bridge_to(policy, tmp_path, engine) as bridge:
        for version in range(5):
            bridge.begin(policy, version)()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["adapter_2", "adapter_3", "adapter_4"]
