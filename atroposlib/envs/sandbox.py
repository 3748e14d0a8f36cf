"""Run a program that a model wrote in a process that cannot access its grader or other programs.

    result = run_code(completion, stdin="3 4", limits=SandboxLimits(wall_s=5))
    score = result.reason == "exit" and result.stdout.strip() == "7"

The program gets only its source and input; the caller gets its output and exit. Compare with the expected answer in the
caller, never in the program. Call it from a scoring function in a reward worker (`DatasetEnv.in_worker`), which is
killed with all sandboxes at its deadline, or with `asyncio.to_thread`.

`Sandbox` is the interface. `local_sandbox` returns the better of two backends that run programs on this machine:

- `BubblewrapSandbox`, if bubblewrap (`apt install bubblewrap`) may create namespaces: separate processes, no network, a
  file system in memory; of this machine only the interpreter and /usr are visible, read-only.
- `ProcessSandbox` otherwise: a process with limits, without inherited descriptors and environment, that cannot start a
  process or thread. Where the system permits it, its mounts, shared memory and network are its own: it can write only
  files in memory, which end with it. A filter refuses system calls that open sockets, or memory that no limit counts.
  If the caller is root, it runs as an unused user, which can neither signal nor read any process; without mounts of its
  own, siblings see the files it writes in public folders, which are removed when it ends. Otherwise it runs as its
  grader's user: the kernel denies it the memory and the descriptors of processes that hide themselves
  (`hide_this_process`: the workers, the environment, the caller), but it CAN signal that user's processes and read that
  user's files, and without mounts of its own write them. A warning, logged once, says what holds here. With
  `--require-isolation`, or ATROPOS_REQUIRE_ISOLATION=1 in the environment, it runs nothing.

`DockerSandbox`, which the caller chooses, runs each program in a new container without network.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import logging
import os
import secrets
import selectors
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple, Protocol, TypeAlias

from atroposlib.envs import sandbox_child
from atroposlib.envs.child_variables import child_variables
from atroposlib.envs.keeper import kill_group, prctl
from atroposlib.envs.sandbox_child import READY
from atroposlib.errors import EnvError

logger = logging.getLogger(__name__)

Reason: TypeAlias = Literal["exit", "timeout", "memory", "output", "crash"]

ISOLATION_VARIABLE = "ATROPOS_REQUIRE_ISOLATION"
"""If it is set, `ProcessSandbox` runs nothing."""
_CHILD = Path(sandbox_child.__file__).read_text(encoding="utf-8")
_STDERR_TAIL_BYTES = 4000
_NUM_OPEN_FILES = 128
_START_S = 60.0
"""Limit of a sandbox's start, on a busy machine."""
_REMOVE_S = 60.0
"""Limit of removing a container."""
_ORPHAN_GRACE_S = 5.0
"""A container whose caller was killed ends this long after its deadline."""
_FIRST_USER = 1 << 30
"""User ids from here on are unused on ordinary systems; each running sandbox gets its own."""
_USERS_PER_PROCESS = 64
_PID_BITS = 22
"""Process ids are below 2**22 (proc(5), pid_max)."""
_NOBODY = 65534
"""User and group id of programs in containers: the account without rights on Debian."""
_FEW_USERS = range(61184, 65520)
"""If a container maps only 65536 ids: systemd's range for dynamic users."""
_PR_SET_DUMPABLE = 4
"""From linux/prctl.h."""
_TMP_MB = 256
"""Size of /tmp in `isolated_command`, MiB."""
_AS_USER = (
    "import os, sys; user = int(sys.argv[1]); os.setgroups([]); os.setgid(user); os.setuid(user); "
    "os.execvp(sys.argv[2], sys.argv[2:])"
)
"""Becomes a user, which drops the capabilities, and runs a command."""
_PUBLIC_FOLDERS = ("/tmp", "/var/tmp", "/dev/shm", "/run/lock")
"""Where all users may write, on ordinary systems."""
_REMOVE_FILES_OF = (
    "-xdev -mindepth 1 ( -user {} -prune -execdir rm -rf -- {{}} + -o -type d ! -perm -o=w -prune )"
)
"""Arguments of `find`: below its folders and those in them where all users may write."""
_SYSTEM_FOLDERS = ("/bin", "/lib", "/lib32", "/lib64", "/sbin")


