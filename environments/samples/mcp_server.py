"""A small MCP server for trying `mcp_env.py`: the stock of a fruit shop, always the same.

python environments/samples/mcp_server.py           # over stdin and stdout
python environments/samples/mcp_server.py 8000      # over HTTP, at http://127.0.0.1:8000/mcp
"""

from __future__ import annotations

import sys

from mcp.server.mcpserver import MCPServer

STOCK = {"apple": 40, "banana": 25, "cherry": 300, "fig": 12, "lemon": 31, "pear": 18}
PRICES = {"apple": 45, "banana": 30, "cherry": 8, "fig": 70, "lemon": 55, "pear": 60}
"""In cents."""

server = MCPServer("fruit shop")


@server.tool()
def stock(fruit: str) -> int:
    """Number of pieces of a fruit in stock."""
    return STOCK[fruit]


@server.tool()
def price(fruit: str, count: int = 1) -> int:
    """Price of some pieces of a fruit, in cents."""
    return PRICES[fruit] * count


if __name__ == "__main__":
    if len(sys.argv) > 1:
        server.run("streamable-http", port=int(sys.argv[1]))
    else:
        server.run()
