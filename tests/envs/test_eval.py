"""Evaluation results on disk, pass@k against enumeration, and evaluations without an environment."""

import asyncio
import itertools
import json
import logging
import os
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from atroposlib.envs import eval as eval_module
from atroposlib.envs.eval import EvalBase, average_metrics, eval_runner, evaluate_log, pass_at_k
from atroposlib.errors import ConfigError
from atroposlib.inference.config import APIServerConfig
from atroposlib.inference.harness import ServerHarness
from atroposlib.inference.manager import ServerManager
from tests.builders.rows import rows_in


@pytest.mark.parametrize("m", range(1, 7))
def test_pass_at_k_is_the_share_of_draws_with_a_right_sample(m: int) -> None:
    for c in range(m + 1):
        for k in range(1, m + 1):
            draws = list(itertools.combinations(range(m), k))
            passed = sum(any(sample < c for sample in draw) for draw in draws)
            assert pass_at_k(m, c, k) == pytest.approx(passed / len(draws))


def read(path: Path) -> Any:
    return json.loads(path.read_text())


def test_results_are_written_in_the_shapes_that_readers_know(tmp_path: Path) -> None:
    evaluate_log(
        {"eval/acc": np.float32(0.5), "eval/note": "fine"},
        eval_dir=str(tmp_path / "deep" / "evals"),
        task_name="maths",
        model_name="m",
        start_time=10.0,
        end_time=12.5,
        generation_parameters={"temperature": 0.6},
        samples=[{"q": 1, "score": np.int64(2)}, {"q": "\u00e9"}],
        verbose=False,
    )
    metrics = {"eval/acc": 0.5, "eval/note": "fine"}
    folder = tmp_path / "deep" / "evals"
    assert read(folder / "metrics.json") == {
        "config_general": {
            "model_name": "m",
            "total_evaluation_time_seconds": "2.5",
            "generation_parameters": {"temperature": 0.6},
        },
        "results": {"atropos|maths|0": metrics, "all": metrics},
    }
    assert rows_in(folder / "samples.jsonl") == [{"q": 1, "score": 2}, {"q": "\u00e9"}]
    assert sorted(path.name for path in folder.iterdir()) == ["metrics.json", "samples.jsonl"]


def test_earlier_results_are_kept_under_a_number(tmp_path: Path) -> None:
    for value in range(3):
        samples = [{"value": value}] if value != 1 else None
        evaluate_log({"v": value}, eval_dir=str(tmp_path), samples=samples, verbose=False)
    found = {path.name: path.read_text() for path in tmp_path.iterdir()}
    metrics = ["metrics.json", "metrics_1.json", "metrics_2.json"]
    assert sorted(found) == [*metrics, "samples.jsonl", "samples_1.jsonl"]
    values = [
        json.loads(found[f"metrics{n}.json"])["results"]["all"]["v"] for n in ("_1", "_2", "")
    ]
    assert values == [0, 1, 2]
    assert json.loads(found["samples_1.jsonl"]) == {"value": 0}
    assert json.loads(found["samples.jsonl"]) == {"value": 2}


def test_without_a_directory_only_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        evaluate_log({"v": 1})
    assert "data_dir_to_save_evals is not set" in caplog.text


