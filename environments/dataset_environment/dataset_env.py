"""Any data set with rewards of the registry: an environment without code, described in YAML.

`prompt_field` names the field with the prompt, `answer_field` the one with the right answer. The rewards are those of
`atroposlib/envs/reward_fns`, each a name or `{type, weight, params}`. One reward is used as it is; several in
`reward_functions` are averaged by weight, in `reward_funcs` added. A reward gets the answers and, one per answer,
`solution` (the answer field), `ground_truth` and `item` (the row).

Data: `dataset_name`, a data set on the Hugging Face hub or a local folder; or JSONL rows.
Needs: extra datasets; those of the rewards.

    python environments/dataset_environment/dataset_env.py serve \\
        --config environments/dataset_environment/configs/gsm8k.yaml ...
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

from pydantic import Field

from atroposlib.envs.dataset_env import ChatSession, DatasetEnvConfig, Outcome, Rollout, Split
from atroposlib.envs.dataset_env import DatasetEnv as RowsEnv
from atroposlib.envs.reward_fns import CombinedReward, RewardFunction, registry
from atroposlib.envs.reward_fns.accuracy_reward import gold_answer
from atroposlib.envs.reward_fns.reward_function import parts_of_rewards
from atroposlib.envs.rows import HubRows
from atroposlib.errors import ConfigError


class AnyDatasetConfig(DatasetEnvConfig):
    dataset_name: str | None = None
    """Data set on the Hugging Face hub, or a folder."""
    dataset_config: str | None = None
    split: str = "train"
    eval_dataset_name: str | None = None
    """None: the evaluation rows are `eval_split` of the training data set, or held out from the training rows."""
    eval_dataset_config: str | None = None
    eval_split: str | None = None
    prompt_field: str = "prompt"
    answer_field: str | None = None
    """The rewards get it as `solution`."""
    ground_truth_field: str | None = None
    """The rewards get it as `ground_truth`."""
    system_prompt: str | None = None
    prefill: str | None = None
    """Begin of every answer, which the model continues; the rewards see it as part of the answer."""
    reward_functions: list[str | dict[str, Any]] = []
    """Rewards; the sum of several is divided by the sum of their weights."""
    reward_funcs: list[str | dict[str, Any]] = []
    """The same without the division."""
    temperature: float = Field(default=0.7, ge=0)
    max_tokens: int = Field(default=4096, ge=1)
    """Token limit of an answer."""
    min_tokens: int = Field(default=0, ge=0)
    """Token limit of an answer at step 0, if `length_warmup_steps` is set."""
    length_warmup_steps: int = Field(default=0, ge=0)
    """Steps in which the token limit rises from `min_tokens` to `max_tokens`."""


class DatasetEnv(RowsEnv):
    """Single turn, rewards by name."""

    name = "dataset"
    env_config_cls = AnyDatasetConfig
    config: AnyDatasetConfig

    async def setup(self) -> None:
        """Make the reward and load the rows."""
        self.reward = make_reward(self.config)
        self.reward_metrics: dict[str, float] = {}
        """Statistics of each reward in its last call."""
        self.reward.set_wandb_logger(SimpleNamespace(log=self.reward_metrics.update))
        await super().setup()

    def hub_rows(self, split: Split) -> HubRows | None:
        config = self.config
        if split == "train":
            name, part, subset = config.dataset_name, config.split, config.dataset_config
        else:
            name, part = config.eval_dataset_name, config.eval_split or "test"
            subset = config.eval_dataset_config
            if name is None and config.eval_split is not None:
                name, subset = config.dataset_name, subset or config.dataset_config
        return None if name is None else HubRows(path=name, config=subset, split=part)

    def parse_row(self, row: dict[str, Any]) -> dict[str, Any]:
        """Return the row; ConfigError if it lacks a configured field."""
        config = self.config
        for name in (config.prompt_field, config.answer_field, config.ground_truth_field):
            if name is not None and name not in row:
                raise ConfigError(f"a row has no field {name!r}; it has {', '.join(row)}")
        return row

    def prompt(self, row: dict[str, Any]) -> list[dict[str, Any]]:
        """Return the system prompt, the prompt and the begin of the answer, as far as configured."""
        texts = {
            "system": self.config.system_prompt,
            "user": str(row[self.config.prompt_field]),
            "assistant": self.config.prefill,
        }
        return [{"role": role, "content": text} for role, text in texts.items() if text]

    def example_answers(self, item: dict[str, Any]) -> list[str]:
        """Return the end of the answer field in a box, and all of it."""
        if self.config.answer_field is None:
            return []
        answer = str(item[self.config.answer_field])
        return [f"\\boxed{{{gold_answer(answer)}}}", answer]

    async def score(self, row: dict[str, Any], answer: str) -> Outcome:
        [value] = await self.rewards(row, [answer])
        return value

    async def score_group(self, row: dict[str, Any], rollouts: Sequence[Rollout]) -> list[Outcome]:
        """Return the rewards of a group's answers, computed together."""
        parts: dict[str, list[float]] = {}
        parts_of_rewards.set(parts)
        values = await self.rewards(row, [rollout.completion for rollout in rollouts])
        for name, of_part in parts.items():
            for rollout, value in zip(rollouts, of_part, strict=True):
                rollout.overrides[name] = value if math.isfinite(value) else None
        return list(values)

    async def rewards(self, row: dict[str, Any], answers: Sequence[str]) -> list[float]:
        """Compute the reward of every answer, in a thread."""
        config = self.config
        begin, num = config.prefill or "", len(answers)
        fields = {"solution": config.answer_field, "ground_truth": config.ground_truth_field}
        values = {key: [row[name]] * num for key, name in fields.items() if name is not None}
        texts = [begin + answer for answer in answers]
        return await asyncio.to_thread(
            self.reward, texts, item=[row] * num, config=config.model_dump(), **values
        )

    @asynccontextmanager
    async def chat_session(self, split: Split) -> AsyncIterator[ChatSession]:
        """Open a conversation with the token limit of this step."""
        limit = (
            self.config.max_tokens if split == "eval" else token_limit(self.config, self.curr_step)
        )
        async with super().chat_session(split) as chat:
            yield replace(chat, max_tokens=limit)

    def summarize(self, scores: Sequence[Sequence[float | None]]) -> dict[str, float]:
        metrics = super().summarize(scores)
        if judged := [score for row in scores for score in row if score is not None]:
            metrics |= {"eval/max_score": max(judged), "eval/min_score": min(judged)}
        return metrics

    def train_metrics(self) -> dict[str, float]:
        return self.reward_metrics


def make_reward(config: AnyDatasetConfig) -> RewardFunction:
    """Return the configured reward; ConfigError without one, or if both lists are given."""
    listed: Sequence[str | Mapping[str, Any]] = config.reward_functions or config.reward_funcs
    if not listed or (config.reward_functions and config.reward_funcs):
        raise ConfigError(
            "give --env.reward_functions or --env.reward_funcs, for example '[\"accuracy\"]'"
        )
    if len(listed) == 1:
        return registry.create(listed[0])
    return CombinedReward(listed, normalization="sum" if config.reward_functions else "none")


def token_limit(config: AnyDatasetConfig, step: int) -> int:
    """Return the token limit of an answer in training.

    >>> config = AnyDatasetConfig(max_tokens=1000, min_tokens=200, length_warmup_steps=4)
    >>> [token_limit(config, step) for step in (0, 1, 4, 9)]
    [200, 400, 1000, 1000]
    """
    if config.length_warmup_steps == 0:
        return config.max_tokens
    done = min(1.0, step / config.length_warmup_steps)
    return max(1, int(config.min_tokens + (config.max_tokens - config.min_tokens) * done))


if __name__ == "__main__":
    DatasetEnv.cli()
