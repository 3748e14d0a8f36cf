"""The one back-off and the one reading of `Retry-After`."""

from __future__ import annotations

import time
from email.utils import formatdate

import pytest

from atroposlib.patience import MAX_RETRY_AFTER_S, Backoff, is_transient_status, read_retry_after


def test_backoff_doubles_to_its_cap_with_jitter() -> None:
    backoff = Backoff(first_s=1.0, cap_s=8.0)
    waits = [backoff.next() for _ in range(6)]
    for wait, full in zip(waits, [1, 2, 4, 8, 8, 8], strict=True):
        assert full / 2 <= wait <= full
    backoff.reset()
    assert backoff.next() <= 1.0


def test_backoff_waits_longer_where_it_is_asked_to_but_not_for_ever() -> None:
    assert Backoff(first_s=1.0).next(asked_s=5.0) == 5.0
    assert Backoff(first_s=1.0).next(asked_s=0.1) >= 0.5
    assert Backoff(first_s=1.0).next(asked_s=1e9) == MAX_RETRY_AFTER_S


@pytest.mark.parametrize(
    ("status", "transient"),
    [(400, False), (404, False), (408, True), (422, False), (425, True), (429, True), (503, True)],
)
def test_an_answer_says_whether_the_request_may_succeed_later(status: int, transient: bool) -> None:
    assert is_transient_status(status) is transient


def test_retry_after_is_a_number_or_a_date() -> None:
    assert read_retry_after("1.5") == 1.5
    assert read_retry_after("-3") == 0.0
    assert read_retry_after(None) is None
    assert read_retry_after("soon") is None
    in_a_minute = read_retry_after(formatdate(time.time() + 60, usegmt=True))
    assert in_a_minute is not None
    assert 50 < in_a_minute <= 60
