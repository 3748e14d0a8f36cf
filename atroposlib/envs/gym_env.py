"""`GymEnv`: a Gymnasium environment as a conversation. Define `read_action`, and override what differs.

A row is a seed, so that an episode repeats exactly: every episode of a group starts in the same state, and the same
actions lead to the same states. `episode.state` holds the game, its last observation and the one before.
Used by the environments in `environments/game_environments/gymnasium`. Extra: games.
"""

from __future__ import annotations

from abc import abstractmethod
from asyncio import to_thread
from collections.abc import Sequence
from typing import Any, ClassVar

from pydantic import AliasChoices, Field

from atroposlib.envs.base import BaseEnvConfig
from atroposlib.envs.dataset_env import Split
from atroposlib.envs.multi_turn_env import Episode, MultiTurnEnv, MultiTurnEnvConfig, Step
from atroposlib.errors import ConfigError, require


class GymEnvConfig(MultiTurnEnvConfig):
    env_name: str = ""
    """Gymnasium's id, such as "Taxi-v4"."""
    env_kwargs: dict[str, Any] = Field(default_factory=dict)
    """Arguments of `gymnasium.make`, as JSON: {"is_slippery": false}."""
    num_train_seeds: int = Field(default=100_000, ge=1)
    """Training uses the seeds from 0 to this number, evaluation the next `num_eval_rows`."""
    num_eval_rows: int = Field(
        default=100, ge=0, validation_alias=AliasChoices("num_eval_rows", "eval_episodes")
    )


class GymEnv(MultiTurnEnv):
    """Episodes of a Gymnasium environment with discrete actions."""

    env_config_cls: ClassVar[type[BaseEnvConfig]] = GymEnvConfig
    config: GymEnvConfig

    invalid_reward: ClassVar[float] = -1.0
    """Of an answer that chooses no action; it ends the episode."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.idle_games: list[Any] = []
        """Games between two episodes; making one may take 20 ms, and `reset` gives each a new state."""

    def opening(self, episode: Episode) -> str:
        """Return the first user message; default: the first observation."""
        return self.observe(episode)

    @abstractmethod
    def read_action(self, episode: Episode, answer: str) -> int | None:
        """Return the action that an answer chooses; None if it chooses none or an illegal one."""

    def observe(self, episode: Episode) -> str:
        """Return the user message after an action; default: the observation as text."""
        return str(episode.state["observation"])

    def reward(self, episode: Episode, action: int, game_reward: float) -> float:
        """Return the reward of an action, after it was taken; default: the game's."""
        return game_reward

    def load_rows(self, split: Split) -> Sequence[int]:
        """Return the seeds; fails if the game cannot be made."""
        self.make_game().close()
        first = self.config.num_train_seeds
        return range(first) if split == "train" else range(first, first + self.config.num_eval_rows)

    def make_game(self) -> Any:
        """Return a new Gymnasium environment, which draws itself as text if it can."""
        gymnasium = require("gymnasium", extra="games")
        name = self.config.env_name
        try:
            spec = gymnasium.spec(name)
            cls = gymnasium.envs.registration.load_env_creator(spec.entry_point)
        except (gymnasium.error.Error, ImportError) as error:
            raise ConfigError(f"--env.env_name {name}: {error}") from error
        modes = getattr(cls, "metadata", {}).get("render_modes", ())
        draws = {"render_mode": "ansi"} if "ansi" in modes else {}
        return gymnasium.make(name, disable_env_checker=True, **draws, **self.config.env_kwargs)

    async def reset(self, row: int) -> Episode:
        game = self.idle_games.pop() if self.idle_games else await to_thread(self.make_game)
        observation, info = game.reset(seed=row)
        state = {"game": game, "observation": observation, "before": observation, "info": info}
        episode = Episode(row=row, messages=[], state=state)
        if self.system_prompt:
            episode.messages.append({"role": "system", "content": self.system_prompt})
        episode.messages.append({"role": "user", "content": self.opening(episode)})
        return episode

    def step(self, episode: Episode, answer: str) -> Step:
        action = self.read_action(episode, answer)
        if action is None:
            return Step(reward=self.invalid_reward, done=True, reason="invalid_action")
        state = episode.state
        state["before"] = state["observation"]
        state["observation"], game_reward, ended, cut, state["info"] = state["game"].step(action)
        reward = self.reward(episode, action, float(game_reward))
        if ended or cut:
            return Step(reward=reward, done=True, reason="done" if ended else "step_limit")
        return Step(self.observe(episode), reward=reward)

    def end(self, episode: Episode) -> None:
        """Keep the game for another episode."""
        self.idle_games.append(episode.state["game"])

    async def close(self) -> None:
        for game in self.idle_games:
            game.close()
        await super().close()
