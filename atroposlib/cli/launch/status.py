"""Read a hub: the step, the queue, the environments, and why there is no batch. Used by `atropos status` and `up`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from rich.console import Group
from rich.table import Table
from rich.text import Text

from atroposlib.api.schemas import MAX_PAGE, Explanation, Ledger, ReplicaStatus
from atroposlib.client import HubClient
from atroposlib.errors import HubUnavailable
from atroposlib.frontend.run_files import Fate
from atroposlib.runtime.losses import listed
from atroposlib.utils.wording import counted, without_users

TIMEOUT_S = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class HubView:
    """One reading of a hub's run."""

    explanation: Explanation
    ledger: Ledger
    replicas: list[ReplicaStatus]
    """The hubs of a shared database, and which runs each serves; empty without one."""


async def read_hub(hub: HubClient, *, num_environments: int = 0) -> HubView:
    """Return the state now, with the `num_environments` worst environments, read in pages. Raises `HubError`."""
    try:
        explanation = await hub.explain(limit=min(num_environments, MAX_PAGE))
        found = explanation.environments
        while len(found) < min(num_environments, explanation.num_environments):
            limit = min(num_environments - len(found), MAX_PAGE)
            page = await hub.explain(offset=len(found), limit=limit)
            if not page.environments:
                break  # the run was reset
            found += page.environments
        ledger, replicas = await hub.ledger(), (await hub.status()).replicas or []
    except HubUnavailable as error:
        if isinstance(error.__cause__, OSError):  # not connected
            raise HubUnavailable(f"{error}; run-api starts a hub") from error
        raise
    return HubView(explanation=explanation, ledger=ledger, replicas=replicas)


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
