"""Start `transfer_peer.py`, meet it over gloo as NCCL would, and compare what it received."""

from __future__ import annotations

import base64
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch.distributed.distributed_c10d import _new_process_group_helper, _world

from example_trainer.bridges import links
from example_trainer.bridges.buckets import Bucket
from example_trainer.bridges.control import Control
from example_trainer.bridges.engines import VllmEngine
from example_trainer.bridges.links import Meeting
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
    directory: Path, *flags: str, python: str | Path = sys.executable
) -> Iterator[Peer]:
    directory.mkdir()
    with (directory / "log").open("wb") as log:
        process = subprocess.Popen(
            [str(python), str(PEER), str(directory), *flags],
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


class GlooChannel:
    """A process group beside the one that trainers form; what `NcclChannel` is on a GPU."""

    def __init__(self, store: dist.Store, *, name: str, world_size: int, timeout_s: float) -> None:
        # What init_process_group does, short of making it the default group, which is the trainers' own.
        self._group, _ = _new_process_group_helper(
            world_size,
            0,
            [],
            dist.Backend("gloo"),
            dist.PrefixStore(name, store),
            group_name=name,
            timeout=timedelta(seconds=timeout_s),
        )
        _world.pg_group_ranks[self._group] = {rank: rank for rank in range(world_size)}
        self._store = store  # it serves the others for as long as the group lives

    def broadcast(self, tensor: torch.Tensor) -> None:
        options = dist.BroadcastOptions()
        options.rootRank, options.rootTensor = 0, 0
        self._group.broadcast([tensor], options).wait()

    def close(self) -> None:
        dist.destroy_process_group(self._group)


def meet_over_gloo(world_size: int, device: torch.device, timeout_s: float) -> Meeting:
    store = dist.TCPStore(
        "127.0.0.1",
        0,
        world_size,
        is_master=True,
        wait_for_workers=False,
        timeout=timedelta(seconds=timeout_s),
    )
    name = f"atropos_weights_{store.port}"
    return Meeting(
        {"master_address": "127.0.0.1", "master_port": store.port},
        lambda: GlooChannel(store, name=name, world_size=world_size, timeout_s=timeout_s),
    )


def bodies_for_a_gpu(
    engine: FakeEngine,
) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
    """Return what vLLM is sent for NCCL and for CUDA IPC: init_info of both, update_info of the latter."""
    control = Control(engine.url, timeout_s=5.0)
    engine.faults |= {
        "/get_world_size": (200, b'{"world_size": 2}'),
        "/init_weight_transfer_engine": (200, b"{}"),
        "/update_weights": (200, b"{}"),
    }
    unique_id = base64.b64encode(bytes(range(128))).decode()
    found = []
    for backend in ("nccl", "ipc"):
        config = {"vllm_config": {"weight_transfer_config": {"backend": backend}}}
        engine.faults["/server_info"] = (200, json.dumps(config).encode())
        if backend == "nccl":
            links.NcclLink(
                VllmEngine(control),
                device=torch.device("cuda:0"),
                bucket_bytes=1000,
                timeout_s=5.0,
                meet=lambda *_: Meeting({"nccl_unique_id_b64": unique_id}, lambda: Mute()),
            )
        else:
            bucket = Bucket(names=["a", "b"], tensors=[torch.ones(2, 3), torch.ones(1)])
            links.IpcLink(VllmEngine(control)).send(bucket, {"GPU-1": ["handle"]})
        wanted = ("/init_weight_transfer_engine", "/update_weights")
        found += [body for route, body in engine.bodies if route in wanted]
        engine.bodies.clear()
    control.close()
    nccl, ipc, update = found
    return nccl["init_info"], ipc["init_info"], update["update_info"]


class Mute:
    def broadcast(self, tensor: torch.Tensor) -> None: ...

    def close(self) -> None: ...
