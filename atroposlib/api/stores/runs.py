"""Create, list, rename and delete the stores of runs: one per run, in memory or in a directory.

A run's directory holds everything about it, so it can be copied, archived or deleted as a whole. `run.json` marks the
directory as a run and says whether it was set aside; other directories are never opened, listed or deleted.
"""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Final, Protocol

import msgspec

from atroposlib.api.stores.base import GroupStore
from atroposlib.api.stores.memory import MemoryStore
from atroposlib.api.stores.space import Space
from atroposlib.errors import ConfigError
from atroposlib.utils.files import replace_file, sync_to_disk

RUN_NAME: Final = re.compile(r"(?!ballast(\.probe)?\Z)[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
"""Valid run names: part of a URL path and of a file name. `space.py` has files of two names beside the runs."""
MARKER: Final = "run.json"
_OURS: Final = re.compile(
    r"run\.json((\.[0-9a-f]{8})?\.partial)?|lock|ballast(\.probe)?|(run|(damaged-\d+-)?state)\.db"
    r"(\.partial)?(-wal|-shm|-journal)?|\d{10}\.seg"
)
"""Names of the files that a store or this module creates in a run's directory, those of older versions included."""


class Kept(msgspec.Struct, frozen=True, kw_only=True):
    """An experiment that was set aside."""

    name: str
    """The run that holds it now."""
    of_run: str
    """The run that held it before."""
    experiment: str
    step: int
    set_aside_at: float
    """Seconds since 1970."""


class _Marker(msgspec.Struct, tag_field="atropos", tag="run", kw_only=True, omit_defaults=True):
    """`run.json`."""

    kept: Kept | None = None


class StoredRun(msgspec.Struct, frozen=True, kw_only=True):
    """A run as `run-api --list` shows it."""

    name: str
    num_bytes: int
    kept: Kept | None
    changed_at: float = 0.0
    """Seconds since 1970; 0: unknown."""


class RunStores(Protocol):
    """Makes, lists, sets aside and forgets the stores of runs, by run name."""

    async def open(self) -> None:
        """Called once, before anything else."""
        return

    async def close(self) -> None:
        """Called once, after every store is closed."""
        return

    async def names(self) -> list[str]:
        """Names of the stored runs, including those set aside."""

    async def holds(self, name: str) -> bool:
        """Whether the run is stored."""

    async def kept(self) -> list[Kept]:
        """The experiments that were set aside, the latest first."""

    async def stored(self) -> list[StoredRun]:
        """The stored runs with their sizes, by name."""

    def store(self, name: str) -> GroupStore:
        """Return the store of a run, not yet opened; called in a thread, once, and again after a method below."""

    async def set_aside(
        self, name: str, *, experiment: str, step: int, resumed: Kept | None
    ) -> str:
        """Rename a closed run and return its new name. `resumed` is kept: it is brought back afterwards."""

    async def bring_back(self, kept: Kept) -> None:
        """Rename a closed run that was set aside back to its old name, which must be free."""

    async def forget(self, name: str) -> None:
        """Delete the data of a closed store."""


class MemoryRuns(RunStores):
    """Runs that end with the process. To bound memory, only the latest earlier experiment of each run is kept."""

    def __init__(self, space: Space | None = None) -> None:
        """`space`: of all runs together; None: not bounded."""
        self._space = space
        self._stores: dict[str, MemoryStore] = {}
        self._kept: dict[str, Kept] = {}

    async def names(self) -> list[str]:
        return sorted(self._stores)

    async def holds(self, name: str) -> bool:
        return name in self._stores

    async def kept(self) -> list[Kept]:
        return list(self._kept.values())[::-1]

    async def stored(self) -> list[StoredRun]:
        return [
            StoredRun(name=name, num_bytes=store.usage().stored_bytes, kept=self._kept.get(name))
            for name, store in sorted(self._stores.items())
        ]

    def store(self, name: str) -> GroupStore:
        return self._stores.setdefault(name, MemoryStore(self._space))

    async def set_aside(
        self, name: str, *, experiment: str, step: int, resumed: Kept | None
    ) -> str:
        for older in list(self._kept.values()):
            if older.of_run == name and older != resumed:
                await self.forget(older.name)
        kept = kept_as(name, self._stores, experiment, step)
        self._stores[kept.name] = self._stores.pop(name)
        self._kept.pop(name, None)
        self._kept[kept.name] = kept
        return kept.name

    async def bring_back(self, kept: Kept) -> None:
        del self._kept[kept.name]
        self._stores[kept.of_run] = self._stores.pop(kept.name)

    async def forget(self, name: str) -> None:
        if (store := self._stores.pop(name, None)) is not None:
            await store.clear()
        self._kept.pop(name, None)


class DirectoryRuns(RunStores):
    """One sub-directory of `root` per run."""

    def __init__(self, root: Path, make_store: Callable[[Path], GroupStore]) -> None:
        self._root = root
        self._make_store = make_store

    async def names(self) -> list[str]:
        return [name for name, _ in await asyncio.to_thread(stored_markers, self._root)]

    async def holds(self, name: str) -> bool:
        return await asyncio.to_thread(_read_marker, self._root / name) is not None

    async def kept(self) -> list[Kept]:
        markers = await asyncio.to_thread(stored_markers, self._root)
        found = [marker.kept for _, marker in markers if marker.kept is not None]
        return sorted(found, key=lambda kept: kept.set_aside_at, reverse=True)

    async def stored(self) -> list[StoredRun]:
        return await asyncio.to_thread(stored_runs, self._root)

    def store(self, name: str) -> GroupStore:
        """Raises `ConfigError` if the directory of that name is not a run."""
        directory = self._root / name
        marker = _read_marker(directory)
        if marker is None and directory.exists() and any(directory.iterdir()):
            raise ConfigError(
                f"{directory} is not a run of a hub; choose another name or --data-dir"
            )
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        _write_marker(directory, marker or _Marker())
        return self._make_store(directory)

    async def set_aside(
        self, name: str, *, experiment: str, step: int, resumed: Kept | None
    ) -> str:
        def rename() -> str:
            kept = kept_as(name, {path.name for path in self._root.iterdir()}, experiment, step)
            _write_marker(self._root / name, _Marker(kept=kept))
            (self._root / name).rename(self._root / kept.name)
            sync_to_disk(self._root)
            return kept.name

        return await asyncio.to_thread(rename)

    async def bring_back(self, kept: Kept) -> None:
        def rename() -> None:
            (self._root / kept.name).rename(self._root / kept.of_run)
            _write_marker(self._root / kept.of_run, _Marker())
            sync_to_disk(self._root)

        await asyncio.to_thread(rename)

    async def forget(self, name: str) -> None:
        await asyncio.to_thread(delete_run, self._root / name)


def stored_runs(root: Path) -> list[StoredRun]:
    """Return the runs below `root`, by name, with their sizes."""
    found = []
    for name, marker in stored_markers(root):
        states = [path.stat() for path in _own_files(root / name)]
        found.append(
            StoredRun(
                name=name,
                num_bytes=sum(512 * state.st_blocks for state in states),
                changed_at=max((state.st_mtime for state in states), default=0.0),
                kept=marker.kept,
            )
        )
    return found


def stored_markers(root: Path) -> list[tuple[str, _Marker]]:
    """Return the name and marker of every run below `root`, by name; other directories are skipped."""
    if not root.is_dir():
        return []
    paths = [path for path in sorted(root.iterdir()) if RUN_NAME.fullmatch(path.name)]
    found = ((path.name, _read_marker(path)) for path in paths)
    return [(name, marker) for name, marker in found if marker is not None]


def delete_run(directory: Path) -> None:
    """Delete the files of a run, then its directory. Raises `ConfigError` if it is not a run, or holds other files."""
    if _read_marker(directory) is None:
        raise ConfigError(f"{directory} is not a run of a hub")
    for path in sorted(_own_files(directory), key=lambda path: path.name == MARKER):
        path.unlink()  # the marker last: after a crash it is still a run
    left = sorted(path.name for path in directory.iterdir())
    if left:
        raise ConfigError(f"{directory} is left, it holds files of others: {', '.join(left[:5])}")
    directory.rmdir()


def _own_files(directory: Path) -> Iterable[Path]:
    return [
        path
        for path in directory.iterdir()
        if _OURS.fullmatch(path.name) and path.is_file() and not path.is_symlink()
    ]


def _read_marker(directory: Path) -> _Marker | None:
    """Return the marker of a run; None if the directory is not a run."""
    if directory.is_symlink() or not directory.is_dir():
        return None
    try:
        marker = msgspec.json.decode((directory / MARKER).read_bytes(), type=_Marker)
    except FileNotFoundError:
        return _Marker() if _holds_only_a_run(directory) else None
    except (OSError, msgspec.MsgspecError, UnicodeDecodeError):
        return None
    # Renaming and writing are two steps: a crash in between leaves a marker that names another directory.
    is_kept = marker.kept is not None and marker.kept.name == directory.name
    return marker if is_kept else _Marker()


def _holds_only_a_run(directory: Path) -> bool:
    """Whether a directory without a marker is a run: of an older version, or a backup that was put in place."""
    names = {path.name for path in directory.iterdir()}
    return bool({"run.db", "state.db"} & names) and all(_OURS.fullmatch(name) for name in names)


def _write_marker(directory: Path, marker: _Marker) -> None:
    replace_file(directory / MARKER, msgspec.json.encode(marker), is_durable=True)


def kept_as(of_run: str, taken: Iterable[str], experiment: str, step: int) -> Kept:
    """Describe an experiment that is set aside now; its name is the run's with the next free number."""
    base = of_run[:56]
    pattern = re.compile(re.escape(base) + r"\.(\d{1,6})")
    numbers = [int(match[1]) for each in taken if (match := pattern.fullmatch(each))]
    return Kept(
        name=f"{base}.{max(numbers, default=0) + 1}",
        of_run=of_run,
        experiment=experiment,
        step=step,
        set_aside_at=time.time(),
    )
