"""The environments of one run: which are active, their share of the work, and how much is queued ahead of them.

An environment is *active* while it is connected and has called within the timeout; only active ones count in weights
and minimums, so that no batch waits for a dead process. The clock is an argument. `state` decides what happens to the
groups of an inactive environment.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import chain
from statistics import fmean
from typing import Any

from atroposlib.api.run.queue import GroupQueue
from atroposlib.api.schemas import RegisterEnv
from atroposlib.errors import AtroposError
from atroposlib.scored_data import GroupHeader

MIN_ENV_WEIGHT = 0.01
"""Smallest `env_weight` reported to an environment, as in the original."""
_MAX_WEIGHT = 1e9
"""Larger weights count as this, so that sums of claims stay finite."""
MAX_ENVIRONMENTS = 10_000
"""Environment ids per run."""
NUM_BATCHES = 12
"""Recent batches that count for `Shares`."""
GAIN = 4.0
"""How strongly an environment that is behind is asked for more, in its mean lag per batch.

In 100 random settings, 0, 1, 4 and 6 keep the shares of 60, 76, 94 and 92 within one group (simulated at commit
050caf8).
"""


class TooManyEnvironments(AtroposError):
    """Every id is taken by an active environment."""


class EnvironmentNotFound(AtroposError):
    """The environment id is unknown in this run, or belongs to another process or experiment."""


@dataclass(slots=True, kw_only=True)
class Environment:
    """A registered environment. The id is its index in order of first registration."""

    env_id: int
    registration: RegisterEnv
    name: str
    is_connected: bool = True
    """False after it disconnects."""
    is_silent: bool = False
    """Whether it has made no call for longer than the timeout."""
    last_seen: float
    """Injected clock, seconds."""
    buffered: list[GroupHeader] = field(default_factory=list)
    """Odd-sized groups that wait for others to make up one full group."""
    items_in_flight: int | None = None
    """At its last status request; None from an original client."""
    oldest_item_since: float | None = None
    """When the oldest of these items began, injected clock; None if there is none."""
    losses: Mapping[str, int] | None = None
    """What came to nothing since its start, as of that request, by reason."""

    @property
    def is_active(self) -> bool:
        return self.is_connected and not self.is_silent

    @property
    def share(self) -> float:
        """`min_batch_allocation`; 0 if none was requested or the environment is not active."""
        return (self.registration.min_batch_allocation or 0.0) if self.is_active else 0.0

    @property
    def demand(self) -> float:
        """Context length times weight: its relative claim on the work."""
        weight = min(max(0.0, self.registration.weight), _MAX_WEIGHT)
        return max(0, self.registration.max_token_length) * weight

    @property
    def num_buffered_sequences(self) -> int:
        return sum(header.num_sequences for header in self.buffered)

    def saved(self) -> dict[str, Any]:
        """What survives a restart, as JSON; buffered groups are in the store."""
        return {
            "registration": self.registration.model_dump(),
            "name": self.name,
            "is_connected": self.is_connected,
        }


class Environments:
    def __init__(self) -> None:
        self._all: list[Environment] = []
        self._demand: float | None = None
        self._num_active: int | None = None
        self._claimed: float | None = None
        self.version = 0
        """Increases with every change of the active environments or their claims."""

    def __len__(self) -> int:
        return len(self._all)

    def __iter__(self) -> Iterator[Environment]:
        return iter(self._all)

    def find(self, env_id: int | None) -> Environment | None:
        """Return an environment; None for an unknown id."""
        if env_id is None or not 0 <= env_id < len(self._all):
            return None
        return self._all[env_id]

    def get(self, env_id: int, *, env_uid: str | None = None) -> Environment:
        """Return an environment. Raises `EnvironmentNotFound`, also if the id belongs to another process."""
        environment = self.find(env_id)
        if environment is None:
            raise EnvironmentNotFound(
                f"environment {env_id} is not registered in this run"
                f" ({len(self._all)} are); register it again with POST /register-env"
            )
        if env_uid is not None and environment.registration.env_uid != env_uid:
            raise EnvironmentNotFound(
                f"environment {env_id} is {environment.name}, registered by another process;"
                " register again with POST /register-env"
            )
        return environment

    def register(self, registration: RegisterEnv, *, now: float) -> Environment:
        """Add an environment, or give a returning one its id back.

        The same `env_uid` is the same environment. Without a match, an inactive environment of the same name is
        replaced, so that a restarted process finds its checkpoints under its old name. A full registry reuses the id
        of the inactive environment that called longest ago, or raises `TooManyEnvironments`.
        """
        environment = self._returning(registration)
        if environment is None and len(self._all) >= MAX_ENVIRONMENTS:
            inactive = [each for each in self._all if not each.is_active]
            if not inactive:
                raise TooManyEnvironments(f"{MAX_ENVIRONMENTS} environments take part already")
            environment = min(inactive, key=lambda each: each.last_seen)
            environment.name = f"{registration.desired_name}_{environment.env_id}"
        if environment is None:
            wanted = registration.desired_name
            same_name = sum(each.registration.desired_name == wanted for each in self._all)
            environment = Environment(
                env_id=len(self._all),
                registration=registration,
                name=f"{wanted}_{same_name}",
                last_seen=now,
            )
            self._all.append(environment)
        environment.registration = registration
        environment.is_connected = True
        environment.is_silent = False
        environment.last_seen = now
        environment.items_in_flight = environment.oldest_item_since = environment.losses = None
        self._changed()
        return environment

    def _returning(self, registration: RegisterEnv) -> Environment | None:
        uid, name = registration.env_uid, registration.desired_name
        same_uid = (each for each in self._all if each.registration.env_uid == uid)
        same_name = (
            each
            for each in self._all
            if each.registration.desired_name == name and not each.is_active
        )
        return next(same_name if uid is None else chain(same_uid, same_name), None)

    def disconnect(self, environment: Environment) -> None:
        environment.is_connected = False
        self._changed()

    def note_call(self, environment: Environment, *, now: float) -> bool:
        """Record a call; return whether the environment had been silent."""
        environment.last_seen = now
        was_silent = environment.is_silent
        if was_silent:
            environment.is_silent = False
            self._changed()
        return was_silent

    def silence(self, *, now: float, timeout_s: float) -> list[Environment]:
        """Mark as silent and return the active environments without a call for `timeout_s`."""
        gone = [each for each in self._all if each.is_active and now - each.last_seen > timeout_s]
        for environment in gone:
            environment.is_silent = True
        if gone:
            self._changed()
        return gone

    def _changed(self) -> None:
        self.version += 1
        self._demand = None
        self._num_active = None
        self._claimed = None

    def adopt(self, earlier: Environments) -> None:
        """Copy the environments of an earlier experiment, with their ids and nothing buffered; others disconnect."""
        others = self._all[len(earlier) :]
        for environment in others:
            environment.is_connected = False
        self._all = [*(replace(each, buffered=[]) for each in earlier), *others]
        self._changed()

    @property
    def num_active(self) -> int:
        if self._num_active is None:
            self._num_active = sum(environment.is_active for environment in self._all)
        return self._num_active

    def shares(self) -> dict[int, float]:
        """Minimums of active environments, by id, in order of registration."""
        return {each.env_id: each.share for each in self._all if each.share > 0}

    def unallocated_fraction(self) -> float:
        """Share of a batch that no active environment's minimum claims."""
        if self._claimed is None:
            self._claimed = sum(environment.share for environment in self._all)
        return 1.0 - min(1.0, self._claimed)

    def weight(self, environment: Environment) -> float:
        """The environment's share of the work, compared with the active ones, at least `MIN_ENV_WEIGHT`."""
        return max(MIN_ENV_WEIGHT, self._part(environment))

    def own_share(self, environment: Environment) -> float:
        """Share of a batch that the environment supplies if all others supply theirs: its minimum, and by weight.

        An environment without weight counts as a hundredth of an average one.
        """
        part = max(MIN_ENV_WEIGHT / max(1, self.num_active), self._part(environment))
        return self.unallocated_fraction() * part + environment.share

    def _part(self, environment: Environment) -> float:
        """The environment's part of the active ones' demand; 0 if none has any."""
        if self._demand is None:
            self._demand = sum(each.demand for each in self._all if each.is_active)
        return environment.demand / self._demand if self._demand else 0.0

    def restore(self, saved: Iterable[dict[str, Any]], *, now: float) -> None:
        """Restore what `Environment.saved` returned, by id; every environment gets the full timeout again."""
        self._all = [
            Environment(
                env_id=env_id,
                registration=RegisterEnv.model_validate(each["registration"]),
                name=each["name"],
                is_connected=each["is_connected"],
                last_seen=now,
            )
            for env_id, each in enumerate(saved)
        ]
        self._changed()


