"""`atropos up`: run all parts of a run file on this machine."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from rich.console import Console

from atroposlib.cli.launch.parts import Part, fill, parts_of, servers
from atroposlib.cli.launch.run_file import VARIABLE, RunFile, read_run
from atroposlib.cli.launch.status import TIMEOUT_S, describe_ledger, is_closed
from atroposlib.cli.launch.supervisor import Launcher, Program, launched, locked
from atroposlib.cli.launch.view import RunView
from atroposlib.client import TOKEN_VARIABLE, HubClient
from atroposlib.errors import AtroposError, ConfigError
from atroposlib.utils.json_lines import LineTail

HOST = "127.0.0.1"
_HUB = re.compile(r"hub(-\d+)?")
"""Instances of the part `hub`."""


def up(path: Path, *, directory: Path = Path("runs")) -> None:
    """Run the parts of a run file until the trainer ends; AtroposError if a part fails for good."""
    run = read_run(path)
    run_dir = (directory / run.name).absolute()
    programs = programs_of(run, run_dir, os.environ)
    console = Console()
    with locked(run_dir, flag=f"name: {run.name} ({run_dir})"):
        if run_dir.exists():
            console.print(
                f"resuming {run_dir}; another name, or removing it, starts a new run",
                soft_wrap=True,
                highlight=False,
            )
        run_dir.mkdir(exist_ok=True)
        (run_dir / "config.yaml").write_bytes(path.read_bytes())  # names secrets, holds none
        asyncio.run(_run(run, programs, run_dir, console))


def programs_of(run: RunFile, run_dir: Path, environ: Mapping[str, str]) -> list[Program]:
    """Return every instance of every part; ConfigError for a variable that is not set."""
    parts = parts_of(run, on_one_machine=True)
    _check_ports(parts)
    programs = []
    for part in parts:
        for index, name in enumerate(part.instances):
            variables = local_variables(parts, part, index, run_dir)
            env = {name: _from(environ, part, name, value) for name, value in part.env.items()}
            programs.append(
                Program(
                    name=name,
                    argv=[fill(word, variables) for word in part.command],
                    env={**env, **variables},
                    url=_url(part, index) if part.port is not None else None,
                    ready=part.ready,
                    timeout_s=part.section.timeout,
                    needs=[name for need in part.needed(parts) for name in need.instances],
                    restart=part.section.restart,
                    max_restarts=part.section.max_restarts,
                )
            )
    return programs


def local_variables(parts: Sequence[Part], part: Part, index: int, run_dir: Path) -> dict[str, str]:
    """Return the variables of one instance on this machine."""
    variables = {"RUN_DIR": str(run_dir), "DATA_DIR": str(run_dir / "hub"), "INDEX": str(index)}
    if part.port is not None:
        variables |= {"HOST": HOST, "PORT": str(part.port + index)}
    for server in servers(parts):
        urls = [_url(server, i) for i in range(server.section.count)]
        name = server.variable
        variables |= {name: urls[index % len(urls)], f"{name}S": ",".join(urls)}
    return variables


def environment() -> dict[str, str]:
    """Return this process's environment, in which `python` is this interpreter."""
    here = str(Path(sys.executable).parent)
    path = os.pathsep.join([here, *filter(None, [os.environ.get("PATH")])])
    return {**os.environ, "PATH": path, "PYTHONUNBUFFERED": "1"}


async def _run(run: RunFile, programs: list[Program], run_dir: Path, console: Console) -> None:
    names = [program.name for program in programs]
    hub = next((program for program in programs if _HUB.fullmatch(program.name)), None)
    with RunView(console, log_dir=run_dir, names=names) as view:
        async with (
            _reader(hub) as reader,
            launched(log_dir=run_dir, env=environment(), say=view.say) as launcher,
        ):
            for program in programs:
                launcher.start(program)
            showing = [view.show(launcher, metrics=LineTail(run_dir / "metrics.jsonl"))]
            if reader is not None:
                showing.append(view.read_hub(reader))
            tasks = [asyncio.create_task(each) for each in showing]
            try:
                await _until_end(run, launcher)
            finally:
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)
            others = [each for each in launcher.programs.values() if not _HUB.fullmatch(each.name)]
            launcher.stop(*others)
            view.print_logs()
            if reader is not None:
                await _close_books(reader, run_dir, console)


def _reader(hub: Program | None) -> contextlib.AbstractAsyncContextManager[HubClient | None]:
    if hub is None or hub.url is None:
        return contextlib.nullcontext(None)
    return HubClient(hub.url, token=hub.env.get(TOKEN_VARIABLE), timeout_s=TIMEOUT_S)


async def _until_end(run: RunFile, launcher: Launcher) -> None:
    """Return when the trainer has ended; without one, when all parts have."""
    if run.trainer is not None:
        await launcher.programs["trainer"].has_ended.wait()
        return
    for running in launcher.programs.values():
        await running.has_ended.wait()


async def _close_books(reader: HubClient, run_dir: Path, console: Console) -> None:
    """Store and print where every group is; AtroposError if one is missing."""
    ledger = await reader.ledger()
    (run_dir / "ledger.json").write_text(ledger.model_dump_json(indent=2) + "\n", encoding="utf-8")
    console.print(f"ledger: {describe_ledger(ledger)}", highlight=False, soft_wrap=True)
    if not is_closed(ledger):
        raise AtroposError(f"the ledger does not add up; see {run_dir / 'ledger.json'}")


def _url(part: Part, index: int) -> str:
    assert part.port is not None
    return f"{part.scheme}://{HOST}:{part.port + index}"


def _from(environ: Mapping[str, str], part: Part, name: str, value: str) -> str:
    """Fill in variables of the environment."""
    for wanted in VARIABLE.findall(value):
        if wanted not in environ:
            raise ConfigError(f"{part.name}.env.{name}: set the variable {wanted} first")
    return fill(value, environ)


def _check_ports(parts: Sequence[Part]) -> None:
    users: dict[int, str] = {}
    for part in servers(parts):
        for index, name in enumerate(part.instances):
            assert part.port is not None
            port = part.port + index
            if port in users:
                raise ConfigError(f"{part.name}.port: {users[port]} and {name} have port {port}")
            users[port] = name
