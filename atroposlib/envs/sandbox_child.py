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
_PR_SET_NO_NEW_PRIVS = 38
"""Both from linux/prctl.h."""


def become(settings: dict[str, Any]) -> None:
    """Run the program within `settings`: num_source_bytes, limits by name, user id or None, is_plain."""
    source = bytearray()
    while len(source) < settings["num_source_bytes"]:
        chunk = os.read(0, settings["num_source_bytes"] - len(source))
        if not chunk:
            sys.exit("the caller ended before it had sent the program")
        source += chunk
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
        import ctypes

        prctl = ctypes.CDLL(None).prctl
        prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
        prctl(_PR_SET_PDEATHSIG, 9)
    os.write(1, READY)
    main = ModuleType("__main__")
    main.__file__ = "program.py"
    sys.modules["__main__"] = main
    sys.argv = ["program.py"]
    exec(compile(bytes(source), "program.py", "exec"), main.__dict__)


if __name__ == "__main__":
    become(eval(sys.argv[1]))  # a literal that `sandbox.py` wrote
