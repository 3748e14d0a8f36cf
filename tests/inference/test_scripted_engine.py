"""The scripted engine over HTTP: real servers' shapes, repeatable answers, weight versions, pauses, and every fault."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from helpers_inference import Sample, eventually, sample

from atroposlib.errors import ConfigError
from atroposlib.inference.scripted_engine import (
    ByteTokenizer,
    Fault,
    Latency,
    Script,
    ScriptedEngine,
    made_up_logprobs,
)
from atroposlib.inference.scripted_engine.__main__ import main

ROOT = Path(__file__).resolve().parents[3]
PROMPT = [10, 11, 12]
ASK = {"prompt": PROMPT, "max_tokens": 4, "logprobs": 0, "return_token_ids": True}


class Client:
    """Plain HTTP: what the engine says, unparsed by our own servers."""

    def __init__(self, engine: ScriptedEngine, session: aiohttp.ClientSession) -> None:
        self.engine = engine
        self._session = session

    async def get(self, path: str) -> tuple[int, Any]:
        async with self._session.get(self.engine.url + path) as response:
            return response.status, _decoded(await response.read())

    async def post(self, path: str, body: Any, **headers: str) -> tuple[int, Any]:
        async with self._session.post(
            self.engine.url + path, json=body, headers=headers
        ) as response:
            self.headers = response.headers
            return response.status, _decoded(await response.read())

    async def ask(self, **changes: Any) -> dict[str, Any]:
        status, answer = await self.post("/v1/completions", {**ASK, **changes})
        assert status == 200, answer
        return answer


def _decoded(body: bytes) -> Any:
    try:
        return json.loads(body)
    except ValueError:
        return body


@asynccontextmanager
async def running(script: Script | None = None, **options: Any) -> AsyncIterator[Client]:
    async with ScriptedEngine(script, **options) as engine, aiohttp.ClientSession() as session:
        yield Client(engine, session)


def expected(
    *spans: tuple[str, int], choice: int = 0, seed: int = 0, prompt: list[int] | None = None
) -> Sample:
    return sample(PROMPT if prompt is None else prompt, choice, seed=seed, spans=spans)


# Answers.


async def test_completions_have_vllms_fields_and_the_made_up_tokens() -> None:
    async with running() as client:
        answer = await client.ask(n=2, model="scripted")
    assert answer["object"] == "text_completion"
    assert answer["usage"] == {"prompt_tokens": 3, "completion_tokens": 8, "total_tokens": 11}
    for i, choice in enumerate(answer["choices"]):
        tokens, logprobs = expected(("default", 4), choice=i)
        pieces = [chr(token - 3) for token in tokens]
        assert choice == {
            "index": i,
            "text": "".join(pieces),
            "logprobs": {
                "text_offset": [0, 1, 2, 3],
                "token_logprobs": logprobs,
                "tokens": pieces,
                "top_logprobs": [{p: v} for p, v in zip(pieces, logprobs, strict=True)],
            },
            "finish_reason": "length",
            "stop_reason": None,
            "token_ids": tokens,
            "prompt_logprobs": None,
            "prompt_token_ids": PROMPT,
            "weight_versions": [{"weight_version": "default", "num_tokens": 4}],
        }


async def test_keys_are_null_where_ids_and_logprobs_were_not_asked_for() -> None:
    async with running(Script(reports_spans=False)) as client:
        _, answer = await client.post("/v1/completions", {"prompt": "hi"})
    (choice,) = answer["choices"]
    assert choice["token_ids"] is choice["prompt_token_ids"] is choice["logprobs"] is None
    assert "weight_versions" not in choice
    assert len(choice["text"]) == 16  # vLLM's default


async def test_the_scripts_seed_is_the_default_and_greedy_requests_ignore_seeds() -> None:
    async with running(Script(seed=5)) as client:
        sampled = await client.ask()
        greedy, again = await client.ask(temperature=0), await client.ask(temperature=0, seed=9)
    assert sampled["choices"][0]["token_ids"] == expected(("default", 4), seed=5)[0]
    assert greedy["choices"][0]["token_ids"] == again["choices"][0]["token_ids"]
    assert greedy["choices"][0]["token_ids"] != sampled["choices"][0]["token_ids"]


def test_scoring_a_sequence_gives_the_logprobs_that_sampling_it_gave() -> None:
    tokens, logprobs = expected(("7", 3), ("8", 2))
    assert all(-1 <= value < 0 for value in logprobs)
    assert made_up_logprobs([*PROMPT, *tokens[:3]], tokens[3:], spans=[("8", 2)]) == logprobs[3:]
    assert made_up_logprobs(PROMPT, tokens, spans=[("7", 5)])[3:] != logprobs[3:]
    assert made_up_logprobs(PROMPT[::-1], tokens, spans=[("7", 3), ("8", 2)]) != logprobs


async def test_scripted_answers_end_with_eos_and_are_given_in_turn() -> None:
    async with running(Script(answers=("yes", "no"))) as client:
        answer = await client.ask(n=3)
    tokens = [choice["token_ids"] for choice in answer["choices"]]
    assert tokens == [
        ByteTokenizer().encode(f"{text}<eos>", False) for text in ("yes", "no", "yes")
    ]
    assert {choice["finish_reason"] for choice in answer["choices"]} == {"stop"}


async def test_tokens_that_were_added_to_a_tokenizer_are_in_its_vocabulary() -> None:
    class Extended(ByteTokenizer):
        def __len__(self) -> int:
            return self.vocab_size + 3

    async with running(tokenizer=Extended()) as client:
        status, _ = await client.post("/v1/completions", {**ASK, "prompt": [261]})
    assert status == 200


async def test_drawn_lengths_stay_in_their_range_and_end_with_eos() -> None:
    async with running(Script(lengths=(2, 6))) as client:
        answer = await client.ask(n=40, max_tokens=5)
    ended = [c["token_ids"] for c in answer["choices"] if c["finish_reason"] == "stop"]
    cut = [c["token_ids"] for c in answer["choices"] if c["finish_reason"] == "length"]
    assert {len(tokens) for tokens in ended} == {2, 3, 4, 5}
    assert {tokens[-1] for tokens in ended} == {ByteTokenizer.eos_token_id}
    assert {len(tokens) for tokens in cut} == {5}


@pytest.mark.parametrize(
    ("change", "status", "words"),
    [
        ({"model": "nope"}, 404, "The model `nope` does not exist"),
        ({"prompt": []}, 400, "at least one prompt"),
        ({"prompt": [999]}, 400, "Token id 999 is out of vocabulary"),
        ({"prompt": [5] * 64}, 400, "maximum context length is 64 tokens"),
        ({"n": 0}, 400, "n must be at least 1, got 0"),
        ({"n": 2, "temperature": 0}, 400, "greedy sampling, got 2"),
        ({"temperature": -1}, 400, "temperature must be non-negative, got -1"),
        ({"logprobs": 99}, 400, "greater than max allowed: 20"),
        ({"stream": True}, 400, "does not stream"),
        ({"stop": ["a", 5]}, 400, "stop: Input should be a valid string"),
    ],
)
async def test_bad_requests_are_refused_as_vllm_does(
    change: dict[str, Any], status: int, words: str
) -> None:
    async with running(max_model_len=64) as client:
        got, answer = await client.post("/v1/completions", {**ASK, **change})
    assert got == status
    assert words in answer["error"]["message"]
    assert answer["error"]["code"] == status


async def test_routes_that_a_server_lacks_are_404_and_not_in_its_description() -> None:
    async with running(missing_paths=["/inference/v1/generate", "/weight_info"]) as client:
        assert (await client.post("/inference/v1/generate", {}))[0] == 404
        assert (await client.get("/weight_info"))[0] == 404
        _, described = await client.get("/openapi.json")
        assert (await client.get("/v1/completions"))[0] == 405
        assert (await client.get("/v1/models"))[1]["data"][0]["id"] == "scripted"
        assert await client.get("/health/") == (200, {"status": "ok"})  # TRL's
    assert "/v1/completions" in described["paths"]
    assert "/inference/v1/generate" not in described["paths"]


# Weights and pauses.


async def test_weight_versions_are_reported_and_set_as_by_vllm_and_sglang() -> None:
    async with running(weight_version="7") as client:
        assert await client.get("/weight_info") == (200, {"weight_version": "7"})
        await client.post("/collective_rpc", {"method": "reload_weights", "kwargs": {}})
        assert (await client.get("/weight_info"))[1] == {"weight_version": "8"}
        await client.post("/update_weight_version", {"new_version": "12"})
        assert (await client.get("/get_weight_version"))[1] == {"weight_version": "12"}
        assert (await client.post("/update_weight_version", {"weight_version": "1"}))[0] == 400
        _, done = await client.post(
            "/update_weights_from_disk", {"model_path": "x", "weight_version": "13"}
        )
        assert done["success"] is True
        assert (await client.get("/model_info"))[1]["weight_version"] == "13"
        assert (await client.post("/collective_rpc", {}))[0] == 400


async def test_weights_swapped_in_the_middle_split_every_running_sequence() -> None:
    async with running(Script(latency=Latency(per_token_s=0.02)), weight_version="7") as client:
        asked = asyncio.create_task(client.ask(n=2, max_tokens=10))
        await eventually(lambda: client.engine.generator.num_running == 2)
        await asyncio.sleep(0.07)
        client.engine.weight_version = "8"
        answer = await asked
    first, second = answer["choices"][0]["weight_versions"]
    assert (first["weight_version"], second["weight_version"]) == ("7", "8")
    before = first["num_tokens"]
    assert 2 <= before <= 8
    assert before + second["num_tokens"] == 10
    for i, choice in enumerate(answer["choices"]):
        assert choice["token_ids"] == expected(("7", before), ("8", 10 - before), choice=i)[0]


async def test_a_kept_pause_freezes_generations_and_holds_new_ones() -> None:
    async with running(Script(latency=Latency(per_token_s=0.01)), weight_version="7") as client:
        asked = asyncio.create_task(client.ask(max_tokens=10))
        await eventually(lambda: client.engine.generator.num_running == 1)
        assert (await client.post("/pause?mode=keep", {}))[1] == {"status": "paused"}
        assert (await client.get("/is_paused"))[1] == {"is_paused": True}
        held = asyncio.create_task(client.ask(max_tokens=1))
        await asyncio.sleep(0.2)
        assert not asked.done()
        assert not held.done()
        client.engine.weight_version = "8"
        assert (await client.post("/resume", {}))[1] == {"status": "resumed"}
        frozen, new = await asked, await held
    spans = frozen["choices"][0]["weight_versions"]
    assert [span["weight_version"] for span in spans][-1] == "8"
    assert sum(span["num_tokens"] for span in spans) == 10
    assert new["choices"][0]["token_ids"] == expected(("8", 1))[0]


async def test_an_aborting_pause_ends_generations_with_what_they_have() -> None:
    async with running(Script(latency=Latency(per_token_s=0.01))) as client:
        asked = asyncio.create_task(client.ask(max_tokens=1000))
        await eventually(lambda: client.engine.generator.num_running == 1)
        await asyncio.sleep(0.05)
        await client.post("/pause_generation", {"mode": "abort"})
        (choice,) = (await asked)["choices"]
        await client.post("/continue_generation", {})
    assert choice["finish_reason"] == "abort"
    assert 1 <= len(choice["token_ids"]) < 200
    assert choice["token_ids"] == expected(("default", len(choice["token_ids"])))[0]


async def test_a_waiting_pause_lets_generations_end() -> None:
    async with running(Script(latency=Latency(per_token_s=0.01))) as client:
        asked = asyncio.create_task(client.ask(max_tokens=5))
        await eventually(lambda: client.engine.generator.num_running == 1)
        await client.post("/pause?mode=wait", {})
        assert client.engine.generator.num_running == 0
        assert (await asked)["choices"][0]["finish_reason"] == "length"
        assert (await client.post("/pause?mode=bogus", {}))[0] == 400


async def test_a_script_may_refuse_while_paused() -> None:
    async with running(Script(while_paused="refuse")) as client:
        await client.post("/pause?mode=keep", {})
        assert (await client.post("/v1/completions", ASK))[0] == 503
        await client.post("/resume", {})
        await client.ask()


# Speed and capacity.


async def test_completions_beyond_the_slots_are_queued() -> None:
    script = Script(num_slots=2, latency=Latency(first_token_s=0.15))  # time to see four wait
    async with running(script) as client:
        began = time.monotonic()
        asked = [asyncio.create_task(client.ask(seed=i)) for i in range(6)]
        await eventually(lambda: client.engine.generator.num_waiting == 4)
        assert client.engine.generator.num_running == 2
        await asyncio.gather(*asked)
        assert time.monotonic() - began >= 0.45
        assert (client.engine.generator.num_running, client.engine.generator.num_waiting) == (0, 0)


async def test_a_full_queue_is_answered_429_with_retry_after() -> None:
    script = Script(
        num_slots=1, max_waiting=1, retry_after_s=2.5, latency=Latency(first_token_s=0.1)
    )
    async with running(script) as client:
        asked = [asyncio.create_task(client.ask(seed=i)) for i in range(2)]
        await eventually(lambda: client.engine.generator.num_waiting == 1)
        assert (await client.post("/v1/completions", ASK))[0] == 429
        assert client.headers["Retry-After"] == "2.5"
        await asyncio.gather(*asked)


async def test_a_client_that_disconnects_frees_its_slot() -> None:
    script = Script(num_slots=1, latency=Latency(first_token_s=30))
    async with running(script) as client:
        asked = [asyncio.create_task(client.ask(seed=i)) for i in range(2)]
        await eventually(lambda: client.engine.generator.num_waiting == 1)
        for task in asked:
            task.cancel()
        await asyncio.gather(*asked, return_exceptions=True)
        await eventually(
            lambda: client.engine.generator.num_running + client.engine.generator.num_waiting == 0
        )
        assert [served.was_generated for served in client.engine.served] == [False, False]


def test_latency_spreads_as_the_seed_says() -> None:
    latency = Latency(sigma=1.0)
    one, other = (
        [latency.factor(rng) for _ in range(9)] for rng in (random.Random(1), random.Random(1))
    )
    assert one == other
    assert max(one) > 2 * min(one)


# Faults.


async def test_a_status_comes_with_its_retry_after_and_as_often_as_asked() -> None:
    fault = Fault(kind="status", status=429, retry_after_s=0.5, skip=1, times=2)
    async with running(Script(faults=(fault,))) as client:
        statuses = [(await client.post("/v1/completions", ASK))[0] for _ in range(4)]
        assert statuses == [200, 429, 429, 200]
        assert client.engine.counts["status"] == 2
        assert (await client.get("/health"))[0] == 200
    assert [served.was_generated for served in client.engine.served] == [True, False, False, True]


@pytest.mark.parametrize(
    ("kind", "error", "was_generated"),
    [
        ("drop_before", aiohttp.ServerDisconnectedError, False),
        ("drop_after", aiohttp.ServerDisconnectedError, True),
        ("drop_in_body", aiohttp.ClientPayloadError, True),
    ],
)
async def test_dropped_connections(kind: Any, error: type[Exception], was_generated: bool) -> None:
    async with running(Script(faults=(Fault(kind=kind, times=1),))) as client:
        # A fresh connection: aiohttp repeats a request on its own only where it reused one.
        with pytest.raises(error):
            await client.ask()
        assert [served.was_generated for served in client.engine.served] == [was_generated]
        await client.ask()


async def test_chances_come_from_the_seed() -> None:
    async def statuses(seed: int) -> list[int]:
        fault = Fault(kind="status", chance=0.3)
        async with running(Script(seed=seed, faults=(fault,))) as client:
            return [(await client.post("/v1/completions", ASK))[0] for _ in range(40)]

    first, again, other = await statuses(1), await statuses(1), await statuses(2)
    assert first == again != other
    assert 4 <= first.count(503) <= 20


async def test_a_script_is_set_over_http_and_unknown_fields_are_refused() -> None:
    async with running() as client:
        storm = {"faults": [{"kind": "status", "status": 429, "for_s": 0.1}]}
        status, shown = await client.post("/script", storm)
        assert status == 200
        assert shown["script"]["faults"][0]["status"] == 429
        assert (await client.post("/v1/completions", ASK))[0] == 429
        await asyncio.sleep(0.1)
        await client.ask()
        status, answer = await client.post("/script", {"fault": []})
        assert status == 400
        assert "unknown field `fault`" in answer["error"]["message"]
        assert (await client.get("/script"))[1]["counts"]["status 429"] == 1


async def test_a_killed_engine_breaks_its_connections_and_restarts_at_its_address() -> None:
    async with running(Script(latency=Latency(first_token_s=30))) as client:
        asked = asyncio.create_task(client.ask())
        await eventually(lambda: client.engine.generator.num_running == 1)
        await client.engine.stop()
        with pytest.raises(aiohttp.ServerDisconnectedError):
            await asked
        with pytest.raises(aiohttp.ClientConnectorError):
            await client.ask()
        assert client.engine.generator.num_running == 0
        await client.engine.start()
        client.engine.set_script(Script())
        assert (await client.ask())["choices"][0]["token_ids"] == expected(("default", 4))[0]


@pytest.mark.parametrize("num_rounds", range(6))
async def test_a_connection_that_is_being_accepted_is_broken_with_the_engine(
    num_rounds: int,
) -> None:
    engine = ScriptedEngine()
    await engine.start()
    body = json.dumps(ASK).encode()
    with socket.create_connection((engine.host, engine.port)) as client:
        head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n"
        client.sendall(head.encode() + body)
        for _ in range(num_rounds):
            await asyncio.sleep(0)
        await engine.stop()
        was_served = list(engine.served)
        client.settimeout(30)
        with contextlib.suppress(ConnectionResetError):
            while await asyncio.to_thread(client.recv, 9999):
                pass
        assert list(engine.served) == was_served


@pytest.mark.e2e
def test_the_command_says_its_address_and_ends_at_a_signal() -> None:
    with subprocess.Popen(
        [
            *(sys.executable, "-m", "atroposlib.inference.scripted_engine"),
            *("--port", "0", "--weight-version", "3", "--script", '{"answers": ["yes"]}'),
        ],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    ) as process:
        assert process.stdout is not None
        address = re.fullmatch(
            r"listening on (http://127\.0\.0\.1:\d+)\n", process.stdout.readline()
        )
        assert address is not None

        async def ask() -> Any:
            async with aiohttp.ClientSession() as session:
                async with session.post(f"{address[1]}/v1/completions", json=ASK) as response:
                    return await response.json()

        (choice,) = asyncio.run(ask())["choices"]
        process.send_signal(signal.SIGTERM)
        assert process.wait(10) == 0
    assert choice["text"] == "yes"
    assert choice["weight_versions"] == [{"weight_version": "3", "num_tokens": 4}]


def test_a_wrong_key_of_the_script_names_the_right_ones() -> None:
    with pytest.raises(ConfigError, match=r"unknown field `answer`; its keys are .*\banswers\b"):
        main(["--script", '{"answer": ["yes"]}'])
