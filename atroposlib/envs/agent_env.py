"""`AgentEnv`: agents that were not written for training. Define `load_rows`, `run_agent` and `score`.

Every rollout is one session of a proxy on this machine's loopback. The agent gets the session's base URL and key as it
would get OpenAI's or Anthropic's, and talks to the policy; the tokens of all its conversations are trained. The first
rollout starts the proxy and `close` stops it; over HTTP an agent can reach only its own session. With `proxy_url`, the
sessions are opened at that proxy instead. Temperature and top_p are the environment's; other parameters that change the
sampling distribution are dropped, because the logprobs would not match it. Hostile agents are not contained: run them
in a container.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import secrets
from abc import abstractmethod
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import Any, ClassVar

from pydantic import Field

from atroposlib.envs.base import BaseEnv, BaseEnvConfig
from atroposlib.envs.child_variables import child_variables, reaching_loopback
from atroposlib.envs.dataset_env import (
    ABORTED,
    DatasetEnv,
    DatasetEnvConfig,
    Outcome,
    Rollout,
    Row,
    Split,
    awaited,
)
from atroposlib.envs.keeper import kill_group
from atroposlib.envs.rewards import RewardFailure
from atroposlib.envs.rollouts import noting
from atroposlib.envs.tool_env import call_function
from atroposlib.errors import EngineError, EnvError
from atroposlib.inference.servers.sampling_notes import item_notes, note_sampling, run_together
from atroposlib.inference.sessions.proxy_client import create_proxy_session
from atroposlib.inference.sessions.sequences import SequenceNode, ledger_of, num_sampled, train_once
from atroposlib.proxy.command import create_app
from atroposlib.proxy.sessions import SessionLimits, SessionOptions, Sessions
from atroposlib.utils.local_server import serve_locally
from atroposlib.utils.off_loop import off_loop

logger = logging.getLogger(__name__)

_TAIL_CHARS = 2000


class AgentEnvConfig(DatasetEnvConfig):
    agent_timeout_s: float = Field(default=300.0, gt=0)
    """Seconds one run of the agent may take."""
    tool_parser: str | None = "hermes"
    """Format of tool calls: hermes, llama3_json, mistral, qwen3_coder, deepseek_v3, ...; None leaves them as text."""
    max_context_tokens: int = Field(default=0, ge=0)
    """Token limit of one conversation; above it the agent gets an error. 0: the trainer's limit, if known."""
    max_agent_output_bytes: int = Field(default=2**20, ge=1)
    """Limit of `run_command` for each of a program's stdout and stderr; more is a failure."""


