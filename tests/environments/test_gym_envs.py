"""Gymnasium's games by text: what ends an episode and what it scores, and what blackjack's alternatives are worth."""

import random
import statistics
from typing import Any
from unittest.mock import Mock

import pytest

from atroposlib.errors import ConfigError
from tests.environments.game_players import call, drive_taxi, play_blackjack, play_table
from tests.environments.helpers_environments import load

pytest.importorskip("gymnasium")

FOLDER = "game_environments.gymnasium"
taxi = load(f"{FOLDER}.gym_taxi")
gymnasium_env = load(f"{FOLDER}.gymnasium_env")
no_thinking = load(f"{FOLDER}.blackjack.blackjack_env_no_thinking")
thinking = load(f"{FOLDER}.blackjack.blackjack_env_thinking")


@pytest.fixture
def made(started: Any) -> Any:
    """Start environments on a player: (environment, item, request) -> answer."""

    async def make(env_cls: Any, player: Any, **settings: Any) -> Any:
        defaults = {"dataset_path": None, "num_train_seeds": 100, "max_token_length": 2000}
        settings = {"group_size": 2, **defaults, **settings}
        env = await started(env_cls, lambda request: player(env, None, request), **settings)
        return env

    return make


async def mean_score(env: Any, *, num_seeds: int) -> float:
    rollouts = [(await env.roll_out(seed, 1, split="train"))[0] for seed in range(num_seeds)]
    return statistics.mean(rollout.outcome for rollout in rollouts)


@pytest.mark.parametrize(
    ("env_name", "arguments", "at_least"),
    [
        ("FrozenLake-v1", {"is_slippery": False}, 1.0),
        ("CliffWalking-v1", {}, -13.0),
        ("Taxi-v4", {}, 5.0),
    ],
)
async def test_a_perfect_player_wins_any_game_with_a_table(
    made: Any, env_name: str, arguments: dict[str, Any], at_least: float
) -> None:
    settings = {"env_name": env_name, "env_kwargs": arguments, "success_score": at_least}
    env = await made(gymnasium_env.GymnasiumEnv, play_table, **settings)
    assert await mean_score(env, num_seeds=4) >= at_least


async def test_blackjack_has_no_drawing_and_can_be_played(made: Any) -> None:
    env = await made(
        gymnasium_env.GymnasiumEnv,
        lambda env, item, request: "<action>0</action>",
        env_name="Blackjack-v1",
    )
    [rollout] = await env.roll_out(3, 1, split="train")
    assert rollout.messages[0]["content"].endswith("Observation: (7, 10, 0)")
    assert rollout.outcome == 1.0


@pytest.mark.parametrize("answer", ["", "2", "<action>4</action>", "<action>-1</action>"])
async def test_an_answer_without_an_action_costs_what_is_configured(made: Any, answer: str) -> None:
    env = await made(
        gymnasium_env.GymnasiumEnv, lambda env, item, request: answer, invalid_reward=-7.0
    )
    [rollout] = await env.roll_out(0, 1, split="train")
    assert (rollout.finish_reason, rollout.outcome) == ("invalid_action", -7.0)
    assert env.read_action(None, f"<action>{'9' * 5000}</action>") is None  # too long for int()
    unended = "<think>or <action>1</action>?"
    assert env.read_action(None, unended) is None


async def test_a_game_that_does_not_exist_is_refused_at_the_start(made: Any) -> None:
    with pytest.raises(ConfigError, match="NoGame"):
        await made(gymnasium_env.GymnasiumEnv, lambda *given: "", env_name="NoGame-v1")


async def test_the_episodes_of_a_seed_are_equal(made: Any) -> None:
    env = await made(taxi.GymTaxiEnv, drive_taxi)
    first, second = await env.roll_out(5, 2, split="train")
    again = (await env.roll_out(5, 1, split="train"))[0]
    other = (await env.roll_out(6, 1, split="train"))[0]
    assert first.messages == second.messages == again.messages != other.messages


async def test_the_taxi_scores_pick_up_and_delivery(made: Any) -> None:
    def stop_before(action: str) -> Any:
        def play(env: Any, item: Any, request: Any) -> str:
            answer = drive_taxi(env, item, request)
            return "I stop." if answer[-1] == action else answer

        return play

    for player, score in [(stop_before("4"), -1.0), (stop_before("5"), 0.0), (drive_taxi, 1.0)]:
        env = await made(taxi.GymTaxiEnv, player)
        assert await mean_score(env, num_seeds=3) == score


async def test_the_taxi_earns_nothing_by_picking_up_and_dropping(made: Any) -> None:
    def juggle(env: Any, item: Any, request: Any) -> str:
        question = request.prompt.rpartition("<user>")[2]
        if "is in your taxi" in question and "5 (drop off" in question:
            return "5"
        return drive_taxi(env, item, request)

    env = await made(taxi.GymTaxiEnv, juggle, max_turns=30)
    assert await mean_score(env, num_seeds=3) == 0.0


