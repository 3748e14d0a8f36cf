"""TrlVllmServer: what it sends to `/generate/`, how token ids become text, and when it can give tokens."""

from __future__ import annotations

import logging
from typing import Any

import pytest
from helpers_peer import Characters, Peer, Reply

from atroposlib.errors import ConfigError, EngineProtocolError, EngineRejected
from atroposlib.inference.config import APIServerConfig
from atroposlib.inference.servers.trl import TrlVllmServer

DEFAULTS = {
    "n": 1,
    "repetition_penalty": 1.0,
    "temperature": 1.0,
    "top_p": 1.0,
    "top_k": -1,
    "min_p": 0.0,
    "max_tokens": 1024,
}
HELLO = [{"role": "user", "content": "hello"}]
NOT_TEXT = Reply({"detail": [{"loc": ["body", "prompts", 0], "msg": "not a string"}]}, 422)


def ids(text: str) -> list[int]:
    return [ord(c) for c in text]


def make(peer: Peer, **changes: Any) -> TrlVllmServer:
    server = peer.opened(TrlVllmServer(peer.config(server_type="trl", **changes)))
    server.tokenizer = Characters()
    return server


async def call(peer: Peer, method: str, **kwargs: Any) -> Any:
    return await getattr(make(peer), method)(**kwargs)


# Text.


async def test_a_text_prompt_goes_out_as_it_is_with_the_defaults() -> None:
    async with Peer({"completion_ids": [ids("a"), ids("b\x02")], "prompt_ids": [[1, 2]]}) as peer:
        answer = await call(peer, "completion", prompt="abc", n=2, max_new_tokens=1)
    assert peer.bodies[0] == {"prompts": ["abc"], **DEFAULTS, "n": 2, "max_tokens": 1}
    assert [(c.index, c.text, c.finish_reason) for c in answer.choices] == [
        (0, "a", "length"),
        (1, "b", "stop"),
    ]
    assert (answer.object, answer.usage.prompt_tokens, answer.usage.completion_tokens) == (
        "text_completion",
        2,
        3,
    )


async def test_tools_and_template_variables_are_shown_to_the_template() -> None:
    async with Peer({"completion_ids": [[2]]}) as peer:
        await call(
            peer,
            "chat_completion",
            messages=HELLO,
            tools=[{"type": "function"}],
            extra_body={"chat_template_kwargs": {"enable_thinking": False}},
        )
    expected = "tools=1\nenable_thinking=False\nuser:hello\nassistant:"
    assert peer.bodies[0] == {"prompts": [expected], **DEFAULTS}


async def test_a_last_message_of_the_assistant_is_continued() -> None:
    async with Peer({"completion_ids": [[2]]}) as peer:
        messages = [*HELLO, {"role": "assistant", "content": "Well,"}]
        answer = await call(peer, "chat_completion", messages=messages)
    assert peer.bodies[0]["prompts"] == ["user:hello\nassistant:Well,"]
    assert (answer.object, answer.model, answer.usage) == ("chat.completion", "m", None)


async def test_a_reply_can_be_appended_to_the_messages_as_it_is() -> None:
    async with Peer({"completion_ids": [ids("hi\x02")]}) as peer:
        first = await call(peer, "chat_completion", messages=HELLO)
        messages = [*HELLO, first.choices[0].message, {"role": "user", "content": "?"}]
        await call(peer, "chat_completion", messages=messages)
    prompt = "user:hello\nassistant:hi\nuser:?\nassistant:"
    assert peer.bodies[1]["prompts"] == [prompt]


@pytest.mark.parametrize(
    ("token_ids", "options", "expected"),
    [
        (ids("one\ntwo"), {"stop": "\n"}, ("one", "stop")),
        (ids("one two"), {"stop": ["two", "e"]}, ("on", "stop")),
        (ids("one\x02"), {"stop": ["three"]}, ("one", "stop")),
        (ids("one\x03"), {}, ("one", "stop")),  # a chat model's end of turn
        (ids("one"), {"stop_token_ids": [ord("e")]}, ("on", "stop")),
        (ids("oe1"), {"stop_token_ids": [ord("e")]}, ("oe1", "length")),
        (ids("one"), {"stop": ["three"]}, ("one", "length")),
        ([], {}, ("", "length")),
    ],
)
async def test_text_ends_at_a_stop_string_and_the_finish_reason_tells_why(
    token_ids: list[int], options: dict[str, Any], expected: tuple[str, str]
) -> None:
    async with Peer({"completion_ids": [token_ids]}) as peer:
        answer = await call(peer, "completion", prompt="x", **options)
    choice = answer.choices[0]
    assert (choice.text, choice.finish_reason) == expected
    assert peer.bodies[0].get("generation_kwargs", {}) == options


