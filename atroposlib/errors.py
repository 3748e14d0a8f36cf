"""The errors this project raises on purpose, and their exit codes in commands.

    AtroposError
    |- ConfigError(ValueError)        a flag, a file or a constructor argument is wrong
    |- GroupError(ValueError)         a scored group is malformed; names a path: `sequences[2].masks`
    |- HubError                       a request to the trajectory API failed
    |  |- HubUnavailable              no answer, 408, 425, 429 or 5xx: a retry may succeed
    |  `- HubRejected                 other 4xx: a retry will not succeed
    |- EngineError                    a request to an inference server failed
    |  |- EngineUnavailable           no answer, 408, 425, 429 or 5xx: a retry may succeed
    |  |- EngineRejected              other 4xx
    |  `- EngineProtocolError         the answer cannot be used
    |- EnvError                       an environment broke its contract
    |  `- Suspicion                   the audit of rewards ends the run (`--env.on_suspicion stop`)
    `- MissingDependency(ImportError) an extra is not installed

A class exists only where a caller handles it differently.
"""

from __future__ import annotations

import importlib
import json
import shlex
import sys
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from types import ModuleType

from atroposlib.utils.wording import columns_of, without_users, wrapped


class AtroposError(Exception):
    """Base of all errors raised on purpose. Its text shows URLs without users and passwords."""

    def __str__(self) -> str:
        return without_users(super().__str__())


class ConfigError(AtroposError, ValueError):
    """A flag, a configuration file or a constructor argument is wrong."""


class GroupError(AtroposError, ValueError):
    """A scored group is malformed."""


class HubError(AtroposError):
    """A request to the hub failed."""


class HubUnavailable(HubError):
    """The hub did not answer, or answered with a transient status; a retry may succeed.

    `retry_after_s` is the hub's Retry-After in seconds; None if it sent none.
    """

    def __init__(self, message: str, *, retry_after_s: float | None = None) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class HubRejected(HubError):
    """The hub refused the request (4xx); a retry will not succeed.

    `status` is the HTTP status, `detail` the body of the answer.
    """

    def __init__(self, message: str, *, status: int = 0, detail: str = "") -> None:
        super().__init__(message)
        self.status = status
        self.detail = detail


class EngineError(AtroposError):
    """A request to an inference server failed."""


class EngineUnavailable(EngineError):
    """The engine did not answer, or answered with a transient status; a retry may succeed.

    `status` is the HTTP status, None without an answer. `retry_after_s` is the engine's Retry-After in seconds; None if
    it sent none.
    """

    def __init__(
        self, message: str, *, status: int | None = None, retry_after_s: float | None = None
    ) -> None:
        super().__init__(message)
        self.status = status
        self.retry_after_s = retry_after_s


class EngineRejected(EngineError):
    """The engine refused the request (4xx)."""


class EngineProtocolError(EngineError):
    """The engine's answer cannot be used, for example because lengths disagree."""


class EnvError(AtroposError):
    """An environment broke its contract."""


class Suspicion(EnvError):
    """The audit found that answers are paid which should not be, and the environment is to end then."""


class MissingDependency(AtroposError, ImportError):
    """A package of an optional extra is not installed."""


def install_command(extra: str) -> str:
    """Return the shell command that adds an extra to this installation.

    It names the source folder or the URL that this package came from (PEP 610): under the plain name the package index
    has another package.
    """
    source = Path(__file__).resolve().parents[1]
    if (source / "pyproject.toml").is_file():
        return f"pip install -e {shlex.quote(f'{source}[{extra}]')}"
    try:
        origin = metadata.distribution("atroposlib").read_text("direct_url.json")
    except metadata.PackageNotFoundError:
        origin = None
    url = "" if origin is None else f" @ {json.loads(origin)['url']}"
    return f"pip install {shlex.quote(f'atroposlib[{extra}]{url}')}"


def require(module: str, *, extra: str) -> ModuleType:
    """Import `module`; if it is missing, raise `MissingDependency` naming its extra."""
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as e:
        if e.name is None or e.name.split(".")[0] != module.split(".")[0]:
            raise
        raise MissingDependency(
            f"{module.partition('.')[0]} is not installed; run: {install_command(extra)}",
            name=module,
        ) from e


def cli_boundary(main: Callable[[], int | None]) -> int:
    """Run a command and return its exit code.

    2 for a wrong flag or file, 1 for any other error of this project (one line on stderr, no traceback), 130 after
    Ctrl-C. Bugs keep their traceback.
    """
    try:
        return main() or 0
    except AtroposError as e:
        sys.stderr.write(wrapped(f"error: {e}", columns_of(sys.stderr)) + "\n")
        return 2 if isinstance(e, ConfigError) else 1
    except KeyboardInterrupt:
        return 130


def cause_of(error: BaseException) -> BaseException:
    """Return the first leaf of an exception group, preferring `EngineUnavailable`; other errors unchanged."""
    if not isinstance(error, BaseExceptionGroup):
        return error
    leaves = [cause_of(inner) for inner in error.exceptions]
    return next((leaf for leaf in leaves if isinstance(leaf, EngineUnavailable)), leaves[0])
