"""Which URL a client calls after a hub has named the owner of its run."""

from __future__ import annotations

import pytest

from atroposlib.hub_address import TRUST_S, HubAddress
from tests.builders.clocks import Clock

HUB = "http://10.0.0.1:8000"
OWNER = "http://10.0.0.7:8000/runs/default"


def following(address: HubAddress, url: str = OWNER) -> HubAddress:
    """Let a forwarded answer name `url`, and the check of it succeed."""
    owner = address.answered(address.url, status=200, named=f"id {url}")
    assert owner is not None
    address.follow(owner, found="id")
    assert address.url == url
    return address


@pytest.mark.parametrize(
    ("configured", "url", "is_permitted"),
    [
        (HUB, OWNER, True),
        (f"{HUB}/team", "http://hub-2.hubs.svc/behind/a/runs/math-2", True),
        ("https://hub", "https://[2001:db8::7]:8000/runs/a", True),
        ("http://localhost:8000", "http://127.0.0.1:8001/runs/a", True),
        ("https://hub", "http://hub/runs/a", False),  # the token would be readable on the way
        (HUB, "https://10.0.0.7:8000/runs/default", False),
        ("http://localhost:8000", OWNER, False),  # as above, past the end of a tunnel
        (HUB, "http://localhost:8000/runs/a", False),
        (HUB, "http://[::1]:8000/runs/a", False),
        *[
            (HUB, f"http://10.0.0.7:8000{path}", False)
            for path in ("", "/", "/runs/", "/runs/a/", "/runs/a?x", "/runs/a#x", "/runs/a/../b")
        ],
        (HUB, "http://me:pw@10.0.0.7/runs/a", False),
        (HUB, "http://10.0.0.7@evil/runs/a", False),
        ("https://hub", "https://[::1::2]/runs/a", True),  # cannot be reached
        (HUB, "ftp://10.0.0.7/runs/a", False),
        (HUB, "http:///runs/a", False),
        (HUB, f"http://{'x' * 64}/runs/a", False),
        (HUB, "http://a..b/runs/a", False),
        (HUB, "http://a\nb/runs/a", False),
        (HUB, f"{OWNER}\n", False),
        (HUB, "", False),
    ],
)
def test_only_owners_as_safe_as_the_configured_hub_are_checked(
    configured: str, url: str, is_permitted: bool
) -> None:
    address = HubAddress(configured)
    owner = address.answered(configured, status=200, named=f"id {url}")
    assert (owner is not None) == is_permitted
    assert address.url == configured
    assert HubAddress(configured).answered(configured, status=200, named=url) is None  # no id


@pytest.mark.parametrize("found", [None, "", "id2", f"id {OWNER}"])
def test_another_process_at_the_address_is_not_followed(found: str | None) -> None:
    address = HubAddress(HUB)
    owner = address.answered(HUB, status=200, named=f"id {OWNER}")
    assert owner is not None
    address.follow(owner, found=found)
    assert address.url == HUB


def test_after_a_failed_check_the_client_stays_where_it_is_for_ever_longer() -> None:
    clock = Clock(100.0)
    address = HubAddress(HUB, clock=clock)
    checks = []
    while clock.now_s < 4000:
        if address.answered(HUB, status=200, named=f"id {OWNER}") is not None:
            checks.append(clock.now_s)
        clock.now_s += 0.5
    pauses = [later - earlier for earlier, later in zip(checks, checks[1:], strict=False)]
    assert 3 <= pauses[0] <= 7
    assert all(150 <= pause <= 302 for pause in pauses[7:])
    assert len(checks) < 35


def test_an_owner_that_fails_is_left_and_tried_again_later() -> None:
    clock = Clock(100.0)
    address = following(HubAddress(HUB, clock=clock))
    address.failed(HUB)  # of an earlier call
    assert address.url == OWNER
    address.answered(OWNER, status=200, named=None)
    address.failed(OWNER)
    assert address.url == HUB
    assert address.answered(HUB, status=200, named=f"id {OWNER}") is None
    clock.now_s += 6
    following(address)


def test_an_owner_that_was_silent_is_checked_again() -> None:
    clock = Clock(100.0)
    address = following(HubAddress(HUB, clock=clock))
    for _ in range(3):
        clock.now_s += TRUST_S
        assert address.url == OWNER
        address.answered(OWNER, status=200, named=None)
    clock.now_s += TRUST_S + 1
    assert address.url == HUB
    following(address)


@pytest.mark.parametrize("status", [200, 404, 409, 422, 429, 500, 507, 502, 503])
def test_an_owner_that_refuses_to_serve_is_left(status: int) -> None:
    address = following(HubAddress(HUB))
    assert address.answered(OWNER, status=status, named=None) is None
    assert address.url == (HUB if status in (502, 503) else OWNER)


def test_the_next_owner_is_named_by_the_earlier_one() -> None:
    following(following(HubAddress(HUB)), "http://10.0.0.8:8000/runs/default")
