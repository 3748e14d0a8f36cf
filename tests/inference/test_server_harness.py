"""ServerHarness: exact scripts, the answers of a function, and the faults that real servers have."""

from __future__ import annotations

import pytest

from atroposlib.errors import EngineRejected
from atroposlib.inference.harness import (
    ByteTokenizer,
    HarnessRequest,
    ServerHarness,
    create_chat_completion,
    create_completion,
)
from atroposlib.inference.sessions.managed_server import ManagedServer

HELLO = [{"role": "user", "content": "hello"}]


def echo(request: HarnessRequest) -> str:
    return f"{request.prompt[-8:]}{request.choice}"


async def test_scripts_answer_exactly_their_prompt_and_nothing_else() -> None:
    harness = ServerHarness()
    chat, text = create_chat_completion("yes"), create_completion(["a", "b"])
    harness.set_desired_response(HELLO, chat)
    harness.set_desired_completion("prompt", text)
    harness.set_tokens_and_logprobs_response("prompt", [1], [[2, 3]], [[-0.5, -1.0]], ["stop"])
    assert await harness.chat_completion(messages=HELLO) is chat
    assert await harness.chat_completion(messages=[{"role": "user", "content": "bye"}]) is None
    assert await harness.completion(prompt="prompt") is text
    assert await harness.completion(prompt="other") is None
    assert await harness.tokens_and_logprobs_completion(prompt="prompt") == (
        [1],
        [[2, 3]],
        [[-0.5, -1.0]],
        ["stop"],
    )
    assert await harness.tokens_and_logprobs_completion(prompt="other") is None
    managed = ManagedServer(harness, tokenizer=ByteTokenizer())
    with pytest.raises(EngineRejected, match="no answer for this prompt"):
        await managed.completion(prompt="other")


async def test_scripts_are_kept_by_keywords_and_keys_of_the_original() -> None:
    harness = ServerHarness()
    chat, text = create_chat_completion("yes"), create_completion("no")
    harness.set_desired_response(input_message=HELLO, desired_response=chat)
    harness.set_desired_completion(input_message="prompt", completion=text)
    key = harness.conv_to_dictkey(input_message=[*HELLO, {"role": "assistant", "content": "yes"}])
    assert key == "role:user\ncontent:hello\nrole:assistant\ncontent:yes"
    assert harness.response_map == {harness.conv_to_dictkey(HELLO): chat, "prompt": text}
    await harness.update_weight(weight=0.0)
    assert await harness.chat_completion(messages=HELLO) is chat
    assert await harness.completion(prompt="prompt") is text


def test_scripted_answers_repeat_one_text_or_keep_several_with_their_finish_reasons() -> None:
    reasons = ["stop", "length", "tool_calls"]
    for resp, contents in [("yes", ["yes"] * 3), (["a", "b", "c"], ["a", "b", "c"])]:
        chat = create_chat_completion(resp, n=3, finish_reason=reasons)
        assert [choice.message.content for choice in chat.choices] == contents
        assert [choice.finish_reason for choice in chat.choices] == reasons
        text = create_completion(resp, n=3, finish_reason=reasons)
        assert [choice.text for choice in text.choices] == contents
        assert [choice.finish_reason for choice in text.choices] == reasons
    assert create_completion(["a"], finish_reason="length").choices[0].finish_reason == "length"
    assert (chat.id, chat.model) == ("test_id", "test_model")
    with pytest.raises(ValueError, match="zip"):
        create_chat_completion("yes", n=3, finish_reason=["stop"])
