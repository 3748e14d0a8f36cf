"""Read a hub: the step, the queue, the environments, and why there is no batch. Used by `atropos status` and `up`."""

from __future__ import annotations

import os
import ssl
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Self, TypeVar

import httpx
from pydantic import BaseModel, ValidationError
from rich.console import Group
from rich.table import Table
from rich.text import Text

from atroposlib.api.schemas import MAX_PAGE, Explanation, HubStatus, Ledger, ReplicaStatus
from atroposlib.errors import HubRejected, HubUnavailable
from atroposlib.frontend.run_files import Fate
from atroposlib.runtime.losses import listed
from atroposlib.utils.wording import counted, without_users

M = TypeVar("M", bound=BaseModel)

TOKEN_VARIABLE = "ATROPOS_HUB_TOKEN"
TIMEOUT_S = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class HubView:
    """One reading of a hub's run."""

    explanation: Explanation
    ledger: Ledger
    replicas: list[ReplicaStatus]
    """The hubs of a shared database, and which runs each serves; empty without one."""


class HubReader:
    """Reads one hub; as an `async with` block."""

    def __init__(self, url: str, *, token: str | None = None) -> None:
        """`url` may name a run (`http://hub:8000/runs/NAME`); `token` None: that of ATROPOS_HUB_TOKEN."""
        self.url = url.rstrip("/")
        token = token or os.environ.get(TOKEN_VARIABLE)
        headers = {"Authorization": f"Bearer {token}"} if token else {}
        self._http = httpx.AsyncClient(
            headers=headers,
            timeout=TIMEOUT_S,
            trust_env=False,
            verify=ssl.create_default_context(),  # httpx alone does not read SSL_CERT_FILE then
        )

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self._http.aclose()

    async def read(self, *, num_environments: int = 0) -> HubView:
        """Return the state now, with the `num_environments` worst environments, read in pages.

        Raises HubUnavailable or HubRejected.
        """
        explanation = await self._explanation(offset=0, num_left=num_environments)
        found = explanation.environments
        while len(found) < min(num_environments, explanation.num_environments):
            page = await self._explanation(
                offset=len(found), num_left=num_environments - len(found)
            )
            if not page.environments:
                break  # the run was reset
            found += page.environments
        return HubView(
            explanation=explanation,
            ledger=await self._get("/ledger", Ledger),
            replicas=(await self._get("/status", HubStatus)).replicas or [],
        )

    async def _explanation(self, *, offset: int, num_left: int) -> Explanation:
        page = {"offset": offset, "limit": min(num_left, MAX_PAGE)}
        return await self._get("/explain", Explanation, params=page)

    async def _get(
        self, path: str, model: type[M], *, params: Mapping[str, int] | None = None
    ) -> M:
        try:
            answer = await self._http.get(f"{self.url}{path}", params=params)
        except httpx.HTTPError as error:
            reason = str(error) or type(error).__name__
            raise HubUnavailable(
                f"no answer from the hub at {self.url}: {reason}; run-api starts one"
            ) from error
        if answer.status_code != httpx.codes.OK:
            detail = answer.text[:200]
            if answer.status_code >= 500:
                raise HubUnavailable(f"{self.url}{path} answered {answer.status_code}: {detail}")
            raise HubRejected(
                f"{self.url}{path} answered {answer.status_code}: {detail}; is this a hub, and is "
                f"{TOKEN_VARIABLE} set to a token with the right to read?",
                status=answer.status_code,
                detail=detail,
            )
        try:
            return model.model_validate_json(answer.content)
        except ValidationError as error:
            detail = answer.text[:200]
            raise HubRejected(
                f"{self.url}{path} is not what a hub answers: {detail}",
                status=answer.status_code,
                detail=detail,
            ) from error


def describe_ledger(ledger: Ledger) -> str:
    """Return where every group is, in one line.

    >>> describe_ledger(Ledger(produced=5, queued=2, buffered=0, leased=0, trained=3, expired=0, dead=0, discarded=0,
    ...     rejected={}, duplicates=1))
    '5 groups = 3 trained + 2 queued; 1 received again'
    """
    places = _places(ledger).items()
    sum_ = " + ".join(f"{count:,} {place}" for place, count in places if count)
    again = f"; {ledger.duplicates:,} received again" if ledger.duplicates else ""
    return f"{counted(ledger.produced, 'group')}{f' = {sum_}' if sum_ else ''}{again}"


