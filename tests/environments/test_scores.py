"""What an answer earns in each environment, by the table data/scores.yaml."""

import inspect
from typing import Any

import pytest

from tests.builders.tables import table
from tests.environments.helpers_environments import load


@pytest.mark.parametrize(
    ("rule", "answer", "score"),
    [
        pytest.param(rule, answer, score, id=f"{rule['env']}: {rule['claim']}: {answer}")
        for rule in table("environments/scores")
        for answer, score in rule["answers"]
    ],
)
async def test_an_answer_earns_its_score(
    made: Any, rule: dict[str, Any], answer: str, score: float
) -> None:
    if "needs" in rule:
        pytest.importorskip(rule["needs"])
    folder, _, name = rule["env"].rpartition(".")
    module = load(folder)
    env = made(getattr(module, name), **rule.get("settings", {}))
    item = rule["item"]
    match item:
        case {"parse_row": row}:
            item = env.parse_row(row)
        case dict() if "question" not in item:
            [(type_name, arguments)] = item.items()
            item = getattr(module, type_name)(*arguments)
    earned = env.score(item, answer)
    assert (await earned if inspect.isawaitable(earned) else earned) == score
