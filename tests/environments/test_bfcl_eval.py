"""Function calling: the rules of BFCL's checker, row by row, and both forms of calls."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from atroposlib.envs.possible_calls import calls_are_possible, python_calls
from atroposlib.envs.tool_env import ToolCall
from tests.environments.helpers_environments import load

module = load("eval_environments.bfcl_eval")

TYPES = {
    "n": {"type": "integer"},
    "x": {"type": "float"},
    "text": {"type": "string"},
    "flag": {"type": "boolean"},
    "names": {"type": "array", "items": {"type": "string"}},
    "options": {"type": "dict"},
    "rows": {"type": "array", "items": {"type": "dict"}},
}
FUNCTION = {
    "name": "m.f",
    "description": "Do it.",
    "parameters": {"type": "dict", "properties": TYPES, "required": ["n"]},
}
POSSIBLE = {
    "n": [1],
    "x": ["", 2.0],
    "text": ["", "New York, NY", "NYC"],
    "flag": ["", True],
    "names": ["", ["A b", "c"]],
    "options": ["", {"size": ["big", "large"], "ice": [True, ""]}],
    "rows": ["", [{"a": [1]}, {"a": [2]}]],
}


@pytest.mark.parametrize(
    ("arguments", "is_possible"),
    [
        ({"n": 1}, True),
        ({}, False),
        ({"n": 1.0}, False),
        ({"n": True}, False),
        ({"n": "1"}, False),
        ({"n": 1, "x": 2}, True),
        ({"n": 1, "x": 10**400}, False),
        ({"n": 1, "x": "2.0"}, False),
        ({"n": 1, "text": "new york NY."}, True),
        ({"n": 1, "text": "York"}, False),
        ({"n": 1, "text": ["NYC"]}, False),
        ({"n": 1, "flag": "true"}, False),
        ({"n": 1, "names": ["a B", "C"]}, True),
        ({"n": 1, "names": ["c", "A b"]}, False),
        ({"n": 1, "names": ["c", 1]}, False),
        ({"n": 1, "names": []}, True),
        ({"n": 1, "options": {"size": "Big"}}, True),
        ({"n": 1, "options": {"ice": True}}, False),
        ({"n": 1, "options": {"size": "big", "salt": 1}}, False),
        ({"n": 1, "rows": [{"a": 1}, {"a": 2}]}, True),
        ({"n": 1, "rows": [{"a": 2}, {"a": 1}]}, False),
        ({"n": 1, "rows": [{"a": 1}]}, False),
        ({"n": 1, "rows": [1, 2]}, False),
        ({"n": 1, "other": 1}, False),
    ],
)
def test_an_argument_has_a_possible_type_and_value(arguments: Any, is_possible: bool) -> None:
    call = ToolCall(name="m.f", arguments=arguments)
    assert calls_are_possible([call], [{"m.f": POSSIBLE}], [FUNCTION]) is is_possible


def test_a_name_in_place_of_a_value_is_a_variable() -> None:
    for value, is_possible in (("limit", True), ("Limit", False), (3, False)):
        call = ToolCall(name="m.f", arguments={"n": value})
        assert calls_are_possible([call], [{"m.f": {"n": ["limit"]}}], [FUNCTION]) is is_possible


HOSTILE = (
    "[" * 3000,
    "f(" * 3000,
    "[f(**{})]",
    "f(x=9**9**9)",
    "f(x=__import__('os'))",
    "[1]",
    "x=",
    "f" * 30_000,
)


@pytest.mark.parametrize("text", HOSTILE, ids=lambda text: text[:12])
def test_no_text_of_calls_raises_or_runs(text: str) -> None:
    assert all(isinstance(value, str) for call in python_calls(text) for value in call.arguments.values())  # fmt: skip


def test_an_unknown_escape_gives_no_warning() -> None:
    assert python_calls(r"[f(x='\d')]") == [ToolCall(name="f", arguments={"x": r"\d"})]


ROW = {
    "question": [[{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Do it with 1."}]],
    "function": [FUNCTION],
    "ground_truth": [{"m.f": POSSIBLE}],
}  # fmt: skip


@pytest.mark.parametrize(
    ("category", "answer", "score"),
    [
        ("simple_python", "<think>[g()]</think> [m.f(n=1)]", 1.0),
        ("simple_python", "```python\n[m.f(n=1)]\n```", 1.0),
        ("simple_python", "I call [m.f(n=1)]", 0.0),
        ("simple_python", "[m.f(n=1), m.f(n=1)]", 0.0),
        ("simple_python", "[f(n=1)]", 0.0),
        ("irrelevance", "Nothing fits.", 1.0),
        ("live_irrelevance", "[m.f(n=1)]", 0.0),
        ("live_relevance", "[m.f(n=2)]", 1.0),
        ("live_relevance", "[]", 0.0),
    ],
)
async def test_answers_of_every_kind_of_category(
    made: Any, category: str, answer: str, score: float
) -> None:
    env = made(module.BfclEnv)
    row = env.parse_row({**ROW, "category": category})
    assert await env.score(row, answer) == score


async def test_native_calls_see_the_functions_and_are_read_in_their_style(made: Any) -> None:
    call = '<tool_call>\n{"name": "m.f", "arguments": {"n": 1}}\n</tool_call>'
    env = made(module.BfclEnv, [call, "[m.f(n=1)]"], call_form="native", group_size=2)
    row = env.parse_row({**ROW, "category": "live_simple"})
    group, _ = await env.collect_trajectories(row)
    assert group["scores"] == [1.0, 0.0]
    [tool] = env.offered_tools(row)
    assert tool["function"]["parameters"]["properties"]["options"] == {"type": "object"}
    assert [message["role"] for message in env.prompt(row)] == ["system", "user"]
    function = {"name": "m.f", "arguments": '{"n": 1}'}
    beside = SimpleNamespace(content=None, tool_calls=[{"type": "function", "function": function}])
    assert await env.score(row, env.text_of(beside)) == 1.0


def test_a_folder_of_the_package_is_read(tmp_path: Path) -> None:
    (tmp_path / "possible_answer").mkdir()
    question = {"id": "multiple_0", "question": ROW["question"], "function": [FUNCTION]}
    gold = {"id": "multiple_0", "ground_truth": ROW["ground_truth"]}
    for name, row in (("", question), ("possible_answer/", gold)):
        (tmp_path / f"{name}BFCL_v4_multiple.json").write_text(json.dumps(row) + "\n")
    rows = module.BfclRows(path=str(tmp_path), category="multiple").load()
    assert rows == [question | {"ground_truth": ROW["ground_truth"]}]
