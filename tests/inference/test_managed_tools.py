"""Tool calls in managed sessions: read out of the text, recognised when they come back, trained as sampled."""

from __future__ import annotations

import json
import logging
import warnings
from typing import Any

import pytest
from openai.types.chat.chat_completion_message_function_tool_call import (
    ChatCompletionMessageFunctionToolCall,
    Function,
)

from atroposlib.errors import ConfigError
from atroposlib.inference.config import APIServerConfig
from atroposlib.inference.harness import made_up_logprobs
from atroposlib.inference.manager import ServerManager
from atroposlib.inference.sessions.managed_server import ManagedServer
from tests.inference.helpers_templates import (
    CALLS_BEFORE_RESULTS,
    CHATML,
    NO_RESULTS,
    RESULTS_BELONG_TO_CALLS,
    RESULTS_IN_CALLS,
    RESULTS_NAME_CALLS,
    TEXT_OR_CALLS,
    TOOLS,
    ToldEngine,
    make_tokenizer,
    told_session,
    user,
)

ADD = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Add numbers.",
        "parameters": {
            "type": "object",
            "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
        },
    },
}
# Spacing and order that no JSON writer would give back.
CALL = '<tool_call>\n{"name":"add",  "arguments": {"b":2,"a" : 1}}\n</tool_call>'


def session(
    template: str = TOOLS, *, tool_parser: str | None = "hermes"
) -> tuple[ToldEngine, ManagedServer]:
    eos = "<|im_end|>" if "im_end" in template else "<|endoftext|>"
    tokenizer = make_tokenizer(template, eos=eos, bos="<|begin_of_text|>")
    return told_session(tokenizer, tool_parser=tool_parser)


def result_of(call: Any, text: str) -> dict[str, str]:
    return {"role": "tool", "tool_call_id": call["id"], "content": text}


async def ask(managed: ManagedServer, messages: list[Any], **options: Any) -> Any:
    reply = await managed.chat_completion(messages=messages, tools=[ADD], **options)
    return reply.choices[0]


async def test_calls_are_read_and_the_node_keeps_the_raw_text() -> None:
    engine, managed = session()
    engine.tell("Let me see.\n" + CALL)
    choice = await ask(managed, [user("1 + 2?")])
    assert choice.finish_reason == "tool_calls"
    assert choice.message.content.strip() == "Let me see."
    [call] = choice.message.tool_calls
    assert call["type"] == call.type == "function"
    assert call["function"]["name"] == call.function.name == "add"
    assert json.loads(call.function.arguments) == {"a": 1, "b": 2}
    [node] = managed.get_state()["nodes"]
    assert node.full_text.endswith("Let me see.\n" + CALL + "<|im_end|>")
    assert '"name": "add", "description": "Add numbers."' in node.full_text
    assert node.metadata["finish_reason"] == "tool_calls"


@pytest.mark.parametrize("form", ["object", "dump", "json", "stripped", "parsed_arguments", "sdk"])
async def test_a_call_that_comes_back_in_any_form_is_the_sampled_turn(form: str) -> None:
    engine, managed = session()
    engine.tell("Let me see.\n" + CALL, "It is 3.")
    messages: list[Any] = [user("1 + 2?")]
    choice = await ask(managed, messages)
    message = choice.message
    [call] = message.tool_calls
    plain = {
        "role": "assistant",
        "content": message.content,
        "tool_calls": [
            {
                "id": "another",
                "type": "function",
                "function": {
                    "name": "add",
                    "arguments": json.dumps(json.loads(call["function"]["arguments"])),
                },
            }
        ],
    }
    if form == "dump":
        message = message.model_dump()
    elif form == "json":
        message = json.loads(json.dumps(plain))
    elif form == "stripped":
        message = {**plain, "content": f"{message.content.strip()} \n"}
    elif form == "parsed_arguments":
        plain["tool_calls"][0]["function"]["arguments"] = {"a": 1, "b": 2}
        message = plain
    elif form == "sdk":
        from openai.types.chat import ChatCompletionMessage

        message = ChatCompletionMessage.model_validate(plain)
    sampled = engine.tokenizer.encode("Let me see.\n" + CALL + "<|im_end|>")
    start = len(engine.sent[0])
    messages += [message, result_of(call, "3")]
    choice = await ask(managed, messages)
    assert choice.finish_reason == "stop"
    assert choice.message.content == "It is 3."
    added = (
        "\n<|im_start|>user\n<tool_response>\n3\n</tool_response><|im_end|>\n"
        "<|im_start|>assistant\n"
    )
    expected = engine.sent[0] + sampled + engine.tokenizer.encode(added)
    assert engine.sent[1] == expected
    [node] = managed.get_state()["nodes"]
    assert node.masked_tokens[start : start + len(sampled)] == sampled
    assert node.logprobs[start : start + len(sampled)] == made_up_logprobs(engine.sent[0], sampled)
    assert managed.num_broken_prefixes == 0


