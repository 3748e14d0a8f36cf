"""The conformance check: every broken environment fails its own rule and no other, sound ones fail none."""

from __future__ import annotations

import asyncio
import functools
import json
import multiprocessing
import os
import random
import signal
import subprocess
import sys
import time
import unittest.mock
import weakref
from pathlib import Path
from typing import Any

import pytest

from atroposlib.checker import RULES, Report, Status, calls, check_env, leftovers
from atroposlib.checker.calls import child_processes, end_processes
from atroposlib.checker.engine import PairTokenizer, tokens_apart
from atroposlib.envs.base import BaseEnv
from atroposlib.errors import ConfigError, EnvError
from atroposlib.runtime.env_command import run_environment
from atroposlib.utils.loop_watch import LoopBlocked, LoopWatch
from tests.checker.broken_environments import (
    NOTED,
    SLEEP,
    AnswerRetokenized,
    Broken,
    FixedData,
    SetupFails,
    Sums,
    TextOnly,
    leaving,
)
from tests.checker.corpus import BROKEN, SOUND, broken, check, tidied
from tests.checker.reward_environments import (
    Calculator,
    Choices,
    Maze,
    Preferred,
    Products,
    Terms,
)
from tests.tiny_model import make_tiny_tokenizer

NAMES = [rule.name for rule in RULES]
OF_REWARDS = NAMES[NAMES.index("reward_repeatable") : NAMES.index("no_leaked_tasks")]
ConstantReward, EmptyIsRight, NeverAGroup, NoItems, RandomReward = map(
    broken, ("ConstantReward", "EmptyIsRight", "NeverAGroup", "NoItems", "RandomReward")
)


@functools.cache
def report_of(env_cls: type[BaseEnv]) -> Report:
    return check(env_cls)


IN_EVERY_RUN = (
    *("Sums", "TwoTurns", "Rows", "Choices", "Guess", "SetupFails", "ItemsRunOut", "CollectFails"),
    *("OneSequenceShort", "MasksShifted", "AnswerRetokenized", "RandomReward", "EmptyIsRight"),
    *("Containment", "FileLeftOpen", "SleepsInScoring", "LoadsNothing", "CallsRenamed", "ExactBox"),
)
"""Of the corpus; the others are drills."""


def test_what_every_run_checks_is_in_the_corpus() -> None:
    names = {case.env_cls.__name__ for case in [*BROKEN, *NOTED]}
    assert {*IN_EVERY_RUN} <= names | {env_cls.__name__ for env_cls in SOUND}


def _case(env_cls: type[BaseEnv], value: Any, *, rule: str = "") -> Any:
    name = env_cls.__name__
    marks = () if name in IN_EVERY_RUN else pytest.mark.drill
    return pytest.param(value, marks=marks, id=f"{rule}-{name}" if rule else name)


@pytest.mark.parametrize("env_cls", [_case(env_cls, env_cls) for env_cls in SOUND])
def test_sound_environment_fails_no_rule(env_cls: type[BaseEnv]) -> None:
    report = report_of(env_cls)
    assert report.failed == [], report.to_text()


@pytest.mark.parametrize("case", [_case(case.env_cls, case, rule=case.rule) for case in BROKEN])
def test_broken_environment_fails_its_own_rule_alone(
    case: Broken, monkeypatch: pytest.MonkeyPatch
) -> None:
    if case.rule == "no_leaked_tasks":  # waits for the tasks, which do not end
        monkeypatch.setattr(leftovers, "GRACE_S", 0.1)
    report = report_of(case.env_cls)
    assert report.failed == [case.rule], report.to_text()
    assert case.hint in report.to_text()


@pytest.mark.parametrize("case", [_case(case.env_cls, case) for case in NOTED])
def test_a_strict_reward_is_noted_and_no_fault(case: Broken) -> None:
    report = check(case.env_cls)
    assert report.failed == [], report.to_text()
    assert case.hint in "".join(report.finding(case.rule).notes)


def test_every_rule_has_an_environment_that_breaks_it() -> None:
    assert {case.rule for case in BROKEN} == {*NAMES}


