"""Managed sessions: what was sampled stays exactly as it was sampled, turn after turn."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from atroposlib.errors import ConfigError, EngineProtocolError
from atroposlib.inference.harness import (
    ByteTokenizer,
    HarnessRequest,
    ServerHarness,
    create_chat_completion,
    made_up_logprobs,
)
from atroposlib.inference.servers.api_server import TokenCompletions
from atroposlib.inference.sessions.managed_server import (
    DummyManagedServer,
    ManagedServer,
    ManagedServerAdapter,
    SequenceNode,
)

TOKENIZER = ByteTokenizer()


class TrimmingTokenizer(ByteTokenizer):
    """A template that strips `<think>` blocks and white space from the assistant's past, as many real ones do."""

    def apply_chat_template(self, messages: Sequence[Mapping[str, Any]], **options: Any) -> Any:
        trimmed = [
            {**m, "content": m["content"].split("</think>")[-1].strip()}
            if m["role"] == "assistant"
            else m
            for m in messages
        ]
        return super().apply_chat_template(trimmed, **options)


class RewritingTokenizer(ByteTokenizer):
    """A template whose first line depends on the whole conversation: no prefix is stable."""

    def apply_chat_template(self, messages: Sequence[Mapping[str, Any]], **options: Any) -> Any:
        head = [{"role": "system", "content": f"{len(messages)} messages"}]
        return super().apply_chat_template([*head, *messages], **options)


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def echo(request: HarnessRequest) -> str:
    return f"<think>c{request.choice}</think> reply {request.call}.{request.choice} "


def assert_aligned(node: SequenceNode) -> None:
    """Every trained token has the logprob the engine gave it after exactly the tokens before it."""
    assert len(node.tokens) == len(node.masked_tokens) == len(node.logprobs)
    position = 0
    while position < len(node.tokens):
        if node.masked_tokens[position] == -100:
            assert node.logprobs[position] == 1.0
            position += 1
            continue
        end = position
        while end < len(node.tokens) and node.masked_tokens[end] != -100:
            end += 1
        sampled = node.tokens[position:end]
        assert node.masked_tokens[position:end] == sampled
        assert node.logprobs[position:end] == made_up_logprobs(node.tokens[:position], sampled)
        position = end
    # A BOS that tokenising a text prompt adds is a token, but nobody wrote it.
    assert node.full_text == TOKENIZER.decode(node.tokens).removeprefix("<bos>")


def num_trained(node: SequenceNode) -> int:
    return sum(label != -100 for label in node.masked_tokens)


@pytest.mark.parametrize("tokenizer", [ByteTokenizer(), TrimmingTokenizer()])
async def test_a_conversation_is_one_sequence_whatever_the_template_does_to_the_past(
    tokenizer: ByteTokenizer,
) -> None:
    harness = ServerHarness(tokenizer=tokenizer, respond=echo)
    managed = ManagedServer(harness)
    messages: list[Any] = [{"role": "system", "content": "be brief"}, user("one")]
    sampled = 0
    for text in ("two", "three", "four"):
        reply = await managed.chat_completion(messages=messages)
        sampled += reply.usage.completion_tokens
        messages += [reply.choices[0].message, user(text)]
    [node] = managed.get_state()["nodes"]
    assert_aligned(node)
    assert num_trained(node) == sampled
    assert node.full_text == (
        "<system>be brief<eos><user>one<eos>"
        "<assistant><think>c0</think> reply 0.0 <eos><user>two<eos>"
        "<assistant><think>c0</think> reply 1.0 <eos><user>three<eos>"
        "<assistant><think>c0</think> reply 2.0 <eos>"
    )
    assert managed.num_broken_prefixes == 0


async def test_each_turn_sends_the_earlier_tokens_verbatim() -> None:
    harness = ServerHarness(respond=echo)
    managed = ManagedServer(harness)
    first = await managed.chat_completion(messages=[user("one")])
    before = list(managed.get_state()["nodes"][0].tokens)
    await managed.chat_completion(messages=[user("one"), first.choices[0].message, user("two")])
    assert harness.requests[1]["input_ids"][: len(before)] == before


async def test_a_template_that_rewrites_the_past_begins_a_new_sequence_and_says_so(
    caplog: pytest.LogCaptureFixture,
) -> None:
    managed = ManagedServer(ServerHarness(tokenizer=RewritingTokenizer(), respond=echo))
    messages: list[Any] = [user("one")]
    for text in ("two", "three"):
        reply = await managed.chat_completion(messages=messages)
        messages += [reply.choices[0].message, user(text)]
    nodes = managed.get_state()["nodes"]
    assert len(nodes) == 2
    for node in nodes:
        assert_aligned(node)
    assert managed.num_broken_prefixes == 1
    assert "rewrites earlier turns" in caplog.text


