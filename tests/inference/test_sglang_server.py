"""SGLangServer: what it sends to `/generate`, what it reads out of the answer, and what it refuses."""

from __future__ import annotations

import asyncio
import contextlib
import json
import threading
from typing import Any

import pytest
from helpers_peer import Characters, Peer, Reply

from atroposlib.errors import (
    EngineProtocolError,
    EngineRejected,
    EngineUnavailable,
)
from atroposlib.inference.config import APIServerConfig
from atroposlib.inference.servers import token_ids
from atroposlib.inference.servers.admission import StreamBroken
from atroposlib.inference.servers.api_server import listening
from atroposlib.inference.servers.sglang import SGLangServer, StreamedResults, read_sampled

NEUTRAL = {
    "temperature": 1.0,
    "top_p": 1.0,
    "top_k": -1,
    "min_p": 0.0,
    "repetition_penalty": 1.0,
}
PAIRS = r"\$.meta_info.output_token_logprobs"


def result(*pairs: tuple[float | None, int], reason: Any = "stop", **meta: Any) -> dict[str, Any]:
    """A `/generate` result with `(logprob, token id)` pairs."""
    entries = [[logprob, token, None] for logprob, token in pairs]
    return {
        "text": "x",
        "meta_info": {"output_token_logprobs": entries, "finish_reason": reason, **meta},
    }


def make(peer: Peer, **changes: Any) -> SGLangServer:
    server = peer.opened(SGLangServer(peer.config(server_type="sglang", **changes)))
    server.tokenizer = Characters()
    return server


async def sample(peer: Peer, **kwargs: Any) -> Any:
    asked = {"input_ids": [1, 2, 3], **kwargs}
    return await make(peer).tokens_and_logprobs_completion(**asked)


# The request.


async def test_names_of_other_engines_are_translated_and_top_k_0_means_every_token() -> None:
    async with Peer(result((-0.1, 97))) as peer:
        await sample(peer, max_completion_tokens=4, min_tokens=2, seed=5, top_k=0, stop=["\n"])
    assert peer.bodies[0]["sampling_params"] == {
        **NEUTRAL,
        "max_new_tokens": 4,
        "min_new_tokens": 2,
        "sampling_seed": 5,
        "stop": ["\n"],
    }


async def test_request_fields_stand_beside_sampling_params() -> None:
    async with Peer(result((-0.1, 97))) as peer:
        await sample(peer, logprob_start_len=2, extra_body={"lora_path": "a"}, logprobs=True)
    body = peer.bodies[0]
    assert (body["logprob_start_len"], body["lora_path"]) == (2, "a")
    assert body["sampling_params"] == NEUTRAL


@pytest.mark.parametrize(
    ("prompt", "sent"), [("hi", [1, 104, 105]), ("\x01hi", [1, 104, 105]), ("\x01", [1])]
)
async def test_text_prompts_are_tokenised_with_one_bos(prompt: str, sent: list[int]) -> None:
    async with Peer(result((-0.1, 97))) as peer:
        answer = await sample(peer, input_ids=None, prompt=prompt)
    assert peer.bodies[0]["input_ids"] == sent
    assert answer.prompt_tokens == sent


# The answer.


async def test_weight_versions_become_spans() -> None:
    spans = [
        {"version": "7", "start": 0, "end": 1},
        {"version": "8", "start": 1, "end": 3},
    ]
    three = ((-0.1, 97), (-0.2, 98), (-0.3, 99))
    async with Peer(
        [
            result(*three, weight_versions=spans, weight_version="8"),
            result(*three, weight_version="8"),
            result(weight_versions=[{"version": "8", "start": 0, "end": 0}]),
        ]
    ) as peer:
        answer = await sample(peer, n=3)
    assert answer.weight_versions == [[("7", 1), ("8", 2)], [("8", 3)], []]


