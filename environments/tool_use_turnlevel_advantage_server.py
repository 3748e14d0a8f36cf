"""Use tools over several turns, with an advantage for every turn (MT-GRPO) instead of one for the conversation.

A recorded conversation is replayed as in `tool_use_multiturn_server.py`; the model writes all turns of the assistant.
A turn with calls earns 0.5 for its form and 0.5 for matching, -0.2 if it does not match; a text earns 1. The outcome o
is 1 if all turns are right. The advantage of turn t, given to every token that was sampled in it, is

    (r_t - mean) / std + lambda * (o - mean) / std

over the group, where turns that were not reached have r_t = 0. The score is the mean of the r_t, plus o, or -1 with
fewer than min_successful_turns right turns; groups without a positive score are dropped. Formula: arXiv 2505.11821.

Data: interstellarninja/hermes_reasoning_tool_use, or JSONL rows with `conversations`.
Needs: extras datasets.

    python environments/tool_use_turnlevel_advantage_server.py process --env.dataset_path sample ...
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
from pydantic import Field

from atroposlib.envs.base import ScoredDataGroup
from atroposlib.envs.multi_turn_env import Episode
from atroposlib.envs.replayed_tools import (
    Dialogue,
    GoldTurn,
    ReplayedToolsConfig,
    ReplayedToolsEnv,
    Scenario,
    Verdict,
)
from atroposlib.envs.rows import HubRows
from atroposlib.scored_data import IGNORE_INDEX

Floats: TypeAlias = npt.NDArray[np.float64]


class MTGRPOEnvConfig(ReplayedToolsConfig):
    group_size: int = 16
    num_eval_rows: int = 128
    max_gen_per_turn: int = 2048
    max_tool_call_turns_cap: int | None = 3
    min_tool_call_turns: int = 2
    validate_think_blocks: bool = True
    generate_all_gpt_turns: bool = True
    scenario_category: Scenario = "all"
    turn_level_advantage_lambda: float = 1.0
    """Weight of the outcome's advantage."""
    tool_execution_reward: float = 0.5
    """For calls in the required form."""
    tool_match_reward: float = 0.5
    summary_reward: float = 1.0
    min_successful_turns: int = Field(default=1, ge=0)


class BaseMTGRPOEnv(ReplayedToolsEnv):
    """Advantages per turn; override the two rewards for other tasks."""

    name = "base_mtgrpo"
    env_config_cls = MTGRPOEnvConfig
    config: MTGRPOEnvConfig

    def compute_turn_reward(self, turn: GoldTurn, verdict: Verdict) -> float:
        """Return r_t of a turn that was reached."""
        config = self.config
        if not turn.calls:
            return config.summary_reward * (verdict == "valid")
        form = config.tool_execution_reward * (verdict != "unparsable")
        match = config.tool_match_reward if verdict == "valid" else config.wrong_call_penalty
        return form + match

    def compute_outcome_reward(self, done_reason: str | None) -> float:
        """Return o of an episode."""
        return float(done_reason == "completed")

    def turn_reward(self, turn: GoldTurn, verdict: Verdict) -> float:
        """Return r_t."""
        return self.compute_turn_reward(turn, verdict)

    def final_score(self, episode: Episode) -> float:
        """Return the mean of the r_t plus o; -1 with too few right turns."""
        if episode.state["verdicts"].count("valid") < self.config.min_successful_turns:
            return -1.0
        num_turns = len(self.written_turns(episode.row))
        return sum(episode.rewards) / num_turns + self.compute_outcome_reward(episode.done_reason)

    def shape_group(self, row: Dialogue, group: ScoredDataGroup) -> ScoredDataGroup | None:
        """Add the advantages of the tokens; drop groups without a positive score."""
        if max(group["scores"]) <= 0:
            return None
        notes: list[dict[str, Any]] = group["overrides"]  # type: ignore[assignment]
        # The sequences of one episode share its notes.
        episodes = [list(same) for _, same in groupby(range(len(notes)), lambda i: id(notes[i]))]
        firsts = [notes[indexes[0]] for indexes in episodes]
        advantages = turn_advantages(
            [note["turn_rewards"] for note in firsts],
            [self.compute_outcome_reward(note["done_reason"]) for note in firsts],
            num_turns=len(self.written_turns(row)),
            outcome_weight=self.config.turn_level_advantage_lambda,
        )
        spread: list[list[float]] = []
        for indexes, of_turns in zip(episodes, advantages.tolist(), strict=True):
            masks = [group["masks"][i] for i in indexes]
            spread += spread_over_turns(masks, of_turns)
        group["advantages"] = spread
        return super().shape_group(row, group)


class MultiTurnToolUseTurnLevelAdvantageEnv(BaseMTGRPOEnv):
    """Tool use with reasoning."""

    name = "multiturn_tool_use_turnlevel_advantage"
    train_data = HubRows(path="interstellarninja/hermes_reasoning_tool_use")


def turn_advantages(
    turn_rewards: Sequence[Sequence[float]],
    outcomes: Sequence[float],
    *,
    num_turns: int,
    outcome_weight: float,
) -> Floats:
    """Return the advantages, [num_episodes][num_turns].

    >>> turn_advantages([[1.0, 1.0], [1.0]], [1.0, 0.0], num_turns=2, outcome_weight=0.5).tolist()
    [[0.5, 1.5], [-0.5, -1.5]]
    """
    rewards = np.zeros((len(turn_rewards), num_turns))
    for i, earned in enumerate(turn_rewards):
        rewards[i, : len(earned)] = earned
    return _normalized(rewards) + outcome_weight * _normalized(np.array(outcomes))[:, None]


def _normalized(
    values: Floats,
) -> Floats:
    """Subtract the mean of the group and divide by its standard deviation, unless that is 0."""
    std = values.std(axis=0)
    normalized: Floats = (values - values.mean(axis=0)) / np.where(std > 0, std, 1.0)
    return normalized


def spread_over_turns(
    masks: Sequence[Sequence[int]], advantages: Sequence[float]
) -> list[list[float]]:
    """Give every trained token the advantage of its turn, other tokens 0.

    `masks` are the labels of an episode's sequences; turn i is their i-th run of trained tokens.

    >>> spread_over_turns([[-100, 7, 7, -100, 8]], [0.5, -1.0])
    [[0.0, 0.5, 0.5, 0.0, -1.0]]
    """
    turns = iter(advantages)
    spread: list[list[float]] = []
    for mask in masks:
        spread.append([])
        for is_trained, labels in groupby(mask, key=lambda label: label != IGNORE_INDEX):
            advantage = next(turns) if is_trained else 0.0
            spread[-1] += [advantage for _ in labels]
    return spread


if __name__ == "__main__":
    MultiTurnToolUseTurnLevelAdvantageEnv.cli()
