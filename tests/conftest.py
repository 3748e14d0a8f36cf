"""Which tests are drills, the order of all, and an interpreter that no test leaves changed to the next.

Every test of `tests/faults` is a drill, with four exceptions; elsewhere the long ones carry the marker. A file whose
tests are all left out is not even imported. The longest come first, so that several workers (`-n 3`) end together.
"""

from __future__ import annotations

import functools
import gc
import os
import shutil
import signal
import ssl
import sys
import tempfile
import uuid
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any

import httpx
import hypothesis  # noqa: F401 - before `gc.freeze`: it looks for who refers to a generator that it registers
import pytest

from tests.postgres import Cluster, binaries, running_cluster
from tests.processes import leaving_no_process

FIRST = (
    "tests/environments/test_every_environment.py",
    *("tests/faults/", "tests/e2e/", "tests/trainer/"),
)

EVERY_RUN = (
    "tests/faults/test_store_crash.py::test_kill_9_loses_no_acknowledged_group",
    "tests/faults/test_environment_outage.py::test_engine_away_for_longer_than_any_wait_costs_no_item",
    "tests/faults/test_store_full.py::test_a_full_disk_refuses_groups_while_every_commit_works",
    "tests/faults/test_hub_hostile.py::test_hostile_input_gets_the_answer_of_the_table_and_harms_no_other_client",
)
"""One kill, one outage, one full disk and the table of hostile input are no drills: `make test` has them."""


FOLDER_MARKERS = {
    "conformance": "conformance",
    "faults": "drill",
    "gpu": "gpu",
    "other_trainers": "other_trainers",
    "vllm": "vllm",
}
"""The marker that every test of a folder has; those of `EVERY_RUN` have none."""


def pytest_sessionstart(session: pytest.Session) -> None:
    """End the run where hubs would refuse every group: they keep 2 % of the disk free, and tests need 2 GiB."""
    disk = shutil.disk_usage(tempfile.gettempdir())
    needed = max(disk.total // 50, 1 << 30) + (2 << 30)
    if disk.free < needed:
        pytest.exit(
            f"{tempfile.gettempdir()} has {disk.free / 2**30:.1f} GiB free, tests of stored runs"
            f" need {needed / 2**30:.1f} GiB",
            returncode=pytest.ExitCode.USAGE_ERROR,
        )


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    marker = FOLDER_MARKERS.get(collection_path.parent.name)
    is_left_out = marker is not None and f"not {marker}" in config.getoption("markexpr")
    in_every_run = any(collection_path.name in test for test in EVERY_RUN)
    return True if is_left_out and not in_every_run else None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.nodeid.startswith("tests/faults/") and not item.nodeid.startswith(EVERY_RUN):
            item.add_marker(pytest.mark.drill)

    def place(item: pytest.Item) -> int:
        name = item.nodeid
        return next((i for i, start in enumerate(FIRST) if name.startswith(start)), len(FIRST))

    items.sort(key=place)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, Any, Any]:
    """Leave all that is imported and collected out of the collection of garbage: a scan takes 0.3 s of CPU."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


@pytest.fixture(autouse=True, scope="session")
def _no_process_left() -> Iterator[None]:
    with leaving_no_process():
        yield


@pytest.fixture(autouse=True, scope="session")
def _children_end_at_ctrl_c() -> None:
    """Give what tests start SIGINT's default action: the background jobs of a shell inherit that it is ignored."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(autouse=True, scope="session")
def _one_tls_context() -> Iterator[None]:
    """Give all clients of httpx with the same settings one TLS context: to read the authorities takes 20 ms of CPU."""
    create = httpx.create_ssl_context

    @functools.cache
    def of_authorities(file: str | None, *settings: Any) -> ssl.SSLContext:
        return create(*settings)

    def shared(verify: Any = True, cert: Any = None, trust_env: bool = True) -> ssl.SSLContext:
        return of_authorities(os.environ.get("SSL_CERT_FILE"), verify, cert, trust_env)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("httpx._transports.default.create_ssl_context", shared)
        yield


@pytest.fixture(autouse=True)
def _same_interpreter(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Undo what a test, or a library that it calls, sets for the whole process: a worker runs many tests."""
    recursion_limit, thresholds = sys.getrecursionlimit(), gc.get_threshold()
    monkeypatch.setattr(gc, "freeze", lambda: None)
    yield
    sys.setrecursionlimit(recursion_limit)
    gc.set_threshold(*thresholds)


def require_postgres() -> None:
    """Skip a test that needs PostgreSQL where there is none."""
    if binaries() is None:
        pytest.skip("NOT TESTED: PostgreSQL is not installed (Debian: apt install postgresql)")
    pytest.importorskip("asyncpg", reason="NOT TESTED: pip install -e '.[postgres]'")


@pytest.fixture(scope="session")
def postgres() -> Iterator[Cluster]:
    """A PostgreSQL for the tests of this process; each takes a schema of its own."""
    require_postgres()
    with running_cluster() as cluster:
        yield cluster


@pytest.fixture
def postgres_url(postgres: Cluster) -> str:
    """The URL of an empty schema of this test's own."""
    return postgres.create_schema(f"test_{uuid.uuid4().hex}")