async def test_a_call_in_an_opened_answer_has_only_the_sampled_text_as_content() -> None:
    engine, managed = session()
    engine.tell("see.\n" + CALL, "It is 3.")
    opened = {"role": "assistant", "content": "Let me "}
    choice = await ask(managed, [user("x"), opened])
    assert choice.message.content.strip() == "see."
    whole = choice.message.model_dump(exclude_none=True) | {"content": "Let me see."}
    await ask(managed, [user("x"), whole, result_of(choice.message.tool_calls[0], "3")])
    [node] = managed.get_state()["nodes"]
    assert f"Let me see.\n{CALL}<|im_end|>" in node.full_text


async def test_an_opened_answer_does_not_continue_after_a_call() -> None:
    engine, managed = session()
    engine.tell("Let me see." + CALL, " no calls")
    await ask(managed, [user("x")])
    await ask(managed, [user("x"), {"role": "assistant", "content": "Let me see. Wait,"}])
    first, second = managed.get_state()["nodes"]
    assert "tool_call" in first.full_text
    assert second.full_text.endswith("assistant\nLet me see. Wait, no calls<|im_end|>")


async def test_another_calls_arguments_are_another_turn() -> None:
    engine, managed = session()
    engine.tell(CALL, "b")
    choice = await ask(managed, [user("x")])
    assert choice.message.content is None
    message = choice.message.model_dump(exclude_none=True)
    message["tool_calls"][0]["function"]["arguments"] = '{"a": 1, "b": 3}'
    await ask(managed, [user("x"), message, result_of(message["tool_calls"][0], "4")])
    first, second = managed.get_state()["nodes"]
    assert '"arguments": {"a": 1, "b": 3}}' in second.full_text
    assert CALL not in second.full_text
    assert dict(managed.broken_prefixes) == {"calls": 1}


async def test_turns_with_the_same_calls_are_distinguished_by_their_ids() -> None:
    engine, managed = session()
    engine.tell(CALL, CALL.replace("  ", " "), "b")
    reply = await managed.chat_completion(messages=[user("x")], tools=[ADD], n=2)
    second = reply.choices[1].message
    await ask(managed, [user("x"), second, result_of(second.tool_calls[0], "3")])
    nodes = managed.get_state()["nodes"]
    assert len(nodes[0].tokens) < len(nodes[1].tokens)
    assert '"name":"add", "arguments"' in nodes[1].full_text


async def test_an_answer_cut_within_or_after_a_call_keeps_length() -> None:
    engine, managed = session()
    engine.tell(CALL, CALL[:-20], end="")
    cut_after = await ask(managed, [user("x")])
    assert cut_after.message.tool_calls[0].function.name == "add"
    assert cut_after.finish_reason == "length"
    cut_within = await ask(managed, [user("y")])
    assert cut_within.finish_reason == "length"


@pytest.mark.parametrize(("tool_parser", "choice"), [("hermes", "none"), (None, "auto")])
async def test_tools_are_shown_and_calls_stay_text_without_a_parser_or_with_tool_choice_none(
    tool_parser: str | None, choice: str
) -> None:
    engine, managed = session(tool_parser=tool_parser)
    engine.tell(CALL)
    answer = await ask(managed, [user("x")], tool_choice=choice)
    assert answer.message.content == CALL
    assert answer.finish_reason == "stop"
    assert answer.message.tool_calls is None
    assert "Add numbers." in engine.tokenizer.decode(engine.sent[0])


async def test_each_of_several_choices_has_its_own_calls() -> None:
    engine, managed = session()
    engine.tell("no", CALL)
    reply = await managed.chat_completion(messages=[user("x")], tools=[ADD], n=2)
    assert [choice.finish_reason for choice in reply.choices] == ["stop", "tool_calls"]
    assert reply.choices[0].message.tool_calls is None
    assert reply.choices[1].index == 1
    for choice, node in zip(reply.choices, managed.get_state()["nodes"], strict=True):
        assert node.metadata["finish_reason"] == choice.finish_reason


