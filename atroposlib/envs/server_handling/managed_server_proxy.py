"""The original's import path of `atroposlib.proxy.command`, also for `python -m`."""

from atroposlib.proxy.command import *
from atroposlib.proxy.command import main

if __name__ == "__main__":
    raise SystemExit(main())
