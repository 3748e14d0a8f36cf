"""ToolEnv on a scripted engine: schemas from type hints, calls from text, and every way a call can go wrong."""

from __future__ import annotations

import asyncio
import json
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, Literal

import pytest
from pydantic import Field

from atroposlib.envs.mcp_tools import McpServer
from atroposlib.envs.multi_turn_env import Episode
from atroposlib.envs.tool_env import (
    Killable,
    MalformedCall,
    ToolCall,
    ToolEnv,
    parse_hermes_calls,
    tool_from,
)
from atroposlib.envs.tool_env import hermes_call as call
from atroposlib.errors import ConfigError, EnvError, MissingDependency
from atroposlib.inference.harness import HarnessRequest
from atroposlib.scored_data import Strictness, check_group
from tests.builders.environments import Offline
from tests.envs import helpers_rewards
from tests.envs.helpers_envs import group_of, make_env, trained_texts

RELEASE = threading.Event()


def add(a: int, b: int = 0) -> int:
    """Add two whole numbers."""
    return a + b


async def slow(seconds: float) -> str:
    await asyncio.Event().wait()
    return "never"


def stuck() -> str:
    RELEASE.wait(60)
    return "late"


def broken() -> str:
    raise ZeroDivisionError("no numbers here")


def leave() -> str:
    sys.exit(3)


def run_dry() -> str:
    return str(next(iter(())))


def remember(word: str, episode: Episode) -> int:
    episode.state.setdefault("words", []).append(word)
    return len(episode.state["words"])


def long(num_chars: int) -> str:
    return "x" * num_chars


class Unprintable:
    def __str__(self) -> str:
        raise SystemExit("no text")


class UnprintableError(Exception):
    def __str__(self) -> str:
        raise ValueError("no text")


def give(kind: str) -> Any:
    circular: list[Any] = []
    circular.append(circular)
    deep: list[Any] = []
    for _ in range(10_000):
        deep = [deep]
    return {
        "tuple keys": {(1, 2): 3},
        "circular": circular,
        "deep": deep,
        "unprintable": Unprintable(),
        "surrogate": "a\ud800b",
        "nested surrogate": ["\udfff"],
        "special": "x<eos>y <bos",
    }[kind]


def fail_without_a_text() -> str:
    raise UnprintableError


class Calculator(Offline, ToolEnv):
    """Answers must be the text `3`."""

    name = "calculator"
    tools = (add, slow, stuck, broken, leave, run_dry, fail_without_a_text, remember, long, give)

    def load_rows(self, split: str) -> Any:
        return [{"question": "1 + 2?", "answer": "3"}]

    def prompt(self, row: Any) -> Any:
        return row["question"]

    def score(self, row: Any, answer: str) -> Any:
        return answer == row["answer"]


ROW = {"question": "1 + 2?", "answer": "3"}


def saying(*answers: str) -> Callable[[HarnessRequest], str]:
    """Answer the n-th turn with the n-th text, the last one for ever after."""
    return lambda request: answers[min(request.prompt.count("<assistant>"), len(answers)) - 1]


def make(*answers: str, env_cls: type[Any] = Calculator, **settings: Any) -> Any:
    return make_env(env_cls, respond=saying(*answers), **{"tool_timeout_s": 5.0, **settings})


async def result_of(env: Any) -> str:
    """Set up, play one episode, and return what the model was told after its first answer."""
    await env.setup()
    rollout = (await env.roll_out(ROW, 1, split="train"))[0]
    roles = [message["role"] for message in rollout.messages]
    assert roles[:4] == ["system", "user", "assistant", env.tool_role]
    return str(rollout.messages[3]["content"])


def test_type_hints_become_a_schema() -> None:
    def weather(
        city: Annotated[str, Field(description="Name of the city")],
        unit: Literal["C", "F"] = "C",
        days: list[int] | None = None,
    ) -> str:
        """Say how the weather is."""
        return city

    tool = tool_from(weather)
    assert (tool.name, tool.description) == ("weather", "Say how the weather is.")
    assert tool.parameters["required"] == ["city"]
    assert tool.parameters["additionalProperties"] is False
    assert tool.parameters["properties"]["city"] == {
        "type": "string",
        "description": "Name of the city",
    }
    assert tool.parameters["properties"]["unit"] == {
        "type": "string",
        "enum": ["C", "F"],
        "default": "C",
    }
    assert tool.schema()["function"]["parameters"] is tool.parameters


def test_episode_is_not_part_of_the_schema() -> None:
    assert list(tool_from(remember).parameters["properties"]) == ["word"]


