"""`run-api` serves the hub.

One process; it stores its state on disk, or with `--database` in PostgreSQL, unless `--memory` is given, and a restart
resumes. It refuses to listen for other machines without a token. It does not restart itself: a store failure ends the
process with exit code 1, and the next start recovers the stored data.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import fcntl
import functools
import logging
import os
import resource
import secrets
import signal
import socket
import sqlite3
import ssl
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import FrameType

import uvicorn
from fastapi import FastAPI

from atroposlib.api.http.connections import (
    MAX_CONNECTIONS,
    RESERVED_CONNECTIONS,
    Connections,
    HubProtocol,
)
from atroposlib.api.http.decoding import keep_freed_memory
from atroposlib.api.http.metrics import HubMetrics
from atroposlib.api.http.security import Scope, TokenSet
from atroposlib.api.run.hub import Hub
from atroposlib.api.run.replica import Replica
from atroposlib.api.server import create_app
from atroposlib.api.stores import run_file
from atroposlib.api.stores.base import Durability, StoreBroken
from atroposlib.api.stores.kinds import STORES, StoreSettings
from atroposlib.api.stores.runs import (
    RunStores,
    StoredRun,
    delete_run,
    stored_runs,
)
from atroposlib.cli import hub_database, upgrade_runs
from atroposlib.cli.hub_settings import (
    RunApiConfig,
    add_token,
    certificate_end,
    check_exposure,
    check_tls,
    policy_of,
    replica_tls,
    tokens_of,
)
from atroposlib.config import parse_flags
from atroposlib.errors import ConfigError, cli_boundary
from atroposlib.utils.event_loop import collect_less_often
from atroposlib.utils.files import sync_to_disk
from atroposlib.utils.local_server import listening
from atroposlib.utils.wording import counted

logger = logging.getLogger(__name__)

SHUTDOWN_GRACE_S = 2
"""Time for requests in flight to finish after a stop signal."""
FILES_OF_STORES = 64
"""File descriptors reserved for the hub's own files."""
SWITCH_INTERVAL_S = 0.001
KEEP_ALIVE_S = 30
"""Longer than clients keep idle connections (aiohttp: 15 s), so that clients close them, not the hub."""


class _HubServer(uvicorn.Server):
    """Prints when it listens, and ends long polls when it is stopped."""

    def __init__(self, config: uvicorn.Config, *, on_start: str, stop_waiting: Callable[[], None]):
        super().__init__(config)
        self._on_start = on_start
        self._stop_waiting = stop_waiting

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        print(self._on_start, flush=True)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        super().handle_exit(sig, frame)
        self._stop_waiting()


def main(argv: Sequence[str] | None = None) -> int:
    """Serve until SIGTERM or Ctrl-C and return 0.

    Return 2 for a wrong flag, a port in use, or an unprotected address, and 1 for a store failure.
    """
    return cli_boundary(lambda: serve(argv))


def serve(argv: Sequence[str] | None) -> int:
    config = parse_flags(
        RunApiConfig,
        argv,
        prog="run-api",
        description="Serve the Atropos trajectory API (the hub).",
    )
    if config.add_token is not None:
        return _add_token(config)
    database = _database(config)
    asked = {"--list": config.list_runs, "--forget": config.forget, "--fresh": config.fresh}
    if (
        database is None
        and config.store != "disk"
        and (flag := next(filter(asked.get, asked), None))
    ):
        raise ConfigError(
            f"{flag} is for runs on disk or in a database; --store {config.store} keeps them elsewhere"
        )
    if config.list_runs:
        in_database = None if database is None else asyncio.run(hub_database.stored(database))
        runs = stored_runs(config.data_dir) if in_database is None else in_database
        print(list_runs(runs, _place(config, database)))
        return 0
    if config.forget is not None:
        print(asyncio.run(_erase(config, database, only=config.forget)))
        return 0
    if config.backup is not None:
        if database is not None or config.memory:
            raise ConfigError(
                "--backup copies a run on the disk; for a database use its own backup"
            )
        print(back_up_run(config.data_dir, config.run, config.backup))
        return 0
    if "run" in config.model_fields_set:
        raise ConfigError("--run names the run to copy: it needs --backup")
    if config.scopes or config.runs:
        raise ConfigError("--scopes and --runs describe a token to make: they need --add-token")
    if database is None and config.advertise is not None:
        raise ConfigError("--advertise: only hubs that share a --database call each other")
    if config.store != "memory" and config.max_memory_bytes is not None:
        raise ConfigError("--max-memory-bytes bounds a hub with --memory")
    if database is None and config.max_database_bytes is not None:
        raise ConfigError("--max-database-bytes bounds a --database; a disk has --min-free-bytes")
    tokens = tokens_of(config)
    unused = "--reload does nothing; restart the hub to load new code" if config.reload else None
    for warning in filter(None, (unused, check_exposure(config, tokens))):
        print(f"warning: {warning}", file=sys.stderr, flush=True)
    check_tls(config)
    logging.basicConfig(
        level=logging.INFO, stream=sys.stderr, format="%(asctime)s %(levelname)s %(message)s"
    )
    connections = Connections(max_connections(_raise_file_limit()))
    # Before anything is erased or recovered, so that a second hub on the port fails first.
    listener = listen(config.host, config.port)
    loop_factory = uvicorn.Config(app="", log_config=None).get_loop_factory()
    with listener, asyncio.Runner(loop_factory=loop_factory) as runner:
        return runner.run(_serve(config, database, tokens, listener, connections))


