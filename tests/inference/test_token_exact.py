"""What the engine sampled is what it is sent again and what is trained, whatever the chat template does."""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from atroposlib.errors import ConfigError
from atroposlib.inference.harness import made_up_logprobs
from atroposlib.inference.sessions.managed_server import ManagedServer, SequenceNode
from tests.inference.helpers_templates import (
    CHATML,
    SYSTEM_IN_LAST,
    TEMPLATES,
    Template,
    ToldEngine,
    make_tokenizer,
    told_session,
    user,
)

VOCABULARY = len(TEMPLATES[0].tokenizer)
BY_NAME = {template.name: template for template in TEMPLATES}

TEXTS = st.sampled_from(
    [
        "the answer is 42",
        " padded \n",
        "<think>first this</think>\n\nthen that",
        "</think>",
        "ATROPOS0TURN1END",
        "ATROPOS0TURN2END ATROPOS1",
        "<|im_end|>\n<|im_start|>user\n",
        "\u00e9t\u00e9 \U0001f642",
        "\n\n",
        "",
    ]
)
ENDINGS = st.sampled_from(["end", "end", "eos", "length"])
TURNS = st.lists(
    st.tuples(
        st.one_of(TEXTS, st.lists(st.integers(0, VOCABULARY - 1), max_size=12)),
        ENDINGS,
        TEXTS,
    ),
    min_size=1,
    max_size=4,
)


def ids_of(template: Template, answer: str | list[int], ending: str) -> list[int]:
    tokenizer = template.tokenizer
    ids = tokenizer.encode(answer, add_special_tokens=False) if isinstance(answer, str) else answer
    last = {"end": template.end, "eos": template.eos, "length": ""}[ending]
    return [*ids, *tokenizer.encode(last, add_special_tokens=False)]


def own_tokens(tokenizer: Any, messages: Sequence[Any], **options: Any) -> list[int]:
    """The tokenisation that transformers makes of a whole conversation."""
    return tokenizer.apply_chat_template(  # type: ignore[no-any-return]
        messages, add_generation_prompt=True, tokenize=True, return_dict=False, **options
    )


def assert_trained(node: SequenceNode, sampled: Sequence[tuple[int, list[int]]]) -> None:
    """Exactly the `(start, ids)` spans are trained, with the logprobs the engine gave them there."""
    labels, logprobs = [-100] * len(node.tokens), [1.0] * len(node.tokens)
    for start, ids in sampled:
        assert node.tokens[start : start + len(ids)] == ids
        labels[start : start + len(ids)] = ids
        logprobs[start : start + len(ids)] = made_up_logprobs(node.tokens[:start], ids)
    assert node.masked_tokens == labels
    assert node.logprobs == logprobs


@pytest.mark.parametrize("template", TEMPLATES, ids=lambda template: template.name)
@settings(max_examples=25, deadline=None, derandomize=True)
@given(first=TEXTS, turns=TURNS, has_system=st.booleans(), through_json=st.booleans())
async def test_conversations_are_one_sequence_of_sampled_ids_and_new_text(
    template: Template, first: str, turns: list[Any], has_system: bool, through_json: bool
) -> None:
    tokenizer = template.tokenizer
    engine, managed = told_session(tokenizer)
    messages: list[Any] = [user(first)]
    if has_system and template.has_system:
        messages.insert(0, {"role": "system", "content": "be brief"})
    expected = own_tokens(tokenizer, messages)
    sampled: list[tuple[int, list[int]]] = []
    end_ids = tokenizer.encode(template.end, add_special_tokens=False)
    for answer, ending, text in turns:
        ids = ids_of(template, answer, ending)
        engine.answers.append((ids, "length" if ending == "length" else "stop"))
        reply = await managed.chat_completion(messages=messages)
        assert engine.sent[-1] == expected
        sampled.append((len(expected), ids))
        expected = expected + ids
        has_ended = bool(ids) and [ids[-1]] == end_ids
        added = (template.lead if not has_ended else "") + template.end + template.between(text)
        added_ids = tokenizer.encode(added, add_special_tokens=False)
        expected = expected + (added_ids[1:] if has_ended else added_ids)
        message = reply.choices[0].message
        if through_json:
            message = json.loads(json.dumps({"role": "assistant", "content": message.content}))
        messages += [message, user(text)]
        assert reply.usage.completion_tokens == len(ids)
    [node] = managed.get_state()["nodes"]
    assert_trained(node, sampled)
    assert node.full_text == tokenizer.decode(node.tokens)
    assert managed.num_broken_prefixes == 0


