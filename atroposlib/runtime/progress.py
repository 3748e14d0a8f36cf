"""What a run makes, how fast, what is lost and what it waits for: while it runs and in a table at its end.

`sign_of_life` is the entry point of `serve`, `process` and `evaluate`. On a terminal the text stays at the bottom
(`terminal.py`); elsewhere it is a log line every `progress_s`. It is made only where INFO messages are logged.
`losses.py` explains why no groups come.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import sys
import time
from collections import Counter, deque
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from atroposlib.envs.hooks import EnvHooks
from atroposlib.inference.manager import ServerManager
from atroposlib.runtime.losses import LossReminder, explain, listed
from atroposlib.runtime.terminal import bottom_of, is_live
from atroposlib.runtime.timings import Timings
from atroposlib.utils.loop_watch import ENOUGH_RUNS, LoopWatch, author_files
from atroposlib.utils.wording import main_loss

logger = logging.getLogger(__name__)

RATE_WINDOW_S = 60.0
"""Rates are those of this time."""
REDRAW_S = 0.5
"""Interval of the text on a terminal."""
LOOK_S = 0.05
"""Interval of the looks for code that blocks the event loop: with less, they cost more than 1% of a CPU."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunStatus:
    """Where a run is. Counts are of the whole run; what does not apply is left out."""

    num_made: int
    """Groups made and kept; in an evaluation, rows measured."""
    wanted: int | None = None
    """How many end the run; None: no such number."""
    unit: str = "groups"
    """What is counted, in the plural."""
    num_sent: int | None = None
    """Groups stored by the hub."""
    step: int | None = None
    """The trainer's step."""
    total_steps: int | None = None
    mean_score: float | None = None
    num_equal_scores: int = 0
    """Groups kept although all their scores are the same."""
    dropped: Mapping[str, int] = field(default_factory=dict)
    """Groups that were made and not kept, by reason."""
    samples: Mapping[str, str] = field(default_factory=dict)
    """The first of them, by reason."""
    lost: Mapping[str, int] = field(default_factory=dict)
    """Answers without a score or in no group, and the judge's failures, by reason: `EnvHooks.lost_answers`."""
    suspicious: Mapping[str, int] = field(default_factory=dict)
    """Answers that the audit suspects, by detector: `EnvHooks.suspicions`."""
    failed: Mapping[str, int] = field(default_factory=dict)
    """Failed attempts at an item, by exception."""
    num_without_groups: int = 0
    """Items that ended without a group."""
    num_in_flight: int | None = None
    """Items."""
    num_wanted_in_flight: int | None = None
    """Items that should be in flight: what the trainer needs, within the limits."""
    over_age: Mapping[str, int] = field(default_factory=dict)
    """Items in flight that have taken longer than `max_batches_offpolicy` steps, by what they wait for."""
    num_ready: int | None = None
    """This environment's groups that wait for the trainer."""
    trainer_wait_share: float | None = None
    """Share of its last steps that the trainer waited for batches, 0 to 1."""
    staleness: float | None = None
    """Mean number of policy versions that the groups of the last batches lay behind."""
    waits_for: str | None = None
    """What keeps the run waiting; `sign_of_life` fills in the engine if none answers."""
    engines_down: Sequence[str] = ()
    """URLs of engines that do not answer; filled in by `sign_of_life`."""
    broken_prefixes: Mapping[str, int] = field(default_factory=dict)
    """Turns that began a new sequence although they continue a conversation, by reason; of `sign_of_life`."""
    num_tokens_in: int = 0
    """Prompt tokens of answered requests; filled in by `sign_of_life`."""
    num_tokens_out: int = 0
    """Sampled tokens; filled in by `sign_of_life`."""
    num_tokens_trained: int = 0
    """Trained positions of accepted groups."""
    tokens: Mapping[str, int] = field(default_factory=dict)
    """Sampled tokens of ended items by what became of them: `Outbox.tokens`."""
    num_tokens_not_sampled: int = 0
    """Trained positions beyond the tokens that were sampled."""

    def metrics(self) -> dict[str, float]:
        """Return the pace of `serve` as metrics; what is not known is left out."""
        values = {
            "pace/items_in_flight": self.num_in_flight,
            "pace/items_wanted": self.num_wanted_in_flight,
            "pace/items_over_age": sum(self.over_age.values()),
            "pace/groups_ready": self.num_ready,
            "pace/trainer_wait_share": self.trainer_wait_share,
            "pace/staleness": self.staleness,
        }
        values |= {f"tokens/{name.replace(' ', '_')}": n for name, n in self.tokens.items()}
        return {name: float(value) for name, value in values.items() if value is not None}

    @property
    def num_wasted(self) -> int:
        """Items that ended without a group, and dropped groups."""
        return self.num_without_groups + sum(self.dropped.values())

    def losses(self) -> dict[str, int]:
        """Return what came to nothing, by reason."""
        groups = {
            "dropped": self.dropped,
            "lost": self.lost,
            "suspicious": self.suspicious,
            "failed": self.failed,
            "not_continued": self.broken_prefixes,
        }
        found = {
            f"{name}_{reason}": count
            for name, counts in groups.items()
            for reason, count in counts.items()
            if count
        }
        more = {
            "items_without_groups": self.num_without_groups,
            "tokens_not_sampled": self.num_tokens_not_sampled,
        }
        return found | {name: count for name, count in more.items() if count}

    def causes(self) -> str:
        """Return what `explain` says."""
        return explain(
            dropped=self.dropped,
            lost=self.lost,
            num_without_groups=self.num_without_groups,
            samples=self.samples,
        )


