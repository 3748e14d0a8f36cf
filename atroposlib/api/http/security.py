"""Access rights: tokens, scopes, and the run in the path.

`Access` is ASGI middleware that refuses requests (401, 403, 404, 503) before a body is read. It fails closed: a path
that is not in the route table needs the admin scope. Secrets are compared as SHA-256 digests, in constant time over all
tokens, and are never logged, stored or echoed. Only random secrets are safe under a plain hash, as
`run-api --add-token` makes them.
"""

from __future__ import annotations

import datetime
import hashlib
import hmac
from collections.abc import Collection, Iterable
from pathlib import Path
from typing import Annotated
from urllib.parse import quote

import msgspec
import yaml
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Send
from starlette.types import Scope as AsgiScope

from atroposlib.api.http.limits import CROWDED_EXTENSION, RETRY_AFTER_S
from atroposlib.api.http.routes import Route, RouteTable, split_run
from atroposlib.api.http.routes import Scope as Scope
from atroposlib.api.run.types import Quota
from atroposlib.api.stores.runs import RUN_NAME
from atroposlib.errors import ConfigError
from atroposlib.http_guard import CROSS_SITE, foreign_host, is_cross_site, is_loopback

_FORWARDING = (b"forwarded", b"x-forwarded-for", b"x-real-ip")
"""Set by proxies; such a request may come from another machine."""
_PRINTABLE = r"^[^\x00-\x1f\x7f-\x9f\u2028\u2029]+\Z"
_RunName = Annotated[str, msgspec.Meta(pattern=rf"^{RUN_NAME.pattern}\Z")]


