"""Use tools over several turns of a recorded conversation, whose recorded results follow right calls.

The model writes the calls; texts between them are recorded, too, unless --env.generate_all_gpt_turns true. A wrong call
ends the episode. With c of N turns right, the reward is c / N, plus 0.5 if all are, minus 0.2 for a wrong one; nothing
above 0, or fewer than two right turns of a conversation with the user, is -1. With --env.scenario_category relevance no
tool fits: 1 for a reply without a call that apologizes or asks (0.1 for each), else -1. If all is right, shorter is
better.

Data: interstellarninja/toolace_hermes_sequential_tool_use, or JSONL rows with `conversations` (`from`: system, human,
gpt, tool; `value`).
Needs: extras datasets.

    python environments/tool_use_multiturn_server.py process --env.dataset_path sample ...
"""

from __future__ import annotations

import re
from collections.abc import Callable

from atroposlib.envs.multi_turn_env import Episode
from atroposlib.envs.replayed_tools import (
    Dialogue,
    ReplayedToolsConfig,
    ReplayedToolsEnv,
    scenario_of,
)
from atroposlib.envs.rows import HubRows

COMPLETION_BONUS = 0.5
APOLOGY = re.compile(
    r"\b(?:sorry|apologi[sz]e|apologies|unfortunately|unable|cannot|can't)\b", re.I
)
REQUESTS = [
    (r"\b(?:please|could you|can you)\b", r"\b(?:provide|specify|share|tell|clarify)\b"),
    (r"\bneed\b", r"\b(?:information|details)\b"),
]
"""Words of a request for information: one, and anywhere after it another."""
RELEVANCE_BONUS = 0.1


class MultiTurnEnvConfig(ReplayedToolsConfig):
    group_size: int = 8
    num_eval_rows: int = 128


class MultiTurnToolCallingEnv(ReplayedToolsEnv):
    """One reward for the whole conversation."""

    name = "multiturn_tool_use"
    env_config_cls = MultiTurnEnvConfig
    config: MultiTurnEnvConfig
    train_data = HubRows(path="interstellarninja/toolace_hermes_sequential_tool_use")

    def final_score(self, episode: Episode) -> float:
        """Return the reward of the conversation."""
        dialogue: Dialogue = episode.row
        verdicts = episode.state["verdicts"]
        if not dialogue.num_tool_turns:
            return relevance_score(episode.messages[-1]["content"]) if "valid" in verdicts else -1.0
        num_right = sum(
            bool(turn.calls) and verdict == "valid"
            for turn, verdict in zip(self.written_turns(dialogue), verdicts, strict=False)
        )
        if scenario_of(dialogue.turns) == "multiturn" and num_right < 2:
            return -1.0
        score = num_right / dialogue.num_tool_turns
        score += COMPLETION_BONUS * (num_right == dialogue.num_tool_turns)
        score += self.config.wrong_call_penalty * (verdicts[-1:] not in ([], ["valid"]))
        return score if score > 0 else -1.0

    def example_answers(self, item: Dialogue) -> list[Callable[[str], str]]:
        """Return the recorded turns; for a question that no tool fits, a reply with both bonuses."""
        if item.num_tool_turns:
            return super().example_answers(item)
        return [lambda prompt: "<think>None fits.</think> I am sorry. Please provide more details."]


def relevance_score(reply: str) -> float:
    """Return the score of a reply without a call: it must apologize or ask for information.

    >>> relevance_score("I am sorry, none of my tools can do this."), relevance_score("It is 4.")
    (1.1, -1.0)
    """
    reply = reply.rpartition("</think>")[2]
    asks = False
    for first, second in REQUESTS:  # from the first one on: one regex with .* takes quadratic time
        found = re.search(first, reply, re.I)
        asks |= found is not None and re.search(second, reply[found.end() :], re.I) is not None
    num_found = asks + (APOLOGY.search(reply) is not None)
    return 1.0 + RELEVANCE_BONUS * num_found if num_found else -1.0


if __name__ == "__main__":
    MultiTurnToolCallingEnv.cli()
