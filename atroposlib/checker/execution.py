"""Start an environment on the checker's engine, and run its items with scripted answers.

Exceptions of the author's code become findings here; what they and the groups mean for the rules of rewards is judged
in `earnings.py`.
"""

from __future__ import annotations

import asyncio
import math
import random
import time
import warnings
from collections import Counter, defaultdict
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from atroposlib.checker.calls import (
    ENOUGH_RUNS,
    GRACE_S,
    Unfinished,
    child_processes,
    copy_of,
    describe,
    open_handles,
)
from atroposlib.checker.engine import Answer, PairTokenizer, ProbeEngine, shown
from atroposlib.checker.guesses import FakeRewardModel, verdict
from atroposlib.checker.report import Report
from atroposlib.checker.runs import Run, Sink, fault_of, text_of
from atroposlib.envs.collecting import close, collect
from atroposlib.envs.hooks import EnvHooks
from atroposlib.errors import (
    AtroposError,
    ConfigError,
    EngineProtocolError,
    EnvError,
    GroupError,
    cause_of,
)
from atroposlib.inference.manager import ServerManager
from atroposlib.inference.servers.http_peer import HttpPeer
from atroposlib.scored_data import Strictness, check_group
from atroposlib.utils.loop_watch import LoopWatch, author_files

T = TypeVar("T")

MIN_GROUP_SIZE = 8
"""Minimum answers per group: guesses, nonsense, an empty answer and an echo."""

STOCKS: dict[str, Callable[[], set[Any]]] = {
    "no_leaked_tasks": asyncio.all_tasks,
    "no_leaked_processes": child_processes,
    "no_leaked_handles": open_handles,
}
"""What lists the things that a run may leave behind, by rule."""


class BudgetEnded(Exception):
    """The check has used the time that it may take."""


class ScoreNotFinite(ValueError):
    """A group has a score that is NaN or infinite."""


