"""`BaseEnv.create`: rollouts and evaluations without a command line, on a scripted engine as a real server."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from atroposlib.envs.base import APIServerConfig, BaseEnv
from atroposlib.envs.dataset_env import DatasetEnv, DatasetEnvConfig
from atroposlib.errors import ConfigError, EngineUnavailable
from atroposlib.inference.scripted_engine import Script, ScriptedEngine
from atroposlib.scored_data import Strictness, check_group
from tests.builders.environments import Offline
from tests.processes import free_port


class Sums(Offline, DatasetEnv):
    """Two answers of the engine are right and wrong; counts calls of `setup` and `close`."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.calls: list[str] = []

    def load_rows(self, split: str) -> list[int]:
        return list(range(1, 9))

    def prompt(self, row: int) -> str:
        return f"{row} + 1 - {row} = ?"

    def score(self, row: int, answer: str) -> float:
        return float(answer == "1")

    async def setup(self) -> None:
        self.calls.append("setup")
        await super().setup()

    async def close(self) -> None:
        self.calls.append("close")
        await super().close()


class Silent(Sums):
    """Its `evaluate` returns nothing and logs one metric, as most existing environments do."""

    async def evaluate(self, *args: Any, **kwargs: Any) -> None:  # type: ignore[override]
        await self.evaluate_log({"eval/rows": float(len(self.eval_rows))})


@pytest.fixture
async def engine() -> AsyncIterator[ScriptedEngine]:
    async with ScriptedEngine(Script(answers=("1", "2"))) as engine:
        yield engine


def created(env_cls: type[BaseEnv], url: str, **settings: Any) -> Any:
    small = {"group_size": 2, "server_type": "vllm"}
    return env_cls.create(model="scripted", base_url=f"{url}/v1", **small | settings)


def num_open_files() -> int:
    return len(os.listdir("/proc/self/fd"))


async def test_each_call_sets_up_and_closes_everything(engine: ScriptedEngine) -> None:
    before = num_open_files()
    env = created(Sums, engine.url)
    assert issubclass(type(env), Sums)
    groups = await env.rollouts(n=3)
    assert [group["scores"] for group in groups] == [[1.0, 0.0]] * 3
    for group in groups:
        assert check_group(group, strictness=Strictness.MEANING).inference_logprobs is not None
    assert env.calls == ["setup", "close"]
    metrics = await env.evaluate()
    assert metrics["eval/pass@1"] == 1.0
    assert len(await env.rollouts()) == 1
    assert env.calls == ["setup", "close"] * 3
    async with asyncio.timeout(10):  # the engine closes its ends of the connections a moment later
        while num_open_files() > before:  # noqa: ASYNC110
            await asyncio.sleep(0.01)


async def test_a_block_sets_up_and_closes_once(engine: ScriptedEngine) -> None:
    async with created(Sums, engine.url) as env:
        first = await env.rollouts(n=4)
        second = await env.rollouts(n=4)
        await env.evaluate()
        assert env.calls == ["setup"]
    assert env.calls == ["setup", "close"]
    asked = {json.dumps(group["messages"][0][:-1]) for group in first + second}
    assert len(asked) == 8, "the second call continues in the rows"


async def test_overlapping_calls_run_one_after_another(engine: ScriptedEngine) -> None:
    env = created(Sums, engine.url)
    first, metrics, second = await asyncio.gather(
        env.rollouts(n=2), env.evaluate(), env.rollouts(n=3)
    )
    assert (len(first), metrics["eval/pass@1"], len(second)) == (2, 1.0, 3)
    assert env.calls == ["setup", "close"] * 3
    assert env.config.data_path_to_save_groups is None


async def test_metrics_of_an_evaluation_that_returns_none_are_those_it_logs(
    engine: ScriptedEngine, tmp_path: Path
) -> None:
    env = created(Silent, engine.url, data_dir_to_save_evals=tmp_path)
    assert await env.evaluate() == {"eval/rows": 8.0}
    assert (tmp_path / "metrics.json").exists()


