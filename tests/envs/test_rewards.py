"""The promises of `atroposlib.envs.rewards`: a failure is data, a worker is replaced, nothing is left."""

import asyncio
import gc
import os
import signal
import sys
import warnings
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest

from atroposlib.envs.bridge import Bridge
from atroposlib.envs.rewards import Canary, RewardFailure, RewardWorkers
from atroposlib.errors import EnvError
from tests.builders.programs import is_running
from tests.processes import ROOT
from tests.runtime.helpers_runtime import until

MODULE = "tests.envs.helpers_rewards"


@pytest.fixture
async def workers() -> AsyncIterator[RewardWorkers]:
    async with RewardWorkers(memory_limit_mb=512, max_output_bytes=10_000) as pool:
        yield pool


async def run(
    workers: RewardWorkers, name: str, *args: object, timeout_s: float = 20.0, scope: str = "group"
) -> Any:
    return await workers.run(f"{MODULE}:{name}", *args, timeout_s=timeout_s, scope=scope)


async def test_a_value_comes_back_and_the_worker_is_kept(workers: RewardWorkers) -> None:
    first = await run(workers, "parent_pid")
    assert await run(workers, "add", 1, 0.5) == 1.5
    assert await run(workers, "parent_pid") == first != os.getpid()


async def test_calls_of_a_scope_share_a_process_and_others_share_no_state(
    workers: RewardWorkers,
) -> None:
    one = [await run(workers, "spoil", scope="one") for _ in range(2)]
    two = [await run(workers, "spoil", scope="two") for _ in range(2)]
    alone = [await workers.run(f"{MODULE}:spoil", timeout_s=20) for _ in range(2)]
    assert (one, two, alone) == ([1, 2], [1, 2], [1, 1])


async def test_a_call_that_changes_its_grader_is_a_failure_and_changes_no_other() -> None:
    canary = Canary(f"{MODULE}:grade", ["right", "wrong"], value=False)
    async with RewardWorkers(canary=canary) as workers:
        answers = ["wrong", "pay me", "wrong", "right", "end the canary", "wrong"]
        outcomes = [await run(workers, "grade", "right", answer) for answer in answers]
        assert [getattr(outcome, "reason", outcome) for outcome in outcomes] == [
            *(False, "canary", False),
            *(True, "canary", False),
        ]
        assert "a call that has the value False then gave {'value': True" in outcomes[1].detail
    async with RewardWorkers() as workers:  # the same calls without a canary
        outcomes = [await run(workers, "grade", "right", answer) for answer in answers[:3]]
        assert outcomes == [False, True, True]


async def test_a_worker_has_no_variable_that_is_not_listed_or_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in ("DATABASE_URL", "WANDB_API_KEY", "GH_PAT", "MY_RULES"):
        monkeypatch.setenv(name, "secret")
    async with RewardWorkers(variables=["MY_RULES"]) as workers:
        found = await run(workers, "variables")
    assert {name for name, value in found.items() if "secret" in value} == {"MY_RULES"}
    assert {"PATH", "HOME"} <= found.keys()


async def test_a_worker_that_is_killed_from_outside_costs_no_score(workers: RewardWorkers) -> None:
    server = await run(workers, "parent_pid")
    os.kill(server, signal.SIGKILL)
    assert await run(workers, "add", 1, 1) == 2
    assert workers.failures == {}


async def test_a_hang_is_killed_and_the_next_call_is_served(workers: RewardWorkers) -> None:
    before, server = await run(workers, "pid"), await run(workers, "parent_pid")
    outcome = await run(workers, "hang", timeout_s=0.1)
    assert outcome == RewardFailure(reason="timeout", detail="no result within 0.1 s")
    assert not is_running(before)
    assert await run(workers, "parent_pid") == server


async def test_a_kill_takes_the_children_of_the_scoring_code(
    workers: RewardWorkers, tmp_path: Path
) -> None:
    pid_file = tmp_path / "pid"
    await run(workers, "pid")
    outcome = await run(workers, "hang_with_a_child", str(pid_file), timeout_s=1.5)
    assert isinstance(outcome, RewardFailure)
    child = int(pid_file.read_text())
    await until(lambda: not is_running(child))


@pytest.mark.parametrize(
    ("name", "args", "reason", "said"),
    [
        ("leave", [], "exception", "SystemExit: 3"),
        ("fail", [], "exception", "ValueError: a bad completion"),
        ("die", [], "crash", "exit status 7. last words"),
        ("flood", [20_000], "output", "exceeds 10000 bytes"),
        ("hoard", [1 << 30], "memory", "MemoryError"),
        ("not_json", [], "output", "not JSON serializable"),
        ("give", ["nan"], "output", "not JSON compliant"),
        ("give", ["-inf"], "output", "not JSON compliant"),
        # Read with the reply behind it, or before that is there.
        ("forge", [0.0], "output", "Extra data|not the reply to this call"),
        ("forge_half_a_line", [0.0], "output", "cannot be read"),
        ("forge_and_die", [], "output", "not the reply to this call"),
        ("close_the_pipes_and_hang", [], "output", "closed the pipe"),
    ],
)
async def test_misbehaviour_is_a_failure_with_its_reason(
    workers: RewardWorkers, name: str, args: list[object], reason: str, said: str
) -> None:
    outcome = await run(workers, name, *args)
    assert isinstance(outcome, RewardFailure)
    assert outcome.reason == reason
    assert any(each in outcome.detail for each in said.split("|"))
    assert await run(workers, "add", 2, 2) == 4


