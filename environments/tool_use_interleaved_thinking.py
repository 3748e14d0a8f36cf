"""Mathematics with tools inside the thinking: a calculator, Python and, if there is one, a search engine.

The model calls tools in its `<think>` block; each call is run, its result is added to the same message, and the model
continues. Python and the calculator run in the sandbox. The reward is 1 if the last box after the thinking holds the
right number, plus 0.2 if a call succeeded; else -1. Results of tools are not trained. Groups without a right answer are
dropped.

Data: nvidia/AceReason-Math, or JSONL rows with `problem` and `answer`; rows whose answer is not a number are skipped.
Needs: extras datasets.

    python environments/tool_use_interleaved_thinking.py process --env.dataset_path sample ...
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any, NamedTuple

from atroposlib.envs.answers import after_thinking_once
from atroposlib.envs.base import ScoredDataGroup
from atroposlib.envs.dataset_env import ABORTED, ChatSession, Outcome, Rollout, Split
from atroposlib.envs.math_answers import compare, last_box
from atroposlib.envs.multi_turn_env import Episode, in_turns
from atroposlib.envs.rows import HubRows
from atroposlib.envs.sandbox import SandboxLimits, run_code
from atroposlib.envs.search import SearchEngine
from atroposlib.envs.tool_env import (
    FAILED,
    Killable,
    ToolEnv,
    ToolEnvConfig,
    hermes_call,
    tool_from,
)

TOOL_USAGE_BONUS = 0.2
NUM_HITS = 5
"""Pages that one search returns."""
OPENING = "<think>\n"
"""Begins every answer."""
CALL_END = "</tool_call>"
SYSTEM = """\
Solve the problem. Think inside <think> </think> tags, then give the final number inside \\boxed{}.
While you think, you can call tools. Write a call as JSON; its result follows, and you continue to think:
<tool_call>
{"name": "calculator", "arguments": {"expr": "17 * 23"}}
</tool_call>
<tool_response>
391
</tool_response>
These are the tools, with the JSON schema of their arguments:
<tools>
%s
</tools>"""


def calculator(expr: str) -> str:
    """Value of an arithmetic expression in Python's notation; the functions of `math` are known."""
    return _output("import sys\nfrom math import *\nprint(eval(sys.stdin.read()))", stdin=expr)


def python_interpreter(code: str) -> str:
    """Output of a Python program; print what you want to see."""
    return _output(code)


def _output(code: str, stdin: str = "") -> str:
    result = run_code(code, stdin=stdin, limits=SandboxLimits(wall_s=5, output_bytes=10_000))
    if result.exit_code != 0:
        last_line = result.stderr.strip().rpartition("\n")[2]
        raise RuntimeError(last_line or result.reason)
    return result.stdout.strip()


class Problem(NamedTuple):
    text: str
    answer: str


class InterleavedConfig(ToolEnvConfig):
    group_size: int = 16
    max_token_length: int = 8192
    max_turns: int = 3
    max_gen_per_turn: int = 512
    temperature: float = 0.8
    seed: int = 42


