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
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from atroposlib.checker.answers import EMPTY, guesses, judge_of, rounds
from atroposlib.checker.calls import (
    GRACE_S,
    LEAKY_RUNS,
    LoopWatch,
    author_files,
    child_processes,
    copy_of,
    describe,
    end_processes,
    kind_of_handle,
    leaked,
    open_handles,
    other_time,
    run_in_own_loop,
    within,
)
from atroposlib.checker.checkpoints import attach_checkpoints, is_same, restore_faults, save
from atroposlib.checker.engine import Answer, PairTokenizer, ProbeEngine, question_of
from atroposlib.checker.report import BY_NAME, RULES, Evidence, Finding, Report, Status
from atroposlib.checker.runs import Run, Sink, difference, faults_of, text_of
from atroposlib.envs.base import BaseEnv
from atroposlib.envs.collecting import close, collect
from atroposlib.envs.rewards import RewardWorkers
from atroposlib.errors import ConfigError, GroupError, cause_of
from atroposlib.inference.manager import ServerManager
from atroposlib.scored_data import Strictness, check_group

T = TypeVar("T")

MIN_GROUP_SIZE = 8
"""Minimum answers per group: guesses, nonsense, an empty answer and an echo."""
MAX_ROUNDS = 6
"""Maximum groups of guesses per item, tried until rewards differ."""
_REWARD_RULES = (
    "reward_repeatable",
    "reward_ignores_order",
    "reward_varies",
    "empty_unrewarded",
    "echo_unrewarded",
)

_NEEDED = ("starts", "gives_items", "collects")

MakeEnv = Callable[[type[BaseEnv]], BaseEnv]


