"""Start `transfer_peer.py` and compare what it received."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import pytest
import torch
from safetensors.torch import load_file

from example_trainer.bridges import links
from example_trainer.bridges.buckets import Bucket
from example_trainer.bridges.control import Control
from example_trainer.bridges.engines import VllmEngine
from tests.trainer.helpers_reload import FakeEngine

PEER = Path(__file__).with_name("transfer_peer.py")


class Peer(NamedTuple):
    url: str
    directory: Path

    def calls(self) -> list[str]:
        answer = httpx.get(f"{self.url}/calls", trust_env=False)
        return list(answer.json())

    def received(self, rank: int = 0) -> dict[str, torch.Tensor]:
        return load_file(self.directory / f"rank_{rank}.safetensors")


@contextmanager
def transfer_peer(
    kind: str, directory: Path, *flags: str, python: str | Path = sys.executable
) -> Iterator[Peer]:
    directory.mkdir()
    with (directory / "log").open("wb") as log:
        process = subprocess.Popen(
            [str(python), str(PEER), kind, str(directory), *flags],
            stdout=subprocess.PIPE,
            stderr=log,
            env=os.environ | {"OMP_NUM_THREADS": "1"},
            start_new_session=True,
        )
    try:
        assert process.stdout is not None
        port = process.stdout.readline()
        assert port, (directory / "log").read_text()
        yield Peer(f"http://127.0.0.1:{int(port)}", directory)
    finally:
        os.killpg(process.pid, 9)
        process.communicate()


def assert_bit_for_bit(found: dict[str, torch.Tensor], checkpoint: Path) -> None:
    """Compare with the checkpoint that an engine would have loaded from disk instead."""
    expected = load_file(checkpoint / "model.safetensors")
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert found[name].dtype == value.dtype, name
        assert torch.equal(found[name], value), name


def bodies_for_a_gpu(
    engine: FakeEngine, monkeypatch: pytest.MonkeyPatch
) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
    """Return what vLLM is sent for NCCL and for CUDA IPC: init_info of both, update_info of the latter."""

    class Joined:
        def __init__(self, unique_id: bytes, **settings: Any) -> None:
            assert unique_id == bytes(range(128))
            assert settings == {"world_size": 3, "device": torch.device("cuda:0")}

    monkeypatch.setattr(links, "new_nccl_id", lambda: bytes(range(128)))
    monkeypatch.setattr(links, "NcclChannel", Joined)
    control = Control(engine.url, timeout_s=5.0)
    engine.faults |= {
        "/get_world_size": (200, b'{"world_size": 2}'),
        "/init_weight_transfer_engine": (200, b"{}"),
        "/update_weights": (200, b"{}"),
    }
    found = []
    for backend in ("nccl", "ipc"):
        config = {"vllm_config": {"weight_transfer_config": {"backend": backend}}}
        engine.faults["/server_info"] = (200, json.dumps(config).encode())
        if backend == "nccl":
            wiring = links.Wiring(
                device=torch.device("cuda:0"), address="host", bucket_bytes=1000, timeout_s=5.0
            )
            links.VllmLink(VllmEngine(control), wiring)
        else:
            bucket = Bucket(names=["a", "b"], tensors=[torch.ones(2, 3), torch.ones(1)])
            links.VllmIpcLink(VllmEngine(control)).send(bucket, {"GPU-1": ["handle"]})
        found += [body for route, body in engine.bodies if route.endswith(("engine", "weights"))]
        engine.bodies.clear()
    control.close()
    nccl, ipc, update = found
    return nccl["init_info"], ipc["init_info"], update["update_info"]
