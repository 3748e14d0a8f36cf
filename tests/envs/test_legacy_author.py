"""An environment written the original way goes through serve, process and evaluate as it is.

Positional `super().__init__`, `slurm=True` by default, one bare server, bare lists, masks of 0 and 1, lists of groups,
None, backlog items, made-up config keys, `await super().wandb_log(m)`, checkpoints through `super()`.
"""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any, Dict, List, Optional, Tuple, Union  # noqa: UP035 - as such files are written

import pytest
import yaml

from atroposlib.envs.base import (
    APIServerConfig,
    BaseEnv,
    BaseEnvConfig,
    EvalHandlingEnum,
    Item,
    ScoredDataGroup,
)
from atroposlib.inference.harness import ByteTokenizer
from atroposlib.runtime import env_command
from atroposlib.runtime.env_command import build_environment, run_environment
from atroposlib.type_definitions import number
from tests.builders.rows import rows_in
from tests.runtime.helpers_runtime import LoopbackHub


class LegacyConfig(BaseEnvConfig):
    length_penalty: number = 0.5


class LegacyEnv(BaseEnv):
    name = "legacy"
    env_config_cls = LegacyConfig

    def __init__(
        self,
        config: LegacyConfig,
        server_configs: List[APIServerConfig],  # noqa: UP006
        slurm: bool = True,
        testing: bool = False,
    ) -> None:
        super().__init__(config, server_configs, slurm, testing)
        self.percent_correct_buffer: List[float] = []  # noqa: UP006
        self.logged: List[Dict[str, Any]] = []  # noqa: UP006
        self.asked: List[Any] = []  # noqa: UP006
        self.iter = 0
        self.construction = (slurm, testing)

    @classmethod
    def config_init(self) -> Tuple[LegacyConfig, APIServerConfig]:  # type: ignore[override]  # noqa: UP006
        env_config = LegacyConfig(
            tokenizer_name="nobody/has-this",
            group_size=2,
            use_wandb=False,
            rollout_server_url="http://localhost:8000",
            total_steps=3,
            batch_size=12,
            steps_per_eval=1,
            max_token_length=64,
            eval_handling=EvalHandlingEnum.LIMIT_TRAIN,
            min_items_sent_before_logging=0,
            dataset_path="made/up",  # type: ignore[call-arg]
        )
        server_configs = APIServerConfig(
            model_name="legacy-model",
            base_url="http://localhost:9123/v1",
            api_key="legacy-secret",
            num_requests_for_eval=256,
        )
        return env_config, server_configs

    async def setup(self) -> None:
        self.train = [{"question": f"{i}+{i}", "answer": str(2 * i)} for i in range(1000)]

    def save_checkpoint(self, step: int, data: Optional[Dict[str, Any]] = None) -> None:  # noqa: UP006, UP045
        if data is None:
            data = {}
        data["iter"] = self.iter
        super().save_checkpoint(step, data)

    async def get_next_item(self) -> Item:
        next_item = self.train[self.iter % len(self.train)]
        self.iter += 1
        return (next_item["question"], next_item["answer"], self.iter)

    async def wandb_log(self, wandb_metrics: Optional[Dict[str, Any]] = None) -> None:  # noqa: UP006, UP045
        if wandb_metrics is None:
            wandb_metrics = {}
        try:
            wandb_metrics["train/percent_correct"] = sum(self.percent_correct_buffer) / len(
                self.percent_correct_buffer
            )
        except ZeroDivisionError:
            pass
        self.percent_correct_buffer = []
        self.logged.append(wandb_metrics)
        await super().wandb_log(wandb_metrics)

    async def collect_trajectories(
        self, item: Item
    ) -> Tuple[  # noqa: UP006
        Union[Optional[ScoredDataGroup], List[Optional[ScoredDataGroup]]],  # noqa: UP006, UP007, UP045
        List[Item],  # noqa: UP006
    ]:
        question, _, number_of_item = item
        self.asked.append(item)
        messages = [{"role": "user", "content": question}]
        completions = await self.server.chat_completion(
            messages=messages, n=self.config.group_size, max_tokens=self.config.max_token_length
        )
        scores = ScoredDataGroup()
        scores["tokens"] = []
        scores["masks"] = []
        scores["scores"] = []
        for i, choice in enumerate(completions.choices):
            answer = [*messages, {"role": "assistant", "content": choice.message.content}]
            tokens = self.tokenizer.apply_chat_template(answer)
            prompt = self.tokenizer.apply_chat_template(messages, add_generation_prompt=True)
            scores["tokens"].append(tokens)
            scores["masks"].append([0] * len(prompt) + [1] * (len(tokens) - len(prompt)))
            scores["scores"].append(1.0 if i else -1.0)
            self.percent_correct_buffer.append(float(i))
        if number_of_item % 4 == 1:
            return None, []
        if number_of_item % 4 == 2:
            return [scores, None, scores], []
        if number_of_item % 4 == 3 and question != "later":
            return scores, [("later", "0", number_of_item)]
        return scores, []

    async def evaluate(self, *args: Any, **kwargs: Any) -> None:
        completion = await self.server.chat_completion(
            messages=[{"role": "user", "content": "1+1"}], n=1, temperature=0.0, split="eval"
        )
        samples = [{"question": "1+1", "response": completion.choices[0].message.content}]
        await self.evaluate_log(metrics={"eval/percent_correct": 0.25}, samples=samples)