async def _serve(
    config: RunApiConfig,
    database: str | None,
    tokens: TokenSet | None,
    listener: socket.socket,
    connections: Connections,
) -> int:
    broken: list[BaseException] = []
    server: _HubServer | None = None

    def stop(signum: int, frame: FrameType | None) -> None:
        if server is not None:
            server.should_exit = True
        else:
            raise KeyboardInterrupt

    def on_failure(error: BaseException) -> None:
        broken.append(error)
        if server is not None:
            server.should_exit = True
            hub.stop_waiting()

    # uvicorn raises a signal again after its shutdown, which these handlers ignore; they also handle signals before
    # uvicorn does.
    signal.signal(signal.SIGTERM, stop)
    signal.signal(signal.SIGINT, stop)

    # How long other threads keep the GIL before the event loop may run; Python's 5 ms add up.
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    keep_freed_memory()
    scheme = "https" if config.ssl_certfile else "http"
    host = f"[{config.host}]" if ":" in config.host else config.host
    address = f"{scheme}://{host}:{listener.getsockname()[1]}"
    if config.fresh:
        erased_runs = await _erase(config, database)
        print(f"--fresh: {erased_runs}", file=sys.stderr, flush=True)
    replica = _replica(config, database, listener.getsockname()[1], scheme=scheme)
    if replica is not None:
        hub = replica.hub
    else:
        if config.store == "disk":
            upgrade_runs.upgrade(config.data_dir)
        hub = Hub(_stores(config, on_failure), policy=policy_of(config))
    app = create_app(hub, tokens=tokens, replica=replica, replica_tls=replica_tls(config))
    settings = _uvicorn_config(config, app, connections)
    loop = asyncio.get_running_loop()
    metrics: HubMetrics = app.state.services.metrics
    _show_certificate(config, metrics)
    read_again = functools.partial(_reload, config, tokens, settings, metrics)
    signal.signal(signal.SIGHUP, lambda *_: loop.call_soon_threadsafe(read_again))
    server = _HubServer(
        settings,
        on_start=f"atropos hub listening on {address}",
        stop_waiting=hub.stop_waiting,
    )
    # Not only in the application's startup, where uvicorn would log an error with a traceback.
    await (replica or hub).open()
    if hub.found:
        where = _place(config, database)
        logger.info("resuming the runs in %s; --fresh erases them", where)
    if replica is not None:
        num_runs = [f"{member.address} has {len(runs)}" for member, runs in replica.owned_runs()]
        logger.info("as %s; runs by hub: %s", replica.address, ", ".join(num_runs))
    collect_less_often()
    await server.serve(sockets=[listener])
    # Everything is stored: a second signal must not kill the interpreter while it exits.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if broken:
        raise StoreBroken(f"the store broke: {broken[0]}; start the hub again to recover") from (
            broken[0]
        )
    return 0


def _show_certificate(config: RunApiConfig, metrics: HubMetrics) -> None:
    """Show when the certificate ends, if the hub has one."""
    if config.ssl_certfile is not None:
        try:
            ends_at = certificate_end(config.ssl_certfile)
            metrics.certificate_end.labels(str(config.ssl_certfile)).set(ends_at)
        except (OSError, ValueError, IndexError) as e:
            logger.warning("%s: its end cannot be read: %r", config.ssl_certfile, e)


