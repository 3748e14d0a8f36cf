"""Sessions: one conversation state (`ManagedServer`) per agent, addressed by an identifier that cannot be guessed.

`Sessions` opens, finds, expires and closes them, by its own clock. `Session` calls the engine and keeps the token
sequences. Invariant: `nodes` returns what the engine sampled and a client received. An answer that could not be
written, or whose client disconnected before it was complete, is not kept. `routes` serves sessions over HTTP;
`AgentEnv` uses `Sessions` directly.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import time
import uuid
from collections import Counter, OrderedDict
from collections.abc import (
    AsyncIterator,
    Awaitable,
    Callable,
    Coroutine,
    Iterator,
)
from contextlib import (
    AbstractAsyncContextManager,
    AsyncExitStack,
    asynccontextmanager,
    contextmanager,
)
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeVar
from weakref import WeakValueDictionary

from pydantic import BaseModel, ConfigDict, Field

from atroposlib.errors import ConfigError, EngineError
from atroposlib.http_bodies import MAX_BODY_BYTES
from atroposlib.inference.manager import DEFAULT_TOOL_PARSER
from atroposlib.inference.servers.admission import start_turn
from atroposlib.inference.servers.api_server import TokenCompletions
from atroposlib.inference.servers.sampling_notes import (
    SamplingNotes,
    item_notes,
    noting_sampling,
    position,
)
from atroposlib.inference.sessions.managed_server import ManagedServer, ManagedTurn, Prompt
from atroposlib.inference.sessions.sequences import SequenceNode
from atroposlib.inference.tools.messages import begun_text, has_images
from atroposlib.inference.tools.parsers import style_named
from atroposlib.inference.tools.thoughts import THINK, Spoken, ThinkTags
from atroposlib.proxy.chat import DISTRIBUTION_KEPT, EngineSampling
from atroposlib.proxy.errors import ProxyError, error_for
from atroposlib.proxy.spoken import certain
from atroposlib.proxy.turn import (
    AgentAnswer,
    AgentBody,
    AgentRequest,
    Choice,
    TokenLogprob,
    tool_call,
)
from atroposlib.utils.off_loop import off_loop

logger = logging.getLogger(__name__)

T = TypeVar("T")

_NUM_REMEMBERED = 10_000
"""Expired sessions that are answered with 410; older ones are unknown (404)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionLimits:
    """Limits of one proxy."""

    max_sessions: int = 10_000
    max_nodes: int = 1_000
    """Token sequences of one session."""
    max_body_bytes: int = MAX_BODY_BYTES
    idle_s: float = 3600.0
    """A session that is unused for this long expires, with its sequences."""
    life_s: float = 24 * 3600.0
    """A session expires this long after it was opened, used or not."""


class FixedSampling(EngineSampling):
    """Sampling parameters that override the agent's; None: not overridden."""

    model_config = ConfigDict(extra="forbid")
    chat_template_kwargs: dict[str, Any] | None = None


class SessionOptions(AgentBody):
    """Options set by the opener of a session, which the agent cannot change: the body of `/sessions/create`.

    The original's has `tool_parser`, `track_tree` and `base_url`.
    """

    tool_parser: str | None = DEFAULT_TOOL_PARSER
    track_tree: bool = False
    base_url: str | None = None
    """The engine; None: the least loaded, or that of the `group`."""
    group: str | None = None
    """Sessions with the same key have the beginning of their prompts in common, so an engine serves all while it has
    room."""
    max_tokens: int = Field(default=1024, ge=1)
    """Of one answer, unless the agent sets it."""
    max_context_tokens: int | None = Field(default=None, ge=2)
    """Prompt and answer together; a longer prompt is refused as too long. None: the engine's limit."""
    sampling: FixedSampling | None = None
    needs_tokens: bool = True
    """Whether to refuse an API without token ids. False: use it without sequences, for evaluation."""
    split: Literal["train", "eval"] | None = None
    """Budget of the engine; None: the request's."""
    keeps_distribution: bool = False
    """Whether to drop the agent's sampling parameters outside DISTRIBUTION_KEPT, so that logprobs are exact."""
    owner_key: str | None = Field(default=None, min_length=16)
    """Required to read, drop or close the sequences, so that the agent, which has the uuid, cannot. None: the uuid is
    enough."""


class _Plain:
    """Stands in for a managed server with an API without token ids: answers, but no sequences."""

    def __init__(self, manager: Any) -> None:
        self.server = manager.servers[0]
        self.chat_completion = manager.chat_completion
        self.completion = manager.completion

    def get_state(self) -> dict[str, Any]:
        return {"nodes": []}

    def reset(self) -> None:
        """Do nothing: there are no sequences."""


