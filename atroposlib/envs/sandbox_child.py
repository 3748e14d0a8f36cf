"""The first code in a sandbox: set the limits, drop privileges, then run the program.

`sandbox.py` passes this source to `python -I -c`, so it imports only the standard library, and little of it: json and
typing would nearly double the CPU time of a small program. Standard input holds the program, then the program's own
input. It prints `READY` once the sandbox is set up.
"""

from __future__ import annotations

import os
import resource
import sys
from types import ModuleType

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

READY = b"\x00sandbox ready\n"
"""Printed before the program's output."""
_PR_SET_PDEATHSIG = 1
_PR_SET_SECCOMP = 22
_PR_SET_NO_NEW_PRIVS = 38
"""These from linux/prctl.h."""
_OWN_NAMESPACES = 0x00020000 | 0x08000000 | 0x40000000
_OWN_USERS = 0x10000000
"""Mounts, shared memory and network; users (linux/sched.h)."""
_NO_SETUID_NO_DEVICES = 2 | 4
_BIND = 4096
_PRIVATE_BELOW = 16384 | 1 << 18
"""From linux/mount.h."""
_MOUNT_SETATTR = 442
"""System call, with the same number everywhere: changes all mounts below a folder."""
_REFUSED_CALLS = {
    "x86_64": (0xC000003E, (29, 41, 64, 68, 240, 248, 272, 319, 425)),
    "aarch64": (0xC00000B7, (194, 198, 190, 186, 180, 217, 97, 279, 425)),
}
"""Architecture (linux/audit.h) and the numbers of shmget, socket, semget, msgget, mq_open, add_key, unshare,
memfd_create and io_uring_setup: they reach beyond the process, or give memory that its limit does not count."""


def become(settings: dict[str, Any]) -> None:
    """Run the program within `settings`: num_source_bytes, limits by name, user id or None, is_plain.

    namespace_folder: where its files are in memory, with namespaces of its own; None: it has none.
    """
    source = bytearray()
    while len(source) < settings["num_source_bytes"]:
        chunk = os.read(0, settings["num_source_bytes"] - len(source))
        if not chunk:
            sys.exit("the caller ended before it had sent the program")
        source += chunk
    if settings["namespace_folder"] is not None:
        num_bytes = settings["limits"]["RLIMIT_FSIZE"]
        _isolate(settings["namespace_folder"], num_bytes, settings["user"])
    for name, value in settings["limits"].items():
        number = getattr(resource, name)
        hard = resource.getrlimit(number)[1]
        limit = value if hard == resource.RLIM_INFINITY else min(value, hard)
        # The soft limit on processor time sends SIGXCPU, which identifies the cause; the hard one sends SIGKILL.
        resource.setrlimit(number, (limit, limit + (name == "RLIMIT_CPU" and limit != hard)))
    if (user := settings["user"]) is not None:
        os.setgroups([])
        os.setgid(user)
        os.setuid(user)
    if settings["is_plain"] and sys.platform == "linux":
        _call("prctl", _PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
        _call("prctl", _PR_SET_PDEATHSIG, 9)
        if (machine := os.uname().machine) in _REFUSED_CALLS:
            _refuse(*_REFUSED_CALLS[machine])
    os.write(1, READY)
    main = ModuleType("__main__")
    main.__file__ = "program.py"
    sys.modules["__main__"] = main
    sys.argv = ["program.py"]
    exec(compile(bytes(source), "program.py", "exec"), main.__dict__)


def _isolate(folder: str, num_bytes: int, user: int | None) -> None:
    """Make all files read-only but those of one file system in memory: `folder`, /dev/shm and, if possible, /tmp.

    With own shared memory and network, and without the rights that this took. Exits if the system does not permit it.
    """
    own = f"{os.getuid()} {os.getuid()} 1", f"{os.getgid()} {os.getgid()} 1"
    _call("unshare", _OWN_NAMESPACES | (_OWN_USERS if user is None else 0))
    if user is None:
        for name, text in (("setgroups", "deny"), ("uid_map", own[0]), ("gid_map", own[1])):
            with open(f"/proc/self/{name}", "w") as file:
                file.write(text)
    _call("mount", None, b"/", None, _PRIVATE_BELOW, None)
    read_only = (1).to_bytes(8, sys.byteorder) + bytes(24)
    _call("syscall", _MOUNT_SETATTR, -100, b"/", 0x8000, read_only, len(read_only))
    options = f"size={num_bytes},mode=1777".encode()
    own_files = os.fsencode(folder)
    _call("mount", b"tmpfs", own_files, b"tmpfs", _NO_SETUID_NO_DEVICES, options)
    used = [sys.executable, *sys.path]
    for place in ("/dev/shm", "/var/tmp", "/tmp"):
        if os.path.isdir(place) and not any(path.startswith(f"{place}/") for path in used):
            if folder.startswith(f"{place}/"):  # the folder keeps its name
                inner = os.path.join(folder, os.path.relpath(folder, place))
                os.makedirs(inner)
                os.chmod(inner, 0o777)
            _call("mount", own_files, place.encode(), None, _BIND, None)
    os.chdir(folder)
    if user is None:  # else `setuid` drops the rights
        _call("capset", 0x20080522.to_bytes(4, sys.byteorder) + bytes(4), bytes(24))


def _refuse(architecture: int, calls: tuple[int, ...]) -> None:
    """Let system calls fail with EPERM, and all those of other architectures that the processor runs."""
    import ctypes
    import struct

    end = len(calls) + 5
    # Load a word; jump over (if equal or greater, else) this many instructions; return. linux/filter.h
    filters = [(0x20, 0, 0, 4), (0x15, 0, end - 2, architecture), (0x20, 0, 0, 0)]
    filters += [(0x35, end - 4, 0, 0x40000000)]
    filters += [(0x15, end - 5 - i, 0, number) for i, number in enumerate(calls)]
    filters += [(0x06, 0, 0, 0x7FFF0000), (0x06, 0, 0, 0x00050001)]
    code = ctypes.create_string_buffer(b"".join(struct.pack("=HBBI", *each) for each in filters))
    program = struct.pack("@HP", len(filters), ctypes.addressof(code))
    _call("prctl", _PR_SET_SECCOMP, 2, program, 0, 0)


def _call(name: str, *arguments: bytes | int | None) -> None:
    """Call a function of the C library; exit if it fails."""
    import ctypes

    if getattr(ctypes.CDLL(None, use_errno=True), name)(*arguments):
        sys.exit(f"{name}: {os.strerror(ctypes.get_errno())}")


if __name__ == "__main__":
    become(eval(sys.argv[1]))  # a literal that `sandbox.py` wrote
