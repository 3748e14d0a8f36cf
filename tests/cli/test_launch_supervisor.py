"""Real processes under the launcher: order, health, restarts and their cap, and the stop of everything."""

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any, TypeAlias

import pytest

from atroposlib.cli.launch import supervisor
from atroposlib.cli.launch.supervisor import (
    Launcher,
    Program,
    free_port,
    launched,
    locked,
    terminate_like_interrupt,
)
from atroposlib.errors import ConfigError, EngineError
from tests.builders.programs import is_running
from tests.runtime.helpers_runtime import until

Launched: TypeAlias = Callable[[], AbstractAsyncContextManager[Launcher]]


def python(code: str) -> list[str]:
    return [sys.executable, "-S", "-c", code]


def shell(script: str) -> list[str]:
    return ["sh", "-c", script]


SLEEP = python("import time; time.sleep(600)")


@pytest.fixture(autouse=True)
def _fast(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervisor, "POLL_INTERVAL_S", 0.01)
    monkeypatch.setattr(supervisor, "CHECK_INTERVAL_S", 0.01)
    monkeypatch.setattr(supervisor, "STOP_GRACE_S", 1.0)


@pytest.fixture
def said() -> list[str]:
    return []


@pytest.fixture
def launch(tmp_path: Path, said: list[str]) -> Launched:
    return lambda: launched(
        log_dir=tmp_path,
        env=os.environ,
        say=lambda name, text: said.append(f"{name} {text}"),
        first_pause_s=0.01,
    )


@pytest.fixture
def bystander() -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen(SLEEP) as process:
        yield process
        process.kill()


async def run_forever(launch: Launched, *programs: Program) -> None:
    async with launch() as launcher:
        for program in programs:
            launcher.start(program)
        await asyncio.Event().wait()


async def test_a_program_starts_after_those_that_it_needs(launch: Launched, tmp_path: Path) -> None:
    note = f"echo $0 >> {tmp_path}/order"
    async with launch() as launcher:
        launcher.start(
            Program(name="a", argv=["sh", "-c", f"sleep 0.1; {note}", "a"], ready="exit")
        )
        b = launcher.start(Program(name="b", argv=["sh", "-c", note, "b"], needs=["a"]))
        await b.has_ended.wait()
    assert (tmp_path / "order").read_text().split() == ["a", "b"]


async def test_a_failed_job_keeps_those_that_need_it_from_starting(
    launch: Launched, tmp_path: Path
) -> None:
    a = Program(name="a", argv=shell("exit 1"), ready="exit")
    b = Program(name="b", argv=shell(f"touch {tmp_path}/b"), needs=["a"])
    with pytest.raises(EngineError, match="a exited with status 1"):
        await run_forever(launch, a, b)
    assert not (tmp_path / "b").exists()


@pytest.mark.parametrize("ready", ["/", "port"])
async def test_a_server_is_ready_when_it_answers(launch: Launched, ready: str) -> None:
    port = free_port()
    server = [sys.executable, "-m", "http.server", "--bind", "127.0.0.1", str(port)]
    async with launch() as launcher:
        running = launcher.start(
            Program(name="server", argv=server, url=f"http://127.0.0.1:{port}", ready=ready)
        )
        assert not running.is_ready.is_set()
        await running.is_ready.wait()
        assert running.state == "ready"


