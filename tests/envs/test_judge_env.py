"""JudgeEnv with a scripted judge beside the scripted policy: marks, comparisons, rewards, and unreadable verdicts."""

import re
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from atroposlib.envs.base import APIServerConfig
from atroposlib.envs.judge_env import JudgeEnv, JudgeEnvConfig, pairings
from atroposlib.errors import ConfigError, EngineProtocolError, EnvError
from atroposlib.inference.harness import HarnessRequest, ServerHarness, create_chat_completion
from atroposlib.inference.servers.sampling_notes import noting_sampling
from atroposlib.runtime.env_command import build_environment
from atroposlib.scored_data import Strictness, check_group
from tests.builders.environments import Offline
from tests.envs.helpers_envs import ENGINE, group_of

JUDGE = APIServerConfig(model_name="judge", base_url="http://127.0.0.1:9/v1")
ANSWERS = ["good", "fair", "poor", "none"]
MARKS = {"good": 10, "fair": 5, "poor": 0}


class Essays(Offline, JudgeEnv):
    name = "essays"
    rubric = "Is it good?"

    @classmethod
    def config_init(cls) -> Any:
        return JudgeEnvConfig(group_size=4, use_wandb=False), [ENGINE]

    def load_rows(self, split: str) -> Any:
        return ["Write an essay.", "Write a poem."]

    def prompt(self, row: Any) -> Any:
        return row


class Contest(Essays):
    judging = "pairwise"


def judge_by_marks(request: HarnessRequest) -> str:
    """Mark the answer, or compare two; `none` leaves the judge speechless."""
    answers = re.findall(r"<answer(?:_[ab])?>\n(.*?)\n</answer", request.prompt)
    if "none" in answers:
        return "I cannot say."
    if len(answers) == 1:
        return f"Fine. Score: {MARKS[answers[0]]}"
    first, second = (MARKS[answer] for answer in answers)
    return f"Verdict: {'tie' if first == second else 'A' if first > second else 'B'}"


def make(
    env_cls: Callable[..., Any] = Essays,
    *,
    judge: Callable[[HarnessRequest], str] = judge_by_marks,
    **settings: Any,
) -> Any:
    config = JudgeEnvConfig(**{"group_size": 4, "use_wandb": False, **settings})
    env = env_cls(config, [ENGINE], judge_configs=JUDGE)
    env.server.servers = [ServerHarness(respond=lambda request: ANSWERS[request.choice])]
    env.judge.servers = [ServerHarness(respond=judge)]
    return env


async def test_unreadable_verdict_is_dropped_and_counted_not_scored_zero() -> None:
    env = make()
    group = await group_of(env, "Write an essay.")
    assert check_group(group, strictness=Strictness.MEANING).scores.tolist() == [1.0, 0.5, 0.0]
    assert len(env.server.servers[0].requests) == 1
    asked = [request["messages"][0]["content"] for request in env.judge.servers[0].requests]
    assert len(asked) == 4
    # The last answer's verdict is unreadable: it is dropped, not scored zero.
    assert [messages[-1]["content"] for messages in group["messages"]] == ANSWERS[:3]
    explanations = [each["explanation"] for each in group["overrides"]]
    assert explanations == [f"Fine. Score: {mark}" for mark in (10, 5, 0)]
    assert (env.counts["judge_unparsable"], env.num_reward_failures) == (1, 1)
    assert all("Is it good?" in text and "Write an essay." in text for text in asked)


@pytest.mark.parametrize("has_own_judge", [True, False])
async def test_temperature_of_the_judge_is_not_that_of_the_samples(has_own_judge: bool) -> None:
    env = make(temperature=0.7, judge_temperature=0.0)
    await env.setup()
    if not has_own_judge:
        policy = env.server.servers[0].respond
        env.judge = env.server
        env.server.servers[0].respond = lambda request: (
            judge_by_marks(request) if "Is it good?" in request.prompt else policy(request)
        )
    with noting_sampling() as notes:
        await env.collect_trajectories("Write an essay.")
    assert env.counts["judge_calls"] == 4
    assert notes.temperatures == {0.7}


async def test_unreadable_verdict_is_asked_for_again_where_configured() -> None:
    env = make(
        judge=lambda request: f"Score: {request.call}" if request.call % 2 else "hm",
        on_reward_failure="retry",
    )
    group = await group_of(env, "Write an essay.")
    assert len(group["scores"]) == 4
    assert env.counts["judge_unparsable"] == 4
    assert env.num_reward_failures == 0


