"""Replace a file in one step: a reader sees its earlier content or the new one, never a part."""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO


def replace_file(
    path: Path, content: bytes | str, *, is_durable: bool = False, mode: int = 0o666
) -> None:
    """Write `content` (text as UTF-8) to `path`, as `replacing` does."""
    with replacing(path, is_durable=is_durable, mode=mode) as file:
        file.write(content.encode() if isinstance(content, str) else content)


@contextmanager
def replacing(path: Path, *, is_durable: bool = False, mode: int = 0o666) -> Iterator[IO[bytes]]:
    """Open a file that takes the place of `path` at the end; its directory is made if it does not exist.

    is_durable: return only when it survives loss of power. mode: permissions before the process's umask. A crash may
    leave a file `<name>.<8 hex digits>.partial`. After an exception, also an OSError, the earlier content is left.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f"{path.name}.{secrets.token_hex(4)}.partial")
    try:
        with open(os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "wb") as file:
            yield file
            file.flush()
            if is_durable:
                os.fsync(file.fileno())
        os.replace(partial, path)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise
    if is_durable:
        sync_to_disk(path.parent)


def sync_to_disk(path: Path) -> None:
    """Make a file durable; of a directory the creation, renaming and deletion of its files."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
