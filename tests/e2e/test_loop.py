"""The whole loop as a user runs it: hub, engine, environment and trainer are processes that speak HTTP."""

from __future__ import annotations

import json
import urllib.request
from pathlib import Path

import pytest

from tests.processes import ROOT, Process, answers, free_port, running, wait_for
from tests.tiny_model import make_tiny_model

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(240)]

ENVIRONMENT = ROOT / "tests" / "e2e" / "parity_env.py"
NUM_STEPS = 4


def hub_argv(port: int) -> list[str]:
    return ["-m", "atroposlib.cli.run_api", "--port", str(port)]


def engine_argv(model: Path, port: int) -> list[str]:
    return ["-m", "atroposlib.engine.server", "--model", str(model), "--port", str(port)]


def environment_argv(hub: int, engine: int, model: Path) -> list[str]:
    return [
        str(ENVIRONMENT),
        "serve",
        f"--env.rollout_server_url=http://127.0.0.1:{hub}",
        f"--env.tokenizer_name={model}",
        f"--openai.base_url=http://127.0.0.1:{engine}/v1",
        f"--openai.model_name={model}",
    ]


def trainer_argv(hub: int, engine: int, model: Path, bridge: str, out: Path) -> list[str]:
    return [
        "-m",
        "example_trainer.grpo",
        f"--model={model}",
        f"--hub_url=http://127.0.0.1:{hub}",
        f"--bridge={bridge}",
        "--engine=local",
        f"--vllm_port={engine}",
        f"--engine_url=http://127.0.0.1:{engine}",
        "--batch_size=16",
        f"--num_steps={NUM_STEPS}",
        "--lr=1e-3",
        "--publish_interval=2" if bridge == "restart" else "--publish_interval=1",
        "--checkpoint_interval=2",
        f"--save_path={out / 'checkpoints'}",
        f"--metrics_path={out / 'metrics.jsonl'}",
        f"--log_dir={out}",
        "--max_logprob_gap=1e-3",
    ]


def get(port: int, path: str) -> dict[str, object]:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=5) as response:
        value: dict[str, object] = json.load(response)
        return value


@pytest.mark.parametrize("bridge", ["reload", pytest.param("restart", marks=pytest.mark.drill)])
def test_the_loop_trains_and_the_engine_follows(bridge: str, tmp_path: Path) -> None:
    model = make_tiny_model(tmp_path / "model")
    hub_port, engine_port = free_port(), free_port()
    with running("hub", hub_argv(hub_port), log_path=tmp_path / "hub.log") as hub:
        wait_for(lambda: answers(f"http://127.0.0.1:{hub_port}/"), timeout_s=30, process=hub)
        engine: Process | None = None
        if bridge == "reload":  # with `restart` the trainer owns the engine
            engine = Process(
                "engine", engine_argv(model, engine_port), log_path=tmp_path / "engine.log"
            )
        try:
            trainer_args = trainer_argv(hub_port, engine_port, model, bridge, tmp_path)
            with (
                running("trainer", trainer_args, log_path=tmp_path / "trainer.log") as trainer,
                running(
                    "environment",
                    environment_argv(hub_port, engine_port, model),
                    log_path=tmp_path / "environment.log",
                ) as environment,
            ):
                assert trainer.wait(200) == 0, trainer.log()[-4000:] + environment.log()[-4000:]
                assert environment.popen.poll() in (None, 0), environment.log()[-4000:]
                if engine is not None:
                    assert engine.popen.poll() is None, engine.log()[-4000:]
                    version = get(engine_port, "/weight_info")["weight_version"]
                    assert version == str(NUM_STEPS)
        finally:
            if engine is not None:
                assert engine.stop() in (0, -15)
        if bridge == "restart":
            assert not answers(f"http://127.0.0.1:{engine_port}/health"), (
                "the engine was left behind"
            )

        ledger = get(hub_port, "/ledger")
        assert ledger["rejected"] in ({}, 0), ledger

    steps = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [s["step"] for s in steps] == list(range(1, NUM_STEPS + 1))
    assert all(s["num_sequences"] == 16 for s in steps)
    gaps = [s["logprob_gap_max"] for s in steps if s["logprob_gap_max"] is not None]
    assert gaps, "the logprob comparison never ran"
    assert max(gaps) <= 1e-3
    assert (tmp_path / "checkpoints" / "final_model" / "model.safetensors").is_file()