def test_functions_without_a_schema_are_refused_with_the_parameter() -> None:
    def untyped(a, b: int) -> int:  # type: ignore[no-untyped-def]
        return b

    def many(*numbers: int) -> int:
        return 0

    with pytest.raises(ConfigError, match="tool untyped: the parameter a needs a type hint"):
        tool_from(untyped)
    with pytest.raises(ConfigError, match="tool many: "):
        tool_from(many)


@pytest.mark.parametrize(
    ("text", "calls"),
    [
        ("It is 3.", []),
        (call("add", a=1), [ToolCall(name="add", arguments={"a": 1})]),
        (
            call("add", a=1) + " and " + call("add", a=2),
            [ToolCall(name="add", arguments={"a": 1}), ToolCall(name="add", arguments={"a": 2})],
        ),
        ('<tool_call>{"name": "x"}', [ToolCall(name="x", arguments={})]),
        (
            '<tool_call>{"name": "x", "arguments": "{\\"a\\": 1}"}</tool_call>',
            [ToolCall(name="x", arguments={"a": 1})],
        ),
        (
            '<tool_call>{"name": "x", "arguments": {"a": "it\'s\ntwo lines"}}</tool_call>',
            [ToolCall(name="x", arguments={"a": "it's\ntwo lines"})],
        ),
        ("<think>" + call("add", a=1) + "</think> 3", []),
        (
            "<think></think>" + call("add", a="</tool_call> </think>"),
            [ToolCall(name="add", arguments={"a": "</tool_call> </think>"})],
        ),
    ],
)
def test_calls_are_read_from_the_text(text: str, calls: list[Any]) -> None:
    assert parse_hermes_calls(text) == calls


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("{", "not valid JSON"),
        ("", "not valid JSON"),
        ("[1]", 'a JSON object with "name" and "arguments"'),
        ('{"arguments": {}}', 'a JSON object with "name" and "arguments"'),
        ('{"name": "x", "arguments": [1]}', '"arguments" of x must be a JSON object'),
        ("[" * 100_000, "not valid JSON"),
        ('{"name": "x", "parameters": {}}', "and with nothing else"),
    ],
)
def test_unreadable_calls_say_why(text: str, reason: str) -> None:
    (found,) = parse_hermes_calls(f"<tool_call>{text}</tool_call>")
    assert isinstance(found, MalformedCall)
    assert reason in found.reason


def test_calls_that_cannot_be_read_stand_in_their_place() -> None:
    good = call("add", a=1)
    found = parse_hermes_calls(f"<tool_call>{{</tool_call>{good}<tool_call>[]</tool_call>{good}")
    assert [type(one) for one in found] == [MalformedCall, ToolCall, MalformedCall, ToolCall]


async def test_model_calls_a_tool_then_answers_and_is_judged() -> None:
    env = make(call("add", a=1, b="2"), "3")
    group = await group_of(env, ROW)
    checked = check_group(group, strictness=Strictness.MEANING)
    assert checked.scores.tolist() == [1.0, 1.0]
    roles = [message["role"] for message in group["messages"][0]]
    assert roles == ["system", "user", "assistant", "tool", "assistant"]
    assert group["messages"][0][3] == {"role": "tool", "name": "add", "content": "3"}
    assert trained_texts(group)[0] == call("add", a=1, b="2") + "<eos>3<eos>"
    assert group["overrides"][0] == {"turn_rewards": [0.0, 1.0], "done_reason": "answered"}
    assert env.counts == {"tool_calls": 2, "done_answered": 2, "turns": 4}


async def test_tools_are_described_in_the_system_message_after_the_environments_own() -> None:
    class Told(Calculator):
        system_prompt = "Be brief."

    messages = make("3", env_cls=Told).conversation(ROW)
    assert [message["role"] for message in messages] == ["system", "user"]
    assert messages[0]["content"].startswith("Be brief.\n\nYou can call tools.")
    listed = messages[0]["content"].split("<tools>\n")[1].split("\n</tools>")[0].splitlines()
    assert [json.loads(line)["name"] for line in listed] == [
        tool.__name__ for tool in Calculator.tools
    ]


@pytest.mark.parametrize(
    ("answer", "told", "kind"),
    [
        (call("ad", a=1), "there is no tool 'ad'; did you mean add?", "unknown"),
        (call("zzz"), "there is no tool 'zzz'; none is similar. Known: add, ", "unknown"),
        (call("add", a="one"), "add: a: Input should be a valid integer", "arguments"),
        (call("add", b=1), "add: a: Missing", "arguments"),
        (call("add", a=1, z=1), "add: z: Unexpected", "arguments"),
        ("<tool_call>{</tool_call>", "not valid JSON", "malformed"),
        (call("broken"), "ZeroDivisionError: no numbers here", "exception"),
        (call("leave"), "SystemExit(3)", "exception"),
        (call("run_dry"), "StopIteration()", "exception"),
        (call("fail_without_a_text"), "Error: UnprintableError", "exception"),
        *(
            (call("give", kind=kind), "the result of give cannot be written as text: ", "result")
            for kind in ("tuple keys", "circular", "deep", "unprintable")
        ),
    ],
)
async def test_failed_call_is_told_to_the_model_and_counted(
    answer: str, told: str, kind: str
) -> None:
    env = make(answer, "3")
    text = await result_of(env)
    assert text.startswith("Error: ")
    assert told in text
    assert env.counts[f"tool_error_{kind}"] == 1
    assert env.counts["done_answered"] == 1