Turn = Callable[..., AbstractAsyncContextManager[ManagedTurn]]
"""Samples, and stores the turn if the block that gets the completion ends without an exception."""


def _without_keeping(call: Callable[..., Awaitable[Any]]) -> Turn:
    @asynccontextmanager
    async def send(**kwargs: Any) -> AsyncIterator[ManagedTurn]:
        yield ManagedTurn(await call(**kwargs), None, "")

    return send


class Session:
    """One agent's conversations."""

    def __init__(
        self,
        managed: Any,
        *,
        uuid: str,
        options: SessionOptions,
        limits: SessionLimits,
        model_name: str,
        clock: Callable[[], float],
        close: Callable[[], Awaitable[Any]],
    ) -> None:
        self.uuid = uuid
        self.options = options
        self._fixed = (options.sampling or FixedSampling()).model_dump(exclude_none=True)
        self.model_name = model_name
        self.managed = managed
        self._tracked = managed if isinstance(managed, ManagedServer) else None
        self.opened_at = self.used_at = clock()
        self.created_at = time.time()
        self.closed_by: ProxyError | None = None
        """Why the session is closed; None while it is open."""
        self.responses: OrderedDict[str, list[dict[str, Any]]] = OrderedDict()
        """Conversations by the id of the response that ended them."""
        self.engine_errors: list[EngineError] = []
        """Engine failures that the agent received, until a later request succeeds; without faults of the request."""
        self.last_messages: list[dict[str, Any]] = []
        """The conversation of the latest answer, that answer included."""
        self._clock = clock
        self._limits = limits
        self._close = close
        self._calls: set[asyncio.Task[Any]] = set()
        self._num_asked = 0
        """Sequences of the requests that are being sampled."""
        self._group, self._position = item_notes.get(), position.get()
        """Of the item or `group` that opened the session; the agent's requests come from outside it."""
        # The notes of a proxy's group are not read.
        self._notes = None if options.group is not None else self._group
        self.base_url = getattr(managed.server.config, "base_url", None)
        self._chat_turn = _without_keeping(managed.chat_completion)
        self._text_turn = _without_keeping(managed.completion)
        if self._tracked is not None:
            self._chat_turn, self._text_turn = managed.chat_turn, managed.text_turn
            managed.max_context_tokens = options.max_context_tokens
            managed.refuses_long_prompts = options.max_context_tokens is not None

    @property
    def num_calls(self) -> int:
        """Requests in flight."""
        return len(self._calls)

    def nodes(self) -> list[SequenceNode]:
        """Return the token sequences so far."""
        if self._tracked is not None:
            return self._tracked.nodes
        return list(self.managed.get_state()["nodes"])

    @property
    def broken_prefixes(self) -> Counter[str]:
        """Turns that could not reuse the tokens of earlier turns, by reason."""
        return Counter() if self._tracked is None else self._tracked.broken_prefixes

    @property
    def num_nodes(self) -> int:
        return len(self.nodes()) if self._tracked is None else self._tracked.num_nodes

    async def ask(
        self,
        ask: AgentRequest,
        write: Callable[[AgentAnswer], T],
        *,
        head: AgentAnswer | None = None,
        say: Callable[[int, Spoken], None] | None = None,
    ) -> T:
        """Sample the next message(s), or the continuation of a text, and return `write(answer)`.

        If `write` raises, the turn is not stored. The answer has the id and the time of `head`. `say` is called with
        what is certain of each choice.
        """
        send: Turn = self._text_turn
        kwargs: dict[str, Any] = {"prompt": ask.prompt}
        if ask.prompt is None:
            if has_images(ask.messages) and begun_text(ask.messages) is not None:
                raise ProxyError(
                    "the model cannot continue an answer in a chat with images", param="messages"
                )
            send, kwargs = self._chat_turn, {"messages": ask.messages, **ask.template}
            if ask.tools:
                kwargs |= {"tools": ask.tools, "tool_choice": ask.tool_choice}
        if say is not None and self._tracked is not None:
            kwargs["on_text"] = self._listener(ask, say)
        with self._room_for(ask.n):
            answer, written = await self._sample(send, ask, kwargs, write, head)
        if ask.prompt is None:
            message = answer.choices[0].message()
            self.last_messages = [*ask.messages, {**message, "content": message["content"] or ""}]
        return written

    def head(self) -> AgentAnswer:
        """Return an answer without choices."""
        return AgentAnswer(
            id=uuid.uuid4().hex, created=int(time.time()), model=self.model_name, choices=[]
        )

    def unused(self, ask: AgentRequest) -> tuple[str, ...]:
        """Return what of a request is not used: sampling parameters, and tools that cannot be offered."""
        used = {**self._allowed(ask.sampling), **self._fixed}
        dropped = [name for name, value in ask.sampling.items() if used.get(name) != value]
        for kind in ask.left_out:
            _warn_left_out(kind)
        return (*dropped, *(f"tools.{kind}" for kind in dict.fromkeys(ask.left_out)))

    def forget(self) -> None:
        """Drop the sequences and conversations so far; the session stays open."""
        self.managed.reset()
        self.responses.clear()
        self.last_messages = []

    def render(self, ask: AgentRequest) -> Prompt:
        """Return the prompt that `ask` would send, without sending it."""
        if self._tracked is None:
            raise NotImplementedError("an API without token ids does not show its prompts")
        if has_images(ask.messages):
            raise ProxyError(
                "only the engine knows the tokens of a prompt with images", param="messages"
            )
        return self._tracked.preview(messages=ask.messages, tools=ask.tools, **ask.template)

    async def run(
        self, call: Coroutine[Any, Any, T], *, gone: Coroutine[Any, Any, None] | None = None
    ) -> T:
        """Await a call of this session; cancel it when the session closes or the client disconnects (`gone`)."""
        if self.closed_by is not None:  # closed while the request's body was read
            call.close()
            if gone is not None:
                gone.close()
            raise self.closed_by
        earlier = list(self.engine_errors)
        position.set(self._position)
        with noting_sampling(self._notes):  # never in those of the item that started the proxy
            task = asyncio.ensure_future(call)
        watch = None if gone is None else asyncio.ensure_future(gone)
        self._calls.add(task)
        try:
            await asyncio.wait(
                {task} if watch is None else {task, watch}, return_when=asyncio.FIRST_COMPLETED
            )
            if not task.done():
                raise ProxyError("the client disconnected", status=499, code="client_gone")
            if task.cancelled():
                raise self.closed_by or ProxyError("the proxy is shutting down", status=503)
            result = task.result()
            # The agent recovered from what failed before this request was sent.
            self.engine_errors[:] = [e for e in self.engine_errors if e not in earlier]
            return result
        except EngineError as e:
            shown = error_for(e)
            if shown is None or shown.status != 400:
                self.engine_errors.append(e)
            raise
        finally:
            self.used_at = self._clock()
            self._calls.discard(task)
            waits = [wait for wait in (task, watch) if wait is not None]
            for wait in waits:
                wait.cancel()
            await asyncio.gather(*waits, return_exceptions=True)

    async def close(self, reason: ProxyError) -> None:
        """Cancel requests in flight and drop the sequences; lists obtained earlier stay valid."""
        if self.closed_by is None:
            self.closed_by = reason
            for call in self._calls:
                call.cancel()
            await self._close()

    @contextmanager
    def _room_for(self, num_asked: int) -> Iterator[None]:
        """Count sequences as asked for during the block. Raises ProxyError beyond the session's limit."""
        limit = self._limits.max_nodes
        if self.num_nodes + self._num_asked + num_asked > limit:
            raise ProxyError(
                f"this session has {self.num_nodes} sequences and requests for {self._num_asked} more;"
                f" with n={num_asked} they would exceed the limit, {limit}",
                code="too_many_sequences",
            )
        self._num_asked += num_asked
        try:
            yield
        finally:
            self._num_asked -= num_asked

    async def _sample(
        self,
        send: Turn,
        ask: AgentRequest,
        kwargs: dict[str, Any],
        write: Callable[[AgentAnswer], T],
        head: AgentAnswer | None,
    ) -> tuple[AgentAnswer, T]:
        # Hundreds of agents may call at once, and building a prompt takes a fraction of a millisecond.
        await start_turn()
        asked = self._allowed(ask.sampling)
        if "response_format" in asked and not self._can_constrain():
            raise ProxyError(
                "response_format: this engine cannot constrain its answers; describe the format in the messages",
                param="response_format",
            )
        options = self.options
        kwargs |= {"max_tokens": options.max_tokens, "temperature": 1.0, "n": ask.n}
        kwargs |= {**asked, **self._fixed, "split": options.split or ask.split}
        if ask.max_context_tokens is not None and self._tracked is not None:
            kwargs["max_context_tokens"] = ask.max_context_tokens
        async with send(**kwargs) as turn:
            answer = self._read(turn, head or self.head())
            if ask.wants_logprobs and turn.answer is not None:
                # Decoding a long answer token by token would delay other agents.
                choices = await off_loop(self._with_logprobs, answer.choices, turn.answer)
                answer = replace(answer, choices=choices)
            return answer, write(answer)

    def _allowed(self, sampling: dict[str, Any]) -> dict[str, Any]:
        if not self.options.keeps_distribution:
            return sampling
        allowed = {name: value for name, value in sampling.items() if name in DISTRIBUTION_KEPT}
        pinned = {"temperature", *self._fixed}
        for name in sampling.keys() - allowed.keys() - pinned:
            _warn_dropped(name)
        return allowed

    def _can_constrain(self) -> bool:
        # vLLM's routes accept it; engines with these routes that do not support it answer 400.
        return getattr(self.managed.server.config, "server_type", None) in ("vllm", "openai")

    def _listener(
        self, ask: AgentRequest, say: Callable[[int, Spoken], None]
    ) -> Callable[[int, str, str], None]:
        if ask.prompt is not None:
            return lambda number, _, text: say(number, Spoken("", text))
        tools = (ask.tools if ask.tool_choice != "none" else None) or []

        def listen(number: int, prompt: str, text: str) -> None:
            tags = self._tags_after(prompt)
            is_opened = tags is not None and tags.is_opened_in(prompt)
            style = None if self._tracked is None else self._tracked.style
            spoken = certain(text, tags=tags, is_opened=is_opened, style=style, tools=tools)
            say(number, spoken)

        return listen

    def _tags_after(self, prompt: str) -> ThinkTags | None:
        """Return the tags around the thoughts of an answer to a prompt; None: no tags mark thoughts in it."""
        if self._tracked is None or self._tracked.has_channels:
            return None
        return self._tracked.think_tags or (THINK if THINK.is_opened_in(prompt) else None)

    def _read(self, turn: ManagedTurn, head: AgentAnswer) -> AgentAnswer:
        tags = self._tags_after(turn.prompt)
        choices = []
        for choice in turn.completion.choices:
            message = getattr(choice, "message", None)
            calls = [] if message is None else getattr(message, "tool_calls", None) or []
            stop = getattr(choice, "stop_reason", None)
            content = choice.text if message is None else message.content
            thought = "" if message is None else getattr(message, "reasoning_content", None) or ""
            if message is not None and content and tags is not None:
                thought, content = tags.divide(content, is_opened=tags.is_opened_in(turn.prompt))
            choices.append(
                Choice(
                    content=content,
                    thought=thought,
                    tool_calls=[_plain_call(call) for call in calls],
                    finish_reason=_finish_reason(choice.finish_reason),
                    stop=stop if isinstance(stop, str) else None,
                )
            )
        usage = turn.completion.usage
        return replace(
            head,
            choices=choices,
            prompt_tokens=usage.prompt_tokens if usage else 0,
            completion_tokens=usage.completion_tokens if usage else 0,
        )

    def _with_logprobs(self, choices: list[Choice], answer: TokenCompletions) -> list[Choice]:
        decode = self.managed.tokenizer.decode
        found = []
        for choice, tokens, logprobs in zip(
            choices, answer.output_tokens, answer.output_logprobs, strict=True
        ):
            pairs = zip(tokens, logprobs, strict=True)
            listed = [TokenLogprob(decode([token]), logprob) for token, logprob in pairs]
            found.append(replace(choice, logprobs=listed))
        return found


