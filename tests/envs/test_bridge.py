"""Bridge: calls of functions in a child process, which ends with its parent and is replaced after a crash."""

import asyncio
import logging
import os
import signal
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from atroposlib.envs import bridge as bridge_module
from atroposlib.envs.bridge import Bridge
from atroposlib.errors import EnvError
from tests.builders.programs import is_running
from tests.processes import ROOT
from tests.runtime.helpers_runtime import until

THEIR_SIDE = """
import asyncio, os, subprocess, sys, time
from contextlib import asynccontextmanager

@asynccontextmanager
async def bridge(*, name):
    if name == "broken":
        import a_module_that_is_missing
    cancelled = []
    daemon = subprocess.Popen(["sleep", "1000"], start_new_session=True)

    async def add(a, b):
        print("adding", a)
        await asyncio.sleep(a / 100)
        return a + b

    async def crash():
        print("something is wrong", file=sys.stderr, flush=True)
        os._exit(7)

    async def wait():
        try:
            await asyncio.sleep(1000)
        finally:
            cancelled.append(True)

    async def hang():
        time.sleep(1000)

    async def fail():
        raise KeyError("x")

    async def repeat(text):
        return text

    async def write():
        return {1, 2}

    async def num_cancelled():
        return len(cancelled)

    pids = [os.getppid(), os.getpid(), daemon.pid]
    functions = [add, crash, wait, hang, fail, write, repeat, num_cancelled]
    no_proxy = os.environ["no_proxy"]
    yield {"name": name, "pids": pids, "no_proxy": no_proxy}, {each.__name__: each for each in functions}
"""

PARENT = """
import asyncio, sys
from pathlib import Path
from atroposlib.envs.bridge import Bridge

async def main():
    bridge = Bridge(python="", script=Path(sys.argv[1]), settings={"name": "x"})
    print(*(await bridge.open())["pids"], flush=True)
    await bridge.call("hang")

asyncio.run(main())
"""


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "their_side.py"
    path.write_text(THEIR_SIDE)
    return path


@pytest.fixture
async def bridge(script: Path) -> AsyncIterator[Bridge]:
    made = Bridge(python="", script=script, settings={"name": "x"}, remedy="; install it")
    yield made
    await made.close()


async def test_calls_run_concurrently_and_return_their_results(bridge: Bridge) -> None:
    description = await bridge.open()
    assert description["name"] == "x"
    assert "127.0.0.1" in description["no_proxy"]
    sums = await asyncio.gather(*(bridge.call("add", a=9 - i, b=i) for i in range(9)))
    assert sums == [9] * 9


async def test_an_exception_of_the_child_is_raised_with_its_type(bridge: Bridge) -> None:
    with pytest.raises(EnvError, match="their_side: KeyError: 'x'"):
        await bridge.call("fail")
    with pytest.raises(EnvError, match="not JSON"):
        await bridge.call("write")
    assert await bridge.call("add", a=1, b=1) == 2


@pytest.mark.parametrize(
    ("name", "arguments", "error"),
    [("missing", {}, "KeyError: 'missing'"), ("add", {"a": 1}, "TypeError: .*'b'")],
)
async def test_a_call_that_the_child_cannot_make_fails(
    bridge: Bridge, name: str, arguments: dict[str, int], error: str
) -> None:
    with pytest.raises(EnvError, match=error):
        await asyncio.wait_for(bridge.call(name, **arguments), timeout=20)
    assert await bridge.call("add", a=1, b=1) == 2


async def test_arguments_that_are_not_json_leave_no_call_in_flight(bridge: Bridge) -> None:
    with pytest.raises(TypeError, match="set"):
        await bridge.call("repeat", text={1})
    assert bridge._child is not None
    assert bridge._child.replies == {}


async def test_output_of_the_childs_code_is_logged(
    bridge: Bridge, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "atroposlib.envs.bridge")
    await bridge.call("add", a=1, b=1)
    await bridge.close()
    assert "their_side: adding 1" in caplog.messages


async def test_a_crash_fails_the_calls_in_flight_and_the_next_call_starts_another_child(
    bridge: Bridge,
) -> None:
    waiting = asyncio.create_task(bridge.call("wait"))
    before = (await bridge.open())["pids"]
    with pytest.raises(EnvError, match=r"exit status 7\nsomething is wrong"):
        await bridge.call("crash")
    with pytest.raises(EnvError, match="exit status 7"):
        await waiting
    assert bridge.num_ended == 1
    assert await bridge.call("add", a=1, b=1) == 2
    assert not any(is_running(pid) for pid in before)


async def test_a_cancelled_call_is_cancelled_in_the_child(bridge: Bridge) -> None:
    await bridge.open()
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.5):
            await bridge.call("wait")
    assert await bridge.call("num_cancelled") == 1
    assert bridge.num_ended == 0


async def test_a_child_that_does_not_end_a_cancelled_call_is_killed(
    bridge: Bridge, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bridge_module, "CANCEL_GRACE_S", 0.1)
    before = (await bridge.open())["pids"]
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.5):
            await bridge.call("hang")
    await until(lambda: bridge.num_ended == 1)
    assert await bridge.call("add", a=1, b=1) == 2
    await until(lambda: not any(is_running(pid) for pid in before))


async def test_a_child_that_does_not_start_says_why(script: Path) -> None:
    broken = Bridge(python="", script=script, settings={"name": "broken"}, remedy="; install it")
    with pytest.raises(EnvError, match="No module named 'a_module_that_is_missing'; install it"):
        await broken.open()
    missing = Bridge(python="/nowhere/python", script=script, settings={})
    with pytest.raises(EnvError, match="cannot run /nowhere/python"):
        await missing.open()


async def test_close_ends_the_child_and_the_daemons_that_it_started(bridge: Bridge) -> None:
    pids = (await bridge.open())["pids"]
    assert all(map(is_running, pids))
    await bridge.close()
    assert not any(map(is_running, pids))
    assert bridge.num_ended == 0


async def test_close_fails_the_calls_in_flight(bridge: Bridge) -> None:
    await bridge.open()
    waiting = asyncio.create_task(bridge.call("wait"))
    await bridge.call("add", a=1, b=1)
    await bridge.close()
    with pytest.raises(EnvError, match="was closed"):
        await waiting


async def test_a_message_that_is_too_long_ends_the_child(
    bridge: Bridge, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bridge_module, "_LINE_LIMIT", 1000)
    with pytest.raises(EnvError, match="a message cannot be read"):
        await bridge.call("repeat", text="x" * 10_000)
    assert bridge.num_ended == 1


async def test_a_killed_parent_leaves_no_process(
    script: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also if the child's code hangs: its keeper ends it after its grace."""
    parent = await asyncio.create_subprocess_exec(
        sys.executable,
        "-c",
        PARENT,
        str(script),
        stdout=asyncio.subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    assert parent.stdout is not None
    pids = [int(pid) for pid in (await parent.stdout.readline()).split()]
    assert len(pids) == 3
    parent.send_signal(signal.SIGKILL)
    await parent.wait()
    await until(lambda: not any(is_running(pid) for pid in pids))
