"""A member of a group that has no score changes nothing for the others: from each base to the trainer's advantages.

Each base plays a group in which some members fail, are aborted or are too short, and the group of the others alone.
The advantages of the judged members must be equal, for every policy and every baseline.
"""

import asyncio
import logging
import random
import re
from collections.abc import Callable
from typing import Any, NamedTuple, get_args

import numpy as np
import pytest

from atroposlib.envs.agent_env import AgentEnv
from atroposlib.envs.dataset_env import DatasetEnv, DatasetEnvConfig
from atroposlib.envs.judge_env import JudgeEnv
from atroposlib.envs.multi_turn_env import Episode, MultiTurnEnv, Step
from atroposlib.envs.rewards import RewardFailure
from atroposlib.envs.tool_env import ToolEnv, hermes_call
from atroposlib.errors import EnvError
from atroposlib.inference.answerer import Ask, Sampled
from atroposlib.inference.harness import ByteTokenizer, HarnessRequest, ServerHarness
from atroposlib.scored_data import Strictness, check_group
from example_trainer.data import DataOptions, make_batch
from example_trainer.objective import Baseline
from tests.builders.environments import Offline
from tests.envs.helpers_envs import ENGINE, group_of
from tests.trainer.helpers_trainer import make_group

FAILURES = ["failure", "none", "nan", "inf", "raise", "text", "abort", "short"]
MIN_TOKENS = 40


class Member(NamedTuple):
    """What becomes of one answer: a number, or one of the failures."""

    id: int
    fate: str

    @property
    def is_judged(self) -> bool:
        return self.fate not in FAILURES

    @property
    def text(self) -> str:
        return f"{self.fate}#{self.id}" + ("" if self.fate == "short" else ";" + "." * MIN_TOKENS)


def judge(answer: str) -> Any:
    """Give the outcome that the answer names."""
    fate = answer.partition("#")[0]
    if fate == "failure":
        return RewardFailure(reason="timeout", detail="")
    if fate == "raise":
        raise KeyError("a bad completion")
    return (
        {"none": None, "nan": float("nan"), "inf": float("inf"), "text": "high"}.get(fate)
        if fate in FAILURES
        else float(fate)
    )


class Engine(ServerHarness):
    """Answers that begin with `abort` were aborted."""

    def _sample(self, ask: Ask, choice: int) -> Sampled:
        sampled = super()._sample(ask, choice)
        is_aborted = self.tokenizer.decode(sampled.tokens).startswith("abort")
        return sampled._replace(finish_reason="abort") if is_aborted else sampled


class _Rows(Offline):
    name = "members"

    def load_rows(self, split: str) -> Any:
        return ["row"]

    def prompt(self, row: Any) -> Any:
        return "Go."

    def score(self, row: Any, answer: Any) -> Any:
        return judge(answer)


class Dataset(_Rows, DatasetEnv):
    """One answer."""


class MultiTurn(_Rows, MultiTurnEnv):
    """The second answer decides."""

    def step(self, episode: Episode, answer: str) -> Any:
        if episode.num_turns == 0 and not answer.startswith("short"):
            return Step("And now?")
        return Step(reward=judge(answer), done=True)


class Tools(_Rows, ToolEnv):
    """A tool is called, then the answer is judged."""

    def say(word: str) -> str:  # type: ignore[misc]
        return word

    tools = (say,)


class Rubric(_Rows, JudgeEnv):
    """The judge repeats the answer, and the mark is read from that."""

    def score(self, row: Any, answer: str) -> Any:
        return JudgeEnv.score(self, row, answer)

    def parse_mark(self, verdict: str) -> Any:
        return judge(verdict)


class Pairwise(Rubric):
    judging = "pairwise"


class Agents(_Rows, AgentEnv):
    async def run_agent(self, row: Any, base_url: str, api_key: str) -> Any:
        from tests.envs.test_agent_env import ask

        answer = await asyncio.to_thread(ask, base_url, api_key, "Go.")
        if answer.startswith("failure"):
            raise RuntimeError("the agent crashed")
        return answer