@dataclass(frozen=True, slots=True, kw_only=True)
class SandboxLimits:
    """Limits of one program."""

    wall_s: float = 10.0
    """Seconds from its start to its end; the start of the sandbox does not count."""
    cpu_s: int = 10
    """Processor seconds of each process."""
    memory_mb: int = 512
    """Address space of each process, MiB."""
    num_processes: int = 16
    """Processes and threads at once; `ProcessSandbox` allows only 1."""
    output_bytes: int = 1 << 20
    """Size of stdout; only the end of stderr is kept."""
    file_mb: int = 16
    """Size of a file, MiB; with bubblewrap and Docker also of all files in /tmp together, and of those in /dev/shm."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SandboxResult:
    """How a program ended, and its output."""

    reason: Reason
    """exit: it ended by itself, with any exit code. timeout: killed at a deadline. memory: a MemoryError ended it.
    output: it printed too much. crash: a signal ended it."""
    stdout: str
    stderr: str
    """The last part of stderr."""
    exit_code: int | None
    """None if it was killed."""


class Sandbox(Protocol):
    """Runs programs: this module's backends, or your own, such as a container service."""

    def run(self, source: str, *, stdin: str, limits: SandboxLimits) -> SandboxResult:
        """Run a Python program until it ends or reaches a limit. Raises EnvError if the sandbox does not start."""


def run_code(
    source: str,
    *,
    stdin: str = "",
    limits: SandboxLimits | None = None,
    sandbox: Sandbox | None = None,
) -> SandboxResult:
    """Run a Python program in `sandbox`; default: the best one on this machine."""
    return (sandbox or local_sandbox()).run(source, stdin=stdin, limits=limits or SandboxLimits())


@functools.cache
def local_sandbox() -> Sandbox:
    """Return the best sandbox on this machine, determined once per process by running a program."""
    if (program := shutil.which("bwrap")) is not None:
        # In a sandbox of root's bubblewrap, which covers parts of /proc, there cannot be another /proc.
        for box in (BubblewrapSandbox(program), BubblewrapSandbox(program, has_proc=False)):
            with contextlib.suppress(EnvError):
                if box.run("import decimal", stdin="", limits=SandboxLimits()).exit_code == 0:
                    return box
    return ProcessSandbox()


def isolated_command(argv: Sequence[str], *, readable: Iterable[str]) -> list[str] | None:
    """Return a command that runs `argv` in bubblewrap; None if `local_sandbox` is another one.

    It has own processes and shared memory, no network, no capabilities, and a /tmp in memory of `_TMP_MB`. Of this
    machine it sees /usr, the interpreter and the absolute paths in `readable`, if they exist: read-only, and as an
    unused user where the caller is root. It ends with the thread that started it; its exit code is that of `argv`,
    128 + N after signal N. The working directory is this process's if `readable` has it, else /tmp.
    """
    if not isinstance(sandbox := local_sandbox(), BubblewrapSandbox):
        return None
    paths = frozenset(path for path in readable if os.path.exists(path))
    here = Path.cwd()
    is_visible = any(here.is_relative_to(path) for path in paths)
    as_user = [sys.executable, "-I", "-c", _AS_USER, str(_new_user())] if os.geteuid() == 0 else []
    options = [*sandbox.options(_TMP_MB, paths), "--chdir", str(here) if is_visible else "/tmp"]
    return [*options, "--", *as_user, *argv]


def hide_this_process() -> None:
    """Prevent processes of the same user from opening this one's memory and descriptors or tracing it (Linux)."""
    prctl(_PR_SET_DUMPABLE, 0)


def hide_if_programs_share_the_user() -> None:
    """Hide this process if sandboxed programs would run as the same user."""
    if os.geteuid() != 0 and isinstance(local_sandbox(), ProcessSandbox):
        hide_this_process()


