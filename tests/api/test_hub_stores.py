"""The contract of a payload store; every store runs these."""

from __future__ import annotations

import pytest

from atroposlib.api.stores.base import Payload, PayloadStore
from atroposlib.api.stores.memory import MemoryStore


@pytest.fixture(params=[MemoryStore])
def store(request: pytest.FixtureRequest) -> PayloadStore:
    made: PayloadStore = request.param()
    return made


def test_store_returns_what_was_put_in_the_order_asked(store: PayloadStore) -> None:
    payloads = {n: Payload(packed=bytes([n]), json=None if n else b"{}") for n in range(3)}
    for number, payload in payloads.items():
        store.put(number, payload)
    assert store.take([2, 0]) == [payloads[2], payloads[0]]
    assert len(store) == 1


def test_taking_an_absent_number_removes_nothing(store: PayloadStore) -> None:
    store.put(1, Payload(packed=b"x"))
    with pytest.raises(KeyError):
        store.take([1, 2])
    assert store.take([1]) == [Payload(packed=b"x")]


def test_clear_empties_the_store(store: PayloadStore) -> None:
    store.put(1, Payload(packed=b"x"))
    store.clear()
    assert len(store) == 0
    store.put(1, Payload(packed=b"y"))
