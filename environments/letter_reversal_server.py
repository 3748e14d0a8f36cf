"""Reverse five letters: the environment of `make demo`, with generated rows.

The answer to `abcde>` is `edcba`; a completion scores 1 if it is exactly that and stopped by itself, else 0. The task
(rows, splits, judging) is in `atroposlib.utils.letter_reversal`.

Needs: nothing.

    python environments/letter_reversal_server.py serve --openai.base_url http://localhost:9001/v1 ...
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Sequence
from typing import Any

from atroposlib.envs.base import APIServerConfig, BaseEnv, BaseEnvConfig, ScoredDataGroup
from atroposlib.utils import letter_reversal as task

NUM_EVAL_PROMPTS = 200

LONG_WAIT_S = 20.0
"""Wait for a trainer's weights after which a warning is logged."""

logger = logging.getLogger(__name__)


class LetterReversalConfig(BaseEnvConfig):
    """The recipe of the demo: 32 prompts of 8 answers make one batch."""

    group_size: int = 8
    max_token_length: int = 32
    ensure_scores_are_not_same: bool = False
    """Off: groups of equal scores carry no gradient, but count in the mean reward."""
    strictly_on_policy: bool = True
    """Start no items until the engine has the weights of the trainer's latest step."""
    seed: int = 0
    """Seed of the training prompts."""


class LetterReversalEnv(BaseEnv):
    """Single turn, exact reward, endless rows."""

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
        """Create the endless iterator over the training split."""
        self.awaited_step, self.awaited_since = -1, 0.0
        self.training_prompts = task.prompts(task.Split.TRAIN, seed=self.config.seed)

    async def get_next_item(self) -> str | None:
        """Return the next training prompt; None until the trainer has published its latest weights."""
        if self.config.strictly_on_policy and self._published_version() < self.curr_step:
            self._warn_of_long_wait()
            return None
        return next(self.training_prompts)

    def _warn_of_long_wait(self) -> None:
        """Warn once per step if its weights take long; a client that only collects groups never publishes any."""
        now = time.monotonic()
        if self.awaited_step != self.curr_step:
            self.awaited_step, self.awaited_since = self.curr_step, now
        elif now - self.awaited_since > LONG_WAIT_S:
            self.awaited_since = math.inf
            logger.warning(
                "waiting for the weights of step %d: the trainer has announced version %d. A trainer that "
                "announces none, such as atropos-sft-gen, needs --env.strictly_on_policy false",
                self.curr_step,
                self._published_version(),
            )

    async def collect_trajectories(self, item: str) -> tuple[ScoredDataGroup, list[Any]]:
        """Sample one group of answers and judge each."""
        version = self._published_version()
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
            overrides=[_parts_of_score(item, choice) for choice in completion.choices],
            policy_version=_oldest_version(nodes, default=version),
        )
        return group, []

    def example_answers(self, item: str) -> list[str]:
        """Return a correct and an almost correct answer, for `check`."""
        return [task.answer_to(item), task.answer_to(item)[:-1]]

    async def evaluate(self, *args: Any, **kwargs: Any) -> None:
        """Log greedy accuracy on held-out prompts."""
        prompts = task.distinct_prompts(task.Split.HELDOUT, count=NUM_EVAL_PROMPTS, seed=0)

        async def measure(prompt: str) -> dict[str, Any]:
            completion = await self.server.chat_completion(
                messages=[{"role": "user", "content": prompt}],
                max_tokens=task.MAX_ANSWER_TOKENS,
                temperature=0.0,
                split="eval",
            )
            choice = completion.choices[0]
            return {
                "messages": _conversation(prompt, choice),
                "correct": _is_correct(prompt, choice),
            }

        samples = await self.evaluate_items(prompts, measure)
        share = sum(sample["correct"] for sample in samples) / len(samples)
        await self.evaluate_log({"eval/percent_correct": share}, samples=samples)

    def _published_version(self) -> int:
        """Return the policy version that the trainer last published; 0 before the first."""
        return self.status_dict.get("policy_version") or 0


def _oldest_version(nodes: Sequence[Any], *, default: int) -> int:
    """Return the oldest policy version of the nodes; `default` for nodes without one."""
    versions = [node.metadata.get("policy_version") for node in nodes]
    return min(default if version is None else version for version in versions)


def _is_correct(prompt: str, choice: Any) -> bool:
    return task.is_correct(
        prompt, choice.message.content or "", finished=choice.finish_reason == "stop"
    )


def _parts_of_score(prompt: str, choice: Any) -> dict[str, float]:
    """Return the two conditions of a score, which the viewer shows beside it."""
    is_reversed = (choice.message.content or "") == task.answer_to(prompt)
    return {"reversed": float(is_reversed), "stopped": float(choice.finish_reason == "stop")}


def _conversation(prompt: str, choice: Any) -> list[Any]:
    return [
        {"role": "user", "content": prompt},
        {"role": "assistant", "content": choice.message.content or ""},
    ]


if __name__ == "__main__":
    LetterReversalEnv.cli()
