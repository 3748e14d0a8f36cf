"""Call the right tools: one answer with thinking, then the expected calls.

The model gets a question and descriptions of tools, thinks in one `<think>` block and writes its calls. The reward is 1
if they match the expected ones, in any order, each with at least the expected arguments, of the same JSON types; a
missing, further, invalid or unclosed call is -1. No tool is run. If a whole group is right, shorter is better.

Data: NousResearch/XLAM-Atropos, or JSONL rows with `conversations` (`from`: system, human, gpt; `value`).
Needs: extras datasets.

    python environments/tool_calling_server.py process --env.dataset_path sample ...
"""

from __future__ import annotations

from typing import Any, NamedTuple

from atroposlib.envs.answers import THINK_FIRST, after_thinking_once
from atroposlib.envs.base import ScoredDataGroup
from atroposlib.envs.dataset_env import DatasetEnv, DatasetEnvConfig
from atroposlib.envs.gold_calls import calls_match
from atroposlib.envs.lengths import prefer_shorter
from atroposlib.envs.rows import HubRows
from atroposlib.envs.tool_env import ToolCall, hermes_call, parse_hermes_calls


class Request(NamedTuple):
    tools: str
    """The system message that describes the tools."""
    question: str
    calls: list[ToolCall]


class ToolCallingConfig(DatasetEnvConfig):
    group_size: int = 16
    max_token_length: int = 16384
    min_trained_tokens: int = 10
    temperature: float = 0.8
    eval_temperature: float | None = 1.0
    seed: int = 42


class SingleToolCallingEnv(DatasetEnv):
    """Single turn, reward by match."""

    name = "tool_calling"
    env_config_cls = ToolCallingConfig
    config: ToolCallingConfig
    train_data = HubRows(path="NousResearch/XLAM-Atropos", config="default")
    truncated_score = -1.0

    def parse_row(self, row: dict[str, Any]) -> Request | None:
        """Return the request; a row whose calls cannot be read is skipped."""
        said = {turn["from"]: turn["value"] for turn in reversed(row["conversations"])}
        calls = parse_hermes_calls(said["gpt"])
        readable = [call for call in calls if isinstance(call, ToolCall)]
        if not calls or len(readable) < len(calls):
            return None
        return Request(said.get("system", ""), said["human"], readable)

    def prompt(self, row: Request) -> list[dict[str, Any]]:
        system = f"{THINK_FIRST}\n\n{row.tools}".strip()
        return [
            {"role": "system", "content": system},
            {"role": "user", "content": row.question},
        ]

    def gold_answer(self, row: Request) -> str:
        calls = [hermes_call(call.name, **call.arguments) for call in row.calls]
        return "\n".join(["<think>These tools fit.</think>", *calls])

    def score(self, row: Request, answer: str) -> float:
        solution = after_thinking_once(answer)
        if solution is None or "<tool_call>" in solution.rpartition("</tool_call>")[2]:
            return -1.0
        return 1.0 if calls_match(parse_hermes_calls(solution), row.calls) else -1.0

    def shape_group(self, row: Request, group: ScoredDataGroup) -> ScoredDataGroup:
        """Prefer shorter answers if all are right."""
        return prefer_shorter(group, self.config.max_token_length)


if __name__ == "__main__":
    SingleToolCallingEnv.cli()
