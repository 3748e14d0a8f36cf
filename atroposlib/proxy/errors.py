"""Every failure as an HTTP status and an error body that SDKs understand.

`error_for` decides for all routes: 400 for what the client can change, 503 for an engine that may recover, 502 for an
unusable answer. Agents look for `context_length_exceeded` to shorten their history.
"""

from __future__ import annotations

import re
from typing import Any

from jinja2 import TemplateError
from pydantic import ValidationError

from atroposlib.errors import ConfigError, EngineError, EngineRejected, EngineUnavailable
from atroposlib.http_bodies import ApiError, BodyRefused, too_deep

_TOO_LONG = re.compile(
    r"maximum context length|model's context length|maximum model length|max_model_len"
    r"|maximum input length|fit into the model|context window",
    re.IGNORECASE,
)
"""Messages of vLLM, SGLang and the local engine about a prompt that is too long."""

_OWN_FAULTS = frozenset({401, 403, 404, 405})
"""Refusals of an engine that concern the proxy's key, model name or route, not the agent's request."""


class ProxyError(ApiError):
    """A request that is answered with an error body."""

    default_type = "invalid_request_error"

    def anthropic_body(self) -> dict[str, Any]:
        kinds = {
            401: "authentication_error",
            403: "permission_error",
            404: "not_found_error",
            413: "request_too_large",
            429: "rate_limit_error",
            503: "overloaded_error",
        }
        kind = kinds.get(self.status, "api_error" if self.status >= 500 else self.type)
        return {"type": "error", "error": {"type": kind, "message": self.message}}


def unauthorized(message: str) -> ProxyError:
    """Return a 401."""
    return ProxyError(message, status=401, type="authentication_error", code="invalid_api_key")


def error_for(error: Exception) -> ProxyError | None:
    """Return the error that the client sees; None for a bug of the proxy."""
    if isinstance(error, ProxyError):
        return error
    if isinstance(error, RecursionError):
        error = too_deep()
    if isinstance(error, BodyRefused):
        return ProxyError(error.message, status=error.status, code=error.code)
    if isinstance(error, ValidationError):
        return _unreadable(error)
    if isinstance(error, TemplateError):
        return ProxyError(f"the chat template refuses these messages: {error}", param="messages")
    if isinstance(error, EngineRejected):
        if _TOO_LONG.search(str(error)):
            return ProxyError(str(error), param="messages", code="context_length_exceeded")
        status = 502 if getattr(error, "status", 400) in _OWN_FAULTS else 400
        kind = "engine_error" if status == 502 else "invalid_request_error"
        return ProxyError(str(error), status=status, type=kind, code="engine_rejected")
    if isinstance(error, EngineUnavailable):
        return ProxyError(
            str(error),
            status=429 if error.status == 429 else 503,
            type="engine_error",
            code="engine_unavailable",
            retry_after_s=error.retry_after_s,
        )
    if isinstance(error, EngineError):
        return ProxyError(str(error), status=502, type="engine_error", code="engine_protocol_error")
    if isinstance(error, NotImplementedError):
        return ProxyError(str(error), status=501, code="not_supported")
    if isinstance(error, ConfigError):
        return ProxyError(str(error))
    return None


def _unreadable(error: ValidationError) -> ProxyError:
    fault = error.errors()[0]
    path = ""
    for part in fault["loc"]:
        path += f"[{part}]" if isinstance(part, int) else f".{part}" if path else str(part)
    return ProxyError(f"{path or 'body'}: {fault['msg']}", param=path or None)
