"""RLAIF: answer in the style that a preference describes; a judge compares pairs of answers.

A comparison asks the judge for `num_votes` verdicts in each of the two orders: a judge that prefers a position gives a
tie. The score of an answer is its share of the votes minus one half, -0.5 to 0.5. An answer that was cut at the token
limit is not compared and gets -1; if only one answer of a group was not cut, it gets 1. A group of equal scores is
dropped.

With probability `steer_probability` the first answer of a group is sampled with the preference as a system message, so
that the style occurs before the model has learned it. That message is not trained: it is left out of the tokens.

Evaluation compares with the data set's own answers: `eval/percent_correct` is the share of comparisons won.

Data: allenai/WildChat, or JSONL rows with `conversation`, `messages` or `prompt`.
Needs: extra datasets; --judge.base_url for a judge other than the policy.

    python environments/rlaif_server.py serve --env.preference "Answer in rhymes." --judge.base_url ...
"""

from __future__ import annotations

import dataclasses
import itertools
import random
from collections.abc import Sequence
from typing import Any

from pydantic import Field

from atroposlib.envs.dataset_env import Outcome, Rollout, Split, number_of
from atroposlib.envs.judge_env import JudgeEnv, JudgeEnvConfig
from atroposlib.envs.rows import ChatPrompt, ChatRows
from atroposlib.inference.servers.sampling_notes import run_together
from atroposlib.inference.sessions.sequences import SequenceNode


class RLAIFConfig(JudgeEnvConfig):
    tokenizer_name: str = "NousResearch/DeepHermes-3-Llama-3-8B-Preview"
    group_size: int = 2
    max_token_length: int = 8192
    judge_temperature: float = Field(default=1.0, ge=0)
    num_votes: int = Field(default=3, ge=1)
    preference: str = (
        "Be direct and concrete: no preamble, no flattery, no repetition, short sentences."
    )
    """The style; the judge's criterion."""
    steer_probability: float = Field(default=0.05, ge=0, le=1)
    """Probability that the first answer of a group is sampled with the preference as a system message."""


class RLAIFEnv(ChatRows, JudgeEnv):
    """Single turn, judged in pairs."""

    name = "rlaif"
    env_config_cls = RLAIFConfig
    config: RLAIFConfig
    judging = "pairwise"
    success_score = 0.01
    """Anything above a tie."""

    def __init__(self, config: RLAIFConfig, *args: Any, **kwargs: Any) -> None:
        super().__init__(config, *args, **kwargs)
        self.rubric = f"Which answer follows this preference better? {config.preference}"  # type: ignore[misc]

    def request_of(self, row: ChatPrompt) -> str:
        return row.text()

    def reference(self, row: ChatPrompt) -> str | None:
        return row.answer

    async def roll_out(self, row: ChatPrompt, n: int, *, split: Split) -> list[Rollout]:
        """Sample answers, in training sometimes the first one with the preference as a system message."""
        draw = random.Random(f"{self.config.seed}:{row.text()}").random()  # the same when retried
        if split == "eval" or n < 2 or draw >= self.config.steer_probability:
            return await super().roll_out(row, n, split=split)
        self.counts["steered"] += 1
        style = {"role": "system", "content": self.config.preference}
        steered = row._replace(messages=[style, *row.messages])
        [first], others = await run_together(
            [super().roll_out(steered, 1, split=split), super().roll_out(row, n - 1, split=split)]
        )
        plain = others[0]
        nodes = [with_prompt_of(first.nodes[0], plain.nodes[0])]
        messages = [*plain.messages[:-1], first.messages[-1]]
        return [dataclasses.replace(first, nodes=nodes, messages=messages), *others]

    async def score_group(self, row: ChatPrompt, rollouts: Sequence[Rollout]) -> list[Outcome]:
        """Compare the answers that ended; those that were cut get -1."""
        ended = [rollout for rollout in rollouts if rollout.finish_reason != "length"]
        if len(ended) == 1 and len(rollouts) > 1:
            outcomes: list[Outcome] = [1.0]
        else:
            shares = map(number_of, await super().score_group(row, ended))
            outcomes = [None if share is None else share - 0.5 for share in shares]
        scores = iter(outcomes)
        return [-1.0 if each.finish_reason == "length" else next(scores) for each in rollouts]


def with_prompt_of(node: SequenceNode, other: SequenceNode) -> SequenceNode:
    """Return the sampled tokens of one sequence after the prompt of another; logprobs stay those of the sampling."""

    def num_prompt(each: SequenceNode) -> int:
        given = itertools.takewhile(lambda label: label == -100, each.masked_tokens)
        return sum(1 for _ in given)

    start, end = num_prompt(node), num_prompt(other)
    return node.model_copy(
        update={
            "full_text": "",
            "metadata": {**(node.metadata or {}), "weight_versions": None},
            "tokens": other.tokens[:end] + node.tokens[start:],
            "masked_tokens": other.masked_tokens[:end] + node.masked_tokens[start:],
            "logprobs": other.logprobs[:end] + node.logprobs[start:],
        }
    )


if __name__ == "__main__":
    RLAIFEnv.cli()
