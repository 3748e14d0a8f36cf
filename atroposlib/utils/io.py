"""Read HTTP responses. Called by environments that use other services."""

from __future__ import annotations

import logging
from typing import Any


async def parse_http_response(resp: Any, logger: logging.Logger | None = None) -> Any:
    """Return the JSON of an `aiohttp` response.

    For a status of 400 or above, and for a body that is not JSON, logs the body and raises the error.
    """
    log = logger or logging.getLogger(__name__)
    body = await resp.text()  # before raise_for_status, which releases the connection
    try:
        resp.raise_for_status()
        return await resp.json()
    except Exception as error:
        log.error("%s answered %s: %s: %.2000s", resp.url, resp.status, error, body)
        raise
