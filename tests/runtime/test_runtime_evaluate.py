"""The command `evaluate`: results in a directory, killed and resumed, with and without `evaluate_log`."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest
import yaml

from atroposlib.envs.agent_env import AgentEnv
from atroposlib.envs.base import BaseEnv, BaseEnvConfig
from atroposlib.envs.eval_run import hash_of
from atroposlib.envs.multi_turn_env import MultiTurnEnv
from atroposlib.errors import ConfigError
from atroposlib.runtime import env_command
from atroposlib.runtime.env_command import run_environment
from atroposlib.runtime.evaluate import evaluate
from tests.builders.environments import Offline
from tests.envs.helpers_envs import ENGINE
from tests.frontend.helpers_pages import read_page
from tests.processes import running, wait_for
from tests.runtime.slow_sums_env import SlowSums

SLOW_SUMS = str(Path(__file__).parent / "slow_sums_env.py")
FLAGS = ["--env.num_eval_samples=3", "--env.max_eval_workers=2", "--openai.model_name=m"]


@pytest.fixture(autouse=True)
def _own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    # It scans the heap of all tests.
    monkeypatch.setattr(env_command, "collect_less_often", lambda: None)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of a complete evaluation; tests only read it."""
    folder = tmp_path_factory.mktemp("evaluation") / "whole"
    flags = [f"--env.data_dir_to_save_evals={folder}", *FLAGS]
    assert run_environment(SlowSums, ["evaluate", *flags]) == 0
    return folder


def only_run() -> Path:
    [folder] = Path("evals").iterdir()
    return folder


def num_lines(name: str) -> int:
    return sum(path.read_text().count("\n") for path in Path().glob(f"evals/*/{name}"))


def results(folder: Path) -> Any:
    document = json.loads((folder / "metrics.json").read_text())
    del document["config_general"]["total_evaluation_time_seconds"]
    return document