class BubblewrapSandbox:
    """Runs programs in separate namespaces."""

    def __init__(
        self, program: str = "bwrap", *, has_proc: bool = True, folders: Sequence[str] = ()
    ) -> None:
        """`folders`: absolute paths that are writable besides /tmp, each of its size."""
        self._program = program
        self._has_proc = has_proc
        self._folders = folders

    def with_folders(self, *folders: str) -> BubblewrapSandbox:
        """Return such a sandbox with more folders in memory."""
        return BubblewrapSandbox(self._program, has_proc=self._has_proc, folders=folders)

    def run(self, source: str, *, stdin: str, limits: SandboxLimits) -> SandboxResult:
        # RLIMIT_NPROC does not apply to root, not even in a user namespace: the program switches to another user.
        user = _new_user() if os.geteuid() == 0 else None
        settings = _settings(limits, num_processes=limits.num_processes, user=user)
        argv = [*self.options(limits.file_mb), "--chdir", "/tmp", "--", sys.executable]
        return _run(argv, source, stdin, limits, settings, _environment("/tmp"))

    def options(self, file_mb: int, readable: frozenset[str] = frozenset()) -> list[str]:
        """Return the command up to the working directory; all files together have `file_mb` MiB."""
        is_root = os.geteuid() == 0
        size = str(file_mb << 20)
        return [
            self._program,
            *("--unshare-ipc", "--unshare-pid", "--unshare-net", "--unshare-uts"),
            *([] if is_root else ["--unshare-user"]),
            *("--unshare-cgroup-try", "--die-with-parent", "--cap-drop", "ALL"),
            *(["--cap-add", "CAP_SETUID", "--cap-add", "CAP_SETGID"] if is_root else []),
            # Before the bindings: the interpreter may be below /tmp.
            *("--perms", "1777", "--size", size, "--tmpfs", "/tmp"),
            *_bindings(readable),
            *(
                option
                for path in self._folders
                for option in ("--perms", "1777", "--size", size, "--tmpfs", path)
            ),
            *(["--proc", "/proc"] if self._has_proc else []),
            *("--dev", "/dev", "--perms", "1777", "--size", size),
            # The two file systems that bubblewrap makes are as large as half the memory.
            *("--tmpfs", "/dev/shm", "--remount-ro", "/dev", "--remount-ro", "/"),
        ]


class ProcessSandbox:
    """Runs programs in an unprivileged process; the module docstring lists what it cannot prevent."""

    def run(self, source: str, *, stdin: str, limits: SandboxLimits) -> SandboxResult:
        if os.environ.get(ISOLATION_VARIABLE):
            raise EnvError(
                "isolation is required, and bubblewrap is missing or may not create namespaces: model-written programs "
                "do not run. Install bubblewrap (apt install bubblewrap)"
            )
        _warn_once()
        return _run_plain(source, stdin, limits, has_namespaces=_may_have_namespaces())


@functools.cache
def _may_have_namespaces() -> bool:
    """Whether this system lets an unprivileged process have mounts, shared memory and network of its own."""
    with contextlib.suppress(EnvError):
        return not _run_plain("", "", SandboxLimits(), has_namespaces=True).exit_code
    return False


def _run_plain(
    source: str, stdin: str, limits: SandboxLimits, *, has_namespaces: bool
) -> SandboxResult:
    """Run a program in a process, and remove the files that it leaves."""
    user = _new_user() if os.geteuid() == 0 else None
    if user is None:
        hide_this_process()
    interpreter = sys.executable if user is None else _public_interpreter()
    folder = os.path.realpath(tempfile.mkdtemp(prefix="sandbox-"))
    # 1 denies new processes: the limit counts all processes of the user, which may be the grader's too.
    settings = _settings(limits, num_processes=1, user=user)
    settings |= {"is_plain": True, "namespace_folder": folder if has_namespaces else None}
    try:
        if user is not None:
            os.chown(folder, user, user)
        return _run(
            [interpreter], source, stdin, limits, settings, _environment(folder), cwd=folder
        )
    finally:
        if user is None:  # these programs remove folders of any depth
            argv = ["sh", "-c", 'chmod -R u+rwx "$0"; rm -rf "$0"', folder]
        else:
            public = {os.path.dirname(folder), *_PUBLIC_FOLDERS}
            argv = ["find", *public, *_REMOVE_FILES_OF.format(user).split()]
        if has_namespaces:
            os.rmdir(folder)
        else:
            subprocess.run(argv, env={"PATH": os.defpath}, capture_output=True, check=False)