async def test_rollouts_are_kept_only_in_a_file_that_is_asked_for(
    engine: ScriptedEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    await created(Sums, engine.url).rollouts(n=2)
    assert os.listdir(tmp_path) == []
    path = tmp_path / "kept.jsonl"
    groups = await created(Sums, engine.url, data_path_to_save_groups=path).rollouts(n=2)
    lines = path.read_text().split("\n")[:-1]
    assert [json.loads(line) for line in lines] == groups


async def test_settings_are_the_flags_of_process(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "sums.yaml"
    path.write_text("env: {group_size: 3, max_token_length: 99}")
    env = created(Sums, "http://127.0.0.1:1", config=path, tokenizer_name="other", timeout=7)
    assert (env.config.group_size, env.config.max_token_length) == (2, 99)
    assert env.config.tokenizer_name == "other"
    server = env.server.servers[0].config
    assert (server.model_name, server.base_url) == ("scripted", "http://127.0.0.1:1/v1")
    assert (server.server_type, server.timeout) == ("vllm", 7)
    assert type(env).__name__ == "Sums"
    assert capsys.readouterr().out == ""
    with pytest.raises(ConfigError, match=r"group_siez.*did you mean.*group_size"):
        created(Sums, "http://127.0.0.1:1", group_siez=3)
    with pytest.raises(ConfigError, match=r"group_size: got 'many'"):
        created(Sums, "http://127.0.0.1:1", group_size="many")


async def test_rollouts_of_items_that_run_out_at_once_are_none(engine: ScriptedEngine) -> None:
    class Empty(Sums):
        async def get_next_item(self) -> None:
            return None

    assert await created(Empty, engine.url).rollouts(n=1) == []


def test_config_init_alone_is_enough() -> None:
    class Own(Sums):
        @classmethod
        def config_init(cls) -> Any:
            server = APIServerConfig(model_name="m", base_url="http://h:1/v1", server_type="sglang")
            return DatasetEnvConfig(tokenizer_name="own", group_size=5, use_wandb=True), [server]

    env = Own.create()
    assert (env.config.tokenizer_name, env.config.group_size) == ("own", 5)
    assert not env.config.use_wandb
    assert Own.create(use_wandb=True).config.use_wandb
    server = env.server.servers[0].config
    assert (server.model_name, server.base_url) == ("m", "http://h:1/v1")


def test_an_engine_that_comes_back_serves_the_next_event_loop() -> None:
    """A script may call `asyncio.run` once per call; the first call finds no engine."""
    port = free_port()
    env = created(Sums, f"http://127.0.0.1:{port}", health_wait_s=0.1)
    with pytest.raises(EngineUnavailable, match="is not ready"):
        asyncio.run(env.rollouts())
    assert env.calls == ["setup", "close"]

    async def with_engine() -> Any:
        env.server.servers[0].config.health_wait_s = 20
        async with ScriptedEngine(Script(answers=("1", "2")), port=port):
            return await env.evaluate()

    assert asyncio.run(with_engine())["eval/pass@1"] == 1.0


async def test_rollouts_are_a_table_in_a_notebook(engine: ScriptedEngine) -> None:
    env = Sums.create(model=engine.model_name, base_url=f"{engine.url}/v1", group_size=2)
    groups = await env.rollouts(n=2)
    assert isinstance(groups, list)
    assert repr(groups) == "<2 groups, 4 sequences, mean score 0.5>"
    frame = groups.to_dataframe()
    assert frame["score"].tolist() == [1.0, 0.0, 1.0, 0.0]
    assert frame["completion"].tolist() == ["1", "2", "1", "2"]
    assert frame["group"].tolist() == [0, 0, 1, 1]
    assert (
        frame["tokens"] == [sum(m != -100 for m in masks) for g in groups for masks in g["masks"]]
    ).all()
    groups[0]["completions"][0] = "<script>" + "x" * 300
    page = groups._repr_html_()
    assert page.count("<tr>") == 5
    assert "&lt;script&gt;" in page
    assert "<script>" not in page
    assert "x" * 300 not in page
    assert groups[:0] == []