class Token(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One row of a token file: the digest of a secret and what it permits."""

    name: Annotated[str, msgspec.Meta(pattern=_PRINTABLE)]
    """Shown in logs, unlike the secret."""
    sha256: Annotated[str, msgspec.Meta(pattern=r"^[0-9a-f]{64}\Z")]
    """Digest of the secret."""
    scopes: Annotated[frozenset[Scope], msgspec.Meta(min_length=1)]
    runs: Annotated[frozenset[_RunName], msgspec.Meta(min_length=1)] | None = None
    """None: every run."""
    expires: datetime.date | None = None
    """The first day, in UTC, on which it is refused; None: never."""
    max_runs: Annotated[int, msgspec.Meta(ge=0)] | None = None
    max_bytes: Annotated[int, msgspec.Meta(ge=0)] | None = None
    """See `Quota`; None: as of every token."""

    def allows(self, scopes: Collection[Scope]) -> bool:
        return Scope.ADMIN in self.scopes or not self.scopes.isdisjoint(scopes)

    def covers(self, run: str) -> bool:
        return self.runs is None or run in self.runs


class TokenSet:
    """The tokens a hub accepts."""

    def __init__(self, tokens: Iterable[Token]) -> None:
        self._tokens = tuple(tokens)
        self.default_quota = Quota()
        """Of tokens that have none of their own."""

    @classmethod
    def load(cls, path: Path) -> TokenSet:
        """Read a JSON or YAML list of `Token`s, of which name, sha256 and scopes are required.

        Raises ConfigError, which never quotes a secret.
        """
        found = cls(())
        found.reload(path)
        return found

    def reload(self, path: Path) -> None:
        """Accept from now on what the file holds, and only that. Raises ConfigError and changes nothing, as `load`."""
        tokens = parse_tokens(read_text(path), path)
        if not tokens:
            raise ConfigError(f"the token file {str(path)!r} holds no token; run-api --add-token")
        self._tokens = tuple(tokens)

    def find(self, secret: bytes) -> Token | None:
        """Return the token of `secret`, or None, in constant time over all tokens."""
        digest = digest_of(secret)
        found = None
        for token in self._tokens:
            if hmac.compare_digest(token.sha256, digest):
                found = token
        return found

    def quota_of(self, name: str) -> Quota:
        """Return the quota of the token of that name; the default if it was deleted meanwhile."""
        own = next((token for token in self._tokens if token.name == name), None)
        quota = self.default_quota
        if own is None:
            return quota
        return Quota(
            max_runs=quota.max_runs if own.max_runs is None else own.max_runs,
            max_bytes=quota.max_bytes if own.max_bytes is None else own.max_bytes,
        )


def read_text(path: Path) -> str:
    """Return the text of a token file. Raises ConfigError."""
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as e:
        raise ConfigError(f"cannot read the token file {str(path)!r}: {e}") from e


def parse_tokens(text: str, path: Path) -> list[Token]:
    """Return the rows of the token file `path`. Raises ConfigError, which never quotes the text."""
    try:
        document = yaml.safe_load(text)
    except yaml.YAMLError as e:
        # The error text quotes the file, so only the line number is reported.
        mark = getattr(e, "problem_mark", None)
        where = f", line {mark.line + 1}" if mark is not None else ""
        raise ConfigError(
            f"the token file {str(path)!r} is not valid YAML or JSON{where}"
        ) from None
    try:
        tokens = msgspec.convert(document or [], list[Token])
    except msgspec.ValidationError as e:
        raise ConfigError(f"the token file {str(path)!r}: {e}") from None
    names = [token.name for token in tokens]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise ConfigError(f"the token file {str(path)!r}: the name {twice!r} is taken")
    return tokens


def digest_of(secret: bytes) -> str:
    """Return what a token file keeps of a secret."""
    return hashlib.sha256(secret).hexdigest()


_HEADERS_OF_REFUSALS = {
    401: {"WWW-Authenticate": "Bearer"},
    503: {"Retry-After": RETRY_AFTER_S, "Connection": "close"},
}


def _refuse(status: int, detail: str) -> JSONResponse:
    return JSONResponse({"detail": detail}, status, _HEADERS_OF_REFUSALS.get(status))


class Access:
    """ASGI middleware: finds the run and row of a request, strips the run from the path, and checks the rights.

    It sets `scope["run"]`, `scope["names_run"]` (whether the path does), `scope["hub_route"]` (None: no row), with a
    known token `scope["token_name"]`, with one for some runs `scope["covers"]`, and if a route that needs a scope is
    permitted `scope["is_authorised"]`. `tokens` None: everything is permitted, except destructive routes from other
    machines, foreign `Host` headers, and requests from web pages of other sites.
    """

    def __init__(self, app: ASGIApp, routes: RouteTable, tokens: TokenSet | None) -> None:
        self._app = app
        self._routes = routes
        self._tokens = tokens

    async def __call__(self, scope: AsgiScope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
            return
        if scope["type"] != "http":  # the hub has no websockets
            await send({"type": "websocket.close", "code": 1008})
            return
        run, path = split_run(scope["path"])
        route = None if run is None else self._routes.find(scope["method"], path)
        scope["hub_route"] = route
        if run is None:
            refusal: JSONResponse | None = _refuse(404, "not the name of a run")
        else:
            # In place: the request log outside and the routes inside both read this.
            scope["run"] = run
            scope["names_run"] = path != scope["path"]
            if scope["names_run"]:
                scope["path"] = path
                scope["raw_path"] = quote(path).encode()
            refusal = self._refusal(scope, run, route)
            if refusal is None and route is None:
                refusal = self._no_row(scope["method"], path)
            is_vital = route is not None and route.is_vital
            if scope.get("extensions", {}).get(CROWDED_EXTENSION) and not is_vital:
                refusal = _refuse(503, "all connections are in use; try again")
        if refusal is None and route is not None and route.scopes:
            scope["is_authorised"] = True
        await (refusal or self._app)(scope, receive, send)

    def _no_row(self, method: str, path: str) -> JSONResponse | None:
        """Return the answer to a request without a row; None for a path with a slash too many, which is redirected.

        It gets no further: what the table does not find, the routers behind it could.
        """
        if path.endswith("/") and self._routes.find(method, path[:-1]) is not None:
            return None
        if allowed := self._routes.methods(path):
            response = _refuse(405, "Method Not Allowed")
            response.headers["Allow"] = ", ".join(allowed)
            return response
        return _refuse(404, "Not Found")

    def _refusal(self, scope: AsgiScope, run: str, route: Route | None) -> JSONResponse | None:
        if route is not None and not route.scopes:
            return None
        if self._tokens is None:
            return _refusal_without_tokens(scope, route)
        secrets_sent = _header(scope, b"authorization")
        if not secrets_sent:
            return _refuse(401, "this hub requires a token: Authorization: Bearer TOKEN")
        scheme, _, secret = secrets_sent[0].partition(b" ")
        token = self._tokens.find(secret.strip())
        today = datetime.datetime.now(datetime.UTC).date()
        if token is not None and token.expires is not None and token.expires <= today:
            return _refuse(401, f"token {token.name!r} expired on {token.expires}")
        if token is None or scheme.lower() != b"bearer" or len(secrets_sent) > 1:
            return _refuse(401, "unknown token")
        scope["token_name"] = token.name
        if token.runs is not None:
            scope["covers"] = token.covers
        needed = route.scopes if route is not None else [Scope.ADMIN]
        if not token.allows(needed):
            names = " or ".join(sorted(needed))
            return _refuse(403, f"token {token.name!r} lacks the scope {names}")
        is_of_all_runs = route is not None and route.is_hub_wide and not scope["names_run"]
        if not token.covers(run) and not is_of_all_runs:
            return _refuse(403, f"token {token.name!r} is not for the run {run!r}")
        return None


def _refusal_without_tokens(scope: AsgiScope, route: Route | None) -> JSONResponse | None:
    headers = scope["headers"]
    if is_cross_site(headers):
        return _refuse(403, CROSS_SITE)
    address = (scope.get("server") or (None,))[0]
    if (foreign := foreign_host(headers, server=address)) is not None:
        return _refuse(
            403,
            f"this hub has no tokens and serves its own machine, which {foreign!r} does not name; call it as localhost,"
            " or start it with --token",
        )
    if route is not None and route.is_destructive:
        client = scope.get("client")
        is_forwarded = any(_header(scope, name) for name in _FORWARDING)
        if client is None or not is_loopback(client[0]) or is_forwarded:
            return _refuse(
                403,
                f"{route.method} {route.template} is for clients on the hub's own machine while the"
                " hub has no tokens; start it with --token or --tokens and send an admin token",
            )
    return None


def _header(scope: AsgiScope, name: bytes) -> list[bytes]:
    return [value for key, value in scope["headers"] if key.lower() == name]