@contextlib.asynccontextmanager
async def sign_of_life(
    env: EnvHooks, make_status: Callable[[], RunStatus], *, timings: Timings | None = None
) -> AsyncIterator[None]:
    """Show the status during the block and log it as a table at its end, also after an error; warn of blocking code.

    `make_status` is called about twice a second. If it raises, the error is logged and the run continues without.
    """
    progress, servers = Progress(time.monotonic()), env.server
    watch = LoopWatch(author_files(type(env)), patience_s=math.inf, look_s=LOOK_S)
    reporter = asyncio.create_task(
        _report(progress, lambda: with_servers(make_status(), servers), timings or Timings(), watch)
    )
    try:
        yield
    finally:
        reporter.cancel()
        (ended,) = await asyncio.gather(reporter, return_exceptions=True)
        try:
            if isinstance(ended, Exception):
                raise ended
            status = with_servers(make_status(), servers)
            logger.info("the run in numbers\n%s", progress.table(time.monotonic(), status))
            if status.num_wasted > status.num_made:
                _warn_of_losses("most items gave nothing", status)
        except Exception:
            logger.exception("the status of the run could not be shown")


async def _report(
    progress: Progress,
    make_status: Callable[[], RunStatus],
    timings: Timings,
    watch: LoopWatch,
) -> None:
    """Show the status on a terminal, else log it, until cancelled; warn while nothing comes."""
    reminder = LossReminder(time.monotonic(), every_s=timings.no_group_reminder_s)
    is_shown = is_live(sys.stderr) and logger.isEnabledFor(logging.INFO)
    with bottom_of(sys.stderr) if is_shown else contextlib.nullcontext() as bottom, watch:
        logged_at = time.monotonic()
        while True:
            now = time.monotonic()
            status = make_status()
            if reminder.is_due(now, num_made=status.num_made, num_wasted=status.num_wasted):
                _warn_of_losses("items end and no group comes", status)
            _warn_of_blocking(watch)
            parts = [f"{name} {text}" for name, text in progress.rows(now, status)]
            if bottom is not None:
                bottom.show(parts)
            elif now - logged_at >= timings.progress_s:
                logged_at = now
                logger.info("%s", "; ".join(parts))
            await asyncio.sleep(min(REDRAW_S, timings.progress_s))


def _warn_of_blocking(watch: LoopWatch) -> None:
    """Name each function once that blocked the event loop in several intervals; begin the next interval."""
    for where, stall in list(watch.together.items()):
        if stall.num_runs == ENOUGH_RUNS and stall.last_run == watch.run:
            logger.warning(
                "%s blocked the event loop for up to %.0f ms, and all items wait meanwhile: use asyncio.to_thread or"
                " envs.rewards.RewardWorkers; await, never time.sleep",
                where,
                1000 * stall.longest_s,
            )
    watch.run += 1


def _warn_of_losses(what: str, status: RunStatus) -> None:
    logger.warning("%s; %d %s so far:\n%s", what, status.num_made, status.unit, status.causes())


def with_servers(status: RunStatus, servers: ServerManager) -> RunStatus:
    """Return a status with what the servers know."""
    down = servers.down()
    is_any_up = len(down) < len(servers.servers)
    return replace(
        status,
        engines_down=down,
        waits_for=status.waits_for if is_any_up or not down else "the engine",
        broken_prefixes=sum((server.broken_prefixes for server in servers.servers), Counter()),
        num_tokens_in=sum(server.num_tokens_in for server in servers.servers),
        num_tokens_out=sum(server.num_tokens_out for server in servers.servers),
    )


