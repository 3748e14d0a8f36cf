"""`bridges/transfer.py`: what is sent, and that processes which receive as engines do end up with the same bits."""

from __future__ import annotations

import base64
import json
import os
import pickle  # noqa: TID251 - reads back what this process pickled
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from safetensors.torch import load_file

from atroposlib.errors import ConfigError, EngineRejected, EngineUnavailable
from example_trainer.bridges.buckets import buckets, whole_weights
from example_trainer.bridges.control import Control
from example_trainer.bridges.links import require_same_nccl, together
from example_trainer.bridges.transfer import TransferBridge
from example_trainer.config import TrainerConfig
from example_trainer.model import Policy, load_policy
from tests.processes import ROOT
from tests.tiny_model import make_tiny_model
from tests.trainer.helpers_reload import FakeEngine, fake_engine
from tests.trainer.helpers_transfer import (
    Peer,
    assert_bit_for_bit,
    bodies_for_a_gpu,
    meet_over_gloo,
    transfer_peer,
)

BUCKET = 20_000
"""Bytes: a few tensors of the tiny model; its embedding is larger."""


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("model"))


def policy_of(model_dir: Path, **settings: Any) -> Policy:
    return load_policy(TrainerConfig(model_name=str(model_dir), device="cpu", **settings))


def disturb(policy: Policy) -> None:
    """Change every trained weight, as a step does."""
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in policy.model.parameters():
            if parameter.requires_grad:
                parameter.add_(torch.randn_like(parameter), alpha=0.1)


def bridge_to(*engines: Peer | FakeEngine, **settings: Any) -> TransferBridge:
    urls = [engine.url for engine in engines]
    return TransferBridge(
        urls=urls, bucket_bytes=BUCKET, meet=meet_over_gloo, **{"timeout_s": 30.0} | settings
    )


@pytest.mark.parametrize(
    "settings",
    [{}, {"dtype": "bfloat16"}, {"lora": True}, {"lora": True, "dtype": "bfloat16"}],
    ids=str,
)
def test_what_is_sent_is_what_a_checkpoint_holds(
    model_dir: Path, tmp_path: Path, settings: dict[str, Any]
) -> None:
    policy = policy_of(model_dir, **settings)
    disturb(policy)
    policy.save(tmp_path / "saved", merged=True)
    assert_bit_for_bit(dict(whole_weights(policy)), tmp_path / "saved")


def test_tied_embeddings_are_sent_once(tmp_path: Path) -> None:
    policy = policy_of(make_tiny_model(tmp_path / "tied", tie_word_embeddings=True))
    names = [name for name, _ in whole_weights(policy)]
    assert "model.embed_tokens.weight" in names
    assert "lm_head.weight" not in names


def test_a_bucket_holds_at_most_so_many_bytes_unless_one_parameter_is_larger(
    model_dir: Path,
) -> None:
    policy = policy_of(model_dir)
    found = list(buckets(policy, BUCKET))
    assert [n for b in found for n in b.names] == [n for n, _ in whole_weights(policy)]
    assert all(sum(b.sizes) <= BUCKET or len(b.names) == 1 for b in found)
    assert max(len(b.names) for b in found) > 1
    assert max(sum(b.sizes) for b in found) > BUCKET
    for bucket in found:
        assert bucket.packed().numel() == sum(bucket.sizes)


@pytest.mark.timeout(120)
def test_engines_receive_every_bit_of_every_version(model_dir: Path, tmp_path: Path) -> None:
    """One process behind the first peer, two behind the second; processes all, over gloo."""
    policy = policy_of(model_dir, dtype="bfloat16")
    with (
        transfer_peer(tmp_path / "one") as one,
        transfer_peer(tmp_path / "two", "--workers=2") as two,
    ):
        bridge = bridge_to(one, two)
        bridge.start(policy, 0)
        for version in (0, 1):
            if version:
                disturb(policy)
                assert bridge.publish(policy, version) == version
            policy.save(tmp_path / f"saved_{version}")
            for found in (one.received(), two.received(0), two.received(1)):
                assert_bit_for_bit(found, tmp_path / f"saved_{version}")
        calls = one.calls()
        assert two.calls() == calls
        bridge.close()
        bridge.close()
        assert one.calls()[len(calls) :] == ["/shutdown_weight_transfer_engine"]
    num_buckets = len(list(buckets(policy, BUCKET)))
    update = ["/pause", "/start_weight_update", *["/update_weights"] * num_buckets]
    update += ["/finish_weight_update", "/reset_prefix_cache", "/update_weight_version", "/resume"]
    begin = ["/health", "/finish_weight_update", "/init_weight_transfer_engine"]
    assert calls == [*begin, *update, *update]


@pytest.mark.timeout(120)
def test_an_update_that_a_killed_trainer_began_is_ended_first(
    model_dir: Path, tmp_path: Path
) -> None:
    """vLLM refuses to begin a second one, so that no trainer could resume."""
    policy = policy_of(model_dir)
    with transfer_peer(tmp_path / "peer") as peer:
        httpx.post(f"{peer.url}/start_weight_update", trust_env=False).raise_for_status()
        refused = httpx.post(f"{peer.url}/start_weight_update", trust_env=False)
        assert "already active" in refused.text
        bridge = bridge_to(peer)
        bridge.start(policy, 4)
        policy.save(tmp_path / "saved")
        assert_bit_for_bit(peer.received(), tmp_path / "saved")
        bridge.close()


