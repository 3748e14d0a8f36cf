"""`atropos up` on the demo's run file: every part killed once, Ctrl-C, and the launcher killed."""

import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.builders.programs import processes, wait_until
from tests.builders.rows import rows_in
from tests.cli.helpers_launch import atropos, check_end, environment, make_model, short_demo

pytestmark = [pytest.mark.drill, pytest.mark.timeout(600)]

PARTS = ("run_api", "atroposlib.engine", "letter_reversal_server", "example_trainer.grpo")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("model") / "model")


@pytest.fixture
def up(tmp_path: Path, model: Path) -> Iterator[subprocess.Popen[bytes]]:
    """`atropos up` in a folder of its own, whose model is made already."""
    run_dir = tmp_path / "runs" / "short"
    run_dir.mkdir(parents=True)
    (run_dir / "model").symlink_to(model)
    with (tmp_path / "out").open("wb") as out:
        command = atropos("up", short_demo(tmp_path))
        process = subprocess.Popen(
            command, cwd=tmp_path, env=environment(), stdout=out, stderr=out, start_new_session=True
        )
    yield process
    process.kill()
    process.wait()


def test_a_run_survives_the_kill_of_each_part(up: subprocess.Popen[bytes], tmp_path: Path) -> None:
    run_dir = tmp_path / "runs" / "short"
    for num_steps, part in enumerate(PARTS, start=2):
        wait_for_steps(num_steps, up, tmp_path)
        os.kill(min(children(up.pid, part)), signal.SIGKILL)
    assert up.wait(400) == 0, (tmp_path / "out").read_text()[-3000:]
    said = (tmp_path / "out").read_text()
    assert said.count("was ended by SIGKILL; restart in") == len(PARTS)
    check_end(run_dir)
    assert (run_dir / "config.yaml").read_bytes() == (tmp_path / "run.yaml").read_bytes()
    assert left_of(run_dir) == []


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_no_process_is_left_behind(
    up: subprocess.Popen[bytes], tmp_path: Path, number: signal.Signals
) -> None:
    run_dir = tmp_path / "runs" / "short"
    wait_for_steps(1, up, tmp_path)
    assert len(children(up.pid, "")) == 5
    up.send_signal(number)
    assert up.wait(120) == (130 if number == signal.SIGINT else -signal.SIGKILL)
    if number == signal.SIGINT:
        assert left_of(run_dir) == []
    wait_until(lambda: not left_of(run_dir), timeout_s=60, said=lambda: str(left_of(run_dir)))


def left_of(run_dir: Path) -> list[str]:
    """Return the command lines of processes that work for a run."""
    return [command for *_, command in processes() if str(run_dir) in command]


def wait_for_steps(number: int, up: subprocess.Popen[bytes], directory: Path) -> None:
    """Wait until the trainer took a number of steps; the launcher must run until then."""

    def said() -> str:
        return (directory / "out").read_text()[-3000:]

    def are_taken() -> bool:
        assert up.poll() is None, said()
        return len(rows_in(directory / "runs" / "short" / "metrics.jsonl")) >= number

    wait_until(are_taken, timeout_s=300, said=said)


def children(parent: int, part: str) -> list[int]:
    """Return the processes that `parent` started for a part."""
    return [pid for pid, of, command in processes() if of == parent and part in command]
