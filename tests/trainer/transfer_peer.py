"""A process that plays an engine which receives weights: HTTP in front, `--workers` processes of the group behind.

    transfer_peer.py DIRECTORY [--workers N] [--vllm] [--refuse ROUTE]

It prints its port, answers vLLM's routes, receives as vLLM does, and writes what worker R
received to DIRECTORY/rank_R.safetensors when the update ends. With `--vllm` the bytes are taken apart by vLLM's own
code: run it by vLLM's Python then. It imports nothing of this project.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import threading
from contextlib import nullcontext
from datetime import timedelta
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

TIMEOUT = timedelta(seconds=60)


class Worker:
    """One process of the engine's group."""

    def __init__(self, rank_in_engine: int, directory: Path, *, uses_vllm: bool) -> None:
        import torch.distributed as dist

        self.dist = dist
        self.number = rank_in_engine
        self.directory = directory
        self.uses_vllm = uses_vllm
        self.received: dict[str, Any] = {}

    def join(self, info: dict[str, Any], name: str) -> None:
        """What vLLM would do with these if it could on a CPU."""
        from torch.distributed.distributed_c10d import _new_process_group_helper, _world

        address = f"tcp://{info['master_address']}:{info['master_port']}"
        rank, size = info["rank_offset"] + self.number, info["world_size"]
        store, rank, size = next(self.dist.rendezvous(address, rank, size, timeout=TIMEOUT))
        self.group, _ = _new_process_group_helper(
            size,
            rank,
            [],
            self.dist.Backend("gloo"),
            self.dist.PrefixStore(name, store),
            group_name=name,
            timeout=TIMEOUT,
        )
        _world.pg_group_ranks[self.group] = {i: i for i in range(size)}

    def init_vllm(self, body: dict[str, Any]) -> None:
        self.info = body["init_info"]
        if self.uses_vllm:
            from vllm.distributed.weight_transfer.nccl_common import NCCLWeightTransferInitInfo

            NCCLWeightTransferInitInfo(**self.info)  # refuses what it does not know
        self.join(self.info, f"atropos_weights_{self.info['master_port']}")

    def update_vllm(self, body: dict[str, Any]) -> None:
        info = body["update_info"]
        (self.unpack_with_vllm if self.uses_vllm else self.unpack)(info)

    def unpack(self, info: dict[str, Any]) -> None:
        """Fill a buffer until it is above its size, receive it, take it apart; so again until all are there."""
        import math

        import torch

        waiting = list(zip(info["names"], info["dtype_names"], info["shapes"], strict=True))
        while waiting:
            chunk, size = [], 0
            while waiting and size <= self.info["packed_buffer_size_bytes"]:
                name, dtype_name, shape = waiting.pop(0)
                dtype = getattr(torch, dtype_name)
                chunk.append((name, dtype, shape, math.prod(shape) * dtype.itemsize))
                size += chunk[-1][-1]
            buffer = torch.empty(size, dtype=torch.uint8)
            self.dist.broadcast(buffer, src=0, group=self.group)
            start = 0
            for name, dtype, shape, length in chunk:
                part = buffer[start : start + length].clone()
                self.received[name] = part.view(dtype).view(shape)
                start += length

    def unpack_with_vllm(self, info: dict[str, Any]) -> None:
        import torch
        from vllm.distributed.weight_transfer import packed_tensor
        from vllm.distributed.weight_transfer.nccl_engine import NCCLWeightTransferUpdateInfo

        update = NCCLWeightTransferUpdateInfo(**info)
        worker = self

        class Group:
            def broadcast(self, tensor: Any, src: int) -> None:
                worker.dist.broadcast(tensor, src=src, group=worker.group)

        class Stream:
            def synchronize(self) -> None: ...

        # On the CPU there are neither streams nor devices; all else is vLLM's.
        packed_tensor._get_streams = lambda device, count: (Stream(),) * count  # type: ignore[assignment]
        torch.cuda.stream = lambda stream: nullcontext()  # type: ignore[assignment,misc,return-value]
        torch.accelerator.current_device_index = lambda: 0  # type: ignore[assignment]
        parts = zip(update.names, update.dtype_names, update.shapes, strict=True)
        packed_tensor.packed_nccl_broadcast_consumer(
            iterator=((name, (shape, getattr(torch, dtype))) for name, dtype, shape in parts),
            group=Group(),
            src=0,
            post_unpack_func=lambda found: self.received.update(
                {name: tensor.clone() for name, tensor in found}
            ),
            buffer_size_bytes=self.info["packed_buffer_size_bytes"],
            num_buffers=self.info["packed_num_buffers"],
            device="cpu",
        )

    def read(self, bodies: list[dict[str, Any]]) -> str:
        """Have vLLM's classes read an NCCL init_info, an IPC init_info and an IPC update_info."""
        os.environ["VLLM_ALLOW_INSECURE_SERIALIZATION"] = "1"
        from vllm.distributed.weight_transfer.ipc_engine import (
            IPCWeightTransferInitInfo,
            IPCWeightTransferUpdateInfo,
        )
        from vllm.distributed.weight_transfer.nccl_common import NCCLWeightTransferInitInfo

        unique_id = NCCLWeightTransferInitInfo(**bodies[0]).nccl_unique_id_bytes
        IPCWeightTransferInitInfo(**bodies[1])
        handles = IPCWeightTransferUpdateInfo(**bodies[2]).ipc_handles
        return f"{len(unique_id)} bytes of id, {handles}"

    def finish(self, body: dict[str, Any]) -> None:
        from safetensors.torch import save_file

        save_file(self.received, self.directory / f"rank_{self.number}.safetensors")
        self.received = {}