class AgentFailed(Exception):
    """The agent gave no answer: it crashed, gave up or timed out."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentSession:
    """The proxy session of one run of the agent."""

    base_url: str
    """Ends in /v1, as for OpenAI's SDK; remove it for Anthropic's."""
    api_key: str
    fetch_nodes: Callable[[], list[SequenceNode] | Awaitable[list[SequenceNode]]]
    engine_errors: Sequence[EngineError] = ()
    """Engine failures returned to the agent; empty if unknown (remote proxy)."""
    last_messages: Callable[[], list[dict[str, Any]]] = list
    """Returns the conversation that the agent continued last; [] if unknown (remote proxy)."""


class AgentEnv(DatasetEnv):
    """Tasks for agents."""

    env_config_cls: ClassVar[type[BaseEnvConfig]] = AgentEnvConfig
    config: AgentEnvConfig
    judges_text = False

    agent_failure_score: ClassVar[float | None] = None
    """Score of a run in which the agent failed. None: no score, see `on_reward_failure`."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._proxy = AsyncExitStack()
        self._sessions: Sessions | None = None
        self._url = ""
        self._starting = asyncio.Lock()  # only one rollout starts the proxy
        self._launching = asyncio.Lock()
        """Each start of a program blocks the event loop: one at a time, others run in between."""

    @abstractmethod
    def run_agent(self, row: Row, base_url: str, api_key: str) -> Any:
        """Run the agent on a task and return its answer for `score`.

        A coroutine, or a plain function, which runs in its own thread. After `agent_timeout_s` a coroutine is cancelled
        (`run_command` then kills the program); a thread keeps running, and its next request is refused.
        """

    def choose_sequences(
        self, row: Row, nodes: list[SequenceNode], answer: Any
    ) -> list[SequenceNode]:
        """Return the token sequences to train, out of those of all the agent's conversations.

        Several conversations (sub-agents, a shortened history) give several sequences with the same score. Called in a
        thread: there may be millions of tokens.
        """
        return train_once(nodes)

    async def run_command(
        self,
        argv: Sequence[str],
        *,
        base_url: str,
        api_key: str,
        stdin: str = "",
        env: Mapping[str, str] | None = None,
        cwd: str | None = None,
    ) -> str:
        """Run a program as the agent and return its stdout.

        It gets base URL and key in the variables that the SDKs of OpenAI and Anthropic read (`agent_variables`), and of
        this process's only `child_variables`. Raises AgentFailed if the exit code is not 0 (with the end of its stderr)
        or it prints too much. Its process group, also what it left running, is killed when it ends or this call is
        cancelled.
        """
        async with self._launching:
            variables = agent_variables(base_url, api_key, self.config.child_variables)
            process, transport = await _start(argv, env={**variables, **(env or {})}, cwd=cwd)
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stderr is not None
        limit = self.config.max_agent_output_bytes
        try:
            _, printed, errors = await run_together(
                [
                    _write(process.stdin, stdin.encode()),
                    _read(process.stdout, limit),
                    _read(process.stderr, limit),
                ]
            )
            code = await process.wait()
        finally:
            kill_group(process.pid)
            transport.close()  # else wait() would wait for the end of output that is not read
            await process.wait()
        if code != 0:
            tail = errors.decode("utf-8", "replace").strip()[-_TAIL_CHARS:]
            raise AgentFailed(f"{argv[0]} ended with exit code {code}: {tail}")
        return printed.decode("utf-8", "replace")

    @asynccontextmanager
    async def agent_session(self, split: Split = "train") -> AsyncIterator[AgentSession]:
        """Open a session for one run of the agent, and close it afterwards."""
        trained = max(0, self.max_token_len - 1)
        options: dict[str, Any] = {
            "max_tokens": self.config.max_token_length,
            "max_context_tokens": self.config.max_context_tokens or trained or None,
            # Override the agent's choice.
            "sampling": {"temperature": self._temperature(split), "top_p": 1.0},
            "keeps_distribution": True,
            "split": split,
        }
        if self.server.use_proxy:
            # The agent's requests are answered elsewhere.
            note_sampling({**options["sampling"], "split": split})
            # The agent knows the uuid and must not be able to drop its sequences.
            options["owner_key"] = secrets.token_urlsafe()
            remote = await create_proxy_session(
                str(self.server.proxy_url),
                tool_parser=self.config.tool_parser,
                options=options,
                counts=self.server.servers[0].broken_prefixes,
            )

            async def fetch() -> list[SequenceNode]:
                state = await remote.fetch_state()
                nodes: list[SequenceNode] = state["nodes"]
                return nodes

            try:
                yield AgentSession(
                    base_url=remote.get_url(), api_key=remote.session_uuid, fetch_nodes=fetch
                )
            finally:
                await remote.cleanup()
            return
        sessions = await self._local_sessions()
        session = await sessions.open(
            SessionOptions(
                tool_parser=self.config.tool_parser, needs_tokens=split == "train", **options
            )
        )

        try:
            yield AgentSession(
                base_url=f"{self._url}/{session.uuid}/v1",
                api_key=session.uuid,
                fetch_nodes=session.nodes,
                engine_errors=session.engine_errors,
                last_messages=lambda: session.last_messages,
            )
        finally:
            await sessions.close(session.uuid)

    async def roll_out(self, row: Row, n: int, *, split: Split) -> list[Rollout]:
        """Run `n` agents concurrently. Raises EnvError if all of them failed, an engine's error at once."""
        failures: list[Exception] = []
        rollouts = await run_together([self._run(row, split, failures) for _ in range(n)])
        if len(failures) == n and self.agent_failure_score is None:
            raise EnvError(
                f"all {n} runs of the agent failed; the first: {type(failures[0]).__name__}: {failures[0]}"
            ) from failures[0]
        return rollouts

    rescore = BaseEnv.rescore  # rollouts are judged while they run

    async def score_group(self, row: Row, rollouts: Sequence[Rollout]) -> list[Outcome]:
        return [rollout.outcome for rollout in rollouts]

    async def close(self) -> None:
        self._sessions = None
        await self._proxy.aclose()
        await super().close()

    async def _run(self, row: Row, split: Split, failures: list[Exception]) -> Rollout:
        answer: Any = None
        outcome: Outcome
        notes: dict[str, Any] = {}
        async with self.agent_session(split) as session:
            try:
                answer = await self._answer_of(row, session)
            except Exception as failure:  # boundary: one run of the agent
                if session.engine_errors:
                    raise session.engine_errors[-1] from failure
                failures.append(failure)
                outcome = self._failure(failure)
            else:
                with noting(notes):
                    outcome = await self.outcome_of(row, answer)
            nodes = await awaited(session.fetch_nodes())
            messages = session.last_messages()
        chosen = await off_loop(self.choose_sequences, row, nodes, answer)
        if split == "train":
            self.counts["agent_runs"] += 1
            self.counts["agent_sequences"] += len(nodes)
            self._keep_ledger(nodes, chosen)
        said = {"role": "assistant", "content": "" if answer is None else str(answer)}
        was_aborted = any((node.metadata or {}).get("finish_reason") == ABORTED for node in nodes)
        return Rollout(
            messages=messages or [said],
            nodes=chosen,
            finish_reason=ABORTED if was_aborted else None,
            outcome=outcome,
            overrides=notes,
        )

    def _keep_ledger(self, nodes: list[SequenceNode], chosen: list[SequenceNode]) -> None:
        """Check that each token sampled in a run is trained once, or counted as left out."""
        if self.server.use_proxy and (notes := item_notes.get()) is not None:
            notes.num_sampled += num_sampled(nodes)
        ledger = ledger_of(nodes, chosen)
        if ledger is None:
            return
        self.counts["agent_sampled_tokens"] += ledger.sampled
        self.counts["agent_left_out_tokens"] += ledger.left_out
        if not ledger.closes:
            logger.log(
                logging.DEBUG if self.counts["agent_open_ledgers"] else logging.WARNING,
                "a run of the agent sampled %d tokens, but %d are trained and %d left out;"
                " does choose_sequences return what sequences have in common only once?",
                *ledger,
            )
            self.counts["agent_open_ledgers"] += 1

    async def _answer_of(self, row: Row, session: AgentSession) -> Any:
        arguments = {"row": row, "base_url": session.base_url, "api_key": session.api_key}
        limit_s = self.config.agent_timeout_s
        deadline = asyncio.timeout(limit_s)
        try:
            async with deadline:
                return await awaited(await call_function(self.run_agent, arguments))
        except TimeoutError as e:
            if not deadline.expired():
                raise
            raise AgentFailed(f"the agent took more than {limit_s:g} s") from e

    def _failure(self, failure: Exception) -> Outcome:
        timed_out = isinstance(failure.__cause__, TimeoutError)
        kind = "timeout" if timed_out else "failed"
        is_first = not self.counts[f"agent_{kind}"]
        logger.log(
            logging.WARNING if is_first else logging.DEBUG,
            "a run of the agent failed: %s: %s",
            type(failure).__name__,
            failure,
            exc_info=None if isinstance(failure, AgentFailed) else failure,
        )
        self.counts[f"agent_{kind}"] += 1
        if self.agent_failure_score is not None:
            return self.agent_failure_score
        return RewardFailure(reason="timeout" if timed_out else "crash", detail=str(failure))

    async def _local_sessions(self) -> Sessions:
        async with self._starting:
            if self._sessions is None:
                name = self.server.servers[0].config.model_name
                # Sessions must not expire while a slow agent runs; each run closes its own.
                limits = SessionLimits(idle_s=math.inf, life_s=math.inf)
                tokenizer = self.tokenizer if self.server.gives_token_ids else None
                app = create_app(self.server, tokenizer, name, limits=limits, is_private=True)
                self._url = await self._proxy.enter_async_context(serve_locally(app))
                self._sessions = app.state.sessions
            sessions: Sessions = self._sessions
            return sessions


