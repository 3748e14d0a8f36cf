"""What a run takes and answers: plain data and refusals.

The server, the decoder process and the coordinator share it; it knows none of them, nor FastAPI.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from atroposlib.errors import AtroposError


class NotRegistered(AtroposError):
    """No trainer has registered, so there is no batch size to cut batches by."""


class RunReset(AtroposError):
    """The run was reset while the request was under way."""


class AnotherExperiment(AtroposError):
    """The groups were sampled for an experiment that is no longer the run's."""


class Overloaded(AtroposError):
    """More is queued than the run may hold. The same request will be taken when batches have left."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunPolicy:
    """What a run promises and how much it may hold. None: no bound."""

    lease_ttl_s: float = 900.0
    """Longer than a training step; a trainer renews it while it works."""
    env_timeout_s: float = 60.0
    """An environment not heard of for this long no longer counts in weights and minimums."""
    max_staleness: int | None = None
    """Policy versions; a trainer's registration may ask for another bound."""
    max_deliveries: int = 5
    """A group leased this often without an acknowledgement is set aside as dead."""
    keep_trained_batches: int = 1000
    keep_trained_bytes: int = 2**30
    """Acknowledged batches kept, without a checkpoint, for a trainer that falls back; the older ones go first."""
    keep_dead_bytes: int = 2**30
    max_queued_bytes: int | None = None
    max_queued_sequences: int | None = None
    max_queued_groups: int | None = 250_000
    """Beyond any of them, groups are refused until batches leave; see `admission`. A queued group takes 0.65 KiB of
    memory beside its payload."""


class IncomingGroup(NamedTuple):
    """A checked group, packed, and what the hub needs to know of it."""

    env_id: int | None
    num_sequences: int
    num_tokens: int
    policy_version: int | None
    group_id: str | None
    digest: bytes
    """16 bytes that tell contents apart; empty without a `group_id`."""
    payload: bytes
    """`wire.pack_group`."""


class Receipt(NamedTuple):
    """What became of one accepted group."""

    env_id: int | None = None
    buffer_size: int | None = None
    """Sequences buffered for the environment after this group; None: it went to the queue."""
    is_duplicate: bool = False
    """The group came before under its id; nothing was stored."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Delivery:
    """One batch on its way to a trainer."""

    batch_id: int
    lease_id: str
    epoch: int
    step: int
    """`current_step` after this delivery."""
    expires_in_s: float
    payloads: list[bytes]
    staleness: list[int]
    """Per group: policy versions between its sampling and now."""
    num_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupHeader:
    """What the policy knows of one queued group."""

    number: int
    """Arrival number, unique and increasing within a run."""
    env_id: int | None
    num_sequences: int
    policy_version: int | None = None
    """Oldest policy version that sampled a token of the group; None: unknown."""
    arrival_step: int = 0
    """Policy version that the engines served when the group came: stands in for an unknown `policy_version`."""
    num_tokens: int = 0
    num_bytes: int = 0
    """Of the stored payload."""


def version_of(header: GroupHeader) -> int:
    """Policy version that sampled the group; one that came without is taken to be of its arrival."""
    return header.arrival_step if header.policy_version is None else header.policy_version
