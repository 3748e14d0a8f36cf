"""The trainer of the README, executed as it stands there, learns."""

import re
from pathlib import Path
from typing import Any

import pytest

from atroposlib.api.server import create_app
from tests.api.helpers_api import serving
from tests.trainer.helpers_bandit import (
    BanditEnvironment,
    accuracy,
    make_starting_model,
    registration,
)

README = Path(__file__).resolve().parents[2] / "example_trainer/README.md"
NUM_STEPS = 12


@pytest.fixture(scope="module")
def source() -> str:
    found = re.search(r"<!-- readme-trainer -->\n```python\n(.*?)```", README.read_text(), re.S)
    assert found
    return found.group(1)


def test_a_trainer_has_fewer_than_40_lines(source: str) -> None:
    assert len([line for line in source.splitlines() if line.strip()]) < 40


def test_the_trainer_of_the_readme_learns(source: str, tmp_path: Path) -> None:
    namespace: dict[str, Any] = {}
    exec(compile(source, "README.md", "exec"), namespace)
    model_path = make_starting_model(tmp_path / "model")
    with serving(create_app()) as hub_url:
        environment = BanditEnvironment(hub_url)
        model = namespace["train"](
            hub_url, registration(NUM_STEPS), model_path, environment.publish, lr=5e-3
        )
    assert environment.accuracies[0] < 0.2
    assert len(environment.accuracies) == NUM_STEPS + 1
    assert accuracy(model) > 0.8, environment.accuracies