def is_closed(ledger: Ledger) -> bool:
    """Whether every group that was produced is in exactly one place."""
    return ledger.produced == sum(_places(ledger).values())


def _places(ledger: Ledger) -> dict[str, int]:
    names = ["trained", "delivered_unconfirmed", "leased", "queued", "buffered"]
    names += ["expired", "dead", "discarded"]
    found = {name: int(getattr(ledger, name)) for name in names}
    return {**found, "rejected": sum(ledger.rejected.values())}


def describe_queue(view: HubView) -> str:
    """Return step, queue, leases and staleness in one line."""
    seen = view.explanation
    size = "" if seen.batch_size is None else f" (batch: {counted(seen.batch_size, 'sequence')})"
    age = ""
    if seen.oldest_version is not None:
        age = f"  oldest {counted(seen.policy_version - seen.oldest_version, 'version')} old"
    bound = "" if seen.max_staleness is None else f" (limit {seen.max_staleness})"
    return (
        f"step {seen.current_step}  policy version {seen.policy_version}  "
        f"queue {counted(seen.queued_groups, 'group')}, {counted(seen.queued_sequences, 'sequence')}{size}  "
        f"leased batches {seen.leased_batches}{age}{bound if age else ''}"
    )


def describe_fates(fates: Mapping[str, Fate]) -> str:
    """Return what the trainer did with the groups it received, in one line.

    >>> describe_fates({"a": Fate(1, "trained", 1.0, too_old_tokens=30), "b": Fate(2, "untrained", 0.0)})
    '2 groups = 1 trained + 1 untrained, up to step 2; 30 tokens too old'
    """
    counts = Counter(each.fate for each in fates.values())
    sum_ = " + ".join(f"{count:,} {fate}" for fate, count in counts.most_common())
    last = max((each.step for each in fates.values()), default=0)
    num_old = sum(each.too_old_tokens for each in fates.values())
    old = f"; {counted(num_old, 'token')} too old" if num_old else ""
    return f"{counted(len(fates), 'group')}{f' = {sum_}' if sum_ else ''}, up to step {last}{old}"


def render_view(view: HubView, *, url: str, fates: Mapping[str, Fate] | None = None) -> Group:
    """Return the whole page of `atropos status`; `fates` are those of a run's trainer."""
    seen = view.explanation
    environments = Table(
        "environment", "state", "last seen", "queued", "buffered", "floor", box=None
    )
    for each in seen.environments:
        environments.add_row(
            f"{each.name} ({each.env_id})",
            each.state,
            f"{each.last_seen_s:.0f} s ago",
            str(each.queued_sequences),
            str(each.buffered_sequences),
            str(each.floor),
        )
    counts = []
    for each in seen.environments:
        # A suspicious answer is not lost, unless its group is also dropped.
        found: dict[str, dict[str, int]] = {"lost": {}, "suspicious": {}}
        for name, count in (each.losses or {}).items():
            detector = name.removeprefix("suspicious_")
            found["lost" if detector == name else "suspicious"][detector] = count
        counts += [f"{each.name} {what}: {listed(of)}" for what, of in found.items() if of]
    hubs = Table("hub", "state", "runs", box=None)
    for hub in view.replicas:
        hubs.add_row(
            hub.address, "alive" if hub.is_alive else "lost", ", ".join(hub.runs) or "none"
        )
    batch = "a batch is ready" if seen.batch == "ready" else f"no batch: {seen.reason}"
    dead = ", ".join(f"{count} {reason}" for reason, count in seen.dead.items())
    where, ledger = without_users(url), f"ledger: {describe_ledger(view.ledger)}"
    lines = [where, describe_queue(view), batch, ledger]
    lines += [seen.refusal] if seen.refusal else []
    lines += [f"dead: {dead}"] if dead else []
    lines += [] if fates is None else [f"trainer: {describe_fates(fates)}"]
    if seen.unknown_steps:
        again = "of which groups may be trained on again"
        lines.append(f"resumed past {counted(seen.unknown_steps, 'unknown step')}, {again}")
    lines += counts
    lines += [f"not granted: {conflict}" for conflict in seen.conflicts]
    num_more = seen.num_environments - len(seen.environments)
    below = Text(f"{num_more:,} more; {seen.num_active:,} of {seen.num_environments:,} are active")
    none_yet = Text("no environment has registered")
    page = [Text("\n".join(lines)), environments if seen.num_environments else none_yet]
    page += [below] if num_more else []
    return Group(*page, *([hubs] if view.replicas else []))