class DockerSandbox:
    """Runs each program in a new container, without network, as an unprivileged user.

    `docker pull` the image first. It needs `python3` and `timeout`; the official Python images have both. What the
    image contains, the program can import. Where `docker` is not on the PATH, `program` names it or a replacement.
    """

    def __init__(self, image: str, *, program: str = "docker") -> None:
        self._image = image
        self._program = program

    def run(self, source: str, *, stdin: str, limits: SandboxLimits) -> SandboxResult:
        name = f"atropos-{secrets.token_hex(8)}"
        argv = [
            *(self._program, "run", "--rm", "--interactive", "--name", name, "--pull", "never"),
            *("--network", "none", "--read-only", "--user", f"{_NOBODY}:{_NOBODY}"),
            *("--cap-drop", "ALL", "--security-opt", "no-new-privileges"),
            *("--pids-limit", str(limits.num_processes + 1), "--cpus", "1"),  # 1: `timeout`
            *("--memory", f"{limits.memory_mb}m", "--memory-swap", f"{limits.memory_mb}m"),
            *("--tmpfs", f"/tmp:rw,exec,uid={_NOBODY},mode=1777,size={limits.file_mb}m"),
            *("--shm-size", f"{limits.file_mb}m", "--workdir", "/tmp"),
            *(f"--env={key}={value}" for key, value in _environment("/tmp").items()),
            *("--entrypoint", "timeout", self._image, "-s", "KILL"),
            *(f"{limits.wall_s + _ORPHAN_GRACE_S:g}", "python3"),
        ]
        # The kernel counts RLIMIT_NPROC per user, over all containers; `--pids-limit` is the container's own.
        settings = _settings(limits, num_processes=None, user=None)
        variables = docker_variables()
        has_ended = False
        try:
            result = _run(argv, source, stdin, limits, settings, variables)
            has_ended = result.reason in ("exit", "memory", "crash")
        finally:
            # Only the client was killed; without the removal, `timeout` ends the container.
            if not has_ended:
                remove = [self._program, "rm", "--force", name]
                with contextlib.suppress(EnvError):
                    run_bounded(remove, wall_s=_REMOVE_S, max_bytes=1 << 10, env=variables)
        return result


def docker_variables() -> dict[str, str]:
    """Return the environment variables of a client of Docker or Podman."""
    own = ("DOCKER_", "CONTAINER_", "SSH_AUTH_SOCK")
    return child_variables(name for name in os.environ if name.startswith(own))


@functools.cache
def _warn_once() -> None:
    is_root = os.geteuid() == 0
    can = "read this machine's public files"
    if not is_root:
        can = "signal this user's processes and read this user's files"
    if not _may_have_namespaces():
        can += (
            f", write {'in public folders' if is_root else 'them'}, leave notes there to siblings, and, unless the "
            "processor is x86-64 or ARM64, use the network and shared memory, which outlives them"
        )
    logger.warning(
        "MODEL-WRITTEN PROGRAMS RUN WITHOUT BUBBLEWRAP: it is missing or may not create namespaces. They can %s. "
        "Install bubblewrap (apt install bubblewrap), or run this environment in a container; --require-isolation "
        "refuses to start without it",
        can,
    )


_num_runs = itertools.count()


def _new_user() -> int:
    """Return a user id that no other running sandbox has."""
    number = (os.getpid() % (1 << _PID_BITS)) * _USERS_PER_PROCESS + (
        next(_num_runs) % _USERS_PER_PROCESS
    )
    if _maps_all_users():
        return _FIRST_USER + number
    return _FEW_USERS[number % len(_FEW_USERS)]


