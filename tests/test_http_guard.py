"""Origin, Host and loopback names: the rule that hub, proxy and local engine share."""

from __future__ import annotations

import socket

import pytest

from atroposlib.http_guard import foreign_host, is_cross_site, is_loopback, is_loopback_url

Pairs = list[tuple[bytes, bytes]]

OWN = (b"host", b"localhost:8000")


@pytest.mark.parametrize(
    ("host", "expected"),
    [
        ("LOCALHOST.", True),
        ("127.0.0.1", True),
        ("127.255.0.9", True),
        ("::", False),
        ("::ffff:10.0.0.1", False),
        ("192.168.0.1", False),
        ("notlocalhost", False),
        ("2130706433", False),
    ],
)
def test_loopback_is_what_only_this_machine_reaches(host: str, expected: bool) -> None:
    assert is_loopback(host) is expected


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("http://localhost:8000", True),
        ("http://user@[::1]:8000/v1", True),
        ("https://127.0.0.1@evil.example/", False),
        ("http://[::1", False),
        ("nonsense", False),
    ],
)
def test_a_url_is_judged_by_its_host_alone(url: str, expected: bool) -> None:
    assert is_loopback_url(url) is expected


@pytest.mark.parametrize(
    ("host", "server", "expected"),
    [
        (b"127.0.0.1", "127.0.0.1", None),
        (b"[::1]:8000", "::1", None),
        (b"a.localhost:1", "127.0.0.1", None),
        (b"evil.example", "::1", "evil.example"),
        (b"localhost@evil.example", "127.0.0.1", "localhost@evil.example"),
        (b"[::1", "127.0.0.1", "[::1"),
        (b"", "127.0.0.1", ""),
        (f"{socket.gethostname()}:9001".encode(), "127.0.1.1", None),
        # A server that listens on an address of the network has any number of names.
        (b"hub.example:8000", "10.0.0.5", None),
        (b"evil.example", None, None),
    ],
)
def test_host_must_name_this_machine_at_a_loopback_address(
    host: bytes, server: str | None, expected: str | None
) -> None:
    assert foreign_host([(b"Host", host)], server=server) == expected


def test_every_host_of_a_request_counts_and_none_is_allowed() -> None:
    assert foreign_host([OWN, (b"host", b"evil.example")], server="127.0.0.1") == "evil.example"
    assert foreign_host([], server="127.0.0.1") is None  # HTTP/1.0


@pytest.mark.parametrize(
    ("headers", "expected"),
    [
        ([], False),
        ([(b"Sec-Fetch-Site", b"cross-site")], True),
        ([(b"sec-fetch-site", b"Same-Site")], True),
        ([(b"sec-fetch-site", b"same-origin")], False),
        ([(b"sec-fetch-site", b"none")], False),
        ([(b"sec-fetch-site", b"none"), (b"sec-fetch-site", b"cross-site")], True),
        ([(b"Origin", b"https://evil.example")], True),
        ([(b"origin", b"null")], True),
        ([(b"origin", b"http://localhost:8000")], False),
        ([(b"origin", b"http://LOCALHOST:8000")], False),
        ([(b"origin", b"http://localhost:3000")], True),
        ([(b"origin", b"http://localhost")], True),
        ([(b"origin", b"http://localhost:8000"), (b"origin", b"https://evil.example")], True),
        # A reverse proxy may have replaced Host; the browser has compared with what it asked for.
        ([(b"sec-fetch-site", b"same-origin"), (b"origin", b"https://hub.example")], False),
        ([(b"sec-fetch-site", b"cross-site"), (b"origin", b"http://localhost:8000")], True),
    ],
)
def test_a_page_of_another_origin_is_cross_site(headers: Pairs, expected: bool) -> None:
    assert is_cross_site([OWN, *headers]) is expected
