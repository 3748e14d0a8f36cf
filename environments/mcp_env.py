"""Call the right tool of a real MCP server, then answer with what it returned.

The model sees the tools of the configured servers. A call of the expected tool with at least the expected arguments is
sent to the server; any other ends the episode before it reaches the server. The reward is 1 for this one call and, if
the row has an `answer`, for giving it inside `<answer>` tags afterwards; else -1.

Data: the sample, for the server `samples/mcp_server.py`. Your own: JSONL rows with `user_prompt_text`,
`expected_mcp_call` (`tool_name`, `arguments`) and optionally `answer`, and --env.servers.
Needs: extras mcp.

    python environments/mcp_env.py process ...
    python environments/mcp_env.py serve --env.servers '["python shop.py", "http://localhost:8000/mcp"]' ...
"""

from __future__ import annotations

import shlex
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from pydantic import Field

from atroposlib.envs.answers import only_tagged, solution_of
from atroposlib.envs.gold_calls import calls_match
from atroposlib.envs.mcp_tools import McpServer
from atroposlib.envs.multi_turn_env import Episode, Step, in_turns
from atroposlib.envs.tool_env import ToolCall, ToolEnv, ToolEnvConfig, hermes_call
from atroposlib.errors import ConfigError

SAMPLE_SERVER = McpServer(
    command=sys.executable,
    args=(str(Path(__file__).with_name("samples") / "mcp_server.py"),),
    env={"PYTHONPATH": ":".join(entry for entry in sys.path if entry)},
)


class Task(NamedTuple):
    question: str
    call: ToolCall
    answer: str | None
    """None: the call alone is judged."""


class McpConfig(ToolEnvConfig):
    group_size: int = 32
    max_token_length: int = 16384
    max_turns: int = 2
    min_trained_tokens: int = 10
    temperature: float = 0.8
    seed: int = 42
    dataset_path: str | None = "sample"
    servers: list[str] = Field(default_factory=list)
    """Commands, or URLs of running servers; none: the server of the sample."""


class McpEnv(ToolEnv):
    """One call, checked before it is made."""

    name = "mcp"
    env_config_cls = McpConfig
    config: McpConfig
    system_prompt = "Answer the question with one call of a tool. Give the result inside <answer> </answer> tags."
    unfinished_score = -1.0

    def __init__(self, config: McpConfig, *args: Any, **kwargs: Any) -> None:
        super().__init__(config, *args, **kwargs)
        self.mcp_servers = [server_of(text) for text in config.servers] or [SAMPLE_SERVER]

    async def setup(self) -> None:
        """Connect to the servers, load the rows and check that their tools exist."""
        await super().setup()
        expected = {row.call.name for row in [*self.train_rows, *self.eval_rows]}
        if missing := expected - set(self.tools_by_name):
            raise ConfigError(
                f"the rows expect the tools {sorted(missing)}; the MCP servers have {sorted(self.tools_by_name)}"
            )

    def parse_row(self, row: dict[str, Any]) -> Task:
        """Return the task; arguments that are null, as table formats add them, are not expected."""
        call = row["expected_mcp_call"]
        arguments = {key: value for key, value in call["arguments"].items() if value is not None}
        answer = row.get("answer")
        return Task(
            row["user_prompt_text"],
            ToolCall(name=call["tool_name"], arguments=arguments),
            None if answer is None else str(answer).strip(),
        )

    def prompt(self, row: Task) -> str:
        return row.question

    def example_answers(self, item: Task) -> list[Callable[[str], str]]:
        call = hermes_call(item.call.name, **item.call.arguments)
        return [in_turns([call, f"<answer>{item.answer}</answer>"])]

    async def step(self, episode: Episode, answer: str) -> Step:
        """Make the expected call, or judge the final answer."""
        task: Task = episode.row
        calls = self.parse_calls(answer)
        has_called = episode.num_turns > 0
        if calls and not has_called and calls_match(calls, [task.call]):
            reply = await super().step(episode, answer)
            return reply if task.answer else Step(reward=1.0, done=True, reason="called")
        is_right = has_called and not calls and given(answer) == (task.answer or "").lower()
        reason = "wrong_call" if calls else "answered"
        return Step(reward=1.0 if is_right else -1.0, done=True, reason=reason)


def given(text: str) -> str | None:
    """Return the answer in the only tag after the thinking, in lower case."""
    answer = only_tagged(solution_of(text), "answer")
    return None if answer is None else answer.lower()


def server_of(text: str) -> McpServer:
    """Return the server at a URL, or the one that a command starts.

    >>> server_of("npx -y some-server").args
    ('-y', 'some-server')
    """
    if text.startswith(("http://", "https://")):
        return McpServer(url=text)
    command, *args = shlex.split(text)
    return McpServer(command=command, args=tuple(args))


if __name__ == "__main__":
    McpEnv.cli()