async def test_choices_line_up_with_nodes() -> None:
    managed = ManagedServer(ServerHarness(respond=echo))
    reply = await managed.chat_completion(messages=[user("one")], n=4)
    nodes = managed.get_state()["nodes"]
    assert len(nodes) == 4
    for choice, node in zip(reply.choices, nodes, strict=True):
        assert node.full_text == f"<user>one<eos><assistant>{choice.message.content}<eos>"
        assert node.metadata["finish_reason"] == choice.finish_reason == "stop"


async def test_calls_made_at_the_same_time_have_their_nodes_in_call_order() -> None:
    class Reversed(ServerHarness):
        async def _tokens_and_logprobs_completion_wrapper(self, **kwargs: Any) -> Any:
            answer = await super()._tokens_and_logprobs_completion_wrapper(**kwargs)
            for _ in range(10 * (5 - len(self.requests))):
                await asyncio.sleep(0)
            return answer

    managed = ManagedServer(Reversed(respond=echo))
    replies = await asyncio.gather(
        *(managed.chat_completion(messages=[user("one")]) for _ in range(4))
    )
    for reply, node in zip(replies, managed.get_state()["nodes"], strict=True):
        assert reply.choices[0].message.content in node.full_text


async def test_a_turn_grows_the_sibling_whose_answer_it_repeats() -> None:
    managed = ManagedServer(ServerHarness(respond=echo))
    reply = await managed.chat_completion(messages=[user("one")], n=3)
    await managed.chat_completion(
        messages=[user("one"), reply.choices[1].message, user("two")], n=2
    )
    texts = [node.full_text.count("<assistant>") for node in managed.get_state()["nodes"]]
    assert texts == [1, 2, 1, 2]  # the second grew; its twin was added at the end
    for node in managed.get_state()["nodes"]:
        assert_aligned(node)


async def test_going_back_to_an_earlier_turn_branches_off_with_the_same_tokens() -> None:
    managed = ManagedServer(ServerHarness(respond=echo))
    first = await managed.chat_completion(messages=[user("one")])
    start = list(managed.get_state()["nodes"][0].tokens)
    history = [user("one"), first.choices[0].message]
    await managed.chat_completion(messages=[*history, user("two")])
    await managed.chat_completion(messages=[*history, user("other")])
    nodes = managed.get_state()["nodes"]
    assert [node.tokens[: len(start)] for node in nodes] == [start, start]
    assert "two" in nodes[0].full_text
    assert "other" in nodes[1].full_text


async def test_an_edited_answer_is_not_taken_for_the_sampled_one() -> None:
    managed = ManagedServer(ServerHarness(respond=echo))
    await managed.chat_completion(messages=[user("one")])
    edited = {"role": "assistant", "content": "something else"}
    await managed.chat_completion(messages=[user("one"), edited, user("two")])
    first, second = managed.get_state()["nodes"]
    assert "something else" in second.full_text
    assert first.full_text != second.full_text
    assert_aligned(second)


async def test_an_answer_cut_by_max_tokens_is_closed_by_the_template_once() -> None:
    managed = ManagedServer(ServerHarness(respond=lambda request: "a long answer"))
    reply = await managed.chat_completion(messages=[user("one")], max_tokens=6)
    assert reply.choices[0].finish_reason == "length"
    await managed.chat_completion(messages=[user("one"), reply.choices[0].message, user("two")])
    [node] = managed.get_state()["nodes"]
    assert node.full_text == (
        "<user>one<eos><assistant>a long<eos><user>two<eos><assistant>a long answer<eos>"
    )
    assert_aligned(node)
    assert num_trained(node) == 6 + len("a long answer") + 1  # the given EOS is not trained


async def test_a_cut_answer_can_be_continued_in_place() -> None:
    answers = iter(["a long answer", " and its end"])
    managed = ManagedServer(ServerHarness(respond=lambda request: next(answers)))
    reply = await managed.chat_completion(messages=[user("one")], max_tokens=6)
    await managed.chat_completion(messages=[user("one"), reply.choices[0].message])
    [node] = managed.get_state()["nodes"]
    assert node.full_text == "<user>one<eos><assistant>a long and its end<eos>"