class InterleavedInlineEnv(ToolEnv):
    """One message with calls inside its thinking."""

    name = "interleaved_inline"
    env_config_cls = InterleavedConfig
    config: InterleavedConfig
    runs_model_code = True
    train_data = HubRows(path="nvidia/AceReason-Math")
    tools = (Killable(calculator), Killable(python_interpreter))
    search_engine: SearchEngine | None = None
    """Adds a tool `web_search`."""

    def __init__(self, config: InterleavedConfig, *args: Any, **kwargs: Any) -> None:
        super().__init__(config, *args, **kwargs)
        if self.search_engine is not None:
            self.tools_by_name["web_search"] = tool_from(self.web_search)

    async def web_search(self, query: str) -> list[dict[str, str]]:
        """Find pages; returns their titles with the beginning of their texts."""
        assert self.search_engine is not None
        hits = await self.search_engine.search(query, limit=NUM_HITS)
        return [hit._asdict() for hit in hits]

    def parse_row(self, row: dict[str, Any]) -> Problem | None:
        """Return the problem; one without a number as its answer is skipped."""
        answer = str(row["answer"])
        return Problem(row["problem"], answer) if compare(answer, answer) else None

    def conversation(self, row: Problem) -> list[dict[str, Any]]:
        schemas = [tool.schema()["function"] for tool in self.tools_by_name.values()]
        return [
            {"role": "system", "content": SYSTEM % "\n".join(map(json.dumps, schemas))},
            {"role": "user", "content": row.text},
        ]

    def example_answers(self, item: Problem) -> list[Callable[[str], str]]:
        answer = f"That is it.</think> \\boxed{{{item.answer}}}"
        return [in_turns([hermes_call("calculator", expr="1 + 1"), answer])]

    async def roll_out(self, row: Problem, n: int, *, split: Split) -> list[Rollout]:
        """Run `n` episodes; the last sequence of each contains all its turns."""
        rollouts = await super().roll_out(row, n, split=split)
        for rollout in rollouts:
            rollout.nodes = rollout.nodes[-1:]
        return rollouts

    async def run_episode(self, episode: Episode, chat: ChatSession) -> Outcome:
        """Continue one message until it ends, and run the calls in its thinking."""
        opened = {"role": "assistant", "content": OPENING}
        asked, episode.messages = episode.messages, [*episode.messages, opened]
        max_tokens = chat.max_tokens
        while episode.done_reason is None:
            completion = await chat.ask(
                [*asked, dict(opened)], max_tokens=max_tokens, stop=[CALL_END]
            )
            choice = completion.choices[0]
            opened["content"] += choice.message.content or ""
            if choice.finish_reason == ABORTED:
                episode.done_reason = ABORTED
                return None
            episode.rewards.append(0.0)
            if choice.finish_reason == "length":
                episode.done_reason = "length"
            elif not has_open_call(opened["content"]):
                episode.done_reason = "answered"
            elif episode.num_turns > self.config.max_turns:
                episode.done_reason = "max_turns"
            else:
                opened["content"] += CALL_END
                added = f"\n<tool_response>\n{await self.result_of_last_call(episode)}\n</tool_response>\n"
                opened["content"] += added
                used = completion.usage.total_tokens if completion.usage is not None else 0
                max_tokens = self.room(used, [{"content": added}], chat.max_tokens)
                if max_tokens < 1:
                    episode.done_reason = "tokens"
        outcome: Outcome = await self.guarded(self.final_score, episode)
        return outcome

    async def result_of_last_call(self, episode: Episode) -> str:
        """Run the call at the end of the message."""
        _, opening, text = episode.messages[-1]["content"].rpartition("<tool_call>")
        calls = self.parse_calls(opening + text)
        result = await self.result_of(calls[0], episode)
        if not result.startswith(FAILED):
            episode.state["has_used_tool"] = True
        return result

    def final_score(self, episode: Episode) -> float:
        """Return 1 for the right number after the thinking, plus the bonus; else -1."""
        answer = after_thinking_once(episode.messages[-1]["content"])
        if answer is None or re.search(r"</?tool_(call|response)>", answer):
            return -1.0
        if not compare(episode.row.answer, last_box(answer)):
            return -1.0
        return 1.0 + (TOOL_USAGE_BONUS if episode.state.get("has_used_tool") else 0.0)

    def shape_group(self, row: Problem, group: ScoredDataGroup) -> ScoredDataGroup | None:
        """Drop groups without a right answer."""
        return group if max(group["scores"]) > 0 else None


def has_open_call(text: str) -> bool:
    """Whether a text ends in a call inside its thinking.

    >>> has_open_call('<think>a <tool_call>{"name": 1}'), has_open_call("<think>a</think> <tool_call>{}")
    (True, False)
    """
    return "<tool_call>" in text.rpartition(CALL_END)[2] and "</think>" not in text


if __name__ == "__main__":
    InterleavedInlineEnv.cli()