def judge_of(request: HarnessRequest) -> str:
    answers = re.findall(r"<answer(?:_[ab])?>\n(.*?)\n</answer", request.prompt)
    if len(answers) == 1:
        return str(answers[0])
    marks = [judge(each) if each[0] not in "fnirta" else None for each in answers]
    if None in marks:
        return "I cannot say."
    return f"Verdict: {'tie' if marks[0] == marks[1] else 'A' if marks[0] > marks[1] else 'B'}"


BASES: list[type[Any]] = [Dataset, MultiTurn, Tools, Rubric, Pairwise, Agents]


def answering(base: type[Any], members: list[Member]) -> Callable[[HarnessRequest], str]:
    """Give each member its answers: at once, or after a first turn that names it."""
    fresh = iter(members)

    def respond(request: HarnessRequest) -> str:
        if base not in (MultiTurn, Tools, Agents):
            return members[request.choice].text
        named = re.search(r"#(\d+)", request.prompt)
        if named is not None:
            return next(each for each in members if each.id == int(named[1])).text
        member = next(fresh)
        if base is Tools and member.fate != "short":
            return hermes_call("say", word=f"#{member.id}")
        if base is MultiTurn and member.fate != "short":
            return f"first#{member.id}"
        return member.text

    return respond


async def play(base: type[Any], members: list[Member], policy: str) -> Any:
    config = base.env_config_cls(
        group_size=len(members),
        use_wandb=False,
        min_trained_tokens=MIN_TOKENS,
        on_reward_failure=policy,
        num_eval_rows=0,
        **({"num_opponents": 20} if base is Pairwise else {}),
    )
    with_judge = {"judge_configs": ENGINE} if issubclass(base, JudgeEnv) else {}
    env = base(config, [ENGINE], **with_judge)
    env.server.servers = [Engine(respond=answering(base, members))]
    if with_judge:
        env.judge.servers = [ServerHarness(respond=judge_of)]
    return await group_of(env, "row"), env


def advantages(group: Any, baseline: Baseline, *, scale: bool) -> dict[int, float]:
    """Return the trainer's advantages by member, in a batch with another group."""
    options = DataOptions(
        baseline=baseline,
        scale_advantages=scale,
        seq_len=4096,
        max_sequences=99,
        max_tokens=10**6,
        keep_zero_advantage=True,
    )
    checked = check_group(group, strictness=Strictness.MEANING)
    batch = make_batch([checked, make_group([3.0, 1.0, 0.5])], options)
    found = {}
    for row in batch.rows[:-3]:
        text = ByteTokenizer().decode(row.labels.tolist())
        (named,) = set(re.findall(r"#(\d+)", text))
        assert len(set(row.advantages)) == 1
        found[int(named)] = float(row.advantages[0])
    return found


def plans(seed: int, count: int) -> list[list[Member]]:
    chance = random.Random(seed)
    chosen = []
    for _ in range(count):
        fates = [str(chance.choice([0.0, 0.1, 0.5, 1.0])) for _ in range(chance.randint(2, 5))]
        fates += chance.choices(FAILURES, k=chance.randint(1, 5))
        chance.shuffle(fates)
        chosen.append([Member(i, fate) for i, fate in enumerate(fates)])
    return chosen


@pytest.mark.parametrize("policy", ["drop", "mask", "retry"])
@pytest.mark.parametrize("base", BASES)
async def test_advantages_of_the_judged_are_those_of_the_group_without_the_others(
    base: type[Any], policy: str
) -> None:
    every_kind = [Member(i, fate) for i, fate in enumerate([*FAILURES, "1.0", "0.0", "0.1"])]
    for members in [every_kind, *plans(7, 1 if base is Agents else 3)]:
        judged = [member for member in members if member.is_judged]
        group, env = await play(base, members, policy)
        alone, _ = await play(base, judged, policy)
        for baseline in get_args(Baseline):
            for scale in (True, False):
                expected = advantages(alone, baseline, scale=scale)
                assert set(expected) == {member.id for member in judged}
                found = advantages(group, baseline, scale=scale)
                assert found == pytest.approx(expected, rel=1e-9, abs=1e-12), (members, baseline)
        num_short = sum(member.fate == "short" for member in members)
        assert env.num_too_short == num_short
        assert env.num_reward_failures == len(members) - len(judged) - num_short
        num_kept = len(members) - num_short if policy == "mask" else len(judged)
        assert len(group["scores"]) == num_kept == group["group_overrides"]["group_size"]
        is_flat = len(set(alone["scores"])) == 1
        assert (len(set(group["scores"])) == 1) == is_flat