def test_a_rule_passes_only_with_something_that_could_break_it() -> None:
    for env_cls in (Sums, Choices, Maze, Preferred):
        for finding in report_of(env_cls).findings:
            has_looked = finding.num_looks > 0 and not finding.reason
            assert (finding.status is Status.PASS) is has_looked, finding
            assert bool(finding.why_not_checked) is not has_looked, finding


def test_gold_answers_that_stand_in_their_prompts_are_asked_about() -> None:
    class Telling(Products):
        def prompt(self, row: Any) -> str:
            return f"Write {row['question']} as {row['answer']}."

        def gold_answer(self, row: Any) -> str:
            return str(row["answer"])

        def score(self, row: Any, answer: str) -> float:
            return float(answer.strip() == row["answer"])

    report = check(Telling)
    assert report.failed == []
    assert report.not_checked == ["copy_unrewarded"]
    assert "not checked: 2 of 2 gold answers stand in their own prompts" in report.to_text()


def test_what_cannot_be_judged_is_not_passed() -> None:
    unseen = ["copy_unrewarded", "restatement_unrewarded", "variants_rewarded"]
    does_not_apply = ["rows_work", "evaluation_held_out", "tools_work", *unseen]
    assert [
        each.rule.name for each in report_of(Sums).findings if not each.applies
    ] == does_not_apply
    assert report_of(Sums).not_checked == []
    assert report_of(TextOnly).not_checked[0] == "token_exact"
    assert report_of(SetupFails).not_checked == NAMES[1:]
    assert report_of(NoItems).not_checked == NAMES[2:]
    rest = [*NAMES[6:9], *OF_REWARDS]
    assert report_of(NeverAGroup).not_checked == rest
    fixed = report_of(FixedData)
    assert fixed.failed == []
    assert fixed.not_checked == [*NAMES[7:9], *OF_REWARDS]
    assert "not checked: the environment asks nothing of the engine" in fixed.to_text()


@pytest.mark.parametrize(
    ("env_cls", "rule", "reason"),
    [
        (ConstantReward, "empty_unrewarded", "all rewards are equal"),
        (Maze, "reward_varies", "define example_answers"),
        (Preferred, "wrong_unrewarded", "a reward model scores"),
        (Preferred, "empty_unrewarded", ""),
    ],
)
def test_rewards_that_say_nothing_about_a_rule_are_named(
    env_cls: type[BaseEnv], rule: str, reason: str
) -> None:
    report = report_of(env_cls)
    assert reason in report.finding(rule).reason
    assert bool(reason) is (rule in report.not_checked)


def test_what_an_environment_declares_is_not_judged() -> None:
    methods = {"runs_model_code": True, "is_isolated": lambda self: False}
    plain = type("WithoutSandbox", (Products,), {"__module__": __name__, **methods})
    reason = "programs of the model are not isolated on this machine"
    assert check(plain, num_items=1).finding("answer_runs_no_code").reason == reason
    assert report_of(Terms).finding("restatement_unrewarded").reason == "allows_restating is set"


def test_a_tool_that_hangs_is_called_once() -> None:
    asked = []

    async def hanging(a: int, b: int = 2) -> None:
        """Wait."""
        asked.append((a, b))
        await asyncio.sleep(60)

    env_cls = type("Hanging", (Calculator,), {"__module__": __name__, "tools": (hanging,)})
    report = check(env_cls, timeout_s=2.0, num_items=1)
    assert report.failed == ["tools_work"]
    assert asked == [(1, 2)]
    assert "hanging(a=1): hanging did not end within 2 s" in report.to_text()


def test_a_tool_gets_texts_of_the_item_if_it_takes_no_other() -> None:
    asked = []

    def answer(question: str) -> str:
        """Answer a question of the data."""
        asked.append(question)
        return {f"{n} * 37": "known" for n in range(99)}[question]

    env_cls = type("Asking", (Calculator,), {"__module__": __name__, "tools": (answer,)})
    assert check(env_cls).finding("tools_work").status is Status.PASS
    assert asked[:3] == ["1", "1 + 1", "two words"]


