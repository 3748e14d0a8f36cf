"""Run an environment on an in-process engine, without a hub, and judge it by the rules of `report.py`.

Items run one after another, each several times with the same answers, so that every difference has one cause. A rule is
skipped if an earlier failure makes its verdict meaningless: one fault, one finding. Called by `python env.py check` and
by authors' tests through `check_env`.
"""

from __future__ import annotations

import asyncio
import difflib
import random
import tempfile
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TypeVar
from unittest import mock

import numpy as np

from atroposlib.checker.answers import EMPTY, guesses, rounds, verdict
from atroposlib.checker.calls import (
    ENOUGH_RUNS,
    GRACE_S,
    LoopWatch,
    author_files,
    child_processes,
    copy_of,
    describe,
    end_processes,
    leaked,
    open_handles,
    run_in_own_loop,
    within,
)
from atroposlib.checker.checkpoints import attach_checkpoints, is_same, restore_faults, save
from atroposlib.checker.engine import Answer, PairTokenizer, ProbeEngine, question_of
from atroposlib.checker.report import BY_NAME, RULES, Evidence, Finding, Report, Status
from atroposlib.checker.runs import Run, Sink, difference, fault_of, text_of
from atroposlib.envs.base import BaseEnv
from atroposlib.envs.collecting import close, collect
from atroposlib.errors import ConfigError, GroupError, cause_of
from atroposlib.inference.manager import ServerManager
from atroposlib.scored_data import Strictness, check_group

T = TypeVar("T")

MIN_GROUP_SIZE = 8
"""Minimum answers per group: guesses, nonsense, an empty answer and an echo."""
MAX_ROUNDS = 6
"""Maximum groups of guesses per item, tried until rewards differ."""
_USELESS_ANSWERS: dict[str, Answer] = {"empty_unrewarded": EMPTY, "echo_unrewarded": question_of}
_REWARD_RULES = ("reward_repeatable", "reward_ignores_order", "reward_varies", *_USELESS_ANSWERS)
_OTHER_TIME_S = 3 * 86_400 + 7 * 3_600 + 11 * 60 + 17.25
"""Shift of the wall clock when answers are scored again: another day, hour, minute and second."""


def check_env(
    env_cls: type[BaseEnv],
    *,
    num_items: int = 3,
    seed: int = 0,
    skip: Sequence[str] = (),
    make: Callable[[type[BaseEnv]], BaseEnv] | None = None,
    tokenizer: Any = None,
    timeout_s: float = 30.0,
    resume_items: bool = False,
) -> Report:
    """Check an environment class in its own event loop and return a report.

    `skip` names rules not to judge. `make(cls)` constructs an environment (default: from `config_init`); it is called
    several times, with `env_cls` or a subclass that has an offline tokenizer, which `tokenizer` replaces. `timeout_s`
    bounds each call of the author's code. `resume_items` also judges the optional rule `items_resume`. Raises
    ConfigError for an unknown rule or an invalid configuration, EnvError if the environment exits the process.

    While it runs, the check controls the clock, the random state and the group size (at least 8).
    """
    for name in skip:
        if name not in BY_NAME:
            close = difflib.get_close_matches(name, BY_NAME, n=1)
            hint = f"; did you mean {close[0]}?" if close else ""
            raise ConfigError(f"there is no rule {name!r} to skip{hint}")
        if name in ("starts", "gives_items", "collects"):
            raise ConfigError(f"{name} cannot be skipped: without it nothing can be judged")
    if num_items < 1:
        raise ConfigError(f"num_items: got {num_items}; at least one item is needed")
    offline = _offline_class(env_cls, tokenizer)
    check = _Check(
        env_cls=env_cls,
        make=lambda: (make or _make_default)(offline),
        num_items=num_items,
        timeout_s=timeout_s,
        resume_items=resume_items,
    )
    check.skip("not judged, as asked for", *skip)
    python_state, numpy_state = random.getstate(), np.random.get_state()
    random.seed(seed)
    np.random.seed(seed % 2**32)
    try:
        return run_in_own_loop(check.run())
    finally:
        random.setstate(python_state)
        np.random.set_state(numpy_state)


