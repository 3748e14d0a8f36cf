"""OpenAIServer: request bodies, replies field by field, and the habits of various providers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from helpers_peer import Peer, Reply

from atroposlib.errors import EngineProtocolError, EngineRejected, EngineUnavailable
from atroposlib.inference.config import APIServerConfig
from atroposlib.inference.servers.openai import (
    OPENAI_URL,
    OpenAIServer,
)
from atroposlib.inference.servers.reasoning import ReasoningConfig
from tests.inference.helpers_templates import CHATML, make_tokenizer

HELLO = [{"role": "user", "content": "hello"}]
CALL = {"id": "call_1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}


def chat(*contents: str | None, **message: Any) -> dict[str, Any]:
    choices = [
        {
            "index": i,
            "message": {"role": "assistant", "content": content, **message},
            "finish_reason": "stop",
        }
        for i, content in enumerate(contents)
    ]
    return {
        "id": "chatcmpl-1",
        "object": "chat.completion",
        "created": 5,
        "model": "m-2",
        "choices": choices,
        "usage": {"prompt_tokens": 2, "completion_tokens": 3, "total_tokens": 5},
    }


def text(*texts: str) -> dict[str, Any]:
    choices = [
        {"index": i, "text": t, "finish_reason": "length", "logprobs": None}
        for i, t in enumerate(texts)
    ]
    return {
        "id": "cmpl-1",
        "object": "text_completion",
        "created": 5,
        "model": "m",
        "choices": choices,
    }


def refusal(message: str, *, status: int = 400, param: str = "max_tokens") -> Reply:
    error = {"message": message, "type": "invalid_request_error", "param": param, "code": None}
    return Reply({"error": error}, status)


def make(peer: Peer, reasoning: ReasoningConfig | None = None, **changes: Any) -> OpenAIServer:
    return peer.opened(OpenAIServer(peer.config(**changes), reasoning))


async def ask(peer: Peer, reasoning: ReasoningConfig | None = None, **kwargs: Any) -> Any:
    return await make(peer, reasoning).chat_completion(messages=HELLO, **kwargs)


# Chat, text, tools, logprobs.


@pytest.mark.parametrize("reason", ["tool_calls", "abort"])
async def test_a_chat_reply_is_an_openai_object_with_every_field(reason: str) -> None:
    from openai.types.chat import ChatCompletion

    body = chat(None, tool_calls=[CALL], reasoning_content="because", reasoning="so")
    logprobs = {"content": [{"token": "hi", "logprob": -0.5, "bytes": None, "top_logprobs": []}]}
    body["choices"][0] |= {"finish_reason": reason, "logprobs": logprobs}
    async with Peer(body) as peer:
        answer = await ask(peer, logprobs=True, top_logprobs=0)
    assert isinstance(answer, ChatCompletion)
    assert (answer.id, answer.created, answer.model) == ("chatcmpl-1", 5, "m-2")
    assert answer.usage is not None
    assert answer.usage.total_tokens == 5
    choice = answer.choices[0]
    assert (choice.index, choice.finish_reason) == (0, reason)
    message: Any = choice.message
    assert (message.role, message.content) == ("assistant", None)
    assert (message.reasoning_content, message.reasoning) == ("because", "so")
    call = message.tool_calls[0]
    assert (call.id, call.type, call.function.name, call.function.arguments) == (
        "call_1",
        "function",
        "add",
        '{"a": 1}',
    )
    assert choice.logprobs is not None
    assert choice.logprobs.content is not None
    assert (choice.logprobs.content[0].token, choice.logprobs.content[0].logprob) == ("hi", -0.5)


@pytest.mark.parametrize(
    ("content", "expected", "thinking"),
    [
        (
            [
                {"type": "thinking", "thinking": [{"type": "text", "text": "hm"}]},
                {"type": "text", "text": "forty"},
                {"type": "thinking", "thinking": "m"},
                {"type": "text", "text": "-two"},
            ],
            "forty-two",
            "hmm",
        ),
        ([{"type": "text", "text": "a"}], "a", None),
        ([{"type": "image", "url": "x"}], [{"type": "image", "url": "x"}], None),
        ("plain", "plain", None),
    ],
)
async def test_content_in_parts_becomes_text_and_thinking_is_kept_apart(
    content: Any, expected: Any, thinking: str | None
) -> None:
    async with Peer(chat(content)) as peer:
        message: Any = (await ask(peer)).choices[0].message
    assert message.content == expected
    assert getattr(message, "reasoning_content", None) == thinking


async def test_a_reply_can_be_appended_to_the_messages_as_it_is() -> None:
    async with Peer(chat("hi")) as peer:
        first = await ask(peer)
        await make(peer).chat_completion(messages=[*HELLO, first.choices[0].message])
    assert peer.bodies[1]["messages"][1] == {"role": "assistant", "content": "hi"}


async def test_a_list_of_prompts_gives_n_choices_for_each() -> None:
    async with Peer(text("a", "b", "c", "d")) as peer:
        server = make(peer, n_kwarg_is_ignored=True)  # a batch is never sent apart
        answer = await server.completion(prompt=["x", "y"], n=2)
        assert [choice.text for choice in answer.choices] == ["a", "b", "c", "d"]
        with pytest.raises(EngineProtocolError, match=r"4 choices, expected 3 \(n = 1\)"):
            await server.completion(prompt=["x", "y", "z"])
    assert len(peer.asked) == 2


async def test_servers_that_give_no_token_ids_say_what_to_do() -> None:
    server = OpenAIServer(APIServerConfig(base_url="http://127.0.0.1:1", health_check=False))
    with pytest.raises(NotImplementedError, match="server_type to 'vllm'"):
        await server.tokens_and_logprobs_completion(prompt="x")
    with pytest.raises(NotImplementedError, match="OpenAIServer cannot return prompt logprobs"):
        await server.get_logprobs(prompt="x")
    with pytest.raises(ValueError, match="stream=True is not supported"):
        await server.chat_completion(messages=HELLO, stream=True)
    await server.close()


# n.


@pytest.mark.parametrize(
    ("reply", "n", "message"),
    [
        (chat("a", "b"), 3, r"2 choices, expected 3 \(n = 3\)"),
        (chat("a", "b"), 1, r"2 choices, expected 1 \(n = 1\)"),
        (chat(), 1, r"0 choices, expected 1 \(n = 1\)"),
        (chat(), 2, r"0 choices, expected 2 \(n = 2\)"),
    ],
)
async def test_another_number_of_choices_is_an_error(reply: Any, n: int, message: str) -> None:
    async with Peer(reply) as peer:
        with pytest.raises(EngineProtocolError, match=message):
            await ask(peer, n=n)
    assert len(peer.asked) == 1


async def test_a_single_request_that_gets_several_choices_is_an_error_as_well() -> None:
    async with Peer(chat("a"), chat("b", "c")) as peer:
        with pytest.raises(EngineProtocolError, match=r"3 choices, expected 2 \(n = 2\)"):
            await ask(peer, n=2)


@pytest.mark.parametrize("flagged", [False, True])
async def test_n_requests_are_merged_in_order_and_their_tokens_added_up(flagged: bool) -> None:
    async with Peer(chat("a"), chat("b"), chat("c")) as peer:
        answer = await make(peer, n_kwarg_is_ignored=flagged).chat_completion(messages=HELLO, n=3)
    assert [(c.index, c.message.content) for c in answer.choices][0] == (0, "a")
    assert sorted(c.message.content for c in answer.choices) == ["a", "b", "c"]
    assert [c.index for c in answer.choices] == [0, 1, 2]
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (6, 9)
    assert [body["n"] for body in peer.bodies] == [1 if flagged else 3, 1, 1]


async def test_an_api_that_refuses_n_is_asked_n_times() -> None:
    said = refusal("'n' : number must be at most 1", param="n")
    async with Peer(said, chat("a")) as peer:
        server = make(peer)
        for _ in range(2):
            answer = await server.chat_completion(messages=HELLO, n=2)
            assert [c.index for c in answer.choices] == [0, 1]
    assert [body["n"] for body in peer.bodies] == [2, 1, 1, 1, 1]


async def test_requests_for_one_choice_each_have_different_seeds() -> None:
    async with Peer(chat("a")) as peer:
        await ask(peer, n=3, seed=5)
    assert sorted((body["n"], body["seed"]) for body in peer.bodies) == [(1, 6), (1, 7), (3, 5)]


# The two names of the token limit.


@pytest.mark.parametrize(
    ("sent", "other", "said"),
    [
        (
            "max_tokens",
            "max_completion_tokens",
            refusal(
                "Unsupported parameter: 'max_tokens' is not supported with this model."
                " Use 'max_completion_tokens' instead."
            ),
        ),
        (
            "max_completion_tokens",
            "max_tokens",
            Reply(
                {
                    "detail": [
                        {
                            "type": "extra_forbidden",
                            "loc": ["body", "max_completion_tokens"],
                            "msg": "Extra inputs are not permitted",
                        }
                    ]
                },
                422,
            ),
        ),
    ],
)
async def test_the_accepted_name_of_the_token_limit_is_learned_once(
    sent: str, other: str, said: Reply
) -> None:
    async with Peer(said, chat("a")) as peer:
        server = make(peer)
        for _ in range(2):
            answer = await server.chat_completion(messages=HELLO, **{sent: 9})
            assert answer.choices[0].message.content == "a"
        await server.chat_completion(messages=HELLO, **{other: 8})
        await server.chat_completion(messages=HELLO)
    limits = [
        {key: value for key, value in body.items() if "tokens" in key} for body in peer.bodies
    ]
    assert limits == [{sent: 9}, {other: 9}, {other: 9}, {other: 8}, {}]


@pytest.mark.parametrize(
    ("said", "more"),
    [
        (refusal("max_tokens is too large: 100000. This model supports at most 16384."), {}),
        (refusal("Unsupported parameter: 'logit_bias'", param="logit_bias"), {}),
        (refusal("Unsupported parameter: 'max_tokens'", status=403), {}),
        (refusal("Unsupported parameter: 'max_tokens'"), {"max_completion_tokens": 1}),
    ],
)
async def test_other_refusals_are_not_sent_again(said: Reply, more: dict[str, int]) -> None:
    async with Peer(said, chat("a")) as peer:
        with pytest.raises(EngineRejected, match="max_tokens|logit_bias"):
            await ask(peer, max_tokens=100000, **more)
    assert len(peer.asked) == 1


async def test_a_name_that_is_refused_as_well_is_not_kept() -> None:
    both = [refusal("unsupported: 'max_tokens'"), refusal("unsupported: 'max_completion_tokens'")]
    async with Peer(*both, *both) as peer:
        server = make(peer)
        for _ in range(2):
            with pytest.raises(EngineRejected, match="unsupported: 'max_completion_tokens'"):
                await server.chat_completion(messages=HELLO, max_tokens=9)
    assert ["max_tokens" in body for body in peer.bodies] == [True, False, True, False]


UNKNOWN_IDS = refusal("Unrecognized request argument supplied: stop_token_ids")


async def test_an_api_without_stop_token_ids_gets_their_text_from_then_on(
    tmp_path: Path,
) -> None:
    tokenizer = make_tokenizer(CHATML, eos="<|im_end|>")
    tokenizer.save_pretrained(tmp_path)
    ids = [tokenizer.eos_token_id, *tokenizer.encode("x", add_special_tokens=False)]
    async with Peer(UNKNOWN_IDS, chat("a")) as peer:
        server = make(peer, tokenizer_name=str(tmp_path))
        for _ in range(2):
            reply = await server.chat_completion(messages=HELLO, stop=["b", *ids], max_tokens=9)
            assert reply.choices[0].message.content == "a"
    stops = [(body.get("stop"), body.get("stop_token_ids")) for body in peer.bodies]
    assert stops == [(["b"], ids)] + [(["b", "<|im_end|>", "x"], None)] * 2


async def test_an_api_without_stop_token_ids_and_without_a_tokenizer_says_what_to_do() -> None:
    async with Peer(UNKNOWN_IDS, chat("a")) as peer:
        server = make(peer)
        for _ in range(2):
            with pytest.raises(EngineRejected, match=r"text of \[5\] is not known: set tokenizer"):
                await server.chat_completion(messages=HELLO, stop=[5])
        await server.chat_completion(messages=HELLO, stop="b")
    assert [body.get("stop_token_ids") for body in peer.bodies] == [[5], None]


# Reasoning.


async def test_reasoning_is_sent_with_chats_only_and_overrides_extra_body() -> None:
    async with Peer(chat("a")) as peer:
        server = make(peer, ReasoningConfig(effort="low"))
        extra = {"reasoning": {"effort": "high"}, "provider": {"order": ["x"]}}
        await server.chat_completion(messages=HELLO, max_tokens=9, extra_body=extra)
        await server.chat_completion(messages=HELLO, max_tokens=9, skip_reasoning=True)
        peer.replies = [Reply(text("a"))]
        await server.completion(prompt="x", skip_reasoning=True)
        await server.completion(prompt="x")
    base = {"model": "m", "messages": HELLO, "max_tokens": 9}
    assert peer.bodies == [
        {**base, "reasoning": {"enabled": True, "effort": "low"}, "provider": {"order": ["x"]}},
        base,
        {"model": "m", "prompt": "x"},
        {"model": "m", "prompt": "x"},
    ]


async def test_an_empty_url_means_openai_also_for_reasoning(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("OPENAI_BASE_URL", raising=False)
    monkeypatch.setenv("OPENAI_API_KEY", "from-env")
    server = OpenAIServer(APIServerConfig(base_url="", health_check=False), ReasoningConfig(True))
    assert server._peer.root == OPENAI_URL
    sent: dict[str, Any] = {}

    async def post(path: str, body: dict[str, Any], **_: Any) -> dict[str, Any]:
        sent.update(body)
        return chat("a")

    monkeypatch.setattr(server._peer, "post", post)
    await server.chat_completion(messages=HELLO, temperature=0.2, max_tokens=9)
    await server.close()
    assert sent == {
        "model": "default",
        "messages": HELLO,
        "temperature": 1.0,
        "max_completion_tokens": 9,
        "reasoning_effort": "medium",
    }


async def test_the_url_variable_of_the_openai_package_is_read_also_for_reasoning(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with Peer(chat("a")) as peer:
        monkeypatch.setenv("OPENAI_BASE_URL", peer.url)
        await make(peer, ReasoningConfig(True), base_url="").chat_completion(messages=HELLO)
    assert peer.bodies[0]["reasoning"] == {"enabled": True}


@pytest.mark.parametrize(
    ("url", "given", "variable", "expected"),
    [
        ("https://api.openai.com/v1", "", "env", "Bearer env"),
        ("https://api.openai.com/v1", "own", "env", "Bearer own"),
        ("", None, "env", "Bearer env"),
        ("https://eu.api.openai.com/v1", "", "env", "Bearer env"),
        ("http://localhost:9001/v1", "", "env", None),
        ("https://api.openai.com.example.org/v1", "", "env", None),
        ("https://example.org/api.openai.com/v1", "", "env", None),
    ],
)
def test_the_key_variable_is_only_for_openai(
    monkeypatch: pytest.MonkeyPatch,
    url: str,
    given: str | None,
    variable: str,
    expected: str | None,
) -> None:
    monkeypatch.delenv("OPENAI_BASE_URL", raising=False)
    monkeypatch.setenv("OPENAI_API_KEY", variable)
    server = OpenAIServer(APIServerConfig(base_url=url, api_key=given))
    assert server._peer._headers.get("Authorization") == expected


# Gateways that answer 200 with an error, and replies without what they must hold.


@pytest.mark.parametrize(
    ("code", "error"),
    [(502, EngineUnavailable), (429, EngineUnavailable), (400, EngineRejected)],
)
async def test_an_error_inside_a_200_is_the_error_it_names(code: int, error: type) -> None:
    body = {"error": {"code": code, "message": "provider returned error"}}
    async with Peer(body) as peer:
        with pytest.raises(error, match=f"200 with error {code}: .*provider returned error"):
            await make(peer)._chat_completion_wrapper(model="m", messages=HELLO)


@pytest.mark.parametrize(
    ("reply", "message"),
    [
        ({"error": "overloaded"}, "without a list of choices: {'error': 'overloaded'}"),
        ({"choices": None}, "without a list of choices"),
        ([], r"without a list of choices: \[\]"),
        ({"choices": [None]}, r"choices\[0\] has no message: None"),
        ({"choices": [{"text": "a"}]}, r"choices\[0\] has no message: {'text': 'a'}"),
        ({"choices": [{"message": "a"}]}, r"choices\[0\] has no message"),
    ],
)
async def test_a_chat_reply_without_what_it_must_hold_is_refused(reply: Any, message: str) -> None:
    async with Peer(reply) as peer:
        with pytest.raises(EngineProtocolError, match=message):
            await ask(peer)
    assert len(peer.asked) == 1


async def test_a_text_reply_without_text_is_refused() -> None:
    async with Peer({"choices": [{"message": {"content": "a"}}]}) as peer:
        with pytest.raises(EngineProtocolError, match=r"choices\[0\] has no text"):
            await make(peer).completion(prompt="x")


# Health.


async def test_nothing_is_asked_about_health_without_a_url_or_with_the_check_off() -> None:
    async with Peer(chat("a")) as peer:
        for changes in ({"base_url": None, "health_check": True}, {"health_check": False}):
            server = make(peer, **changes)
            server._peer.root = peer.url
            await server.chat_completion(messages=HELLO)
    assert "/models" not in peer.gotten
