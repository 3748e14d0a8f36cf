"""Tools of a Model Context Protocol server: a child process, over stdin and stdout, or a running one, over HTTP.

One task owns the connection from `open` to `close`, because the `mcp` package requires the same task to enter and exit
it; calls may come from any task. Used by `ToolEnv`. A server that exits is not restarted.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from atroposlib.errors import ConfigError, EnvError, require

_CONNECTION_CLOSED = -32000
"""Error code of the `mcp` package (mcp.types.CONNECTION_CLOSED)."""

OPEN_TIMEOUT_S = 60.0
"""Time limit of start and handshake; some programs download themselves first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class McpServer:
    """How to start a server, by `command`, or to reach a running one, by `url`."""

    command: str = ""
    args: tuple[str, ...] = ()
    env: Mapping[str, str] = field(default_factory=dict)
    """Environment variables in addition to a few harmless ones (PATH, HOME); no others are passed."""
    url: str = ""
    """Of a server with the transport "streamable HTTP", such as http://localhost:8000/mcp."""

    def __post_init__(self) -> None:
        """Check that there is one of `command` and `url`."""
        if bool(self.command) == bool(self.url):
            raise ConfigError("McpServer: give either command or url")

    def __str__(self) -> str:
        return self.command or self.url


class McpResult(NamedTuple):
    text: str
    is_error: bool


class McpSession:
    """The connection to one server."""

    def __init__(self, server: McpServer) -> None:
        self._server = server
        self._client: Any = None
        self._owner: asyncio.Task[None] | None = None
        self._closing = asyncio.Event()

    async def open(self) -> list[Any]:
        """Start the server and return its tools (`mcp.types.Tool`); EnvError if it does not start."""
        mcp = require("mcp", extra="mcp")
        opened: asyncio.Future[list[Any]] = asyncio.get_running_loop().create_future()
        self._owner = asyncio.create_task(self._own(mcp, opened))
        waits: set[asyncio.Future[Any]] = {self._owner, opened}
        try:
            await asyncio.wait(waits, timeout=OPEN_TIMEOUT_S, return_when=asyncio.FIRST_COMPLETED)
        except asyncio.CancelledError:
            await self.close()
            raise
        if opened.done():
            return opened.result()
        opened.cancel()
        if not self._owner.done():
            await self.close()
            raise EnvError(
                f"the MCP server {self._server} did not answer within {OPEN_TIMEOUT_S:g} s"
            )
        failure = self._owner.exception()
        while isinstance(failure, BaseExceptionGroup):
            failure = failure.exceptions[0]
        raise EnvError(f"the MCP server {self._server} did not start: {failure}") from failure

    async def call(self, name: str, arguments: dict[str, Any]) -> McpResult:
        """Call a tool. Raises EnvError if the server has ended, and the errors of the `mcp` package."""
        if self._client is None:
            raise EnvError(f"the MCP server {self._server} is not running")
        mcp = require("mcp", extra="mcp")
        try:
            result = await self._client.call_tool(name, arguments)
        except mcp.MCPError as error:
            if error.code == _CONNECTION_CLOSED:
                raise EnvError(f"the MCP server {self._server} has ended") from error
            raise
        return McpResult("\n".join(map(_text_of, result.content)), bool(result.is_error))

    async def close(self) -> None:
        """Stop the server; safe to call twice."""
        self._closing.set()
        owner, self._owner = self._owner, None
        if owner is not None:
            if self._client is None:
                owner.cancel()
            await asyncio.gather(owner, return_exceptions=True)

    async def _own(self, mcp: Any, opened: asyncio.Future[list[Any]]) -> None:
        server = self._server
        target = server.url or mcp.StdioServerParameters(
            command=server.command, args=list(server.args), env=dict(server.env)
        )
        async with mcp.Client(target) as client:
            tools = await _list_tools(client)
            self._client = client
            try:
                if not opened.done():
                    opened.set_result(tools)
                await self._closing.wait()
            finally:
                self._client = None


def _text_of(block: Any) -> str:
    """Return the text of a block or of the resource embedded in it; of other content its type, such as `(image)`."""
    return str(getattr(getattr(block, "resource", block), "text", f"({block.type})"))


async def _list_tools(client: Any) -> list[Any]:
    page = await client.list_tools()
    tools = [*page.tools]
    while page.next_cursor is not None:
        page = await client.list_tools(cursor=page.next_cursor)
        tools += page.tools
    return tools
