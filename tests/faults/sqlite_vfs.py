"""Sees, and can spoil, every write, sync, truncation and deletion that SQLite makes in this process.

Wraps the default file layer (VFS, https://www.sqlite.org/vfs.html) of the very library that the `sqlite3` module uses:
the two tables of function pointers are copied, a few entries replaced, and the copy is made the default while
`interposed` lasts. Works where `sqlite3` is linked dynamically; elsewhere the tests are skipped and say why.
"""

from __future__ import annotations

import ctypes
import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from ctypes import CFUNCTYPE, POINTER, Structure, c_char_p, c_int, c_int64, c_void_p
from pathlib import Path
from typing import Any

import pytest

_OK = 0


class SqliteFiles:
    """Called before each operation; a method returns an SQLite error code to fail it with, 0 to let it happen."""

    def opened(self, path: str) -> int:
        return _OK

    def read(self, path: str, size: int, offset: int) -> int:
        return _OK

    def wrote(self, path: str, data: bytes, offset: int) -> int:
        return _OK

    def truncated(self, path: str, size: int) -> int:
        return _OK

    def synced(self, path: str) -> int:
        return _OK

    def deleted(self, path: str) -> int:
        return _OK


_X_OPEN = CFUNCTYPE(c_int, c_void_p, c_void_p, c_void_p, c_int, c_void_p)
_X_DELETE = CFUNCTYPE(c_int, c_void_p, c_char_p, c_int)
_X_CLOSE = CFUNCTYPE(c_int, c_void_p)
_X_READ = _X_WRITE = CFUNCTYPE(c_int, c_void_p, c_void_p, c_int, c_int64)
_X_TRUNCATE = CFUNCTYPE(c_int, c_void_p, c_int64)
_X_SYNC = CFUNCTYPE(c_int, c_void_p, c_int)


class _Vfs(Structure):
    _fields_ = [
        ("iVersion", c_int),
        ("szOsFile", c_int),
        ("mxPathname", c_int),
        ("pNext", c_void_p),
        ("zName", c_char_p),
        ("pAppData", c_void_p),
        ("xOpen", _X_OPEN),
        ("xDelete", _X_DELETE),
        ("others", c_void_p * 14),
    ]


class _Methods(Structure):
    _fields_ = [
        ("iVersion", c_int),
        ("xClose", _X_CLOSE),
        ("xRead", _X_READ),
        ("xWrite", _X_WRITE),
        ("xTruncate", _X_TRUNCATE),
        ("xSync", _X_SYNC),
        ("others", c_void_p * 13),
    ]


class _File(Structure):
    _fields_ = [("pMethods", POINTER(_Methods))]


class _Shim:
    """The replaced functions. Keeps everything alive that SQLite holds a pointer to."""

    def __init__(self, library: ctypes.CDLL, files: SqliteFiles) -> None:
        self._files = files
        library.sqlite3_vfs_find.restype = POINTER(_Vfs)
        self.original = library.sqlite3_vfs_find(None)
        self.vfs = _Vfs.from_buffer_copy(self.original.contents)
        self.vfs.zName = b"interposed"
        self.vfs.pNext = None
        self.vfs.xOpen = _X_OPEN(self._open)
        self.vfs.xDelete = _X_DELETE(self._delete)
        self.error: BaseException | None = None
        self._paths: dict[int, str] = {}
        self._methods: dict[int, tuple[Any, _Methods]] = {}

    def _ask(self, name: str, *args: Any) -> int:
        try:
            code: int = getattr(self._files, name)(*args)
        except Exception as e:  # noqa: BLE001  it cannot cross SQLite; `interposed` raises it
            self.error = e
            return sqlite3.SQLITE_IOERR
        return code

    def _open(self, vfs: int, name: int, file: int, flags: int, out: int) -> int:
        path = "" if not name else ctypes.string_at(name).decode()
        code = self._ask("opened", path)
        if code != _OK:
            # SQLite looks at pMethods to learn whether there is something to close.
            ctypes.cast(file, POINTER(c_void_p))[0] = None
            return code
        code = int(
            self.original.contents.xOpen(
                ctypes.cast(self.original, c_void_p), name, file, flags, out
            )
        )
        opened = ctypes.cast(file, POINTER(_File)).contents
        if code == _OK:
            self._paths[file] = path
            opened.pMethods = ctypes.pointer(self._wrapped(opened.pMethods))
        return code

    def _wrapped(self, methods: Any) -> _Methods:
        address = ctypes.addressof(methods.contents)
        if address not in self._methods:
            original = methods.contents
            copy = _Methods.from_buffer_copy(original)

            def close(file: int) -> int:
                self._paths.pop(file, None)
                return int(original.xClose(file))

            def read(file: int, data: int, size: int, offset: int) -> int:
                code = self._ask("read", self._paths[file], size, offset)
                return code or int(original.xRead(file, data, size, offset))

            def write(file: int, data: int, size: int, offset: int) -> int:
                code = self._ask("wrote", self._paths[file], ctypes.string_at(data, size), offset)
                return code or int(original.xWrite(file, data, size, offset))

            def truncate(file: int, size: int) -> int:
                code = self._ask("truncated", self._paths[file], size)
                return code or int(original.xTruncate(file, size))

            def sync(file: int, flags: int) -> int:
                code = self._ask("synced", self._paths[file])
                return code or int(original.xSync(file, flags))

            copy.xClose = _X_CLOSE(close)
            if type(self._files).read is not SqliteFiles.read:  # SQLite reads often
                copy.xRead = _X_READ(read)
            copy.xWrite = _X_WRITE(write)
            copy.xTruncate = _X_TRUNCATE(truncate)
            copy.xSync = _X_SYNC(sync)
            self._methods[address] = (original, copy)
        return self._methods[address][1]

    def _delete(self, vfs: int, name: bytes, sync_directory: int) -> int:
        code = self._ask("deleted", name.decode())
        return code or int(
            self.original.contents.xDelete(
                ctypes.cast(self.original, c_void_p), name, sync_directory
            )
        )


@contextmanager
def interposed(files: SqliteFiles) -> Iterator[None]:
    """Let `files` see what connections do that are opened in the block. All must be closed before it ends."""
    try:
        library = ctypes.CDLL("libsqlite3.so.0")
    except OSError:
        pytest.skip("there is no shared SQLite library to interpose on")
    shim = _Shim(library, files)
    library.sqlite3_vfs_register(ctypes.byref(shim.vfs), 1)
    try:
        yield
    finally:
        library.sqlite3_vfs_unregister(ctypes.byref(shim.vfs))
        library.sqlite3_vfs_register(shim.original, 1)
    if shim.error is not None:
        raise shim.error


class _Counter(SqliteFiles):
    num_writes = 0

    def read(self, path: str, size: int, offset: int) -> int:
        return _OK

    def wrote(self, path: str, data: bytes, offset: int) -> int:
        self.num_writes += 1
        return _OK


def require_interposable(directory: Path) -> None:
    """Skip the test unless SQLite's writes can be seen here."""
    counter = _Counter()
    with interposed(counter):
        connection = sqlite3.connect(directory / "probe.db")
        connection.execute("create table probe (x)")
        connection.close()
    if counter.num_writes == 0:
        pytest.skip("the sqlite3 module is linked statically; its file layer cannot be replaced")
