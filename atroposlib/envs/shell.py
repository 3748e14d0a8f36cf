"""Run shell commands on a task's files: in sandboxes without a daemon, or in a container of an image.

`Folder` runs each command in a new sandbox, to which the files are copied, and reads them back when the command has
ended: processes, empty folders, links and the modes of files do not last. `python` is the sandbox's interpreter.
`Container` is one container of Docker for all commands. Both block: call them in a thread or a reward worker, and
`close` them. Paths are relative to the working folder or absolute.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import secrets
import tarfile
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple, TypeAlias

from atroposlib.envs.sandbox import (
    Sandbox,
    SandboxLimits,
    docker_variables,
    run_bounded,
    run_code,
)
from atroposlib.errors import EnvError

Files: TypeAlias = dict[str, str | None]
"""Path -> text, with surrogate escapes for bytes that are not UTF-8; None: deleted."""

_DOCKER_S = 600.0
"""Limit of a command of Docker itself, such as pulling or building an image."""
_MORE_BYTES = 1 << 14
"""What a status, or the blocks of an archive, may add to the output of a command of Docker."""
_LIFETIME_S = 6 * 3600
"""A container whose caller was killed ends this long after its start."""

_IN_SANDBOX = """\
import ctypes, json, os, subprocess, sys
ctypes.CDLL(None).prctl(4, 0)
given = json.loads(sys.stdin.read())
captured = os.path.abspath("printed")
os.makedirs(given["folders"][0], exist_ok=True)
os.chdir(given["folders"][0])
os.environ["PATH"] = os.path.dirname(sys.executable) + ":" + os.environ["PATH"]
for path, text in given["files"].items():
    os.makedirs(os.path.dirname(path) or ".", exist_ok=True)
    with open(path, "w", errors="surrogateescape", newline="") as file:
        file.write(text)
    if text.startswith("#!"):
        os.chmod(path, 0o755)
with open(captured, "wb") as printed:
    status = subprocess.run(["sh", "-c", given["command"]], stdin=subprocess.DEVNULL, stdout=printed, stderr=printed)
files, num_bytes = {}, 0
for top in [".", *given["folders"][1:]]:
    for folder, _, names in os.walk(top):
        for path in (os.path.normpath(os.path.join(folder, name)) for name in sorted(names)):
            if os.path.isfile(path) and not os.path.islink(path):
                num_bytes += os.path.getsize(path) + len(path)
                if num_bytes > given["max_bytes"]:
                    sys.exit("the files are too large")
                with open(path, encoding="utf-8", errors="surrogateescape", newline="") as file:
                    files[path] = file.read()
with open(captured, encoding="utf-8", errors="replace") as printed:
    text = printed.read(given["max_bytes"])
print(json.dumps({"printed": text, "status": status.returncode, "files": files}))
"""
"""PR_SET_DUMPABLE (4): the command, of the same user, cannot write to this process's output or memory."""

_IN_CONTAINER = """\
ulimit -f 2097152
printed=$(mktemp)
timeout -s KILL "$1" sh -c "$2" > "$printed" 2>&1
status=$?
head -c "$3" "$printed"
rm -f "$printed"
printf '\\n%s' "$status"
"""
"""Bounds the time of a command, its output and each of its files (1 GiB); its status is the last line.

The output is written to a file: reading a pipe would last until programs in the background close it, too.
"""
_KILLED = "137"
"""Status of a command that `timeout` killed."""


class Ended(NamedTuple):
    """How a command ended."""

    status: int | None
    """Exit status; None: it was stopped, or left too much, and `printed` says why."""
    printed: str
    """Standard output and standard error."""


class Folder:
    """Files of which each command's sandbox gets a copy."""

    def __init__(
        self,
        files: Mapping[str, str],
        *,
        sandbox: Sandbox,
        limits: SandboxLimits,
        folders: Sequence[str] = ("folder",),
        max_bytes: int = 1 << 18,
    ) -> None:
        """`folders`: the working folder, and others whose files last; `max_bytes` is the size of all files."""
        self.files: dict[str, str] = dict(files)
        self._sandbox, self._limits = sandbox, limits
        self._folders, self._max_bytes = list(folders), max_bytes

    def run(self, command: str, *, timeout_s: float) -> Ended:
        """Run a command with `sh -c` in the working folder; at a limit the files stay as they were."""
        given: dict[str, Any] = {"files": self.files, "command": command}
        given |= {"folders": self._folders, "max_bytes": self._max_bytes}
        limits = replace(self._limits, wall_s=timeout_s, output_bytes=16 * self._max_bytes)
        result = run_code(
            _IN_SANDBOX, stdin=json.dumps(given), limits=limits, sandbox=self._sandbox
        )
        if result.exit_code == 0 and (ended := self._ended(result.stdout)) is not None:
            return ended
        return Ended(None, f"{reason_of(result.reason, result.stderr)}. The files are unchanged")

    def _ended(self, output: str) -> Ended | None:
        """Return how a command ended, and keep its files; None for output that a command has forged or broken."""
        try:
            given = json.loads(output)
            files, status, printed = given["files"], given["status"], given["printed"]
            is_text = all(isinstance(each, str) for each in (printed, *files.values()))
            num_bytes = sum(len(path) + len(text) for path, text in files.items())
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
            return None
        is_placed = all(self._has_place(path) for path in files)
        if not (is_text and is_placed and num_bytes <= self._max_bytes and isinstance(status, int)):
            return None
        self.files = files
        return Ended(status, printed)

    def _has_place(self, path: str) -> bool:
        if path != os.path.normpath(path) or path.startswith("../") or path in ("..", "."):
            return False
        tops = (each.rstrip("/") + "/" for each in self._folders[1:])
        return not os.path.isabs(path) or path.startswith(tuple(tops))

    def write(self, files: Mapping[str, str | None]) -> None:
        """Write these files, and delete those without a text."""
        merged = {**self.files, **files}
        self.files = {path: text for path, text in merged.items() if text is not None}

    def read(self, path: str) -> str | None:
        """Return the text of a file; None if there is none, or it is too large."""
        return self.files.get(path)

    def close(self) -> None:
        """Do nothing: nothing was started."""


