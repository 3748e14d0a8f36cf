"""Start a part before what it needs is there: `started_early.py LOCK PATH IMPORTS MODULE FLAG...`.

Imports the modules IMPORTS (with commas between) while it holds the file LOCK, waits until PATH exists, and becomes
`python -m MODULE FLAG...`. So the imports of torch and transformers, 7 s of CPU time in each process, run beside the
warm-up: one after the other, so that they leave it a core of two.
"""

from __future__ import annotations

import fcntl
import importlib
import runpy
import sys
import time
from pathlib import Path


def main() -> None:
    lock, path, imports, module, *flags = sys.argv[1:]
    with open(lock, "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        for name in imports.split(","):
            importlib.import_module(name)
    while not Path(path).exists():
        time.sleep(0.05)
    sys.argv = [module, *flags]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
