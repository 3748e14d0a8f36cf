"""Diverse first tokens: the requests to the server, and how first tokens are drawn."""

import math
import random
from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest

from atroposlib.errors import EngineProtocolError
from atroposlib.inference.harness import ByteTokenizer, create_completion
from atroposlib.utils.force_diverse_samples import (
    draw_first_tokens,
    generate_with_diverse_first_tokens,
)


class Env:
    """An environment as the function needs it; the server offers three first tokens."""

    generate = generate_with_diverse_first_tokens

    def __init__(self, first: dict[str, float] | None) -> None:
        self.tokenizer = ByteTokenizer()
        self.server = self
        self.first = first
        self.requests: list[dict[str, Any]] = []

    async def completion(self, **kwargs: Any) -> Any:
        self.requests.append(kwargs)
        answer = create_completion("|rest")
        if "logprobs" in kwargs:
            tops = None if self.first is None else SimpleNamespace(top_logprobs=[self.first])
            answer.choices[0].logprobs = tops
        return answer


async def test_completions_are_returned_and_begin_with_different_tokens() -> None:
    env = Env({"A": -0.1, "B": -3.0, "C": -5.0})
    texts = await env.generate(
        [{"role": "user", "content": "hi"}], prefill="<think>", n=3, max_tokens=10
    )
    assert sorted(texts) == ["<think>A|rest", "<think>B|rest", "<think>C|rest"]
    prompt = "<user>hi<eos><assistant><think>"
    first, *others = env.requests
    assert first["prompt"] == prompt
    assert first["max_tokens"] == 1
    assert first["logprobs"] == 20
    assert {each["prompt"] for each in others} == {prompt + "A", prompt + "B", prompt + "C"}
    for each in others:
        assert each["max_tokens"] == 9
        assert each["top_p"] == 0.3
        assert each["extra_body"] == {"min_p": 0.5, "repetition_penalty": 1.05}


async def test_fewer_first_tokens_than_asked_are_used_again() -> None:
    texts = await Env({"A": -0.1, "B": -1.0}).generate([{"role": "user", "content": "hi"}], n=5)
    counts = Counter(text[0] for text in texts)
    assert sorted(counts.values()) == [2, 3]


async def test_server_without_logprobs_is_named_as_the_cause() -> None:
    with pytest.raises(EngineProtocolError, match="no top_logprobs"):
        await Env(None).generate([{"role": "user", "content": "hi"}], n=2)


def test_first_tokens_are_drawn_by_their_probability() -> None:
    probabilities = {"a": 0.7, "b": 0.2, "c": 0.1}
    logprobs = {token: math.log(p) for token, p in probabilities.items()}
    rng = random.Random(0)
    pairs = Counter(tuple(draw_first_tokens(logprobs, n=2, rng=rng)) for _ in range(4000))
    assert all(first != second for first, second in pairs)
    for (first, second), count in pairs.items():
        expected = probabilities[first] * probabilities[second] / (1 - probabilities[first])
        assert count / 4000 == pytest.approx(expected, abs=0.03)


def test_temperature_zero_takes_the_most_probable() -> None:
    assert draw_first_tokens({"a": -3.0, "b": -1.0, "c": -2.0}, n=2, temperature=0) == ["b", "c"]
