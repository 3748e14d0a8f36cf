"""The whole loop as a user runs it: hub, engine, environment and trainer are processes that speak HTTP."""

import json
import urllib.request
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.builders.rows import rows_in, tokens_by_fate
from tests.faults.drivers import hub_process
from tests.processes import Process, answers, engine_argv, free_port, parity_argv, running
from tests.tiny_model import make_tiny_model

pytestmark = [pytest.mark.e2e, pytest.mark.drill, pytest.mark.timeout(240)]


def trainer_argv(
    hub_url: str, engine: int, model: Path, bridge: str, out: Path, *, num_steps: int
) -> list[str]:
    return [
        "-m",
        "example_trainer.grpo",
        f"--model={model}",
        f"--hub_url={hub_url}",
        f"--bridge={bridge}",
        "--engine=local",
        f"--vllm_port={engine}",
        f"--engine_url=http://127.0.0.1:{engine}",
        "--batch_size=16",
        f"--num_steps={num_steps}",
        "--lr=1e-3",
        "--publish_interval=2" if bridge == "restart" else "--publish_interval=1",
        "--checkpoint_interval=2",
        f"--save_path={out / 'checkpoints'}",
        f"--metrics_path={out / 'metrics.jsonl'}",
        f"--log_dir={out}",
        "--max_logprob_gap=1e-3",
    ]


@pytest.mark.parametrize(("bridge", "num_steps"), [("reload", 4), ("restart", 2)])
def test_the_loop_trains_and_the_engine_follows(
    bridge: str, num_steps: int, tmp_path: Path
) -> None:
    model = make_tiny_model(tmp_path / "model")
    engine_port = free_port()
    engine_url = f"http://127.0.0.1:{engine_port}"
    with ExitStack() as stack:
        engine: Process | None = None
        if bridge == "reload":  # with `restart` the trainer owns the engine
            engine_flags = engine_argv(model, engine_port)
            engine_log = tmp_path / "engine.log"
            engine = stack.enter_context(running("engine", engine_flags, log_path=engine_log))
        hub = stack.enter_context(hub_process(tmp_path))
        made_path = tmp_path / "made.jsonl"
        environment_argv = [
            *parity_argv(model, hub_url=hub.url, engine_url=engine_url),
            f"--env.data_path_to_save_groups={made_path}",
        ]
        trainer_args = trainer_argv(
            hub.url, engine_port, model, bridge, tmp_path, num_steps=num_steps
        )
        with (
            running("trainer", trainer_args, log_path=tmp_path / "trainer.log") as trainer,
            running(
                "environment", environment_argv, log_path=tmp_path / "environment.log"
            ) as environment,
        ):
            assert trainer.wait(200) == 0, trainer.log()[-4000:] + environment.log()[-4000:]
            assert environment.popen.poll() in (None, 0), environment.log()[-4000:]
            if engine is not None:
                assert engine.popen.poll() is None, engine.log()[-4000:]
                with urllib.request.urlopen(f"{engine_url}/weight_info") as response:
                    assert json.load(response)["weight_version"] == str(num_steps)
                assert engine.stop() in (0, -15)
        if bridge == "restart":
            assert not answers(f"{engine_url}/health"), "the engine was left behind"

        ledger = hub.get("/ledger")
        assert ledger["rejected"] in ({}, 0), ledger

    steps = rows_in(tmp_path / "metrics.jsonl")
    assert [s["step"] for s in steps] == list(range(1, num_steps + 1))
    assert all(s["num_sequences"] == 16 for s in steps)
    assert ledger["expired"] == ledger["dead"] == 0, ledger
    taken = rows_in(made_path)[: sum(s["num_groups"] for s in steps)]
    sampled = sum(label != -100 for row in taken for mask in row["masks"] for label in mask)
    assert sum(tokens_by_fate(steps).values()) == sampled
    gaps = [s["logprob_gap_max"] for s in steps if s["logprob_gap_max"] is not None]
    assert gaps, "the logprob comparison never ran"
    assert max(gaps) <= 1e-3
    assert (tmp_path / "checkpoints" / "final_model" / "model.safetensors").is_file()
