"""Stored rollouts are scored again, token-exactly, by today's code; what cannot be replayed says why."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import random
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import openai
import pytest
from pydantic import BaseModel

from atroposlib.envs.agent_env import AgentEnv
from atroposlib.envs.base import BaseEnv
from atroposlib.envs.dataset_env import Split
from atroposlib.envs.hooks import join_items
from atroposlib.envs.multi_turn_env import Episode, Step
from atroposlib.errors import EngineRejected, EnvError
from atroposlib.inference.config import APIServerConfig
from atroposlib.inference.harness import ServerHarness
from atroposlib.runtime.replay import Replay, Replayer, replay_scores
from atroposlib.runtime.stored_items import item_of
from atroposlib.testing import replay_scores as public_replay_scores
from tests.runtime.helpers_runtime import LoopbackHub, produced, serving, until
from tests.runtime.test_group_rows import (
    POLICY,
    Adding,
    Guessing,
    Judged,
    harnessed,
    hosted,
    rows_of,
)


async def replayed(env: BaseEnv, rows: list[dict[str, Any]]) -> list[Replay]:
    async with Replayer(env) as replayer:
        return [replay async for replay in replayer.replays(rows)]


def changed(env_cls: type, **members: Any) -> type:
    """Return today's code: a subclass with other members."""
    return type(env_cls.__name__, (env_cls,), {**members, "__module__": env_cls.__module__})


class Sampled(Adding):
    """Notes the groups that it makes."""

    def shape_group(self, row: Any, group: Any) -> Any:
        vars(self).setdefault("groups", []).append(group)
        return group


async def test_the_same_code_gives_the_same_scores_and_tokens(tmp_path: Path) -> None:
    rows = await rows_of(harnessed(Adding, tmp_path, total_steps=20))
    env = harnessed(Sampled, tmp_path)
    found = await replayed(env, rows)
    assert [replay.scores for replay in found] == [row["scores"] for row in rows]
    assert not any(replay.is_changed or replay.fault for replay in found)
    for group in env.groups:
        [row] = [row for row in rows if row["tokens"] == group["tokens"]][:1]
        assert row["masks"] == group["masks"]
        assert row["inference_logprobs"] == group["inference_logprobs"]


async def test_another_reward_changes_scores_and_another_group_size_does_not_matter(
    tmp_path: Path,
) -> None:
    rows = await rows_of(harnessed(Adding, tmp_path, group_size=3))
    env = harnessed(changed(Adding, score=lambda self, row, answer: 0.25), tmp_path, group_size=7)
    [replay] = await replayed(env, rows)
    assert replay.scores == [0.25, 0.25, 0.25]
    assert (replay.changed, replay.is_repeatable) == ([0, 1, 2], True)


async def test_a_file_may_hold_groups_of_several_sizes(tmp_path: Path) -> None:
    """As after `process --append` with another size; code may read the size after an await."""
    rows = [
        row
        for size in (2, 3, 4)
        for row in await rows_of(harnessed(Adding, tmp_path / str(size), group_size=size))
    ]

    async def score(self: Any, row: Any, answer: str) -> float:
        await asyncio.sleep(0.01)
        return float(self.config.group_size)

    found = await replayed(harnessed(changed(Adding, score=score), tmp_path), rows)
    assert [replay.scores for replay in found] == [[2.0] * 2, [3.0] * 3, [4.0] * 4]


async def test_a_changed_prompt_is_reported_also_if_the_author_catches_the_error(
    tmp_path: Path,
) -> None:
    rows = await rows_of(harnessed(Adding, tmp_path))

    async def collect(self: Any, item: Any) -> Any:
        try:
            return await Adding.collect_trajectories(self, item)
        except EngineRejected:
            return None, []

    today = changed(Adding, prompt=lambda self, row: "Add!", collect_trajectories=collect)
    [replay] = await replayed(harnessed(today, tmp_path), rows)
    assert replay.fault == (
        "its requests changed: 'Add!' has 0 more stored answers, and 2 are asked"
    )
    assert (replay.scores, replay.changed, replay.has_raised) == ([None, None], [], False)


