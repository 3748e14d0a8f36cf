"""The hub: environments post groups, a trainer takes exact batches.

`uvicorn atroposlib.api:app` serves it; README.md is the wire contract.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from atroposlib.api.server import app

__all__ = ["app"]


def __getattr__(name: str) -> Any:
    """Import FastAPI only on first use of `app`, so that clients import `api.schemas` cheaply."""
    if name == "app":
        from atroposlib.api.server import app

        return app
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