@pytest.mark.parametrize("name", ["slow", "stuck"])
async def test_tool_that_takes_too_long_is_given_up(name: str) -> None:
    arguments = {"seconds": 1} if name == "slow" else {}
    env = make(call(name, **arguments), "3", tool_timeout_s=0.05)
    RELEASE.clear()
    try:
        assert await result_of(env) == f"Error: {name} took more than 0.05 s"
    finally:
        RELEASE.set()
    assert env.counts["tool_error_timeout"] == 1


async def test_killable_tool_runs_in_a_process_that_is_killed() -> None:
    class Risky(Calculator):
        tools = tuple(
            map(Killable, (helpers_rewards.hang, helpers_rewards.add, helpers_rewards.refuse))
        )

    calls = call("hang") + call("add", left=1, right=2) + call("refuse", text="a\u2028b")
    env = make(calls, "3", env_cls=Risky, tool_timeout_s=0.3)
    try:
        await env.setup()
        rollout = (await env.roll_out(ROW, 1, split="train"))[0]
    finally:
        await env.close()
    hung, added, refused = [m["content"] for m in rollout.messages if m["role"] == "tool"]
    assert hung.startswith("Error: timeout")
    assert added == "3.0"
    assert refused == "Error: exception: ValueError: cannot read a\u2028b"
    assert env.counts["tool_error_timeout"] == 1


async def test_tools_share_the_state_of_their_episode_only() -> None:
    env = make(call("remember", word="a") + call("remember", word="b"), "3")
    await env.setup()
    for rollout in await env.roll_out(ROW, 2, split="train"):
        assert [m["content"] for m in rollout.messages if m["role"] == "tool"] == ["1", "2"]


async def test_long_results_are_cut_and_the_model_is_told() -> None:
    env = make(call("long", num_chars=60), "3", max_tool_output_chars=50)
    assert await result_of(env) == "x" * 50 + "\n... (10 characters more were cut)"


async def test_results_as_one_user_message_for_templates_without_tools() -> None:
    class AsUser(Calculator):
        tool_role = "user"

    env = make(call("add", a=1) + call("add", a=2), "3", env_cls=AsUser)
    assert await result_of(env) == (
        "<tool_response>\n1\n</tool_response>\n<tool_response>\n2\n</tool_response>"
    )


def test_two_tools_of_one_name_are_refused() -> None:
    class Twice(Calculator):
        tools = (add, add)

    with pytest.raises(ConfigError, match="two tools are called 'add'"):
        make("3", env_cls=Twice)


def over_mcp(*command: str, answer: str = "3") -> Any:
    """Return an environment with `add` and the tools of a server."""

    class OverMcp(Calculator):
        tools = (add,)
        mcp_servers = (
            McpServer(command=command[0], args=command[1:], env={"PYTHONPATH": ":".join(sys.path)}),
        )

    return make(answer, "3", env_cls=OverMcp)


async def test_missing_mcp_package_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "mcp", None)
    with pytest.raises(MissingDependency, match=r"\[mcp\]"):
        await over_mcp(sys.executable).setup()


MCP_SERVER = """
from mcp.server.mcpserver import MCPServer
from mcp.server.mcpserver.exceptions import ToolError
from mcp.types import EmbeddedResource, TextResourceContents

server = MCPServer("numbers")

@server.tool()
def double(number: int) -> int:
    "Twice the number."
    return 2 * number

@server.tool()
def quote() -> EmbeddedResource:
    contents = TextResourceContents(uri="file:///poem.txt", text="so much depends")
    return EmbeddedResource(type="resource", resource=contents)

@server.tool()
def refuse() -> str:
    raise ToolError("not today")

@server.tool()
def die() -> str:
    import os
    os._exit(1)

server.run()
"""