async def test_a_server_on_a_port_in_use_is_not_started(launch: Launched) -> None:
    server = await asyncio.start_server(lambda reader, writer: writer.close(), "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    async with server:
        hub = Program(name="hub", argv=SLEEP, url=f"http://127.0.0.1:{port}", ready="port")
        with pytest.raises(EngineError, match=f"hub: cannot listen on port {port}"):
            await run_forever(launch, hub)


async def test_a_silent_server_is_stopped_and_named(launch: Launched) -> None:
    url = f"http://127.0.0.1:{free_port()}"
    hub = Program(name="hub", argv=SLEEP, url=url, ready="/", timeout_s=0.05)
    with pytest.raises(EngineError, match=r"hub did not answer for 0\.05 s"):
        await run_forever(launch, hub)


async def test_a_killed_program_is_started_again(launch: Launched, said: list[str]) -> None:
    async with launch() as launcher:
        running = launcher.start(Program(name="env", argv=SLEEP, restart="on-failure"))
        await running.is_ready.wait()
        first = running.process.pid
        assert first is not None
        os.kill(first, signal.SIGKILL)
        await until(lambda: running.num_restarts == 1 and running.process.pid)
        assert running.process.pid != first
    assert said[0].startswith("env was ended by SIGKILL; restart in 0.0")


async def test_restarts_in_a_row_have_a_limit(launch: Launched, tmp_path: Path) -> None:
    script = f"echo x >> {tmp_path}/starts; echo no model; exit 1"
    env = Program(name="env", argv=shell(script), restart="on-failure", max_restarts=3)
    with pytest.raises(EngineError, match=r"status 1 after 3 restarts[\s\S]*no model"):
        await run_forever(launch, env)
    assert len((tmp_path / "starts").read_text().split()) == 4


async def test_a_wrong_flag_is_not_tried_again(launch: Launched, said: list[str]) -> None:
    trainer = Program(name="trainer", argv=shell("exit 2"), restart="on-failure")
    with pytest.raises(EngineError, match="trainer exited with status 2; command: .*exit 2"):
        await run_forever(launch, Program(name="hub", argv=SLEEP), trainer)
    assert said == []


@pytest.mark.parametrize(("restart", "starts"), [("on-failure", 1), ("never", 1), ("always", 3)])
async def test_a_program_that_ends_with_0_is_started_again_only_if_it_should_always_run(
    launch: Launched, tmp_path: Path, restart: Any, starts: int
) -> None:
    async with launch() as launcher:
        script = f"echo x >> {tmp_path}/starts; [ $(wc -l < {tmp_path}/starts) -lt 3 ] || sleep 600"
        script = script if restart == "always" else f"echo x >> {tmp_path}/starts"
        running = launcher.start(Program(name="hub", argv=shell(script), restart=restart))
        await until(lambda: running.num_restarts == 2 or running.has_ended.is_set())
        await until(lambda: len((tmp_path / "starts").read_text().split()) == starts)


async def test_pauses_before_restarts_grow(launch: Launched, said: list[str]) -> None:
    env = Program(name="env", argv=["false"], restart="on-failure", max_restarts=6)
    with pytest.raises(EngineError):
        await run_forever(launch, env)
    pauses = [float(text.split()[-2]) for text in said]
    assert pauses == sorted(pauses)
    assert pauses[0] == 0.0  # 0.01 s, printed with one digit
    assert pauses[-1] >= 0.2


async def test_the_end_of_the_block_stops_programs_and_their_children_and_spares_others(
    launch: Launched, tmp_path: Path, bystander: subprocess.Popen[bytes]
) -> None:
    async with launch() as launcher:
        script = f"sleep 600 & echo $! > {tmp_path}/child; wait"
        running = launcher.start(Program(name="env", argv=shell(script)))
        await until(lambda: (tmp_path / "child").exists() and (tmp_path / "child").read_text())
        pid = running.process.pid
    child = int((tmp_path / "child").read_text())
    assert pid is not None
    await until(lambda: not is_running(pid) and not is_running(child))
    assert bystander.poll() is None


async def test_programs_are_stopped_before_those_that_they_need(
    launch: Launched, tmp_path: Path
) -> None:
    script = f"trap 'echo $0 >> {tmp_path}/order; exit' TERM; touch {tmp_path}/$0; sleep 600 & wait"
    async with launch() as launcher:
        launcher.start(Program(name="hub", argv=["sh", "-c", script, "hub"]))
        launcher.start(Program(name="env", argv=["sh", "-c", script, "env"], needs=["hub"]))
        await until(lambda: (tmp_path / "hub").exists() and (tmp_path / "env").exists())
    assert (tmp_path / "order").read_text().split() == ["env", "hub"]


async def test_a_program_that_waits_for_its_restart_is_not_started_after_a_stop(
    launch: Launched, tmp_path: Path
) -> None:
    async with launch() as launcher:
        launcher._first_pause_s = 30.0
        program = Program(name="env", argv=["false"], restart="on-failure")
        running = launcher.start(program)
        await until(lambda: running.state == "restarting")
    assert running.state == "ended"
    assert running.num_restarts == 0


async def test_a_program_deaf_to_sigterm_is_killed(launch: Launched, tmp_path: Path) -> None:
    deaf = f"trap '' TERM; touch {tmp_path}/deaf; while :; do sleep 0.05; done"
    async with launch() as launcher:
        running = launcher.start(Program(name="engine", argv=shell(deaf)))
        await until((tmp_path / "deaf").exists)
        launcher.stop(running)
        assert running.process.poll() == -signal.SIGKILL


async def test_a_command_that_does_not_exist_is_an_error_of_that_program(launch: Launched) -> None:
    with pytest.raises(ConfigError, match="'/no/such/python' of the engine: no such program"):
        await run_forever(launch, Program(name="engine", argv=["/no/such/python"]))


def test_sigterm_unwinds_like_ctrl_c_and_the_handler_is_put_back() -> None:
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(KeyboardInterrupt), terminate_like_interrupt():
        signal.raise_signal(signal.SIGTERM)
    assert signal.getsignal(signal.SIGTERM) is before


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_signals_stop_everything_inside_the_block(launch: Launched, number: signal.Signals) -> None:
    pids: list[int] = []

    async def run() -> None:
        async with launch() as launcher:
            running = launcher.start(Program(name="hub", argv=SLEEP))
            await running.is_ready.wait()
            pids.append(running.process.pid or 0)
            os.kill(os.getpid(), number)
            await asyncio.Event().wait()

    with pytest.raises(KeyboardInterrupt):
        asyncio.run(run())
    assert not is_running(pids[0])


def test_two_runs_do_not_share_a_directory(tmp_path: Path) -> None:
    with locked(tmp_path / "run", flag="name"):
        with pytest.raises(ConfigError, match="name: another process runs there"):
            with locked(tmp_path / "run", flag="name"):
                pass