@pytest.mark.parametrize(
    ("reply", "claimed"),
    [
        (Reply(b"<html>"), [("3", 1)]),  # no version route: only the answer says it
        (Reply({"model_path": "x"}), [("3", 1)]),
        (Reply(b'{"weight_version": "\xff"}'), [("3", 1)]),
        (Reply({"weight_version": 3}), [("3", 1)]),
        (Reply({"weight_version": "2"}), None),
        (Reply(b"loading", 503), None),
    ],
)
async def test_one_version_is_claimed_only_if_the_request_began_under_it(
    reply: Reply, claimed: Any
) -> None:
    gets = {"/model_info": reply}
    async with Peer(result((-0.1, 97), weight_version="3"), gets=gets) as peer:
        answer = await sample(peer)
    assert answer.weight_versions == [claimed]


async def test_large_answers_are_requested_in_parts_with_different_seeds(
    caplog: pytest.LogCaptureFixture,
) -> None:
    one = result((-0.1, 97))
    async with Peer([one, one], [one], one) as peer:
        answer = await sample(peer, n=3, max_tokens=32768, seed=5)
        assert len(answer.output_tokens) == 3
        assert not caplog.records
        peer.asked.clear()
        peer.replies = [Reply(one)]
        answer = await sample(peer, n=4, max_tokens=32768, seed=5)  # n is ignored
        assert len(answer.output_tokens) == 4
        assert "one completion per request (asked for 2)" in caplog.text
    seeds = [
        (body["sampling_params"]["n"], body["sampling_params"]["sampling_seed"])
        for body in peer.bodies
    ]
    assert sorted(seeds, reverse=True) == [(2, 7), (2, 5), (1, 8), (1, 6)]


async def test_each_completion_is_the_one_that_was_told_where_n_is_ignored() -> None:
    replies = [result((-0.1, 97 + i)) for i in range(4)]
    events = [b"data: %s\n\n" % json.dumps(reply).encode() for reply in replies]
    headers = {"Content-Type": "text/event-stream"}
    told: list[list[int]] = [[] for _ in replies]
    async with Peer(*(Reply(event, headers=headers) for event in events)) as peer:
        with listening([heard.extend for heard in told]):
            answer = await sample(peer, n=4, max_tokens=32768)
    assert answer.output_tokens == told
    assert sorted(told) == [[97], [98], [99], [100]]


@pytest.mark.parametrize(
    ("last", "words"),
    [
        ({"error": {"message": "the stream was aborted"}}, "broke off.*aborted"),
        ({**result((-0.1, 97)), "index": 1}, "broke off.*completion 1 of 1"),
    ],
)
async def test_an_answer_that_was_told_in_part_is_not_sampled_again(last: Any, words: str) -> None:
    events = [result((-0.1, 97), reason=None), last]
    body = b"".join(b"data: %s\n\n" % json.dumps(event).encode() for event in events)
    told: list[int] = []
    async with Peer(Reply(body, headers={"Content-Type": "text/event-stream"})) as peer:
        with listening([told.extend]), pytest.raises(StreamBroken, match=words):
            await sample(peer)
        assert (told, len(peer.asked)) == ([97], 1)


@pytest.mark.parametrize(
    ("reply", "message"),
    [
        ({"text": "x"}, "missing required field `meta_info`"),
        ([None], r"Expected `object`, got `null` - at `\$\[0\]`"),
        ("text", "Expected `object | array`, got `str`".replace("|", r"\|")),
        ({"meta_info": {"finish_reason": "stop"}}, "required field `output_token_logprobs`"),
        (
            {"meta_info": {"output_token_logprobs": [[-0.1]]}},
            r"at `\$.meta_info.output_token_logprobs\[0\]`",
        ),
        (result((-0.1, 97), ("-0.2", 98)), rf"got `str` - at `{PAIRS}\[1\]\[0\]`"),  # type: ignore[arg-type]
        (result((-0.1, "97")), rf"Expected `int`, got `str` - at `{PAIRS}\[0\]\[1\]`"),  # type: ignore[arg-type]
        (
            result((-0.1, 97), completion_tokens=2),
            "logprobs for 1 tokens, completion_tokens says 2",
        ),
        (
            result((-0.1, 97), reason={"type": 5}),
            r"got `int` - at `\$.meta_info.finish_reason.type`",
        ),
        (
            result((-0.1, 97), weight_versions=[{"version": "7", "start": 0, "end": 2}]),
            "weight versions cover 2 tokens of 1",
        ),
        (result((-0.1, 97), weight_versions=[{"version": "7"}]), "missing required field `start`"),
    ],
)
async def test_what_cannot_be_trained_on_is_refused_with_its_place(
    reply: Any, message: str
) -> None:
    async with Peer(reply) as peer:
        with pytest.raises(EngineProtocolError, match=message):
            await sample(peer)
    assert len(peer.asked) == 1