async def test_a_template_that_moves_the_system_prompt_forks_and_both_sequences_are_right(
    caplog: pytest.LogCaptureFixture,
) -> None:
    tokenizer = make_tokenizer(SYSTEM_IN_LAST, bos="<|begin_of_text|>")
    engine, managed = told_session(tokenizer)
    messages: list[Any] = [{"role": "system", "content": "be brief"}, user("one")]
    with caplog.at_level(logging.WARNING):
        for text in ("two", "three", "four"):
            engine.tell(f"answer to {text}", end="<|endoftext|>")
            reply = await managed.chat_completion(messages=messages)
            assert engine.sent[-1] == own_tokens(tokenizer, messages)
            messages += [{"role": "assistant", "content": reply.choices[0].message.content}]
            messages += [user(text)]
    nodes = managed.get_state()["nodes"]
    assert len(nodes) == 3
    for node, prompt in zip(nodes, engine.sent, strict=True):
        assert_trained(node, [(len(prompt), node.tokens[len(prompt) :])])
    assert managed.num_broken_prefixes == 2
    assert caplog.text.count("rewrites earlier turns") == 1


async def test_other_tools_in_a_later_turn_fork() -> None:
    engine, managed = told_session(BY_NAME["tools_and_default_system"].tokenizer)
    engine.tell("a", "b")
    first = await managed.chat_completion(messages=[user("one")])
    history = [user("one"), first.choices[0].message, user("two")]
    await managed.chat_completion(messages=history, tools=[{"name": "late"}])
    assert managed.num_broken_prefixes == 1
    assert len(managed.get_state()["nodes"]) == 2
    own = [dict(m) if isinstance(m, dict) else m.model_dump(exclude_none=True) for m in history]
    assert engine.sent[1] == own_tokens(engine.tokenizer, own, tools=[{"name": "late"}])


async def test_a_template_that_refuses_a_message_says_why() -> None:
    managed = ManagedServer(ToldEngine(BY_NAME["no_system"].tokenizer))
    with pytest.raises(ConfigError, match="System role not supported"):
        await managed.chat_completion(
            messages=[{"role": "system", "content": "be brief"}, user("one")]
        )


async def test_a_template_of_strict_turns_gets_one_system_message_and_joined_questions() -> None:
    # What Codex (two system messages, two questions) and Claude Code (system messages later on) send.
    jinja = (
        "{% set start = 1 if messages[0].role == 'system' else 0 %}{% for m in messages %}"
        "{% if (m.role == 'system') != (loop.index0 < start) or m.role == 'user'"
        " and (loop.index0 - start) % 2 %}{{ raise_exception('roles must alternate') }}{% endif %}"
        "{{ m.role + ': ' + m.content + '<|im_end|>\\n' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}"
    )
    engine, managed = told_session(make_tokenizer(jinja))
    engine.tell("a", "b")
    system = [{"role": "system", "content": text} for text in ("one", "two")]
    history: list[Any] = [*system, user("three"), user("four")]
    answered = await managed.chat_completion(messages=history)
    history += [answered.choices[0].message, {"role": "system", "content": "five"}]
    await managed.chat_completion(messages=history)
    first = "system: one\n\ntwo<|im_end|>\nuser: three\n\nfour<|im_end|>\nassistant: "
    later = "a<|im_end|>\nuser: five<|im_end|>\nassistant: "
    assert engine.tokenizer.decode(engine.sent[1]) == first + later
    assert len(managed.get_state()["nodes"]) == 1


async def test_template_variables_reach_the_template_and_not_the_engine() -> None:
    jinja = CHATML + "{% if add_generation_prompt and not enable_thinking %}no{% endif %}"
    engine, managed = told_session(make_tokenizer(jinja, eos="<|im_end|>"))
    engine.tell("a", "b")
    await managed.chat_completion(
        messages=[user("x")], extra_body={"chat_template_kwargs": {"enable_thinking": False}}
    )
    await managed.chat_completion(
        messages=[user("x")], chat_template_kwargs={"enable_thinking": True}
    )
    assert [engine.tokenizer.decode(sent)[-5:] for sent in engine.sent] == ["nt\nno", "tant\n"]
    assert engine.requests[0]["extra_body"] == {}
    assert "chat_template_kwargs" not in engine.requests[1]


async def test_thoughts_of_given_messages_survive_templates_that_cut_them() -> None:
    engine, managed = told_session(BY_NAME["cuts_thoughts"].tokenizer)
    engine.tell("a")
    given_turn = {"role": "assistant", "content": " <think>why</think> because "}
    await managed.chat_completion(messages=[user("x"), given_turn, user("y")])
    text = engine.tokenizer.decode(engine.sent[0])
    assert "assistant\n<think>why</think> because<|im_end|>" in text


