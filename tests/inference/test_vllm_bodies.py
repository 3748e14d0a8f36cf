"""vLLM's bodies: what is asked, and that nothing an engine answers is padded, cut or guessed."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest

from atroposlib.errors import EngineProtocolError
from atroposlib.inference.servers.api_server import TokenCompletions
from atroposlib.inference.servers.openai_routes import part_of, split_n
from atroposlib.inference.servers.token_ids import SampledCompletion
from atroposlib.inference.servers.vllm import (
    NoTokenIds,
    StreamedChoices,
    completions_per_request,
    fits_tokens_route,
    gather_choices,
    read_choices,
    read_generated,
    read_prompt_logprobs,
    tokens_request,
)

PROMPT = [5, 6, 7]


def encoded(value: Any) -> bytes:
    return json.dumps(value).encode()


def completions(**changes: Any) -> bytes:
    """One choice as vLLM 0.32 writes it, with the fields that no client reads."""
    choice = {
        "index": 0,
        "text": "ab",
        "logprobs": {
            "text_offset": [0, 1],
            "token_logprobs": [-0.5, -1],
            "tokens": ["a", "b"],
            "top_logprobs": [{"a": -0.5}, {"b": -1.0}],
        },
        "finish_reason": "stop",
        "stop_reason": 2,
        "token_ids": [8, 9],
        "prompt_logprobs": None,
        "prompt_token_ids": PROMPT,
        "routed_experts": None,
    }
    return encoded({"id": "c", "choices": [{**choice, **changes}], "usage": {"total_tokens": 5}})


def tokens_answer(**changes: Any) -> bytes:
    """One choice of `/inference/v1/generate` as vLLM 0.32 writes it."""
    content = [
        {"token_id": 8, "logprob": -0.5, "rank": 1, "top_logprobs": []},
        {"token_id": 9, "logprob": -1.0, "rank": 3, "top_logprobs": []},
    ]
    choice = {
        "index": 0,
        "finish_reason": "length",
        "token_ids": [8, 9],
        "logprobs": {"content": content},
        "weight_versions": [
            {"version": "3", "start": 0, "end": 1},
            {"version": "4", "start": 1, "end": 2},
        ],
    }
    return encoded({"request_id": "r", "choices": [{**choice, **changes}]})


def chat_answer(*, prompt: Any = PROMPT, **changes: Any) -> bytes:
    """One choice of `/v1/chat/completions` as vLLM 0.32 writes it."""
    content = [{"token": "a", "logprob": -0.5, "bytes": [97]}, {"token": "b", "logprob": -1}]
    choice = {
        "index": 0,
        "message": {"role": "assistant", "content": "ab"},
        "finish_reason": "stop",
        "token_ids": [8, 9],
        "logprobs": {"content": content},
    }
    return encoded({"id": "c", "choices": [{**choice, **changes}], "prompt_token_ids": prompt})


@pytest.mark.parametrize(
    ("body", "parts"),
    [
        ({"max_tokens": 99_999}, [{"max_tokens": 99_999}]),
        ({"n": 8, "max_tokens": 4096}, [{"n": 8, "max_tokens": 4096}]),
        ({"n": 8}, [{"n": 8}]),
        ({"n": 2, "max_tokens": 40_000}, [{"n": 1, "max_tokens": 40_000}] * 2),
        (
            {"n": 3, "max_tokens": 16_000, "seed": 7},
            [{"n": 2, "max_tokens": 16_000, "seed": 7}, {"n": 1, "max_tokens": 16_000, "seed": 9}],
        ),
        (
            {"n": 2, "max_tokens": 40_000, "use_beam_search": True},
            [{"n": 2, "max_tokens": 40_000, "use_beam_search": True}],
        ),
    ],
)
def test_answers_that_would_be_too_large_are_requested_in_parts(
    body: dict[str, Any], parts: list[dict[str, Any]]
) -> None:
    split = split_n(body.get("n", 1), at_most=completions_per_request(body))
    assert [part_of(body, part) for part in split] == parts


def test_the_tokens_route_gets_sampling_parameters_apart_and_the_same_default_length() -> None:
    body = {"model": "m", "n": 2, "temperature": 0.5, "stop": ["x"], "priority": 1}
    assert fits_tokens_route(body)
    assert tokens_request(PROMPT, body) == {
        "model": "m",
        "priority": 1,
        "token_ids": PROMPT,
        "sampling_params": {"n": 2, "temperature": 0.5, "stop": ["x"], "max_tokens": 16},
    }


@pytest.mark.parametrize("name", ["echo", "suffix", "response_format", "unheard_of"])
def test_the_tokens_route_is_not_used_for_keywords_it_does_not_support(name: str) -> None:
    assert not fits_tokens_route({"max_tokens": 4, name: 1})


def read(answer: bytes, prompt_tokens: list[int] | None = PROMPT) -> TokenCompletions:
    choices = read_choices(answer, where="x", prompt_tokens=prompt_tokens)
    return gather_choices(choices, where="x", prompt_tokens=prompt_tokens)


@pytest.mark.parametrize(
    ("answer", "prompt_tokens", "sampled"),
    [
        (
            completions(weight_versions=[{"weight_version": 7, "num_tokens": 2}]),
            PROMPT,
            ([8, 9], [-0.5, -1.0], "stop", [("7", 2)]),
        ),
        (tokens_answer(), PROMPT, ([8, 9], [-0.5, -1.0], "length", [("3", 1), ("4", 1)])),
        (chat_answer(), None, ([8, 9], [-0.5, -1.0], "stop", None)),
    ],
)
def test_choices_are_read_field_by_field(
    answer: bytes, prompt_tokens: list[int] | None, sampled: Any
) -> None:
    found = read(answer, prompt_tokens)
    tokens, logprobs, reason, spans = sampled
    assert found == (PROMPT, [tokens], [logprobs], [reason])
    assert found.weight_versions == [spans]
    assert [type(value) for value in found.output_logprobs[0]] == [float, float]


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (completions(token_ids=[8]), r"x: choices\[0\]: 2 logprobs for 1 token ids"),
        (completions(logprobs=None), r"choices\[0\] has no logprobs"),
        (completions(prompt_token_ids=[5, 6]), "after 2 prompt tokens that are not the 3 sent"),
        (completions(token_ids=[8, -9]), "token id -9 is negative"),
        (
            completions(logprobs={"token_logprobs": [-0.5, -9999.0]}),
            "-9999.0 at token 1 stands for NaN",
        ),
        (
            completions(weight_versions=[{"weight_version": "7", "num_tokens": 1}]),
            "cover 1 tokens of 2",
        ),
        (completions(weight_versions=[{"start": 0}]), "no version or end"),
        (tokens_answer(token_ids=[8, 7]), "2 logprobs are not those of the 2 token_ids"),
        (tokens_answer(token_ids=[8]), "2 logprobs are not those of the 1 token_ids"),
        (tokens_answer(logprobs=None), "has no logprobs"),
        (
            tokens_answer(weight_versions=[{"version": "3", "start": 0, "end": 1}]),
            "cover 1 tokens of 2",
        ),
        (chat_answer(logprobs=None), "has no logprobs"),
        (chat_answer(logprobs={"content": []}), "0 logprobs for 2 token ids"),
    ],
)
def test_choices_that_cannot_be_trained_on_are_refused(answer: bytes, message: str) -> None:
    with pytest.raises(EngineProtocolError, match=message):
        read(answer)


@pytest.mark.parametrize(
    ("answer", "prompt_tokens"),
    [
        (completions(token_ids=None), PROMPT),
        (chat_answer(token_ids=None), None),
        (chat_answer(prompt=None), None),
    ],
)
def test_a_server_without_token_ids_raises_its_own_error(
    answer: bytes, prompt_tokens: list[int] | None
) -> None:
    with pytest.raises(NoTokenIds, match="must support return_token_ids"):
        read(answer, prompt_tokens)


@pytest.mark.parametrize("value", ["null", '"-0.5"', "true", "-1e999"])
def test_a_logprob_that_is_no_number_is_named_with_its_position(value: str) -> None:
    answer = completions().replace(b"-0.5, -1]", f"-0.5, {value}]".encode())
    with pytest.raises(msgspec.ValidationError, match=r"choices\[0\].logprobs.token_logprobs\[1\]"):
        read(answer)


def test_the_originals_answer_is_read() -> None:
    answer = {"logprobs": [[[{"8": -0.5}], [{"9": -1}]], []], "finish_reasons": ["stop", "abort"]}
    assert read_generated(encoded(answer), where="x") == [
        SampledCompletion([8, 9], [-0.5, -1.0], "stop"),
        SampledCompletion([], [], "abort"),
    ]


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        ({"logprobs": [[]], "finish_reasons": []}, "0 finish reasons for 1 sequences"),
        ({"logprobs": [[[]]], "finish_reasons": ["stop"]}, r"logprobs\[0\] has no logprob"),
        ({"logprobs": [[[{}]]], "finish_reasons": ["stop"]}, r"logprobs\[0\] has no logprob"),
    ],
)
def test_broken_answers_of_the_originals_route_are_refused(
    answer: dict[str, Any], message: str
) -> None:
    with pytest.raises(EngineProtocolError, match=message):
        read_generated(encoded(answer), where="x")


POSITIONS: list[Any] = [
    None,
    {"6": {"logprob": -3.0, "rank": 9}, "1": {"logprob": -0.25, "rank": 1}, "2": {"logprob": -1.0}},
    {"7": {"logprob": -0.5, "rank": 1}, "3": {"logprob": -2.0, "rank": 2}},
]


@pytest.mark.parametrize(
    ("num_top", "ids", "logprobs"),
    [
        (0, [[], [6], [7]], [[], [-3.0], [-0.5]]),
        (1, [[], [1], [7]], [[], [-0.25], [-0.5]]),
        (2, [[], [1, 2], [7, 3]], [[], [-0.25, -1.0], [-0.5, -2.0]]),
    ],
)
@pytest.mark.parametrize("shape", ["completions", "original", "nested", "plain numbers"])
def test_prompt_logprobs_are_the_k_most_likely_and_zero_is_the_prompts_own_token(
    num_top: int, ids: list[list[int]], logprobs: list[list[float]], shape: str
) -> None:
    plain = [p and {token: v["logprob"] for token, v in p.items()} for p in POSITIONS]
    answer = {
        "completions": {"choices": [{"index": 0, "prompt_logprobs": POSITIONS}]},
        "original": {"prompt_logprobs": POSITIONS},
        "nested": {"prompt_logprobs": [POSITIONS]},
        "plain numbers": {"prompt_logprobs": [None, *([p] for p in plain[1:])]},
    }[shape]
    found = read_prompt_logprobs(encoded(answer), prompt_tokens=PROMPT, num_top=num_top, label="x")
    assert found == {
        "prompt_tokens": PROMPT,
        "prompt_topk_token_ids": ids,
        "prompt_topk_logprobs": logprobs,
    }


@pytest.mark.parametrize(
    ("positions", "num_top", "message"),
    [
        (None, 1, "must have 3 positions, got nothing"),
        (POSITIONS[:2], 1, "must have 3 positions, got 2 positions"),
        ([None, None, POSITIONS[2]], 1, r"prompt_logprobs\[1\] is empty"),
        ([None, {"1": -0.5}, POSITIONS[2]], 0, "no logprob of the prompt's token 6"),
        (POSITIONS, 3, r"prompt_logprobs\[2\] has 2 logprobs, expected 3"),
    ],
)
def test_prompt_logprobs_that_are_not_all_there_are_refused(
    positions: Any, num_top: int, message: str
) -> None:
    answer = encoded({"choices": [{"prompt_logprobs": positions}]})
    with pytest.raises(EngineProtocolError, match=message):
        read_prompt_logprobs(answer, prompt_tokens=PROMPT, num_top=num_top, label="x")


def test_a_stream_that_was_sampled_after_another_prompt_is_refused() -> None:
    found = StreamedChoices(lambda *_: None, where="here")
    first = {"index": 0, "token_ids": [5], "logprobs": {"token_logprobs": [-0.5]}}
    last = {"index": 0, "token_ids": [], "finish_reason": "stop"}
    for choice in ({**first, "prompt_token_ids": [1]}, last):
        found.add(json.dumps({"choices": [choice]}).encode())
    with pytest.raises(EngineProtocolError, match="after 1 prompt tokens that are not the 2 sent"):
        gather_choices(found.whole(), where="here", prompt_tokens=[1, 2])