class Backlog:
    """How much work others have queued ahead of an environment, updated per change so that queries are cheap.

    Per environment: queued sequences, rounded up to whole largest groups, less what its minimum claims.
    """

    def __init__(self, queue: GroupQueue, environments: Environments) -> None:
        self._queue = queue
        self._environments = environments
        self._total = 0
        self._of: dict[int | None, int] = {}
        self._basis: tuple[int, int, int] | None = None

    def of_others(self, env_id: int, *, batch_size: int, max_group_size: int) -> int:
        """Return sequences. Recounts only what changed, or everything if the rounding or a minimum changed."""
        touched = self._queue.touched
        basis = (self._environments.version, batch_size, max_group_size)
        if basis != self._basis:
            self._basis = basis
            self._total = 0
            self._of.clear()
            touched.update(self._queue.env_ids())
        for each in touched:
            rounded = -(-self._queue.num_sequences(each) // max_group_size) * max_group_size
            environment = self._environments.find(each)
            claimed = 0 if environment is None else int(batch_size * environment.share)
            left = max(0, rounded - claimed)
            self._total += left - self._of.get(each, 0)
            self._of[each] = left
        touched.clear()
        return self._total - self._of.get(env_id, 0)


class Shares:
    """What recent batches took from each environment, compared with its fair share, so that shares are kept over many.

    An environment whose groups a batch could have used but did not, because others had queued theirs earlier, is behind
    and is asked for more until it has caught up; one that is ahead for less. What an environment cannot supply is
    divided among the others, and given back as soon as it can. `RunState` reports deliveries.
    """

    def __init__(self) -> None:
        self._batches: dict[int, dict[int, tuple[float, float]]] = {}
        """Of recent batches, oldest first: each environment's fair share and the share taken."""
        self._means: dict[int, tuple[float, float]] = {}
        """The same, averaged, of each environment that had a share of the last batch."""

    def deliver(
        self,
        number: int,
        own: Mapping[int, float],
        *,
        taken: Counter[int | None],
        left: Mapping[int, int],
        batch_size: int,
    ) -> None:
        """Record a batch: sequences `taken` from each environment of `own`, and those `left` in the queue.

        A batch that is replayed replaces its earlier record.
        """
        self.forget(number)
        able = {
            env_id: (taken[env_id] + left[env_id]) / batch_size
            + max(0.0, share - self.wanted(env_id, own=share))  # what it was asked to hold back
            for env_id, share in own.items()
        }
        fair = fair_shares(own, able)
        self._batches[number] = {e: (share, taken[e] / batch_size) for e, share in fair.items()}
        if len(self._batches) > NUM_BATCHES:
            del self._batches[next(iter(self._batches))]
        self._update_means()

    def forget(self, number: int) -> None:
        """Remove the record of a batch that is delivered again or whose groups were given back."""
        if self._batches.pop(number, None) is not None:
            self._update_means()

    def wanted(self, env_id: int, *, own: float) -> float:
        """Return the share of a batch, 0 to 1, that an environment with this share of its own should supply."""
        if env_id not in self._means:
            return min(1.0, own)
        fair, taken = self._means[env_id]
        return min(1.0, max(0.0, max(own, fair) + GAIN * (fair - taken)))

    def _update_means(self) -> None:
        batches = list(self._batches.values())
        for_last = batches[-1] if batches else {}
        self._means = {}
        for env_id in for_last:
            both = (batch[env_id] for batch in batches if env_id in batch)
            fairs, takens = zip(*both, strict=True)
            self._means[env_id] = fmean(fairs), fmean(takens)


def fair_shares(own: Mapping[int, float], able: Mapping[int, float]) -> dict[int, float]:
    """Divide a batch by the environments' `own` shares; what one is not able to supply, the others do in proportion.

    >>> fair_shares({0: 0.5, 1: 0.25, 2: 0.25}, {0: 0.1, 1: 1.0, 2: 1.0})
    {0: 0.1, 1: 0.45, 2: 0.45}
    """
    shares: dict[int, float] = {}
    rest = {env_id: share for env_id, share in own.items() if share > 0}
    left = 1.0
    while rest:
        scale = left / sum(rest.values())
        short = [env_id for env_id, share in rest.items() if able[env_id] < share * scale]
        if not short:
            return shares | {env_id: share * scale for env_id, share in rest.items()}
        for env_id in short:
            del rest[env_id]
            shares[env_id] = able[env_id]
            left -= able[env_id]
    return shares
