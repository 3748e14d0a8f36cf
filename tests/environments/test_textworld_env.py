"""TextWorld: its own solutions win, a command is one command, and what ends an episode."""

from typing import Any

import pytest

from tests.environments.helpers_environments import load

textworld_env = load("game_environments.textworld_env.textworld_env")


@pytest.mark.parametrize(
    ("answer", "command"),
    [
        (" take coin\n", "take coin"),
        ("Go East", "Go East"),
        ("take chef's half-eaten pie", "take chef's half-eaten pie"),
        ("", None),
        ("coin", None),
        ("I think.\ntake coin", None),
        ("go east. take coin", None),
        ("go east then take coin", None),
        ("take coin, go east", None),
        ("restart", None),
        ("save", None),
        ("tw-extra-infos description", None),
    ],
)
def test_only_one_command_of_the_game_reaches_it(answer: str, command: str | None) -> None:
    assert textworld_env.command_in(answer, ["go", "take"]) == command


def test_items_are_the_same_for_every_process_and_cover_the_difficulties() -> None:
    config, servers = textworld_env.TextWorldEnv.config_init()
    env = textworld_env.TextWorldEnv.__new__(textworld_env.TextWorldEnv)
    env.config = config
    games = [env.game_of(seed) for seed in range(200)]
    assert games == [env.game_of(seed) for seed in range(200)]
    assert {game.challenge for game in games} == set(textworld_env.CHALLENGES)
    cooking = [game.settings for game in games if game.challenge == "tw-cooking"]
    assert all(settings["take"] <= settings["recipe"] for settings in cooking)
    assert {settings["go"] for settings in cooking} == {1, 6, 9, 12}
    levels = [game.settings["level"] for game in games if game.challenge == "tw-coin_collector"]
    assert 1 <= min(levels) < 30 < max(levels) <= 300


def test_the_share_of_games_is_that_of_their_outcomes() -> None:
    played = [textworld_env.Played(*each) for each in [(1.0, "won", 3), (0.5, "lost", 2)]]
    metrics = textworld_env.outcomes([*played, textworld_env.Played(0.0, "tokens", 4)])
    assert metrics["avg_outcome"] == 0.0
    assert (metrics["win_count_absolute"], metrics["draw_count_absolute"]) == (1, 1)
    assert (metrics["avg_reward_score"], metrics["avg_episode_steps"]) == (0.5, 3.0)


@pytest.mark.drill
@pytest.mark.timeout(180)
@pytest.mark.parametrize("challenge", textworld_env.CHALLENGES)
async def test_the_solution_wins_and_a_cheap_trick_scores_nothing(
    started: Any, challenge: str
) -> None:
    pytest.importorskip("textworld")
    answers: dict[str, Any] = {
        "nothing": lambda prompt: "",
        "an echo": lambda prompt: prompt,
        "all verbs": lambda prompt: "look\ninventory\ntake coin\nopen door\ngo north",
        "looking": lambda prompt: "look",
    }
    player = ""
    env = await started(
        textworld_env.TextWorldEnv,
        lambda request: answers[player](request.prompt),
        challenge_names=[challenge],
        randomize_challenge_settings=False,
        num_train_seeds=1,
        num_eval_rows=1,
        max_turns=12,
        reward_timeout_s=300.0,
        dataset_path=None,
    )
    item = await env.get_next_item()
    [answers["solution"]] = env.example_answers(item)
    found = {}
    for player in answers:
        [rollout] = await env.roll_out(item, 1, split="train")
        found[player] = rollout.outcome
    assert found == {**dict.fromkeys(answers, 0.0), "solution": 1.0}
    [*losers, winner] = env.played[challenge]
    assert {each.reason for each in losers} == {"max_turns", "length"}  # an echo is too long
    assert (winner.reason, losers[0].num_turns) == ("won", 12)
