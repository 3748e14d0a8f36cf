"""What a route is: one row says how it is called, who may call it, what its body may cost, and how it is served.

The table itself stands in handlers.py; the application, the rights (security.py), the limits (limits.py), the labels of
the metrics and the OpenAPI document are made from it. A request's row is looked up once, by `Access`, and travels in
`scope["hub_route"]`; what no row names needs the admin scope.
"""

from __future__ import annotations

import enum
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from atroposlib.api.run.hub import DEFAULT_RUN
from atroposlib.api.stores.runs import RUN_NAME


class Scope(enum.StrEnum):
    """What a token may be good for."""

    PRODUCE = "produce"
    """Environments: send groups."""
    CONSUME = "consume"
    """Trainers: take batches, set the policy version."""
    READ = "read"
    """Look: accounts, metrics, examples."""
    ADMIN = "admin"
    """Everything, erasing included."""


class Body(enum.Enum):
    """What a request carries, which decides what it may cost."""

    CONTROL = "control"
    """A small JSON object, or nothing."""
    GROUPS = "groups"
    """Scored groups: large, and subject to back-pressure."""


@dataclass(frozen=True, slots=True)
class Route:
    """One row of the table."""

    method: str
    template: str
    """Path, with `{name}` for one segment of any text."""
    handler: Callable[..., Any] | None
    """A hot one takes a Starlette request and returns a response; others are FastAPI's. None: FastAPI has its own."""
    scopes: Collection[Scope]
    """Any of them lets a request in, and ADMIN always does; empty: anyone."""
    body: Body = Body.CONTROL
    is_hot: bool = field(default=False, kw_only=True)
    """Called directly: the way through FastAPI costs several times as much as the handler."""
    is_destructive: bool = field(default=False, kw_only=True)
    """While the hub has no tokens, only for clients on the same machine."""
    is_hub_wide: bool = field(default=False, kw_only=True)
    """Shows every run, so a token for some runs is not enough."""
    is_vital: bool = field(default=False, kw_only=True)
    """Answered even when all connections are in use: health, and what a trainer that holds a batch has to say."""
    api: Mapping[str, Any] = field(default_factory=dict, kw_only=True)
    """Options of FastAPI's route: what the OpenAPI document says beyond the handler's signature."""


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
        """Return the row for a request whose run is already off the path; None for what the hub lacks."""
        plain = self._plain.get((method, path))
        if plain is not None:
            return plain
        found = (
            route
            for route, pattern in self._patterns
            if route.method == method and pattern.fullmatch(path)
        )
        return next(found, None)


class RunPath(NamedTuple):
    """A request path, taken apart."""

    run: str | None
    """None: not a path that a run can have."""
    path: str
    """What is left. `/runs/NAME` itself stays as it is: it is the run's own resource."""


def split_run(path: str) -> RunPath:
    """Take `/runs/NAME` off the path; plain paths belong to the default run.

    Only once: a path that names a second run belongs to none.

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