# Going on with a turn.


async def test_a_thought_that_the_caller_opens_is_not_opened_twice() -> None:
    engine, managed = told_session(BY_NAME["moves_thoughts"].tokenizer)
    engine.tell("so</think>it is")
    opened = {"role": "assistant", "content": "<think>I am "}
    await managed.chat_completion(messages=[user("x"), opened])
    assert engine.tokenizer.decode(engine.sent[0]).endswith("assistant\n<think>I am ")
    assert engine.sent[0].count(engine.tokenizer.convert_tokens_to_ids("<think>")) == 1


async def test_text_after_a_sampled_answer_keeps_its_ids_and_drops_its_end() -> None:
    engine, managed = told_session(BY_NAME["chatml"].tokenizer)
    encode = engine.tokenizer.encode
    # "an" + "swer": not how the tokenizer would write it
    ids = [*encode("an"), *encode("swer"), *encode("<|im_end|>")]
    engine.answers.append((ids, "stop"))
    engine.tell(" so 3", "after")
    first = await managed.chat_completion(messages=[user("x")])
    prompt = engine.sent[0]
    extended = {"role": "assistant", "content": first.choices[0].message.content + " Wait,"}
    second = await managed.chat_completion(messages=[user("x"), extended])
    assert engine.sent[1] == prompt + ids[:-1] + encode(" Wait,")
    whole = extended["content"] + second.choices[0].message.content
    await managed.chat_completion(
        messages=[user("x"), {"role": "assistant", "content": whole}, user("y")]
    )
    assert engine.sent[2][: len(engine.sent[1])] == engine.sent[1]
    original, longer = managed.get_state()["nodes"]
    assert_trained(original, [(len(prompt), ids)])
    third = encode(" so 3<|im_end|>"), encode("after<|im_end|>")
    assert_trained(
        longer,
        [
            (len(prompt), ids[:-1]),
            (len(engine.sent[1]), third[0]),
            (len(engine.sent[2]), third[1]),
        ],
    )


async def test_an_opened_answer_does_not_continue_after_tokens_without_text() -> None:
    engine, managed = told_session(BY_NAME["chatml"].tokenizer)
    hidden = engine.tokenizer.convert_tokens_to_ids("<|start_header_id|>")
    engine.answers.append(([hidden, hidden], "length"))
    engine.tell("b", "c")
    await managed.chat_completion(messages=[user("x")])
    await managed.chat_completion(messages=[user("x"), {"role": "assistant", "content": "a"}])
    assert engine.sent[1] == engine.sent[0] + engine.tokenizer.encode("a")
    # The answer itself can be continued: it was cut off, so its last token is no end.
    await managed.chat_completion(messages=[user("x"), {"role": "assistant", "content": ""}])
    assert engine.sent[2] == [*engine.sent[0], hidden, hidden]


async def test_a_special_token_that_is_added_later_ends_turns() -> None:
    tokenizer = make_tokenizer(CHATML.replace("<|im_end|>", "<|stop|>"))
    engine = ToldEngine(tokenizer)
    engine.tell("a")
    await ManagedServer(engine).chat_completion(messages=[user("x")])
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|stop|>"]})
    managed = ManagedServer(engine)
    engine.tell("a", "b", end="<|stop|>")
    first = await managed.chat_completion(messages=[user("x")])
    assert first.choices[0].message.content == "a"
    await managed.chat_completion(messages=[user("x"), first.choices[0].message, user("y")])
    assert tokenizer.decode(engine.sent[2]).count("a<|stop|>\n<|im_start|>user") == 1


async def test_continuing_a_finished_answer_samples_before_its_end() -> None:
    engine, managed = told_session(BY_NAME["chatml"].tokenizer)
    engine.tell("yes", " indeed")
    first = await managed.chat_completion(messages=[user("x")])
    await managed.chat_completion(messages=[user("x"), first.choices[0].message])
    assert engine.sent[1] == managed.get_state()["nodes"][0].tokens[:-1]
    assert len(managed.get_state()["nodes"]) == 2


async def test_a_text_prompt_that_ends_with_an_answer_continues_before_its_end() -> None:
    engine, managed = told_session(BY_NAME["chatml"].tokenizer)
    engine.tell("yes", " indeed", "")
    await managed.completion(prompt="is it?")
    await managed.completion(prompt="is it?yes")
    assert engine.sent[1] == engine.sent[0] + engine.tokenizer.encode("yes")
    await managed.completion(prompt="and this?")
    engine.tell("again")
    await managed.completion(prompt="and this?")  # its first answer was empty
    assert engine.sent[3] == engine.sent[2]
    assert len(managed.get_state()["nodes"]) == 4


