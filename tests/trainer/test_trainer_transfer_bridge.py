"""`bridges/transfer.py`: what is sent, what engines are asked, and failures. tests/vllm has both of vLLM's sides."""

import base64
import hashlib
import json
import pickle  # noqa: TID251 - reads back what this process pickled
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.tensor import DTensor

from atroposlib.errors import (
    ConfigError,
    EngineProtocolError,
    EngineRejected,
    EngineUnavailable,
    MissingDependency,
)
from example_trainer.bridges.control import Control
from example_trainer.bridges.engines import VllmEngine
from example_trainer.bridges.transfer import (
    EngineClient,
    PolicyWeights,
    TransferBridge,
    require_same_nccl,
    vllm_sender,
)
from example_trainer.config import TrainerConfig
from example_trainer.model import Policy, load_policy
from tests.builders.programs import run_python
from tests.tiny_model import make_tiny_model
from tests.trainer.helpers_engine import RecordedEngine, recorded_engine
from tests.trainer.helpers_transfer import KeptSender, assert_bit_for_bit

BEGIN = ["/health", "/finish_weight_update", "/init_weight_transfer_engine"]
UPDATE = [
    *("/pause?mode=keep", "/start_weight_update", "/update_weights", "/finish_weight_update"),
    *("/reset_prefix_cache?reset_running_requests=true", "/update_weight_version", "/resume"),
]


def policy_of(model_dir: Path, **settings: Any) -> Policy:
    return load_policy(TrainerConfig(model_name=str(model_dir), device="cpu", **settings))


def bridge_to(*engines: RecordedEngine, **settings: Any) -> TransferBridge:
    urls = [engine.url for engine in engines]
    defaults = {"timeout_s": 30.0, "bucket_bytes": 1000, "open_sender": KeptSender}
    return TransferBridge(urls=urls, **defaults | settings)


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"dtype": "bfloat16"},
        {"lora": True},
        {"lora": True, "dtype": "bfloat16", "lora_target_modules": ["q_proj", "embed_tokens"]},
    ],
    ids=str,
)
def test_what_is_sent_is_declared_first_and_is_what_a_checkpoint_holds(
    model_dir: Path, tmp_path: Path, settings: dict[str, Any]
) -> None:
    policy = policy_of(model_dir, **settings)
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in policy.model.parameters():
            if parameter.requires_grad:
                own = parameter.to_local() if isinstance(parameter, DTensor) else parameter
                own.add_(torch.randn(own.shape), alpha=0.1)
    policy.save(tmp_path / "saved", merged=True)
    weights = PolicyWeights(policy)
    found = dict(weights)
    assert_bit_for_bit(found, tmp_path / "saved")
    assert weights.metadata() == [(n, t.dtype, tuple(t.shape)) for n, t in found.items()]


def test_tied_embeddings_are_sent_once(tmp_path: Path) -> None:
    policy = policy_of(make_tiny_model(tmp_path / "tied", tie_word_embeddings=True))
    names = [name for name, _ in PolicyWeights(policy)]
    assert "model.embed_tokens.weight" in names
    assert "lm_head.weight" not in names


def test_an_engine_that_holds_something_else_stops_the_run_and_samples_nothing(
    model_dir: Path,
) -> None:
    policy = policy_of(model_dir, lora=True)
    name = "model.layers.0.self_attn.o_proj.weight"
    digest = hashlib.sha256(dict(PolicyWeights(policy))[name].numpy().tobytes()).hexdigest()
    with recorded_engine() as engine:
        engine.checksums = {f"dp0:pp0:pcp0:tp0:{name}": digest}
        bridge = bridge_to(engine)
        bridge.start(policy, 0)
        assert engine.calls[-1] == "/resume"
        engine.checksums[f"dp0:pp0:pcp0:tp0:{name}"] = "0" * 64
        with pytest.raises(EngineProtocolError, match=rf"{name} is 0+, and {digest} was published"):
            bridge.publish(policy, 1)
        assert engine.calls[-1] == "/update_weight_version"
        bridge.close()