def test_killed_evaluation_resumes_to_the_results_of_one_that_was_not(
    tmp_path: Path, whole: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    argv = [SLOW_SUMS, "evaluate", *FLAGS]
    with running("evaluate", argv, log_path=tmp_path / "log") as process:
        wait_for(lambda: num_lines("samples.jsonl") > 30, timeout_s=15, process=process)
        process.stop(signal.SIGKILL)
    assert num_lines("metrics.json") == 0
    folder = only_run()
    kept = (folder / "samples.jsonl").read_text().splitlines()
    capsys.readouterr()
    assert run_environment(SlowSums, ["evaluate", "--resume", str(folder)]) == 0
    assert results(folder) == results(whole)
    samples = (folder / "samples.jsonl").read_text()
    assert samples == (whole / "samples.jsonl").read_text()
    assert {*kept[:30]} <= {*samples.splitlines()}
    assert f"results: {folder}" in capsys.readouterr().out


async def test_terminated_evaluation_closes_the_environment_and_says_how_to_resume(
    caplog: pytest.LogCaptureFixture,
) -> None:
    class Terminated(SlowSums):
        is_closed = False

        def score(self, row: Any, answer: str) -> float:
            if row[0] == 30:
                os.kill(os.getpid(), signal.SIGTERM)
            return super().score(row, answer)

        async def close(self) -> None:
            await super().close()
            self.is_closed = True

    env = Terminated(SlowSums.env_config_cls(use_wandb=False, max_eval_workers=1), [ENGINE])
    with pytest.raises(SystemExit) as ended:
        await evaluate(env)
    assert ended.value.code == 128 + signal.SIGTERM
    assert env.is_closed
    assert "evaluate --resume" in caplog.text


def test_results_go_to_a_dated_directory_with_configuration_and_versions(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert run_environment(SlowSums, ["evaluate", *FLAGS]) == 0
    folder = only_run()
    assert folder.name.startswith("slow_sums-2")
    saved = yaml.safe_load((folder / "evaluate_config.yaml").read_text())
    assert saved["openai"][0]["model_name"] == "m"
    assert json.loads((folder / "versions.json").read_text())["packages"]["pydantic"]
    assert len((folder / "samples.jsonl").read_text().splitlines()) == 180
    page = read_page(folder / "samples.html")
    assert (page.head["title"], len(page.columns["id"])) == (folder.name, 60)
    assert page.columns["num_sequences"] == [3] * 60
    estimates = results(folder)["estimates"]
    assert estimates["eval/mean_score"]["n"] == 180
    assert estimates["eval/pass@1"]["n"] == 60
    printed = capsys.readouterr().out
    row = next(line for line in printed.splitlines() if "mean score" in line)
    assert f"{estimates['eval/mean_score']['stderr']:.4f}" in row
    assert "180" in row


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["evaluate", "--resume", "nowhere"], "give a directory that evaluate made"),
        (["process", "--resume", "nowhere"], "only evaluate"),
        (["evaluate", "--resume=WHOLE", "--rescore=WHOLE"], "exclude each other"),
        (["evaluate", "--resume=WHOLE", "--openai.model_name=n"], "openai.model_name"),
    ],
)
def test_resume_that_makes_no_sense_is_one_line(
    argv: list[str], message: str, whole: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    capsys.readouterr()
    argv = [each.replace("WHOLE", str(whole)) for each in argv]
    assert run_environment(SlowSums, argv) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1


class OwnWay(Offline, BaseEnv):
    """Evaluates without `evaluate_items`; `how` says where its metrics go."""

    how = "log"

    async def setup(self) -> None:
        pass

    async def get_next_item(self) -> None:
        return None

    async def evaluate(self, *args: Any, **kwargs: Any) -> Any:
        self.ours = {"eval/percent_correct": 0.5}
        if self.how == "log":
            samples = [{"correct": True}, {"correct": False}]
            await self.evaluate_log(self.ours, samples=samples, verbose=False)
        return self.ours if self.how == "return" else None

    async def wandb_log(self, wandb_metrics: dict[str, Any] | None = None) -> None:
        if self.how == "raise":
            raise RuntimeError("no run")
        ours = self.ours if self.how == "wandb" else {}
        await super().wandb_log({**ours, "train/loss": 1.0, **(wandb_metrics or {})})


@pytest.mark.parametrize("how", ["log", "wandb", "return"])
async def test_metrics_are_printed_and_saved_however_the_author_gives_them(
    how: str, capsys: pytest.CaptureFixture[str]
) -> None:
    env = OwnWay(BaseEnvConfig(use_wandb=False), [ENGINE])
    env.how = how
    folder = await evaluate(env)
    assert results(folder)["results"]["all"] == {"eval/percent_correct": 0.5}
    row = next(line for line in capsys.readouterr().out.splitlines() if "percent correct" in line)
    stderr, interval, n = (cell.strip() for cell in row.split("|")[-4:-1])
    if how == "log":  # the samples say how far off the mean may be
        assert (stderr, interval, n) == ("0.5000", "[0.0945, 0.9055]", "2")
    else:
        assert (stderr, interval, n) == ("n/a", "n/a", "n/a")


@pytest.mark.parametrize("how", ["none", "raise"])
async def test_evaluation_without_metrics_says_so(
    how: str, caplog: pytest.LogCaptureFixture
) -> None:
    env = OwnWay(BaseEnvConfig(use_wandb=False), [ENGINE])
    env.how = how
    folder = await evaluate(env)
    assert not (folder / "metrics.json").exists()
    assert "evaluate() gave no metrics" in caplog.text


def test_stored_answers_are_scored_again_without_the_engine(whole: Path) -> None:
    class Strict(SlowSums):
        def score(self, row: Any, answer: str) -> float:
            return float(answer == str(sum(row)) and row[0] > 29)

        async def roll_out(self, *args: Any, **kwargs: Any) -> Any:
            raise AssertionError("no answer is sampled")

    assert run_environment(Strict, ["evaluate", "--rescore", str(whole)]) == 0
    folder = only_run()
    before, after = (
        [json.loads(line) for line in (each / "samples.jsonl").read_text().splitlines()]
        for each in (whole, folder)
    )
    assert [sample["score"] for sample in after] == [
        sample["score"] * (sample["row"][0] > 29) for sample in before
    ]
    assert [sample["messages"] for sample in after] == [sample["messages"] for sample in before]
    assert results(folder)["config_general"] == results(whole)["config_general"]
    assert run_environment(Strict, ["evaluate", "--resume", str(folder)]) == 0  # still no sampling
    assert not (whole / "metrics_1.json").exists()


async def test_answers_that_were_judged_while_they_were_made_are_not_scored_again() -> None:
    env = OwnWay(BaseEnvConfig(use_wandb=False), [ENGINE])
    with pytest.raises(ConfigError, match="OwnWay cannot score stored answers"):
        await env.rescore([])
    assert MultiTurnEnv.rescore is AgentEnv.rescore is BaseEnv.rescore


async def test_stored_answers_of_other_data_are_refused() -> None:
    env = SlowSums(SlowSums.env_config_cls(use_wandb=False), [ENGINE])
    await env.setup()
    other = {"messages": [], "item_index": 0, "item_hash": hash_of("another row")}
    with pytest.raises(ConfigError, match="none of the stored answers"):
        await env.rescore([other])