def test_an_answer_that_occupies_this_process_is_a_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("atroposlib.checker.check.MAX_BOMB_S", 0.2)

    class Powers(Products):
        def score(self, row: Any, answer: str) -> Any:
            until = time.process_time() + (0.3 if "7**7**8" in answer else 0)
            while time.process_time() < until:
                pass
            return super().score(row, answer)

    report = check(Powers)
    assert report.failed == ["grader_survives"]
    assert "of this process" in report.to_text()


def test_the_last_line_counts_the_verdicts() -> None:
    statuses = [finding.status for finding in report_of(Maze).findings]
    num_open = len(report_of(Maze).not_checked)
    counts = f"Maze: {statuses.count(Status.PASS)} passed, 0 failed, {num_open} not checked ("
    assert report_of(Maze).to_text().splitlines()[-1].startswith(counts)


def test_example_answers_reach_rewards_that_guesses_miss() -> None:
    class Reversed(Sums):
        def score(self, item: Any, text: str, place: int) -> float:
            return float(text == item["question"][::-1])

    class WithExamples(Reversed):
        def example_answers(self, item: Any) -> list[str]:
            return [item["question"][::-1]]

    assert check(Reversed).failed == ["reward_varies"]
    assert check(WithExamples).failed == []


def test_skipped_rules_are_named() -> None:
    report = check(ConstantReward, skip=["reward_varies"])
    assert report.is_ok
    assert report.finding("reward_varies").reason == "not judged, as asked for"
    with pytest.raises(ConfigError, match="starts cannot be skipped"):
        check_env(SetupFails, skip=["starts"])


def test_a_sampled_text_has_other_tokens_when_it_is_tokenized_again() -> None:
    tokenizer = PairTokenizer()
    for text in ("42", "So the answer is \\boxed{12}.", "caf\u00e9 no. 7<eos>"):
        apart = tokens_apart(tokenizer, text)
        again = tokenizer.encode(text, add_special_tokens=False)
        assert tokenizer.decode(apart) == tokenizer.decode(again) == text
        assert apart != again


def test_a_tokenizer_of_files_can_be_used_instead() -> None:
    tokenizer = make_tiny_tokenizer(("a", "n"), ("s", "w"), ("e", "r"), ("t", "h"), ("i", "s"))
    assert check(Sums, tokenizer=tokenizer).failed == []
    assert check(AnswerRetokenized, tokenizer=tokenizer).failed == ["token_exact"]


def test_the_random_state_is_given_back() -> None:
    state = random.getstate()
    check(RandomReward)
    assert random.getstate() == state


class ExitsInATask(Sums):
    """Ends the process, so that no report can be made."""

    async def collect_trajectories(self, item: Any) -> tuple[Any, list[Any]]:
        async def leave() -> None:
            sys.exit(0)

        await asyncio.create_task(leave())
        return None, []


