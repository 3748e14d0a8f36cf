"""A run in process memory: nothing survives the process."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from atroposlib.api.stores.base import (
    Appended,
    Change,
    Durability,
    Fate,
    Move,
    NewGroup,
    SavedRun,
    StoredBatch,
    StoredGroup,
    StoreFull,
    StoreUsage,
    known_and_new,
)
from atroposlib.api.stores.space import Space
from atroposlib.scored_data import GroupHeader


class MemoryStore:
    """Implements `GroupStore` with dicts; opening it again returns what it holds, as a restart would."""

    durability = Durability.MEMORY

    def __init__(self, space: Space | None = None) -> None:
        """`space`: shared by all runs of a hub; None: not bounded."""
        self._space = space or Space()
        self._num_bytes = 0
        self._forget()

    def _forget(self) -> None:
        self._space.give_back(self._num_bytes)
        self._headers: dict[int, GroupHeader] = {}
        self._moves: dict[int, Move] = {}
        """The last one of each group."""
        self._payloads: dict[int, bytes] = {}
        self._digests: dict[str, bytes] = {}
        self._batches: dict[int, StoredBatch] = {}
        self._ended: Counter[Fate] = Counter()
        self._document: bytes | None = None
        self._facts: dict[str, bytes] = {}
        self._num_bytes = 0
        self._next_number = 0

    async def open(self) -> SavedRun:
        return SavedRun(
            document=self._document,
            facts={name: self._facts[name] for name in sorted(self._facts)},
            groups=[
                StoredGroup(header=header, move=self._moves[number])
                for number, header in sorted(self._headers.items())
            ],
            batches=[self._batches[number] for number in sorted(self._batches)],
            ended=Counter(self._ended),
            next_number=self._next_number,
        )

    async def append(
        self, groups: Sequence[NewGroup], *, refusal: StoreFull | None = None
    ) -> list[Appended]:
        outcomes, new = known_and_new(groups, self._digests.get, refusal=refusal)
        num_bytes = sum(len(group.payload) for group in new)
        self._space.take(num_bytes)
        self._num_bytes += num_bytes
        for group in new:
            header, number = group.header, group.header.number
            assert number not in self._headers, f"arrival number {number} is in use"
            self._digests[header.group_id] = header.digest
            self._payloads[number] = group.payload
            self._headers[number] = header
            self._moves[number] = Move(place=group.place)
            self._next_number = max(self._next_number, number + 1)
        return outcomes

    async def commit(self, change: Change) -> None:
        change.check(self._headers)
        self._moves |= change.moves
        for number, fate in change.ends.items():
            del self._moves[number]
            group_id = self._headers.pop(number).group_id
            if not self._digests[group_id]:
                del self._digests[group_id]
            num_bytes = len(self._payloads.pop(number))
            self._num_bytes -= num_bytes
            self._space.give_back(num_bytes)
            self._ended[fate] += 1
        for number, batch in change.batches.items():
            if batch is None:
                self._batches.pop(number, None)
            else:
                self._batches[number] = batch
        if change.document is not None:
            self._document = change.document
        self._facts |= change.facts

    async def read(self, numbers: Sequence[int]) -> list[bytes]:
        return [self._payloads[number] for number in numbers]

    def usage(self) -> StoreUsage:
        return StoreUsage(
            payload_bytes=self._num_bytes,
            stored_bytes=self._num_bytes,
            free_bytes=self._space.room_bytes,
            refusal=self._space.refusal(),
        )

    async def clear(self) -> None:
        self._forget()

    async def close(self) -> None:
        pass