@functools.cache
def _maps_all_users() -> bool:
    last = _FIRST_USER + (_USERS_PER_PROCESS << _PID_BITS)
    for line in Path("/proc/self/uid_map").read_text().splitlines():
        first, _, count = map(int, line.split())
        if first <= _FIRST_USER and last <= first + count:
            return True
    return False


@functools.cache
def _public_interpreter() -> str:
    """Return an interpreter that every user can run, for programs that root starts as another user."""
    own = sys.executable if _is_public(sys.executable) and _is_public(os.__file__) else None
    found = own or next(filter(_is_public, ("/usr/local/bin/python3", "/usr/bin/python3")), None)
    if found is None:
        raise EnvError(
            f"{sys.executable} is in a folder that only root can access, and model-written programs do not run as "
            "root: install bubblewrap (apt install bubblewrap) or python3 (apt install python3)"
        )
    return found


def _is_public(path: str) -> bool:
    real = Path(path).resolve()
    if not real.exists():
        return False
    folders = [real.parent, *real.parent.parents, *Path(path).absolute().parents]
    return bool(real.stat().st_mode & stat.S_IROTH) and all(
        folder.stat().st_mode & stat.S_IXOTH for folder in folders
    )


@functools.cache
def _bindings(readable: frozenset[str]) -> Sequence[str]:
    """Return bubblewrap's options for the files that Python needs, and for existing paths."""
    options: list[str] = []
    for path in _SYSTEM_FOLDERS:
        if os.path.islink(path):
            options += ["--symlink", os.readlink(path), path]
        elif os.path.exists(path):
            options += ["--ro-bind", path, path]
    real = str(Path(sys.executable).resolve().parents[1])
    made = {"/tmp"}
    for root in sorted({"/usr", sys.base_prefix, sys.prefix, real, *readable}):
        if root != "/usr" and root.startswith("/usr/"):
            continue
        for parent in [*reversed(Path(root).parents)][1:]:
            if str(parent) not in made:
                made.add(str(parent))
                options += ["--perms", "0755", "--dir", str(parent)]
        options += ["--ro-bind", root, root]
    return options


def _environment(folder: str) -> dict[str, str]:
    """Return the environment variables of a program whose folder is `folder`."""
    return {
        "PATH": "/usr/local/bin:/usr/bin:/bin",
        "LANG": "C.UTF-8",
        "HOME": folder,
        "TMPDIR": folder,
        "OMP_NUM_THREADS": "1",
        "OPENBLAS_NUM_THREADS": "1",
    }


def _settings(
    limits: SandboxLimits, *, num_processes: int | None, user: int | None
) -> dict[str, Any]:
    """Return what `sandbox_child` reads; without the size of the program."""
    by_name = {
        "RLIMIT_AS": limits.memory_mb << 20,
        "RLIMIT_CPU": limits.cpu_s,
        "RLIMIT_FSIZE": limits.file_mb << 20,
        "RLIMIT_NPROC": num_processes,
        "RLIMIT_NOFILE": _NUM_OPEN_FILES,
        "RLIMIT_CORE": 0,
    }
    known = {name: value for name, value in by_name.items() if value is not None}
    return {"limits": known, "user": user, "is_plain": False, "namespace_folder": None}


def _run(
    python: Sequence[str],
    source: str,
    stdin: str,
    limits: SandboxLimits,
    settings: Mapping[str, Any],
    environment: Mapping[str, str],
    *,
    cwd: str = "/",
) -> SandboxResult:
    """Run a program in the sandbox that `python` starts: a command that ends in an interpreter."""
    code = source.encode("utf-8", "replace")
    sized = repr({"num_source_bytes": len(code), **settings})
    output = run_bounded(
        [*python, "-I", "-c", _CHILD, sized],
        code + stdin.encode("utf-8", "replace"),
        wall_s=limits.wall_s,
        max_bytes=limits.output_bytes,
        env=environment,
        cwd=cwd,
        ready=READY,
    )
    stderr = output.stderr.decode("utf-8", "replace")
    if not output.stdout.startswith(READY):
        if output.ended_by == "timeout":
            raise EnvError(f"the sandbox did not start within {_START_S:g} s: {stderr}")
        raise EnvError(f"the sandbox did not start: exit status {output.exit_code}. {stderr}")
    reason = output.ended_by or _reason(output.exit_code, stderr)
    return SandboxResult(
        reason=reason,
        stdout=output.stdout[len(READY) :][: limits.output_bytes].decode("utf-8", "replace"),
        stderr=stderr,
        exit_code=output.exit_code if reason in ("exit", "memory") else None,
    )


