"""A day of a hub in virtual time: no group is lost or trained twice, and each environment gets its share."""

from __future__ import annotations

import pytest
from helpers_simulated_day import SimulatedRun, simulate

pytestmark = pytest.mark.timeout(120)


def check_events(runs: list[SimulatedRun]) -> None:
    """Each kind of failure happened."""
    for run in runs:
        assert run.num_steps > 0
        assert run.coordinator.ledger().duplicates > 0
    assert sum(run.num_resumes for run in runs) > 0
    assert sum(run.num_env_crashes for run in runs) > 20


@pytest.mark.drill
async def test_a_small_day_keeps_every_group() -> None:
    runs = await simulate(num_runs=2, num_environments=60, hours=6.0)
    check_events(runs)
    state = runs[0].coordinator.state
    state.queue.remove([next(iter(state.queue))])  # the check sees a lost group
    with pytest.raises(AssertionError, match="produced"):
        runs[0].check_ledger()


@pytest.mark.slow
@pytest.mark.timeout(900)
async def test_24_hours_of_a_thousand_environments_keep_every_group() -> None:
    check_events(await simulate(num_runs=1, num_environments=1000, hours=24.0))
