"""Run an environment on an in-process engine, without a hub, and judge it by the rules of `report.py`.

Items run one after another, each several times with the same answers, so that every difference has one cause. A rule
passes only if something was seen that could have broken it (`Verdicts.look`); it is not judged if an earlier failure
makes its verdict meaningless: one fault, one finding. `execution.py` runs items, `earnings.py` judges rewards,
`leftovers.py` what runs leave behind. Called by `python env.py check` and by authors' tests through `check_env`.
"""

from __future__ import annotations

import contextlib
import io
import random
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np

from atroposlib.checker import clock, probes
from atroposlib.checker.answers import gold_result, guesses, knows_answers, rounds
from atroposlib.checker.calls import (
    child_processes,
    describe,
    end_processes,
    heap_set_apart,
    run_in_own_loop,
)
from atroposlib.checker.checkpoints import attach_checkpoints, is_same, restore_faults, save
from atroposlib.checker.earnings import EARNING_RULES, USELESS_ANSWERS, Earnings
from atroposlib.checker.engine import Answer, PairTokenizer
from atroposlib.checker.execution import Execution, hint_of, seed_all
from atroposlib.checker.leftovers import judge_cancelling, judge_leaks, judge_stalls
from atroposlib.checker.report import BY_NAME, Report, Verdicts
from atroposlib.checker.runs import Run, difference
from atroposlib.envs.base import APIServerConfig, BaseEnv, ExtraServers
from atroposlib.errors import ConfigError, cause_of
from atroposlib.utils.wording import nearest

MAX_ROUNDS = 6
"""Maximum groups of guesses per item, tried until rewards differ."""
MAX_PROBED_ITEMS = 2
"""Items whose right answer is varied."""
MIN_CHANGES = 4
"""Changes before answers are scored again that are always tried; the first item is scored at further times."""
MAX_CHANGES_CPU_S = 2.0
MAX_CHANGES_S = 15.0
"""Time for these: CPU time, so that a busy machine tries as many, and elapsed time, for items that wait."""