def _offline_class(env_cls: type[BaseEnv], tokenizer: Any = None) -> type[BaseEnv]:
    """Return a subclass whose tokenizer needs no files; `env_cls` itself if it overrides `load_tokenizer`."""
    if tokenizer is None and env_cls.load_tokenizer is not BaseEnv.load_tokenizer:
        return env_cls
    given = PairTokenizer() if tokenizer is None else tokenizer
    namespace = {
        "load_tokenizer": lambda self: given,
        "__module__": env_cls.__module__,
        "__qualname__": env_cls.__qualname__,
        "__doc__": env_cls.__doc__,
    }
    return type(env_cls.__name__, (env_cls,), namespace)


def _make_default(env_cls: type[BaseEnv]) -> BaseEnv:
    config, servers = env_cls.config_init()
    return env_cls(config.model_copy(update={"use_wandb": False}), servers, False, True)


@dataclass(kw_only=True)
class _Check:
    env_cls: type[BaseEnv]
    make: Callable[[], BaseEnv]
    num_items: int
    timeout_s: float
    resume_items: bool
    findings: dict[str, Finding] = field(
        default_factory=lambda: {rule.name: Finding(rule=rule) for rule in RULES}
    )
    items: list[Any] = field(default_factory=list)
    runs: list[Run] = field(default_factory=list)
    """The first run of each list of answers; repetitions are compared with it and not kept."""
    engine: ProbeEngine = field(default_factory=lambda: ProbeEngine(PairTokenizer()))
    sink: Sink = field(default_factory=Sink)
    group_size: int = MIN_GROUP_SIZE
    tasks: list[set[Any]] = field(default_factory=list)
    """Unfinished tasks after each run; like the next two."""
    handles: list[set[Any]] = field(default_factory=list)
    processes: list[set[Any]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.watch = LoopWatch(author_files(self.env_cls), patience_s=self.timeout_s)

    async def run(self) -> Report:
        began = time.monotonic()
        processes_before = child_processes()
        with tempfile.TemporaryDirectory() as folder, self.watch:
            await self._judge(Path(folder))
        end_processes(child_processes() - processes_before)
        return Report(
            environment=self.env_cls.name or self.env_cls.__name__,
            findings=list(self.findings.values()),
            num_items=len(self.items),
            num_groups=sum(len(run.groups) for run in self.runs),
            duration_s=time.monotonic() - began,
        )

    async def _judge(self, folder: Path) -> None:
        env = await self._start(folder, "starts")
        if env is None:
            self.skip("the environment does not start", *BY_NAME)
            return
        try:
            await self._get_items(env)
            if not self.items:
                self.skip("there are no items", *BY_NAME.keys() - {"starts"})
                return
            for index in range(len(self.items)):
                await self._try_item(env, index)
            self._judge_answers()
            self._judge_rewards()
            await self._judge_leaks()
            self._judge_stalls()
            await self._cancel(env)
            await self._evaluate(env, folder)
            await self._checkpoints(env, folder)
        finally:
            await self._stop(env)

    # Verdicts.

    def _fail(
        self, name: str, what: str, *, item: int | None = None, sequence: int | None = None
    ) -> None:
        finding = self.findings[name]
        if finding.status is not Status.SKIPPED:
            finding.status = Status.FAIL
            finding.evidence.append(Evidence(what=what, item=item, sequence=sequence))

    def skip(self, reason: str, *names: str) -> None:
        """Skip these rules, except those that failed or were skipped before."""
        for name in names:
            finding = self.findings[name]
            if finding.status is Status.PASS:
                finding.status, finding.reason = Status.SKIPPED, reason

    def _has_failed(self, name: str) -> bool:
        return self.findings[name].status is Status.FAIL

    async def _within(self, call: Awaitable[T], what: str) -> T:
        """Await the author's code; on a timeout, release requests that the engine holds."""
        self.watch.run += 1
        return await within(call, what, timeout_s=self.timeout_s, give_up=self.engine.release)

    # Starting.

    async def _start(self, folder: Path, rule: str) -> BaseEnv | None:
        """Return an environment after `setup`, with its own engine; None, with a finding, if that fails."""
        env: BaseEnv | None = None
        try:
            env = self.make()
            env.config.use_wandb = False
            env.config.group_size = self.group_size = max(env.config.group_size, MIN_GROUP_SIZE)
            env.config.worker_timeout = self.timeout_s
            env.config.data_dir_to_save_evals = str(folder / "evals")
            await env.server.close()
            self.engine.tokenizer = env.tokenizer  # setup() may ask, and may replace it
            self.engine.judge = getattr(env, "example_verdict", verdict)
            for manager in vars(env).values():  # a judge or a teacher has its own
                if isinstance(manager, ServerManager):
                    manager.servers = [self.engine]
            env.group_sink = self.sink
            await self._within(env.setup(), "setup()")
            self.engine.tokenizer = env.tokenizer
            return env
        except Exception as error:
            if env is None and isinstance(error, ConfigError):
                raise
            self._fail(rule, describe(error))
            if env is not None:
                await self._stop(env)
            return None

    async def _stop(self, env: BaseEnv) -> None:
        try:
            await self._within(close(env), "close()")
        except Exception as error:  # noqa: BLE001 - boundary: the author's code
            self._fail("no_leaked_handles", f"close() failed: {describe(error)}")

    async def _get_items(self, env: BaseEnv) -> None:
        for index in range(self.num_items):
            try:
                item = await self._within(env.get_next_item(), "get_next_item()")
            except Exception as error:  # noqa: BLE001 - boundary: the author's code
                self._fail("gives_items", describe(error), item=index)
                return
            if item is None:
                if index == 0:
                    self._fail("gives_items", "get_next_item() returned None", item=0)
                return
            self.items.append(item)

    # Items.

    async def _try_item(self, env: BaseEnv, index: int) -> None:
        """Try answers until rewards differ, then score the last ones again at another time and in another order."""
        telling: Run | None = None
        for answers in rounds(guesses(env, self.items[index]), self.group_size)[:MAX_ROUNDS]:
            run = await self._collect(env, index, answers)
            if run is None:
                return
            self.runs.append(run)
            if run.has_difference or (telling is None and run.scores):
                telling = run
            if run.has_difference:
                break
        if telling is None:
            return
        real = time.time

        def other_time() -> float:
            return real() + _OTHER_TIME_S

        with mock.patch("time.time", other_time):
            again = await self._collect(env, index, telling.answers)
        if again is not None and (other := difference(telling, again)):
            self._fail("reward_repeatable", f"{other} when scored again", item=index)
            return
        again = await self._collect(env, index, telling.answers[::-1])
        # Leaving answers out is judged by the rule group_size.
        if again is not None and (other := difference(telling, again, may_leave_out=True)):
            self._fail("reward_ignores_order", f"{other} in reversed order", item=index)

    async def _collect(self, env: BaseEnv, index: int, answers: Sequence[Answer]) -> Run | None:
        """Run one item with scripted answers; None, with a finding, when it fails."""
        item = self.items[index]
        self.engine.script(answers)
        self.sink.groups = []
        try:
            groups, _ = await self._within(collect(env, copy_of(item)), "the item")
            if groups:
                await env.handle_send_to_api(
                    groups, item, do_send_to_api=False, abort_on_any_max_length_exceeded=False
                )
        except Exception as error:  # noqa: BLE001 - boundary: the author's code
            self._fail("collects", describe(cause_of(error)), item=index)
            return None
        run = Run(item=index, answers=list(answers), samples=self.engine.samples)
        for group in self.sink.groups:
            self._judge_group(env, run, group)
        for _ in range(5):  # lets tasks that are about to end do so
            await asyncio.sleep(0)
        self.tasks.append(asyncio.all_tasks())
        self.handles.append(open_handles())
        self.processes.append(child_processes())
        return run

    def _judge_group(self, env: BaseEnv, run: Run, group: Any) -> None:
        try:
            checked = check_group(group, strictness=Strictness.MEANING)
        except GroupError as error:
            self._fail("aligned", str(error), item=run.item)
            return
        run.groups.append(checked)
        num_sequences = checked.num_sequences
        stated = (checked.group_overrides or {}).get("group_size", self.group_size)
        if num_sequences != stated:
            what = f"{num_sequences} sequences, expected {stated}"
            self._fail("group_size", what, item=run.item)
        has_tokens = any(sample.tokens for sample in run.samples)
        for sequence in range(num_sequences):
            view = checked.sequence(sequence)
            fault = fault_of(view, run.samples, env.tokenizer) if has_tokens else None
            if fault is not None:
                self._fail(fault.rule, fault.what, item=run.item, sequence=sequence)
            text = text_of(view, run.samples, env.tokenizer)
            if text is not None:
                run.earned[text] = sorted([*run.earned.get(text, ()), view.score])

    def _judge_answers(self) -> None:
        """Fail if no item became a group; single items may give none."""
        if any(run.groups for run in self.runs) or self._has_failed("aligned"):
            return
        for index in sorted({run.item for run in self.runs}):
            answers = [a for run in self.runs if run.item == index for a in run.answers]
            tried = ", ".join(repr(answer) for answer in answers if isinstance(answer, str))
            self._fail(
                "collects",
                f"no group came of these answers: {tried:.300}; if none of them can be right, define"
                " example_answers(self, item)",
                item=index,
            )

    # Rewards.

    def _judge_rewards(self) -> None:
        judged = [run for run in self.runs if run.earned]
        samples = [sample for run in self.runs for sample in run.samples]
        if not any(run.groups for run in self.runs):
            rules = ("group_size", "aligned", "token_exact", *_REWARD_RULES)
            self.skip("no group could be judged", *rules)
        if not samples:
            reason = "the environment asks nothing of the engine"
            self.skip(reason, "token_exact", *_REWARD_RULES)
        if not any(sample.tokens for sample in samples):
            reason = "the environment samples text only; managed_server() would keep the tokens"
            self.skip(reason, "token_exact")
        if not judged:
            self.skip("no answer was found again in a group", *_REWARD_RULES)
            return
        if self._has_failed("reward_repeatable"):
            self.skip("reward_repeatable fails", *_REWARD_RULES)
        if self._has_failed("reward_ignores_order"):
            self.skip("reward_ignores_order fails", *_USELESS_ANSWERS)
        has_difference = [self._judge_earnings(i, judged) for i in range(len(self.items))]
        if not any(has_difference):
            for run in judged:
                answers = ", ".join(map(repr, run.earned))
                self._fail(
                    "reward_varies",
                    f"{len(run.earned)} answers all earned {run.scores[0]:g}: {answers:.200}",
                    item=run.item,
                )
            self.skip("all rewards are equal", *_USELESS_ANSWERS)

    def _judge_earnings(self, index: int, judged: Sequence[Run]) -> bool:
        """Compare the rewards of useless answers to one item with the best; return whether rewards differ."""
        runs = [run for run in judged if run.item == index]
        scores = [score for run in runs for score in run.scores]
        if len(set(scores)) < 2:
            return False
        worst, best = min(scores), max(scores)
        for name, answer in _USELESS_ANSWERS.items():
            most = max((x for run in runs for x in run.scores_for(answer)), default=worst)
            if most >= worst + (best - worst) / 2:
                what = f"earned {most:g}; all answers earned from {worst:g} to {best:g}"
                self._fail(name, what, item=index)
        return True

    # What is left behind.

    async def _judge_leaks(self) -> None:
        if len(self.tasks) <= ENOUGH_RUNS:
            rules = ("no_leaked_tasks", "no_leaked_handles", "no_leaked_processes")
            self.skip("too few items ran", *rules)
            return
        tasks = leaked(self.tasks)
        if tasks:
            _, tasks = await asyncio.wait(tasks, timeout=4 * GRACE_S)
        if len(tasks) >= ENOUGH_RUNS:
            what = f"every run left a task of {_name_of(tasks.pop())} behind"
            self._fail("no_leaked_tasks", what)
        if processes := leaked(self.processes):
            self._fail("no_leaked_processes", f"every run left one behind, like {processes.pop()}")
            self.skip("processes are left, and their pipes with them", "no_leaked_handles")
        if leaked(self.handles):
            self._fail("no_leaked_handles", "every run left a file, socket or pipe open")

    def _judge_stalls(self) -> None:
        """Fail if a function blocked the loop in several runs; a single time may be an import."""
        for where, blocked_s in self.watch.stalls.items():
            if len(blocked_s) >= ENOUGH_RUNS:
                longest_ms = 1000 * max(blocked_s.values())
                self._fail("loop_stays_free", f"{where} blocked it for up to {longest_ms:.0f} ms")

    # Cancelling.

    async def _cancel(self, env: BaseEnv) -> None:
        if self._has_failed("collects"):
            self.skip("items fail", "cancellable")
            return
        before = asyncio.all_tasks()
        self.engine.script([EMPTY])
        self.engine.hold()
        task = asyncio.ensure_future(collect(env, copy_of(self.items[0])))
        asked = asyncio.ensure_future(self.engine.asked.wait())
        try:
            await asyncio.wait(
                {task, asked}, timeout=self.timeout_s, return_when=asyncio.FIRST_COMPLETED
            )
            if task.done() or not asked.done():
                self.skip("the item does not wait for the engine", "cancellable")
                return
            task.cancel()
            await asyncio.wait({task}, timeout=GRACE_S)
            if not task.done():
                self._fail("cancellable", "it continued after task.cancel()", item=0)
            elif not task.cancelled():
                error = task.exception()
                ending = "returned" if error is None else f"raised {type(error).__name__}"
                self._fail("cancellable", f"it {ending} instead of ending cancelled", item=0)
            elif left := asyncio.all_tasks() - before - {task, asked}:
                # The engine still holds requests, so tasks that end now were cancelled with the item.
                _, pending = await asyncio.wait(left, timeout=4 * GRACE_S)
                if pending:
                    what = f"a cancelled item left a task of {_name_of(pending.pop())} behind"
                    self._fail("no_leaked_tasks", what, item=0)
        finally:
            self.engine.release()
            asked.cancel()
            await asyncio.wait({task, asked}, timeout=GRACE_S)
            task.cancel()

    # Evaluating.

    async def _evaluate(self, env: BaseEnv, folder: Path) -> None:
        self.engine.script(["qx"])
        try:
            await self._within(env.evaluate(), "evaluate()")
            written = any(path.is_file() for path in (folder / "evals").rglob("*"))
            if not written and not await self._logs_metrics(env):
                self._fail("evaluates", "it wrote no file and logged no metric")
        except Exception as error:  # noqa: BLE001 - boundary: the author's code
            self._fail("evaluates", describe(cause_of(error)))

    async def _logs_metrics(self, env: BaseEnv) -> bool:
        """Whether `wandb_log` would now log an evaluation metric."""
        logged: dict[str, Any] = {}
        env.rollouts_for_wandb = []
        env.wandb_run = SimpleNamespace(log=lambda metrics, **options: logged.update(metrics))
        try:
            await self._within(env.wandb_log(), "wandb_log()")
        finally:
            env.wandb_run = None
        return any("eval" in key for key in logged if not key.startswith("server/"))

    # Checkpoints.

    async def _checkpoints(self, env: BaseEnv, folder: Path) -> None:
        rules = ("checkpoint_is_json", "checkpoint_restores", "items_resume")
        try:
            data = save(env, folder)
        except Exception as error:  # noqa: BLE001 - boundary: the author's code
            self._fail("checkpoint_is_json", describe(error))
            self.skip("nothing is saved", *rules)
            return
        if data is None:
            self.skip("save_checkpoint() saves nothing", *rules)
            return
        if not self.resume_items:
            self.skip("optional: ask for it with --resume-items", "items_resume")
        fresh = await self._start(folder, "checkpoint_restores")
        if fresh is None:
            return
        try:
            attach_checkpoints(fresh, folder)
            fresh.load_checkpoint()
            for fault in restore_faults(env, fresh, data, save(fresh, folder) or {}):
                self._fail("checkpoint_restores", fault)
            if self._has_failed("checkpoint_restores"):
                self.skip("checkpoints do not restore", "items_resume")
            elif self.resume_items:
                wanted = await self._within(env.get_next_item(), "get_next_item()")
                got = await self._within(fresh.get_next_item(), "get_next_item()")
                if not is_same(wanted, got):
                    self._fail("items_resume", f"expected {wanted!r:.100}, got {got!r:.100}")
        except Exception as error:  # noqa: BLE001 - boundary: the author's code
            self._fail("checkpoint_restores", describe(error))
        finally:
            await self._stop(fresh)


def _name_of(task: asyncio.Task[Any]) -> str:
    coroutine = task.get_coro()
    return str(getattr(coroutine, "__qualname__", repr(coroutine)))
