"""`bridges/nccl.py` with torch's CUDA build and no device: the library is found and its errors are told."""

from __future__ import annotations

import pytest
import torch

from atroposlib.errors import ConfigError, EngineError
from example_trainer.bridges.nccl import ID_BYTES, NcclChannel, nccl_version, new_nccl_id

needs_cuda_build = pytest.mark.skipif(
    torch.version.cuda is None, reason="torch is not a CUDA build"
)


@pytest.mark.cuda_wheel
@needs_cuda_build
def test_the_library_is_the_one_that_torch_has_loaded() -> None:
    assert nccl_version() == torch.cuda.nccl.version()
    first, second = new_nccl_id(), new_nccl_id()
    assert len(first) == len(second) == ID_BYTES
    assert first != second


@pytest.mark.cuda_wheel
@needs_cuda_build
@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a device")
def test_a_communicator_that_cannot_be_opened_says_which_call_failed_and_why(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """torch's own binding ends in a SystemError here, before it has called NCCL."""
    monkeypatch.setattr("torch.cuda.device", lambda device: torch.device("cpu"))
    with pytest.raises(EngineError, match="ncclCommInitRank: unhandled cuda error.*driver"):
        NcclChannel(new_nccl_id(), world_size=2, device=torch.device("cuda:0"))


@pytest.mark.skipif(torch.version.cuda is not None, reason="torch is a CUDA build")
def test_a_torch_without_nccl_is_named() -> None:
    with pytest.raises(ConfigError, match="--transfer_backend nccl: libnccl.*CUDA build"):
        nccl_version()