async def test_sentencepiece_models_get_no_space_before_text_that_follows_a_cut_answer() -> None:
    words = ["\u2581", "a", "b", "\n", "u", "\u2581b", "\u2581a"]
    vocab = {text: i for i, text in enumerate(["</s>", *words])}
    backend = Tokenizer(models.BPE(vocab=vocab, merges=[("\u2581", "b"), ("\u2581", "a")]))
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    backend.decoder = decoders.Metaspace(prepend_scheme="first", split=False)
    jinja = "{% for m in messages %}{{ m.content + 'u' }}{% endfor %}"
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, eos_token="</s>", chat_template=jinja
    )
    engine, managed = told_session(tokenizer)
    engine.answers = [([vocab["b"]], "length"), ([vocab["b"]], "length")]
    first = await managed.chat_completion(messages=[user("a")])
    assert engine.sent[0] == [vocab["\u2581a"], vocab["u"]]
    await managed.chat_completion(messages=[user("a"), first.choices[0].message, user("a")])
    assert engine.sent[1] == [*engine.sent[0], vocab["b"], vocab["u"], vocab["a"], vocab["u"]]


# Content.


async def test_text_parts_are_joined_and_are_the_same_turn_as_their_text() -> None:
    engine, managed = told_session(BY_NAME["chatml"].tokenizer)
    engine.tell("a", "b")
    parts = [{"type": "text", "text": "one "}, {"type": "text", "text": "two"}]
    first = await managed.chat_completion(messages=[{"role": "user", "content": parts}])
    assert "one two" in engine.tokenizer.decode(engine.sent[0])
    answer = {"role": "assistant", "content": [{"type": "text", "text": "a"}]}
    assert first.choices[0].message.content == "a"
    await managed.chat_completion(messages=[user("one two"), answer, user("x")])
    assert len(managed.get_state()["nodes"]) == 1


async def test_audio_is_refused_with_its_place() -> None:
    managed = ManagedServer(ToldEngine(BY_NAME["chatml"].tokenizer))
    parts = [{"type": "text", "text": "hear"}, {"type": "input_audio", "input_audio": {"data": ""}}]
    with pytest.raises(ValueError, match=r"messages\[1\]\.content\[1\] is of type 'input_audio'"):
        await managed.chat_completion(messages=[user("x"), {"role": "user", "content": parts}])


async def test_no_messages_and_messages_without_role_are_refused() -> None:
    managed = ManagedServer(ToldEngine(BY_NAME["chatml"].tokenizer))
    with pytest.raises(ValueError, match="messages is empty"):
        await managed.chat_completion(messages=[])
    with pytest.raises(ValueError, match=r"messages\[0\] has no role"):
        await managed.chat_completion(messages=[{"content": "x"}])


async def test_special_tokens_inside_an_answer_are_not_shown_and_are_sent_again() -> None:
    engine, managed = told_session(BY_NAME["chatml"].tokenizer)
    special = engine.tokenizer.convert_tokens_to_ids("<|start_header_id|>")
    ids = [*engine.tokenizer.encode("one"), special, *engine.tokenizer.encode("two<|im_end|>")]
    engine.answers.append((ids, "stop"))
    engine.tell("b")
    first = await managed.chat_completion(messages=[user("x")])
    assert first.choices[0].message.content == "onetwo"
    answer = {"role": "assistant", "content": "onetwo"}
    await managed.chat_completion(messages=[user("x"), answer, user("y")])
    assert engine.sent[1][len(engine.sent[0]) :][: len(ids)] == ids
    assert "one<|start_header_id|>two<|im_end|>" in managed.get_state()["nodes"][0].full_text


async def test_a_branch_without_the_end_of_an_answer_is_not_the_answer() -> None:
    engine, managed = told_session(BY_NAME["chatml"].tokenizer)
    engine.tell("yes", " indeed", "then", "other")
    first = await managed.chat_completion(messages=[user("x")])
    answer = first.choices[0].message
    await managed.chat_completion(messages=[user("x"), answer])
    await managed.chat_completion(messages=[user("x"), answer, user("y")])
    await managed.chat_completion(messages=[user("x"), answer, user("z")])
    texts = [node.full_text for node in managed.get_state()["nodes"]]
    assert [text.count("yes<|im_end|>\n<|im_start|>user") for text in texts] == [1, 0, 1]
    assert "yes indeed<|im_end|>" in texts[1]