async def test_answers_with_calls_are_written_without_warnings() -> None:
    engine, managed = session()
    engine.tell(CALL)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        reply = await managed.chat_completion(messages=[user("x")], tools=[ADD])
        dumped = json.loads(reply.model_dump_json())
    message = reply.choices[0].message
    assert dumped["choices"][0]["message"]["tool_calls"] == json.loads(
        json.dumps(message.tool_calls)
    )
    assert message.tool_calls[0].model_dump() == dict(message.tool_calls[0])

    from openai.types.chat import ChatCompletion

    assert isinstance(reply, ChatCompletion)
    assert ChatCompletion.model_validate(dumped).choices[0].message.tool_calls is not None


async def test_templates_that_want_calls_before_results_keep_the_sampled_ids() -> None:
    engine, managed = session(CALLS_BEFORE_RESULTS, tool_parser="mistral")
    raw = '[TOOL_CALLS] [{"name":"add",  "arguments": {"b":2,"a" : 1}}]'
    engine.tell(raw, "It is 3.", "You are welcome.", end="<|endoftext|>")
    messages: list[Any] = [user("1 + 2?")]
    first = await ask(managed, messages)
    assert first.finish_reason == "tool_calls"
    messages += [first.message, result_of(first.message.tool_calls[0], "3")]
    second = await ask(managed, messages)
    messages += [second.message, user("thanks")]
    await ask(managed, messages)
    assert engine.tokenizer.decode(engine.sent[2]) == (
        f"<|begin_of_text|>[INST] 1 + 2?[/INST]{raw}<|endoftext|>[TOOL_RESULTS] 3[/TOOL_RESULTS]"
        "It is 3.<|endoftext|>[INST] thanks[/INST]"
    )
    assert len(managed.get_state()["nodes"]) == 1
    assert managed.num_broken_prefixes == 0


async def run_a_call(
    engine: ToldEngine, managed: ManagedServer, *, end: str = "<|im_end|>"
) -> list[Any]:
    """Ask, call, tell the result, ask again; return the messages."""
    engine.tell(CALL, end=end)
    engine.tell("It is 3.", "Bye.")
    messages: list[Any] = [user("1 + 2?")]
    first = await ask(managed, messages)
    messages += [first.message, result_of(first.message.tool_calls[0], "3")]
    second = await ask(managed, messages)
    messages += [second.message, user("thanks")]
    await ask(managed, messages)
    return messages


async def test_results_that_a_template_writes_only_after_calls_are_kept() -> None:
    engine, managed = session(RESULTS_BELONG_TO_CALLS)
    await run_a_call(engine, managed, end="[TOOL_RESULTS]")
    assert engine.tokenizer.decode(engine.sent[2]) == (
        f"<|im_start|>user\n1 + 2?<|im_end|>\n<|im_start|>assistant\n{CALL}[TOOL_RESULTS]3[/TOOL_RESULTS]"
        "It is 3.<|im_end|>\n<|im_start|>user\nthanks<|im_end|>\n<|im_start|>assistant\n"
    )
    assert len(managed.get_state()["nodes"]) == 1
    assert managed.num_broken_prefixes == 0


async def test_a_call_without_a_known_end_forks_the_conversation_and_keeps_the_result() -> None:
    engine, managed = session(RESULTS_BELONG_TO_CALLS)
    await run_a_call(engine, managed, end="")
    text = engine.tokenizer.decode(engine.sent[1])
    assert '{"name": "add", "arguments": {"b": 2, "a": 1}}' in text
    assert text.endswith("[TOOL_RESULTS]3[/TOOL_RESULTS]")
    assert managed.num_broken_prefixes >= 1


async def test_results_that_a_template_writes_into_the_calling_turn_are_kept() -> None:
    engine, managed = session(RESULTS_IN_CALLS)
    engine.tell(CALL, "It is 42.")
    first = await ask(managed, [user("6 * 7?")])
    result = result_of(first.message.tool_calls[0], "42")
    await ask(managed, [user("6 * 7?"), first.message, result])
    assert "</tool_call>\nresult: 42<|im_end|>" in engine.tokenizer.decode(engine.sent[1])
    assert managed.num_broken_prefixes == 1


