"""Real clients against the proxy: ten turns are one sequence, whose trained tokens are those that were sampled.

`pytest -m agents tests/proxy -s` prints the table of `atroposlib/proxy/README.md`.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import os
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from helpers_proxy import Proxy, Thinker, call_text

from atroposlib.inference.harness import HarnessRequest
from atroposlib.scored_data import IGNORE_INDEX
from atroposlib.utils.local_server import serve_locally

pytestmark = pytest.mark.agents

CLIENTS = [
    *("openai_chat", "openai_responses", "anthropic_messages", "litellm_completion"),
    *("openai_agents", "langchain_openai", "pydantic_ai"),
    *("smolagents_code", "smolagents_tools"),
]
"""Those that also stream."""
SHELLS = {
    "codex": ("exec_command", "cmd"),
    "claude_code": ("Bash", "command"),
    "opencode": ("bash", "command"),
}
"""Command-line agents, which only stream: their tool that runs a shell command, and its parameter."""
NUM_TURNS = 10
NUM_SEQUENCES = {"dspy_react": NUM_TURNS}
"""Of the clients that write each turn into a prompt of its own; one for the others."""


def answer(client: str, turn: int) -> str:
    """Return what the model writes in a turn, without its thoughts."""
    is_last = turn == NUM_TURNS
    if client == "smolagents_code":
        code = 'final_answer("done")' if is_last else f"print({turn})"
        return f"Thought: go on.\n<code>\n{code}\n</code>"
    if client == "smolagents_tools" and is_last:
        return call_text("Oslo").replace("weather", "final_answer").replace("city", "answer")
    if client == "mini_swe_agent":
        command = "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT" if is_last else f"echo {turn}"
        return f"THOUGHT: go on.\n\n```mswea_bash_command\n{command}\n```\n"
    if client == "dspy_react":
        return dspy_answer(turn)
    if client in SHELLS and not is_last:
        tool, parameter = SHELLS[client]
        arguments = {parameter: f"echo {turn}", "description": "Echo."}
        call = json.dumps({"name": tool, "arguments": arguments})
        return f"Let me look.\n<tool_call>\n{call}\n</tool_call>"
    return "It is mild.\n" if is_last else f"Let me look.\n{call_text('Oslo')}"


def dspy_answer(turn: int) -> str:
    """Return the fields that `dspy.ReAct` asks for: eight calls, the end of the calls, the answer."""
    if turn == NUM_TURNS:
        fields = {"reasoning": "All is said.", "answer": "It is mild."}
    else:
        name, args = ("weather", '{"city": "Oslo"}') if turn < NUM_TURNS - 1 else ("finish", "{}")
        fields = {"next_thought": "go on", "next_tool_name": name, "next_tool_args": args}
    shown = [f"[[ ## {name} ## ]]\n{text}" for name, text in fields.items()]
    return "\n\n".join([*shown, "[[ ## completed ## ]]"])


def has_programs() -> bool:
    """Whether agents for the command line are installed, beside the virtual environment."""
    venv = Path(os.environ["ATROPOS_AGENTS_PYTHON"]).parent.parent
    return Path(f"{venv}-node").exists()


class Call(NamedTuple):
    """A generation at the engine."""

    num_prompt: int
    num_sampled: int


def logged(proxy: Proxy) -> list[Call]:
    """Return a list that gets each generation of the proxy's engine."""
    calls: list[Call] = []
    sample = proxy.engine._tokens_and_logprobs_completion_wrapper

    async def log(**kwargs: Any) -> Any:
        found = await sample(**kwargs)
        prompt, *rest = found
        calls.append(Call(len(prompt), len(rest[0][0])))
        return found

    proxy.engine._tokens_and_logprobs_completion_wrapper = log  # type: ignore[method-assign]
    return calls


@pytest.mark.parametrize("thinks", [False, True], ids=["plain", "thinks"])
@pytest.mark.parametrize(
    ("client", "way"),
    [
        *itertools.product(CLIENTS, ["whole", "stream"]),
        *itertools.product(["mini_swe_agent", "dspy_react"], ["whole"]),
        *itertools.product(SHELLS, ["stream"]),
    ],
)
async def test_ten_turns_are_one_sequence(client: str, thinks: bool, way: str) -> None:
    thought = "<think>\nI ponder.\n</think>\n\n" if thinks else ""
    if client in SHELLS and not has_programs():
        pytest.skip(
            "this machine has no npm: .ci/agents_env.sh left out agents for the command line"
        )
    turns = itertools.count(1)

    def respond(request: HarnessRequest) -> str:
        return thought + answer(client, next(turns))

    async with Proxy(respond) as proxy, serve_locally(proxy.app) as url:
        if thinks:
            proxy.sessions.tokenizer = Thinker()
        calls = logged(proxy)
        uuid = await proxy.open()
        process = await asyncio.create_subprocess_exec(
            os.environ["ATROPOS_AGENTS_PYTHON"],
            str(Path(__file__).with_name("agent_clients.py")),
            *(client, f"{url}/{uuid}/v1", uuid, way),
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            env={**os.environ, "MSWEA_SILENT_STARTUP": "1", "MSWEA_CONFIGURED": "true"},
        )
        said, errors = await asyncio.wait_for(process.communicate(), 120)
        assert process.returncode == 0, errors.decode()[-3000:]
        nodes = await proxy.nodes(uuid)
    sampled = sum(call.num_sampled for call in calls)
    trained = sum(label != IGNORE_INDEX for node in nodes for label in node["masked_tokens"])
    trained_tokens = sum(len(node["tokens"]) for node in nodes)
    lengths = sorted(call.num_prompt + call.num_sampled for call in calls)
    plain = sum(lengths[-len(nodes) :])
    version = said.decode().splitlines()[-1]
    ledger = f"{sampled} sampled, {trained} trained"
    print(f"\n| {client} {version} | {way} | {len(calls)} -> {len(nodes)} | {ledger} |")
    assert (len(calls), len(nodes)) == (NUM_TURNS, NUM_SEQUENCES.get(client, 1))
    assert sampled == trained
    assert trained_tokens <= 1.05 * plain
