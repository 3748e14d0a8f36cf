"""Reverse five letters: the environment of `make demo`, complete and with generated rows.

`abcde>` is answered by `edcba`; a completion scores 1 when it is exactly that and ended by itself,
else 0. The task itself (rows, splits, judging) is `atroposlib.utils.letter_reversal`.

    python environments/letter_reversal_server.py serve --openai.base_url http://localhost:9001/v1 ...
"""

from __future__ import annotations

from typing import Any

from pydantic import Field

from atroposlib.envs.base import APIServerConfig, BaseEnv, BaseEnvConfig, ScoredDataGroup
from atroposlib.utils import letter_reversal as task

NUM_EVAL_PROMPTS = 200


class LetterReversalConfig(BaseEnvConfig):
    """The recipe of the demo: 32 prompts of 8 answers make one batch."""

    group_size: int = 8
    max_token_length: int = 32
    ensure_scores_are_not_same: bool = Field(
        default=False,
        description="Off: groups of equal scores carry no gradient, but belong to the mean reward",
    )
    seed: int = Field(default=0, description="Seed of the training prompts")


class LetterReversalEnv(BaseEnv):
    """Single-turn, exactly verifiable, endless rows."""

    name = "letter_reversal"
    env_config_cls = LetterReversalConfig
    config: LetterReversalConfig

    @classmethod
    def config_init(cls) -> tuple[LetterReversalConfig, list[APIServerConfig]]:
        """Return the defaults: the local engine on its usual port."""
        server = APIServerConfig(
            model_name="demo", base_url="http://localhost:9001/v1", server_type="vllm"
        )
        return LetterReversalConfig(tokenizer_name="demo", use_wandb=False), [server]

    async def setup(self) -> None:
        """Start the endless rows of the training split."""
        self.training_prompts = task.prompts(task.Split.TRAIN, seed=self.config.seed)

    async def get_next_item(self) -> str:
        """Return the next training prompt."""
        return next(self.training_prompts)

    async def collect_trajectories(self, item: str) -> tuple[ScoredDataGroup, list[Any]]:
        """Sample one group of answers and judge each."""
        async with self.server.managed_server(tokenizer=self.tokenizer) as managed:
            completion = await managed.chat_completion(
                messages=[{"role": "user", "content": item}],
                n=self.config.group_size,
                max_tokens=task.MAX_ANSWER_TOKENS,
                temperature=1.0,
            )
            nodes = managed.get_state()["nodes"]
        group = ScoredDataGroup(
            tokens=[node.tokens for node in nodes],
            masks=[node.masked_tokens for node in nodes],
            inference_logprobs=[node.logprobs for node in nodes],
            scores=[float(_is_correct(item, choice)) for choice in completion.choices],
            messages=[_conversation(item, choice) for choice in completion.choices],
        )
        return group, []

    async def evaluate(self, *args: Any, **kwargs: Any) -> None:
        """Log greedy accuracy on held-out prompts."""
        prompts = task.distinct_prompts(task.Split.HELDOUT, count=NUM_EVAL_PROMPTS, seed=0)
        num_correct = 0
        for prompt in prompts:
            completion = await self.server.chat_completion(
                messages=[{"role": "user", "content": prompt}],
                max_tokens=task.MAX_ANSWER_TOKENS,
                temperature=0.0,
                split="eval",
            )
            num_correct += _is_correct(prompt, completion.choices[0])
        accuracy = num_correct / len(prompts)
        await self.evaluate_log({"eval/percent_correct": accuracy})


def _is_correct(prompt: str, choice: Any) -> bool:
    return task.is_correct(
        prompt, choice.message.content or "", finished=choice.finish_reason == "stop"
    )


def _conversation(prompt: str, choice: Any) -> list[Any]:
    return [
        {"role": "user", "content": prompt},
        {"role": "assistant", "content": choice.message.content or ""},
    ]


if __name__ == "__main__":
    LetterReversalEnv.cli()
