"""The contract of a store: what a run must not forget.

A store keeps the payload bytes of groups, where each group is, the open and acknowledged batches, and what the
coordinator writes and reads back: one small document, replaced by nearly every change, and named facts, each written
only when it changes. It decides nothing: which group goes where is the coordinator's
business, and no store ever reads a token. One test-suite (tests/api/test_hub_stores.py) runs on every store.

Calls are made from one event loop and take effect in the order in which they were made. What `append` and a durable
`commit` have answered survives what the store promises to survive (`durability`).
"""

from __future__ import annotations

import enum
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from atroposlib.api.run.types import GroupHeader
from atroposlib.errors import AtroposError, ConfigError


class Durability(enum.Enum):
    """What an answered `append` survives."""

    POWER = "power"
    """Loss of power: the bytes were forced to the disk."""
    PROCESS = "process"
    """The end of the process, `kill -9` included, but not loss of power."""
    MEMORY = "memory"
    """Nothing."""


class StoreFull(AtroposError):
    """There is no room for another group, or the system has no file or memory to spare; nothing was changed.

    Later it may work: groups that leave make room.
    """


class StoreBroken(AtroposError):
    """Writing failed, so what is on the disk is unknown; only a restart, which checks it, can go on."""


class UnreadableRun(ConfigError):
    """What is stored of a run was written by a newer version, or does not say what it has to; it is left alone."""


class CorruptGroups(AtroposError):
    """Stored bytes are not the bytes that were stored."""

    def __init__(self, numbers: Sequence[int]) -> None:
        super().__init__(f"stored payloads of groups {list(numbers)} are damaged")
        self.numbers = list(numbers)


class Place(enum.IntEnum):
    """Where a group that the store still holds is. The values are stored: never renumber them."""

    QUEUED = 0
    BUFFERED = 1
    """Waits for others of its environment to make up one full group."""
    LEASED = 2
    """In a batch that a trainer holds."""
    TRAINED = 3
    """In an acknowledged batch, kept for a trainer that falls back to an older checkpoint."""
    REPLAY = 4
    """In a batch that a resumed trainer gets once more, as it was."""
    DEAD = 5
    """Set aside for a person to look at."""


class Fate(enum.StrEnum):
    """How a group ended whose payload is gone. Its id stays known, if it came with a digest."""

    TRAINED = "trained"
    EXPIRED = "expired"
    DISCARDED = "discarded"
    DEAD = "dead"


class Appended(enum.Enum):
    """What `append` did with one record."""

    STORED = enum.auto()
    DUPLICATE = enum.auto()
    """The id is known, with the same content; nothing was stored."""
    CONFLICT = enum.auto()
    """The id is known, with other content; nothing was stored."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NewGroup:
    """A group to be stored."""

    header: GroupHeader
    group_id: str
    """Unique in the run for ever; the hub makes one for a client that sent none."""
    digest: bytes
    """16 bytes that tell contents apart (`wire.content_digest`); empty: the hub made the id, which cannot come
    again."""
    payload: bytes
    """`wire.pack_group`."""
    place: Place
    """QUEUED or BUFFERED."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredGroup:
    """A group as `open` finds it."""

    header: GroupHeader
    group_id: str
    place: Place
    batch: int | None = None
    """Number of the batch it is in; None outside LEASED, TRAINED, REPLAY."""
    deliveries: int = 0
    """How often it was handed out."""
    reason: str | None = None
    """Why it is DEAD."""


class BatchState(enum.IntEnum):
    """The values are stored: never renumber them."""

    LEASED = 0
    TRAINED = 1
    REPLAY = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredBatch:
    """A batch whose groups are still held. The groups know their batch, not the batch its groups."""

    number: int
    """Unique and increasing within a run."""
    state: BatchState
    step: int
    """The trainer's step it is, or was, for."""
    epoch: int
    """The trainer incarnation that holds or acknowledged it."""
    lease_id: str
    ttl_s: float
    """How long the lease lasts without a heartbeat."""
    request_id: str | None = None
    """Chosen by the trainer: asking again with it returns this batch."""
    is_plain: bool = False
    """Delivered to a client that knows no leases."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Move:
    """A held group that changes its place."""

    number: int
    place: Place
    batch: int | None = None
    deliveries: int = 0
    reason: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class End:
    """A held group whose payload is freed."""

    number: int
    fate: Fate


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """One change of the run, applied whole or not at all."""

    moves: Sequence[Move] = ()
    ends: Sequence[End] = ()
    batches: Sequence[StoredBatch] = ()
    """Added, or replaced by number."""
    closed_batches: Sequence[int] = ()
    document: bytes | None = None
    """Replaces the last; None keeps it. Small: nearly every change writes it."""
    facts: Mapping[str, bytes] = field(default_factory=dict)
    """Added, or replaced by name; the others stay. For what changes seldom, such as one environment."""
    is_durable: bool = True
    """False: may be forgotten by a crash, but never out of order."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedRun:
    """What a store held when it was opened."""

    document: bytes | None = None
    facts: Mapping[str, bytes] = field(default_factory=dict)
    """By name, ascending."""
    groups: Sequence[StoredGroup] = ()
    """By number, ascending."""
    batches: Sequence[StoredBatch] = ()
    """By number, ascending."""
    ended: Counter[Fate] = field(default_factory=Counter)
    """Groups that ended, by fate."""
    next_number: int = 0
    """No group ever had this number or a higher one."""
    found: str = ""
    """One line for the log: what was recovered, rolled forward, cut off. Empty for a fresh store."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreUsage:
    """How full a store is."""

    payload_bytes: int
    """Of held groups."""
    stored_bytes: int
    """What they take up, space not yet given back included."""
    free_bytes: int | None = None
    """Left before `StoreFull`; None: not bounded by the store."""


class GroupStore(Protocol):
    """Keeps one run."""

    @property
    def durability(self) -> Durability: ...

    async def open(self) -> SavedRun:
        """Recover what is stored. Called once, before anything else. Raises `StoreBroken`, `UnreadableRun`."""
        ...

    async def append(self, groups: Sequence[NewGroup]) -> list[Appended]:
        """Store groups with unknown ids; one outcome per group, duplicates within the call included.

        Numbers are unique. Raises `StoreFull`, with nothing stored, or `StoreBroken`.
        """
        ...

    async def commit(self, change: Change) -> None:
        """Apply `change`. Returns when it is as safe as `change.is_durable` asks; raises `StoreBroken`."""
        ...

    async def read(self, numbers: Sequence[int]) -> list[bytes]:
        """Return payloads in the order asked.

        Raises `CorruptGroups` naming all damaged ones, KeyError for absent ones, `StoreFull` when no file opens.
        """
        ...

    def usage(self) -> StoreUsage: ...

    async def clear(self) -> None:
        """Forget everything, ids included; durable."""
        ...

    async def close(self) -> None:
        """Make everything durable and let go of the files."""
        ...