@pytest.mark.timeout(240)
def test_two_trainer_processes_gather_and_the_first_sends(model_dir: Path, tmp_path: Path) -> None:
    with transfer_peer(tmp_path / "peer") as peer:
        worker = Path(__file__).with_name("transfer_worker.py")
        arguments = {"model": str(model_dir), "url": peer.url, "out": str(tmp_path / "saved")}
        done = subprocess.run(
            [
                *(sys.executable, "-m", "torch.distributed.run", "--nproc_per_node=2"),
                *("--standalone", str(worker), json.dumps(arguments | {"bucket": BUCKET})),
            ],
            env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
            capture_output=True,
            text=True,
            timeout=200,
            check=False,
        )
        assert done.returncode == 0, done.stderr[-4000:]
        assert_bit_for_bit(peer.received(), tmp_path / "saved")
        assert load_file(tmp_path / "saved" / "model.safetensors").keys()


@pytest.mark.timeout(120)
@pytest.mark.parametrize("route", ["/init_weight_transfer_engine", "/update_weights"])
def test_an_engine_that_refuses_ends_the_hand_over_at_once_and_stays_frozen(
    model_dir: Path, tmp_path: Path, route: str
) -> None:
    """The other half of a collective would wait for the one that never comes."""
    with transfer_peer(tmp_path / "peer", f"--refuse={route}") as peer:
        bridge = bridge_to(peer, timeout_s=60.0)
        begun = time.monotonic()
        with pytest.raises(EngineUnavailable, match=f"{route} answered 500.*refused by the test"):
            bridge.start(policy_of(model_dir), 0)
        assert time.monotonic() - begun < 30
        assert "/resume" not in peer.calls()
        bridge.close()


def test_half_of_a_collective_that_never_ends_is_an_error_after_the_timeout() -> None:
    with pytest.raises(EngineUnavailable, match="engine x: /y: not done after 0 s"):
        together(lambda: None, lambda: time.sleep(5), what="engine x: /y", timeout_s=0.05)


def test_vllm_without_the_backend_is_told_the_flag_and_not_asked_further(model_dir: Path) -> None:
    """Asked to transfer weights without the backend, vLLM's engine dies."""
    with fake_engine() as engine:
        for config, words in (
            ("text", "needs vLLM 0.32"),
            ({"weight_transfer_config": None}, '--weight-transfer-config .*"backend": "nccl"'),
            ({"weight_transfer_config": {"backend": "ipc"}}, '\'ipc\'.*"backend": "nccl"'),
        ):
            answer = json.dumps({"vllm_config": config}).encode()
            engine.faults["/server_info"] = (200, answer)
            with pytest.raises(EngineRejected, match=words):
                bridge_to(engine).start(policy_of(model_dir), 0)
    assert engine.calls == ["/health"] * 3


def test_vllm_on_a_gpu_is_met_by_a_unique_id_of_nccl_or_handed_memory() -> None:
    """Only the bodies: there is no GPU to run the collective on. vLLM refuses an id and an address together."""
    with fake_engine() as engine:
        nccl, ipc, update = bodies_for_a_gpu(engine)
    assert base64.b64decode(nccl.pop("nccl_unique_id_b64")) == bytes(range(128))
    assert nccl == {
        "rank_offset": 1,
        "world_size": 3,
        "packed": True,
        "packed_buffer_size_bytes": 1000,
        "packed_num_buffers": 1,
    }
    assert ipc == {"packed": True}
    handles = pickle.loads(base64.b64decode(update.pop("ipc_handles_pickled")))
    assert handles == {"GPU-1": ["handle"]}
    assert update == {
        "names": ["a", "b"],
        "dtype_names": ["float32", "float32"],
        "shapes": [[2, 3], [1]],
        "tensor_sizes": [24, 4],
    }


def test_memory_of_a_gpu_is_shared_only_where_there_is_one(model_dir: Path) -> None:
    with fake_engine() as engine, pytest.raises(ConfigError, match="--transfer_backend ipc.*cpu"):
        bridge_to(engine, backend="ipc").start(policy_of(model_dir), 0)
    assert engine.calls == []


def test_models_whose_checkpoint_is_laid_out_differently_are_refused(model_dir: Path) -> None:
    policy = policy_of(model_dir)
    policy.model._weight_conversions = ["experts are fused"]
    with fake_engine() as engine, pytest.raises(ConfigError, match="use --bridge reload"):
        bridge_to(engine).start(policy, 0)


def test_another_nccl_than_the_trainers_is_named_before_anything_starts() -> None:
    """Two versions do not speak to each other: NCCL says so after the first step, or not at all."""
    with fake_engine() as engine:
        packages = "[pip3] numpy==2.3.5\n[pip3] nvidia-nccl-cu13==2.28.9\n"
        answer = json.dumps({"vllm_config": {}, "system_env": {"pip_packages": packages}})
        engine.faults["/server_info"] = (200, answer.encode())
        control = Control(engine.url, timeout_s=5.0)
        require_same_nccl(control, (2, 28, 9))
        with pytest.raises(ConfigError, match=r"has NCCL 2\.28\.9, the trainer 2\.29\.7"):
            require_same_nccl(control, (2, 29, 7))
        control.close()


def test_sglang_is_told_to_reload(model_dir: Path) -> None:
    with fake_engine("sglang") as engine, pytest.raises(ConfigError, match="SGLang.*reload"):
        bridge_to(engine).start(policy_of(model_dir), 0)