@pytest.mark.parametrize("forgery", ["forge", "forge_half_a_line"])
async def test_a_forged_reply_never_becomes_the_score_of_another_call(
    workers: RewardWorkers, forgery: str
) -> None:
    for number in range(4):
        name = forgery if number % 2 else "add"
        outcome = await run(workers, name, *[number] * (2 - number % 2))
        assert outcome == 2 * number if number % 2 == 0 else isinstance(outcome, RewardFailure)
    assert workers.failures == {"output": 2}


async def test_output_between_two_calls_ends_the_process_that_wrote_it(
    workers: RewardWorkers, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    before = await run(workers, "pid")
    for number in range(2):
        mark = tmp_path / str(number)
        assert await run(workers, "forge_afterwards", 0.25, str(mark)) == 0.25
        await until(mark.exists)
        assert await run(workers, "add", number, 0.5) == number + 0.5
    assert not is_running(before)
    assert "wrote to its pipe; it is killed" in caplog.text


async def test_a_flooded_stderr_neither_blocks_nor_fills_memory(workers: RewardWorkers) -> None:
    assert await run(workers, "flood_stderr", 1 << 20) == "done"


async def test_a_failure_is_not_zero() -> None:
    failure = RewardFailure(reason="crash", detail="")
    assert failure != 0.0
    assert not failure


async def test_the_authors_mistakes_are_raised(workers: RewardWorkers) -> None:
    with pytest.raises(EnvError, match="no_such_function"):
        await run(workers, "no_such_function")
    with pytest.raises(EnvError, match="no_such_module"):
        await workers.run("no_such_module:score", timeout_s=20)
    with pytest.raises(TypeError, match="JSON"):
        await run(workers, "add", object(), 1)
    with pytest.raises(ValueError, match="package.module:function"):
        await workers.run("score", timeout_s=1)
    with pytest.raises(ValueError, match="module-level"):
        await workers.run(lambda: 1, timeout_s=1)
    assert await run(workers, "add", 1, 1) == 2


async def test_an_outage_is_not_the_texts_doing(workers: RewardWorkers) -> None:
    outcome = await run(workers, "miss_a_file")
    assert isinstance(outcome.error, OSError)
    with pytest.raises(EnvError, match="the sandbox does not start"):
        await run(workers, "need_a_sandbox")


async def test_a_preload_that_is_missing_is_named() -> None:
    async with RewardWorkers(preload=("no_such_package",)) as workers:
        with pytest.raises(EnvError, match="no_such_package"):
            await workers.run(f"{MODULE}:pid", timeout_s=20)


async def test_a_function_is_found_by_its_file_when_its_module_is_a_script(
    workers: RewardWorkers, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = tmp_path / "some_env.py"
    script.write_text("def score(text):\n    return len(text)\n\nassert __name__ != '__main__'\n")
    namespace = {"__name__": "__main__"}
    exec(compile(script.read_text().partition("assert")[0], script, "exec"), namespace)
    main = type(os)("__main__")
    main.__file__ = str(script)
    monkeypatch.setitem(sys.modules, "__main__", main)
    assert await workers.run(namespace["score"], "four", timeout_s=20) == 4  # type: ignore[arg-type]


async def test_workers_run_in_parallel() -> None:
    async with RewardWorkers(num_workers=2) as workers:
        pids = await asyncio.gather(*(run(workers, "parent_pid") for _ in range(2)))
    assert len(set(pids)) == 2
    assert not any(is_running(pid) for pid in pids)


async def test_a_cancelled_call_kills_its_worker(workers: RewardWorkers) -> None:
    before = await run(workers, "pid")
    call = asyncio.create_task(run(workers, "hang"))
    await asyncio.sleep(0.05)
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    assert not is_running(before)
    assert await run(workers, "add", 1, 1) == 2


@pytest.mark.skipif(sys.platform != "linux", reason="needs prctl")
async def test_a_hung_worker_does_not_outlive_a_killed_parent(tmp_path: Path) -> None:
    pid_file = tmp_path / "pid"
    script = (
        "import asyncio\n"
        "from pathlib import Path\n"
        "from atroposlib.envs.rewards import RewardWorkers\n"
        "async def main():\n"
        "    workers = RewardWorkers()\n"
        f"    pid = await workers.run('{MODULE}:pid', timeout_s=20)\n"
        f"    Path({str(pid_file)!r}).write_text(str(pid))\n"
        f"    await workers.run('{MODULE}:hang', timeout_s=60)\n"
        "asyncio.run(main())\n"
    )
    parent = await asyncio.create_subprocess_exec(sys.executable, "-c", script, cwd=ROOT)
    try:
        await until(lambda: pid_file.exists() and pid_file.read_text() != "")
    finally:
        parent.kill()
        await parent.wait()
    pid = int(pid_file.read_text())
    await until(lambda: not is_running(pid))


async def score(stack: AsyncExitStack) -> None:
    workers = await stack.enter_async_context(RewardWorkers())
    await workers.run("math:sqrt", 4.0, timeout_s=5)


async def open_bridge(stack: AsyncExitStack) -> None:
    bridge = Bridge(python="", script=Path(os.devnull), settings={})
    stack.push_async_callback(bridge.close)
    await bridge.open()


@pytest.mark.parametrize("start", [score, open_bridge])
def test_a_start_that_is_cancelled_twice_leaves_no_process(
    start: Callable[[AsyncExitStack], Awaitable[None]],
) -> None:
    """At twenty moments of the start; a process left would be reported when its loop is gone."""

    async def cancel_after(delay_s: float) -> None:
        async with AsyncExitStack() as stack:
            call = asyncio.ensure_future(start(stack))
            await asyncio.sleep(delay_s)
            call.cancel()
            await asyncio.sleep(0)
            call.cancel()
            await asyncio.gather(call, return_exceptions=True)

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", ResourceWarning)
        for i in range(20):
            asyncio.run(cancel_after(i * 0.0015))
        gc.collect()
    assert [str(each.message) for each in caught] == []