class Progress:
    """A status as text, with the rate and the time left. Time is an argument."""

    def __init__(self, now: float) -> None:
        self._began = now
        self._counts = deque([(now, 0)])
        """What was made, at the times it was looked at."""
        self._first_step: tuple[float, int] | None = None
        """The first known step of the trainer, and when it was seen."""

    def rows(self, now: float, status: RunStatus) -> list[tuple[str, str]]:
        """Return names and values, the most important first, with the rate of the last minute."""
        return self._rows(now, status, per_s=self._rate(now, status.num_made))

    def table(self, now: float, status: RunStatus) -> str:
        """Return what `rows` tells below each other, with the rate of the whole run."""
        ran_s = now - self._began
        rows = self._rows(now, status, per_s=status.num_made / ran_s if ran_s > 0 else 0.0)
        kept = [
            row
            for row in rows
            if row[0] not in ("time left", "waiting for", "in flight", "over age, waiting for")
        ]
        # The metrics of an evaluation end with its own duration.
        lines = [*([("duration", _duration(ran_s))] if status.unit == "groups" else []), *kept]
        width = max(len(name) for name, _ in lines)
        return "\n".join(f"  {name:<{width}}  {text}" for name, text in lines)

    def _rows(self, now: float, status: RunStatus, *, per_s: float) -> list[tuple[str, str]]:
        left_s, waits = self._left_s(now, status, per_s), status.trainer_wait_share
        rows: list[tuple[str, str | None]] = [
            ("step", _of(status.step, status.total_steps)),
            (status.unit, _of(status.num_made, status.wanted)),
            ("sent", _number(status.num_sent)),
            ("rate", f"{per_s * 60:.1f}/min"),
            ("time left", None if left_s is None else _duration(left_s)),
            ("waiting for", status.waits_for),
            ("problem", main_loss(status.losses(), num_kept=status.num_made)),
            ("engine down", ", ".join(status.engines_down)),
            ("mean score", None if status.mean_score is None else f"{status.mean_score:.3f}"),
            ("equal scores", _equal(status)),
            ("dropped", _listed(status.dropped)),
            ("lost", _listed(status.lost)),
            ("suspicious", _listed(status.suspicious)),
            ("turns not continued", _listed(status.broken_prefixes)),
            ("failed attempts", _listed(status.failed)),
            ("items without groups", _number(status.num_without_groups or None)),
            ("in flight", _of(status.num_in_flight, status.num_wanted_in_flight)),
            ("over age, waiting for", _listed(status.over_age)),
            ("ready", _number(status.num_ready)),
            ("trainer waits", None if waits is None else f"{waits:.0%}"),
            ("staleness", None if status.staleness is None else f"{status.staleness:.1f}"),
            ("tokens", f"{_short(status.num_tokens_in)} in, {_short(status.num_tokens_out)} out"),
            ("sampled tokens", _fates(status)),
            ("trained, not sampled", _number(status.num_tokens_not_sampled or None)),
        ]
        return [(name, text) for name, text in rows if text]

    def _rate(self, now: float, num_made: int) -> float:
        """Return how many are made per second, over the last minute."""
        self._counts.append((now, num_made))
        while len(self._counts) > 2 and now - self._counts[1][0] >= RATE_WINDOW_S:
            self._counts.popleft()
        then, before = self._counts[0]
        return (num_made - before) / (now - then) if now > then else 0.0

    def _left_s(self, now: float, status: RunStatus, per_s: float) -> float | None:
        """Return the time until the wanted number is made, else until the trainer's last step."""
        if status.wanted is not None:
            return max(0, status.wanted - status.num_made) / per_s if per_s > 0 else None
        if status.step is None or status.total_steps is None:
            return None
        if self._first_step is None:
            self._first_step = now, status.step
        then, first = self._first_step
        if status.step <= first:
            return None
        return (status.total_steps - status.step) * (now - then) / (status.step - first)


def _of(number: int | None, total: int | None) -> str | None:
    return _number(number) if number is None or total is None else f"{number} of {total}"


def _number(number: int | None) -> str | None:
    return None if number is None else str(number)


def _listed(counts: Mapping[str, int]) -> str | None:
    return listed(counts) if any(counts.values()) else None


def _fates(status: RunStatus) -> str | None:
    """Return what became of the sampled tokens, the most first; of text that is tokenised later, those to train.

    >>> _fates(RunStatus(num_made=3, tokens={"trained": 1200, "in no group": 0, "equal_scores": 90}))
    '1.2k to train, 90 equal_scores'
    """
    fates = {"to train" if name == "trained" else name: n for name, n in status.tokens.items()}
    if not any(fates.values()):
        fates = {"to train": status.num_tokens_trained}
    ordered = sorted(fates.items(), key=lambda fate: -fate[1])
    return ", ".join(f"{_short(number)} {name}" for name, number in ordered if number > 0) or None


def _equal(status: RunStatus) -> str | None:
    if not status.num_equal_scores:
        return None
    return f"{status.num_equal_scores} of {status.num_made} {status.unit}, which teach nothing"


def _short(number: int) -> str:
    """Return a number in at most four digits.

    >>> _short(950), _short(12_345), _short(7_890_000)
    ('950', '12.3k', '7.9M')
    """
    for size, suffix in ((10**9, "G"), (10**6, "M"), (10**3, "k")):
        if number >= size:
            return f"{number / size:.1f}{suffix}"
    return str(number)


def _duration(seconds: float) -> str:
    """Return a duration in its largest unit.

    >>> _duration(42), _duration(600), _duration(9000)
    ('42 s', '10 min', '2.5 h')
    """
    if seconds < 100:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 6000 else f"{seconds / 3600:.1f} h"
