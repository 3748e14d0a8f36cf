"""Reward model: answer requests; a classification model with one output scores every answer.

The model is loaded into this process and scores the answers of a group in batches. It runs in a thread of its own, so
that the event loop stays free and only one batch is scored at a time. The score is the model's output, which has no
bounds: the trainer compares scores within a group. For a reward model behind an API, extend `JudgeEnv` with
`judging = "reward_model"`.

Data: allenai/WildChat, or JSONL rows with `conversation`, `messages` or `prompt`.
Needs: extras datasets, trainer.

    python environments/reward_model_server.py serve --env.reward_model Skywork/Skywork-Reward-V2-Qwen3-0.6B
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from pydantic import Field

from atroposlib.envs.dataset_env import DatasetEnv, DatasetEnvConfig, Outcome, Rollout
from atroposlib.envs.rows import ChatPrompt, ChatRows
from atroposlib.errors import ConfigError, require
from atroposlib.utils.tokenizers import load_tokenizer

T = TypeVar("T")
Messages = list[dict[str, Any]]


class RewardModelConfig(DatasetEnvConfig):
    tokenizer_name: str = "Qwen/Qwen2.5-1.5B-Instruct"
    group_size: int = 8
    max_token_length: int = 2048
    reward_model: str = "Skywork/Skywork-Reward-V2-Qwen3-0.6B"
    """Name or path of a sequence-classification model with one label, and its tokenizer with a chat template."""
    reward_device: str = "cpu"
    """Device of torch, such as cuda:1."""
    reward_batch_size: int = Field(default=8, ge=1)
    """Conversations per forward pass."""


class RewardModelEnv(ChatRows, DatasetEnv):
    """Single turn, scored by a model."""

    name = "reward_model"
    env_config_cls = RewardModelConfig
    config: RewardModelConfig
    success_score = 0.0

    def __init__(self, config: RewardModelConfig, *args: Any, **kwargs: Any) -> None:
        super().__init__(config, *args, **kwargs)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="reward_model")
        self._model: RewardModel | None = None

    async def setup(self) -> None:
        name, device = self.config.reward_model, self.config.reward_device
        self._model = await self._in_thread(RewardModel, name, device)
        await super().setup()

    async def _in_thread(self, function: Callable[..., T], *args: Any) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._thread, function, *args)

    async def score_group(self, row: ChatPrompt, rollouts: Sequence[Rollout]) -> list[Outcome]:
        """Score the answers in batches."""
        assert self._model is not None
        size = self.config.reward_batch_size
        scores: list[Outcome] = []
        for start in range(0, len(rollouts), size):
            batch = [rollout.messages for rollout in rollouts[start : start + size]]
            scores += await self._in_thread(self._model.scores_of, batch)
        return scores

    async def close(self) -> None:
        """End the thread, after the batch that it scores."""
        await asyncio.to_thread(self._thread.shutdown)
        await super().close()


class RewardModel:
    """A sequence-classification model with one output."""

    def __init__(self, name: str, device: str) -> None:
        transformers = require("transformers", extra="trainer")
        self._torch = require("torch", extra="trainer")
        self._tokenizer = load_tokenizer(name, flag="--env.reward_model")
        model = transformers.AutoModelForSequenceClassification.from_pretrained(name)
        if model.config.num_labels != 1:
            raise ConfigError(
                f"--env.reward_model {name} has {model.config.num_labels} labels; it must have one, the reward"
            )
        if self._tokenizer.pad_token is None:
            self._tokenizer.pad_token = self._tokenizer.eos_token
        model.config.pad_token_id = self._tokenizer.pad_token_id
        self._model = model.to(device).eval()

    def scores_of(self, conversations: Sequence[Messages]) -> list[float]:
        """Return the score of each conversation, in one forward pass."""
        texts = [
            self._tokenizer.apply_chat_template(messages, tokenize=False)
            for messages in conversations
        ]
        inputs = self._tokenizer(
            texts, return_tensors="pt", padding=True, add_special_tokens=False
        ).to(self._model.device)
        with self._torch.inference_mode():
            scores: list[float] = self._model(**inputs).logits[:, 0].float().tolist()
        return scores


if __name__ == "__main__":
    RewardModelEnv.cli()
