"""The proxy for agents that know only a base URL: `routes` over `sessions` over `ManagedServer`.

`command.create_app` makes the HTTP application. Each dialect (`chat`, `completions`, `responses`, `messages`) is two
pure translations: request body -> `turn.AgentRequest`, `turn.AgentAnswer` -> response body or server-sent events.
Only `sessions.Session` handles tokens and calls the managed server.
"""

__all__ = ["command", "sessions"]
