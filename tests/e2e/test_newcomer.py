"""A newcomer's first hour in a terminal: the README's environment, from `check` to `serve`.

The expected screens are text in which `...` stands for any text, also for several lines; a screen may show more.
"""

import contextlib
import json
import os
import pty
import re
import select
import signal
import sys
import termios
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from atroposlib.client import TrainerClient, TrainerRegistration
from tests.contract.test_readme import environment_source
from tests.frontend.helpers_pages import read_page
from tests.processes import ROOT, Process, answers, free_port, running, wait_for

pytestmark = [pytest.mark.e2e, pytest.mark.drill, pytest.mark.timeout(300)]

STEP_S = 60
"""Limit for what a person would wait a few seconds for; the machine may be busy."""

CHECKED = """
PASS aligned ...
PASS token_exact ...
PASS evaluates ...
count_vowels: ... passed, 0 failed
"""
PROCESSED = """
writing groups to data/count_vowels.jsonl ...
groups: data/count_vowels.jsonl
next: open data/count_vowels.html
"""
EVALUATED = "count_vowels_eval ... accuracy ... 0.125"
WITHOUT_ENGINE = """
Inference server http://127.0.0.1:... is not ready: ... cannot connect: Connection refused
"""
WITH_ENGINE_AGAIN = """
Inference server http://127.0.0.1:... is not ready: ...
Inference server http://127.0.0.1:... is ready ...
groups: data/count_vowels_1.jsonl
next: open data/count_vowels_1.html
"""
WITHOUT_TRAINER = "waiting for the trainer"
SERVED = "groups accepted"


