"""Stands in for vLLM's trainer side: the calls of its `send_weights`, and the weights kept instead of broadcast."""

import threading
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from example_trainer.bridges.transfer import EngineClient, PolicyWeights


class KeptSender:
    """`TrainerWeightTransferEngine` of one process. Like NCCL, it waits for ever when an engine refuses its part."""

    def __init__(
        self, weights: PolicyWeights, client: EngineClient, *, backend: str, bucket_bytes: int
    ) -> None:
        self.weights, self.client = weights, client
        self.is_main = weights.policy.world.is_main
        self.sent: dict[str, torch.Tensor] = {}
        self.is_open = True
        if self.is_main:
            info = {"rank_offset": 1, "packed": True, "packed_buffer_size_bytes": bucket_bytes}
            self.collective(lambda: client.init_weight_transfer_engine(info))

    def send_weights(self) -> None:
        declared = self.weights.metadata()
        self.sent = dict(self.weights)
        assert [(n, t.dtype, tuple(t.shape)) for n, t in self.sent.items()] == declared
        if self.is_main:
            self.client.start_weight_update()
            names = {"names": [each.name for each in declared], "ipc_handles": None}
            self.collective(lambda: self.client.update_weights(names))
            self.client.finish_weight_update()

    def collective(self, call: Any) -> None:
        try:
            call()
        except Exception:  # noqa: BLE001 - as a thread of NCCL's would
            threading.Event().wait()

    def shutdown(self) -> None:
        self.is_open = False


def assert_bit_for_bit(found: dict[str, torch.Tensor], checkpoint: Path) -> None:
    """Compare with the checkpoint that an engine would have loaded from disk instead."""
    expected = load_file(checkpoint / "model.safetensors")
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert found[name].dtype == value.dtype, name
        assert torch.equal(found[name], value), name