@dataclass(kw_only=True)
class Execution:
    """The environment under check, its engine, and what it left behind after each run."""

    env_cls: type[EnvHooks]
    make: Callable[[], EnvHooks]
    report: Report
    timeout_s: float
    seed: int
    env: EnvHooks = field(init=False)
    items: list[Any] = field(default_factory=list)
    engine: ProbeEngine = field(default_factory=lambda: ProbeEngine(PairTokenizer()))
    sink: Sink = field(default_factory=Sink)
    group_size: int = MIN_GROUP_SIZE
    fatal: set[Answer] = field(default_factory=set)
    """Answers that make the whole item fail; they are not given again."""
    num_runs: int = 0
    deadline: float = math.inf
    """Value of `time.monotonic` after which no run begins, except the first ones."""
    unclosed: Counter[str] = field(default_factory=Counter)
    """Sessions, sockets and transports that were dropped unclosed, by kind."""
    stocks: dict[str, list[set[Any]]] = field(default_factory=lambda: defaultdict(list))
    """What existed after each run, by the rule that no run adds to it."""

    def __post_init__(self) -> None:
        self.watch = LoopWatch(author_files(self.env_cls), patience_s=self.timeout_s)

    @contextmanager
    def counting_unclosed(self) -> Iterator[None]:
        """Fill `unclosed` from the warnings of the block; a dropped file is closed at once, and not counted."""

        def note(message: Warning | str, category: type[Warning], *rest: Any, **more: Any) -> None:
            kind = str(message).partition("<")[0].strip()
            if issubclass(category, ResourceWarning) and kind != "unclosed file":
                self.unclosed[kind] += 1

        with warnings.catch_warnings():
            warnings.simplefilter("always", ResourceWarning)
            warnings.showwarning = note
            yield

    async def within(self, call: Awaitable[T], what: str) -> T:
        """Await the author's code for at most `timeout_s`.

        Raises its error, as `Unfinished` if that is not an Exception.
        """
        self.watch.run += 1
        task = asyncio.ensure_future(_without_exit(call))
        await asyncio.wait({task}, timeout=self.timeout_s)
        if not task.done():
            task.cancel()
            await asyncio.wait({task}, timeout=GRACE_S)
            raise Unfinished(f"{what} did not end within {self.timeout_s:g} s")
        if task.cancelled():
            raise Unfinished(f"{what} ended with CancelledError, but it was not cancelled")
        error = task.exception()
        if error is None or isinstance(error, Exception):
            return task.result()
        raise Unfinished(f"{what} raised {describe(cause_of(error))}") from error

    async def call(self, function: Callable[[], T], what: str) -> T:
        """Call the author's code that is not asynchronous; it ends as in `within`."""

        async def called() -> T:
            return function()

        return await self.within(called(), what)

    async def ask(self, function: Callable[[], T], what: str) -> T:
        """Call what the author wrote for the check only; EnvError if it fails, because nothing can then be judged."""
        try:
            return await self.call(function, what)
        except Exception as error:
            raise EnvError(f"{what} failed: {describe(error)}") from error

    @contextmanager
    def judging(self, rule: str, *, item: int | None = None, what: str = "") -> Iterator[None]:
        """Add an exception of the author's code, after the words `what`, as evidence against a rule."""
        try:
            yield
        except Exception as error:  # noqa: BLE001 - boundary: the author's code
            cause = cause_of(error)
            self.report.fail(rule, what + describe(cause), item=item, hint=hint_of(cause))

    async def start(self, folder: Path, rule: str) -> EnvHooks | None:
        """Return an environment after `setup`, with its own engine; None, with a finding, if that fails."""
        env: EnvHooks | None = None
        try:
            env = await self.call(self.make, "the constructor")
            env.config.use_wandb = False
            env.config.group_size = self.group_size = max(env.config.group_size, MIN_GROUP_SIZE)
            env.config.worker_timeout = self.timeout_s
            env.config.data_dir_to_save_evals = str(folder / "evals")
            await env.server.close()
            self.engine.tokenizer = env.tokenizer  # setup() may ask, and may replace it
            self.engine.judge = getattr(env, "example_verdict", verdict)
            for name, server in [*vars(env).items()]:  # a judge or a teacher has its own
                if isinstance(server, ServerManager):
                    server.servers = [self.engine]
                elif isinstance(server, HttpPeer):
                    setattr(env, name, FakeRewardModel(env, self.engine))
            env.group_sink = self.sink
            await self.within(env.setup(), "setup()")
            self.engine.tokenizer = env.tokenizer
            self.report.look("starts")
            return env
        except Exception as error:
            if env is None and isinstance(error, ConfigError):
                raise
            self.report.fail(rule, describe(error), hint=hint_of(error))
            if env is not None:
                await self.stop(env)
            return None

    async def stop(self, env: EnvHooks) -> None:
        with self.judging("no_leaked_handles", what="close() failed: "):
            await self.within(close(env), "close()")

    async def run(self, index: int, answers: Sequence[Answer], seed: int = 0) -> Run:
        """Run one item with scripted answers and judge its groups. Raises what the author's code raises."""
        item = self.items[index]
        self.engine.script(answers)
        self.sink.groups = []
        num_verdicts = self.engine.num_verdicts
        seed_all(self.seed + seed)
        groups, _ = await self.within(collect(self.env, copy_of(item)), "the item")
        if groups:
            await self.env.handle_send_to_api(
                groups, item, do_send_to_api=False, abort_on_any_max_length_exceeded=False
            )
        run = Run(
            item=index,
            answers=list(answers),
            samples=self.engine.samples,
            num_verdicts=self.engine.num_verdicts - num_verdicts,
        )
        for group in self.sink.groups:
            self._judge_group(run, group)
        for _ in range(5):  # lets tasks that are about to end do so
            await asyncio.sleep(0)
        self.num_runs += 1
        for rule, take_stock in STOCKS.items():
            self.stocks[rule].append(take_stock())
        return run

    def _judge_group(self, run: Run, group: Any) -> None:
        _refuse_infinite(group)
        self.report.look("collects")
        try:
            checked = check_group(group, strictness=Strictness.MEANING)
        except GroupError as error:
            self.report.fail("aligned", str(error), item=run.item)
            return
        run.groups.append(checked)
        num_sequences, num_rollouts = checked.num_sequences, checked.num_rollouts
        stated = (checked.group_overrides or {}).get("group_size", self.group_size)
        self.report.look("group_size")
        if num_rollouts != stated:
            what = f"{num_rollouts} rollouts, expected {stated}"
            self.report.fail("group_size", what, item=run.item)
        has_tokens = any(sample.tokens for sample in run.samples)
        for sequence in range(num_sequences if run.samples else 0):
            view = checked.sequence(sequence)
            fault = fault_of(view, run.samples, self.env.tokenizer)
            self.report.look("aligned")
            self.report.look("token_exact", int(has_tokens))
            if fault is not None:
                self.report.fail(
                    fault.rule, fault.what, item=run.item, sequence=sequence, hint=fault.hint
                )
                if fault.rule == "aligned":
                    continue  # the answer in it is not known
            text = text_of(view, run.samples, self.env.tokenizer)
            if text is not None:
                run.earned[text] = sorted([*run.earned.get(text, ()), view.score])

    async def collect(self, index: int, answers: Sequence[Answer], *, seed: int = 0) -> Run | None:
        """Run one item with scripted answers, without those that make it fail; None, with a finding, if all do.

        Raises `BudgetEnded` after the deadline.
        """
        if self.num_runs > ENOUGH_RUNS and time.monotonic() > self.deadline:
            raise BudgetEnded
        answers = [answer for answer in answers if answer not in self.fatal]
        if not answers:
            return None
        before = self.env.scoring_errors()
        try:
            run = await self.run(index, answers, seed)
        except Exception as error:  # noqa: BLE001 - boundary: the author's code
            if not await self._find_fatal(index, answers, cause_of(error)):
                return None
            return await self.collect(index, answers, seed=seed)
        self.report.look("grader_survives", len(run.scores))
        self.report.look("reward_finite", len(run.scores))
        for kind in self.env.scoring_errors() - before:
            rule = "reward_finite" if kind == EnvError.__name__ else "grader_survives"
            unscored = [answer for answer in answers if not run.scores_for(answer)]
            what = f"scoring raised {kind}; answers without a score: "
            self.report.fail(rule, what + ", ".join(map(shown, unscored[:4])), item=index)
        return run

    async def _find_fatal(
        self, index: int, answers: Sequence[Answer], error: BaseException
    ) -> bool:
        """Find the answers that make an item fail; return whether there are others."""
        bad: dict[Answer, BaseException] = {}
        is_by_answer = not isinstance(error, Unfinished | TimeoutError | AtroposError)
        for answer in dict.fromkeys(answers) if is_by_answer else ():
            try:
                await self.run(index, [answer])
            except Exception as raised:  # noqa: BLE001 - boundary: the author's code
                bad[answer] = cause_of(raised)
        are_all_bad = len(bad) == len({*answers})
        if not bad or (are_all_bad and not self.num_runs):
            rule = "reward_finite" if isinstance(error, ScoreNotFinite) else "collects"
            self.report.fail(rule, describe(error), item=index, hint=hint_of(error))
            return False
        for answer, fault in bad.items():
            rule = "reward_finite" if isinstance(fault, ScoreNotFinite) else "grader_survives"
            self.report.fail(rule, f"{shown(answer)}: {describe(fault)}", item=index)
        self.fatal |= bad.keys()
        return not are_all_bad


async def _without_exit(call: Awaitable[T]) -> T:
    try:
        return await call
    except SystemExit as error:
        raise Unfinished(f"sys.exit({error.code!r}) was called") from error


def seed_all(seed: int) -> None:
    random.seed(seed)
    np.random.seed(seed % 2**32)


def hint_of(error: BaseException) -> str:
    """Return what to do about an error; "" if the rule's advice says it."""
    match error:
        case ImportError():
            return "install what is missing, or import it only where it is used"
        case OSError():
            return ""
        case Unfinished():
            return "end in time (--timeout SECONDS), and neither exit nor raise CancelledError"
        case EngineProtocolError():
            return "define example_reply(self, path, body): a reply of your reward model, as JSON"
    return "correct what raises this"


def _refuse_infinite(group: Any) -> None:
    """Raise `ScoreNotFinite` for a group with a score that is NaN or infinite."""
    scores = group.get("scores") if isinstance(group, Mapping) else None
    for index, score in enumerate(scores or ()):
        if isinstance(score, float | np.floating) and not np.isfinite(score):
            raise ScoreNotFinite(f"scores[{index}] is {score}")