@pytest.mark.e2e
async def test_tools_of_an_mcp_server_are_called_like_any_other(tmp_path: Path) -> None:
    pytest.importorskip("mcp")
    script = tmp_path / "server.py"
    script.write_text(MCP_SERVER)

    calls = call("double", number=4) + call("quote") + call("refuse")
    env = over_mcp(sys.executable, str(script), answer=calls)
    try:
        await env.setup()
        assert list(env.tools_by_name) == ["add", "double", "quote", "refuse", "die"]
        assert env.tools_by_name["double"].description == "Twice the number."
        rollout = (await env.roll_out(ROW, 1, split="train"))[0]
        # A server that ended fails the item: told to the model, it would go unnoticed.
        env.server.servers[0].respond = saying(call("die"))
        for _ in range(2):
            with pytest.raises(EnvError, match="has ended"):
                await env.roll_out(ROW, 1, split="train")
        await env.close()
        assert list(env.tools_by_name) == ["add"]
        await env.setup()
        assert list(env.tools_by_name) == ["add", "double", "quote", "refuse", "die"]
    finally:
        await env.close()
    doubled, quoted, refused = [m["content"] for m in rollout.messages if m["role"] == "tool"]
    assert (doubled, quoted) == ("8", "so much depends")
    assert refused.startswith("Error: ")
    assert "not today" in refused


@pytest.mark.e2e
async def test_mcp_server_that_never_answers_is_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("mcp")
    monkeypatch.setattr("atroposlib.envs.mcp_tools.OPEN_TIMEOUT_S", 0.2)

    env = over_mcp("sleep", "600")
    with pytest.raises(EnvError, match=r"sleep did not answer within 0\.2 s"):
        await env.setup()
    await env.close()


async def test_mcp_server_that_does_not_start_is_an_error_that_names_it() -> None:
    pytest.importorskip("mcp")

    with pytest.raises(EnvError, match="MCP server /nowhere/to/be/found did not start: .*No such"):
        await over_mcp("/nowhere/to/be/found").setup()


@pytest.mark.parametrize(
    ("answer", "told"),
    [
        (call("give", kind="surrogate"), "a\ufffdb"),
        (call("give", kind="nested surrogate"), '["\\udfff"]'),
        ('<tool_call>{"name": "\\ud800", "arguments": {}}</tool_call>', "no tool '\ufffd'"),
    ],
)
async def test_lone_surrogates_do_not_spoil_the_group(answer: str, told: str) -> None:
    env = make(answer, "3")
    group = await group_of(env, ROW)
    check_group(group, strictness=Strictness.MEANING)
    reply = group["messages"][0][3]
    assert told in reply["content"]
    json.dumps(reply, ensure_ascii=False).encode()


@pytest.mark.parametrize("role", ["tool", "user"])
async def test_special_tokens_in_results_are_escaped_unless_told_otherwise(role: str) -> None:
    env_cls = type("Escaping", (Calculator,), {"tool_role": role})
    env = make(call("give", kind="special"), "3", env_cls=env_cls)
    assert "x< eos>y <bos" in await result_of(env)
    env = make(call("give", kind="special"), "3", env_cls=env_cls, escape_special_tokens=False)
    assert "x<eos>y <bos" in await result_of(env)


async def test_calls_that_hang_leave_a_bounded_number_of_threads(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("atroposlib.envs.tool_env.MAX_HUNG_THREADS", 3)
    env = make(call("stuck") * 5, "3", tool_timeout_s=0.05)
    RELEASE.clear()
    try:
        await result_of(env)
        assert env.counts["tool_error_timeout"] == 3
        assert env.counts["tool_error_hung"] == 2
        assert len([t for t in threading.enumerate() if t.name == "tool stuck"]) == 3
        assert caplog.text.count("make it Killable") == 1
    finally:
        RELEASE.set()
    for thread in threading.enumerate():
        if thread.name == "tool stuck":
            thread.join(10)
    RELEASE.clear()
    RELEASE.set()
    assert await result_of(env) == "late"


def with_episode(word: str, episode: Episode) -> str:
    return word


def with_keyword(*, word: str) -> str:
    return word


def test_tools_that_a_worker_cannot_run_are_refused_at_the_start() -> None:
    def local(word: str) -> str:
        return word

    for function, reason in (
        (local, "a module-level function"),
        (with_episode, "the episode cannot be sent"),
        (with_keyword, "positional arguments only"),
    ):
        env_cls = type("Wrong", (Calculator,), {"tools": (Killable(function),)})
        with pytest.raises(ConfigError, match=reason):
            make("3", env_cls=env_cls)


async def test_final_answer_is_judged_again_where_configured() -> None:
    class Unsure(Calculator):
        num_judged = 0

        def score(self, row: Any, answer: str) -> Any:
            self.num_judged += 1
            return None if self.num_judged == 1 else 1.0

    env = make("3", env_cls=Unsure, group_size=1, on_reward_failure="retry")
    group = await group_of(env, ROW)
    assert group["scores"] == [1.0]
