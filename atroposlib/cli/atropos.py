"""`atropos up|render|status`: start a run on this machine, write its job files for others, look at a hub.

Each command imports what it runs, so that `--help` needs none of it.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
from collections.abc import Sequence
from pathlib import Path

from atroposlib.cli.launch import TARGETS
from atroposlib.errors import HubUnavailable, cli_boundary
from atroposlib.utils.wording import columns_of, wrapped

WATCH_INTERVAL_S = 2.0
PIPE_WIDTH = 200
"""Columns where the output is not a terminal."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return its exit code: 2 for a wrong file or flag, 1 if a part failed, 130 after Ctrl-C."""
    return cli_boundary(lambda: _main(sys.argv[1:] if argv is None else argv))


def _main(argv: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(prog="atropos", description=(__doc__ or "").split("\n")[0])
    commands = parser.add_subparsers(dest="command", required=True)
    start = commands.add_parser("up", help="run all parts of a run file on this machine")
    start.add_argument("file", type=Path)
    write = commands.add_parser("render", help="write the files that start a run on a cluster")
    write.add_argument("file", type=Path)
    write.add_argument("--for", dest="target", choices=TARGETS, required=True)
    write.add_argument("--out", type=Path, help="folder of the files; default: jobs/TARGET")
    look = commands.add_parser("status", help="show a hub: step, queue, environments, ledger")
    look.set_defaults(url="http://localhost:8000")
    # SUPPRESS: where one of the two is absent, it leaves the other's value.
    look.add_argument("url", nargs="?", default=argparse.SUPPRESS)
    look.add_argument("--hub_url", dest="url", metavar="URL", default=argparse.SUPPRESS)
    look.add_argument("--watch", action="store_true", help="refresh until Ctrl-C")
    look.add_argument(
        "--environments",
        type=int,
        default=20,
        metavar="N",
        help="show so many, those that block, are silent or lose most first (default: %(default)s)",
    )
    look.add_argument(
        "--run",
        type=Path,
        metavar="DIR",
        help="also count the fates that this run's trainer recorded",
    )
    given = parser.parse_args(list(argv))
    if given.command == "up":
        from atroposlib.cli.launch.up import up

        up(given.file)
    elif given.command == "render":
        from atroposlib.cli.launch.render import render

        out = given.out or Path("jobs") / given.target
        print(wrapped(render(given.file, target=given.target, out=out), columns_of(sys.stdout)))
    else:
        num = max(0, given.environments)
        asyncio.run(show_status(given.url, watch=given.watch, num_environments=num, run=given.run))


async def show_status(
    url: str, *, watch: bool, num_environments: int, run: Path | None = None
) -> None:
    """Print a hub's status once, or again and again; with `run`, what its trainer did with the groups."""
    from rich.console import Console, Group
    from rich.live import Live

    from atroposlib.cli.launch.status import TIMEOUT_S, read_hub, render_view
    from atroposlib.client import HubClient
    from atroposlib.frontend.run_files import fates_of, find_run_files

    console = Console(width=None if sys.stdout.isatty() else PIPE_WIDTH)
    async with HubClient(url, timeout_s=TIMEOUT_S) as hub:

        async def read() -> Group:
            view = await read_hub(hub, num_environments=num_environments)
            fates = None if run is None else await asyncio.to_thread(fates_of, find_run_files(run))
            return render_view(view, url=url, fates=fates)

        page = await read()
        if not watch:
            console.print(page)
            return
        with Live(page, console=console, auto_refresh=False) as live:
            while True:
                await asyncio.sleep(WATCH_INTERVAL_S)
                try:
                    live.update(await read(), refresh=True)
                except HubUnavailable as error:
                    live.update(str(error), refresh=True)


if __name__ == "__main__":
    sys.exit(main())