async def test_calls_without_text_are_given_to_templates_without_content() -> None:
    engine, managed = session(TEXT_OR_CALLS)
    engine.tell("b")
    call = {"id": "1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
    given = {"role": "assistant", "content": "", "tool_calls": [call]}
    await ask(managed, [user("x"), given, user("y")])
    assert '{"name": "add", "arguments": {"a": 1}}' in engine.tokenizer.decode(engine.sent[0])


@pytest.mark.parametrize("end", ["<|im_end|>", ""])
async def test_a_template_that_names_the_call_in_its_result_keeps_one_sequence(end: str) -> None:
    engine, managed = session(RESULTS_NAME_CALLS)
    engine.tell(CALL, end=end)
    first = await ask(managed, [user("1 + 2?")])
    engine.tell("It is 3.")
    history = [user("1 + 2?"), first.message, result_of(first.message.tool_calls[0], "3")]
    await ask(managed, history)
    if end:
        assert engine.tokenizer.decode(engine.sent[1]) == (
            f"<|im_start|>user\n1 + 2?<|im_end|>\n<|im_start|>assistant\n{CALL}<|im_end|>\n"
            "<|im_start|>add\n3<|im_end|>\n<|im_start|>assistant\n"
        )
    # Where a call that was not ended stops in the template's text cannot be known.
    assert managed.num_broken_prefixes == (0 if end else 1)


async def test_an_answer_stopped_by_text_is_ended_by_the_template() -> None:
    engine, managed = session(TOOLS)
    await run_a_call(engine, managed, end="")
    assert f"{CALL}<|im_end|>\n<|im_start|>user\n<tool_response>" in engine.tokenizer.decode(
        engine.sent[1]
    )
    assert managed.num_broken_prefixes == 0


async def test_results_that_the_template_leaves_out_are_logged_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    engine, managed = session(NO_RESULTS)
    with caplog.at_level(logging.WARNING):
        await run_a_call(engine, managed)
    assert caplog.text.count("leaves out tool results") == 1


async def test_calls_of_a_given_history_are_written_as_text_where_the_template_knows_none() -> None:
    engine, managed = session(CHATML)
    engine.tell("b")
    given = {
        "role": "assistant",
        "content": None,
        "tool_calls": [
            {"id": "1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
        ],
    }
    await ask(managed, [user("x"), given, user("y")])
    text = engine.tokenizer.decode(engine.sent[0])
    assert '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call><|im_end|>' in text


async def test_a_template_without_a_place_for_tools_is_logged_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    engine, managed = session(CHATML)
    engine.tell("a", "b")
    with caplog.at_level(logging.WARNING):
        await ask(managed, [user("x")])
        await ask(managed, [user("y")])
    assert caplog.text.count("no place for tools") == 1


class HermesLike:
    """A parser of an environment's own: `CALL name` is a call."""

    def __init__(self) -> None:
        self.num_ids = 0

    def parse(self, text: str) -> tuple[str | None, list[Any] | None]:
        content, found, name = text.partition("CALL ")
        if name == "boom":
            raise ValueError(name)
        if not found:
            return text, None
        self.num_ids += 1
        function = Function(name=name, arguments="{}")
        call_id = f"id{self.num_ids}"
        call = ChatCompletionMessageFunctionToolCall(id=call_id, type="function", function=function)
        return content.strip() or None, [call]


async def test_an_object_that_parses_is_the_parser_of_the_session(
    caplog: pytest.LogCaptureFixture,
) -> None:
    tokenizer = make_tokenizer(TOOLS, eos="<|im_end|>")
    engine = ToldEngine(tokenizer)
    manager = ServerManager([APIServerConfig(model_name="m")], testing=True)
    manager.servers = [engine]
    engine.tell("I look. CALL add", "CALL boom", "3")
    async with manager.managed_server(tool_call_parser=HermesLike()) as managed:
        choice = await ask(managed, [user("1 + 2?")])
        [call] = choice.message.tool_calls
        assert (choice.message.content, call.id, call.function.name) == ("I look.", "id1", "add")
        messages = [user("1 + 2?"), choice.message, result_of(call, "3")]
        answer = await ask(managed, messages)
        assert answer.message.content == "CALL boom"
        assert "The tool parser HermesLike failed" in caplog.text
        answer = await ask(managed, [*messages, answer.message, user("again")])
        assert (answer.message.content, answer.message.tool_calls) == ("3", None)
        assert len(managed.nodes) == 1
    manager.proxy_url = "http://p"
    with pytest.raises(ConfigError, match="by its name"):
        async with manager.managed_server(tool_call_parser=HermesLike()):
            pass