@pytest.mark.parametrize("value", ["NaN", "Infinity", "-Infinity", "1e999"])
async def test_logprobs_that_are_no_numbers_are_refused(value: str) -> None:
    raw = (
        b'{"meta_info": {"output_token_logprobs": [[-0.5, 97, null], [%s, 98, null]]}}'
        % value.encode()
    )
    async with Peer(Reply(raw)) as peer:
        with pytest.raises(
            EngineProtocolError, match=r"not JSON|out of range|at token 1, expected a number"
        ):
            await sample(peer)


# Events.


def collect(*events: Any) -> tuple[list[list[int]], list[Any]]:
    """Return the tokens that events tell, and the completions that they are in the end."""
    told: list[list[int]] = []
    results = StreamedResults(lambda number, tokens: told.append([number, *tokens]), where="here")
    for event in events:
        results.add(json.dumps(event).encode())
    return told, read_sampled(results.whole(), where="here")


FIRST, SECOND, LAST = (-0.1, 97), (-0.2, 98), (-0.3, 2)


@pytest.mark.parametrize(
    "events",
    [
        [result(FIRST, reason=None), result(FIRST, SECOND, LAST)],
        [
            result(FIRST, reason=None, output_token_logprobs_length=1),
            result(FIRST, SECOND, LAST, output_token_logprobs_length=3),
        ],
        [  # --incremental-streaming-output
            result(FIRST, reason=None, output_token_logprobs_length=1),
            result(SECOND, LAST, output_token_logprobs_length=3, completion_tokens=3),
        ],
    ],
)
def test_events_with_all_tokens_or_with_the_latest_are_one_completion(events: list[Any]) -> None:
    told, (sampled,) = collect(*events)
    assert told == [[0, 97], [0, 98, 2]]
    assert (list(sampled.tokens), list(sampled.logprobs)) == ([97, 98, 2], [-0.1, -0.2, -0.3])
    assert sampled.finish_reason == "stop"


def test_events_of_several_completions_are_told_apart_by_their_index() -> None:
    told, sampled = collect(
        {**result(FIRST, reason=None), "index": 1},
        {**result(LAST), "index": 0},
        {**result(FIRST, SECOND), "index": 1},
    )
    assert told == [[1, 97], [0, 2], [1, 98]]
    assert [list(each.tokens) for each in sampled] == [[2], [97, 98]]


@pytest.mark.parametrize(
    ("events", "error", "words"),
    [
        ([result(LAST, output_token_logprobs_length=3)], EngineProtocolError, "begins at token 2"),
        ([result(FIRST, reason=None)], EngineUnavailable, "ended before the answer"),
        ([], EngineUnavailable, "ended before the answer"),
        ([{"error": {"message": "too long"}}], EngineRejected, "answered 400.*too long"),
        (
            [result(reason={"type": "abort", "status_code": 503, "message": "full"})],
            EngineUnavailable,
            "answered 503.*full",
        ),
    ],
)
def test_events_that_are_no_whole_answer_are_refused(
    events: list[Any], error: type[Exception], words: str
) -> None:
    with pytest.raises(error, match=words):
        collect(*events)


