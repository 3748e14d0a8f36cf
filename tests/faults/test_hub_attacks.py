"""Endless bodies, slow senders and idle crowds against a real hub process on loopback.

Meanwhile another client asks for `/status` over and over. The machine may be busy with other work, so what is asserted
of its waiting is the median and the 95th percentile; and of the hub itself the CPU time that it spent on an attack,
which no neighbour can add to: an event loop that was held up by work has paid for it.
"""

from __future__ import annotations

import http.client
import itertools
import json
import re
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path

import pytest

from atroposlib.api.http.handlers import ROUTES
from atroposlib.client import TrainerClient
from tests.faults.drivers import (
    HubProcess,
    assert_balanced,
    children,
    cpu_s,
    forget_peak,
    hub_process,
    peak_rss_bytes,
)

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(120)]

MIB = 2**20
MEDIAN_S, P95_S = 0.25, 1.0
"""What answers to `/status` may take: the machine may be busy with other work."""
GOOD = json.dumps({"tokens": [[1]] * 4, "masks": [[1]] * 4, "scores": [0] * 4}).encode()


# What the hub does meanwhile


@contextmanager
def unmoved(
    hub: HubProcess, *, max_cpu_s: float, max_grown_bytes: int = 64 * MIB
) -> Iterator[None]:
    """Ask for `/status` every 5 ms; fail unless the answers are prompt and the hub spends no more in the block."""
    forget_peak(hub.pid)
    bytes_before, cpu_before = memory(hub), cpu_s(hub.pid)
    waits_s: list[float] = []
    is_over = threading.Event()

    def ask() -> None:
        with closing(http.client.HTTPConnection("127.0.0.1", hub.port, timeout=30)) as connection:
            while not is_over.wait(0.005):
                began = time.perf_counter()
                connection.request("GET", "/status")
                response = connection.getresponse()
                response.read()
                waits_s.append(time.perf_counter() - began)
                assert response.status == 200

    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(ask)
        try:
            yield
            time.sleep(0.1)  # a quiet moment at the end belongs to every attack
        finally:
            is_over.set()
        asked.result()
    assert memory(hub) - bytes_before <= max_grown_bytes
    asking_s = 0.002 * len(waits_s)  # what the questions themselves may cost
    assert cpu_s(hub.pid) - cpu_before <= max_cpu_s + asking_s
    waits_s.sort()
    assert waits_s[len(waits_s) // 2] <= MEDIAN_S, waits_s[-20:]
    assert waits_s[19 * len(waits_s) // 20] <= P95_S, waits_s[-20:]


def memory(hub: HubProcess) -> int:
    return peak_rss_bytes(hub.pid, *children(hub.pid))


def assert_works(hub: HubProcess) -> None:
    """A good group still passes through, and the account closes."""
    assert post(hub, "/scored_data", GOOD) == 200
    assert len(hub.get("/batch")["batch"]) == 1
    assert_balanced(hub.get("/ledger"))


@pytest.fixture(scope="module")
def hub(tmp_path_factory: pytest.TempPathFactory) -> Iterator[HubProcess]:
    with hub_process(tmp_path_factory.mktemp("hub"), "--memory") as running:
        running.register(batch_size=4)
        assert_works(running)
        yield running
        assert running.process is not None
        assert "Traceback" not in running.process.log()


def post(hub: HubProcess, path: str, body: bytes) -> int:
    """Send a body and return the status, also when the hub answers before it has read it all."""
    connection = http.client.HTTPConnection("127.0.0.1", hub.port, timeout=60)
    headers = {"Content-Type": "application/json"}
    try:
        connection.request("POST", path, body, headers)
        response = connection.getresponse()
        response.read()
        return response.status
    finally:
        connection.close()


# Bodies


@pytest.mark.parametrize("is_announced", [True, False], ids=["announced", "chunked"])
def test_body_of_a_gigabyte_is_refused_without_being_kept(
    is_announced: bool, hub: HubProcess
) -> None:
    length = "Content-Length: 1049000000" if is_announced else "Transfer-Encoding: chunked"
    head = f"POST /scored_data HTTP/1.1\r\nHost: localhost\r\n{length}\r\n\r\n".encode()
    piece = b" " * MIB
    if not is_announced:
        piece = b"%x\r\n%s\r\n" % (len(piece), piece)
    num_sent = 0
    # Unannounced, it is kept as far as a body may go, once while it grows and once as it moves.
    max_grown_bytes = (64 if is_announced else 160) * MIB
    with (
        unmoved(hub, max_cpu_s=0.5, max_grown_bytes=max_grown_bytes),
        socket.create_connection(("127.0.0.1", hub.port), 30) as sender,
    ):
        sender.sendall(head)
        answer = threading.Thread(target=lambda: answers.append(sender.recv(4096)))
        answers: list[bytes] = []
        answer.start()
        try:
            while num_sent < 1049 and not answers:
                sender.sendall(piece)
                num_sent += 1
        except OSError:
            pass  # the hub hung up on it
        answer.join()
    assert answers[0].startswith(b"HTTP/1.1 413 ")
    assert num_sent < 100
    assert_works(hub)


# Slow and idle clients


def test_slow_and_idle_clients_are_cut_off_and_delay_no_other_client(hub: HubProcess) -> None:
    half_a_head = b"POST /scored_data HTTP/1.1\r\nHost: localhost\r\nX-Slow: "
    started = b"POST /scored_data HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n{"
    large = b'{"tokens": [[' + b"1, " * 70_000 + b'1]], "masks": 0}'
    open_files_before = num_files(hub)
    with ExitStack() as opened:

        def connect(number: int, said: bytes) -> list[socket.socket]:
            made = []
            for _ in range(number):
                each = opened.enter_context(socket.create_connection(("127.0.0.1", hub.port), 30))
                each.sendall(said)
                made.append(each)
            return made

        with unmoved(hub, max_cpu_s=2.0):
            began = time.monotonic()
            heads = connect(100, half_a_head)
            small = connect(100, started % 1000)
            # Eight of these hold the whole budget of bytes under way; the ninth waits for its turn.
            greedy = connect(9, started % (64 * MIB))
            idle = connect(200, b"")
            honest: list[float] = []

            def send_honestly() -> None:
                assert post(hub, "/scored_data", large) == 422
                honest.append(time.monotonic() - began)

            sender = threading.Thread(target=send_honestly)
            sender.start()
            while time.monotonic() - began < 9:
                for each in [*small, *greedy]:
                    each.sendall(b" ")
                assert post(hub, "/scored_data", GOOD) == 200, "a small group is accepted at once"
                time.sleep(0.9)
            answers = [last_words(each) for each in [*small, *greedy[:8]]]
            cut = [last_words(each) for each in [*heads, *idle]]
            took_s = time.monotonic() - began
            sender.join()
        num_left = num_files(hub) - open_files_before
    assert {answer[:13] for answer in answers} == {b"HTTP/1.1 408 "}
    assert set(cut) == {b""}
    assert took_s < 25
    assert honest[0] < 25
    assert num_left <= 20
    while hub.get("/batch")["batch"] is not None:
        pass
    assert_works(hub)


@pytest.mark.parametrize("is_busy", [False, True])
def test_crowd_larger_than_the_open_files_of_the_hub_stops_no_work(
    tmp_path: Path, is_busy: bool
) -> None:
    """Four times as many connections as it has room for, which say nothing or begin a body and do not end it.

    While they are busy, only health checks and acknowledgements get through.
    """
    started = b"POST /scored_data HTTP/1.1\r\nHost: localhost\r\nContent-Length: 1000\r\n\r\n{"
    with ExitStack() as opened:
        hub = opened.enter_context(hub_process(tmp_path, max_files=256))
        hub.register(batch_size=4)
        trainer = opened.enter_context(TrainerClient(hub.url))
        for _ in range(3):
            assert post(hub, "/scored_data", GOOD) == 200
        held = trainer.lease_batch(10.0)
        assert held is not None
        crowd = []
        for _ in range(400):
            each = opened.enter_context(socket.create_connection(("127.0.0.1", hub.port), 30))
            crowd.append(each)
            if is_busy:
                each.sendall(started)
        assert num_files(hub) < 256
        assert hub.get("/healthz") == {"status": "ok"}
        trainer.ack(held)
        if is_busy:
            assert last_words(crowd[0])[:13] == b"HTTP/1.1 408 "  # as all that were let in
        assert post(hub, "/scored_data", GOOD) == 200
        batch = trainer.lease_batch(10.0)
        assert batch is not None
        trainer.ack(batch)
        ledger = hub.get("/ledger")
        assert_balanced(ledger)
        assert ledger["trained"] == 2
        assert hub.process is not None
        assert "Traceback" not in hub.process.log()


def last_words(connection: socket.socket) -> bytes:
    """Return what the hub says until it hangs up."""
    said = b""
    try:
        while piece := connection.recv(4096):
            said += piece
    except ConnectionResetError:
        pass  # it hung up on bytes that it had not read
    return said


def num_files(hub: HubProcess) -> int:
    return len(list(Path(f"/proc/{hub.pid}/fd").iterdir()))


# HTTP


def request(line: str, *headers: str, body: bytes = b"") -> bytes:
    return "\r\n".join([line, "Host: localhost", *headers, "", ""]).encode("latin-1") + body


def chunked(body: bytes, *headers: str) -> bytes:
    return request("POST /scored_data HTTP/1.1", "Transfer-Encoding: chunked", *headers, body=body)


def sized(*headers: str, body: bytes = b"{}") -> bytes:
    return request("POST /scored_data HTTP/1.1", *headers, body=body)


SPELLED_ENDS = ("%0A", "%00", "%0D%0A", ";", ";x=1", ".", "%2E", "/", "%20", "?", "#")
GET = "GET /status HTTP/1.1"
LAST_CHUNK = b"0\r\n\r\n"
RAW: dict[str, tuple[bytes, int]] = {
    "noise": (b"\0\1\2\3\r\n\r\n", 400),
    "a TLS hello": (b"\x16\x03\x01\x02\0\1\0\1\xfc\x03\x03" + bytes(64) + b"\r\n\r\n", 400),
    "an HTTP/2 preface": (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", 400),
    "HTTP/3.7": (request("GET /status HTTP/3.7"), 400),
    "HTTP/1.0": (request("GET /status HTTP/1.0"), 200),
    "no host": (b"GET /status HTTP/1.1\r\n\r\n", 200),
    "the URL of another host": (request("GET http://other/status HTTP/1.1"), 200),
    "CONNECT": (request("CONNECT hub:80 HTTP/1.1"), 400),
    "OPTIONS *": (request("OPTIONS * HTTP/1.1"), 404),
    "a path without a slash": (request("GET status HTTP/1.1"), 400),
    "a bad percent": (request("GET /%zz HTTP/1.1"), 404),
    "a null byte in the path": (request("GET /status%00 HTTP/1.1"), 404),
    "no UTF-8 in the path": (request("GET /%ff%fe HTTP/1.1"), 404),
    "raw bytes in the path": (request("GET /\xff\xfe HTTP/1.1"), 400),
    "a space in the path": (request("GET /sta tus HTTP/1.1"), 400),
    "a method of 9000 letters": (request("A" * 9000 + " /status HTTP/1.1"), 400),
    "a method in small letters": (request("get /status HTTP/1.1"), 400),
    "a null byte in a header": (request(GET, "X: a\0b"), 400),
    "raw bytes in headers": (request(GET, "Accept: \xff", "Authorization: \xff"), 200),
    "a folded header": (request(GET, "X: a\r\n b"), 400),
    "a space before the colon": (request(GET, "X : a"), 400),
    "a header without a colon": (request(GET, "X"), 400),
    "a header without a name": (request(GET, ": a"), 400),
    "line feeds alone": (b"GET /status HTTP/1.1\nHost: localhost\n\n", 400),
    "carriage returns alone": (b"GET /status HTTP/1.1\rHost: localhost\r\r", 400),
    "5000 empty lines first": (b"\r\n" * 5000 + request(GET), 200),
    "Content-Length -1": (sized("Content-Length: -1"), 400),
    "Content-Length +2": (sized("Content-Length: +2"), 400),
    "Content-Length 0x2": (sized("Content-Length: 0x2"), 400),
    "Content-Length 2, 2": (sized("Content-Length: 2, 2"), 400),
    "Content-Length 2 and 3": (sized("Content-Length: 2", "Content-Length: 3"), 400),
    "Content-Length 2**64": (sized(f"Content-Length: {2**64}"), 400),
    "Content-Length 2**64 - 1": (sized(f"Content-Length: {2**64 - 1}"), 413),
    "a length and chunks": (chunked(LAST_CHUNK, "Content-Length: 2"), 400),
    "a length, before chunks": (
        sized("Content-Length: 2", "Transfer-Encoding: chunked", body=LAST_CHUNK),
        400,
    ),
    "gzip as transfer": (sized("Transfer-Encoding: gzip", body=LAST_CHUNK), 400),
    "xchunked": (sized("Transfer-Encoding: xchunked", body=LAST_CHUNK), 400),
    "chunked twice": (sized("Transfer-Encoding: chunked, chunked", body=LAST_CHUNK), 400),
    "a chunk size that is no number": (chunked(b"zz\r\n{}\r\n" + LAST_CHUNK), 400),
    "a negative chunk": (chunked(b"-2\r\n{}\r\n" + LAST_CHUNK), 400),
    "a chunk of 2**72": (chunked(b"f" * 18 + b"\r\n{}\r\n" + LAST_CHUNK), 400),
    "a chunk longer than it says": (chunked(b"2\r\n{}xx\r\n" + LAST_CHUNK), 400),
    "a chunk with an extension": (chunked(b"2;a=b\r\n{}\r\n" + LAST_CHUNK), 422),
    "50,000 trailers": (chunked(b"2\r\n{}\r\n0\r\n" + b"X: 1\r\n" * 50_000 + b"\r\n"), 422),
    "an upgrade to websocket": (
        request(GET, "Connection: Upgrade", "Upgrade: websocket", "Sec-WebSocket-Key: x"),
        200,
    ),
    "an upgrade to HTTP/2": (request(GET, "Connection: Upgrade", "Upgrade: h2c"), 200),
    "a body where none belongs": (request(GET, "Content-Length: 5", body=b"hello"), 200),
    "a strange expectation": (sized("Content-Length: 2", "Expect: 200-ok"), 422),
}


@pytest.mark.parametrize("name", RAW)
def test_malformed_http_has_one_answer(name: str, hub: HubProcess) -> None:
    """One: a server that can read a request in two ways may read two requests (request smuggling)."""
    sent, status = RAW[name]
    with socket.create_connection(("127.0.0.1", hub.port), 30) as connection:
        connection.sendall(sent)
        answer = connection.recv(4096)  # closing this side sooner might cut the answer off
        connection.settimeout(0.1)
        try:
            answer += last_words(connection)
        except TimeoutError:
            pass  # it waits for the next request
    assert answer.startswith(b"HTTP/1.1 %d " % status)
    assert answer.count(b"HTTP/1.1 ") == 1


def test_no_spelling_of_any_route_erases_anything_through_a_proxy(hub: HubProcess) -> None:
    half = json.dumps({"tokens": [[1]] * 2, "masks": [[1]] * 2, "scores": [0] * 2}).encode()
    assert post(hub, "/scored_data", half) == 200
    connection = http.client.HTTPConnection("127.0.0.1", hub.port, timeout=60)
    headers = {"X-Forwarded-For": "10.0.0.7", "Host": "localhost"}
    for route in ROUTES:
        plain = re.sub(r"\{\w+\}", "1", route.template.replace("{run}", "default"))
        for path in (plain, f"/runs/default{plain}", f"http://hub{plain}", f"//hub{plain}"):
            odd = (path.upper(), f"/.{path}", f"/x/..{path}", path.replace("_", "%5F"))
            odd += (path[:-1] + f"%{ord(path[-1]):X}",)
            methods = [route.method, *(("HEAD", "PUT", "OPTIONS") if route.is_destructive else ())]
            for method, target in itertools.product(
                methods, (path, *odd, *(path + end for end in SPELLED_ENDS))
            ):
                connection.request(method, target, b"{}", headers)
                answer = connection.getresponse()
                answer.read()
                is_refused = answer.status in (307, 403, 404, 405)
                assert is_refused or not route.is_destructive, target
    connection.close()
    assert hub.get("/ledger")["queued"] == 1
    hub.forget()
    hub.register(batch_size=4)