class Output(NamedTuple):
    """What a program printed, and how it ended."""

    stdout: bytes
    stderr: bytes
    """Its last part."""
    ended_by: Literal["timeout", "output"] | None
    """The limit at which it was killed; None if it ended first."""
    exit_code: int


def run_bounded(
    argv: Sequence[str],
    given: bytes = b"",
    *,
    wall_s: float,
    max_bytes: int,
    env: Mapping[str, str],
    cwd: str = "/",
    ready: bytes = b"",
) -> Output:
    """Run a program on the input `given` until it ends, takes `wall_s` seconds or prints more than `max_bytes`.

    Then its process group is killed. The time begins when it has printed `ready`. EnvError if it cannot be run.
    """
    try:
        started = subprocess.Popen(
            argv,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            cwd=cwd,
            env=env,
            start_new_session=True,
        )
    except OSError as error:
        raise EnvError(f"cannot run {argv[0]}: {error}") from error
    stdout, stderr = bytearray(), bytearray()
    with started as process:
        try:
            ended_by = _exchange(process, given, (stdout, stderr), wall_s, max_bytes, ready)
        finally:
            kill_group(process.pid)
    return Output(bytes(stdout), bytes(stderr), ended_by, process.returncode)


def _exchange(
    process: subprocess.Popen[bytes],
    given: bytes,
    outputs: tuple[bytearray, bytearray],
    wall_s: float,
    max_bytes: int,
    ready: bytes,
) -> Literal["timeout", "output"] | None:
    """Write `given` to stdin and read the outputs until the process ends or reaches a limit, which is returned."""
    assert process.stdin is not None
    assert process.stdout is not None
    assert process.stderr is not None
    has_started = not ready
    deadline = time.monotonic() + (wall_s if has_started else _START_S)
    stdout, stderr = outputs
    left = memoryview(given)
    with selectors.DefaultSelector() as selector:
        for pipe, received in ((process.stdout, stdout), (process.stderr, stderr)):
            selector.register(pipe, selectors.EVENT_READ, received)
        os.set_blocking(process.stdin.fileno(), False)
        selector.register(process.stdin, selectors.EVENT_WRITE)
        while selector.get_map():
            remaining_s = deadline - time.monotonic()
            if remaining_s <= 0:
                return "timeout"
            for key, _ in selector.select(remaining_s):
                if key.data is None:
                    try:
                        left = left[os.write(key.fd, left[: 1 << 16]) :]
                    except BrokenPipeError:
                        left = left[:0]
                    if not left:
                        selector.unregister(key.fileobj)
                        process.stdin.close()
                    continue
                chunk = os.read(key.fd, 1 << 16)
                if not chunk:
                    selector.unregister(key.fileobj)
                key.data.extend(chunk)
                if not has_started and stdout.startswith(ready):
                    has_started = True
                    deadline = time.monotonic() + wall_s
                del stderr[:-_STDERR_TAIL_BYTES]
                if len(stdout) > max_bytes + len(ready):
                    return "output"
    try:
        process.wait(max(0.0, deadline - time.monotonic()))
    except subprocess.TimeoutExpired:
        return "timeout"
    return None


def _reason(exit_code: int, stderr: str) -> Reason:
    """Return how a process ended; bubblewrap reports signal N as 128 + N."""
    number = -exit_code if exit_code < 0 else exit_code - 128
    if number == signal.SIGXCPU:
        return "timeout"
    if number > 0:
        return "crash"
    last_line = stderr.rstrip().rpartition("\n")[2]
    return "memory" if exit_code == 1 and last_line.startswith("MemoryError") else "exit"
