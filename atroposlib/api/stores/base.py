"""The contract of a store, which keeps what a run must not lose.

A store keeps the payload bytes of groups, the place of each group, the open and acknowledged batches, and data of the
coordinator: one small document, replaced by nearly every change, and named facts, each written only when it changes. It
decides nothing and never parses a payload. One test suite (tests/api/test_hub_stores.py) runs on every store.

Calls come from one event loop and take effect in order. When `append` or a durable `commit` has returned, its effect
survives what `durability` promises.
"""

from __future__ import annotations

import enum
from collections import Counter
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from atroposlib.errors import AtroposError, ConfigError
from atroposlib.scored_data import GroupHeader


class Durability(enum.Enum):
    """What an `append` survives once it has returned."""

    POWER = "power"
    """Loss of power: the bytes were forced to the disk."""
    PROCESS = "process"
    """The end of the process, `kill -9` included, but not loss of power."""
    MEMORY = "memory"
    """Nothing."""


class StoreFull(AtroposError):
    """The store is full, or the system lacks files or memory; nothing was changed. A retry may succeed."""


class StoreBroken(AtroposError):
    """A write failed, so the content of the disk is unknown; a restart checks and recovers it."""


class TermLost(StoreBroken):
    """Another replica has taken the run over: nothing was written, and nothing can be written any more."""


class OwnedElsewhere(AtroposError):
    """Another replica owns the run."""

    def __init__(self, name: str, address: str) -> None:
        super().__init__(f"run {name!r} is served by another hub, at {address}")


class UnreadableRun(ConfigError):
    """A stored run was written by a newer version, or is incomplete; it is left unchanged."""


class CorruptGroups(AtroposError):
    """Stored payloads are damaged."""

    def __init__(self, numbers: Sequence[int]) -> None:
        super().__init__(f"stored payloads of groups {list(numbers)} are damaged")
        self.numbers = list(numbers)


class Place(enum.IntEnum):
    """Where a held group is. The values are stored: never renumber them."""

    QUEUED = 0
    BUFFERED = 1
    """Waits for others of its environment to make up one full group."""
    LEASED = 2
    """In a batch that a trainer holds."""
    TRAINED = 3
    """In an acknowledged batch, kept for a trainer that falls back to an older checkpoint."""
    REPLAY = 4
    """In a batch that a resumed trainer gets again, unchanged."""
    DEAD = 5
    """Set aside and not delivered."""


class Fate(enum.StrEnum):
    """How a group ended. Its payload is freed; its id stays known if it has a digest."""

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
    """A checked group on its way from a request to the store."""

    header: GroupHeader
    payload: bytes
    """`wire.pack_group`."""
    place: Place = Place.QUEUED
    """QUEUED or BUFFERED."""


def known_and_new(
    groups: Sequence[NewGroup],
    digest_of: Callable[[str], bytes | None],
    *,
    refusal: StoreFull | None,
) -> tuple[list[Appended], list[NewGroup]]:
    """Return the answers of `append`, and the groups to store. `digest_of`: that of a stored id; None: unknown.

    Raises `refusal`, if one is given, unless every id is known.
    """
    outcomes, new = [], dict[str, NewGroup]()
    for group in groups:
        twin = new.get(group.header.group_id)
        known = twin.header.digest if twin else digest_of(group.header.group_id)
        if known is None:
            new[group.header.group_id] = group
            outcomes.append(Appended.STORED)
        else:
            is_same = known == group.header.digest
            outcomes.append(Appended.DUPLICATE if is_same else Appended.CONFLICT)
    if new and refusal is not None:
        raise refusal
    return outcomes, list(new.values())


@dataclass(frozen=True, slots=True, kw_only=True)
class Move:
    """Where a held group is, from this move on."""

    place: Place
    batch: int | None = None
    """Number of the batch it is in; None outside LEASED, TRAINED, REPLAY."""
    deliveries: int = 0
    """Times it was leased without an acknowledgement."""
    reason: str | None = None
    """Why it is DEAD."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredGroup:
    """A group as `open` finds it."""

    header: GroupHeader
    move: Move
    """The last one."""


class BatchState(enum.IntEnum):
    """The values are stored: never renumber them."""

    LEASED = 0
    TRAINED = 1
    REPLAY = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredBatch:
    """A batch whose groups are still held. Each group refers to its batch, not the reverse."""

    number: int
    """Unique and increasing within a run."""
    state: BatchState
    step: int
    """The trainer's step that the batch is for, or was trained at."""
    epoch: int
    """The trainer incarnation that holds or acknowledged it."""
    lease_id: str
    ttl_s: float
    """How long the lease lasts without a heartbeat."""
    request_id: str | None = None
    """Chosen by the trainer; a repeated request with it gets this batch."""
    is_plain: bool = False
    """Whether it is delivered to a client without leases."""


@dataclass(slots=True, kw_only=True)
class Change:
    """One change of the run, applied whole or not at all."""

    moves: dict[int, Move] = field(default_factory=dict)
    """By group."""
    ends: dict[int, Fate] = field(default_factory=dict)
    """Held groups whose payload is freed."""
    batches: dict[int, StoredBatch | None] = field(default_factory=dict)
    """Added, or replaced by number; None: removed."""
    document: bytes | None = None
    """Replaces the last; None keeps it. Small: nearly every change writes it."""
    facts: dict[str, bytes] = field(default_factory=dict)
    """Added, or replaced by name; the others stay. For what rarely changes, such as one environment."""
    is_durable: bool = True
    """False: a crash may lose it, but only together with all later changes."""

    def check(self, held: Container[int]) -> None:
        """Raise KeyError if groups that it moves or ends are not in `held`."""
        if unknown := [number for number in (*self.moves, *self.ends) if number not in held]:
            raise KeyError(f"groups {unknown} are not stored")


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
    """Payloads of held groups."""
    stored_bytes: int
    """Bytes that they occupy, including space not yet reclaimed."""
    free_bytes: int | None = None
    """Left before `StoreFull`; None: not bounded by the store."""
    refusal: str | None = None
    """Why groups are refused now; None: they are not."""


class GroupStore(Protocol):
    """Keeps one run."""

    @property
    def durability(self) -> Durability: ...

    async def open(self) -> SavedRun:
        """Recover what is stored. Called once, before anything else. Raises `StoreBroken`, `UnreadableRun`."""

    async def append(
        self, groups: Sequence[NewGroup], *, refusal: StoreFull | None = None
    ) -> list[Appended]:
        """Store the groups with unknown ids; return one outcome per group. Detects duplicates within the call.

        Numbers are unique. Raises `StoreBroken`, or `StoreFull` with nothing stored: also `refusal`, if one is given,
        unless every id is known.
        """

    async def commit(self, change: Change) -> None:
        """Apply `change`, as durably as `change.is_durable` asks. Raises KeyError for unknown groups, `StoreBroken`."""

    async def read(self, numbers: Sequence[int]) -> list[bytes]:
        """Return payloads in the order asked.

        Raises `CorruptGroups` naming all damaged ones, KeyError for unknown ones, `StoreFull` if no file can be opened.
        """

    def usage(self) -> StoreUsage: ...

    async def clear(self) -> None:
        """Forget everything, ids included; durable."""

    async def close(self) -> None:
        """Make everything durable and close the files."""
