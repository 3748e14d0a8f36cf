"""Run an environment on an in-process engine, without a hub, and judge it by the rules of `report.py`.

Items run one after another, each several times with the same answers, so that every difference has one cause. A rule
passes only if something was seen that could have broken it (`Report.look`); it is not judged if an earlier failure
makes its verdict meaningless: one fault, one finding. `execution.py` runs items, `earnings.py` judges rewards,
`leftovers.py` what runs leave behind. Called by `python env.py check` and by authors' tests through `check_env`.
"""

from __future__ import annotations

import contextlib
import io
import math
import random
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np

from atroposlib.checker import probes
from atroposlib.checker.calls import child_processes, end_processes, run_in_own_loop
from atroposlib.checker.checkpoints import attach_checkpoints, restore_faults, save
from atroposlib.checker.earnings import EARNING_RULES, Earnings
from atroposlib.checker.engine import Answer, PairTokenizer, question_of, shown
from atroposlib.checker.execution import BudgetEnded, Execution, seed_all
from atroposlib.checker.guesses import (
    EMPTY,
    fields_with,
    gold_result,
    guesses,
    knows_answers,
    rounds,
)
from atroposlib.checker.leftovers import judge_leaks, judge_stalls
from atroposlib.checker.report import NAMES, Report
from atroposlib.checker.rows import judge_held_out, walk_rows
from atroposlib.checker.runs import Run, difference
from atroposlib.checker.tools import ToolCalls
from atroposlib.envs.collecting import next_item
from atroposlib.envs.hooks import EnvHooks, ExtraServers
from atroposlib.errors import ConfigError
from atroposlib.inference.config import APIServerConfig
from atroposlib.utils.wording import nearest

MAX_ROUNDS = 6
"""Maximum groups of guesses per item, tried until rewards differ."""
MAX_PROBED_ITEMS = 2
"""Items whose right answer is varied."""
MAX_EVALUATED = 8
"""Evaluation rows of a `DatasetEnv` that are evaluated."""
USELESS = (
    probes.Probe("empty_unrewarded", EMPTY),
    probes.Probe("echo_unrewarded", question_of),
)
"""Answers that are wrong for every question, and also judged where a scripted judge scores."""
MAX_BOMB_S = 2.0
"""Time of a reward worker, and CPU time of this process, for an answer that is made to exhaust it."""


class Variation(NamedTuple):
    """What is changed before answers are scored again."""

    rule: str
    """The rule that fails if a score changes."""
    when: str
    hint: str = ""
    """What to do then."""
    seed: int = 0
    order: int = 1
    """-1: the answers are given in reversed order."""


_MEMORY = "score without memory: no earlier answers, no generator"
_CHANGES = (
    Variation("reward_repeatable", "when scored again", _MEMORY),
    Variation(
        "reward_repeatable", "with other random numbers", "score without random numbers", seed=1
    ),
    Variation("reward_ignores_order", "in reversed order", order=-1),
)
_AFTER_ATTACKS = Variation(
    "reward_repeatable",
    "after hostile answers",
    "an answer must not change later scores: keep no state, and run no answer",
)


def check_env(
    env_cls: type[EnvHooks],
    *,
    num_items: int = 3,
    seed: int = 0,
    skip: Sequence[str] = (),
    make: Callable[[type[EnvHooks]], EnvHooks] | None = None,
    tokenizer: Any = None,
    timeout_s: float = 30.0,
    budget_s: float = math.inf,
    walks_all_rows: bool = False,
    samples: bool = True,
    on_phase: Callable[[str], None] = lambda done: None,
) -> Report:
    """Check an environment class in its own event loop and return a report.

    `skip` names rules not to judge. `make(cls)` constructs an environment (default: from `config_init`); it is called
    several times, with `env_cls` or a subclass that has an offline tokenizer, which `tokenizer` replaces. `timeout_s`
    bounds each call of the author's code; after `budget_s` no item runs any more, and the rules that saw nothing are
    not checked. `walks_all_rows`: every row is looked at, however long it takes. `samples` False: the rows alone are
    judged. `on_phase` is called with what was done. Raises ConfigError for an unknown rule or an invalid configuration,
    EnvError if the environment exits the process in a task, or `example_answers` or `gold_answer` fails.

    While it runs, the check controls the random state and the group size (at least 8).
    """
    for name in skip:
        if name not in NAMES:
            raise ConfigError(f"there is no rule {name!r} to skip; {nearest(name, NAMES)}")
        if name in ("starts", "gives_items", "collects"):
            raise ConfigError(f"{name} cannot be skipped: without it nothing can be judged")
    if num_items < 1:
        raise ConfigError(f"num_items: got {num_items}; at least one item is needed")
    offline = _offline_class(env_cls, tokenizer)
    report = Report(environment=env_cls.name or env_cls.__name__)
    report.skip("not judged, as asked for", *skip)
    check = _Check(
        env_cls=env_cls,
        make=lambda: (make or _make_default)(offline),
        report=report,
        timeout_s=timeout_s,
        seed=seed,
        num_items=num_items,
        deadline=time.monotonic() + budget_s,
        walks_all_rows=walks_all_rows,
        samples=samples,
        on_phase=on_phase,
    )
    python_state, numpy_state = random.getstate(), np.random.get_state()
    seed_all(seed)
    try:
        run_in_own_loop(check.judge())
        return report
    finally:
        random.setstate(python_state)
        np.random.set_state(numpy_state)


