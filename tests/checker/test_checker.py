"""The conformance check: every broken environment fails its own rule and no other, sound ones fail none."""

from __future__ import annotations

import json
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from atroposlib.checker import RULES, Report, check_env
from atroposlib.checker.engine import PairTokenizer, tokens_apart
from atroposlib.envs.base import BaseEnv
from atroposlib.errors import ConfigError
from atroposlib.runtime.command import run_environment
from tests.checker.broken_environments import (
    BROKEN,
    HANGING,
    SLOW,
    SOUND,
    AnswerRetokenized,
    ConstantReward,
    EarlyBird,
    EmptyIsRight,
    ExitsInATask,
    FixedData,
    HistoryRetokenized,
    NeverAGroup,
    NoItems,
    OneMaskShort,
    RandomReward,
    SetupFails,
    SleepsInScoring,
    Sums,
    TextOnly,
    WrongField,
    tidied,
)
from tests.environments.helpers_environments import load
from tests.tiny_model import make_tiny_tokenizer

CASES = [(rule, env_cls) for rule, classes in BROKEN.items() for env_cls in classes]


def check(env_cls: type[BaseEnv], **options: Any) -> Report:
    options.setdefault("timeout_s", 0.3 if env_cls in HANGING else 30.0)
    with tidied():
        num_items = 1 if env_cls in SLOW else 2
        return check_env(env_cls, num_items=num_items, resume_items=True, **options)


@pytest.mark.parametrize("env_cls", SOUND, ids=lambda env_cls: env_cls.__name__)
def test_sound_environment_fails_no_rule(env_cls: type[BaseEnv]) -> None:
    assert check(env_cls).failed == []


@pytest.mark.parametrize(
    ("rule", "env_cls"), CASES, ids=[f"{rule}-{env_cls.__name__}" for rule, env_cls in CASES]
)
def test_broken_environment_fails_its_own_rule_alone(rule: str, env_cls: type[Sums]) -> None:
    report = check(env_cls)
    assert report.failed == [rule], report.to_text()
    assert report.finding(rule).evidence


def test_every_rule_has_an_environment_that_breaks_it() -> None:
    assert set(BROKEN) == {rule.name for rule in RULES}


def test_only_what_an_environment_lacks_is_skipped() -> None:
    assert check(Sums).skipped == []
    assert check(TextOnly).skipped == ["token_exact"]


def test_what_cannot_be_judged_is_skipped_and_not_passed() -> None:
    names = [rule.name for rule in RULES]
    assert check(SetupFails).skipped == names[1:]
    assert check(NoItems).skipped == names[2:]
    assert check(NeverAGroup).skipped == [*names[3:11], "cancellable"]
    fixed = check(FixedData)
    assert fixed.failed == []
    assert fixed.skipped == [*names[5:11], "cancellable"]
    assert "asks nothing of the engine" in fixed.to_text()
    assert check(ConstantReward).skipped == ["empty_unrewarded", "echo_unrewarded"]


@pytest.mark.parametrize(
    ("env_cls", "evidence"),
    [
        (OneMaskShort, "item 0: sequences[1].masks: "),
        (EmptyIsRight, "item 0: earned 1; all answers earned from 0 to 1"),
        (EarlyBird, "item 0: '3' earned 1, but 0.93 in reversed order"),
        (HistoryRetokenized, "an earlier turn was turned into tokens again"),
        (WrongField, "answers all earned 0: "),
        (SleepsInScoring, "- SleepsInScoring.change (broken_environments.py:"),
    ],
)
def test_evidence_names_item_place_and_values(env_cls: type[Sums], evidence: str) -> None:
    text = check(env_cls).to_text()
    assert evidence in text
    assert "> " in text


def test_example_answers_reach_rewards_that_guesses_miss() -> None:
    class Reversed(Sums):
        def score(self, item: Any, text: str, place: int) -> float:
            return float(text == item["question"][::-1])

    class WithExamples(Reversed):
        def example_answers(self, item: Any) -> list[str]:
            return [item["question"][::-1]]

    assert check(Reversed).failed == ["reward_varies"]
    assert check(WithExamples).failed == []


def test_skipped_rules_are_named_and_misspelt_ones_refused() -> None:
    report = check(ConstantReward, skip=["reward_varies"])
    assert report.is_ok
    assert report.finding("reward_varies").reason == "not judged, as asked for"
    with pytest.raises(ConfigError, match="did you mean reward_varies?"):
        check_env(Sums, skip=["rewards_vary"])
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


def test_the_clock_and_the_random_state_are_given_back() -> None:
    real, state = time.time, random.getstate()
    check(RandomReward)
    assert time.time is real
    assert random.getstate() == state


def test_an_environment_that_ends_the_process_is_no_pass(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert run_environment(ExitsInATask, ["check"]) == 1
    assert "the environment called sys.exit(0) in a task" in capsys.readouterr().err


STOPPED = """
import asyncio, time
from atroposlib.checker.calls import LoopWatch

def compute():
    print("computing", flush=True)
    until = time.thread_time() + 0.03
    while time.thread_time() < until:
        pass

async def main():
    watch = LoopWatch({"<string>"}, patience_s=30.0)
    with watch:
        for watch.run in (1, 2):
            await asyncio.sleep(0.1)
            compute()
    print(sorted(watch.stalls.items()))

asyncio.run(main())
"""


def test_time_without_a_cpu_is_no_stall() -> None:
    with subprocess.Popen(
        [sys.executable, "-c", STOPPED], stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        for _ in range(2):
            assert process.stdout.readline() == "computing\n"
            process.send_signal(signal.SIGSTOP)
            time.sleep(0.3)
            process.send_signal(signal.SIGCONT)
        assert process.stdout.read() == "[]\n"


def test_command_prints_the_report_and_exits_1_on_a_failure(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert run_environment(Sums, ["check", "--items", "1", "--skip", "no_leaked_tasks"]) == 0
    assert "PASS    reward_varies " in capsys.readouterr().out
    assert run_environment(EmptyIsRight, ["check", "--items=1"]) == 1
    assert "FAIL    empty_unrewarded " in capsys.readouterr().out


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


def test_letter_reversal_passes() -> None:
    module = load("letter_reversal_server")
    report = check_env(module.LetterReversalEnv, num_items=2)
    assert report.failed == []
    assert report.skipped == ["checkpoint_is_json", "checkpoint_restores", "items_resume"]


def test_gsm8k_passes_on_rows_of_a_file(tmp_path: Path) -> None:
    module = load("gsm8k_server")
    rows = [{"question": f"{n} times 100?", "answer": f"#### {n * 100}"} for n in (12, 13)]
    path = tmp_path / "rows.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)))

    def make(env_cls: Any) -> Any:
        config, servers = env_cls.config_init()
        settings = {"dataset_path": str(path), "num_reward_workers": 1, "use_wandb": False}
        return env_cls(config.model_copy(update=settings), servers, testing=True)

    report = check_env(module.GSM8kEnv, num_items=2, make=make, resume_items=True)
    assert report.failed == []
    assert report.skipped == []