def agent_variables(base_url: str, api_key: str, named: Iterable[str] = ()) -> dict[str, str]:
    """Return an agent's environment variables: `child_variables(named)`, and the session's URL and key."""
    return {
        **reaching_loopback(child_variables(named)),
        "OPENAI_BASE_URL": base_url,
        "OPENAI_API_KEY": api_key,
        "ANTHROPIC_BASE_URL": base_url.removesuffix("/v1"),
        "ANTHROPIC_API_KEY": api_key,
    }


class _Leader(asyncio.subprocess.SubprocessStreamProtocol):
    """A program that leads a process group; the rest of the group, which may hold its output open, ends with it."""

    _pid: int

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.SubprocessTransport)
        self._pid = transport.get_pid()
        super().connection_made(transport)

    def process_exited(self) -> None:
        kill_group(self._pid)
        super().process_exited()


async def _start(
    argv: Sequence[str], **options: Any
) -> tuple[asyncio.subprocess.Process, asyncio.SubprocessTransport]:
    """Start a program as the leader of a new process group, with pipes; return it and its transport."""
    loop = asyncio.get_running_loop()
    transport, protocol = await loop.subprocess_exec(
        lambda: _Leader(limit=2**16, loop=loop), *argv, start_new_session=True, **options
    )
    return asyncio.subprocess.Process(transport, protocol, loop), transport


async def _write(stream: asyncio.StreamWriter, content: bytes) -> bytes:
    # The program need not read its input.
    with contextlib.suppress(BrokenPipeError, ConnectionResetError):
        stream.write(content)
        await stream.drain()
    stream.close()
    return b""


async def _read(stream: asyncio.StreamReader, limit: int) -> bytes:
    content = bytearray()
    while chunk := await stream.read(65536):
        content += chunk
        if len(content) > limit:
            raise AgentFailed(f"the agent printed more than {limit} bytes")
    return bytes(content)
