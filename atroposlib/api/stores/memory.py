"""Payloads in process memory: nothing survives the process."""

from __future__ import annotations

from collections.abc import Sequence

from atroposlib.api.stores.base import Payload


class MemoryStore:
    """A dict. Implements `PayloadStore`."""

    def __init__(self) -> None:
        self._payloads: dict[int, Payload] = {}

    def put(self, number: int, payload: Payload) -> None:
        assert number not in self._payloads, f"arrival number {number} is in use"
        self._payloads[number] = payload

    def take(self, numbers: Sequence[int]) -> list[Payload]:
        taken = [self._payloads[number] for number in numbers]
        for number in numbers:
            del self._payloads[number]
        return taken

    def clear(self) -> None:
        self._payloads.clear()

    def __len__(self) -> int:
        return len(self._payloads)
