"""Two trainer processes under torchrun and a real vLLM: stopped in the middle and resumed, they reach the same weights.

The hub hands out fixed groups in the order in which they came, so every run trains on the same batches, and weights do
not depend on the bridge: one run without a stop is what both bridges are compared with, bit for bit.
"""

from __future__ import annotations

import signal
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from atroposlib.api.server import create_app
from example_trainer.checkpointing import Checkpoints
from example_trainer.parallel import ALONE
from tests.api.helpers_api import serving
from tests.processes import Process, answers, free_port, running, wait_for
from tests.trainer.helpers_run import closed_ledger, send
from tests.trainer.helpers_trainer import pairs
from tests.vllm.conftest import ServedRequest
from tests.vllm.helpers_vllm import MAX_MODEL_LEN, STARTUP_TIMEOUT_S, vllm_python
from tests.vllm.test_vllm_loop import NUM_STEPS, RESTART_INTERVAL, assert_serves, num_starts

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(600)]

GROUPS = pairs(2 * NUM_STEPS)
SHUTDOWN_TIMEOUT_S = 10
"""Then torchrun kills its processes: less than a start of vLLM takes."""


@pytest.fixture(scope="module")
def uninterrupted(
    reloadable_model: ServedRequest, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, torch.Tensor]:
    """The weights after the last step of a run without a stop."""
    directory = tmp_path_factory.mktemp("uninterrupted")
    url, model = reloadable_model
    flags = ["--bridge=reload", f"--engine_url={url}"]
    with serving(create_app()) as hub_url, trainer(directory, model, hub_url, flags) as process:
        send(hub_url, GROUPS)
        assert process.wait(120) == 0, process.log()
    return final_weights(directory)


@contextmanager
def trainer(directory: Path, model: Path, hub_url: str, flags: Sequence[str]) -> Iterator[Process]:
    """Run two gloo processes under torchrun for the length of the block."""
    argv = [
        *("-m", "torch.distributed.run", "--nproc_per_node=2", "--standalone"),
        *(f"--shutdown-timeout={SHUTDOWN_TIMEOUT_S}", "-m", "example_trainer.grpo"),
        *(f"--model={model}", f"--hub_url={hub_url}", "--device=cpu", "--threads=1"),
        *("--batch_size=4", f"--num_steps={NUM_STEPS}", "--lr=3e-3", "--checkpoint_interval=0"),
        *(f"--save_path={directory}", f"--log_dir={directory}", *flags),
    ]
    with running("trainer", argv, log_path=directory / "trainer.log") as process:
        yield process


def stop(process: Process) -> None:
    """Send SIGTERM to torchrun alone, which passes it on, and wait for its end."""
    process.popen.send_signal(signal.SIGTERM)
    process.wait(60)


def saved_steps(directory: Path) -> list[int]:
    return Checkpoints(save_path=directory, world=ALONE).steps()


def num_steps_recorded(directory: Path) -> int:
    path = directory / "metrics.jsonl"
    return path.read_bytes().count(b"\n") if path.exists() else 0


def final_weights(directory: Path) -> dict[str, torch.Tensor]:
    return load_file(directory / "final_model" / "model.safetensors")


def assert_same_bits(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.equal(found[name], value), name


def test_a_run_over_the_reload_bridge_resumes_to_the_same_weights(
    reloadable_model: ServedRequest, uninterrupted: dict[str, torch.Tensor], tmp_path: Path
) -> None:
    """Stopped while it steps; the batch of the last step is held back, so that it cannot end before the signal."""
    url, model = reloadable_model
    flags = ["--bridge=reload", f"--engine_url={url}"]
    with serving(create_app()) as hub_url:
        send(hub_url, GROUPS[:-2])
        with trainer(tmp_path, model, hub_url, flags) as process:
            wait_for(lambda: num_steps_recorded(tmp_path) >= 2, timeout_s=120, process=process)
            stop(process)
        [stopped_after] = saved_steps(tmp_path)
        assert 2 <= stopped_after < NUM_STEPS
        with trainer(tmp_path, model, hub_url, [*flags, "--resume"]) as process:
            sampled = send(hub_url, GROUPS)  # the hub knows those that it had
            assert process.wait(120) == 0, process.log()
        assert closed_ledger(hub_url, tmp_path, sampled) == {"trained": len(GROUPS)}
    assert_same_bits(final_weights(tmp_path), uninterrupted)
    assert_serves(url, model, tmp_path / "final_model", version=NUM_STEPS)


def test_a_run_over_the_restart_bridge_resumes_to_the_same_weights(
    reloadable_model: ServedRequest, uninterrupted: dict[str, torch.Tensor], tmp_path: Path
) -> None:
    """Stopped while vLLM starts on the weights of step 3, which takes longer than torchrun waits."""
    model = reloadable_model.model
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    flags = [
        *("--bridge=restart", "--engine=vllm", f"--vllm_python={vllm_python()}"),
        *(f"--vllm_port={port}", f"--publish_interval={RESTART_INTERVAL}"),
        *(f"--max_model_len={MAX_MODEL_LEN}", f"--engine_timeout_s={STARTUP_TIMEOUT_S}"),
    ]
    with serving(create_app()) as hub_url:
        send(hub_url, GROUPS[:-2])
        with trainer(tmp_path, model, hub_url, flags) as process:
            wait_for(lambda: num_starts(tmp_path) == 2, timeout_s=300, process=process)
            stop(process)
        assert saved_steps(tmp_path) == [RESTART_INTERVAL]
        assert not answers(f"{url}/health"), "the engine was left behind"
        with trainer(tmp_path, model, hub_url, [*flags, "--resume"]) as process:
            wait_for(
                lambda: num_steps_recorded(tmp_path) == NUM_STEPS - 1,
                timeout_s=300,
                process=process,
            )
            weights = tmp_path / f"step_{RESTART_INTERVAL}"
            assert_serves(url, model, weights, version=RESTART_INTERVAL)
            sampled = send(hub_url, GROUPS)  # the hub knows those that it had
            assert process.wait(120) == 0, process.log()
        assert closed_ledger(hub_url, tmp_path, sampled) == {"trained": len(GROUPS)}
    assert_same_bits(final_weights(tmp_path), uninterrupted)
    assert not answers(f"{url}/health"), "the engine was left behind"
