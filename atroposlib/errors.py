"""Every error this project raises on purpose, and the one place where a command turns them into an exit code.

    AtroposError
    |- ConfigError(ValueError)        a flag, a file or a constructor argument is wrong
    |- GroupError(ValueError)         a scored group is malformed; carries a path: `sequences[2].masks`
    |- HubError                       talking to the trajectory API
    |  |- HubUnavailable              no answer, or 5xx: the same request may succeed later
    |  `- HubRejected                 4xx: the same request will never succeed
    |- EngineError                    talking to an inference server
    |  |- EngineUnavailable           no answer, or 5xx
    |  |- EngineRejected              4xx
    |  `- EngineProtocolError         it answered something that cannot be used
    |- EnvError                       an environment broke its contract
    `- MissingDependency(ImportError) an extra is not installed

A class exists only where a caller handles it differently.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from types import ModuleType


class AtroposError(Exception):
    """Base of all errors raised on purpose."""


class ConfigError(AtroposError, ValueError):
    """A flag, a configuration file or a constructor argument is wrong."""


class GroupError(AtroposError, ValueError):
    """A scored group is malformed."""


class HubError(AtroposError):
    """The conversation with the hub failed."""


class HubUnavailable(HubError):
    """The hub did not answer, or answered 5xx or "later"; the same request may succeed later.

    `retry_after_s` is how long the hub asks to wait; None when it does not say.
    """

    def __init__(self, message: str, *, retry_after_s: float | None = None) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class HubRejected(HubError):
    """The hub refused the request (4xx); repeating it will not help.

    `status` is the HTTP status, `detail` the hub's own words.
    """

    def __init__(self, message: str, *, status: int = 0, detail: str = "") -> None:
        super().__init__(message)
        self.status = status
        self.detail = detail


class EngineError(AtroposError):
    """The conversation with an inference server failed."""


class EngineUnavailable(EngineError):
    """The engine did not answer, or answered 5xx or "later"; the same request may succeed later.

    `status` is the HTTP status, None without an answer. `retry_after_s` is how long the engine asks to wait; None when
    it does not say.
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
    """The engine answered something that cannot be used, such as lengths that disagree."""


class EnvError(AtroposError):
    """An environment broke its contract."""


class MissingDependency(AtroposError, ImportError):
    """A package of an optional extra is not installed."""


def require(module: str, *, extra: str) -> ModuleType:
    """Import `module`; if it is missing, raise `MissingDependency` naming the extra that holds it."""
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as e:
        if e.name is None or e.name.split(".")[0] != module.split(".")[0]:
            raise
        raise MissingDependency(
            f"{module.partition('.')[0]} is not installed; run: pip install 'atroposlib[{extra}]'",
            name=module,
        ) from e


def cli_boundary(main: Callable[[], int | None]) -> int:
    """Run a command and return its exit code.

    2 for a wrong flag or file, 1 for any other error of this project (one line on stderr, no traceback),
    130 after Ctrl-C. Bugs keep their traceback.
    """
    try:
        return main() or 0
    except AtroposError as e:
        sys.stderr.write(f"error: {e}\n")
        return 2 if isinstance(e, ConfigError) else 1
    except KeyboardInterrupt:
        return 130


def cause_of(error: BaseException) -> BaseException:
    """Unwrap exception groups of one kind: the first leaf, preferring an absent engine."""
    if not isinstance(error, BaseExceptionGroup):
        return error
    leaves = [cause_of(inner) for inner in error.exceptions]
    return next((leaf for leaf in leaves if isinstance(leaf, EngineUnavailable)), leaves[0])
