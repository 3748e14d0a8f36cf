"""Function calling: the rules of BFCL's checker, row by row, and both forms of calls."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import huggingface_hub
import pytest

from atroposlib.envs.possible_calls import calls_are_possible, python_calls
from atroposlib.envs.tool_env import ToolCall
from atroposlib.envs.typed_calls import Language, converted, typed_calls
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
    "f(x=" + "[" * 9000 + "]" * 9000 + ")",
    "f(x=" + '{"a":' * 3000 + "1" + "}" * 3000 + ")",
    "f(x=" + "9" * 10_000 + ")",
    'f(x="' + "\\" * 9000,
    "f(x='a)",
    "f(x=" + "a<" * 9000 + ")",
    "f(x=new HashMap<>() {{ put(" + "(" * 5000 + "}})",
    "f(x=new HashMap<>() {{ x(); }})",
    "f(x={a: 1: 2, [}])",
    "f(x={a})",
    "f(x=1, x=2)",
)


@pytest.mark.parametrize("text", HOSTILE, ids=lambda text: text[:12])
def test_no_text_of_calls_raises_or_runs(text: str) -> None:
    values = [value for call in python_calls(text) for value in call.arguments.values()]
    assert all(isinstance(value, str | list | int) for value in values)
    calls = typed_calls(text)
    for kind in ("integer", "Array", "ArrayList", "HashMap", "array", "dict"):
        function = {"parameters": {"properties": {"x": {"type": kind}}}}
        language: Language = "javascript" if kind in ("array", "dict") else "java"
        for call in calls:
            for value in converted(call, function, language).arguments.values():
                assert isinstance(value, str | list | dict)


@pytest.mark.parametrize(
    ("language", "kind", "items", "text", "value"),
    [
        ("java", "integer", None, "-5", -5),
        ("java", "integer", None, "5L", "5L"),
        ("java", "long", None, "5", "5"),
        ("java", "float", None, "1.5e3f", 1500.0),
        ("java", "float", None, "1.5", "1.5"),
        ("java", "double", None, "2", 2.0),
        ("java", "boolean", None, "true", True),
        ("java", "boolean", None, "True", "True"),
        ("java", "any", None, "5", "5"),
        ("java", "Array", "String", 'new String[]{"a, b", "c"}', ["a, b", "c"]),
        ("java", "Array", "integer", "new int[] {}", []),
        ("java", "ArrayList", "integer", "new int[]{1}", "new int[]{1}"),
        ("java", "ArrayList", "any", 'new ArrayList<>() {{ add("a"); add(2.5f); }}', ["a", 2.5]),
        ("java", "ArrayList", "long", "new ArrayList<Long>()", []),
        ("java", "HashMap", None, 'new HashMap<K, V>() {{ put("a", "b, c"); put("d", 1L); }}', {"a": "b, c", "d": 1}),
        ("java", "HashMap", None, "new HashMap<>()", {}),
        ("java", "HashMap", None, "settings", "settings"),
        ("javascript", "String", None, "'a'", "a"),
        ("javascript", "Bigint", None, "5n", 5),
        ("javascript", "float", None, "1e3", "1e3"),
        ("javascript", "array", "float", "[[1, 2.5], [3]]", [[1, 2.5], [3]]),
        ("javascript", "array", "String", "new Array('a', \"1\")", ["a", "1"]),
        ("javascript", "dict", None, "{a: [1, 'b'], 'c': {d: true}}", {"a": [1, "b"], "c": {"d": True}}),
        ("javascript", "integer", None, 5, None),
    ],
)  # fmt: skip
def test_a_text_becomes_a_value_of_its_type(
    language: Language, kind: str, items: str | None, text: Any, value: Any
) -> None:
    schema = {"type": kind, **({"items": {"type": items}} if items else {})}
    call = ToolCall(name="f", arguments={"x": text})
    read = converted(call, {"parameters": {"properties": {"x": schema}}}, language).arguments["x"]
    assert (read, type(read)) == (value, type(value))


SAMPLES = [
    row
    for row in map(json.loads, Path("environments/samples/bfcl_eval.jsonl").read_text().splitlines())
    if row["category"].startswith("simple_java")
]  # fmt: skip


@pytest.mark.parametrize("call_form", ["python", "native"])
async def test_java_and_javascript_are_offered_as_texts_and_judged_as_values(
    made: Any, call_form: str
) -> None:
    env = made(module.BfclEnv, call_form=call_form)
    assert len(SAMPLES) == 10
    for sample in SAMPLES:
        row = env.parse_row(sample)
        gold = env.gold_answer(row)
        assert await env.score(row, gold) == 1.0
        assert await env.score(row, gold.replace("a", "x")) == 0.0
        for function in env.functions_of(row):
            kinds = {each["type"] for each in function["parameters"]["properties"].values()}
            assert kinds == {"string"}


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


@pytest.mark.parametrize(
    ("category", "name"),
    [("simple_python", "simple"), ("simple_java", "java"), ("live_simple", "live_simple")],
)
def test_the_hub_has_the_names_of_version_3(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, category: str, name: str
) -> None:
    asked: list[str] = []

    def download(_: str, file: str, repo_type: str) -> Path:
        asked.append(f"{repo_type} {file}")
        (empty := tmp_path / "rows.json").write_text("")
        return empty

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", download)
    module.BfclRows(path="org/data", category=category)._file("possible_answer/")
    assert asked == [f"dataset possible_answer/BFCL_v3_{name}.json"]


def test_simple_is_the_mean_of_three_languages(made: Any) -> None:
    categories = ["simple_python", "simple_java", "simple_java", "simple_javascript", "live_simple"]
    rows = [{"groups": {"category": category}} for category in categories]
    samples = [{"item_index": i, "correct": c} for i, c in enumerate([1, 0, 0, 1, 0])]
    rates = made(module.BfclEnv).rates_of_parts(rows, samples)
    assert rates["eval/simple_accuracy"] == pytest.approx(2 / 3)
    assert rates["eval/macro_accuracy"] == pytest.approx(0.5)
