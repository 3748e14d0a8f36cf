"""Data and errors that a run exchanges with its callers; imports neither the server nor FastAPI."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from atroposlib.errors import AtroposError


class NotRegistered(AtroposError):
    """No trainer has registered, so the batch size is unknown."""


class RunReset(AtroposError):
    """The run was reset or closed while the request was in flight, or has no trainer yet."""


class RunMoved(AtroposError):
    """The run was closed here and is served by another replica, or soon again by this one: retry the same request."""


class NoOwner(AtroposError):
    """No replica serves the run at this time. Retry the same request."""


class ExperimentReplaced(AtroposError):
    """The groups were sampled for an experiment that is no longer the run's."""


class RunFinished(AtroposError):
    """An original trainer registered right after the last step of another one: its run has no more batches."""


class Overloaded(AtroposError):
    """The queue is full. Retry the same request after batches have been delivered."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunPolicy:
    """Timeouts and bounds of a run, and of the runs of one hub. None: no bound."""

    lease_ttl_s: float = 900.0
    """Longer than a training step; a trainer renews it while it works."""
    env_timeout_s: float = 60.0
    """An environment without a call for this long no longer counts in weights and minimums."""
    max_staleness: int | None = None
    """Policy versions; a trainer's registration may ask for another bound."""
    max_deliveries: int = 5
    """A group leased this often without an acknowledgement is set aside as dead."""
    keep_trained_batches: int = 1000
    keep_trained_bytes: int = 2**30
    """Bounds of acknowledged batches kept until a checkpoint, for a trainer that resumes; the oldest are freed."""
    keep_dead_bytes: int = 2**30
    max_queued_bytes: int | None = None
    max_queued_sequences: int | None = None
    max_queued_groups: int | None = 250_000
    """Beyond any of them, groups are refused until batches leave; see `accounts`. A queued group takes 0.8 KiB of
    memory beside its payload."""
    max_runs: int = 100
    """Open runs of the hub."""
    idle_run_s: float = 3600.0
    """A run without leases is closed after this time without a request; the next one opens it again."""
    keep_set_aside: int | None = None
    keep_set_aside_days: float | None = None
    """Earlier experiments of a run beyond either are deleted, the oldest first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Quota:
    """What the open runs that one token began may be and hold, on one hub process. None: no bound."""

    max_runs: int | None = None
    max_bytes: int | None = None
    """Payloads of held groups, the trained and the dead ones that a run keeps included."""


class Receipt(NamedTuple):
    """What became of one accepted group."""

    env_id: int | None = None
    buffer_size: int | None = None
    """Sequences buffered for the environment after this group; None: it was not buffered."""
    is_duplicate: bool = False
    """Whether the group was stored before under its id; nothing was stored now."""
