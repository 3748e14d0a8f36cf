"""The examples of the hub's README run as they stand, against each other."""

import asyncio
import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from atroposlib.api.server import create_app
from tests.api.helpers_api import serving

README = (Path(__file__).resolve().parents[2] / "atroposlib/api/README.md").read_text()


def example(name: str) -> Any:
    found = re.search(rf"<!-- example-{name} -->\n```python\n(.*?)```", README, re.S)
    assert found
    assert len([line for line in found.group(1).splitlines() if line.strip()]) <= 22
    namespace: dict[str, Any] = {"__name__": "readme"}
    exec(compile(found.group(1), "README.md", "exec"), namespace)
    return namespace["main"]


def test_examples_train_on_what_they_send() -> None:
    trained: list[int] = []
    saved: list[int] = []

    def train_on(groups: Any) -> None:
        trained.append(sum(group.num_sequences for group in groups))

    def save(step: int) -> str:
        saved.append(step)
        return f"ck/{step}"

    with serving(create_app()) as url, ThreadPoolExecutor(1) as pool:
        environment = pool.submit(lambda: asyncio.run(example("environment")(url)))
        example("trainer")(url, train_on, save)
        environment.result(timeout=30)
    assert trained == [4] * 4
    assert saved == [2, 4]
