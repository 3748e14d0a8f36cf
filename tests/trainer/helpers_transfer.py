"""Start `transfer_peer.py` and compare what it received."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import httpx
import torch
from safetensors.torch import load_file

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