class Terminal:
    """A command in a terminal of 100 columns."""

    def __init__(self, directory: Path, *argv: str) -> None:
        self._written = b""
        self._status: int | None = None
        self._pid, self._fd = pty.fork()
        if self._pid == 0:
            os.chdir(directory)
            os.environ |= {"TERM": "xterm", "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
            os.execv(sys.executable, [sys.executable, *argv])
        termios.tcsetwinsize(self._fd, (40, 100))

    @property
    def screen(self) -> str:
        """What was written so far, without control sequences; a line that was drawn again stands there again."""
        text = self._written.decode(errors="replace").replace("\r\n", "\n")
        return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", text).replace("\r", "\n")

    def shows(self, expected: str) -> bool:
        """Whether `expected` is on the screen, wherever its lines are broken."""
        parts = [re.escape(" ".join(part.split())) for part in expected.split("...")]
        return re.search(".*".join(parts), " ".join(self.screen.split())) is not None

    def wait_for(self, expected: str) -> None:
        """Wait until the screen shows `expected`."""
        deadline = time.monotonic() + STEP_S
        while not self.shows(expected):
            assert time.monotonic() < deadline, f"no {expected}\non this screen:\n{self.screen}"
            assert self._read(), f"no {expected}\non the last screen:\n{self.screen}"

    def press_ctrl_c(self) -> None:
        os.write(self._fd, b"\x03")

    def end(self) -> int:
        """Wait for the command's end and return its exit code."""
        deadline = time.monotonic() + STEP_S
        while self._read():
            assert time.monotonic() < deadline, f"still running:\n{self.screen}"
        return self._wait()

    def close(self) -> None:
        """Kill the command if it still runs."""
        if self._status is None:
            os.kill(self._pid, signal.SIGKILL)
            self._wait()
        os.close(self._fd)

    def _read(self) -> bool:
        """Take in what was written; False after the end."""
        ready, _, _ = select.select([self._fd], [], [], 0.1)
        if not ready:
            return True
        try:
            written = os.read(self._fd, 65536)
        except OSError:  # how Linux reports that no process has the terminal open
            return False
        self._written += written
        return bool(written)

    def _wait(self) -> int:
        if self._status is None:
            self._status = os.waitstatus_to_exitcode(os.waitpid(self._pid, 0)[1])
        return self._status


class Desk:
    """The newcomer's directory with `count_vowels.py`, and the ports of an engine and a hub."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.engine_port, self.hub_port = free_port(), free_port()
        tokenizer = "    def load_tokenizer(self):\n        return ByteTokenizer()\n\n"
        source = environment_source().replace('    name = "count', f'{tokenizer}    name = "count')
        engine = "from atroposlib.inference.harness import ByteTokenizer\n"
        (directory / "count_vowels.py").write_text(engine + source)

    @contextlib.contextmanager
    def types(self, command: str, *flags: str) -> Iterator[Terminal]:
        """Run `python count_vowels.py command flags` in a terminal."""
        engine = [f"--openai.base_url=http://127.0.0.1:{self.engine_port}/v1"]
        terminal = Terminal(
            self.directory,
            "count_vowels.py",
            command,
            *([] if command == "check" else engine),
            *flags,
        )
        try:
            yield terminal
        finally:
            terminal.close()

    @contextlib.contextmanager
    def engine(self) -> Iterator[Process]:
        """Run the scripted engine, as `envs/guides/settings.md` says."""
        script = json.dumps({"answers": ["0", "3", "4", "5", "8"]})
        argv = ["-m", "atroposlib.inference.scripted_engine", f"--port={self.engine_port}"]
        argv += ["--model=Qwen/Qwen3-0.6B", f"--script={script}"]
        with running("engine", argv, log_path=self.directory / "engine.log") as process:
            url = f"http://127.0.0.1:{self.engine_port}/health"
            wait_for(lambda: answers(url), timeout_s=STEP_S, process=process)
            yield process

    @contextlib.contextmanager
    def hub(self) -> Iterator[str]:
        argv = ["-m", "atroposlib.cli.run_api", "--memory", f"--port={self.hub_port}"]
        url = f"http://127.0.0.1:{self.hub_port}"
        with running("hub", argv, log_path=self.directory / "hub.log") as process:
            wait_for(lambda: answers(f"{url}/healthz"), timeout_s=STEP_S, process=process)
            yield url


def test_the_first_hour(tmp_path: Path) -> None:
    desk = Desk(tmp_path)
    with desk.types("check") as terminal:
        assert terminal.end() == 0, terminal.screen
        terminal.wait_for(CHECKED)

    with desk.engine():
        with desk.types("process", "--env.total_steps=4") as terminal:
            assert terminal.end() == 0, terminal.screen
            terminal.wait_for(PROCESSED)
        groups = (tmp_path / "data/count_vowels.jsonl").read_text().splitlines()
        assert [max(json.loads(group)["scores"]) for group in groups] == [1.0] * 4
        page = read_page(tmp_path / "data/count_vowels.html")
        assert "How many vowels" in page.columns["preview"][0]

        with desk.types("evaluate", "--env.data_dir_to_save_evals=evals") as terminal:
            assert terminal.end() == 0, terminal.screen
            terminal.wait_for(EVALUATED)
        assert json.loads((tmp_path / "evals/metrics.json").read_text())["results"]["all"] == {
            "eval/accuracy": 0.125
        }

    with desk.types("process", "--env.total_steps=4") as terminal:
        terminal.wait_for(WITHOUT_ENGINE)
        with desk.engine():
            assert terminal.end() == 0, terminal.screen
        terminal.wait_for(WITH_ENGINE_AGAIN)

    with desk.engine(), desk.hub() as url, TrainerClient(url) as trainer:
        with desk.types("serve", f"--env.rollout_server_url={url}") as terminal:
            terminal.wait_for(WITHOUT_TRAINER)
            trainer.register(
                TrainerRegistration(
                    batch_size=16,
                    max_token_len=2048,
                    checkpoint_dir=str(tmp_path),
                    save_checkpoint_interval=0,
                    starting_step=0,
                    num_steps=10,
                )
            )
            batch = trainer.lease_batch(wait_s=STEP_S)
            assert batch is not None, terminal.screen
            assert sum(len(group.scores) for group in batch.groups) == 16
            trainer.ack(batch)
            terminal.press_ctrl_c()
            assert terminal.end() == 0, terminal.screen
            terminal.wait_for(SERVED)
    assert "Traceback" not in terminal.screen