def run_worker(worker: Worker) -> None:
    """Do what lines of JSON ask for, one answer each."""
    for line in sys.stdin:
        what, body = json.loads(line)
        try:
            answer = [True, getattr(worker, what)(body) or ""]
        except Exception as error:  # noqa: BLE001 - the trainer is told, as an engine would
            answer = [False, repr(error)]
        print(json.dumps(answer), flush=True)


class Peer:
    """The HTTP half: passes what concerns the group on to every worker, and notes the order of things."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.calls: list[str] = []
        self.version = "default"
        self.is_updating = False
        self.lock = threading.Lock()
        argv = [sys.executable, __file__, str(options.directory)]
        argv += ["--vllm"] if options.vllm else []
        self.workers = [
            subprocess.Popen(
                [*argv, "--worker", str(number)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
            for number in range(options.workers)
        ]

    def all_workers(self, what: str, body: dict[str, Any]) -> tuple[bool, str]:
        for worker in self.workers:
            assert worker.stdin is not None
            worker.stdin.write(json.dumps([what, body]) + "\n")
            worker.stdin.flush()
        answers = [json.loads(w.stdout.readline() or '[false, "gone"]') for w in self.workers]  # type: ignore[union-attr]
        return all(ok for ok, _ in answers), "; ".join(text for _, text in answers)

    def handle(self, route: str, body: dict[str, Any]) -> tuple[int, Any]:
        looks = {
            "/openapi.json": {"paths": {"/x": {}}},
            "/server_info": {"vllm_config": {"weight_transfer_config": {"backend": "nccl"}}},
            "/get_world_size": {"world_size": self.options.workers},
            "/weight_info": {"weight_version": self.version},
            "/calls": self.calls,
        }
        if route in looks:
            return 200, looks[route]
        self.calls.append(route)
        if route == self.options.refuse:
            return 500, {"error": "refused by the test"}
        if route in ("/start_weight_update", "/finish_weight_update"):
            if self.is_updating == (route == "/start_weight_update"):
                return 500, {
                    "error": f"an update is {'' if self.is_updating else 'not '}already active"
                }
            self.is_updating = not self.is_updating
        asks = {
            "/init_weight_transfer_engine": "init_vllm",
            "/update_weights": "update_vllm",
            "/finish_weight_update": "finish",
            "/read": "read",
        }
        if route == "/update_weight_version":
            self.version = body["new_version"]
        if route in asks:
            ok, text = self.all_workers(asks[route], body)
            return (200 if ok else 500), {"success": ok, "message": text}
        return 200, {"success": True}


def serve(peer: Peer) -> None:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.answer()

        def do_POST(self) -> None:
            self.answer()

        def answer(self) -> None:
            data = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            with peer.lock:
                status, body = peer.handle(
                    self.path.partition("?")[0], json.loads(data or b"{}") or {}
                )
            reply = json.dumps(body).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(reply)))
            self.end_headers()
            self.wfile.write(reply)

        def log_message(self, format: str, *args: Any) -> None: ...

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    print(server.server_port, flush=True)
    server.serve_forever()


parser = argparse.ArgumentParser()
parser.add_argument("directory", type=Path)
parser.add_argument("--workers", type=int, default=1)
parser.add_argument("--vllm", action="store_true")
parser.add_argument("--refuse", default="")
parser.add_argument("--worker", type=int)
options = parser.parse_args()
if options.worker is None:
    serve(Peer(options))
else:
    run_worker(Worker(options.worker, options.directory, uses_vllm=options.vllm))
