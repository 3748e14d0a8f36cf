"""The engine's HTTP surface: vLLM's bodies, and a refusal with a reason for everything else."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from safetensors.torch import load_file, save_file

from atroposlib.engine.__main__ import main
from atroposlib.engine.config import EngineConfig
from atroposlib.engine.loading import LoadedModel, load, warm_up
from atroposlib.engine.server import create_app
from atroposlib.http_bodies import MAX_BODY_BYTES
from atroposlib.utils.tensor_checksums import tensor_checksum
from tests.tiny_model import make_tiny_model


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("tiny"), max_position_embeddings=128)


@pytest.fixture
def loaded(model_dir: Path) -> Iterator[LoadedModel]:
    config = EngineConfig(model=str(model_dir), device="cpu", served_model_name="tiny")
    loaded = load(config)
    loaded.engine.start()
    yield loaded
    loaded.engine.close()


@pytest.fixture
async def client(loaded: LoadedModel) -> AsyncIterator[httpx.AsyncClient]:
    transport = httpx.ASGITransport(app=create_app(loaded))
    async with httpx.AsyncClient(transport=transport, base_url="http://engine") as client:
        yield client


async def complete(client: httpx.AsyncClient, **body: Any) -> dict[str, Any]:
    response = await client.post("/v1/completions", json=body)
    assert response.status_code == 200, response.text
    return response.json()  # type: ignore[no-any-return]


async def test_completion_has_vllms_fields(client: httpx.AsyncClient) -> None:
    answer = await complete(
        client, prompt="hello", max_tokens=5, ignore_eos=True, logprobs=0, return_token_ids=True
    )
    (choice,) = answer["choices"]
    assert answer["object"] == "text_completion"
    assert answer["model"] == "tiny"
    assert choice["finish_reason"] == "length"
    assert len(choice["token_ids"]) == 5
    assert len(choice["prompt_token_ids"]) == 5
    assert len(choice["logprobs"]["token_logprobs"]) == 5
    assert [len(top) for top in choice["logprobs"]["top_logprobs"]] == [1] * 5
    assert choice["weight_versions"] == [{"weight_version": "0", "num_tokens": 5}]
    assert answer["usage"] == {"prompt_tokens": 5, "completion_tokens": 5, "total_tokens": 10}


async def test_max_tokens_defaults_to_16_for_completions(client: httpx.AsyncClient) -> None:
    answer = await complete(client, prompt=[1, 2], ignore_eos=True)
    assert answer["usage"]["completion_tokens"] == 16


async def test_values_beyond_what_tensors_hold_do_not_end_the_engine(
    client: httpx.AsyncClient, loaded: LoadedModel
) -> None:
    """They ended its thread, and with it every other request."""
    await complete(client, prompt=[1, 2], top_k=2**63, max_tokens=1)
    stops = list(range(100, 260))
    answer = await complete(
        client, prompt=[1, 2], temperature=1e39, min_tokens=9, max_tokens=9, stop_token_ids=stops,
        return_token_ids=True,
    )  # fmt: skip
    assert not set(answer["choices"][0]["token_ids"][:-1]) & set(stops)
    assert loaded.engine.failure is None


@pytest.mark.parametrize(
    ("prompt", "prompts"),
    [
        ("ab", [[64, 65]]),
        (["ab", "c"], [[64, 65], [66]]),
        ([64, 65], [[64, 65]]),
        ([[64, 65], [66]], [[64, 65], [66]]),
    ],
)
async def test_every_form_of_prompt_flattens_its_choices(
    client: httpx.AsyncClient, prompt: Any, prompts: list[list[int]]
) -> None:
    answer = await complete(client, prompt=prompt, n=2, max_tokens=1, return_token_ids=True)
    assert [choice["index"] for choice in answer["choices"]] == list(range(2 * len(prompts)))
    expected = [prompt_ids for prompt_ids in prompts for _ in range(2)]
    assert [choice["prompt_token_ids"] for choice in answer["choices"]] == expected


async def test_top_logprobs_hold_the_sampled_token_and_the_likeliest(
    client: httpx.AsyncClient,
) -> None:
    answer = await complete(
        client,
        prompt="x",
        max_tokens=6,
        logprobs=3,
        ignore_eos=True,
        return_tokens_as_token_ids=True,
        return_token_ids=True,
    )
    (choice,) = answer["choices"]
    logprobs = choice["logprobs"]
    assert logprobs["tokens"] == [f"token_id:{token}" for token in choice["token_ids"]]
    for token, value, top in zip(
        logprobs["tokens"], logprobs["token_logprobs"], logprobs["top_logprobs"], strict=True
    ):
        assert top[token] == value
        assert 3 <= len(top) <= 4
        assert max(top.values()) >= value


async def test_chat_runs_to_the_context_and_returns_ids(client: httpx.AsyncClient) -> None:
    body = {
        "model": "tiny",
        "messages": [{"role": "user", "content": [{"type": "text", "text": "hi"}]}],
        "logprobs": True,
        "top_logprobs": 2,
        "return_token_ids": True,
        "ignore_eos": True,
    }
    response = await client.post("/v1/chat/completions", json=body)
    answer = response.json()
    (choice,) = answer["choices"]
    prompt_ids = answer["prompt_token_ids"]
    assert answer["object"] == "chat.completion"
    assert choice["message"]["role"] == "assistant"
    assert len(prompt_ids) + len(choice["token_ids"]) == 128
    assert [len(c["top_logprobs"]) for c in choice["logprobs"]["content"]] == [2] * len(
        choice["token_ids"]
    )
    tokenized = await client.post("/tokenize", json={"messages": body["messages"]})
    assert tokenized.json()["tokens"] == prompt_ids


async def test_eos_is_in_the_ids_and_not_in_the_text(client: httpx.AsyncClient) -> None:
    every_letter = list(range(256))
    answer = await complete(
        client, prompt="x", stop_token_ids=every_letter, max_tokens=9, min_tokens=0, n=4,
        return_token_ids=True, skip_special_tokens=False,
    )  # fmt: skip
    stopped = [c for c in answer["choices"] if c["token_ids"][-1] < 256]
    assert stopped
    for choice in stopped:
        assert choice["finish_reason"] == "stop"
        assert choice["stop_reason"] == choice["token_ids"][-1]
        assert "<|endoftext|>" not in choice["text"]


@pytest.mark.parametrize(
    ("change", "param", "words"),
    [
        ({"temprature": 1}, "temprature", "did you mean temperature"),
        ({"temperature": -1}, "temperature", "got -1"),
        ({"temperature": "hot"}, "temperature", "Expected"),
        ({"top_p": 0}, "top_p", "(0, 1]"),
        ({"top_k": -2}, "top_k", "-1 or 0"),
        ({"min_p": 2}, "min_p", "[0, 1]"),
        ({"n": 0}, "n", "at least 1"),
        ({"n": 2, "temperature": 0}, "n", "greedy"),
        ({"max_tokens": 0}, "max_tokens", "at least 1"),
        ({"max_tokens": 128}, "max_tokens", "at most 127"),
        ({"min_tokens": 17}, "min_tokens", "max_tokens=16"),
        ({"logprobs": 21}, "logprobs", "between 0 and 20"),
        ({"stop": ""}, "stop", "not empty"),
        ({"stop_token_ids": [260]}, "stop_token_ids", "[0, 260)"),
        ({"stream": True}, "stream", "not implemented"),
        ({"echo": True}, "echo", "not implemented"),
        ({"repetition_penalty": 1.1}, "repetition_penalty", "not implemented"),
        ({"prompt_logprobs": 0}, "prompt_logprobs", "not implemented"),
        ({"logit_bias": {"5": 1}}, "logit_bias", "not implemented"),
        ({"prompt": []}, "prompt", "empty"),
        ({"prompt": ""}, "prompt", "no tokens"),
        ({"prompt": [1, "a"]}, "prompt", "mixes"),
        ({"prompt": [1, 260]}, "prompt", "260"),
        ({"prompt": [1] * 128}, "prompt", "maximum context length is 128"),
        ({"prompt": 5}, "prompt", "Expected"),
    ],
)
async def test_what_is_not_done_is_refused_by_name(
    client: httpx.AsyncClient, change: dict[str, Any], param: str, words: str
) -> None:
    response = await client.post("/v1/completions", json={"prompt": "x", **change})
    error = response.json()["error"]
    assert response.status_code == 400
    assert error["code"] == 400
    assert error["type"] == "BadRequestError"
    assert error["param"] == param
    assert words in error["message"]


async def test_neutral_values_of_unimplemented_parameters_pass(client: httpx.AsyncClient) -> None:
    await complete(
        client, prompt="x", echo=False, stream=False, presence_penalty=0.0, user="me", logit_bias={}
    )


async def test_another_model_is_404(client: httpx.AsyncClient) -> None:
    response = await client.post("/v1/completions", json={"prompt": "x", "model": "gpt"})
    assert response.status_code == 404
    assert "'tiny'" in response.json()["error"]["message"]


async def test_a_body_that_is_not_json_is_400(client: httpx.AsyncClient) -> None:
    response = await client.post("/v1/completions", content=b"{")
    assert response.status_code == 400


async def test_whatever_a_body_holds_the_answer_is_a_refusal(client: httpx.AsyncClient) -> None:
    deep = b"[" * 100_000 + b"]" * 100_000
    bodies = {
        "/detokenize": [
            b'{"tokens": [1, -1]}',
            b'{"tokens": [1, 1000000]}',
            b'{"tokens": [1, 99999999999999999999999]}',
            b'{"tokens": ' + deep + b"}",
        ],
        "/v1/chat/completions": [
            b'{"messages": [{"role": "user", "content": ' + deep + b"}]}",
            b'{"messages": [{"role": "user", "content": [{"type": "text"}]}]}',
            b'{"messages": [{"role": "user", "content": "\\ud800"}]}',
        ],
        "/v1/completions": [b'{"prompt": ' + deep + b"}", b'{"prompt": [[1], [-5]]}', b"\xff"],
        "/tokenize": [b'{"messages": [{"role": "user", "content": ' + deep + b"}]}"],
        "/collective_rpc": [
            b'{"method": "reload_weights", "kwargs": {"weights_path": "a\\u0000b"}}',
            b'{"method": "reload_weights", "kwargs": {"weights_path": ' + deep + b"}}",
        ],
        "/update_weight_version": [b'{"new_version": ' + deep + b"}"],
    }
    for path, raws in bodies.items():
        for raw in raws:
            answer = await client.post(path, content=raw)
            assert answer.status_code == 400, (path, raw[:60], answer.text)
            assert answer.json()["error"]["message"]
    assert (await client.get("/health")).status_code == 200


async def test_a_body_beyond_the_limit_is_413(client: httpx.AsyncClient) -> None:
    answer = await client.post("/tokenize", content=b" " * (MAX_BODY_BYTES + 1))
    assert answer.status_code == 413


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"prompt": "a", "n": 400_000}, "n"),
        ({"prompt": ["a"] * 100, "n": 41}, "n"),
        ({"prompt": ["a"] * 4097}, "prompt"),
    ],
)
async def test_a_request_asks_for_a_bounded_number_of_completions(
    client: httpx.AsyncClient, body: dict[str, Any], param: str
) -> None:
    answer = await client.post("/v1/completions", json={**body, "max_tokens": 1})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)


@pytest.mark.parametrize(
    "headers",
    [
        {"Origin": "https://evil.example"},
        {"Origin": "null"},
        {"Sec-Fetch-Site": "cross-site"},
        {"Host": "evil.example:9001"},
    ],
)
async def test_a_web_page_cannot_pause_the_engine_or_swap_its_weights(
    loaded: LoadedModel, headers: dict[str, str]
) -> None:
    transport = httpx.ASGITransport(app=create_app(loaded))
    async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1:9001") as client:
        simple = {"Content-Type": "text/plain", **headers}  # what a page may send unasked
        for path in ("/pause?mode=keep", "/collective_rpc", "/v1/completions"):
            answer = await client.post(path, content=b"{}", headers=simple)
            assert answer.status_code == 403, answer.text
            assert answer.json()["error"]["type"] == "PermissionDeniedError"
        assert (await client.get("/is_paused")).json() == {"is_paused": False}
        assert (await client.get("/health", headers={"Host": "localhost:9001"})).status_code == 200


async def test_reload_over_http_sets_the_version_with_the_weights(
    client: httpx.AsyncClient, tmp_path: Path
) -> None:
    other = make_tiny_model(tmp_path / "new", seed=3, max_position_embeddings=128)
    greedy = {"prompt": "abc", "temperature": 0, "max_tokens": 20, "return_token_ids": True}
    before = await complete(client, **greedy)
    rpc = {
        "method": "reload_weights",
        "kwargs": {"weights_path": str(other), "weight_version": "7"},
    }
    assert (await client.post("/collective_rpc", json=rpc)).json() == {"results": [None]}
    after = await complete(client, **greedy)
    assert (await client.get("/weight_info")).json()["weight_version"] == "7"
    assert {span["weight_version"] for span in after["choices"][0]["weight_versions"]} == {"7"}
    assert after["choices"][0]["token_ids"] != before["choices"][0]["token_ids"]


async def test_a_refused_reload_leaves_the_old_weights(
    client: httpx.AsyncClient, model_dir: Path, tmp_path: Path
) -> None:
    tensors = {
        name: tensor * 2 for name, tensor in load_file(model_dir / "model.safetensors").items()
    }
    tensors["model.norm.weight"] = tensors["model.norm.weight"][:3].clone()
    save_file(tensors, tmp_path / "model.safetensors")
    greedy = {"prompt": "abc", "temperature": 0, "max_tokens": 20}
    before = (await complete(client, **greedy))["choices"][0]["text"]
    for path, words in ((tmp_path, "model.norm.weight"), (tmp_path / "no", "not a directory")):
        rpc = {"method": "reload_weights", "kwargs": {"weights_path": str(path)}}
        response = await client.post("/collective_rpc", json=rpc)
        assert response.status_code == 400
        assert words in response.json()["error"]["message"]
    assert (await complete(client, **greedy))["choices"][0]["text"] == before


async def test_checksums_are_of_the_loaded_tensors(
    client: httpx.AsyncClient, loaded: LoadedModel, model_dir: Path
) -> None:
    async def checksums() -> dict[str, str]:
        answer = await client.post("/weight_checker", json={"action": "checksum"})
        return answer.json()["checksums"]  # type: ignore[no-any-return]

    tensors = load_file(model_dir / "model.safetensors")
    before = await checksums()
    assert before == {name: tensor_checksum(tensor) for name, tensor in tensors.items()}
    loaded.engine.model.lm_head.weight[7, 3] += 1
    after = await checksums()
    assert {name for name in before if before[name] != after[name]} == {"lm_head.weight"}
    assert after["lm_head.weight"].startswith("float32[260, 32] ")
    refused = await client.post("/weight_checker", json={"action": "reset"})
    assert refused.status_code == 400
    assert "'checksum'" in refused.json()["error"]["message"]


async def test_unknown_rpc_and_pause_mode_are_refused(client: httpx.AsyncClient) -> None:
    rpc = await client.post("/collective_rpc", json={"method": "sleep"})
    pause = await client.post("/pause?mode=sideways")
    assert (rpc.status_code, pause.status_code) == (400, 400)


async def test_pause_and_resume(client: httpx.AsyncClient) -> None:
    assert (await client.post("/pause?mode=keep")).json() == {"status": "paused"}
    assert (await client.get("/is_paused")).json() == {"is_paused": True}
    waiting = asyncio.create_task(complete(client, prompt="x", max_tokens=1))
    assert (await client.post("/resume")).json() == {"status": "resumed"}
    assert (await waiting)["usage"]["completion_tokens"] == 1


async def test_a_client_that_leaves_takes_its_sequences_along(
    client: httpx.AsyncClient, loaded: LoadedModel
) -> None:
    await client.post("/pause?mode=keep")
    leaving = asyncio.create_task(complete(client, prompt="x", n=3))
    stats = {}
    while stats.get("waiting") != 3:
        stats = (await client.get("/stats")).json()
    leaving.cancel()
    await asyncio.wait({leaving})
    stats = (await client.get("/stats")).json()
    assert (stats["waiting"], stats["aborted_requests"]) == (0, 1)


async def test_health_tells_why_the_engine_died(
    client: httpx.AsyncClient, loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert (await client.get("/health")).status_code == 200

    def explode(*args: object, **kwargs: object) -> None:
        raise RuntimeError("lightning")

    monkeypatch.setattr(loaded.engine, "_forward", explode)
    for _ in range(2):
        response = await client.post("/v1/completions", json={"prompt": "x"})
        assert response.status_code == 500
        assert "lightning" in response.json()["error"]["message"]
    health = await client.get("/health")
    assert health.status_code == 503
    assert "lightning" in health.json()["error"]["message"]


def test_warm_up_decodes_unequal_lengths_together(loaded: LoadedModel) -> None:
    warm_up(loaded.engine)
    assert loaded.engine.stats.generated_tokens == 4


def run_engine(*flags: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "atroposlib.engine", *flags],
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"},
    )


def test_a_missing_model_is_named_and_exits_2(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["--model", str(tmp_path / "nowhere"), "--port", "0"]) == 2
    said = capsys.readouterr().err
    assert "nowhere" in said
    assert "Traceback" not in said


def test_a_port_in_use_is_named_and_exits_1(
    model_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert main(["--model", str(model_dir), "--port", str(port)]) == 1
    said = capsys.readouterr().err
    assert f"127.0.0.1:{port}" in said
    assert "Traceback" not in said


@pytest.mark.e2e
@pytest.mark.drill
def test_sigterm_ends_it_cleanly_while_a_request_runs(model_dir: Path) -> None:
    process = run_engine("--model", str(model_dir), "--port", "0", "--served_model_name", "tiny")
    assert process.stderr is not None
    try:
        line = next(line for line in process.stderr if "http://" in line)
        url = "http://" + line.rsplit("http://", 1)[1].strip()
        httpx.post(f"{url}/pause?mode=keep", timeout=20)
        with httpx.Client(timeout=20) as client:
            body = json.dumps({"prompt": "x"}).encode()
            host, port = url.removeprefix("http://").split(":")
            with socket.create_connection((host, int(port))) as raw:
                head = f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n\r\n"
                raw.sendall(head.encode() + body)
                while client.get(f"{url}/stats").json()["waiting"] != 1:
                    pass
                process.send_signal(signal.SIGTERM)
                assert b" 500 " in raw.recv(4096)
        assert process.wait(timeout=20) == 0
    finally:
        process.kill()
        process.communicate()
