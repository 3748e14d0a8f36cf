"""`ToolEnv`: the model calls Python functions (and tools of MCP servers) until it answers; then `score` judges.

Tools are functions with type hints, or `Tool`s. Calls are read from the text of an answer (`<tool_call>` JSON, as
Hermes and Qwen models write it; override `parse_calls` for another format), so the sampled tokens are unchanged.
Invariant: a call that is malformed, fails, times out or returns a value without a text never ends an episode; the model
gets the error as the result, and it is counted. Results are valid Unicode, by default without special tokens.
"""

from __future__ import annotations

import asyncio
import functools
import inspect
import json
import logging
import re
import threading
import typing
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from typing import Any, ClassVar, TypeAlias

from pydantic import Field, TypeAdapter, ValidationError
from pydantic.errors import PydanticSchemaGenerationError
from pydantic_core import ArgsKwargs

from atroposlib.envs.base import BaseEnvConfig
from atroposlib.envs.dataset_env import Row
from atroposlib.envs.mcp_tools import McpServer, McpSession
from atroposlib.envs.multi_turn_env import Episode, MultiTurnEnv, MultiTurnEnvConfig, Step
from atroposlib.envs.rewards import RewardFailure
from atroposlib.errors import ConfigError, EnvError
from atroposlib.inference.sessions.chat_template import special_texts
from atroposlib.inference.tools.parsers import Call, style_named
from atroposlib.utils.wording import nearest

logger = logging.getLogger(__name__)

MAX_HUNG_THREADS = 32
"""Limit of timed-out calls that still run; at the limit no plain function is called."""

FAILED = "Error: "
"""How the result of a failed call starts."""

_HERMES = style_named("hermes")
_CALL = re.compile(r"<tool_call>(.*?)(?:</tool_call>|\Z)", re.DOTALL)

_INSTRUCTIONS = """\
You can call tools. To call one, write its name and arguments as JSON between tags:
<tool_call>
{"name": "tool name", "arguments": {"argument name": "value"}}
</tool_call>
Then stop; you get the result and continue from there. An answer without a call is final.
These are the tools, with the JSON schema of their arguments:
<tools>
%s
</tools>"""


class ToolEnvConfig(MultiTurnEnvConfig):
    tool_timeout_s: float = Field(default=10.0, gt=0)
    """Time limit of one call in seconds."""
    max_tool_output_chars: int = Field(default=4000, ge=1)
    """Longer results are truncated, with a note."""
    escape_special_tokens: bool = True
    """Break up special tokens of the tokenizer in results: `<|im_end|>`, which would end the message, becomes
    `< |im_end|>`. False leaves results unchanged."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolCall:
    """One call in the model's answer."""

    name: str
    arguments: dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class MalformedCall:
    """Text marked as a call that cannot be parsed."""

    name: ClassVar[str] = "unknown"
    reason: str
    """Returned to the model."""


class ToolFailure(Exception):
    """A failed call; the message is returned to the model, `kind` names the counter."""

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(message)
        self.kind = kind