async def test_a_prefilled_answer_is_continued_not_closed() -> None:
    harness = ServerHarness(respond=lambda request: "sure</think>yes")
    managed = ManagedServer(harness)
    prefill = {"role": "assistant", "content": "<think>I am "}
    reply = await managed.chat_completion(messages=[user("one"), prefill])
    assert harness.requests[0]["prompt"] == "<user>one<eos><assistant><think>I am "
    whole = {"role": "assistant", "content": "<think>I am " + reply.choices[0].message.content}
    await managed.chat_completion(messages=[user("one"), whole, user("two")])
    [node] = managed.get_state()["nodes"]
    assert_aligned(node)
    assert node.full_text.startswith("<user>one<eos><assistant><think>I am sure</think>yes<eos>")


async def test_text_completions_extend_and_keep_earlier_answers_trainable() -> None:
    managed = ManagedServer(ServerHarness(respond=lambda request: f"answer{request.call}"))
    first = await managed.completion(prompt="Q: one A:")
    prompt = f"Q: one A:{first.choices[0].text} Q: two A:"
    await managed.completion(prompt=prompt)
    [node] = managed.get_state()["nodes"]
    assert_aligned(node)
    assert node.full_text == "Q: one A:answer0<eos> Q: two A:answer1<eos>"
    assert num_trained(node) == 2 * (len("answer0") + 1)
    assert node.tokens[0] == TOKENIZER.bos_token_id


async def test_an_end_token_spelled_out_by_the_caller_is_not_doubled() -> None:
    managed = ManagedServer(ServerHarness(respond=lambda request: "yes"))
    first = await managed.completion(prompt="<user>one<eos><assistant>")
    await managed.completion(
        prompt=f"<user>one<eos><assistant>{first.choices[0].text}<eos><user>two<eos><assistant>"
    )
    [node] = managed.get_state()["nodes"]
    text = TOKENIZER.decode(node.tokens)
    assert text == "<bos><user>one<eos><assistant>yes<eos><user>two<eos><assistant>yes<eos>"


async def test_the_same_prompt_again_adds_nodes() -> None:
    managed = ManagedServer(ServerHarness(respond=echo))
    await managed.chat_completion(messages=[user("one")], n=3)
    await managed.chat_completion(messages=[user("one")], n=2)
    assert len(managed.get_state()["nodes"]) == 5


async def test_the_oldest_policy_version_is_remembered_over_turns() -> None:
    harness = ServerHarness(respond=lambda request: "abc", weight_version="12")
    managed = ManagedServer(harness)
    reply = await managed.chat_completion(messages=[user("one")])
    harness.weight_version = "13"
    await managed.chat_completion(messages=[user("one"), reply.choices[0].message, user("two")])
    [node] = managed.get_state()["nodes"]
    metadata = node.metadata
    assert metadata["policy_version"] == 12
    assert [span["weight_version"] for span in metadata["weight_versions"]] == ["12", "13"]
    for span in metadata["weight_versions"]:
        labels = node.masked_tokens[span["start"] : span["start"] + span["num_tokens"]]
        assert -100 not in labels


async def test_an_engine_that_does_not_tell_its_version_gives_none() -> None:
    managed = ManagedServer(ServerHarness(respond=echo))
    await managed.chat_completion(messages=[user("one")])
    assert managed.get_state()["nodes"][0].metadata["policy_version"] is None


async def test_misaligned_answers_raise_and_leave_no_node() -> None:
    class Short(ServerHarness):
        async def _tokens_and_logprobs_completion_wrapper(self, **kwargs: Any) -> Any:
            answer = await super()._tokens_and_logprobs_completion_wrapper(**kwargs)
            return TokenCompletions(answer[0], answer[1], [answer[2][0][:-1]], answer[3])

    managed = ManagedServer(Short(respond=echo))
    with pytest.raises(EngineProtocolError, match="logprobs for"):
        await managed.chat_completion(messages=[user("one")])
    assert managed.get_state()["nodes"] == []


async def test_an_engine_that_changes_a_continued_prompt_is_refused() -> None:
    class Changing(ServerHarness):
        async def _tokens_and_logprobs_completion_wrapper(self, **kwargs: Any) -> Any:
            answer = await super()._tokens_and_logprobs_completion_wrapper(**kwargs)
            return TokenCompletions([1, *answer[0]], *answer[1:])

    managed = ManagedServer(Changing(respond=echo))
    reply = await managed.chat_completion(messages=[user("one")])
    assert managed.get_state()["nodes"][0].tokens[0] == 1  # what the engine saw
    with pytest.raises(EngineProtocolError, match="prompt tokens that are not"):
        await managed.chat_completion(messages=[user("one"), reply.choices[0].message, user("two")])


