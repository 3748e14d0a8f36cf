"""The constraints of RLVR-IFeval and IFEval: a text that keeps each, and one that only seems to."""

from typing import Any

import pytest

from tests.builders.tables import table
from tests.environments.helpers_environments import load

constraints = load("instruction_following_constraints")
RULES = constraints.RLVR | constraints.IFEVAL
KEPT_AND_BROKEN: list[Any] = [
    *table("environments/constraints"),
    ["validate_json_format", {}, "[]", "[" * 100_000],
]
USE_LANGDETECT = {
    "validate_response_language",
    "language:response_language",
    "change_case:english_lowercase",
    "change_case:english_capital",
}


@pytest.mark.parametrize(("name", "arguments", "kept", "broken"), KEPT_AND_BROKEN)
def test_a_constraint_tells_kept_from_broken(
    name: str, arguments: dict[str, Any], kept: str, broken: str
) -> None:
    if name in USE_LANGDETECT:
        pytest.importorskip("langdetect")
    if name == "change_case:capital_word_frequency":
        pytest.importorskip("nltk")
    assert RULES[name](kept, **arguments) is True
    assert RULES[name](broken, **arguments) is False


def test_every_constraint_of_the_data_has_a_test() -> None:
    assert {name for name, *_ in KEPT_AND_BROKEN} == RULES.keys()
    assert len(constraints.RLVR) == len(constraints.IFEVAL) == 25
