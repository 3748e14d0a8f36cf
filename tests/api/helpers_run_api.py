"""`run-api` as a process that is forked from one which has imported it: the imports take 0.6 s of CPU per start."""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Self

from atroposlib.cli.run_api import main

_FORKS = multiprocessing.get_context("forkserver")
_FORKS.set_forkserver_preload([__name__])


def _run(
    flags: Sequence[str], cwd: Path, env: Mapping[str, str], stdout: Connection, stderr: Connection
) -> None:
    os.dup2(stdout.fileno(), 1)
    os.dup2(stderr.fileno(), 2)
    stdout.close()
    stderr.close()
    os.chdir(cwd)
    os.environ.clear()
    os.environ.update(env)
    sys.exit(main(flags))


class ForkedCommand:
    """`run-api` with these flags: what the tests use of `subprocess.Popen` with pipes for text."""

    def __init__(self, flags: Sequence[str], *, cwd: Path, env: Mapping[str, str]) -> None:
        (out, stdout), (err, stderr) = _FORKS.Pipe(duplex=False), _FORKS.Pipe(duplex=False)
        self._process = _FORKS.Process(target=_run, args=(flags, cwd, env, stdout, stderr))
        self._process.start()
        stdout.close()
        stderr.close()
        self.stdout, self.stderr = (os.fdopen(os.dup(pipe.fileno())) for pipe in (out, err))
        out.close()
        err.close()

    @property
    def pid(self) -> int:
        assert self._process.pid is not None
        return self._process.pid

    @property
    def returncode(self) -> int | None:
        return self._process.exitcode

    def poll(self) -> int | None:
        return self.returncode

    def send_signal(self, number: signal.Signals) -> None:
        os.kill(self.pid, number)

    def kill(self) -> None:
        self._process.kill()

    def terminate(self) -> None:
        self._process.terminate()

    def communicate(self, *, timeout: float) -> tuple[str, str]:
        """Wait for the end, and return the output, of which a pipe must hold all (64 KiB)."""
        self._process.join(timeout)
        if self._process.is_alive():
            raise subprocess.TimeoutExpired("run-api", timeout)
        return self.stdout.read(), self.stderr.read()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: Any) -> None:
        self.stdout.close()
        self.stderr.close()
        self._process.join()