def _offline_class(env_cls: type[EnvHooks], tokenizer: Any = None) -> type[EnvHooks]:
    """Return a subclass that needs no network: its own tokenizer, and made-up servers for a judge or a teacher."""
    namespace: dict[str, Any] = {
        "__module__": env_cls.__module__,
        "__qualname__": env_cls.__qualname__,
        "__doc__": env_cls.__doc__,
    }
    if tokenizer is not None or env_cls.load_tokenizer is EnvHooks.load_tokenizer:
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


def _make_default(env_cls: type[EnvHooks]) -> EnvHooks:
    config, servers = env_cls.config_init()
    extra: dict[str, Any] = dict(env_cls.extra_servers().values())
    config = config.model_copy(update={"use_wandb": False})
    return env_cls(config, servers, slurm=False, testing=True, **extra)


@dataclass(kw_only=True)
class _Check(Execution):
    """What is tried with an environment, in order."""

    num_items: int
    walks_all_rows: bool
    samples: bool
    on_phase: Callable[[str], None]
    good_answers: dict[int, Answer] = field(default_factory=dict)
    """A right answer by item, for items that have one with a higher reward than others."""
    prompts: dict[int, str] = field(default_factory=dict)
    """The first prompt of each item."""
    canaries: dict[Path, str] = field(default_factory=dict)
    """Code by the file that it makes."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.earnings = Earnings(report=self.report)
        self._phase_began = time.monotonic()

    async def judge(self) -> None:
        """Fill the report."""
        began = time.monotonic()
        processes_before = child_processes()
        try:
            with (
                tempfile.TemporaryDirectory() as folder,
                tempfile.TemporaryDirectory() as public_folder,
                self.watch,
                self.counting_unclosed(),
            ):
                self.canaries = probes.canaries(Path(public_folder))
                await self._start_and_judge(Path(folder))
        finally:
            end_processes(child_processes() - processes_before)
        self.report.num_items = len(self.items)
        self.report.num_groups = sum(len(run.groups) for run in self.earnings.runs)
        self.report.duration_s = time.monotonic() - began

    async def _start_and_judge(self, folder: Path) -> None:
        env = await self.start(folder, "starts")
        if env is None:
            self.report.skip("the environment does not start", *NAMES)
            return
        self.env = env
        try:
            await self._get_items()
            if not self.items:
                self.report.skip("there are no items", *NAMES[1:])
                return
            self._done("started")
            await walk_rows(self, is_whole=self.walks_all_rows)
            judge_held_out(self)
            self._done("rows walked")
            if not self.samples:
                self.report.skip("no item was sampled, as asked for", *NAMES)
                return
            await self._sample(folder)
        finally:
            await self.stop(env)

    async def _sample(self, folder: Path) -> None:
        """Judge what only items with scripted answers show."""
        env, tools = self.env, ToolCalls(self)
        await tools.try_all()
        self.earnings.knows_answers = await self.ask(
            lambda: any(knows_answers(env, item) for item in self.items), "example_answers()"
        )
        has_time = True
        try:
            for index in range(len(self.items)):
                await self._try_item(index)
                self._done(f"item {index} tried")
        except BudgetEnded:
            has_time = False
        tools.judge()
        self.earnings.judge_answers()
        self.earnings.judge_rewards(has_fatal=bool(self.fatal))
        self._ask_about_stated_golds()
        await judge_leaks(self)
        judge_stalls(self)
        await self._evaluate(folder)
        self._done("evaluated")
        await self._checkpoints(folder)
        self._done("restored a checkpoint")
        if not has_time:
            self.report.end_budget()

    def _done(self, what: str) -> None:
        now = time.monotonic()
        self.on_phase(f"{what} ({now - self._phase_began:.1f} s)")
        self._phase_began = now

    async def _get_items(self) -> None:
        for index in range(self.num_items):
            item = None
            with self.judging("gives_items", item=index):
                item = await self.within(next_item(self.env), "get_next_item()")
                if item is None and index == 0:
                    self.report.fail("gives_items", "get_next_item() returned None", item=0)
            if item is None:
                return
            self.items.append(item)
            self.report.look("gives_items")

    async def _try_item(self, index: int) -> None:
        """Try answers until rewards differ; then repeat the last ones, and vary the right one."""
        telling: Run | None = None
        item = self.items[index]
        found = await self.ask(lambda: guesses(self.env, item), "example_answers()")
        for answers in rounds(found, self.group_size)[:MAX_ROUNDS]:
            run = await self.collect(index, answers)
            if run is None:
                continue
            self.earnings.runs.append(run)
            if run.has_difference or (telling is None and run.scores):
                telling = run
            if run.has_difference:
                break
        if telling is None:
            return
        self.prompts[index] = telling.samples[0].prompt_text
        await self._score_again(telling)
        good = min(telling.best_answers(), key=probes.rank)
        form = probes.result_of(good, is_short=False) if isinstance(good, str) else None
        await self._run_code(telling, form)
        if telling.has_difference:
            self.good_answers[index] = good
            await self._vary(telling, form)
        if again := await self.collect(index, telling.answers):
            self._is_same(telling, again, _AFTER_ATTACKS)

    async def _score_again(self, telling: Run) -> None:
        """Score the same answers with one change after another, until one has other rewards."""
        for change in _CHANGES:
            answers = telling.answers[:: change.order]
            again = await self.collect(telling.item, answers, seed=change.seed)
            if again is not None and not self._is_same(telling, again, change):
                return

    def _is_same(self, run: Run, again: Run, change: Variation) -> bool:
        # In another order fewer answers may be given, which the rule group_size judges.
        if other := difference(run, again, may_leave_out=change.order < 0):
            what = f"{other} {change.when}"
            self.report.fail(change.rule, what, item=run.item, hint=change.hint)
        self.report.look(change.rule, len(run.earned.keys() & again.earned.keys()))
        return other is None

    async def _run_code(self, telling: Run, form: probes.Result | None) -> None:
        """Give answers that are code, in the form of a right one and in their own; then look for the files it makes."""
        env: Any = self.env
        rule, codes = "answer_runs_no_code", [*self.canaries.values()]
        if self.report.has_failed(rule):
            return
        if env.runs_model_code and not env.is_isolated():
            self.report.skip("programs of the model are not isolated on this machine", rule)
        blocks = [code for code in codes if "```" in code]
        asked = codes if form is None else [*map(form.replaced, codes), *blocks]
        for start in range(0, len(asked), self.group_size):
            run = await self.collect(telling.item, asked[start : start + self.group_size])
            self.report.look(rule, 0 if run is None else run.num_given)
        if ran := [shown(code) for path, code in self.canaries.items() if path.exists()]:
            self.report.fail(rule, f"files were made by {', '.join(ran)}", item=telling.item)

    async def _vary(self, telling: Run, form: probes.Result | None) -> None:
        """Give answers that are made from a right one, in groups with it and with the worst one."""
        good = self.good_answers[telling.item]
        result = probes.result_of(good) if isinstance(good, str) else None
        is_probed = len(self.good_answers) <= MAX_PROBED_ITEMS
        asked = [*USELESS] if is_probed else []
        if telling.num_verdicts:
            reason = "a judge or a reward model scores, and a scripted one stands in for it"
            self.report.skip(reason, *{*EARNING_RULES} - {probe.rule for probe in USELESS})
        else:
            if self.earnings.knows_answers:
                asked += probes.junk(form)
            if is_probed:
                asked += await self._probes_of(telling, result)
        if len(self.good_answers) == 1:
            asked += probes.harsh(result)
        await self._judge(telling, asked)
        if len(self.good_answers) == 1 and not self.report.has_failed("answer_runs_no_code"):
            await self._exhaust(telling, form)

    async def _probes_of(self, telling: Run, result: probes.Result | None) -> list[probes.Probe]:
        """Return the wrong, restated and rewritten answers that are made from a right one."""
        golds = await self.ask(
            lambda: [gold_result(self.env, item) for item in self.items], "gold_answer()"
        )
        gold = golds[telling.item]
        names = fields_with(gold, self.items[telling.item])
        asked = [*probes.copied(result, self.prompts[telling.item], names, gold)]
        if result is not None:
            asked += probes.asked_for(result, self.prompts[telling.item])
            asked += probes.variants(result)
        if result is not None and gold is not None and probes.is_same(result.stated, gold):
            others = [other for other in golds if other and not probes.is_same(other, gold)]
            asked += probes.exploits(result, list(dict.fromkeys(others)))
            if getattr(self.env, "allows_restating", False):
                self.report.skip("allows_restating is set", "restatement_unrewarded")
            asked += probes.restated(result)
        return asked

    def _ask_about_stated_golds(self) -> None:
        """Pass no environment whose gold answers stand in their own prompts and not in those of other items."""
        golds = {i: gold_result(self.env, self.items[i]) or "" for i in self.prompts}
        own = [i for i, gold in golds.items() if gold and gold in self.prompts[i]]
        others = [i for i in own for j, text in self.prompts.items() if i != j and golds[i] in text]
        if len(golds) > 1 and len(own) > len(golds) / 2 and not others:
            what = f"{len(own)} of {len(golds)} gold answers stand in their own prompts and in no other"
            self.report.skip(f"{what}: is the task to find them there?", "copy_unrewarded")

    async def _judge(self, telling: Run, asked: Sequence[probes.Probe]) -> None:
        index, bad = telling.item, telling.worst_answer()
        good = self.good_answers[index]
        room = max(1, telling.num_given - 2)
        num_probes = max(1, room // max((len(probe.answers) for probe in asked), default=1))
        for start in range(0, len(asked), num_probes):
            chunk = asked[start : start + num_probes]
            answers = [answer for probe in chunk for answer in probe.answers]
            rest = [f"qx{i}" for i in range(room - len(answers))]  # so that none is given twice
            run = await self.collect(index, [good, bad, *answers, *rest])
            if run is not None:
                self.earnings.judge_probes(run, good, bad, chunk)

    async def _exhaust(self, telling: Run, form: probes.Result | None) -> None:
        """Give answers that take a grader too much time or memory, until one occupies this process."""
        config = self.env.config
        limit_s = min(getattr(config, "reward_timeout_s", MAX_BOMB_S), MAX_BOMB_S)
        self.env.config = config.model_copy(update={"reward_timeout_s": limit_s})
        for probe in probes.bombs(form, is_wrong=self.earnings.knows_answers):
            began = time.process_time()
            await self._judge(telling, [probe])
            if (used_s := time.process_time() - began) > MAX_BOMB_S:
                what = f"{shown(probe.answer)} took {used_s:.1f} s of this process"
                hint = "score in a process with limits: in_worker, or envs.rewards.RewardWorkers"
                self.report.fail("grader_survives", what, item=telling.item, hint=hint)
            if self.report.has_failed("grader_survives"):
                break
        self.env.config = config

    async def _evaluate(self, folder: Path) -> None:
        report = self.report
        self.engine.script([*self.good_answers.values(), "qx"][:1])
        env: Any = self.env
        if hasattr(env, "eval_rows"):
            env.eval_rows = env.eval_rows[:MAX_EVALUATED]
        with self.judging("evaluates"):
            with contextlib.redirect_stdout(io.StringIO()):  # a table of figures
                await self.within(self.env.evaluate(), "evaluate()")
            written = any(path.is_file() for path in (folder / "evals").rglob("*"))
            if not written and not await self._logs_metrics():
                report.fail("evaluates", "it wrote no file and logged no metric")
            report.look("evaluates")
        if report.has_failed("evaluates"):
            report.dismiss("grader_survives", "evaluates")

    async def _logs_metrics(self) -> bool:
        """Whether `wandb_log` would now log an evaluation metric."""
        logged: dict[str, Any] = {}
        self.env.rollouts_for_wandb = []
        self.env.wandb_run = SimpleNamespace(log=lambda metrics, **options: logged.update(metrics))
        try:
            await self.within(self.env.wandb_log(), "wandb_log()")
        finally:
            self.env.wandb_run = None
        return any("eval" in key for key in logged if not key.startswith("server/"))

    async def _checkpoints(self, folder: Path) -> None:
        report, saved = self.report, None
        with self.judging("checkpoint_is_json"):
            saved = await self.call(lambda: save(self.env, folder), "save_checkpoint()")
        if saved is None:
            reason = "save_checkpoint() saves nothing"
            report.skip(reason, "checkpoint_is_json", "checkpoint_restores", is_exempt=True)
            return
        report.look("checkpoint_is_json", len(saved))
        fresh = await self.start(folder, "checkpoint_restores")
        if fresh is None:
            return
        with self.judging("checkpoint_restores"):
            attach_checkpoints(fresh, folder)
            await self.call(fresh.load_checkpoint, "load_checkpoint()")
            report.look("checkpoint_restores", len(saved))
            again = await self.call(lambda: save(fresh, folder), "save_checkpoint()")
            for fault in restore_faults(self.env, fresh, saved, again or {}):
                report.fail("checkpoint_restores", fault)
        await self.stop(fresh)