async def test_the_taxi_ends_with_an_action_that_is_not_allowed(made: Any) -> None:
    env = await made(taxi.GymTaxiEnv, lambda env, item, request: "drop off: 5.")
    [rollout] = await env.roll_out(0, 1, split="train")
    assert (rollout.finish_reason, rollout.outcome) == ("invalid_action", -1.0)


async def test_a_good_blackjack_player_beats_a_random_one(made: Any) -> None:
    rng = random.Random(0)
    players = {
        "good": play_blackjack,
        "random": lambda env, item, request: call(rng.choice(["hit", "stick"])),
        "silent": lambda env, item, request: "I stick.",
    }
    means = {}
    for name, player in players.items():
        env = await made(no_thinking.BlackjackEnvNoThinking, player)
        means[name] = await mean_score(env, num_seeds=150)
    assert means["good"] > means["random"] + 0.2 > means["silent"] == -1.0


@pytest.mark.parametrize(
    ("answer", "action"),
    [
        (call("hit"), "hit"),
        (call("split"), None),
        (call("hit") + call("stick").partition("</think>")[2], None),
        ("hit", None),
        ('<tool_call>{"name": "play", "arguments": {"action": "hit"}}</tool_call>', None),
        ('<tool_call>{"name": "take_action", "arguments": {"action": ["hit"]}}</tool_call>', None),
        ('<tool_call>{"name": "take_action", "arguments": "hit"}</tool_call>', None),
    ],
)
def test_only_one_valid_call_is_an_action(answer: str, action: str | None) -> None:
    assert no_thinking.action_of(answer) == action


async def test_every_turn_of_a_thoughtful_hand_is_a_group_of_alternatives(made: Any) -> None:
    """Seed 10 starts with 7 against 10; hitting gives 14. Sticking on 7 loses, and so does a call that is missing."""
    answers = [call("hit"), call("stick"), "I wait.", call("hit").replace("I hit.", "")]
    env = await made(
        thinking.BlackjackEnv, lambda env, item, request: answers[request.choice], group_size=4
    )
    groups, _ = await env.collect_trajectories(10)
    first, second = groups[0], groups[1]
    hit, stick, silent, thoughtless = first["scores"]
    assert [each["action"] for each in first["overrides"]] == ["hit", "stick", "stick", "hit"]
    assert hit > thoughtless > stick > silent
    assert hit - thoughtless == pytest.approx(0.4, abs=0.01)
    assert stick - silent == pytest.approx(0.8, abs=0.01)
    assert "Your sum is 14" in second["messages"][0][-2]["content"]
    assert second["messages"][0][-3]["content"] == answers[0]


async def test_the_alternatives_of_a_hand_are_played_in_one_game(
    made: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    env = await made(
        thinking.BlackjackEnv, lambda env, item, request: call(["hit", "stick"][request.choice % 2])
    )
    make_game = Mock(wraps=env.make_game)
    monkeypatch.setattr(env, "make_game", make_game)
    await env.collect_trajectories(10)
    assert make_game.call_count == 1


async def test_the_better_action_has_the_higher_score_on_average(made: Any) -> None:
    good, bad = [], []
    env = await made(
        thinking.BlackjackEnv, lambda env, item, request: call(["hit", "stick"][request.choice % 2])
    )
    for seed in range(100):
        for group in (await env.collect_trajectories(seed))[0]:
            system, *_, question = group["messages"][0][:-1]
            request = type("Request", (), {"prompt": question["content"]})
            is_hit_better = '"hit"' in play_blackjack(env, None, request)
            hit, stick = group["scores"]
            good.append(hit if is_hit_better else stick)
            bad.append(stick if is_hit_better else hit)
    assert statistics.mean(good) > statistics.mean(bad) + 0.2


async def test_old_turns_are_forgotten_where_there_is_no_room(made: Any) -> None:
    env = await made(thinking.BlackjackEnv, lambda env, item, request: call("hit"))
    groups, _ = await env.collect_trajectories(10)
    assert len(groups[1]["messages"][0]) == 5
    turn = thinking.Turn(10, (), [{"role": "system", "content": "Play."}])
    for content in ("7", "hit", "8", "hit", "9"):
        role = "assistant" if content == "hit" else "user"
        turn.messages.append({"role": role, "content": content})
    env.config.max_trajectory_tokens = env.config.max_token_length
    kept = env.next_turn(turn, groups[0]).messages
    assert [message["role"] for message in kept] == ["system", "user", "assistant", "user"]
    assert [kept[0]["content"], kept[1]["content"]] == ["Play.", "9"]
    assert "Your sum is 14" in kept[-1]["content"]