class Sessions:
    """All sessions of one proxy."""

    def __init__(
        self,
        manager: Any,
        tokenizer: Any,
        *,
        model_name: str,
        limits: SessionLimits | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.manager = manager
        """Chooses the engines of new sessions; open sessions keep theirs."""
        self.tokenizer = tokenizer
        self.model_name = model_name
        self.limits = limits or SessionLimits()
        self._clock = clock
        self._by_uuid: dict[str, Session] = {}
        self._num_opening = 0
        self._groups: WeakValueDictionary[str, SamplingNotes] = WeakValueDictionary()
        """The notes of the groups with open sessions, which hold their engines."""
        self._expired: OrderedDict[str, str] = OrderedDict()

    async def open(self, options: SessionOptions | None = None) -> Session:
        """Open a session on an engine. Raises ProxyError for too many sessions or an unknown engine."""
        options = options or SessionOptions()
        if options.group is None:
            return await self._open(options)
        with noting_sampling(self._groups.setdefault(options.group, SamplingNotes())):
            return await self._open(options)

    async def _open(self, options: SessionOptions) -> Session:
        await self.expire()
        num_open = len(self._by_uuid) + self._num_opening
        if num_open >= self.limits.max_sessions:
            raise ProxyError(f"{num_open} sessions are open", status=429, code="too_many_sessions")
        if options.tool_parser is not None:
            style_named(options.tool_parser, tokenizer=self.tokenizer)
        stack = AsyncExitStack()
        self._num_opening += 1
        try:
            managed = await stack.enter_async_context(
                self.manager.managed_server(
                    tokenizer=self.tokenizer,
                    base_url=options.base_url,
                    tool_call_parser=options.tool_parser,
                    track_tree=options.track_tree,
                )
            )
        except ConfigError as e:  # no such engine
            raise ProxyError(str(e), status=404, param="base_url") from e
        except NotImplementedError:
            if options.needs_tokens:
                raise
            managed = _Plain(self.manager)
        else:
            # The manager replaces None by its default.
            managed.tool_parser = options.tool_parser
        finally:
            self._num_opening -= 1
        session = Session(
            managed,
            uuid=str(uuid.uuid4()),
            options=options,
            limits=self.limits,
            model_name=self.model_name,
            clock=self._clock,
            close=stack.aclose,
        )
        self._by_uuid[session.uuid] = session
        return session

    async def get(self, uuid: str) -> Session:
        """Return an open session and update its time of use. Raises ProxyError: 404, or 410 for an expired one."""
        session = self._by_uuid.get(uuid)
        if session is not None:
            await self._expire(session)
        if session is None or session.closed_by is not None:
            raise self._absence(uuid)
        session.used_at = self._clock()
        return session

    async def close(self, uuid: str) -> None:
        """Close a session. Raises ProxyError for an unknown one."""
        session = self._by_uuid.pop(uuid, None)
        if session is None:
            raise self._absence(uuid)
        await session.close(
            ProxyError(f"session {uuid} was closed", status=404, code="session_not_found")
        )

    async def close_all(self) -> None:
        """Close every session."""
        for session in self.open_sessions():
            await self.close(session.uuid)

    async def expire(self) -> None:
        """Close the expired sessions."""
        for session in self.open_sessions():
            await self._expire(session)

    def open_sessions(self) -> list[Session]:
        return list(self._by_uuid.values())

    def idle_s(self, session: Session) -> float:
        """Return the seconds since a session was last used."""
        return self._clock() - session.used_at

    async def _expire(self, session: Session) -> None:
        reason = self._overdue(session, self._clock())
        if reason is None or self._by_uuid.pop(session.uuid, None) is None:
            return
        self._expired[session.uuid] = reason
        while len(self._expired) > _NUM_REMEMBERED:
            self._expired.popitem(last=False)
        await session.close(self._absence(session.uuid))

    def _overdue(self, session: Session, now: float) -> str | None:
        if now - session.opened_at >= self.limits.life_s:
            return f"was open for {self.limits.life_s:g} s"
        if not session.num_calls and now - session.used_at >= self.limits.idle_s:
            return f"was not used for {self.limits.idle_s:g} s"
        return None

    def _absence(self, uuid: str) -> ProxyError:
        reason = self._expired.get(uuid)
        if reason is not None:
            return ProxyError(
                f"session {uuid} {reason} and has expired; open another",
                status=410,
                code="session_expired",
            )
        return ProxyError(f"there is no session {uuid!r:.80}", status=404, code="session_not_found")


@functools.cache
def _warn_dropped(name: str) -> None:
    logger.warning(
        "dropped %s from an agent's request: tokens would be drawn from another distribution than their logprobs",
        name,
    )


@functools.cache
def _warn_left_out(kind: str) -> None:
    logger.warning("left out a tool of type %s: the model can call functions only", kind)


def _plain_call(call: Any) -> dict[str, Any]:
    """Return a tool call (an object of the openai package or a dict) as plain JSON."""
    plain = call.model_dump() if isinstance(call, BaseModel) else dict(call)
    function = plain["function"]
    return tool_call(plain["id"], function["name"], function["arguments"])


def _finish_reason(reason: Any) -> str:
    if reason in ("stop", "length", "tool_calls"):
        return str(reason)
    # An engine that was interrupted ("abort") did not finish the answer.
    return "length" if reason == "abort" else "stop"
