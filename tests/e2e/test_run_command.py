"""`atropos-grpo-run` with everything it can start: hub, engine, environment and trainer, in one command."""

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.builders.programs import processes
from tests.builders.rows import rows_in
from tests.processes import ROOT, Process, answers, free_port, wait_for
from tests.tiny_model import make_tiny_model

pytestmark = [pytest.mark.e2e, pytest.mark.drill, pytest.mark.timeout(240)]


class Run:
    """One directory with a model, and the command on it."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.model = make_tiny_model(directory / "model")
        self.hub_port, self.engine_port = free_port(), free_port()
        self.processes: list[Process] = []

    def start(self, *flags: str) -> Process:
        argv = [
            *("-m", "example_trainer.run", f"--model={self.model}", "--engine=local"),
            *("--run_hub", f"--hub_url=http://127.0.0.1:{self.hub_port}"),
            *(f"--environment={ROOT / 'tests' / 'e2e' / 'parity_env.py'}", "--device=cpu"),
            *(f"--vllm_port={self.engine_port}", "--batch_size=8", "--lr=1e-3"),
            *("--save_path=checkpoints", "--log_dir=logs", "--max_logprob_gap=1e-3", *flags),
            *("--", "--env.max_num_workers=4"),
        ]
        path = self.directory / f"run_{len(self.processes) + 1}.log"
        self.processes.append(Process("atropos-grpo-run", argv, log_path=path))
        return self.processes[-1]

    def steps(self) -> list[dict[str, Any]]:
        return rows_in(self.directory / "checkpoints" / "metrics.jsonl")

    def log(self, name: str) -> str:
        path = self.directory / "logs" / name
        return path.read_text(errors="replace")[-3000:] if path.exists() else f"no {name}"

    def assert_nothing_left(self) -> None:
        assert not answers(f"http://127.0.0.1:{self.hub_port}/"), "the hub was left behind"
        assert not answers(f"http://127.0.0.1:{self.engine_port}/health"), "the engine was left"
        commands = [command for *_, command in processes()]
        assert [each for each in commands if str(self.directory) in each] == []


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Run]:
    run = Run(tmp_path)
    yield run
    for process in run.processes:
        process.stop()


def engine_pid(run: Run) -> int:
    lines = (run.directory / "run_1.log").read_text().splitlines()
    started = [line for line in lines if f":{run.engine_port} started as process" in line]
    return int(started[-1].rpartition("process ")[2].partition(";")[0])


def test_an_engine_that_is_killed_ends_the_run_and_resume_goes_on(run: Run) -> None:
    first = run.start("--num_steps=1000000", "--checkpoint_interval=1")
    wait_for(lambda: len(run.steps()) >= 2, timeout_s=150, process=first)
    os.kill(engine_pid(run), signal.SIGKILL)
    assert first.wait(60) == 1, first.log()[-4000:]
    assert "was ended by SIGKILL" in first.log()
    assert "end of logs/engine.log" in first.log()
    run.assert_nothing_left()
    done = run.steps()[-1]["step"]

    second = run.start(f"--num_steps={done + 1}", "--checkpoint_interval=1", "--resume")
    assert second.wait(150) == 0, second.log()[-4000:] + run.log("environment.log")
    assert run.steps()[-1]["step"] == done + 1
    assert (run.directory / "checkpoints" / "final_model" / "config.json").is_file()
    run.assert_nothing_left()


def test_one_command_starts_everything_and_sigterm_saves_and_stops_it(run: Run) -> None:
    process = run.start("--num_steps=1000000", "--checkpoint_interval=0")
    wait_for(lambda: len(run.steps()) >= 1, timeout_s=150, process=process)
    process.popen.terminate()
    assert process.wait(60) == 0, process.log()[-4000:]
    for name in ("hub", "engine", "environment"):
        assert f"its log is logs/{name}.log" in process.log()
    assert run.steps()[0]["logprob_gap_max"] < 1e-3
    last = run.steps()[-1]["step"]
    assert (run.directory / "checkpoints" / f"step_{last}").is_dir()
    run.assert_nothing_left()