def test_an_environment_that_ends_the_process_is_no_pass(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert run_environment(ExitsInATask, ["check"]) == 1
    assert "the environment called sys.exit(0) in a task" in capsys.readouterr().err


def spin(*_: Any) -> None:
    while True:
        pass


@pytest.mark.parametrize(
    ("name", "function", "rule"),
    [
        ("__init__", spin, "starts"),
        ("save_checkpoint", spin, "checkpoint_is_json"),
        ("load_checkpoint", lambda *_: sys.exit(3), "checkpoint_restores"),
    ],
)
def test_a_function_that_does_not_return_is_a_finding(name: str, function: Any, rule: str) -> None:
    env_cls = type("Endless", (Sums,), {"__module__": __name__, name: function})
    assert check(env_cls, timeout_s=1.0, num_items=1).failed == [rule]


@pytest.mark.parametrize("name", ["example_answers", "gold_answer"])
def test_answers_for_the_check_that_fail_are_named(name: str) -> None:
    def fail(self: Any, item: Any) -> Any:
        return item["solutions"]

    env_cls = type("WithoutSolutions", (Sums,), {"__module__": __name__, name: fail})
    with pytest.raises(EnvError, match=rf"{name}\(\) failed: KeyError: 'solutions' \(test_check"):
        check(env_cls, num_items=1)


def compute_for(duration_s: float) -> None:
    until = time.thread_time() + duration_s
    while time.thread_time() < until:
        pass


def test_a_script_does_not_block_the_loop_that_it_starts() -> None:
    watch = LoopWatch({__file__}, patience_s=30.0)

    async def main() -> None:
        with watch:
            asyncio.get_running_loop().call_soon(time.sleep, 0.3)
            await asyncio.sleep(0.4)

    asyncio.run(main())
    assert watch.stalls == {}


LIBRARY = """
import asyncio, time

def compute(*_):
    until = time.thread_time() + 0.25
    while time.thread_time() < until:
        pass

async def main(watch):
    with watch:
        await asyncio.sleep(0.05)
        compute()
"""


def test_the_program_that_runs_the_loop_is_not_blamed_for_other_code() -> None:
    library: dict[str, Any] = {}
    exec(compile(LIBRARY, "<library>", "exec"), library)
    watch = LoopWatch({__file__}, patience_s=30.0)
    asyncio.run(library["main"](watch))
    assert watch.stalls == {}
    watch = LoopWatch({"<library>"}, patience_s=30.0)
    asyncio.run(library["main"](watch))
    assert next(iter(watch.stalls)).startswith("compute ")


def test_only_the_authors_code_is_interrupted() -> None:
    library: dict[str, Any] = {}
    exec(compile(LIBRARY, "<library>", "exec"), library)
    watch = LoopWatch({__file__}, patience_s=0.05)
    asyncio.run(library["main"](watch))
    with pytest.raises(LoopBlocked):
        asyncio.run(library["main"](LoopWatch({"<library>"}, patience_s=0.05)))


def test_no_callback_of_a_weak_reference_is_interrupted() -> None:
    """It would drop the exception."""
    library: dict[str, Any] = {}
    exec(compile(LIBRARY, "<library>", "exec"), library)
    dropped: list[Any] = []

    async def main() -> None:
        with LoopWatch({__file__}, patience_s=0.3):
            await asyncio.sleep(0.05)
            while True:
                thing = asyncio.Event()
                reference = weakref.ref(thing, library["compute"])
                del thing
                until = time.thread_time() + 0.1
                while reference and time.thread_time() < until:
                    pass

    with (
        unittest.mock.patch.object(sys, "unraisablehook", dropped.append),
        pytest.raises(LoopBlocked),
    ):
        asyncio.run(main())
    assert dropped == []


@pytest.mark.parametrize(("wait", "is_stall"), [(time.sleep, True), (compute_for, False)])
def test_short_calls_of_several_tasks_are_a_stall_if_they_sleep(wait: Any, is_stall: bool) -> None:
    watch = LoopWatch({__file__}, patience_s=30.0)

    async def call() -> None:
        wait(0.03)

    async def main() -> None:
        with watch:
            await asyncio.sleep(0.05)
            await asyncio.gather(*(call() for _ in range(12)))

    asyncio.run(main())
    assert bool(watch.stalls) is is_stall
    assert watch.together


def test_command_prints_the_report_and_exits_1_on_a_failure(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert run_environment(Sums, ["check", "--items", "1", "--skip", "no_leaked_tasks"]) == 0
    out = capsys.readouterr().out
    assert "PASS reward_varies " in out
    assert out.splitlines()[-1].startswith("next: process writes groups")
    assert run_environment(EmptyIsRight, ["check", "--items=1"]) == 1
    out = capsys.readouterr().out
    assert "FAIL empty_unrewarded " in out
    assert "next: do what the lines with > say" in out


def test_all_rows_are_walked_without_sampling(capsys: pytest.CaptureFixture[str]) -> None:
    env_cls = broken("OneRowWithoutAnswer")
    assert run_environment(env_cls, ["check", "--items", "all", "--fast"]) == 1
    out, err = capsys.readouterr()
    assert "row 100 ({'question': '?'}): EnvError: gold_answer raised KeyError: 'answer'" in out
    assert "201 of 201 rows, 200 gold answers scored" in out
    assert "-    reward_varies           not checked: no item was sampled, as asked for" in out
    assert "check: rows walked (" in err
    assert "item 0 tried" not in err


def test_strict_exits_with_1_for_what_applies_and_was_not_checked() -> None:
    """Rules about tools, rows and stated results do not apply to sums."""
    assert run_environment(Sums, ["check", "--items=1", "--strict"]) == 0
    asked = ["check", "--items=1", "--skip=no_leaked_tasks"]
    assert run_environment(Sums, asked) == 0
    assert run_environment(Sums, [*asked, "--strict"]) == 1


def test_no_item_runs_after_the_budget() -> None:
    class Slow(Products):
        async def roll_out(self, *args: Any, **options: Any) -> Any:
            await asyncio.sleep(0.2)
            return await super().roll_out(*args, **options)

    report = check(Slow, budget_s=0.5)
    assert report.failed == [], report.to_text()
    assert report.duration_s < 5
    assert report.finding("reward_varies").status is Status.PASS
    assert report.finding("evaluates").status is Status.PASS
    assert "the check's time was used up" in report.finding("list_unrewarded").reason


def test_command_prints_nothing_but_json_when_asked(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_environment(ConstantReward, ["check", "--json", "--env.group_size", "3"]) == 1
    report = json.loads(capsys.readouterr().out)
    failed = [rule for rule in report["rules"] if rule["status"] == "fail"]
    assert [rule["name"] for rule in failed] == ["reward_varies"]
    assert failed[0]["evidence"][0]["item"] == 0
    assert failed[0]["evidence"][0]["what"].startswith("8 answers all earned 1: ")
    assert (report["environment"], report["ok"], report["items"]) == ("sums", False, 3)


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--env.groupsize", "4"], "did you mean --env.group_size?"),
        (["--env.group_size", "four"], "--env.group_size: got 'four'"),
        (["--skip", "colects"], "did you mean collects?"),
        (["--items", "0"], "at least one item"),
    ],
)
def test_mistake_in_the_flags_exits_2(
    argv: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_environment(Sums, ["check", *argv]) == 2
    assert message in capsys.readouterr().err


def test_only_processes_that_a_check_left_are_killed_also_after_an_error() -> None:
    """A process that ran before starts one during the check, which is not the environment's."""
    starting = (
        f"import subprocess; input(); left = subprocess.Popen({SLEEP}); print(left.pid, flush=True);"
        " left.wait()"
    )
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    earlier = subprocess.Popen([sys.executable, "-c", starting], text=True, **pipes)
    grandchildren: list[int] = []

    def fail(self: Any, item: Any) -> Any:
        earlier.stdin.write("\n")
        earlier.stdin.close()
        grandchildren.append(int(earlier.stdout.readline()))
        raise KeyError("solutions")

    methods = {"gold_answer": fail, "change": leaving(functools.partial(subprocess.Popen, SLEEP))}
    env_cls = type("Leaving", (Sums,), {"__module__": __name__, **methods})
    with tidied(), earlier:
        with pytest.raises(EnvError, match="gold_answer"):
            check_env(env_cls, num_items=1)
        assert {process.wait(10) for process in Sums.held} == {-signal.SIGKILL}
        with pytest.raises(subprocess.TimeoutExpired):
            earlier.wait(0.5)
        os.kill(grandchildren[0], signal.SIGKILL)


def test_processes_are_not_judged_on_a_machine_that_does_not_list_them(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for module in (calls, leftovers):
        monkeypatch.setattr(module, "PROC", tmp_path / "none")
    report = check(broken("ProcessLeftRunning"), num_items=1)
    assert report.finding("no_leaked_processes").why_not_checked == "this machine has no /proc"


def test_children_of_the_fork_server_are_killed_but_not_the_server() -> None:
    context = multiprocessing.get_context("forkserver")
    before, left = child_processes(), context.Process(target=time.sleep, args=(60,))
    left.start()
    end_processes(child_processes() - before)
    later = context.Process(target=int)
    later.start()
    for process in (left, later):
        process.join(10)
    assert (left.exitcode, later.exitcode) == (-signal.SIGKILL, 0)