def test_every_engine_is_frozen_updated_and_labelled(model_dir: Path) -> None:
    policy = policy_of(model_dir)
    with recorded_engine() as one, recorded_engine() as two:
        bridge = bridge_to(one, two)
        bridge.start(policy, 0)
        assert bridge.publish(policy, 1) == 1
        sender = bridge._sender
        bridge.close()
        bridge.close()
        assert not sender.is_open
        for engine in (one, two):
            assert engine.calls == [*BEGIN, *UPDATE, *UPDATE, "/shutdown_weight_transfer_engine"]
            assert engine.versions == ["0", "1"]


def test_a_restarted_engine_is_reported_because_it_has_left_the_group(model_dir: Path) -> None:
    with recorded_engine() as engine:
        bridge = bridge_to(engine)
        bridge.start(policy_of(model_dir), 4)
        bridge.check()
        engine.restart_as("default")
        with pytest.raises(EngineProtocolError, match="'default' after version 4"):
            bridge.check()
        bridge.close()


def test_each_engine_gets_ranks_of_its_own_in_one_group(model_dir: Path) -> None:
    with recorded_engine() as one, recorded_engine() as two:
        one.num_workers = 4
        bridge = bridge_to(one, two)
        bridge.start(policy_of(model_dir), 0)
        assert bridge._client.ranks == [1, 5, 6], "the last is the size of the group"
        infos = [dict(e.bodies)["/init_weight_transfer_engine"]["init_info"] for e in (one, two)]
        assert [info["rank_offset"] for info in infos] == [1, 5]
        bridge.close()


