"""The environments of one run: which are active, their share of the work, and how much is queued ahead of them.

An environment is *active* while it is connected and has called within the timeout; only active ones count in weights
and minimums, so that no batch waits for a dead process. The clock is an argument. `state` decides what happens to the
groups of an inactive environment.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from atroposlib.api.schemas import RegisterEnv
from atroposlib.errors import AtroposError

FloatArray = NDArray[np.float64]
"""One number per environment, by id, unless stated otherwise."""
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
    items_in_flight: int | None = None
    """At its last status request; None from an original client."""
    oldest_item_since: float | None = None
    """When the oldest of these items began, injected clock; None if there is none."""
    over_age: Mapping[str, int] | None = None
    """How many of them are older than the staleness bound, by what they wait for; None if there is none."""
    losses: Mapping[str, int] | None = None
    """What came to nothing since its start, as of that request, by reason."""
    num_lost: int = 0
    """Sum of the losses; what is only suspicious is not lost."""
    main_loss: str | None = None
    """What most of its work came to, if not to groups, as of that request; None also if unknown."""

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

    def saved(self) -> dict[str, Any]:
        """What survives a restart, as JSON."""
        return {
            "registration": self.registration.model_dump(),
            "name": self.name,
            "is_connected": self.is_connected,
        }


class Sums(NamedTuple):
    """Sums over the active environments."""

    num_active: int
    weights: FloatArray
    """Each one's share of the work, compared with the active ones, at least `MIN_ENV_WEIGHT`."""
    unallocated: float
    """Share of a batch that no minimum claims."""
    minimums: Mapping[int, float]
    """By id, in order of registration."""
    own: FloatArray
    """Share of a batch that an environment supplies if all others supply theirs: its minimum, and by weight. One
    without weight counts as a hundredth of an average one."""


class Environments:
    """All environments of a run. What each claims is also kept in arrays: sums over thousands take microseconds."""

    def __init__(self) -> None:
        self._all: list[Environment] = []
        self._claims = np.zeros((3, 0))
        """`[3, environment]`, by id: whether it is active, its demand, its share."""
        self._sums: Sums | None = None
        """Of the claims; None: they have changed since."""
        self._silent_after = -math.inf
        """No environment becomes silent up to then; injected clock."""
        self.version = 0
        """Increases with every change of a minimum."""

    def __len__(self) -> int:
        return len(self._all)

    def __iter__(self) -> Iterator[Environment]:
        return iter(self._all)

    @property
    def num_suspicious(self) -> int:
        """Answers that active environments suspect of a hacked reward, as of their last status request."""
        losses = [pair for each in self if each.is_active for pair in (each.losses or {}).items()]
        return sum(count for name, count in losses if name.startswith("suspicious_"))

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
            self._add([environment])
        environment.registration = registration
        environment.is_connected = True
        environment.is_silent = False
        environment.last_seen = now
        environment.items_in_flight = environment.oldest_item_since = None
        environment.losses = environment.over_age = None
        environment.num_lost, environment.main_loss = 0, None
        self._update(environment)
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
        self._update(environment)

    def end_silence(self, environment: Environment) -> None:
        environment.is_silent = False
        self._update(environment)

    def silence(self, *, now: float, timeout_s: float) -> list[Environment]:
        """Mark as silent and return the active environments without a call for `timeout_s`."""
        if now <= self._silent_after:
            return []
        active = [each for each in self._all if each.is_active]
        gone = [each for each in active if now - each.last_seen > timeout_s]
        for environment in gone:
            environment.is_silent = True
            self._update(environment)
        oldest = min((each.last_seen for each in active if each.is_active), default=now)
        self._silent_after = oldest + timeout_s  # calls until then only move it to later
        return gone

    def adopt(self, earlier: Environments) -> None:
        """Copy the environments of an earlier experiment, with their ids; others disconnect."""
        others = self._all[len(earlier) :]
        for environment in others:
            environment.is_connected = False
        self._replace([*map(replace, earlier), *others])

    def restore(self, saved: Iterable[dict[str, Any]], *, now: float) -> None:
        """Restore what `Environment.saved` returned, by id; every environment gets the full timeout again."""
        self._replace(
            [
                Environment(
                    env_id=env_id,
                    registration=RegisterEnv.model_validate(each["registration"]),
                    name=each["name"],
                    is_connected=each["is_connected"],
                    last_seen=now,
                )
                for env_id, each in enumerate(saved)
            ]
        )

    def _replace(self, environments: Sequence[Environment]) -> None:
        self._all.clear()
        self._claims = np.zeros((3, 0))
        self._sums = None
        self._silent_after = -math.inf
        self.version += 1
        self._add(environments)

    def _add(self, environments: Sequence[Environment]) -> None:
        self._all += environments
        self._claims = np.hstack([self._claims, np.zeros((3, len(environments)))])
        for environment in environments:
            self._update(environment)

    def _update(self, environment: Environment) -> None:
        """Take over a change of an environment into the claims."""
        env_id, share = environment.env_id, environment.share
        self.version += int(share != self._claims[2, env_id])
        self._claims[:, env_id] = environment.is_active, environment.demand, share
        self._sums = None

    @property
    def sums(self) -> Sums:
        if self._sums is None:
            is_active, demands, shares = self._claims
            num_active, demand, claimed = int(is_active.sum()), demands @ is_active, shares.sum()
            parts = demands / demand if demand else np.zeros_like(demands)
            by_weight = np.maximum(MIN_ENV_WEIGHT / max(1, num_active), parts)
            free = 1.0 - min(1.0, float(claimed))
            minimums = {int(env_id): float(shares[env_id]) for env_id in np.flatnonzero(shares)}
            own = free * by_weight + shares
            weights = np.maximum(MIN_ENV_WEIGHT, parts)
            self._sums = Sums(num_active, weights, free, minimums, own)
        return self._sums

    @property
    def num_active(self) -> int:
        return self.sums.num_active

    def own_shares(self) -> FloatArray:
        """`Sums.own` of the active environments; 0 of the others."""
        return np.where(self._claims[0] > 0, self.sums.own, 0.0)


