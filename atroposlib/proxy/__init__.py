"""The parts of the proxy: `routes` over `sessions` over `ManagedServer`, and one module per API that agents speak.

`managed_server_proxy.create_app` puts them behind HTTP. A dialect (`chat`, `completions`, `responses`, `messages`) is
two pure translations: a request body to a `turn.Ask`, a `turn.Answer` to a response body or to server-sent events.
None of them sees tokens; `sessions.Session` alone talks to the managed server.
"""

__all__ = [
    "chat",
    "command",
    "completions",
    "engines",
    "errors",
    "local",
    "messages",
    "responses",
    "routes",
    "sessions",
    "sse",
    "turn",
]