def check_env(
    env_cls: type[BaseEnv],
    *,
    num_items: int = 3,
    seed: int = 0,
    skip: Sequence[str] = (),
    make: MakeEnv | None = None,
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
        if name in _NEEDED:
            raise ConfigError(f"{name} cannot be skipped: without it nothing can be judged")
    if num_items < 1:
        raise ConfigError(f"num_items: got {num_items}; at least one item is needed")
    offline = offline_class(env_cls, tokenizer)
    check = _Check(
        env_cls,
        make=lambda: (make or _make_default)(offline),
        num_items=num_items,
        timeout_s=timeout_s,
        resume_items=resume_items,
        skip=skip,
    )
    python_state, numpy_state = random.getstate(), np.random.get_state()
    random.seed(seed)
    np.random.seed(seed % 2**32)
    try:
        return run_in_own_loop(check.run())
    finally:
        random.setstate(python_state)
        np.random.set_state(numpy_state)


def offline_class(env_cls: type[BaseEnv], tokenizer: Any = None) -> type[BaseEnv]:
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


class _Check:
    def __init__(
        self,
        env_cls: type[BaseEnv],
        *,
        make: Callable[[], BaseEnv],
        num_items: int,
        timeout_s: float,
        resume_items: bool,
        skip: Sequence[str],
    ) -> None:
        self._env_cls = env_cls
        self._make = make
        self._num_items = num_items
        self._timeout_s = timeout_s
        self._resume_items = resume_items
        self._findings = {rule.name: Finding(rule=rule) for rule in RULES}
        for name in skip:
            self._skip(name, "not judged, as asked for")
        self._items: list[Any] = []
        self._runs: list[Run] = []
        self._barren: list[tuple[int, list[list[Answer]]]] = []
        """Items without any scored answer, and the answers tried."""
        self._engine = ProbeEngine(PairTokenizer())
        self._sink = Sink()
        self._group_size = MIN_GROUP_SIZE
        self._watch = LoopWatch(author_files(env_cls), patience_s=timeout_s)
        self._num_runs = 0
        self._left: dict[str, list[set[Any]]] = {"tasks": [], "handles": [], "processes": []}

    async def run(self) -> Report:
        began = time.monotonic()
        processes_before = child_processes()
        with tempfile.TemporaryDirectory() as folder, self._watch:
            await self._judge(Path(folder))
        end_processes(child_processes() - processes_before)
        return Report(
            environment=self._env_cls.name or self._env_cls.__name__,
            findings=list(self._findings.values()),
            num_items=len(self._items),
            num_groups=sum(len(run.groups) for run in self._runs),
            duration_s=time.monotonic() - began,
        )

    async def _judge(self, folder: Path) -> None:
        env = await self._start(folder, "starts")
        if env is None:
            self._skip_rest("the environment does not start")
            return
        self._engine = env.server.servers[0]  # type: ignore[assignment]  # _start put it there
        try:
            await self._get_items(env)
            if not self._items:
                self._skip_rest("there are no items")
                return
            for index, item in enumerate(self._items):
                await self._try_item(env, index, item)
            self._judge_barren()
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
        finding = self._findings[name]
        if finding.status is not Status.SKIPPED:
            finding.status = Status.FAIL
            finding.evidence.append(Evidence(what=what, item=item, sequence=sequence))

    def _skip(self, name: str, reason: str) -> None:
        finding = self._findings[name]
        if finding.status is Status.PASS:
            finding.status, finding.reason = Status.SKIPPED, reason

    def _skip_rest(self, reason: str) -> None:
        """Skip every rule after the last that failed."""
        names = list(self._findings)
        last = max(i for i, name in enumerate(names) if self._has_failed(name))
        for name in names[last + 1 :]:
            self._skip(name, reason)

    def _has_failed(self, name: str) -> bool:
        return self._findings[name].status is Status.FAIL

    async def _within(self, call: Awaitable[T], what: str) -> T:
        """Await the author's code; on a timeout, release requests that the engine holds."""
        return await within(call, what, timeout_s=self._timeout_s, give_up=self._engine.release)

    # Starting.

    async def _start(self, folder: Path, rule: str) -> BaseEnv | None:
        """Return an environment after `setup`, with its own engine; None, with a finding, if that fails."""
        env: BaseEnv | None = None
        try:
            env = self._make()
            env.config.use_wandb = False
            env.config.group_size = self._group_size = max(env.config.group_size, MIN_GROUP_SIZE)
            env.config.worker_timeout = self._timeout_s
            env.config.data_dir_to_save_evals = str(folder / "evals")
            engine = ProbeEngine(env.tokenizer)
            await env.server.close()
            engine.judge = judge_of(env)
            for manager in vars(env).values():  # a judge or a teacher has its own
                if isinstance(manager, ServerManager):
                    manager.servers = [engine]
            env.group_sink = self._sink
            await self._within(env.setup(), "setup()")
            engine.tokenizer = env.tokenizer
            return env
        except Exception as error:
            if env is None and isinstance(error, ConfigError):
                raise
            self._fail(rule, describe(error))
            if env is not None:
                await self._stop(env)
            return None

    async def _stop(self, env: BaseEnv) -> None:
        """Close an environment, its servers and its reward workers."""
        try:
            await self._within(close(env), "close()")
        except Exception as error:  # noqa: BLE001 - boundary: the author's code
            self._fail("no_leaked_handles", f"close() failed: {describe(error)}")
        for value in vars(env).values():
            if isinstance(value, RewardWorkers):
                await value.close()

    async def _get_items(self, env: BaseEnv) -> None:
        for index in range(self._num_items):
            self._begin_run()
            try:
                item = await self._within(env.get_next_item(), "get_next_item()")
            except Exception as error:  # noqa: BLE001 - boundary: the author's code
                self._fail("gives_items", describe(error), item=index)
                return
            finally:
                self._watch.run = 0
            if item is None:
                if index == 0:
                    self._fail("gives_items", "get_next_item() returned None", item=0)
                return
            self._items.append(item)

    def _begin_run(self) -> None:
        self._num_runs += 1
        self._watch.run = self._num_runs

    # Items.

    async def _try_item(self, env: BaseEnv, index: int, item: Any) -> None:
        """Try answers until rewards differ, then score the last ones again at another time and in another order."""
        dealt = rounds(guesses(env, item), self._group_size)[:MAX_ROUNDS]
        telling: Run | None = None
        for answers in dealt:
            run = await self._collect(env, index, item, answers)
            if run is None:
                return
            self._runs.append(run)
            scores = [score for earned in run.earned.values() for score in earned]
            if scores and (telling is None or min(scores) < max(scores)):
                telling = run
            if scores and min(scores) < max(scores):
                break
        if telling is None:
            self._barren.append((index, dealt))
            return
        with other_time():
            again = await self._collect(env, index, item, telling.answers)
        if again is not None and (other := difference(telling, again)):
            self._fail("reward_repeatable", f"{other} when scored again", item=index)
            return
        reversed_ = await self._collect(env, index, item, telling.answers[::-1])
        if reversed_ is None:
            return
        # Leaving answers out is judged by the rule group_size.
        if other := difference(telling, reversed_, may_leave_out=True):
            self._fail("reward_ignores_order", f"{other} in reversed order", item=index)

    def _judge_barren(self) -> None:
        """Fail if no item became a group; single items may give none."""
        if any(run.groups for run in self._runs) or self._has_failed("aligned"):
            return
        for index, dealt in self._barren:
            tried = ", ".join(repr(a) for answers in dealt for a in answers if isinstance(a, str))
            self._fail(
                "collects",
                f"no group came of these answers: {tried:.300}; if none of them can be right, define"
                " example_answers(self, item)",
                item=index,
            )

    async def _collect(
        self, env: BaseEnv, index: int, item: Any, answers: Sequence[Answer]
    ) -> Run | None:
        """Run one item with scripted answers; None, with a finding, when it fails."""
        self._engine.script(answers)
        self._sink.groups = []
        self._begin_run()
        try:
            groups, _ = await self._within(collect(env, copy_of(item)), "the item")
            if groups:
                await env.handle_send_to_api(
                    groups, item, do_send_to_api=False, abort_on_any_max_length_exceeded=False
                )
        except Exception as error:  # noqa: BLE001 - boundary: the author's code
            self._fail("collects", describe(cause_of(error)), item=index)
            return None
        finally:
            self._watch.run = 0
        run = Run(item=index, answers=list(answers), samples=self._engine.samples)
        for group in self._sink.groups:
            self._judge_group(env, run, group)
        await self._take_stock()
        return run

    def _judge_group(self, env: BaseEnv, run: Run, group: Any) -> None:
        try:
            checked = check_group(group, strictness=Strictness.MEANING)
        except GroupError as error:
            self._fail("aligned", str(error), item=run.item)
            return
        run.groups.append(checked)
        stated = (checked.group_overrides or {}).get("group_size", self._group_size)
        if checked.num_sequences != stated:
            self._fail(
                "group_size",
                f"{checked.num_sequences} sequences, expected {stated}",
                item=run.item,
            )
        for sequence in range(checked.num_sequences):
            view = checked.sequence(sequence)
            if self._engine.has_tokens:
                faults = faults_of(view, run.samples, env.tokenizer)
                for name, fault in (("token_exact", faults.drift), ("aligned", faults.alignment)):
                    if fault is not None:
                        self._fail(name, fault, item=run.item, sequence=sequence)
            text = text_of(view, run.samples, env.tokenizer)
            if text is not None:
                earned = run.earned.setdefault(text, [])
                earned.append(view.score)
                earned.sort()

    # Rewards.

    def _judge_rewards(self) -> None:
        judged = [run for run in self._runs if run.earned]
        samples = [sample for run in self._runs for sample in run.samples]
        if not any(run.groups for run in self._runs):
            for name in ("group_size", "aligned", "token_exact", *_REWARD_RULES):
                self._skip(name, "no group could be judged")
        if not samples:
            for name in ("token_exact", *_REWARD_RULES):
                self._skip(name, "the environment asks nothing of the engine")
        if not any(sample.tokens for sample in samples):
            self._skip(
                "token_exact",
                "the environment samples text only; managed_server() would keep the tokens",
            )
        if not judged:
            for name in _REWARD_RULES:
                self._skip(name, "no answer was found again in a group")
            return
        for cause, effects in (
            ("reward_repeatable", _REWARD_RULES[1:]),
            ("reward_ignores_order", ("empty_unrewarded", "echo_unrewarded")),
        ):
            if self._has_failed(cause):
                for name in effects:
                    self._skip(name, f"{cause} fails")
        has_difference = False
        for index in sorted({run.item for run in judged}):
            has_difference |= self._judge_earnings(index, [r for r in judged if r.item == index])
        if not has_difference:
            for run in judged:
                answers, score = list(run.earned), next(iter(run.earned.values()))[0]
                self._fail(
                    "reward_varies",
                    f"{len(answers)} answers all earned {score:g}: {', '.join(map(repr, answers)):.200}",
                    item=run.item,
                )
            for name in ("empty_unrewarded", "echo_unrewarded"):
                self._skip(name, "all rewards are equal")

    def _judge_earnings(self, index: int, runs: Sequence[Run]) -> bool:
        """Compare the rewards of useless answers to one item with the best; return whether rewards differ."""
        scores = [score for run in runs for earned in run.earned.values() for score in earned]
        worst, best = min(scores), max(scores)
        if worst == best:
            return False
        for name, answer in (("empty_unrewarded", EMPTY), ("echo_unrewarded", question_of)):
            earned = [run.most_for(answer) for run in runs]
            most = max((score for score in earned if score is not None), default=worst)
            if most >= worst + (best - worst) / 2:
                self._fail(
                    name,
                    f"earned {most:g}; all answers earned from {worst:g} to {best:g}",
                    item=index,
                )
        return True

    # What is left behind.

    async def _take_stock(self) -> None:
        """Record what is open after a run, after letting tasks that are about to end do so."""
        for _ in range(5):
            await asyncio.sleep(0)
        self._left["tasks"].append({task for task in asyncio.all_tasks() if not task.done()})
        self._left["handles"].append(open_handles())
        self._left["processes"].append(child_processes())

    async def _judge_leaks(self) -> None:
        tasks = leaked(self._left["tasks"])
        if tasks:
            await asyncio.wait(tasks, timeout=4 * GRACE_S)
            tasks = {task for task in tasks if not task.done()}
        if len(tasks) >= LEAKY_RUNS:
            name = _name_of(next(iter(tasks)))
            self._fail("no_leaked_tasks", f"every run left a task of {name} behind")
        if processes := leaked(self._left["processes"]):
            self._fail("no_leaked_processes", f"every run left one behind, like {processes.pop()}")
            self._skip("no_leaked_handles", "processes are left, and their pipes with them")
        if leaked(self._left["handles"]):
            kind = kind_of_handle(len(self._left["handles"][-2]))
            self._fail("no_leaked_handles", f"every run left a handle open; the last is a {kind}")
        if len(self._left["tasks"]) <= LEAKY_RUNS:
            for name in ("no_leaked_tasks", "no_leaked_handles", "no_leaked_processes"):
                self._skip(name, "too few items ran")

    def _judge_stalls(self) -> None:
        """Fail if a function blocked the loop in two runs; a single time may be an import."""
        for where, blocked_s in self._watch.stalls.items():
            if len(blocked_s) >= 2:
                longest_ms = 1000 * max(blocked_s.values())
                self._fail("loop_stays_free", f"{where} blocked it for up to {longest_ms:.0f} ms")

    # Cancelling.

    async def _cancel(self, env: BaseEnv) -> None:
        if self._has_failed("collects"):
            self._skip("cancellable", "items fail")
            return
        before = asyncio.all_tasks()
        self._engine.script([EMPTY])
        self._engine.hold()
        task = asyncio.ensure_future(collect(env, copy_of(self._items[0])))
        asked = asyncio.ensure_future(self._engine.asked.wait())
        try:
            await asyncio.wait(
                {task, asked}, timeout=self._timeout_s, return_when=asyncio.FIRST_COMPLETED
            )
            if task.done() or not asked.done():
                self._skip("cancellable", "the item does not wait for the engine")
                return
            task.cancel()
            await asyncio.wait({task}, timeout=GRACE_S)
            if not task.done():
                self._fail("cancellable", "it went on after task.cancel()", item=0)
            elif not task.cancelled():
                error = task.exception()
                ending = "returned" if error is None else f"raised {type(error).__name__}"
                self._fail("cancellable", f"it {ending} instead of ending cancelled", item=0)
            elif left := asyncio.all_tasks() - before - {task, asked}:
                # The engine still holds requests, so tasks that end now were cancelled with the item.
                _, pending = await asyncio.wait(left, timeout=4 * GRACE_S)
                if pending:
                    name = _name_of(next(iter(pending)))
                    text = f"a cancelled item left a task of {name} behind"
                    self._fail("no_leaked_tasks", text, item=0)
        finally:
            self._engine.release()
            asked.cancel()
            await asyncio.wait({task, asked}, timeout=GRACE_S)
            task.cancel()

    # Evaluating.

    async def _evaluate(self, env: BaseEnv, folder: Path) -> None:
        self._engine.script(["qx"])
        try:
            await self._within(env.evaluate(), "evaluate()")
            written = [path for path in (folder / "evals").rglob("*") if path.is_file()]
            if not written and not await self._logs_metrics(env):
                self._fail("evaluates", "it wrote no file and logged no metric")
        except Exception as error:  # noqa: BLE001 - boundary: the author's code
            self._fail("evaluates", describe(cause_of(error)))

    async def _logs_metrics(self, env: BaseEnv) -> bool:
        """Whether `wandb_log` would now log an evaluation metric."""
        logged: dict[str, Any] = {}

        class Recorder:
            def log(self, metrics: dict[str, Any], **options: Any) -> None:
                logged.update(metrics)

        env.rollouts_for_wandb = []
        env.wandb_run = Recorder()
        try:
            await self._within(env.wandb_log(), "wandb_log()")
        finally:
            env.wandb_run = None
        return any("eval" in key for key in logged if not key.startswith("server/"))

    # Checkpoints.

    async def _checkpoints(self, env: BaseEnv, folder: Path) -> None:
        names = ("checkpoint_is_json", "checkpoint_restores", "items_resume")
        try:
            data = save(env, folder)
        except Exception as error:  # noqa: BLE001 - boundary: the author's code
            self._fail("checkpoint_is_json", describe(error))
            for name in names[1:]:
                self._skip(name, "nothing is saved")
            return
        if data is None:
            for name in names:
                self._skip(name, "save_checkpoint() saves nothing")
            return
        if not self._resume_items:
            self._skip("items_resume", "optional: ask for it with --resume-items")
        fresh = await self._start(folder, "checkpoint_restores")
        if fresh is None:
            return
        try:
            attach_checkpoints(fresh, folder)
            fresh.load_checkpoint()
            for fault in restore_faults(env, fresh, data, save(fresh, folder) or {}):
                self._fail("checkpoint_restores", fault)
            if self._has_failed("checkpoint_restores"):
                self._skip("items_resume", "checkpoints do not restore")
            elif self._resume_items:
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