def test_an_update_that_a_killed_trainer_began_is_ended_first(
    model_dir: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """vLLM refuses to begin a second one, so that no trainer could resume."""
    with recorded_engine() as engine:
        engine.is_updating = True
        bridge = bridge_to(engine)
        bridge.start(policy_of(model_dir), 4)
        assert engine.versions == ["4"]
        bridge.close()
    assert "another trainer left open" in caplog.text


@pytest.mark.drill
@pytest.mark.timeout(240)
def test_two_trainer_processes_gather_and_the_first_sends(model_dir: Path, tmp_path: Path) -> None:
    with recorded_engine() as engine:
        worker = Path(__file__).with_name("transfer_worker.py")
        arguments = {"model": str(model_dir), "url": engine.url, "out": str(tmp_path / "saved")}
        torchrun = ["-m", "torch.distributed.run", "--nproc_per_node=2", "--standalone"]
        run_python(*torchrun, worker, json.dumps(arguments), timeout_s=200)
        assert engine.calls == [*BEGIN, *UPDATE, "/shutdown_weight_transfer_engine"]


@pytest.mark.parametrize("route", ["/init_weight_transfer_engine", "/update_weights"])
def test_an_engine_that_refuses_ends_the_transfer_at_once_and_stays_frozen(
    model_dir: Path, route: str
) -> None:
    """The other half of a collective waits for the one that never comes."""
    with recorded_engine() as one, recorded_engine() as two:
        one.faults[route] = (500, b"refused by the test")
        bridge = bridge_to(one, two)
        with pytest.raises(EngineUnavailable, match=f"{route} answered 500.*refused by the test"):
            bridge.start(policy_of(model_dir), 0)
        bridge.close()
        for engine in (one, two):
            assert "/resume" not in engine.calls
            assert "/shutdown_weight_transfer_engine" not in engine.calls, "it would not answer"


def test_an_engine_that_never_does_its_part_is_an_error_after_the_timeout(model_dir: Path) -> None:
    class Stuck(KeptSender):
        def send_weights(self) -> None:
            time.sleep(5)

    with recorded_engine() as engine, pytest.raises(EngineUnavailable, match="its part for 0 s"):
        bridge_to(engine, open_sender=Stuck, timeout_s=0.3).start(policy_of(model_dir), 0)


def test_vllm_without_the_backend_is_told_the_flag_and_not_asked_further(model_dir: Path) -> None:
    """Asked to transfer weights without the backend, vLLM's engine dies."""
    with recorded_engine() as engine:
        for config in ("text", {"weight_transfer_config": {"backend": "ipc"}}):
            answer = json.dumps({"vllm_config": config}).encode()
            engine.faults["/server_info"] = (200, answer)
            with pytest.raises(EngineRejected, match='needs vLLM 0.32.* .*"backend": "nccl"'):
                bridge_to(engine).start(policy_of(model_dir), 0)
    assert engine.calls == ["/health"] * 2


def test_handles_of_gpu_memory_are_pickled_as_vllm_reads_them() -> None:
    """Only the body: there is no GPU to share memory on. vLLM refuses a rank where there is no group."""
    with recorded_engine() as engine:
        client = EngineClient([VllmEngine(Control(engine.url, timeout_s=5.0))], backend="ipc")
        client.init_weight_transfer_engine({"packed": True})
        client.update_weights({"names": ["a"], "ipc_handles": {"GPU-1": ("handle",)}})
        (_, init), (_, update) = engine.bodies
    assert init == {"init_info": {"packed": True}}
    handles = pickle.loads(base64.b64decode(update["update_info"].pop("ipc_handles_pickled")))
    assert handles == {"GPU-1": ("handle",)}
    assert update == {"update_info": {"names": ["a"]}}


@pytest.mark.parametrize("backend", ["nccl", "ipc"])
def test_a_trainer_on_the_cpu_is_told_before_any_engine_is_touched(
    model_dir: Path, backend: str
) -> None:
    with recorded_engine() as engine, pytest.raises(ConfigError, match=f"{backend}.*cpu.*reload"):
        bridge_to(engine, backend=backend, open_sender=vllm_sender).start(policy_of(model_dir), 0)
    assert engine.calls == []


def test_a_trainer_without_vllm_is_told_how_to_install_it(model_dir: Path) -> None:
    class OnGpu(Policy):
        device = torch.device("cuda:0")  # type: ignore[misc]

    policy = policy_of(model_dir)
    fields = {name: getattr(policy, name) for name in ("model", "tokenizer", "dtype", "module")}
    on_gpu = object.__new__(OnGpu)
    for name, value in fields.items():
        object.__setattr__(on_gpu, name, value)
    with recorded_engine() as engine, pytest.raises(MissingDependency, match=r"\[transfer\]"):
        bridge_to(engine, open_sender=vllm_sender).start(on_gpu, 0)
    assert engine.calls == []


def test_models_whose_checkpoint_is_laid_out_differently_are_refused(model_dir: Path) -> None:
    policy = policy_of(model_dir)
    policy.model._weight_conversions = ["experts are fused"]
    with recorded_engine() as engine, pytest.raises(ConfigError, match="use --bridge reload"):
        bridge_to(engine).start(policy, 0)


def test_another_nccl_than_the_trainers_is_named_before_anything_starts() -> None:
    """Two versions cannot communicate: NCCL reports it after the first step, or not at all."""
    with recorded_engine() as engine:
        packages = "[pip3] numpy==2.3.5\n[pip3] nvidia-nccl-cu13==2.28.9\n"
        answer = json.dumps({"vllm_config": {}, "system_env": {"pip_packages": packages}})
        engine.faults["/server_info"] = (200, answer.encode())
        found = VllmEngine(Control(engine.url, timeout_s=5.0))
        require_same_nccl(found, (2, 28, 9))
        with pytest.raises(ConfigError, match=r"has NCCL 2\.28\.9, the trainer 2\.29\.7"):
            require_same_nccl(found, (2, 29, 7))


def test_sglang_is_told_to_reload(model_dir: Path) -> None:
    with recorded_engine("sglang") as engine, pytest.raises(ConfigError, match="SGLang.*reload"):
        bridge_to(engine).start(policy_of(model_dir), 0)
