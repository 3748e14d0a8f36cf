"""The guards at the start of a run, against real engines: what is said, what ends the run, what is left alone."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from typing import Any

import pytest
from aiohttp import web

from atroposlib.envs.base import APIServerConfig, BaseEnv
from atroposlib.envs.dataset_env import DatasetEnv, DatasetEnvConfig
from atroposlib.envs.judge_env import JudgeEnv, JudgeEnvConfig
from atroposlib.envs.teacher_distillation_env import (
    TeacherDistillationConfig,
    TeacherDistillationEnv,
)
from atroposlib.errors import ConfigError
from atroposlib.inference.scripted_answers import ByteTokenizer
from atroposlib.inference.scripted_engine.server import ScriptedEngine
from atroposlib.runtime import guards
from atroposlib.runtime.env_command import run_mode
from atroposlib.runtime.guards import engines_checked
from tests.builders.environments import Offline
from tests.processes import free_port
from tests.runtime.helpers_runtime import ScriptedEnv, until


class OtherTokenizer(ByteTokenizer):
    """The same text as other ids."""

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return [token ^ 1 for token in super().encode(text, add_special_tokens=False)]

    def decode(self, tokens: Any, skip_special_tokens: bool = False) -> str:
        return super().decode([token ^ 1 for token in tokens], skip_special_tokens)


def env_at(
    url: str, *, server_type: Any = "vllm", tokenizer: Any = None, **fields: Any
) -> ScriptedEnv:
    server = APIServerConfig(base_url=url + "/v1", server_type=server_type, model_name="scripted")
    env = ScriptedEnv(None, [server], testing=False, **fields)
    env.tokenizer = tokenizer or env.tokenizer
    return env


async def said_about(
    env: BaseEnv, caplog: pytest.LogCaptureFixture, *, mode: str = "serve"
) -> list[str]:
    """Return the warnings of the guards."""
    caplog.clear()
    async with engines_checked(env, mode):
        pass
    return [r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING]


@pytest.mark.parametrize("server_type", ["vllm", "sglang", "trl", "openai"])
async def test_engine_that_fits_is_not_mentioned(
    server_type: str, caplog: pytest.LogCaptureFixture
) -> None:
    async with ScriptedEngine() as engine:
        assert await said_about(env_at(engine.url, server_type=server_type), caplog) == []


@pytest.mark.parametrize(
    ("server_type", "is_said"), [("vllm", True), ("openai", True), ("sglang", False)]
)
async def test_wrong_model_is_said_where_the_engine_reads_the_name(
    server_type: str, is_said: bool, caplog: pytest.LogCaptureFixture
) -> None:
    async with ScriptedEngine(model_name="served") as engine:
        said = await said_about(env_at(engine.url, server_type=server_type), caplog)
    assert len(said) == is_said
    if is_said:
        assert f"{engine.url}/v1: the engine does not serve the model 'scripted' but" in said[0]
        assert "'served'; set --openai.model_name" in said[0]


class Judged(Offline, JudgeEnv):
    pass


class Taught(Offline, TeacherDistillationEnv):
    get_next_item = evaluate = None  # type: ignore[assignment]


def env_with(namespace: str, url: str, *, extra_url: str) -> BaseEnv:
    """Return an environment with a judge or a teacher at `extra_url`."""
    policy, extra = (
        APIServerConfig(base_url=f"{each}/v1", server_type="vllm", model_name="scripted")
        for each in (url, extra_url)
    )
    if namespace == "judge":
        return Judged(JudgeEnvConfig(max_token_length=9), [policy], judge_configs=extra)
    config = TeacherDistillationConfig(
        teacher_enabled=True, tokenizer_name="scripted", max_token_length=9
    )
    return Taught(config, [policy], extra)


@pytest.mark.parametrize("namespace", ["judge", "teacher"])
async def test_judge_and_teacher_are_checked_before_the_first_item(
    namespace: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with ScriptedEngine() as engine, ScriptedEngine(model_name="served") as other:
        env = env_with(namespace, engine.url, extra_url=other.url)
        (said,) = await said_about(env, caplog)
        assert f"{other.url}/v1: the engine does not serve the model 'scripted' but" in said
        assert said.endswith(f"set --{namespace}.model_name")
        assert await said_about(env_with(namespace, engine.url, extra_url=engine.url), caplog) == []
        monkeypatch.setattr(guards, "START_S", 0.5)
        away = f"http://127.0.0.1:{free_port()}"
        (said,) = await said_about(env_with(namespace, engine.url, extra_url=away), caplog)
        assert f"Inference server {away}/v1 is not ready" in said


async def test_too_short_a_context_is_said_once_for_all_engines(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with ScriptedEngine(max_model_len=2048) as a, ScriptedEngine(max_model_len=2048) as b:
        env = env_at(a.url)
        env.server.servers += env_at(b.url).server.servers
        said = await said_about(env, caplog)
        assert len(said) == 1
        assert "context is 2048 tokens, prompt included, and max_token_length is 2048" in said[0]
        assert env.server.context_len == 2048
        env.config.max_token_length = 2000
        assert await said_about(env, caplog) == []


@pytest.mark.parametrize("server_type", ["vllm", "sglang"])
async def test_answers_are_limited_to_what_the_prompt_leaves_of_the_context(
    server_type: str, caplog: pytest.LogCaptureFixture
) -> None:
    async with ScriptedEngine(max_model_len=50) as engine:
        env = env_at(engine.url, server_type=server_type)
        async with engines_checked(env, "serve"):
            for wanted in (20, 1000):
                await env.server.tokens_and_logprobs_completion(
                    input_ids=[5] * 10, max_tokens=wanted
                )
        bodies = [served.body for served in engine.served]
        limits = [
            body["sampling_params"].get("max_tokens") or body["sampling_params"]["max_new_tokens"]
            for body in bodies
        ]
        assert limits == [20, 40]


WITHOUT_TOKENIZE = ("/tokenize",)


@pytest.mark.parametrize("missing", [(), WITHOUT_TOKENIZE])
@pytest.mark.parametrize("server_type", ["vllm", "sglang"])
async def test_tokenizer_of_another_vocabulary_ends_the_run(
    server_type: str, missing: Iterable[str], caplog: pytest.LogCaptureFixture
) -> None:
    async with ScriptedEngine(missing_paths=tuple(missing)) as engine:
        env = env_at(engine.url, server_type=server_type, tokenizer=OtherTokenizer())
        with pytest.raises(ConfigError, match=r"set --env\.tokenizer_name"):
            await run_mode(env, "serve")
        assert env.started == []
        # A process run of chat completions may write another model's tokens.
        (said,) = await said_about(env, caplog, mode="process")
        assert "token ids are not those of the tokenizer" in said


@pytest.mark.parametrize("server_type", ["vllm", "sglang"])
async def test_engine_without_optional_routes_tells_nothing(
    server_type: str, caplog: pytest.LogCaptureFixture
) -> None:
    paths = ("/tokenize", "/v1/models", "/v1/completions", "/generate")
    async with ScriptedEngine(missing_paths=paths, model_name="served") as engine:
        env = env_at(engine.url, server_type=server_type, tokenizer=OtherTokenizer())
        assert await said_about(env, caplog) == []


GARBAGE = [
    b"not JSON",
    b"\xff\xfe",
    b"[]",
    b'{"data": [1], "tokens": "abc", "choices": [{}]}',
    b'{"data": [], "tokens": [], "choices": []}',
    b'{"data": [{"id": "scripted", "max_model_len": "long"}], "choices": 4}',
]


@asynccontextmanager
async def answering(body: bytes, *, status: int = 200) -> AsyncIterator[str]:
    """An engine that answers the same to every request."""

    async def answer(request: web.BaseRequest) -> web.Response:
        return web.Response(body=body, status=status, content_type="application/json")

    port = free_port()
    server = web.Server(answer)
    listener = await asyncio.get_running_loop().create_server(server, "127.0.0.1", port)
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        listener.close()
        await server.shutdown(0)


@pytest.mark.parametrize("server_type", ["vllm", "sglang", "openai"])
@pytest.mark.parametrize("body", GARBAGE)
async def test_garbage_tells_nothing(
    body: bytes, server_type: str, caplog: pytest.LogCaptureFixture
) -> None:
    async with answering(body) as url:
        env = env_at(url, server_type=server_type, tokenizer=OtherTokenizer())
        assert await said_about(env, caplog) == []
        assert env.server.context_len is None


async def test_tokenizer_that_cannot_be_compared_is_left_alone(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with ScriptedEngine() as engine:
        assert await said_about(env_at(engine.url, tokenizer=object()), caplog) == []


async def test_engine_that_is_down_is_checked_when_it_answers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(guards, "START_S", 0.01)
    engine = ScriptedEngine(port=free_port())
    env = env_at(engine.url, tokenizer=OtherTokenizer())
    env.server.servers[0].health_poll_s = 0.01
    began = asyncio.Event()

    async def run() -> None:
        async with engines_checked(env, "serve"):
            began.set()
            async with engine:
                await until(lambda: False)

    with pytest.raises(ConfigError, match=r"set --env\.tokenizer_name"):
        await run()
    assert began.is_set()


async def test_cancelled_run_stays_cancelled() -> None:
    async with ScriptedEngine() as engine:
        began = asyncio.Event()

        async def run() -> None:
            async with engines_checked(env_at(engine.url), "serve"):
                began.set()
                await asyncio.Event().wait()

        running = asyncio.create_task(run())
        await began.wait()
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running


class Rows(Offline, DatasetEnv):
    async def setup(self) -> None:
        raise AssertionError("the run was not refused")


async def test_text_only_server_is_refused_where_the_base_needs_token_ids(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("ATROPOS_ALLOW_DUMMY_MANAGED_SERVER", raising=False)
    monkeypatch.setattr(guards, "START_S", 0.01)  # nothing listens there
    env = Rows(DatasetEnvConfig(), [APIServerConfig(base_url="http://127.0.0.1:9/v1")])
    with pytest.raises(ConfigError, match=r"--openai\.server_type: .* 'vllm'"):
        await run_mode(env, "serve")
    env.config.data_path_to_save_groups = "never written"
    for mode in ("evaluate", "process"):  # which writes text
        with pytest.raises(AssertionError, match="was not refused"):
            await run_mode(env, mode)