class Variation(NamedTuple):
    """What is changed before answers are scored again."""

    when: str
    hint: str
    """What to do if it changes a score."""
    seed: int = 0
    moved_clock: AbstractContextManager[None] | None = None


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
    ConfigError for an unknown rule or an invalid configuration, EnvError if the environment exits the process in a
    task, or `example_answers` or `gold_answer` fails.

    While it runs, the check controls the clock, the random state and the group size (at least 8).
    """
    for name in skip:
        if name not in BY_NAME:
            raise ConfigError(f"there is no rule {name!r} to skip; {nearest(name, BY_NAME)}")
        if name in ("starts", "gives_items", "collects"):
            raise ConfigError(f"{name} cannot be skipped: without it nothing can be judged")
    if num_items < 1:
        raise ConfigError(f"num_items: got {num_items}; at least one item is needed")
    offline = _offline_class(env_cls, tokenizer)
    verdicts = Verdicts()
    verdicts.skip("not judged, as asked for", *skip)
    execution = Execution(
        env_cls=env_cls,
        make=lambda: (make or _make_default)(offline),
        verdicts=verdicts,
        timeout_s=timeout_s,
        seed=seed,
    )
    check = _Check(execution=execution, num_items=num_items, resume_items=resume_items)
    python_state, numpy_state = random.getstate(), np.random.get_state()
    seed_all(seed)
    try:
        return run_in_own_loop(check.run())
    finally:
        random.setstate(python_state)
        np.random.set_state(numpy_state)


def _offline_class(env_cls: type[BaseEnv], tokenizer: Any = None) -> type[BaseEnv]:
    """Return a subclass that needs no network: its own tokenizer, and made-up servers for a judge or a teacher."""
    namespace: dict[str, Any] = {
        "__module__": env_cls.__module__,
        "__qualname__": env_cls.__qualname__,
        "__doc__": env_cls.__doc__,
    }
    if tokenizer is not None or env_cls.load_tokenizer is BaseEnv.load_tokenizer:
        given = PairTokenizer() if tokenizer is None else tokenizer
        namespace["load_tokenizer"] = lambda self: given
        namespace["load_teacher_tokenizer"] = lambda self, source: given
    made_up = APIServerConfig(model_name="check", base_url="http://check.invalid/v1")
    extra = {
        name: ExtraServers(servers.keyword, servers.default or made_up)
        for name, servers in env_cls.extra_servers().items()
    }
    namespace["extra_servers"] = classmethod(lambda cls: extra)
    return type(env_cls.__name__, (env_cls,), namespace)


def _make_default(env_cls: type[BaseEnv]) -> BaseEnv:
    config, servers = env_cls.config_init()
    extra: dict[str, Any] = dict(env_cls.extra_servers().values())
    config = config.model_copy(update={"use_wandb": False})
    return env_cls(config, servers, slurm=False, testing=True, **extra)


@dataclass(kw_only=True)
class _Check:
    """What is tried with an environment, in order."""

    execution: Execution
    num_items: int
    resume_items: bool
    good_answers: dict[int, Answer] = field(default_factory=dict)
    """A right answer by item, for items that have one with a higher reward than others."""

    def __post_init__(self) -> None:
        self.verdicts = self.execution.verdicts
        self.earnings = Earnings(verdicts=self.verdicts)

    async def run(self) -> Report:
        env_cls = self.execution.env_cls
        began = time.monotonic()
        with heap_set_apart():
            processes_before = child_processes()
            with tempfile.TemporaryDirectory() as folder, self.execution.watch:
                await self._judge(Path(folder))
            end_processes(child_processes() - processes_before)
        return Report(
            environment=env_cls.name or env_cls.__name__,
            findings=list(self.verdicts.findings.values()),
            num_items=len(self.execution.items),
            num_groups=sum(len(run.groups) for run in self.earnings.runs),
            duration_s=time.monotonic() - began,
        )

    async def _judge(self, folder: Path) -> None:
        env = await self.execution.start(folder, "starts")
        if env is None:
            self.verdicts.skip("the environment does not start", *BY_NAME)
            return
        try:
            await self._get_items(env)
            if not self.execution.items:
                self.verdicts.skip("there are no items", *BY_NAME.keys() - {"starts"})
                return
            self.earnings.knows_answers = await self.execution.ask(
                lambda: any(knows_answers(env, item) for item in self.execution.items),
                "example_answers()",
            )
            for index in range(len(self.execution.items)):
                await self._try_item(env, index)
            self.earnings.judge_answers()
            self.earnings.judge_rewards(
                num_items=len(self.execution.items), has_fatal=bool(self.execution.fatal)
            )
            await judge_leaks(self.execution)
            judge_stalls(self.execution)
            await judge_cancelling(self.execution, env)
            await self._evaluate(env, folder)
            await self._checkpoints(env, folder)
        finally:
            await self.execution.stop(env)

    async def _get_items(self, env: BaseEnv) -> None:
        for index in range(self.num_items):
            try:
                item = await self.execution.within(env.get_next_item(), "get_next_item()")
            except Exception as error:  # noqa: BLE001 - boundary: the author's code
                self.verdicts.fail("gives_items", describe(error), item=index, hint=hint_of(error))
                return
            if item is None:
                if index == 0:
                    self.verdicts.fail("gives_items", "get_next_item() returned None", item=0)
                return
            self.execution.items.append(item)
            self.verdicts.look("gives_items")

    async def _try_item(self, env: BaseEnv, index: int) -> None:
        """Try answers until rewards differ; then repeat the last ones, and vary the right one."""
        telling: Run | None = None
        item = self.execution.items[index]
        found = await self.execution.ask(lambda: guesses(env, item), "example_answers()")
        for answers in rounds(found, self.execution.group_size)[:MAX_ROUNDS]:
            run = await self.execution.collect(env, index, answers)
            if run is None:
                continue
            self.earnings.runs.append(run)
            if run.has_difference or (telling is None and run.scores):
                telling = run
            if run.has_difference:
                break
        if telling is None:
            return
        if await self._is_repeatable(env, telling):
            again = await self.execution.collect(env, index, telling.answers[::-1])
            reversed_order = Variation("in reversed order", "")
            # Leaving answers out is judged by the rule group_size.
            self._compare("reward_ignores_order", telling, again, reversed_order, True)
        if telling.has_difference:
            self.good_answers[index] = min(telling.best_answers(), key=probes.rank)
            if len(self.good_answers) <= MAX_PROBED_ITEMS:
                await self._vary(env, telling)

    async def _is_repeatable(self, env: BaseEnv, telling: Run) -> bool:
        """Score the same answers again: unchanged, with other random numbers, and at other times."""
        began, used = time.monotonic(), time.process_time()
        for num, change in enumerate(self._changes()):
            is_late = (
                time.monotonic() - began > MAX_CHANGES_S
                or time.process_time() - used > MAX_CHANGES_CPU_S
            )
            if num >= MIN_CHANGES and (telling.item > 0 or is_late):
                break
            # At another time a deadline may pass: only a score that differs is a fault.
            may_fail = change.moved_clock is not None
            with change.moved_clock or nullcontext():
                again = await self.execution.collect(
                    env, telling.item, telling.answers, seed=change.seed, may_fail=may_fail
                )
            if not self._compare("reward_repeatable", telling, again, change, may_fail):
                return False
        return True

    def _changes(self) -> Iterator[Variation]:
        yield Variation(
            "when scored again", "score without memory: no earlier answers, no generator"
        )
        yield Variation("with other random numbers", "score without random numbers", seed=1)
        load = "do not score by how long the code takes: that depends on the machine's load"
        fast = clock.fast_clocks(self.execution.watch.author_files)
        yield Variation("when time passes faster", load, moved_clock=fast)
        date = "score without the clock: no date and no time of day"
        for index in range(1, clock.NUM_TIMES):
            yield Variation("at another time", date, moved_clock=clock.other_time(index))

    def _compare(
        self, rule: str, telling: Run, again: Run | None, change: Variation, may_leave_out: bool
    ) -> bool:
        """Fail `rule` if a repetition has other rewards; return whether it has none."""
        if again is None:
            return True
        other = difference(telling, again, may_leave_out=may_leave_out)
        if other is None:
            self.verdicts.look(rule, len(telling.earned.keys() & again.earned.keys()))
        else:
            self.verdicts.fail(rule, f"{other} {change.when}", item=telling.item, hint=change.hint)
        return other is None

    async def _vary(self, env: BaseEnv, telling: Run) -> None:
        """Give answers that are made from a right one, in groups with it and with the worst one."""
        index, good = telling.item, self.good_answers[telling.item]
        result = probes.result_of(good) if isinstance(good, str) else None
        asked: list[probes.Probe] = []
        if telling.num_verdicts:
            reason = "a judge or a reward model scores, and a scripted one stands in for it"
            self.verdicts.skip(
                reason, *(name for name in EARNING_RULES if name not in USELESS_ANSWERS)
            )
        else:
            asked += probes.copied(result, telling.samples[0].prompt_text)
            items = self.execution.items
            golds = await self.execution.ask(
                lambda: [gold_result(env, item) for item in items], "gold_answer()"
            )
            gold = golds[index]
            if result is not None:
                asked += probes.variants(result)
            if result is not None and gold is not None and probes.is_same(result.stated, gold):
                others = [other for other in golds if other and not probes.is_same(other, gold)]
                asked += probes.exploits(result, list(dict.fromkeys(others)))
        if len(self.good_answers) == 1:
            asked += probes.harsh(result)
        bad = telling.worst_answer()
        room = max(1, telling.num_given - 2)
        for start in range(0, len(asked), room):
            chunk = asked[start : start + room]
            run = await self.execution.collect(
                env, index, [good, bad, *(probe.answer for probe in chunk)]
            )
            if run is not None:
                self.earnings.judge_probes(run, good, bad, chunk)

    async def _evaluate(self, env: BaseEnv, folder: Path) -> None:
        self.execution.engine.script([*self.good_answers.values(), "qx"][:1])
        try:
            with contextlib.redirect_stdout(
                io.StringIO()
            ):  # a table of the scripted engine's figures
                await self.execution.within(env.evaluate(), "evaluate()")
            written = any(path.is_file() for path in (folder / "evals").rglob("*"))
            if not written and not await self._logs_metrics(env):
                self.verdicts.fail("evaluates", "it wrote no file and logged no metric")
            self.verdicts.look("evaluates")
        except Exception as error:  # noqa: BLE001 - boundary: the author's code
            if self.verdicts.has_failed("grader_survives"):
                self.verdicts.skip("grader_survives fails", "evaluates")
            self.verdicts.fail(
                "evaluates", describe(cause_of(error)), hint=hint_of(cause_of(error))
            )

    async def _logs_metrics(self, env: BaseEnv) -> bool:
        """Whether `wandb_log` would now log an evaluation metric."""
        logged: dict[str, Any] = {}
        env.rollouts_for_wandb = []
        env.wandb_run = SimpleNamespace(log=lambda metrics, **options: logged.update(metrics))
        try:
            await self.execution.within(env.wandb_log(), "wandb_log()")
        finally:
            env.wandb_run = None
        return any("eval" in key for key in logged if not key.startswith("server/"))

    async def _checkpoints(self, env: BaseEnv, folder: Path) -> None:
        rules = ("checkpoint_is_json", "checkpoint_restores", "items_resume")
        try:
            data = await self.execution.call(lambda: save(env, folder), "save_checkpoint()")
        except Exception as error:  # noqa: BLE001 - boundary: the author's code
            self.verdicts.fail("checkpoint_is_json", describe(error))
            self.verdicts.skip("nothing is saved", *rules)
            return
        if data is None:
            self.verdicts.skip("save_checkpoint() saves nothing", *rules)
            return
        self.verdicts.look("checkpoint_is_json", len(data))
        if not self.resume_items:
            self.verdicts.skip("optional: ask for it with --resume-items", "items_resume")
        fresh = await self.execution.start(folder, "checkpoint_restores")
        if fresh is None:
            return
        try:
            attach_checkpoints(fresh, folder)
            await self.execution.call(fresh.load_checkpoint, "load_checkpoint()")
            self.verdicts.look("checkpoint_restores", len(data))
            again = await self.execution.call(lambda: save(fresh, folder), "save_checkpoint()")
            for fault in restore_faults(env, fresh, data, again or {}):
                self.verdicts.fail("checkpoint_restores", fault)
            if self.verdicts.has_failed("checkpoint_restores"):
                self.verdicts.skip("checkpoints do not restore", "items_resume")
            elif self.resume_items:
                wanted = await self.execution.within(env.get_next_item(), "get_next_item()")
                got = await self.execution.within(fresh.get_next_item(), "get_next_item()")
                self.verdicts.look("items_resume")
                if not is_same(wanted, got):
                    self.verdicts.fail(
                        "items_resume", f"expected {wanted!r:.100}, got {got!r:.100}"
                    )
        except Exception as error:  # noqa: BLE001 - boundary: the author's code
            self.verdicts.fail("checkpoint_restores", describe(error), hint=hint_of(error))
        finally:
            await self.execution.stop(fresh)