async def test_exception_of_score_costs_one_answer_and_is_shown_once_by_type(
    caplog: pytest.LogCaptureFixture,
) -> None:
    members = [Member(i, fate) for i, fate in enumerate(["raise", "1.0", "raise", "0.0"])]
    with caplog.at_level(logging.INFO):
        group, env = await play(Dataset, members, "drop")
    assert group["scores"] == [1.0, 0.0]
    assert env.score_errors == {"KeyError": 2}
    shown = [record for record in caplog.records if "raised KeyError" in record.message]
    assert len(shown) == 1
    assert "a bad completion" in caplog.text


async def test_score_that_always_raises_is_the_items_failure_with_its_own_type() -> None:
    with pytest.raises(KeyError, match="a bad completion"):
        await play(Dataset, [Member(i, "raise") for i in range(3)], "drop")
    with pytest.raises(EnvError, match="score returned 'high', which is not a finite number"):
        await play(Dataset, [Member(i, "text") for i in range(3)], "drop")


@pytest.mark.parametrize("policy", ["drop", "mask", "retry"])
async def test_one_judged_answer_beside_others_is_no_group(policy: str) -> None:
    members = [Member(i, fate) for i, fate in enumerate(["1.0", "none", "abort", "nan"])]
    group, env = await play(Dataset, members, policy)
    assert group is None
    assert env.num_reward_failures == 3
    assert env.lost_answers() == {
        "too_short": 0,
        "aborted": 1,
        "unjudged": 2,
        "shape_group": 0,
        "suspicious": 0,
    }


@pytest.mark.parametrize("base", [Dataset, Rubric, Pairwise])
async def test_one_answer_beside_aborted_ones_is_not_judged(base: type[Any]) -> None:
    members = [Member(i, fate) for i, fate in enumerate(["1.0", "abort", "abort", "short"])]
    group, env = await play(base, members, "drop")
    assert group is None
    assert env.counts["judge_calls"] == 0
    lost = {reason: number for reason, number in env.lost_answers().items() if number}
    assert lost == {"too_short": 1, "aborted": 2}


async def test_answer_that_was_aborted_at_once_is_not_called_too_short() -> None:
    class Cut(Member):
        text = "abort"

    members = [Cut(0, "abort"), Member(1, "1.0"), Member(2, "0.0")]
    group, env = await play(Dataset, members, "drop")
    assert group["scores"] == [1.0, 0.0]
    assert (env.lost_answers()["aborted"], env.num_too_short) == (1, 0)


async def test_aborted_answer_is_not_judged_and_has_no_score_in_evaluation() -> None:
    judged: list[str] = []

    class Watching(Dataset):
        def score(self, row: Any, answer: Any) -> Any:
            judged.append(answer)
            return judge(answer)

    env: Any = Watching(DatasetEnvConfig(use_wandb=False, num_eval_samples=2), [ENGINE])
    members = [Member(0, "abort"), Member(1, "1.0")]
    env.server.servers = [Engine(respond=answering(Dataset, members))]
    env.eval_rows = ["row"]
    metrics = await env.evaluate()
    assert judged == [members[1].text]
    assert metrics["eval/mean_score"] == 1.0
    assert metrics["eval/reward_failures"] == 1.0


def test_masked_sequences_take_no_part_in_the_trainers_baseline() -> None:
    scores = [1.0, 0.0, 0.25, 99.0]
    whole = make_group(scores)
    masks = [whole.sequence(i).masks.tolist() for i in range(3)]
    masked = make_group(scores, masks=[*masks, [-100] * len(whole.sequence(3).masks)])
    options = DataOptions(seq_len=64, max_sequences=9, max_tokens=10**4)
    found = [row.advantages[0] for row in make_batch([masked], options).rows]
    alone = [row.advantages[0] for row in make_batch([make_group(scores[:3])], options).rows]
    assert np.array_equal(found, alone)
