"""Shortening thinking blocks and trajectories, on a tokenizer of one token per byte."""

import logging
from typing import Any

import pytest

from atroposlib.inference.harness import ByteTokenizer
from atroposlib.utils.message_history_utils import (
    ensure_trajectory_token_limit,
    strip_thinking,
    truncate_thinking,
)
from atroposlib.utils.tokenize_for_trainer import tokenize_for_trainer

TOKENIZER = ByteTokenizer()


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("a<think>b</think>c<think>d</think>", "ac<think>d</think>"),
        ("a<think>b", "a<think>b"),
        ("a</think>b<think>", "a</think>b<think>"),
    ],
)
def test_strip_removes_the_first_whole_block(text: str, expected: str) -> None:
    assert strip_thinking(text) == expected


@pytest.mark.parametrize(
    ("text", "limit", "expected"),
    [
        ("x<think> short </think>y", 10, "x<think>\nshort\n</think>y"),
        ("<think> \n </think>y", 10, "<think></think>y"),
        ("<think>aaaaaaaaaa\n\nlast one</think>y", 8, "<think>\n... last one\n</think>y"),
        ("<think>aaaaaaaaaa\n\nlast one</think>y", 7, "<think>\n... ast one\n</think>y"),
        ("<think>one paragraph</think>", 4, "<think>\n... raph\n</think>"),
        ("x<think>one paragraph</think>y", 0, "x<think></think>y"),
        ("<think>one\n\ntwo</think>y", 0, "<think></think>y"),
        ("<think>one</think>y", -1, "<think></think>y"),
        ("no block", 1, "no block"),
    ],
)
def test_thinking_is_cut_to_its_last_paragraph_or_its_last_tokens(
    text: str, limit: int, expected: str
) -> None:
    assert truncate_thinking(text, TOKENIZER, limit) == expected


def test_a_tokenizer_that_fails_leaves_the_text(caplog: pytest.LogCaptureFixture) -> None:
    text = "<think>abc</think>"
    with caplog.at_level(logging.WARNING):
        assert truncate_thinking(text, object(), 1) == text
    assert "is not shortened" in caplog.text


def chat(num_exchanges: int, *, reply: str = "ok") -> list[dict[str, Any]]:
    messages = [{"role": "system", "content": "play"}]
    for turn in range(num_exchanges):
        messages += [
            {"role": "environment", "content": f"board {turn}"},
            {"role": "agent", "content": reply},
        ]
    return messages


def step(*chats: list[dict[str, Any]], **extra: Any) -> dict[str, Any]:
    rendered = [tokenize_for_trainer(TOKENIZER, each) for each in chats]
    return {
        "messages": list(chats),
        "tokens": [each["tokens"] for each in rendered],
        "masks": [each["masks"] for each in rendered],
        "scores": [1.0] * len(chats),
        "seed": 7,
        "parsed_actions": ["up"] * len(chats),
        **extra,
    }


def test_step_that_fits_is_kept_with_every_key() -> None:
    given = step(chat(2), inference_logprobs=[[0.0]], mood="fine")
    assert ensure_trajectory_token_limit([given], TOKENIZER, 10_000) == [given]


def test_oldest_exchanges_go_from_every_alternative_until_the_longest_fits() -> None:
    long, short = chat(4, reply="a longer reply"), chat(4)
    given = step(long, short, mood="fine", inference_logprobs=[[0.0], [0.0]])
    wanted = [[long[0], *long[-4:]], [short[0], *short[-4:]]]
    limit = max(len(tokenize_for_trainer(TOKENIZER, each)["tokens"]) for each in wanted)
    [kept] = ensure_trajectory_token_limit([given], TOKENIZER, limit)
    assert kept == {**step(*wanted), "mood": "fine", "inference_logprobs": None}
    assert len(given["messages"][0]) == 9  # the author's list is not touched
    [smaller] = ensure_trajectory_token_limit([given], TOKENIZER, limit - 1)
    assert [m["content"] for m in smaller["messages"][1]] == ["play", "board 3", "ok"]


def test_messages_go_one_by_one_where_they_do_not_pair() -> None:
    odd = [{"role": "system", "content": "s"}, *({"role": "user", "content": "u" * 9},) * 3]
    odd.append({"role": "assistant", "content": "end"})
    wanted = [odd[0], *odd[-2:]]
    limit = len(tokenize_for_trainer(TOKENIZER, wanted)["tokens"])
    [kept] = ensure_trajectory_token_limit([step(odd)], TOKENIZER, limit)
    assert kept["messages"] == [wanted]


def test_pairs_go_only_where_every_alternative_pairs() -> None:
    paired, shifted = chat(3), chat(3)
    shifted.insert(1, {"role": "environment", "content": "rules"})  # two observations in a row
    wanted = [[paired[0], *paired[2:]], [shifted[0], *shifted[2:]]]
    limit = max(len(tokenize_for_trainer(TOKENIZER, each)["tokens"]) for each in wanted)
    [kept] = ensure_trajectory_token_limit([step(paired, shifted)], TOKENIZER, limit)
    assert kept["messages"] == wanted


def test_the_last_observation_is_never_taken_out() -> None:
    short = chat(1)
    limit = len(tokenize_for_trainer(TOKENIZER, [short[0], short[2]])["tokens"])
    assert ensure_trajectory_token_limit([step(short)], TOKENIZER, limit) == []


def test_step_that_never_fits_or_lacks_a_key_is_left_out_loudly(
    caplog: pytest.LogCaptureFixture,
) -> None:
    incomplete = {key: value for key, value in step(chat(1)).items() if key != "seed"}
    with caplog.at_level(logging.WARNING):
        kept = ensure_trajectory_token_limit([step(chat(3)), incomplete], TOKENIZER, 5)
    assert kept == []
    assert "step 0 dropped: it exceeds 5 tokens" in caplog.text
    assert "step 1 dropped: it has no seed" in caplog.text
