"""Environments as a taskset of verifiers v1, with the id `atropos-taskset`.

    vf-eval atropos-taskset --env.taskset.environment wordle --env.taskset.flags '{"tokenizer_name": "M"}' -m M

verifiers imports a taskset as a top-level module. Task k is the k-th item of the environment. The harness runs its
stepped episode (`atroposlib.envs.stepwise`) in this process and sends its requests to the endpoint of verifiers, which
samples and records the tokens to train. The reward is the environment's score; without a score the rollout fails.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import AsyncExitStack
from contextvars import ContextVar
from typing import Any, ClassVar

import httpx
import verifiers.v1 as vf
from pydantic import Field

from atroposlib.cli.environments import build
from atroposlib.envs.stepwise import Answer, EpisodeEnd, Request, SteppedEnv

__all__ = ["AtroposEnv", "AtroposHarness", "AtroposTaskset"]

_stepped: ContextVar[SteppedEnv] = ContextVar("_stepped")
"""The environment of the running episode: a harness does not know its `vf.Env`."""


class AtroposTasksetConfig(vf.TasksetConfig):  # type: ignore[misc]
    """Settings of the taskset."""

    environment: str = ""
    """Its name in `atropos-env list`, or a Python file."""
    flags: dict[str, Any] = Field(default_factory=dict)
    """Flags of its command `process`, without dashes: {"tokenizer_name": "...", "env.max_turns": 4}."""
    num_tasks: int | None = Field(default=None, ge=1)
    """Number of tasks; None: without end."""


class AtroposData(vf.TaskData):  # type: ignore[misc]
    """One item."""

    environment: str
    seed: int
    """Number of the item."""


class AtroposTask(vf.Task[AtroposData]):  # type: ignore[misc]
    """One item; the harness records its reward."""


class AtroposTaskset(vf.Taskset[AtroposTask, AtroposTasksetConfig]):  # type: ignore[misc]
    """The items of an environment, by their numbers."""

    def __init__(self, config: AtroposTasksetConfig) -> None:
        super().__init__(config)
        self.INFINITE = config.num_tasks is None

    def load(self) -> Iterator[AtroposTask]:
        """Yield the tasks; needs no data."""
        numbers = itertools.count() if self.INFINITE else range(self.config.num_tasks)
        for seed in numbers:
            name = self.config.environment
            # verifiers requires a prompt; the environment makes the real one when its data is loaded.
            label = f"{name}#{seed}"
            data = AtroposData(name=label, prompt=label, environment=name, seed=seed)
            yield AtroposTask(data, self.config.task)


class AtroposEnvConfig(vf.EnvConfig):  # type: ignore[misc]
    """The policy's seat; the environment's code runs in this process."""

    agent: vf.AgentConfig = vf.AgentConfig(runtime=vf.SubprocessConfig())


class AtroposEnv(vf.Env[AtroposEnvConfig]):  # type: ignore[misc]
    """Sets the environment up once for all episodes."""

    def __init__(self, config: AtroposEnvConfig) -> None:
        super().__init__(config)
        self._open = AsyncExitStack()
        self._running: SteppedEnv | None = None

    async def start(self) -> None:
        """Construct the environment and load its data."""
        taskset = self.config.taskset
        env = build(taskset.environment, taskset.flags, prog="atropos-taskset")
        self._running = await self._open.enter_async_context(SteppedEnv(env))

    async def stop(self) -> None:
        """Close the environment."""
        await self._open.aclose()

    async def run(self, task: vf.Task, agents: vf.Agents) -> None:
        """Run the one episode of a task."""
        assert self._running is not None
        _stepped.set(self._running)
        await agents.agent.run(task)


class AtroposHarness(vf.Harness[vf.HarnessConfig]):  # type: ignore[misc]
    """Runs the environment's own code as the program that talks to the policy."""

    EXECUTES_CODE: ClassVar[bool] = False
    NEEDS_CONTAINER: ClassVar[bool] = False

    async def launch(
        self,
        ctx: vf.ModelContext,
        trace: vf.Trace,
        runtime: vf.Runtime,
        endpoint: str,
        secret: str,
        mcp_urls: dict[str, str],
        data: AtroposData,
    ) -> vf.ProgramResult:
        """Play the episode of an item and record its reward."""
        stepped = _stepped.get(None)
        if stepped is None:
            raise vf.HarnessError("atropos-taskset runs in its own environment: leave out env.id")
        episode = stepped.episode()
        try:
            async with httpx.AsyncClient(
                timeout=None, headers={"Authorization": f"Bearer {secret}"}
            ) as client:
                policy = _Policy(client, f"{endpoint}/chat/completions", ctx.model, trace, stepped)
                turn = await episode.reset(data.seed)
                while isinstance(turn, Request):
                    turn = await episode.step(await policy.answer(turn))
        finally:
            await episode.close()
        _record(turn, trace)
        return vf.ProgramResult(exit_code=0, stdout="", stderr="")


class _Policy:
    """Samples through verifiers' endpoint."""

    def __init__(
        self,
        client: httpx.AsyncClient,
        url: str,
        model: str,
        trace: vf.Trace,
        stepped: SteppedEnv,
    ) -> None:
        self._client = client
        self._url = url
        self._model = model
        self._trace = trace
        self._tokenizer = stepped.env.tokenizer
        self._said: dict[str, dict[str, Any]] = {}
        """Text of an answer -> verifiers' message, which may have its tool calls parsed. Its tokens are found by it."""

    async def answer(self, request: Request) -> Answer:
        """Sample the answer to a request."""
        if not request.messages or request.messages[-1]["role"] == "assistant":
            raise vf.HarnessError("the environment continues a text; verifiers samples whole turns")
        body = {"model": self._model, "messages": [*map(self._known, request.messages)]}
        if request.tools:
            body["tools"] = request.tools
        response = await self._client.post(self._url, json={**body, **request.sampling})
        if response.is_error:
            raise vf.HarnessError(f"{response.status_code} of the endpoint: {response.text:.500}")
        choice = response.json()["choices"][0]
        message = choice["message"]
        node = self._trace.nodes[self._trace.calls[-1].node]
        tokens = [t for t, is_sampled in zip(node.token_ids, node.mask, strict=True) if is_sampled]
        if tokens:
            text = self._tokenizer.decode(tokens, skip_special_tokens=True)
            answer = Answer(
                token_ids=tokens, logprobs=node.logprobs, finish_reason=choice["finish_reason"]
            )
        else:  # an API without token ids
            text = message.get("content") or ""
            if message.get("reasoning_content"):
                text = f"<think>{message['reasoning_content']}</think>{text}"
            answer = Answer(text=text)
        self._said[text] = message
        return answer

    def _known(self, message: dict[str, Any]) -> dict[str, Any]:
        if message["role"] != "assistant":
            return message
        return self._said.get(message.get("content") or "", message)


def _record(end: EpisodeEnd, trace: vf.Trace) -> None:
    if end.reward is None:
        raise vf.TaskError(end.reason)
    trace.record_reward("score", end.reward)
