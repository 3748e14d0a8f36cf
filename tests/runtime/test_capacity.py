"""How many items to start: a table, and two properties over random loads."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from atroposlib.envs.env_config import max_workers
from atroposlib.runtime.capacity import Load, num_to_start

BASE: dict[str, Any] = {
    "max_workers": 8, "running": 0, "group_size": 4, "batch_size": 16, "max_batches_offpolicy": 2,
}  # fmt: skip


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({}, 8),
        ({"running": 3}, 5),
        ({"queue_size": 5}, 3),
        ({"queue_size": 5, "held": 2}, 1),
        ({"queue_size": 8}, 0),
        ({"queue_size": 5, "running": 6}, 0),
        ({"max_batches_offpolicy": 0, "queue_size": 99}, 8),
        ({"batch_size": -1, "queue_size": 99}, 8),
        ({"queue_size": 8, "unallocated_fraction": 0.5, "min_batch_allocation": 0.5}, 4),
        ({"queue_size": 8, "unallocated_fraction": 0.5, "min_batch_allocation": 0.5,
          "self_queue_size": 4}, 0),
    ],
)  # fmt: skip
def test_table(change: dict[str, Any], expected: int) -> None:
    assert num_to_start(Load(**BASE | change)) == expected


loads = st.builds(
    Load,
    max_workers=st.integers(1, 64),
    running=st.integers(0, 80),
    held=st.integers(0, 40),
    group_size=st.integers(1, 16),
    batch_size=st.integers(16, 256),
    max_batches_offpolicy=st.integers(1, 8),
    queue_size=st.integers(0, 200),
)


@given(loads)
def test_queued_held_and_running_stay_within_the_bound(load: Load) -> None:
    started = num_to_start(load)
    assert started >= 0
    if started:
        ahead = (started + load.running + load.held + load.queue_size) * load.group_size
        assert ahead <= load.max_batches_offpolicy * load.batch_size
        assert started + load.running <= load.max_workers


@given(loads)
def test_idle_environment_with_an_empty_queue_always_works(load: Load) -> None:
    idle = Load(
        max_workers=load.max_workers,
        running=0,
        group_size=load.group_size,
        batch_size=load.batch_size,
        max_batches_offpolicy=load.max_batches_offpolicy,
    )
    assert num_to_start(idle) >= 1


def test_workers_follow_the_servers_unless_set() -> None:
    assert max_workers(configured=-1, per_node=8, num_servers=3) == 24
    assert max_workers(configured=5, per_node=8, num_servers=3) == 5