def test_verbose_prints_a_table_of_any_metrics(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    metrics = {"eval/acc": 1, "eval/best": None, "eval/name": "x"}
    evaluate_log(metrics, eval_dir=str(tmp_path), task_name="t", start_time=1.0, end_time=2.0)
    out = capsys.readouterr().out
    assert "1.0000" in out
    assert "None" in out
    assert "took 1.00 seconds" in out


class Reverse(EvalBase):
    """Is the answer the question?"""

    def setup_data(self) -> list[str]:
        return ["ab", "cd", "ef"]

    async def run_item(
        self, server_manager: ServerManager, item: str
    ) -> tuple[dict[str, float], Any]:
        answer = await self.chat_completion(server_manager, [{"role": "user", "content": item}])
        texts = [choice.message.content for choice in answer.choices]
        return {"right": float(item in texts)}, {"item": item, "texts": texts}


def scripted() -> tuple[ServerManager, ServerHarness]:
    manager = ServerManager([APIServerConfig(model_name="m")], testing=True)
    harness = manager.servers[0]
    assert isinstance(harness, ServerHarness)
    harness.respond = lambda request: "cd" if "cd" in request.prompt else "?"
    return manager, harness


async def test_evaluation_averages_its_items_and_writes_them(tmp_path: Path) -> None:
    manager, harness = scripted()
    evaluation = Reverse(pass_at_n=2, pass_at_n_samples=4, eval_dir=str(tmp_path), temperature=0.7)
    assert await evaluation(manager) == {"right": pytest.approx(1 / 3)}
    written = read(tmp_path / "metrics.json")
    assert written["results"]["atropos|Reverse@2:4|0"] == {"right": pytest.approx(1 / 3)}
    assert written["config_general"]["model_name"] == "m"
    parameters = {"temperature": 0.7, "n": 4, "top_p": 1.0, "max_tokens": -1}
    assert written["config_general"]["generation_parameters"] == parameters
    assert [row["item"] for row in rows_in(tmp_path / "samples.jsonl")] == ["ab", "cd", "ef"]
    assert len(harness.eval_request_timings) == 3  # the evaluation budget, not training's
    assert all("max_tokens" not in request for request in harness.requests)


def test_task_name_shows_samples_only_where_they_differ() -> None:
    assert Reverse().task_name == "Reverse@1"
    assert Reverse(1, 8).task_name == "Reverse@1:8"
    assert Reverse(max_tokens=5).get_generation_params()["max_tokens"] == 5


async def test_an_item_that_fails_ends_the_evaluation(tmp_path: Path) -> None:
    class Fails(Reverse):
        async def run_item(self, server_manager: ServerManager, item: str) -> Any:
            raise LookupError(item)

    with pytest.raises(LookupError):
        await Fails(eval_dir=str(tmp_path))(scripted()[0])
    assert os.listdir(tmp_path) == []


async def test_no_items_is_an_error() -> None:
    class Empty(Reverse):
        def setup_data(self) -> list[str]:
            return []

    with pytest.raises(ValueError, match="returned no items"):
        await Empty()(scripted()[0])


def test_metrics_that_items_lack_are_averaged_over_the_rest(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.WARNING):
        averages = average_metrics([{"a": 1.0, "b": 4.0}, {"a": 3.0}])
    assert averages == {"a": 2.0, "b": 4.0}
    assert "1 of 2 items have no metric 'b'" in caplog.text


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[APIServerConfig]:
    """The servers that `eval_runner` asks for; scripted ones answer."""
    found: list[APIServerConfig] = []

    def make(configs: list[APIServerConfig]) -> ServerManager:
        found.extend(configs)
        return scripted()[0]

    monkeypatch.setattr(eval_module, "ServerManager", make)
    monkeypatch.chdir(tmp_path)
    return found


async def run(
    evaluation: EvalBase, monkeypatch: pytest.MonkeyPatch, *flags: str
) -> dict[str, float]:
    monkeypatch.setattr(sys, "argv", ["x.py", *flags])
    return await eval_runner(evaluation)


async def test_runner_reads_the_command_line(
    made: list[APIServerConfig], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    line = ["--server-url", "http://h:1/v1", "--model-name=m", f"--eval-dir={tmp_path}"]
    assert await run(Reverse(), monkeypatch, *line) == {"right": pytest.approx(1 / 3)}
    [config] = made
    assert (config.base_url, config.model_name) == ("http://h:1/v1", "m")
    assert (config.api_key, config.health_check) == ("dummy", False)
    assert (tmp_path / "metrics.json").exists()
    with pytest.raises(ConfigError, match="model_name"):
        await run(Reverse(), monkeypatch)


async def test_runner_prints_saves_and_resumes(
    made: list[APIServerConfig],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    asked: list[str] = []

    class Breaks(Reverse):
        is_broken = True

        async def run_item(self, server_manager: ServerManager, item: str) -> Any:
            if item == "ef" and self.is_broken:
                await asyncio.sleep(0.05)
                raise LookupError(item)
            asked.append(item)
            return await super().run_item(server_manager, item)

    with pytest.raises(LookupError):
        await run(Breaks(), monkeypatch, "--model-name=m")
    [folder] = (tmp_path / "evals").glob("Breaks-2*")
    Breaks.is_broken = False
    with pytest.raises(ConfigError, match="model_name"):
        await run(Breaks(), monkeypatch, "--model-name=n", f"--resume={folder}")
    metrics = await run(Breaks(), monkeypatch, "--model-name=m", f"--resume={folder}")
    assert metrics == {"right": pytest.approx(1 / 3)}
    assert asked == ["ab", "cd", "ef"]
    printed = capsys.readouterr().out
    assert "| 0.3333 | \u00b1 | 0.3333 | [0.0615, 0.7923] | 3 |" in printed
    assert f"results: {folder}" in printed