async def test_code_that_raises_today_says_what(tmp_path: Path) -> None:
    rows = await rows_of(harnessed(Adding, tmp_path))

    def score(self: Any, row: Any, answer: str) -> float:
        raise ZeroDivisionError("no")

    [replay] = await replayed(harnessed(changed(Adding, score=score), tmp_path), rows)
    assert replay.fault == "today's code raised ZeroDivisionError: no"
    assert replay.has_raised


async def test_a_random_reward_is_not_taken_for_a_changed_one(tmp_path: Path) -> None:
    rows = await rows_of(harnessed(Adding, tmp_path))
    dice = random.Random(0)
    today = changed(Adding, score=lambda self, row, answer: dice.random())
    [replay] = await replayed(harnessed(today, tmp_path), rows)
    assert replay.is_changed
    assert not replay.is_repeatable


async def test_an_answer_that_is_left_out_today_has_no_score(tmp_path: Path) -> None:
    rows = await rows_of(harnessed(Adding, tmp_path, group_size=3))

    def score(self: Any, row: Any, answer: str) -> float | None:
        return None if answer == "answer 1" else 0.0

    [replay] = await replayed(harnessed(changed(Adding, score=score), tmp_path), rows)
    assert (replay.scores, replay.changed) == ([0.0, None, 0.0], [1])


async def test_every_turn_is_replayed_with_its_own_tokens(tmp_path: Path) -> None:
    env = harnessed(Guessing, tmp_path)
    env.server.servers = [ServerHarness(POLICY, respond=numbered)]
    rows = await rows_of(env)

    def step(self: Any, episode: Episode, answer: str) -> Step:
        return Step("Again.", reward=float(answer[-1]), done=episode.num_turns == 1)

    [replay] = await replayed(harnessed(changed(Guessing, step=step), tmp_path), rows)
    assert rows[0]["scores"] == [1.0, 1.0]
    said = [[m["content"][-1] for m in each[1::2]] for each in rows[0]["messages"]]
    assert sorted(sum(said, [])) == ["0", "1", "2", "3"]
    assert replay.scores == [sum(map(float, turns)) for turns in said]


async def test_verdicts_of_a_judge_are_replayed(tmp_path: Path) -> None:
    env = harnessed(Judged, tmp_path)
    judge = APIServerConfig(model_name="judge", base_url="http://judge/v1")
    env.judge = type(env.server)([judge], testing=True)
    env.judge.servers = [ServerHarness(judge, respond=lambda request: "Good. Score: 7")]
    rows = await rows_of(env)
    [replay] = await replayed(harnessed(Judged, tmp_path), rows)
    assert (replay.scores, replay.fault) == ([0.7, 0.7], None)
    today = changed(Judged, rubric="Be strict.")
    [replay] = await replayed(harnessed(today, tmp_path), rows)
    assert replay.fault is not None
    assert replay.fault.startswith("its requests changed: ")