def _reload(
    config: RunApiConfig,
    tokens: TokenSet | None,
    settings: uvicorn.Config,
    metrics: HubMetrics,
) -> None:
    """Read the token file and the certificate again; what cannot be read stays as it is, and is logged."""
    if tokens is not None and config.tokens is not None:
        try:
            tokens.reload(config.tokens)
            logger.info("SIGHUP: the tokens of %s are in force", config.tokens)
        except ConfigError as e:
            logger.error("SIGHUP: the tokens stay as they were: %s", e)
    if config.ssl_certfile is not None and settings.ssl is not None:
        try:
            # A context that is given a certificate without its key has neither afterwards.
            ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(
                config.ssl_certfile, config.ssl_keyfile
            )
            settings.ssl.load_cert_chain(config.ssl_certfile, config.ssl_keyfile)
            _show_certificate(config, metrics)
            logger.info("SIGHUP: new connections get the certificate %s", config.ssl_certfile)
        except (OSError, ssl.SSLError) as e:
            logger.error("SIGHUP: the certificate stays as it was: %s", e)


def _uvicorn_config(config: RunApiConfig, app: FastAPI, connections: Connections) -> uvicorn.Config:
    return uvicorn.Config(
        app,
        http=functools.partial(HubProtocol, connections=connections),  # type: ignore[arg-type]
        ws="none",
        log_config=None,
        log_level="warning",
        access_log=False,
        lifespan="on",
        server_header=False,
        proxy_headers=False,  # any process on this machine could forge them
        backlog=max(16, connections.limit // 2),
        timeout_keep_alive=KEEP_ALIVE_S,
        timeout_graceful_shutdown=SHUTDOWN_GRACE_S,
        ssl_certfile=config.ssl_certfile,
        ssl_keyfile=config.ssl_keyfile,
        ssl_ca_certs=str(config.ssl_ca_certs) if config.ssl_ca_certs else None,
        ssl_cert_reqs=ssl.CERT_REQUIRED if config.ssl_ca_certs else ssl.CERT_NONE,
    )


def _replica(
    config: RunApiConfig, database: str | None, port: int, *, scheme: str
) -> Replica | None:
    """Return this hub as one of those on the database; None without --database."""
    if database is None:
        return None
    derived = hub_database.reachable_address(config.host, port, scheme=scheme)
    address = (config.advertise or derived).rstrip("/")
    return hub_database.replica_of(
        database,
        policy=policy_of(config),
        address=address,
        max_bytes=config.max_database_bytes,
        min_free_bytes=config.min_free_bytes,
    )


async def _erase(config: RunApiConfig, database: str | None, *, only: str | None = None) -> str:
    """Erase the stored runs, or only one, wherever they are; return what was erased, as a line."""
    if database is None:
        return erase(config.data_dir, only=only)
    return erased(await hub_database.erase(database, only=only), _place(config, database))


def _stores(config: RunApiConfig, on_failure: Callable[[BaseException], None]) -> RunStores:
    settings = StoreSettings(
        data_dir=config.data_dir,
        durability=Durability(config.durability),
        min_free_bytes=config.min_free_bytes,
        max_memory_bytes=config.max_memory_bytes,
        on_failure=on_failure,
    )
    stores: RunStores = STORES.load(config.store)(settings)
    return stores


def _database(config: RunApiConfig) -> str | None:
    """Return the URL of the database that keeps the runs, if one does. Raises `ConfigError`."""
    others = {"memory", "store", "data_dir", "durability"} & config.model_fields_set
    return hub_database.url_of(
        config.database, conflicting=["--" + name.replace("_", "-") for name in sorted(others)]
    )


def _place(config: RunApiConfig, database: str | None) -> str:
    return str(config.data_dir) if database is None else hub_database.shown(database)


def erase(data_dir: Path, *, only: str | None = None) -> str:
    """Erase the runs stored under `data_dir`, or only one; return a line with their names and size.

    Deletes only files that a hub created. Raises ConfigError for a run that is unknown or in use.
    """
    flag = "--fresh" if only is None else f"--forget {only}"
    runs = [run for run in stored_runs(data_dir) if only in (None, run.name)]
    if only is not None and not runs:
        raise ConfigError(f"{flag}: no such run in {data_dir}; --list shows them")
    held: list[int] = []
    try:
        for run in runs:
            # An open store holds a lock on this file.
            held.append(os.open(data_dir / run.name / "lock", os.O_RDWR | os.O_CREAT, 0o600))
            try:
                fcntl.flock(held[-1], fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as e:
                raise ConfigError(f"{flag}: a hub uses {data_dir / run.name}; stop it first") from e
        for run in runs:
            delete_run(data_dir / run.name)
    except OSError as e:
        raise ConfigError(f"{flag}: cannot erase {e.filename}: {e.strerror}") from e
    finally:
        for descriptor in held:
            os.close(descriptor)
    return erased(runs, str(data_dir))


def erased(runs: Sequence[StoredRun], where: str) -> str:
    """Return a line with the names and the size of runs that were erased."""
    names = ", ".join(run.name for run in runs) or "none"
    num_bytes = sum(run.num_bytes for run in runs)
    return f"erased {counted(len(runs), 'run')} ({names}), {num_bytes / 2**20:.1f} MiB, in {where}"


def back_up_run(data_dir: Path, name: str, target: Path) -> str:
    """Copy a run, which a hub may be serving, to the file `target`; return a line about it.

    Raises `ConfigError`, `StoreBroken`; `target` is then not there.
    """
    if name not in [run.name for run in stored_runs(data_dir)]:
        raise ConfigError(f"--run {name}: no such run in {data_dir}; --list shows them")
    source = data_dir / name / run_file.NAME
    if not source.exists():
        raise ConfigError(
            f"--backup: {source} is not there; start a hub once, which converts the run"
        )
    if target.exists():
        raise ConfigError(f"--backup {target}: exists already; choose another file")
    partial = target.with_name(f"{target.name}.{secrets.token_hex(4)}.partial")
    started_s = time.perf_counter()
    try:
        with (
            contextlib.closing(run_file.connect(source)) as live,
            contextlib.closing(run_file.connect(partial, creates=True)) as copy,
        ):
            live.backup(copy)
            copy.execute("pragma journal_mode = delete").fetchall()  # no WAL beside it
        sync_to_disk(partial)
        num_bytes = partial.stat().st_size
        partial.rename(target)
        sync_to_disk(target.parent)
    except sqlite3.Error as e:
        raise StoreBroken(f"{source} cannot be copied to {partial}: {e}") from e
    except OSError as e:
        raise ConfigError(f"--backup {target}: {e.strerror}") from e
    finally:
        for suffix in ("", "-journal"):
            partial.with_name(partial.name + suffix).unlink(missing_ok=True)
    seconds = time.perf_counter() - started_s
    return f"copied run {name} to {target}, {num_bytes / 2**20:.1f} MiB, in {seconds:.1f} s"


def list_runs(runs: Sequence[StoredRun], where: str) -> str:
    """Return one line per run stored in `where`: name, size, last change, and the run set aside."""
    if not runs:
        return f"{where} holds no run"
    width = max(len(run.name) for run in runs)
    lines = []
    for run in runs:
        changed = time.strftime("%Y-%m-%d %H:%M", time.localtime(run.changed_at))
        line = f"{run.name:{width}}  {run.num_bytes / 2**20:9.1f} MiB  changed {changed}"
        if run.kept is not None:
            line += f"  set aside: run {run.kept.of_run} at step {run.kept.step}"
        lines.append(line)
    return "\n".join(lines)


def _add_token(config: RunApiConfig) -> int:
    if config.tokens is None:
        raise ConfigError("--add-token needs --tokens FILE, the file to add it to")
    if not config.scopes:
        raise ConfigError(f"--add-token needs --scopes, of {', '.join(Scope)}")
    assert config.add_token is not None
    secret = add_token(
        config.tokens, name=config.add_token, scopes=set(config.scopes), runs=config.runs
    )
    print(secret)
    print(
        f"token {config.add_token!r} added to {config.tokens}; it is not shown again;"
        " restart a running hub to load it",
        file=sys.stderr,
    )
    return 0


def _raise_file_limit() -> int:
    """Raise the limit of open files to the hard limit; return the limit in force."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == hard:
        return soft
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    except (OSError, ValueError) as e:
        logger.warning("only %d files and connections may be open at once (%s)", soft, e)
        return soft
    return hard


def max_connections(max_files: int) -> int:
    """Return the limit of connections that leaves file descriptors for the stores and for refused connections.

    >>> max_connections(256), max_connections(2**20)
    (96, 4096)
    """
    if max_files == resource.RLIM_INFINITY:
        return MAX_CONNECTIONS
    return max(RESERVED_CONNECTIONS, min(MAX_CONNECTIONS, (max_files - FILES_OF_STORES) // 2))


def listen(host: str, port: int) -> socket.socket:
    """Return a listening socket. Raises `ConfigError` when the address cannot be used."""
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        return listening(str(address[0]), int(address[1]), family=family)
    except socket.gaierror as e:
        raise ConfigError(f"--host {host}: not an address of this machine ({e.strerror})") from e
    except OSError as e:
        if e.errno == errno.EADDRINUSE:
            raise ConfigError(
                f"--port {port}: already in use on {host}; stop the process that uses it"
                f" or choose another port, for example --port {port + 1}"
            ) from e
        raise ConfigError(f"--host {host} --port {port}: cannot listen ({e.strerror})") from e


if __name__ == "__main__":
    sys.exit(main())
