"""The contract of a payload store.

A store keeps the bytes of queued groups by arrival number and knows nothing of queues, batches or
environments: headers and policy stay in the coordinator, so that no policy ever reads a token. One
test-suite runs on every store.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True, kw_only=True)
class Payload:
    """One checked group in the encodings that are already at hand."""

    packed: bytes
    """`wire.pack_group`."""
    json: bytes | None = None
    """`wire.encode_json`; None if it came packed: encoded only when a JSON client asks."""


class PayloadStore(Protocol):
    """Payloads by arrival number. Every call is made by the coordinator, from one thread."""

    def put(self, number: int, payload: Payload) -> None:
        """Keep `payload`.

        When this returns it is as durable as the store promises. `number` is not in use.
        """
        ...

    def take(self, numbers: Sequence[int]) -> list[Payload]:
        """Remove and return the payloads in the order asked.

        KeyError, with nothing removed, for an absent number.
        """
        ...

    def clear(self) -> None:
        """Remove everything."""
        ...

    def __len__(self) -> int:
        """Payloads held."""
        ...