async def test_sampling_keywords_reach_the_engine_and_the_rest_does_not() -> None:
    harness = ServerHarness(respond=echo)
    managed = ManagedServer(harness)
    await managed.chat_completion(
        messages=[user("one")], temperature=0.3, stop=["x"], logprobs=True, tool_choice="auto"
    )
    sent = {k: v for k, v in harness.requests[0].items() if k not in ("input_ids", "prompt")}
    assert sent == {"temperature": 0.3, "stop": ["x"], "model": "test_model"}


async def test_reset_forgets_but_copies_stay_valid() -> None:
    managed = ManagedServer(ServerHarness(respond=echo))
    await managed.chat_completion(messages=[user("one")])
    nodes = managed.get_state()["nodes"]
    managed.reset()
    assert managed.get_state() == {"nodes": []}
    assert len(nodes) == 1


async def test_a_tree_keeps_every_turn() -> None:
    managed = ManagedServer(ServerHarness(respond=echo), track_tree=True)
    reply = await managed.chat_completion(messages=[user("one")])
    await managed.chat_completion(messages=[user("one"), reply.choices[0].message, user("two")])
    sequences = managed.get_state()["sequences"]
    assert [text.count("<assistant>") for text in sequences] == [1, 2]


async def test_the_adapter_has_an_openai_clients_surface() -> None:
    managed = ManagedServer(ServerHarness(respond=echo))
    client = ManagedServerAdapter(managed, "http://h/v1")
    await client.chat.completions.create(messages=[user("one")])
    await client.completions.create(prompt="two")
    assert len(managed.get_state()["nodes"]) == 2


async def test_dummy_sessions_keep_the_text_and_say_that_their_tokens_are_made_up() -> None:
    harness = ServerHarness()
    harness.set_desired_response([user("one")], create_chat_completion("yes", n=2))
    managed = DummyManagedServer(harness)
    reply = await managed.chat_completion(messages=[user("one")], n=2)
    assert len(reply.choices) == 2
    node = managed.get_state()["nodes"][1]
    assert node.full_text == "user:one\n\nassistant:yes"
    assert node.metadata["dummy_tokens"] is True
    assert (len(node.tokens), node.masked_tokens[0], node.logprobs[5]) == (128, -100, -0.5)


async def test_a_tokenizer_without_template_is_a_configuration_error() -> None:
    class Bare(ByteTokenizer):
        chat_template = None  # type: ignore[assignment]

        def apply_chat_template(self, messages: Any, **options: Any) -> Any:
            raise ValueError("no template")

    managed = ManagedServer(ServerHarness(tokenizer=Bare(), respond=echo))
    with pytest.raises(ConfigError, match="no chat template"):
        await managed.chat_completion(messages=[user("one")])


# Properties.

TEXTS = st.sampled_from(
    ["", " ", "hi", "a b\n", "<think>x</think>y", "\n\n z ", "é€", "<eos>", "ATROPOSTURN1END"]
)


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 10**6), texts=st.lists(TEXTS, min_size=4, max_size=12))
@pytest.mark.parametrize("tokenizer", [ByteTokenizer(), TrimmingTokenizer(), RewritingTokenizer()])
async def test_random_conversations_never_misalign(
    tokenizer: ByteTokenizer, seed: int, texts: list[str]
) -> None:
    rng = random.Random(seed)
    harness = ServerHarness(
        tokenizer=tokenizer, respond=lambda request: texts[(request.call + request.choice) % 4]
    )
    managed = ManagedServer(harness)
    histories: list[list[Any]] = [[user(rng.choice(texts))]]
    for text in texts:
        history = rng.choice(histories)
        n = rng.choice([1, 1, 2])
        limit = rng.choice([None, 1, 3])
        num_nodes = len(managed.get_state()["nodes"])
        reply = await managed.chat_completion(messages=history, n=n, max_tokens=limit)
        nodes = managed.get_state()["nodes"]
        assert num_nodes + n - 1 <= len(nodes) <= num_nodes + n
        for node in nodes:
            assert_aligned(node)
        sent = harness.requests[-1]["input_ids"]
        assert sum(node.tokens[: len(sent)] == sent for node in nodes) >= n
        histories += [[*history, choice.message, user(text)] for choice in reply.choices]
