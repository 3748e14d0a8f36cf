"""`optim.py`: the learning rate of every schedule, step by step. `test_trainer_resume.py` resumes one."""

from typing import Any

import pytest
import torch

from example_trainer.config import TrainerConfig
from example_trainer.optim import set_learning_rate

NUM_STEPS = 10


def rates(num_steps: int = NUM_STEPS, **changes: Any) -> list[float]:
    """Return the rate of each step, as a share of the configured one."""
    config = TrainerConfig(model_name="m", lr=2.0, num_steps=num_steps, **changes)
    optimizer = torch.optim.SGD([torch.zeros(1)], lr=1.0)
    found = [set_learning_rate(optimizer, config, step) for step in range(num_steps)]
    assert optimizer.param_groups[0]["lr"] == found[-1]
    return [rate / 2.0 for rate in found]


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, [1.0, 0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0.2, 0.1]),
        ({"lr_schedule": "constant"}, [1.0] * 10),
        ({"lr_schedule": "constant", "warmup_steps": 4}, [0.25, 0.5, 0.75] + [1.0] * 7),
        ({"warmup_steps": 5}, [0.2, 0.4, 0.6, 0.8, 1.0, 1.0, 0.8, 0.6, 0.4, 0.2]),
        ({"lr_min_fraction": 0.5}, [1.0, 0.95, 0.9, 0.85, 0.8, 0.75, 0.7, 0.65, 0.6, 0.55]),
        # (1 + cos(pi * k / 5)) / 2
        (
            {"lr_schedule": "cosine", "warmup_steps": 5},
            [0.2, 0.4, 0.6, 0.8, 1.0, 1.0, 0.904508, 0.654508, 0.345492, 0.095492],
        ),
        (
            {"lr_schedule": "cosine", "warmup_steps": 5, "lr_min_fraction": 0.2},
            [0.2, 0.4, 0.6, 0.8, 1.0, 1.0, 0.923607, 0.723607, 0.476393, 0.276393],
        ),
        ({"lr_schedule": "wsd"}, [1.0] * 9 + [0.5]),
        ({"lr_schedule": "wsd", "warmup_steps": 9}, [(k + 1) / 9 for k in range(9)] + [0.5]),
        ({"warmup_steps": 20}, [(k + 1) / 20 for k in range(10)]),
    ],
    ids=str,
)
def test_the_rate_follows_its_schedule(changes: dict[str, Any], expected: list[float]) -> None:
    assert rates(**changes) == pytest.approx(expected, abs=1e-6)


def test_wsd_falls_over_the_last_fifth_of_the_steps() -> None:
    found = rates(100, lr_schedule="wsd", warmup_steps=10, lr_min_fraction=0.1)
    assert found[10:81] == [1.0] * 71
    assert found[81:] == pytest.approx([1.0 - 0.9 * k / 20 for k in range(1, 20)])
