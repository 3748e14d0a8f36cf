"""A PostgreSQL of its own in a temporary directory, for tests and benchmarks that need one."""

from __future__ import annotations

import contextlib
import ctypes
import os
import pwd
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from tests.processes import free_port

START_S = 30
_LIBC = ctypes.CDLL(None)
_PR_SET_PDEATHSIG = 1  # prctl(2)


def binaries() -> Path | None:
    """The directory of PostgreSQL's programs: Debian's newest version, or the one in PATH; None without PostgreSQL."""
    found = sorted(
        Path("/usr/lib/postgresql").glob("*/bin/initdb"), key=lambda path: int(path.parts[-3])
    )
    initdb = found[-1] if found else shutil.which("initdb")
    return None if initdb is None else Path(os.path.realpath(initdb)).parent


def _end_with_parent() -> None:
    """Let a killed test leave no server behind."""
    if sys.platform == "linux":
        _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGQUIT)


class Cluster:
    """One PostgreSQL that listens on a loopback port; any local user may connect as the superuser `hub`.

    `is_synced` False does not force writes to the disk: a killed process loses nothing, a loss of power would.
    `max_wal_mib`: more or less what the log of a server takes.
    """

    def __init__(
        self, directory: Path, *, is_synced: bool = False, max_wal_mib: int = 1024
    ) -> None:
        programs = binaries()
        assert programs is not None, "PostgreSQL is not installed"
        self._programs = programs
        self._directory = directory
        self._is_synced = is_synced
        self._max_wal_mib = max_wal_mib
        # initdb and postgres refuse to run as root.
        self._user: dict[str, Any] = {}
        if os.geteuid() == 0:
            entry = pwd.getpwnam("nobody")
            os.chown(directory, entry.pw_uid, entry.pw_gid)
            self._user = {"user": entry.pw_uid, "group": entry.pw_gid, "extra_groups": []}
        self.port = free_port()
        self._server: subprocess.Popen[bytes] | None = None
        self._run("initdb", "-A", "trust", "-U", "hub", "-E", "UTF8", "--no-locale", "--no-sync")

    @property
    def _data(self) -> Path:
        return self._directory / "data"

    @property
    def is_running(self) -> bool:
        return self._server is not None and self._server.poll() is None

    @property
    def pid(self) -> int:
        assert self._server is not None
        return self._server.pid

    def url(self, schema: str | None = None, *, port: int | None = None) -> str:
        """The URL of the database, and within it of a schema of its own; `port`: of a relay in front of it."""
        query = "" if schema is None else f"?search_path={schema}"
        return f"postgresql://hub@127.0.0.1:{port or self.port}/postgres{query}"

    def _run(self, program: str, *arguments: str) -> None:
        command = [str(self._programs / program), "-D", str(self._data), *arguments]
        done = subprocess.run(command, capture_output=True, text=True, **self._user)
        assert done.returncode == 0, done.stdout + done.stderr

    def start(self) -> None:
        """Start the server, and wait until it accepts connections; it recovers from a kill by itself."""
        flags = {
            "port": self.port,
            "listen_addresses": "127.0.0.1",
            "unix_socket_directories": "",
            "fsync": "on" if self._is_synced else "off",
            "max_connections": 200,
            "max_wal_size": f"{self._max_wal_mib}MB",
            "min_wal_size": f"{min(80, self._max_wal_mib // 2)}MB",
        }
        command: Sequence[str] = [str(self._programs / "postgres"), "-D", str(self._data)]
        settings = [part for name, value in flags.items() for part in ("-c", f"{name}={value}")]
        with (self._directory / "log").open("ab") as log:
            self._server = subprocess.Popen(
                [*command, *settings],
                stdout=log,
                stderr=log,
                start_new_session=True,
                preexec_fn=_end_with_parent,
                **self._user,
            )
        deadline = time.monotonic() + START_S
        ready = [str(self._programs / "pg_isready"), "-q", "-h", "127.0.0.1", "-p", str(self.port)]
        while subprocess.run(ready, check=False).returncode != 0:
            assert self._server.poll() is None, (self._directory / "log").read_text()[-2000:]
            assert time.monotonic() < deadline, "PostgreSQL does not accept connections"
            time.sleep(0.05)

    def kill(self) -> None:
        """End all its processes at once, as the death of the machine would."""
        assert self._server is not None
        os.killpg(self._server.pid, signal.SIGKILL)
        self._server.wait()
        self._server = None
        # Backends are process groups of their own, and end when they notice that the server is gone.
        time.sleep(0.2)

    def stop(self) -> None:
        """End it at once; its data is no longer needed."""
        if self._server is not None:
            self._server.send_signal(signal.SIGQUIT)
            self._server.wait(START_S)
            self._server = None

    def create_schema(self, name: str) -> str:
        """Create a schema, and return its URL."""
        psql = [str(self._programs / "psql"), "-q", "-X", "-c", f"create schema {name}", self.url()]
        done = subprocess.run(psql, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        return self.url(name)


@contextlib.contextmanager
def running_cluster(
    *, is_synced: bool = False, directory: Path | None = None, max_wal_mib: int = 1024
) -> Iterator[Cluster]:
    """A started cluster in a directory below `directory`, which another user must reach; both end with the block."""
    below = Path(tempfile.mkdtemp(prefix="atropos-postgres-", dir=directory))
    try:
        cluster = Cluster(below, is_synced=is_synced, max_wal_mib=max_wal_mib)
        cluster.start()
        try:
            yield cluster
        finally:
            cluster.stop()
    finally:
        shutil.rmtree(below, ignore_errors=True)