def reason_of(reason: str, stderr: str) -> str:
    """Return why a command had no result.

    >>> reason_of("timeout", ""), reason_of("exit", "the files are too large\\n")
    ('the command was stopped (timeout)', 'the files are too large')
    """
    last_line = stderr.strip().rpartition("\n")[2]
    return last_line if reason == "exit" and last_line else f"the command was stopped ({reason})"


class Container:
    """A container of an image, which `close` removes.

    Its programs may be root inside, without new privileges, and by default without network. Files pass through Docker,
    not through programs of the container, which the model may have replaced.
    """

    def __init__(
        self,
        image: str,
        *,
        folder: str | None = None,
        before: str = ":",
        memory_mb: int = 4096,
        num_cpus: float = 2,
        has_network: bool = False,
        max_bytes: int = 1 << 20,
    ) -> None:
        """Start it; EnvError if it does not start.

        `folder`: None is the image's own working folder. `before`: a command before each other one.
        """
        self._max_bytes, self._before = max_bytes, before
        self._name = f"atropos-{secrets.token_hex(8)}"
        try:
            # `sleep` is process 1, which no process of the container can kill.
            docker(
                *("run", "--detach", "--rm", "--name", self._name),
                *([] if has_network else ["--network", "none"]),
                *("--security-opt", "no-new-privileges", "--pids-limit", "512"),
                *("--memory", f"{memory_mb}m", "--memory-swap", f"{memory_mb}m"),
                *("--cpus", f"{num_cpus:g}", "--entrypoint", "sleep", image, str(_LIFETIME_S)),
            )
            self._folder = folder or docker("exec", self._name, "pwd").decode().strip()
        except EnvError:
            self.close()
            raise

    def run(self, command: str, *, timeout_s: float) -> Ended:
        """Run a command; what it left running in the container stays."""
        given = [f"{timeout_s:g}", f"{self._before}\n{command}", str(self._max_bytes)]
        script = ["sh", "-c", _IN_CONTAINER, "sh", *given]
        try:
            argv = ["exec", "--workdir", self._folder, self._name, *script]
            size = self._max_bytes + _MORE_BYTES
            output = docker(*argv, timeout_s=timeout_s + _DOCKER_S, max_bytes=size)
        except EnvError as error:
            docker("version")  # raises if it was not the model that broke the container
            return Ended(None, str(error))
        printed, _, status = output.decode("utf-8", "replace").rpartition("\n")
        if status == _KILLED or not status.isdigit():
            return Ended(None, f"the command was stopped\n{printed}".rstrip())
        return Ended(int(status), printed)

    def write(self, files: Mapping[str, str | None]) -> None:
        archive = io.BytesIO()
        with tarfile.open(fileobj=archive, mode="w") as tar:
            for path, text in files.items():
                if text is not None:
                    content = text.encode("utf-8", "surrogateescape")
                    entry = tarfile.TarInfo(os.path.join(self._folder, path).lstrip("/"))
                    entry.size, entry.mode = len(content), 0o755
                    tar.addfile(entry, io.BytesIO(content))
        docker("cp", "-", f"{self._name}:/", given=archive.getvalue())
        if deleted := [path for path, text in files.items() if text is None]:
            remove = ["rm", "-f", "--", *deleted]
            docker("exec", "--workdir", self._folder, self._name, *remove)

    def read(self, path: str) -> str | None:
        """Return the text of a file; None if there is none, or it is too large."""
        source = f"{self._name}:{os.path.join(self._folder, path)}"
        size = self._max_bytes + _MORE_BYTES
        try:
            received = docker("cp", "--follow-link", source, "-", max_bytes=size)
        except EnvError:
            docker("version")  # raises if it was not the model that broke the container
            return None
        with (
            contextlib.suppress(tarfile.TarError),
            tarfile.open(fileobj=io.BytesIO(received), mode="r:") as tar,
        ):
            first = tar.next()
            if first is not None and first.isreg() and (file := tar.extractfile(first)):
                content = file.read()
                if len(content) == first.size:
                    return content.decode("utf-8", "surrogateescape")
        return None

    def close(self) -> None:
        with contextlib.suppress(EnvError):  # it has not started, or has ended
            docker("rm", "--force", self._name)


Machine: TypeAlias = Folder | Container
"""Where commands run."""


def docker(
    *argv: str, given: bytes = b"", timeout_s: float = _DOCKER_S, max_bytes: int = 1 << 20
) -> bytes:
    """Run Docker's client and return what it printed; EnvError if it fails, takes too long or prints more."""
    command = f"docker {argv[0]}"
    ended = run_bounded(
        ["docker", *argv], given, wall_s=timeout_s, max_bytes=max_bytes, env=docker_variables()
    )
    if ended.ended_by == "timeout":
        raise EnvError(f"{command}: no end within {timeout_s:g} s")
    if ended.ended_by == "output":
        raise EnvError(f"{command}: more than {max_bytes} bytes of output")
    if ended.exit_code:
        reason = ended.stderr.decode("utf-8", "replace").strip()
        raise EnvError(f"{command}: exit status {ended.exit_code}. {reason}")
    return ended.stdout
