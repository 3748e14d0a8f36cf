"""The hub over HTTP: the table of routes, rights, limits, bodies and metrics."""

__all__ = [
    "connections",
    "decoding",
    "handlers",
    "limits",
    "metrics",
    "payloads",
    "routes",
    "security",
    "sending",
]
