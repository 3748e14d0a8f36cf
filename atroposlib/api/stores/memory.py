"""A run in process memory: nothing survives the process."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

from atroposlib.api.stores.base import (
    Appended,
    Change,
    Durability,
    Fate,
    NewGroup,
    SavedRun,
    StoredBatch,
    StoredGroup,
    StoreFull,
    StoreUsage,
)
from atroposlib.api.stores.space import Space


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
        self._groups: dict[int, StoredGroup] = {}
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
            groups=[self._groups[number] for number in sorted(self._groups)],
            batches=[self._batches[number] for number in sorted(self._batches)],
            ended=Counter(self._ended),
            next_number=self._next_number,
        )

    async def append(
        self, groups: Sequence[NewGroup], *, refusal: StoreFull | None = None
    ) -> list[Appended]:
        new = [group for group in groups if group.header.group_id not in self._digests]
        if new and refusal is not None:
            raise refusal
        num_bytes = sum(len(group.payload) for group in new)
        before = self._num_bytes
        self._space.take(num_bytes)
        outcomes = []
        for group in groups:
            header, number = group.header, group.header.number
            known = self._digests.get(header.group_id)
            if known is not None:
                is_same = known == header.digest
                outcomes.append(Appended.DUPLICATE if is_same else Appended.CONFLICT)
                continue
            assert number not in self._groups, f"arrival number {number} is in use"
            self._digests[header.group_id] = header.digest
            self._payloads[number] = group.payload
            self._groups[number] = StoredGroup(header=header, place=group.place)
            self._num_bytes += len(group.payload)
            self._next_number = max(self._next_number, number + 1)
            outcomes.append(Appended.STORED)
        self._space.give_back(num_bytes - (self._num_bytes - before))
        return outcomes

    async def commit(self, change: Change) -> None:
        change.check(self._groups)
        for move in change.moves:
            self._groups[move.number] = replace(
                self._groups[move.number],
                place=move.place,
                batch=move.batch,
                deliveries=move.deliveries,
                reason=move.reason,
            )
        for end in change.ends:
            group_id = self._groups.pop(end.number).header.group_id
            if not self._digests[group_id]:
                del self._digests[group_id]
            num_bytes = len(self._payloads.pop(end.number))
            self._num_bytes -= num_bytes
            self._space.give_back(num_bytes)
            self._ended[end.fate] += 1
        for batch in change.batches:
            self._batches[batch.number] = batch
        for number in change.closed_batches:
            del self._batches[number]
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