@pytest.fixture(autouse=True)
def _offline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("atroposlib.envs.hooks.load_tokenizer", lambda source: ByteTokenizer())
    # It scans the heap of all tests.
    monkeypatch.setattr(env_command, "collect_less_often", lambda: None)


def legacy(*argv: str) -> LegacyEnv:
    env = build_environment(LegacyEnv, "serve", argv, prog="legacy.py")
    assert isinstance(env, LegacyEnv)
    return env


async def test_it_runs_in_a_notebook() -> None:
    env = LegacyEnv.create(testing=True)
    groups = await env.rollouts(n=2)
    assert [group["scores"][:2] for group in groups] == [[-1.0, 1.0]] * 2
    assert await env.evaluate() == {"eval/percent_correct": 0.25}


def test_legacy_author_constructs_with_one_bare_server_that_keeps_its_url() -> None:
    env = legacy()
    assert [server.config.base_url for server in env.server.servers] == ["http://localhost:9123/v1"]
    assert env.construction == (False, False)
    direct = LegacyEnv(*LegacyEnv.config_init())  # type: ignore[arg-type]
    assert direct.construction == (True, False)
    assert [s.config.base_url for s in direct.server.servers] == ["http://localhost:9123/v1"]


@pytest.mark.parametrize(
    "spelling", [["--slurm", "false"], ["--slurm", "False"], ["--slurm=False"]]
)
def test_legacy_author_slurm_spellings_of_the_wild(spelling: list[str]) -> None:
    assert legacy(*spelling).construction == (False, False)


async def test_legacy_author_serves(tmp_path: Path) -> None:
    async with LoopbackHub(batch_size=4) as hub:
        hub.registration.checkpoint_dir = str(tmp_path)
        hub.registration.save_checkpoint_interval = 2
        await hub.coordinator.reset()
        await hub.start_trainer()
        path = tmp_path / "groups.jsonl"
        env = legacy(
            "--testing",
            "--env.max_num_workers=1",
            f"--env.rollout_server_url={hub.url}",
            f"--env.data_path_to_save_groups={path}",
            f"--env.data_dir_to_save_evals={tmp_path / 'evals'}",
        )
        run = asyncio.create_task(env.env_manager())
        while hub.coordinator.status().current_step < 3:
            await hub.take_batch()
            await asyncio.sleep(0.02)
        await run
        ledger = hub.coordinator.ledger()
    lines = rows_in(path)
    assert ledger.produced == len(lines) >= 6
    assert ledger.duplicates == 0
    assert (env.config.batch_size, env.max_token_len, env.curr_step) == (4, 100, 3)
    assert ("later", "0", 3) in env.asked
    first = lines[0]
    assert all(m in (-100, t) for m, t in zip(first["masks"][0], first["tokens"][0], strict=True))
    assert (env.running_items, env.workers, env.items_sent_this_step) == ({}, set(), 0)
    assert any("train/percent_correct" in metrics for metrics in env.logged)
    assert json.loads((tmp_path / "evals" / "metrics.json").read_text())["results"]["all"] == {
        "eval/percent_correct": 0.25
    }
    saved = json.loads((tmp_path / "env_checkpoints/legacy_0/step-2.json").read_text())
    assert saved["iter"] >= 3


def test_legacy_author_processes(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    argv = ["process", "--testing", "--env.total_steps", "5"]
    assert run_environment(LegacyEnv, [*argv, "--env.data_path_to_save_groups", str(path)]) == 0
    lines = rows_in(path)
    assert len(lines) == 6  # the last item gave a list of two
    keys = {"tokens", "masks", "scores", "messages", "ref_logprobs", "overrides"}
    keys |= {"group_overrides", "distill_token_ids", "distill_logprobs"}
    assert all(keys <= line.keys() for line in lines)
    assert lines[0]["messages"][0][0]["role"] == "user"
    assert "6 groups" in path.with_suffix(".html").read_text()


def test_legacy_author_evaluates_and_can_give_the_configuration_back(tmp_path: Path) -> None:
    argv = ["evaluate", "--testing", "--env.data_dir_to_save_evals", str(tmp_path)]
    assert run_environment(LegacyEnv, [*argv, "--openai.model_name", "other"]) == 0
    results = json.loads((tmp_path / "metrics.json").read_text())
    assert results["config_general"]["model_name"] == "other"
    assert results["results"]["atropos|legacy_eval|0"] == {"eval/percent_correct": 0.25}
    assert json.loads((tmp_path / "samples.jsonl").read_text())["question"] == "1+1"
    saved = yaml.safe_load((tmp_path / "evaluate_config.yaml").read_text())
    assert saved["openai"][0]["api_key"] == "***"
    assert saved["env"]["length_penalty"] == 0.5
    assert (saved["slurm"], saved["testing"]) == (False, True)
    env = legacy("--config", str(tmp_path / "evaluate_config.yaml"))
    config = env.server.servers[0].config
    assert (config.model_name, config.api_key) == ("other", "legacy-secret")
    assert env.config.data_dir_to_save_evals == str(tmp_path)