@pytest.mark.parametrize("env_cls", [Adding, Guessing])
async def test_text_of_an_api_without_token_ids_is_replayed(
    env_cls: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("ATROPOS_ALLOW_DUMMY_MANAGED_SERVER", raising=False)
    [row] = await rows_of(hosted(env_cls, tmp_path))
    assert row["has_token_ids"] is False
    [replay] = await replayed(harnessed(env_cls, tmp_path), [row])
    assert (replay.scores, replay.num_added, replay.fault) == (row["scores"], 0, None)


class ByHand(BaseEnv):
    """As environments written for the original: an item of frozensets, one episode at a time, chat and text calls."""

    def load_tokenizer(self) -> Any:
        return harnessed_tokenizer()

    async def setup(self) -> None:
        pass

    async def get_next_item(self) -> Any:
        return (frozenset({"role": "user", "content": "Say 1"}.items()),), "1"

    async def evaluate(self, *args: Any, **kwargs: Any) -> None:
        pass

    def reward(self, text: str, gold: str) -> float:
        return float("".join(re.findall(r"answer (\d)", text)))

    async def collect_trajectory(self, item: Any) -> Any:
        messages = [dict(message) for message in item[0]]
        async with self.server.managed_server(tokenizer=self.tokenizer) as managed:
            await managed.chat_completion(messages=messages, n=1, max_tokens=20)
            [node] = managed.get_state()["nodes"]
        plain = await self.server.chat_completion(messages=messages, n=1)
        text = await self.server.completion(prompt="Continue", n=1)
        said = node.full_text + plain.choices[0].message.content + text.choices[0].text
        return {
            "tokens": node.tokens,
            "masks": node.masked_tokens,
            "inference_logprobs": node.logprobs,
            "scores": self.reward(said, item[1]),
        }, []


def harnessed_tokenizer() -> Any:
    return Adding.load_tokenizer(None)  # type: ignore[arg-type]


def numbered(request: Any) -> str:
    return f"answer {request.call}"


class Slow(ServerHarness):
    """An engine whose n-th request takes `delays[n]` seconds."""

    delays: Sequence[float] = ()

    async def _begin(self, kwargs: dict[str, Any]) -> int:
        number = await super()._begin(kwargs)
        await asyncio.sleep(dict(enumerate(self.delays)).get(number, 0.0))
        return number


class Seated(ByHand):
    """Every member of the group has its own seat, and asks what the others ask."""

    first_waits_s = 0.0

    async def collect_trajectories(self, item: Any) -> Any:
        self.seats = iter(range(self.config.group_size))
        return await super().collect_trajectories(item)

    async def collect_trajectory(self, item: Any) -> Any:
        seat = next(self.seats)
        await asyncio.sleep(0.0 if seat else self.first_waits_s)
        messages = [dict(message) for message in item[0]]
        async with self.server.managed_server(tokenizer=self.tokenizer) as managed:
            await managed.chat_completion(messages=messages, n=1, max_tokens=20)
            [node] = managed.get_state()["nodes"]
        verdict = await self.server.completion(prompt="Continue", n=1)
        group, later = {"tokens": node.tokens, "masks": node.masked_tokens}, []
        return {**group, "scores": 10.0 * seat + float(verdict.choices[0].text[-1])}, later


class Agents(AgentEnv):
    """As `Seated`, with agents that ask over HTTP, in two conversations that begin alike."""

    first_waits_s = 0.0

    def load_tokenizer(self) -> Any:
        return harnessed_tokenizer()

    def load_rows(self, split: Split) -> Any:
        return ["row"] if split == "train" else []

    async def collect_trajectories(self, item: Any) -> Any:
        self.seats = iter(range(self.config.group_size))
        return await super().collect_trajectories(item)

    async def run_agent(self, row: Any, base_url: str, api_key: str) -> Any:
        seat = next(self.seats)
        await asyncio.sleep(0.0 if seat else self.first_waits_s)
        async with openai.AsyncOpenAI(base_url=base_url, api_key=api_key) as client:
            for _ in range(2):
                answer = await client.chat.completions.create(
                    model="policy", messages=[{"role": "user", "content": "Hello"}]
                )
        return 10.0 * seat + float(str(answer.choices[0].message.content)[-1])

    def score(self, row: Any, answer: Any) -> float:
        return float(answer)


class Gathered(Seated):
    """The author's code starts the members."""

    async def collect_trajectories(self, item: Any) -> Any:
        self.seats = iter(range(2))
        runs = await asyncio.gather(*(self.collect_trajectory(item) for _ in range(2)))
        return join_items([run for run, _ in runs]), []


@pytest.mark.parametrize(
    ("env_cls", "delays", "first_waits_s"),
    [
        (ByHand, [0.05], 0.0),
        (Seated, [0.05], 0.0),
        (Seated, [0.0, 0.0, 0.05], 0.0),
        (Seated, [], 0.05),
        (Agents, [0.05], 0.0),
        (Agents, [], 0.05),
        (Gathered, [0.05], 0.0),
        (Gathered, [0.0, 0.0, 0.05], 0.0),
    ],
)
async def test_members_that_ask_the_same_get_their_own_answers(
    env_cls: Any, delays: list[float], first_waits_s: float, tmp_path: Path
) -> None:
    env = harnessed(env_cls, tmp_path, use_wandb=False)
    engine = Slow(POLICY, respond=numbered)
    engine.delays, env.server.servers, env.first_waits_s = delays, [engine], first_waits_s
    rows = await rows_of(env)
    [replay] = await replayed(harnessed(env_cls, tmp_path), rows)
    assert (replay.scores, replay.fault) == (rows[0]["scores"], None)


async def test_the_second_replay_of_a_group_begins_like_the_first(tmp_path: Path) -> None:
    class Alone(ByHand):
        async def collect_trajectories(self, item: Any) -> Any:
            one, later = await self.collect_trajectory(item)
            return join_items([one, {**one, "scores": 0.0}]), later

    env = harnessed(Alone, tmp_path, use_wandb=False)
    env.server.servers = [ServerHarness(POLICY, respond=numbered)]
    today = changed(Alone, reward=lambda self, text, gold: 1.0 + ByHand.reward(self, text, gold))
    [replay] = await replayed(harnessed(today, tmp_path), await rows_of(env))
    assert (replay.is_changed, replay.is_repeatable) == (True, True)


async def test_members_that_cannot_be_told_apart_are_not_scored_as_if_they_could(
    tmp_path: Path,
) -> None:
    """The author's own tasks, of which the first asked last."""
    env = harnessed(Gathered, tmp_path, use_wandb=False)
    env.server.servers = [ServerHarness(POLICY, respond=numbered)]
    env.first_waits_s = 0.05
    [replay] = await replayed(harnessed(Gathered, tmp_path), await rows_of(env))
    assert (replay.is_changed, replay.is_repeatable) == (True, False)


async def test_the_file_of_serve_can_be_scored_again(tmp_path: Path) -> None:
    async with LoopbackHub() as hub:
        env = harnessed(Guessing, tmp_path, rollout_server_url=hub.url, use_wandb=False)
        env.server.servers = [ServerHarness(POLICY, respond=numbered)]
        async with serving(env):
            await until(lambda: produced(hub) >= 3)
    rows = [json.loads(line) for line in (tmp_path / "g.jsonl").read_text().splitlines()]
    found = await replayed(harnessed(Guessing, tmp_path), rows)
    assert [(each.scores, each.fault) for each in found] == [(row["scores"], None) for row in rows]
    assert rows[0]["item"] == "Guess."
    assert rows[0]["duration_s"] > 0


async def test_a_line_without_requests_cannot_be_replayed(tmp_path: Path) -> None:
    [row] = await rows_of(harnessed(Adding, tmp_path))
    del row["calls"]
    [replay] = await replayed(harnessed(Adding, tmp_path), [row])
    assert replay.fault is not None
    assert replay.fault.startswith("the line holds no requests")


class Problem(NamedTuple):
    question: str
    number: int


@dataclasses.dataclass
class Task:
    question: str


@dataclasses.dataclass
class Hint(Task):
    hint: str


class Form(BaseModel):
    fields: list[int]


@pytest.mark.parametrize(
    ("declared", "stored", "item"),
    [
        (Problem, ["1?", 1], Problem("1?", 1)),
        (Task, {"question": "1?"}, Task("1?")),
        (Task, {"question": "1?", "hint": "one"}, Hint("1?", "one")),
        (Form, {"fields": [1]}, Form(fields=[1])),
        (Problem, {"other": 1}, {"other": 1}),
        (dict[str, Any], {"a": [1]}, {"a": [1]}),
        (Any, "text", "text"),
    ],
)
def test_an_item_gets_the_type_that_the_code_declares(
    declared: Any, stored: Any, item: Any
) -> None:
    class Typed(Adding):
        def score(self, row: Any, answer: str) -> float:
            return 0.0

    Typed.score.__annotations__["row"] = declared
    found = item_of(Typed, stored)
    assert found == item
    assert type(found) is type(item)


class Strict(Adding):
    """The gold answers fail today's reward, and there are no other rows."""

    def load_rows(self, split: Split) -> Any:
        raise AssertionError("data were loaded")

    def score(self, row: Any, answer: str) -> float:
        return -1.0


def test_a_pinned_row_needs_no_data_and_no_running_loop(tmp_path: Path) -> None:
    import asyncio

    [row] = asyncio.run(rows_of(harnessed(Adding, tmp_path)))
    assert replay_scores(Adding, row) == row["scores"]
    path = tmp_path / "row.json"
    path.write_text(json.dumps(row))
    assert public_replay_scores(Strict, path, flags=["--env.seed", "1"]) == [-1.0, -1.0]
    with pytest.raises(EnvError, match="cannot be replayed: its requests changed"):
        replay_scores(changed(Adding, prompt=lambda self, row: "Add!"), row)
