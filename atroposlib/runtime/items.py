"""Running one item, and what its failure means. Shared by serve and process.

A failure is data: counted by type, the item retried a few times, and when one type fails many times in a row without
a success in between, that error ends the run. An engine that is away is no failure of the item.
"""

from __future__ import annotations

import logging
from collections import Counter
from dataclasses import dataclass
from typing import Any

from atroposlib.errors import EnvError

logger = logging.getLogger(__name__)


@dataclass(slots=True, kw_only=True)
class Work:
    """An item and how often it has failed."""

    item: Any
    num_failures: int = 0
    is_settled: bool = False
    """The present attempt has been counted."""
    began_after: int = 0
    """`Outcomes.num_failed` when the present attempt began."""


class Outcomes:
    """Counts what became of every item, and decides when failures end the run.

    Attempts under way together often fail together, of one cause that is over in a moment: a process that was stopped,
    a judge that restarts. However many they are, they end no run; one of those begun afterwards must fail as well.
    """

    def __init__(self, *, max_consecutive: int) -> None:
        self._max_consecutive = max_consecutive
        self._consecutive: Counter[str] = Counter()
        self._since: dict[str, int] = {}
        """By type: the number of failures counted when those in a row began."""
        self.num_begun = 0
        """Items, not attempts; one that is tried again is not counted again."""
        self.num_with_groups = 0
        self.num_without_groups = 0
        """Items whose worker returned nothing: the author's own way to skip one."""
        self.num_put_back = 0
        """Attempts that ended because the engine was away; they cost the item nothing."""
        self.by_type: Counter[str] = Counter()
        """Every failed attempt."""
        self.given_up: Counter[str] = Counter()
        """Items dropped after their last attempt."""

    @property
    def num_unfinished(self) -> int:
        """Items in flight or waiting for another attempt."""
        ended = self.num_with_groups + self.num_without_groups + self.given_up.total()
        return self.num_begun - ended

    def log_failure(self, what: str, error: BaseException) -> None:
        """Log what `failed` is about to count: the first of its type with its traceback, later ones in a line."""
        is_first = self.by_type[type(error).__name__] == 0
        logger.error(
            "%s failed: %s: %s",
            what,
            type(error).__name__,
            error,
            exc_info=error if is_first else None,
        )

    def succeeded(self, *, gave_groups: bool) -> None:
        """Count an item that came to its end."""
        self._consecutive.clear()
        if gave_groups:
            self.num_with_groups += 1
        else:
            self.num_without_groups += 1

    @property
    def num_failed(self) -> int:
        """Failed attempts."""
        return self.by_type.total()

    def failed(self, error: BaseException, *, began_after: int) -> None:
        """Count the `error` of an attempt; raise EnvError when its type has failed too often in a row.

        `began_after` is `num_failed` at the beginning of the attempt.
        """
        kind = type(error).__name__
        self.by_type[kind] += 1
        self._consecutive[kind] += 1
        if self._consecutive[kind] == 1:
            self._since[kind] = self.num_failed
        has_gone_on = self._max_consecutive == 1 or began_after >= self._since[kind]
        if has_gone_on and self._consecutive[kind] >= self._max_consecutive:
            raise EnvError(
                f"{self._consecutive[kind]} items in a row failed with {kind}: {error}"
            ) from error

    def summary(self) -> str:
        """One line in which every item that was begun is in exactly one place."""
        return (
            f"{self.num_begun} items begun: {self.num_with_groups} gave groups, "
            f"{self.num_without_groups} gave none, {self.given_up.total()} given up "
            f"({_listed(self.given_up)}), {self.num_unfinished} unfinished; "
            f"failed attempts: {_listed(self.by_type)}; "
            f"put back for an absent engine: {self.num_put_back}"
        )


def _listed(counts: Counter[str]) -> str:
    return ", ".join(f"{name} {count}" for name, count in sorted(counts.items())) or "none"