Run: TypeAlias = Callable[[dict[str, Any], Episode], Awaitable[Any]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Tool:
    """A tool that the model can call."""

    name: str
    description: str
    parameters: dict[str, Any]
    """JSON schema of the arguments."""
    run: Run
    """Called with the model's arguments; raises `ToolFailure` if they do not match the schema."""
    keeps_time: bool = False
    """Whether `run` enforces the time limit itself, so that the start of a worker process is not counted."""

    def schema(self) -> dict[str, Any]:
        """Return the tool in OpenAI's format."""
        function = {
            "name": self.name,
            "description": self.description,
            "parameters": self.parameters,
        }
        return {"type": "function", "function": function}


@dataclass(frozen=True, slots=True)
class Killable:
    """A tool that may hang or exhaust memory: a module-level function, run in a worker process that can be killed."""

    function: Callable[..., Any]


class ToolEnv(MultiTurnEnv):
    """Tasks that are solved with tools."""

    env_config_cls: ClassVar[type[BaseEnvConfig]] = ToolEnvConfig
    config: ToolEnvConfig

    tools: ClassVar[Sequence[Callable[..., Any] | Killable | Tool]] = ()
    """Functions with type hints; a parameter annotated `Episode` receives the episode and is hidden from the model."""
    mcp_servers: Sequence[McpServer] = ()
    """Servers that provide tools (extra `mcp`); started, or connected to, by `setup`."""
    tool_role: ClassVar[str] = "tool"
    """Role of the results. "user" for chat templates without tools: results are then wrapped in <tool_response>."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.tools_by_name: dict[str, Tool] = {}
        self._mcp_sessions: list[McpSession] = []
        self._mcp_tools: list[str] = []
        self._hung_threads: list[threading.Thread] = []
        for entry in self.tools:
            self._add_tool(self._as_tool(entry))

    async def setup(self) -> None:
        """Start or connect to the MCP servers, then load the rows."""
        for server in self.mcp_servers:
            session = McpSession(server)
            self._mcp_sessions.append(session)
            for offered in await session.open():
                self._add_tool(
                    Tool(
                        name=offered.name,
                        description=offered.description or "",
                        parameters=offered.input_schema,
                        run=_over_mcp(session, offered.name),
                    )
                )
                self._mcp_tools.append(offered.name)
        await super().setup()

    async def close(self) -> None:
        while self._mcp_sessions:
            await self._mcp_sessions.pop().close()
        while self._mcp_tools:
            del self.tools_by_name[self._mcp_tools.pop()]
        await super().close()

    def known_tools(self) -> dict[str, Tool]:
        return self.tools_by_name

    def conversation(self, row: Row) -> list[dict[str, Any]]:
        """Add the description of the tools to the system message."""
        messages = super().conversation(row)
        schemas = [tool.schema()["function"] for tool in self.tools_by_name.values()]
        tools = _INSTRUCTIONS % "\n".join(json.dumps(schema) for schema in schemas)
        if messages and messages[0]["role"] == "system":
            own = {**messages[0], "content": f"{messages[0]['content']}\n\n{tools}"}
            return [own, *messages[1:]]
        return [{"role": "system", "content": tools}, *messages]

    def parse_calls(self, answer: str) -> list[ToolCall | MalformedCall]:
        """Return the calls in an answer, in order; [] if it is the final answer."""
        return parse_hermes_calls(answer)

    async def step(self, episode: Episode, answer: str) -> Step:
        """Run the calls of an answer in sequence, or judge the final answer."""
        calls = self.parse_calls(answer)
        if not calls:
            outcome = await self.outcome_of(episode.row, answer)
            return Step(reward=outcome, done=True, reason="answered")
        texts = [await self.result_of(call, episode) for call in calls]
        if self.tool_role == "tool":
            names = [self._escaped(call.name) for call in calls]
            named = zip(names, texts, strict=True)
            return Step([{"role": "tool", "name": name, "content": text} for name, text in named])
        # One message, because some templates refuse consecutive user messages.
        content = "\n".join(f"<tool_response>\n{text}\n</tool_response>" for text in texts)
        return Step([{"role": self.tool_role, "content": content}])

    async def result_of(self, call: ToolCall | MalformedCall, episode: Episode) -> str:
        """Run a call and return its result for the model; a failure starts with "Error: "."""
        self.counts["tool_calls"] += 1
        try:
            text = _text_of(await self._run(call, episode), call)
        except ToolFailure as failure:
            self.counts[f"tool_error_{failure.kind}"] += 1
            text = f"{FAILED}{failure}"
        limit = self.config.max_tool_output_chars
        if len(text) > limit:
            text = f"{text[:limit]}\n... ({len(text) - limit} characters more were cut)"
        return self._escaped(text)

    def _escaped(self, text: str) -> str:
        """Return `text` as valid Unicode, with special tokens broken up if configured."""
        text = text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
        special = self._special_token
        return special.sub(lambda found: f"{found[0][0]} {found[0][1:]}", text) if special else text

    @functools.cached_property
    def _special_token(self) -> re.Pattern[str] | None:
        texts = special_texts(self.tokenizer) if self.config.escape_special_tokens else []
        return re.compile("|".join(map(re.escape, filter(None, texts)))) if texts else None

    async def _run(self, call: ToolCall | MalformedCall, episode: Episode) -> Any:
        if isinstance(call, MalformedCall):
            raise ToolFailure("malformed", call.reason)
        tool = self.tools_by_name.get(call.name)
        if tool is None:
            hint = nearest(call.name, self.tools_by_name, otherwise="none is similar.")
            known = ", ".join(self.tools_by_name) or "none"
            raise ToolFailure("unknown", f"there is no tool {call.name!r}; {hint} Known: {known}")
        deadline = asyncio.timeout(None if tool.keeps_time else self.config.tool_timeout_s)
        try:
            async with deadline:
                return await tool.run(call.arguments, episode)
        except (ToolFailure, EnvError):
            raise  # EnvError: an MCP server that ended is not the model's failure
        except TimeoutError as error:
            if not deadline.expired():
                raise ToolFailure("exception", _describe(error)) from error
            raise ToolFailure(
                "timeout", f"{call.name} took more than {self.config.tool_timeout_s:g} s"
            ) from error
        except Exception as error:  # boundary: one tool call
            logger.log(
                logging.DEBUG if self.counts["tool_error_exception"] else logging.WARNING,
                "the tool %s failed; the model gets the error as its result",
                call.name,
                exc_info=error,
            )
            raise ToolFailure("exception", _describe(error)) from error

    def _add_tool(self, tool: Tool) -> None:
        if tool.name in self.tools_by_name:
            raise ConfigError(f"{type(self).__name__}: two tools are called {tool.name!r}")
        self.tools_by_name[tool.name] = tool

    def _as_tool(self, entry: Callable[..., Any] | Killable | Tool) -> Tool:
        if isinstance(entry, Killable):
            _check_killable(entry.function)
            tool = tool_from(entry.function, call=self._in_tool_worker)
            return replace(tool, keeps_time=True)
        return entry if isinstance(entry, Tool) else tool_from(entry, call=self._in_thread)

    async def _in_thread(self, function: Callable[..., Any], arguments: dict[str, Any]) -> Any:
        self._hung_threads = [thread for thread in self._hung_threads if thread.is_alive()]
        num_hung = len(self._hung_threads)
        if num_hung >= MAX_HUNG_THREADS and not inspect.iscoroutinefunction(function):
            logger.log(
                logging.DEBUG if self.counts["tool_error_hung"] else logging.WARNING,
                "%d tool calls hang in their threads, so %s is not called; make it Killable(...)",
                num_hung,
                function.__name__,
            )
            raise ToolFailure("hung", f"{function.__name__} cannot be called now")
        return await call_function(function, arguments, abandoned=self._hung_threads)

    async def _in_tool_worker(self, function: Callable[..., Any], arguments: dict[str, Any]) -> Any:
        bound = inspect.signature(function).bind(**arguments)
        outcome = await self.reward_workers.run(
            function, *bound.args, timeout_s=self.config.tool_timeout_s
        )
        if isinstance(outcome, RewardFailure):
            last_line = outcome.detail.rpartition("\n")[2]
            raise ToolFailure(outcome.reason, f"{outcome.reason}: {last_line}")
        return outcome


async def call_function(
    function: Callable[..., Any],
    arguments: dict[str, Any],
    *,
    abandoned: list[threading.Thread] | None = None,
) -> Any:
    """Call `function`; a plain one in its own thread.

    A cancelled call leaves the thread running and adds it to `abandoned`.
    """
    if inspect.iscoroutinefunction(function):
        return await function(**arguments)
    finished: Future[Any] = Future()
    finished.set_running_or_notify_cancel()  # so that a cancelled caller cannot cancel it

    def work() -> None:
        try:
            value = function(**arguments)
        except BaseException as error:  # noqa: BLE001 - handed to the caller
            # A future refuses StopIteration, and SystemExit must not end the environment.
            is_plain = isinstance(error, Exception) and not isinstance(error, StopIteration)
            finished.set_exception(error if is_plain else RuntimeError(repr(error)))
        else:
            finished.set_result(value)

    # asyncio.to_thread would keep the process alive while a tool hangs.
    thread = threading.Thread(target=work, name=f"tool {function.__name__}", daemon=True)
    thread.start()
    try:
        return await asyncio.wrap_future(finished)
    except asyncio.CancelledError:
        if abandoned is not None:
            abandoned.append(thread)
        raise


def tool_from(
    function: Callable[..., Any],
    *,
    call: Callable[[Callable[..., Any], dict[str, Any]], Awaitable[Any]] = call_function,
) -> Tool:
    """Make a tool from a function: its schema from the type hints, its description from the docstring.

    Raises ConfigError for a parameter that has no type hint, is variadic or positional-only, or whose type has no JSON
    schema. `Annotated[str, Field(description=...)]` describes a parameter.

    >>> def area(width: float, height: float = 1.0) -> float:
    ...     "Area of a rectangle."
    ...     return width * height
    >>> tool_from(area).parameters["required"]
    ['width']
    """
    name = function.__name__
    hints = typing.get_type_hints(function, include_extras=True)
    signature = inspect.signature(function)
    injected = [key for key in signature.parameters if hints.get(key) is Episode]
    shown = [p for p in signature.parameters.values() if p.name not in injected]
    for parameter in shown:
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            raise ConfigError(f"tool {name}: *args and **kwargs have no schema; name the arguments")
        if parameter.kind is parameter.POSITIONAL_ONLY:
            raise ConfigError(f"tool {name}: {parameter.name} must not be positional-only")
        if parameter.name not in hints:
            raise ConfigError(f"tool {name}: the parameter {parameter.name} needs a type hint")

    def read(**arguments: Any) -> dict[str, Any]:
        return arguments

    # pydantic validates calls of `read` as if it had the function's parameters.
    read.__signature__ = signature.replace(parameters=shown)  # type: ignore[attr-defined]
    read.__annotations__ = {parameter.name: hints[parameter.name] for parameter in shown}
    try:
        adapter: TypeAdapter[Any] = TypeAdapter(read)  # type: ignore[arg-type]
        parameters = adapter.json_schema()
    except (PydanticSchemaGenerationError, TypeError) as error:
        raise ConfigError(f"tool {name}: an argument has no JSON schema: {error}") from error
    for described in parameters.get("properties", {}).values():
        described.pop("title", None)

    async def run(arguments: dict[str, Any], episode: Episode) -> Any:
        try:
            checked = adapter.validate_python(ArgsKwargs((), arguments))
        except ValidationError as error:
            raise ToolFailure("arguments", f"{name}: {_faults(error)}") from error
        return await call(function, {**checked, **dict.fromkeys(injected, episode)})

    description = inspect.getdoc(function) or ""
    return Tool(name=name, description=description, parameters=parameters, run=run)


def _check_killable(function: Callable[..., Any]) -> None:
    name = function.__qualname__
    if "<" in name:
        raise ConfigError(f"tool {name}: a worker needs a module-level function")
    if Episode in typing.get_type_hints(function).values():
        raise ConfigError(f"tool {name}: the episode cannot be sent to a worker process")
    if any(p.kind is p.KEYWORD_ONLY for p in inspect.signature(function).parameters.values()):
        raise ConfigError(f"tool {name}: a worker takes positional arguments only")


def hermes_call(name: str, /, **arguments: Any) -> str:
    """Return a call as `parse_hermes_calls` reads it."""
    return _HERMES.render([Call(name, json.dumps(arguments))])


def parse_hermes_calls(answer: str) -> list[ToolCall | MalformedCall]:
    """Read `<tool_call>{"name": ..., "arguments": {...}}</tool_call>` after the thinking, in order.

    >>> parse_hermes_calls('<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>')
    [ToolCall(name='add', arguments={'a': 1})]
    >>> parse_hermes_calls("<think><tool_call>no</tool_call></think> It is 3.")
    []
    """
    found: list[ToolCall | MalformedCall] = []
    for part in _HERMES.split(answer, ()):
        if isinstance(part, Call):
            found.append(ToolCall(name=part.name, arguments=json.loads(part.arguments)))
        elif isinstance(part, str):  # remaining tags belong to calls that could not be parsed
            marked = _CALL.finditer(part.rpartition("</think>")[2])
            found += [MalformedCall(reason=_fault_of(match.group(1).strip())) for match in marked]
    return found


def _text_of(result: Any, call: ToolCall | MalformedCall) -> str:
    """Return a result as text for the model; raises ToolFailure if it cannot be converted."""
    try:
        return str.__str__(result) if isinstance(result, str) else json.dumps(result, default=str)
    except (Exception, SystemExit) as error:  # a value's own methods may raise anything
        reason = f"the result of {call.name} cannot be written as text: {_describe(error)}"
        raise ToolFailure("result", reason) from error


def _describe(error: BaseException) -> str:
    try:
        return f"{type(error).__name__}: {error}".removesuffix(": ")
    except (Exception, SystemExit):  # noqa: BLE001 - a foreign exception's own code
        return type(error).__name__


def _fault_of(text: str) -> str:
    """Return why a text is not a valid call."""
    try:
        call = json.loads(text, strict=False)  # models write newlines inside strings
        arguments = call.get("arguments", {}) if isinstance(call, dict) else None
        if isinstance(arguments, str):  # as the OpenAI API writes them
            arguments = json.loads(arguments, strict=False)
    except (ValueError, RecursionError) as error:
        return f"the tool call is not valid JSON: {error}"
    if not isinstance(call, dict) or not isinstance(call.get("name"), str):
        return 'a tool call is a JSON object with "name" and "arguments"'
    if not isinstance(arguments, dict):
        return f'"arguments" of {call["name"]} must be a JSON object'
    return 'a tool call is a JSON object with "name" and "arguments", and with nothing else'


def _faults(error: ValidationError) -> str:
    return "; ".join(
        f"{'.'.join(map(str, fault['loc']))}: {fault['msg']}" for fault in error.errors()
    )


def _over_mcp(session: McpSession, name: str) -> Run:
    async def run(arguments: dict[str, Any], episode: Episode) -> str:
        result = await session.call(name, arguments)
        if result.is_error:
            raise ToolFailure("exception", result.text)
        return result.text

    return run
