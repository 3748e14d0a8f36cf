"""Scripted players that read a game from the prompt and play it as well as possible."""

import functools
import re
from typing import Any

from atroposlib.inference.harness import HarnessRequest
from tests.environments.helpers_environments import load

DISCOUNT = 0.99
NUM_SWEEPS = 200


@functools.cache
def best_actions(env_name: str, **arguments: Any) -> dict[int, int]:
    """Return the best action in every state of a game with a table of transitions, by value iteration."""
    import gymnasium

    game = gymnasium.make(env_name, disable_env_checker=True, **arguments)
    table: dict[int, dict[int, list[Any]]] = game.unwrapped.P
    game.close()
    values = dict.fromkeys(table, 0.0)

    def value_of(state: int, action: int) -> float:
        return sum(
            probability * (reward + (0.0 if ended else DISCOUNT * values[after]))
            for probability, after, reward, ended in table[state][action]
        )

    for _ in range(NUM_SWEEPS):
        last = values.copy()
        for state in table:
            values[state] = max(value_of(state, action) for action in table[state])
        if values == last:
            break
    return {state: max(table[state], key=lambda a: value_of(state, a)) for state in table}


def play_table(env: Any, item: Any, request: HarnessRequest) -> str:
    """Play `gymnasium_env`."""
    state = int(re.findall(r"Observation: (\d+)", request.prompt)[-1])
    actions = best_actions(env.config.env_name, **env.config.env_kwargs)
    return f"I go on. <action>{actions[state]}</action>"


def drive_taxi(env: Any, item: Any, request: HarnessRequest) -> str:
    """Play `gym_taxi`."""
    found = re.findall(
        r"cell \((\d), (\d)\)\. The passenger (?:waits at (\w)|is in).* to go to (\w)",
        request.prompt,
    )
    row, column, waits_at, destination = found[-1]
    passenger = "RGYB".index(waits_at) if waits_at else 4
    state = ((int(row) * 5 + int(column)) * 5 + passenger) * 4 + "RGYB".index(destination)
    return f"I follow the plan. {best_actions('Taxi-v4')[state]}"


def play_blackjack(env: Any, item: Any, request: HarnessRequest) -> str:
    """Play either blackjack by expected values."""
    play = load("game_environments.gymnasium.blackjack.optimal_play")
    state = r"Your sum is (\d+), (with|without) [^.]*\. The dealer shows (an ace|\d+)"
    shown_total, shown_ace, shown_dealer = re.findall(state, request.prompt)[-1]
    total, ace = int(shown_total), int(shown_ace == "with")
    dealer = 1 if shown_dealer == "an ace" else int(shown_dealer)
    is_better_to_stick = play.stick_value(total, dealer) >= play.best_value(total, dealer, ace)
    return call("stick" if is_better_to_stick else "hit")


def call(action: str) -> str:
    """Return a valid answer of either blackjack."""
    arguments = f'{{"action": "{action}"}}'
    return (
        f"<think>I {action}.</think>"
        f'<tool_call>{{"name": "take_action", "arguments": {arguments}}}</tool_call>'
    )
