"""The whole loop against a real vLLM (CPU build): hub, environment and trainer are processes, once per bridge.

Run with `ATROPOS_VLLM_PYTHON=.venv-vllm/bin/python pytest -m vllm tests/vllm -rs`; `.ci/vllm_env.sh` makes that
environment. One start of vLLM takes 30 to 70 s on two cores and decides how long these tests take.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.processes import ROOT, Process, answers, free_port, running, wait_for
from tests.tiny_model import make_tiny_model
from tests.vllm.conftest import ServedRequest
from tests.vllm.helpers_vllm import (
    MAX_GAP,
    MAX_MODEL_LEN,
    STARTUP_TIMEOUT_S,
    largest_gap,
    sample,
    vllm_python,
)

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(600)]

NUM_STEPS = 5
RESTART_INTERVAL = 3
PROMPT = [10, 20, 30, 40, 50]


def test_five_steps_with_weights_reloaded_in_place_after_each(
    reloadable_model: ServedRequest, tmp_path: Path
) -> None:
    """One vLLM, five versions; afterwards it samples exactly what the final checkpoint says."""
    url, model = reloadable_model
    run_loop(
        tmp_path,
        model,
        hub_port=free_port(),
        engine_port=int(url.rpartition(":")[2]),
        trainer_flags=["--bridge=reload", f"--engine_url={url}", "--publish_interval=1"],
    )
    check_metrics(tmp_path)
    assert_serves(url, model, tmp_path / "checkpoints" / "final_model", version=NUM_STEPS)


def test_five_steps_with_the_engine_restarted_on_new_weights(tmp_path: Path) -> None:
    """The trainer starts vLLM and restarts it on a checkpoint after the third of five steps, itself under torchrun.

    Starts of vLLM are most of the time here; one hand-over and the start are what is shown. With what torchrun sets
    for its own processes vLLM would wait for ever for a store. Two processes: test_vllm_resume.py.
    """
    python = vllm_python()
    model = make_tiny_model(tmp_path / "model")
    hub_port, engine_port = free_port(), free_port()
    run_loop(
        tmp_path,
        model,
        hub_port=hub_port,
        engine_port=engine_port,
        trainer_flags=[
            "--bridge=restart",
            "--engine=vllm",
            f"--vllm_python={python}",
            f"--vllm_port={engine_port}",
            f"--publish_interval={RESTART_INTERVAL}",
            f"--max_model_len={MAX_MODEL_LEN}",
            f"--engine_timeout_s={STARTUP_TIMEOUT_S}",
        ],
        launcher=["-m", "torch.distributed.run", "--nproc_per_node=1", "--standalone"],
    )
    check_metrics(tmp_path)
    assert num_starts(tmp_path) >= 1 + (NUM_STEPS - 1) // RESTART_INTERVAL
    assert not answers(f"http://127.0.0.1:{engine_port}/health"), "the engine was left behind"


def num_starts(directory: Path) -> int:
    """Return how often a trainer with this log directory has started its engine."""
    path = directory / "engine.log"
    return path.read_text(errors="replace").count("\n--- ") if path.exists() else 0


def assert_serves(url: str, model: Path, weights: Path, *, version: int) -> None:
    """Assert that the engine, started on `model`, samples from `weights` by now and names them as `version`."""
    served = httpx.get(f"{url}/weight_info", trust_env=False).json()
    assert served["weight_version"] == str(version)
    samples = sample(url, str(model), PROMPT, num_samples=8, max_tokens=12)
    assert largest_gap(samples, weights) <= MAX_GAP
    assert largest_gap(samples, model) > 10 * MAX_GAP, "the weights are still the first ones"


def run_loop(
    directory: Path,
    model: Path,
    *,
    hub_port: int,
    engine_port: int,
    trainer_flags: list[str],
    served_name: str | None = None,
    launcher: Sequence[str] = (),
) -> None:
    """Run hub, environment and trainer until the trainer ends; everything they write is in `directory`.

    `served_name` is what the environment asks for; None: the model's path.
    """
    hub_url = f"http://127.0.0.1:{hub_port}"
    hub_argv = ["-m", "atroposlib.cli.run_api", "--port", str(hub_port)]
    trainer_argv = [
        *launcher,
        "-m",
        "example_trainer.grpo",
        f"--model={model}",
        f"--hub_url={hub_url}",
        "--device=cpu",
        "--batch_size=16",
        f"--num_steps={NUM_STEPS}",
        "--lr=3e-3",
        "--checkpoint_interval=0",
        f"--save_path={directory / 'checkpoints'}",
        f"--metrics_path={directory / 'metrics.jsonl'}",
        f"--log_dir={directory}",
        f"--max_logprob_gap={MAX_GAP}",
        *trainer_flags,
    ]
    environment_argv = [
        str(ROOT / "tests" / "e2e" / "parity_env.py"),
        "serve",
        f"--env.rollout_server_url={hub_url}",
        f"--env.tokenizer_name={model}",
        f"--openai.base_url=http://127.0.0.1:{engine_port}/v1",
        f"--openai.model_name={served_name or model}",
        "--openai.server_type=vllm",
    ]
    with running("hub", hub_argv, log_path=directory / "hub.log") as hub:
        wait_for(lambda: answers(f"{hub_url}/"), timeout_s=60, process=hub)
        with (
            running("trainer", trainer_argv, log_path=directory / "trainer.log") as trainer,
            running(
                "environment", environment_argv, log_path=directory / "environment.log"
            ) as environment,
        ):
            status = trainer.wait(420)
            assert status == 0, ends_of(trainer, environment, hub)
            assert environment.popen.poll() in (None, 0), ends_of(environment)


def check_metrics(directory: Path) -> list[float]:
    """Assert what every run must have written, print the figures that matter, return the gaps there are."""
    steps: list[dict[str, Any]] = [
        json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()
    ]
    assert [s["step"] for s in steps] == list(range(1, NUM_STEPS + 1))
    gaps = [s["logprob_gap_max"] for s in steps]
    print("gaps", gaps, "reward", [round(s["reward_mean"], 3) for s in steps])
    compared = [gap for gap in gaps if gap is not None]
    assert compared, "sampled and own logprobs were never compared"
    assert max(compared) <= MAX_GAP
    staleness = [s["staleness_max"] for s in steps]
    assert any(age is not None for age in staleness), "no sample says which weights it comes from"
    return compared


def ends_of(*processes: Process) -> str:
    return "\n".join(f"--- {p.name}\n{p.log()[-4000:]}" for p in processes)
