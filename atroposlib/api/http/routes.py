"""The rows of the route table: method and path, scopes, kind of body, and how the route is served.

handlers.py has the table; the application, access rights (security.py), limits (limits.py), metric labels and the
OpenAPI document derive from it. `Access` looks up a request's row once and stores it in `scope["hub_route"]`; a request
without a row needs the admin scope.
"""

from __future__ import annotations

import enum
import re
from collections.abc import Awaitable, Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from starlette.requests import Request
from starlette.responses import Response

from atroposlib.api.run.hub import DEFAULT_RUN
from atroposlib.api.stores.runs import RUN_NAME


class Scope(enum.StrEnum):
    """What a token permits."""

    PRODUCE = "produce"
    """Environments: send groups."""
    CONSUME = "consume"
    """Trainers: take batches, set the policy version."""
    READ = "read"
    """Read accounts, metrics, examples."""
    ADMIN = "admin"
    """Everything, including deletion."""


@dataclass(frozen=True, slots=True)
class Route:
    """One row of the table."""

    method: str
    template: str
    """Path, with `{name}` for one segment of any text."""
    handler: Callable[..., Any] | None
    """FastAPI documents it, and calls it unless the row has `direct`. None: FastAPI has its own."""
    scopes: Collection[Scope]
    """Any one of them permits the request, and ADMIN always does; empty: no token is needed."""
    has_groups: bool = field(default=False, kw_only=True)
    """Whether the body is scored groups: large, and subject to back-pressure. Otherwise it is a small JSON object."""
    direct: Callable[[Request], Awaitable[Response]] | None = field(default=None, kw_only=True)
    """Called in place of FastAPI, which costs several times as much as the handler."""
    is_destructive: bool = field(default=False, kw_only=True)
    """Whether only clients on the same machine may call it while the hub has no tokens."""
    is_hub_wide: bool = field(default=False, kw_only=True)
    """Whether it shows every run, whatever the path names; to a token for some runs, only those."""
    is_local: bool = field(default=False, kw_only=True)
    """Whether every replica answers it itself: it is about the process, not about a run."""
    begins_run: bool = field(default=False, kw_only=True)
    """Whether it creates the run if there is none."""
    is_vital: bool = field(default=False, kw_only=True)
    """Whether it is served when all connections are in use: health checks, and trainers that hold a batch."""
    api: Mapping[str, Any] = field(default_factory=dict, kw_only=True)
    """FastAPI route options: OpenAPI details beyond the handler's signature."""


class RouteTable:
    """All routes of an application."""

    def __init__(self, routes: Iterable[Route]) -> None:
        self._routes = tuple(routes)
        self._plain = {(each.method, each.template): each for each in self._routes}
        self._patterns = [
            (each, re.compile(re.sub(r"\{\w+\}", "[^/]+", each.template)))
            for each in self._routes
            if "{" in each.template
        ]

    def __iter__(self) -> Iterator[Route]:
        return iter(self._routes)

    def find(self, method: str, path: str) -> Route | None:
        """Return the row for a path without its run prefix; None if there is none."""
        plain = self._plain.get((method, path))
        if plain is not None:
            return plain
        found = (
            route
            for route, pattern in self._patterns
            if route.method == method and pattern.fullmatch(path)
        )
        return next(found, None)

    def methods(self, path: str) -> list[str]:
        """Return the methods that have a row for a path without its run prefix."""
        return [name for name in ("GET", "POST", "DELETE") if self.find(name, path) is not None]


class RunPath(NamedTuple):
    """A request path, split."""

    run: str | None
    """None: not a valid path of a run."""
    path: str
    """The rest. `/runs/NAME` itself stays whole: it is the run's own resource."""


def split_run(path: str) -> RunPath:
    """Split off `/runs/NAME`; paths without it belong to the default run, paths that name two runs to none.

    >>> split_run("/runs/math-2/batch")
    RunPath(run='math-2', path='/batch')
    >>> split_run("/batch")
    RunPath(run='default', path='/batch')
    >>> split_run("/runs/math-2/runs/other").run is None
    True
    """
    if not path.startswith("/runs/"):
        return RunPath(DEFAULT_RUN, path)
    name, slash, rest = path.removeprefix("/runs/").partition("/")
    if not RUN_NAME.fullmatch(name) or rest.startswith("runs/"):
        return RunPath(None, path)
    return RunPath(name, f"/{rest}" if slash else path)