async def test_other_sampling_parameters_go_where_newer_servers_read_them(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with Peer({"completion_ids": [[2]]}) as peer:
        server = make(peer)
        with caplog.at_level(logging.WARNING):
            for _ in range(2):
                await server.completion(
                    prompt="x", seed=4, frequency_penalty=0.1, guided_decoding_regex="a+", colour=1
                )
    assert peer.bodies[1] == {
        "prompts": ["x"],
        **DEFAULTS,
        "guided_decoding_regex": "a+",
        "generation_kwargs": {"seed": 4, "frequency_penalty": 0.1},
    }
    assert caplog.text.count("'colour'") == 1


# Tokens.


def with_logprobs(**changes: Any) -> dict[str, Any]:
    return {
        "prompt_ids": [[1, 104]],
        "completion_ids": [ids("a\x02"), ids("b")],
        "logprobs": [[-0.1, -1], [-0.25]],
        **changes,
    }


async def test_logprobs_of_several_tokens_are_looked_up_by_the_sampled_id() -> None:
    reply = with_logprobs(
        logprobs=[[[-0.1, -3.0], [-0.5, -0.75]], [[-0.25]]],
        logprob_token_ids=[[[97, 5], [6, 2]], [[98]]],
    )
    async with Peer(reply) as peer:
        answer = await call(peer, "tokens_and_logprobs_completion", input_ids=[1, 104], n=2)
    assert answer.output_logprobs == [[-0.1, -0.75], [-0.25]]


async def test_servers_that_take_only_text_are_sent_the_text_of_the_ids_and_checked() -> None:
    async with Peer(NOT_TEXT, with_logprobs()) as peer:
        server = make(peer)
        for _ in range(2):
            answer = await server.tokens_and_logprobs_completion(input_ids=[1, 104], n=2)
        assert answer.prompt_tokens == [1, 104]
        assert [body["prompts"] for body in peer.bodies] == [[[1, 104]], ["h"], ["h"]]
        peer.replies = [Reply(with_logprobs(prompt_ids=[[1, 1, 104]]))]
        with pytest.raises(EngineProtocolError, match="after 3 prompt tokens that are not the 2"):
            await server.tokens_and_logprobs_completion(input_ids=[1, 104], n=2)


async def test_servers_without_logprobs_say_so_and_are_asked_once() -> None:
    async with Peer(NOT_TEXT, {"completion_ids": [ids("a")]}) as peer:
        server = make(peer)
        for _ in range(2):
            with pytest.raises(NotImplementedError, match="set server_type to 'vllm'"):
                await server.tokens_and_logprobs_completion(prompt="h")
        with pytest.raises(NotImplementedError, match="cannot return prompt logprobs"):
            await server.get_logprobs(input_ids=[1])
    assert len(peer.asked) == 2


@pytest.mark.parametrize(
    ("reply", "message"),
    [
        (
            with_logprobs(completion_ids=[["a"], [98]]),
            r"Expected `int`, got `str` - at `\$.completion_ids\[0\]\[0\]`",
        ),
        (with_logprobs(completion_ids=[None, [98]]), r"got `null` - at `\$.completion_ids\[0\]`"),
        (with_logprobs(logprobs=[[-0.1, -1.0]]), "1 lists of logprobs, expected n = 2"),
        (with_logprobs(logprobs=5), r"got `int` - at `\$.logprobs`"),
        (with_logprobs(logprobs=[[[-0.1], [-1.0]], [[-0.2]]]), "cannot be found by logprob_token"),
        (
            with_logprobs(
                logprobs=[[[-0.1], [-1.0]], [[-0.2]]], logprob_token_ids=[[[97], [5]], [[98]]]
            ),
            "cannot be found by logprob_token_ids",
        ),
        (with_logprobs(prompt_ids=[[1], [104]]), "answered 2 prompts, expected n = 1"),
        (with_logprobs(prompt_ids=None), "after 0 prompt tokens that are not the 2 sent"),
    ],
)
async def test_what_cannot_be_trained_on_is_refused_with_its_place(
    reply: Any, message: str
) -> None:
    async with Peer(reply) as peer:
        with pytest.raises(EngineProtocolError, match=message):
            await call(peer, "tokens_and_logprobs_completion", input_ids=[1, 104], n=2)


# Errors, health, construction.


async def test_a_token_request_that_fails_as_text_as_well_is_refused() -> None:
    async with Peer(NOT_TEXT) as peer:
        server = make(peer)
        with pytest.raises(EngineRejected, match="not a string"):
            await server.tokens_and_logprobs_completion(input_ids=[1])
        peer.replies = [Reply(with_logprobs(prompt_ids=[[1]]))]
        await server.tokens_and_logprobs_completion(input_ids=[1], n=2)
    assert peer.bodies[-1]["prompts"] == [[1]]  # not taken for a server of text only


async def test_a_call_that_this_server_cannot_make_is_refused() -> None:
    server = TrlVllmServer(
        APIServerConfig(base_url="http://127.0.0.1:1", server_type="trl", health_check=False)
    )
    with pytest.raises(ValueError, match="prompt is list, expected one text"):
        await server.completion(prompt=["a", "b"])
    with pytest.raises(ValueError, match="needs input_ids or prompt"):
        await server.tokens_and_logprobs_completion()
    await server.close()
    with pytest.raises(ConfigError, match="needs base_url, for example http://localhost:8000$"):
        TrlVllmServer(APIServerConfig(server_type="trl"))


def test_the_tokenizer_is_that_of_tokenizer_name(monkeypatch: pytest.MonkeyPatch) -> None:
    module = "atroposlib.inference.servers.token_ids.load_tokenizer"
    monkeypatch.setattr(module, lambda name, **_: f"tokenizer of {name}")
    config = APIServerConfig(base_url="http://h", server_type="trl", model_name="m")
    assert TrlVllmServer(config).tokenizer == "tokenizer of m"
    named = config.model_copy(update={"tokenizer_name": "t"})
    assert TrlVllmServer(named).tokenizer == "tokenizer of t"