# Prompt logprobs.


def scored(top: list[Any] | None = None) -> dict[str, Any]:
    own = [[None, 5, None], [-0.5, 6, None], [-1.5, 7, None]]
    meta: dict[str, Any] = {"input_token_logprobs": own}
    if top is not None:
        meta["input_top_logprobs"] = top
    return result((-0.1, 97), **meta)


async def get_logprobs(peer: Peer, **kwargs: Any) -> Any:
    return await make(peer).get_logprobs(**{"input_ids": [5, 6, 7], **kwargs})


async def test_prompt_logprobs_are_the_k_most_likely_tokens_of_each_position() -> None:
    top = [
        None,
        [[-0.5, 6, None], [-2.0, 9, None]],
        [[-1.5, 7, None], [-0.4, 8, None]],
    ]
    async with Peer(scored(top)) as peer:
        answer = await get_logprobs(peer, top_k=2)
    assert answer == {
        "prompt_tokens": [5, 6, 7],
        "prompt_topk_token_ids": [[], [6, 9], [8, 7]],
        "prompt_topk_logprobs": [[], [-0.5, -2.0], [-0.4, -1.5]],
    }
    assert peer.bodies[0] == {
        "input_ids": [5, 6, 7],
        "sampling_params": {**NEUTRAL, "n": 1, "temperature": 0.0, "max_new_tokens": 1},
        "return_logprob": True,
        "return_text_in_logprobs": False,
        "logprob_start_len": 0,
        "top_logprobs_num": 2,
    }


async def test_prompt_logprobs_with_k_0_are_those_of_the_prompts_own_tokens() -> None:
    async with Peer(scored()) as peer:
        answer = await get_logprobs(peer, top_k=0)
    assert answer["prompt_topk_token_ids"] == [[], [6], [7]]
    assert answer["prompt_topk_logprobs"] == [[], [-0.5], [-1.5]]
    assert peer.bodies[0]["top_logprobs_num"] == 0


@pytest.mark.parametrize(
    ("top", "message"),
    [
        ([None, [[-0.5, 6, None]]], "top logprobs at 2 positions, expected 3"),
        (None, "top logprobs at 0 positions, expected 3"),
        ([None, None, [[-0.5, 6, None]]], "position 1 has 0 logprobs, expected 1"),
        (
            [None, [[None, 6, None]], [[-0.5, 6, None]]],
            r"got `null` - at `\$.meta_info.input_top_logprobs\[1\]\[0\]\[0\]`",
        ),
    ],
)
async def test_prompt_logprobs_of_another_shape_are_refused(top: Any, message: str) -> None:
    async with Peer(scored(top)) as peer:
        with pytest.raises(EngineProtocolError, match=message):
            await get_logprobs(peer)


async def test_prompt_logprobs_of_another_prompt_are_refused() -> None:
    async with Peer(scored([None, [], []])) as peer:
        with pytest.raises(EngineProtocolError, match="for 3 tokens that are not the 2 sent"):
            await get_logprobs(peer, input_ids=[5, 6])
        with pytest.raises(ValueError, match="top_k = -1, expected 0 or more"):
            await get_logprobs(peer, top_k=-1)


# Chat, health, construction.


async def test_the_tokenizer_is_loaded_once_for_all_first_requests(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    names: list[str] = []
    both_load = threading.Barrier(2)

    def load(name: str, **_: Any) -> Characters:
        names.append(name)
        with contextlib.suppress(threading.BrokenBarrierError):
            both_load.wait(0.1)
        return Characters()

    monkeypatch.setattr(token_ids, "load_tokenizer", load)
    config = APIServerConfig(base_url="http://h:1", server_type="sglang", tokenizer_name="t")
    server = SGLangServer(config)
    first, second = await asyncio.gather(
        *(asyncio.to_thread(lambda: server.tokenizer) for _ in range(2))
    )
    assert first is second
    assert names == ["t"]
