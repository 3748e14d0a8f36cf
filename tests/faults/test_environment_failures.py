"""Failures of an environment's own code: when they end the run, who is told, what is counted (real processes)."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from atroposlib.client import TrainerClient
from tests.faults.closing import closing_counts
from tests.faults.drivers import (
    HubProcess,
    assert_balanced,
    children,
    eventually,
    hub_process,
    registration,
)
from tests.faults.scripted_engine import ScriptedEngine
from tests.processes import ROOT, running

pytestmark = pytest.mark.e2e

SCRIPT = str(ROOT / "tests" / "faults" / "faulty_env.py")
MAX_CONSECUTIVE = 5


async def open_run(hub: HubProcess) -> None:
    """Register a trainer and let environments in."""
    with TrainerClient(hub.url) as trainer:
        await asyncio.to_thread(trainer.register, registration(max_token_len=64))
        assert await asyncio.to_thread(trainer.lease_batch) is None


def environment_argv(hub: HubProcess, engine: ScriptedEngine, *flags: str) -> list[str]:
    return [
        *(SCRIPT, "serve", f"--env.rollout_server_url={hub.url}", "--env.max_batches_offpolicy=4"),
        *(f"--env.max_consecutive_failures={MAX_CONSECUTIVE}", f"--openai.base_url={engine.url}"),
        *flags,
    ]


def state_at(hub: HubProcess) -> dict[str, Any]:
    (environment,) = hub.get("/explain")["environments"]
    return dict(environment)


@pytest.mark.timeout(120)
async def test_equal_failures_end_the_run_with_that_error_and_the_hub_is_told(
    tmp_path: Path,
) -> None:
    with hub_process(tmp_path) as hub:
        async with ScriptedEngine() as engine:
            await open_run(hub)
            argv = environment_argv(hub, engine, "--env.has_faults=false", "--env.fails_from=8")
            with running("environment", argv, log_path=tmp_path / "log") as environment:
                code = await asyncio.to_thread(environment.wait, 60)
            log = environment.log()
        ledger, state = hub.get("/ledger"), state_at(hub)
    assert code == 1, log[-4000:]
    error = f"error: {MAX_CONSECUTIVE} items in a row failed with LookupError: the same fault again"
    assert error in log.splitlines(), log[-4000:]
    assert log.count("Traceback (most recent call last)") == 1  # of the first failure, not of each
    # Good ones under way at the last failure are given up with it: no groups yet, but counted.
    counts = closing_counts(log)
    accepted = counts["accepted"]
    assert 1 <= accepted == counts["stored"] == counts["with groups"] <= 8
    assert (counts["held"], counts["dropped"], counts["without"]) == (0, {}, 0)
    assert set(counts["failed"]) == {"LookupError"}
    assert counts["failed"]["LookupError"] >= MAX_CONSECUTIVE
    assert counts["begun"] == accepted + counts["given up"] + counts["unfinished"]
    assert ledger["produced"] == ledger["queued"] == accepted
    assert_balanced(ledger)
    assert state["state"] == "disconnected", state


@pytest.mark.timeout(120)
async def test_environment_whose_code_exits_goes_on_and_counts_it(tmp_path: Path) -> None:
    """SystemExit and KeyboardInterrupt would stop the event loop with every group that is held."""
    with hub_process(tmp_path) as hub:
        async with ScriptedEngine() as engine:
            await open_run(hub)
            argv = environment_argv(hub, engine)
            with running("environment", argv, log_path=tmp_path / "log") as environment:

                def num_queued() -> int:
                    assert environment.popen.poll() is None, environment.log()[-4000:]
                    return int(hub.get("/ledger")["queued"])

                await eventually(lambda: num_queued() >= 12, timeout_s=60, what="groups")
                assert children(environment.popen.pid) == []
                assert await asyncio.to_thread(environment.stop) == 0, environment.log()[-4000:]
        ledger = hub.get("/ledger")
    log = environment.log()
    counts = closing_counts(log)
    assert counts["failed"]["ExitRaised"] == counts["author"]["exited"] == 2
    assert ledger["produced"] == ledger["queued"] == counts["accepted"] == counts["stored"]
    assert "SystemExit: 3 was raised by the environment's code" in log
    assert "KeyboardInterrupt:  was raised by the environment's code" in log