async def test_pairwise_score_is_the_share_of_comparisons_won() -> None:
    env = make(Contest, num_opponents=3)
    group = await group_of(env, "Write an essay.")
    assert group["scores"] == [1.0, 0.5, 0.0]
    assert env.counts["judge_calls"] == 12  # six pairs in both orders
    assert env.num_reward_failures == 1  # `none` has no readable comparison


async def test_unreadable_comparison_is_asked_for_again_where_configured() -> None:
    verdicts = iter(["hm", "Verdict: A", "Verdict: B"])
    env = make(Contest, judge=lambda request: next(verdicts), on_reward_failure="retry")
    assert await env.compare("Write an essay.", "good", "poor") == 1.0
    assert env.counts == {"judge_calls": 3, "judge_unparsable": 1}


async def test_judge_that_prefers_a_place_gives_ties() -> None:
    env = make(Contest, judge=lambda request: "Verdict: A")
    group = await group_of(env, "Write an essay.")
    assert group["scores"] == [0.5] * 4


async def test_pairwise_evaluation_compares_with_the_reference() -> None:
    class Against(Contest):
        def reference(self, row: Any) -> str:
            return "fair"

    env = make(Against)
    await env.setup()
    assert (await env.evaluate())["eval/mean_score"] == 1.0
    with pytest.raises(EnvError, match=r"compared with reference\(row\)"):
        await make(Contest).score("Write an essay.", "good")


async def test_verdict_that_was_cut_off_is_no_verdict() -> None:
    class CutOff(ServerHarness):
        async def _chat_completion_wrapper(self, **kwargs: Any) -> Any:
            return create_chat_completion("Score: 9 would be", finish_reason="length")

    env = make()
    env.judge.servers = [CutOff()]
    assert await group_of(env, "Write an essay.") is None
    assert env.counts["judge_cut_off"] == env.counts["judge_unparsable"] == 4
    await env.wandb_log()  # clears `counts`, not the totals
    lost = {reason: number for reason, number in env.lost_answers().items() if number}
    assert lost == {"unjudged": 4, "judge_cut_off": 4}


def test_judge_has_flags_of_its_own(capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--judge.base_url", "http://judge:1/v1", "--judge.api_key", "secret"]
    env: Any = build_environment(Essays, "process", flags, prog="essays")
    assert env.judge.servers[0].config.base_url == "http://judge:1/v1"
    assert env.server.servers[0].config.base_url == ENGINE.base_url
    assert "secret" not in capsys.readouterr().out
    env = build_environment(Essays, "process", [], prog="essays")
    assert env.judge is env.server


def test_every_answer_is_in_as_many_pairs_and_no_pair_comes_twice() -> None:
    for num_answers in range(2, 9):
        for num_opponents in range(1, 10):
            pairs = pairings(num_answers, num_opponents=num_opponents)
            assert len({frozenset(pair) for pair in pairs}) == len(pairs)
            met = [sum(i in pair for pair in pairs) for i in range(num_answers)]
            assert set(met) == {min(2 * num_opponents, num_answers - 1)}


class Rewarded(Essays):
    judging = "reward_model"


@asynccontextmanager
async def reward_env(answer: Callable[[dict[str, Any]], Any]) -> AsyncIterator[Any]:
    """Run a reward model over HTTP beside the scripted policy."""

    async def pooling(request: web.Request) -> web.Response:
        return web.json_response(answer(await request.json()))

    app = web.Application()
    app.router.add_post("/pooling", pooling)
    async with TestServer(app) as server:
        judge = APIServerConfig(model_name="rm", base_url=str(server.make_url("/v1")))
        env = Rewarded(JudgeEnvConfig(group_size=4, use_wandb=False), [ENGINE], judge_configs=judge)
        env.server.servers = [ServerHarness(respond=lambda request: ANSWERS[request.choice])]
        yield env
        await env.close()


async def test_reward_model_scores_the_whole_conversation() -> None:
    seen: list[Any] = []

    def answer(body: dict[str, Any]) -> Any:
        seen.append(body)
        return {"data": [{"data": [[0.1], [len(body["messages"][-1]["content"]) / 4]]}]}

    async with reward_env(answer) as env:
        group = await group_of(env, "Write an essay.")
    assert group["scores"] == [1.0] * 4
    assert {body["model"] for body in seen} == {"rm"}
    assert [message["role"] for message in seen[0]["messages"]] == ["user", "assistant"]


async def test_reward_model_that_answers_no_number_is_an_error() -> None:
    async with reward_env(lambda body: {"data": []}) as env:
        with pytest.raises(EngineProtocolError, match="no score"):
            await env.score("Write an essay.", "good")


def test_reward_model_needs_an_address() -> None:
    with pytest.raises(ConfigError, match=r"needs --judge\.base_url"):
        Rewarded(JudgeEnvConfig(use_wandb=False), [ENGINE])