class Shares:
    """What recent batches took from each environment, compared with its fair share, so that shares are kept over many.

    An environment whose groups a batch could have used but did not, because others had queued theirs earlier, is behind
    and is asked for more until it has caught up; one that is ahead for less. What an environment cannot supply is
    divided among the others, and given back as soon as it can. `RunState` reports deliveries.
    """

    def __init__(self) -> None:
        self._rows: dict[int, int] = {}
        """Of recent batches, oldest first, by number: the row of its record."""
        self._records = np.zeros((NUM_BATCHES, 3, 0))
        """`[row, 3, environment]`: whether it had a share of the batch, its fair share, the share taken; else 0."""
        self._means = np.zeros((2, 0))
        """The last two, averaged over the batches in which it had one; 0 unless it had one of the last batch."""

    def deliver(
        self,
        number: int,
        own: FloatArray,
        *,
        taken: Mapping[int | None, int],
        left: Mapping[int | None, int],
        batch_size: int,
    ) -> None:
        """Record a batch: sequences `taken` from each environment, and those `left` in the queue. `own` share 0: none.

        A batch that is replayed replaces its earlier record.
        """
        self.forget(number)
        if len(own) > self._records.shape[2]:
            records = np.zeros((NUM_BATCHES, 3, len(own)))
            records[:, :, : self._records.shape[2]] = self._records
            self._records = records
            self._update_means()
        num_taken, num_left = _by_id(taken, len(own)), _by_id(left, len(own))
        fair, got = self._means
        wanted = np.minimum(1.0, np.maximum(0.0, np.maximum(own, fair) + GAIN * (fair - got)))
        held_back = np.maximum(0.0, own - wanted)  # what it was asked to hold back
        if len(self._rows) == NUM_BATCHES:
            row = self._rows.pop(next(iter(self._rows)))
        else:
            row = next(row for row in range(NUM_BATCHES) if row not in self._rows.values())
        self._rows[number] = row
        has_share, fair, share_taken = self._records[row]
        has_share[:] = own > 0
        fair[:] = fair_shares(own, (num_taken + num_left) / batch_size + held_back)
        share_taken[:] = has_share * num_taken / batch_size
        self._update_means()

    def forget(self, number: int) -> None:
        """Remove the record of a batch that is delivered again or whose groups were given back."""
        row = self._rows.pop(number, None)
        if row is not None:
            self._records[row] = 0.0
            self._update_means()

    def wanted(self, env_id: int, *, own: float) -> float:
        """Return the share of a batch, 0 to 1, that an environment with this share of its own should supply."""
        if env_id >= self._means.shape[1]:
            return min(1.0, own)
        fair, taken = self._means[:, env_id].tolist()
        return float(min(1.0, max(0.0, max(own, fair) + GAIN * (fair - taken))))

    def _update_means(self) -> None:
        num_batches, fair, taken = self._records.sum(axis=0)
        last = next(reversed(self._rows.values()), 0)
        scale = self._records[last, 0] / np.maximum(1, num_batches)
        self._means = np.array([fair * scale, taken * scale])


def _by_id(counts: Mapping[int | None, int], length: int) -> FloatArray:
    """Return the counts of the environments below `length`; clients may send other ids."""
    row = [0.0] * length
    for env_id, count in counts.items():
        if env_id is not None and 0 <= env_id < length:
            row[env_id] = count
    return np.array(row)


def fair_shares(own: FloatArray, able: FloatArray) -> FloatArray:
    """Divide a batch by the environments' `own` shares; what one is not able to supply, the others do in proportion.

    >>> fair_shares(np.array([0.5, 0.25, 0.25]), np.array([0.1, 1.0, 1.0])).tolist()
    [0.1, 0.45, 0.45]
    """
    shares = np.zeros_like(own)
    rest = own > 0
    left = 1.0
    while total := (own * rest).sum():
        parts = own * (left / total)
        short = rest & (able < parts)
        if not short.any():
            return np.where(rest, parts, shares)
        shares[short] = able[short]
        left -= able[short].sum()
        rest &= ~short
    return shares
