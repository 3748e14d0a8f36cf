"""MultiTurnEnv on a scripted engine: token-exact turns, rewards per turn, and every way an episode ends."""

from collections.abc import Callable
from typing import Any

import pytest

from atroposlib.envs.multi_turn_env import Episode, MultiTurnEnv, Step
from atroposlib.errors import EngineRejected, EnvError
from atroposlib.inference.harness import ByteTokenizer, HarnessRequest
from atroposlib.scored_data import Strictness, check_group
from tests.builders.environments import Offline
from tests.envs.helpers_envs import group_of, make_env, trained_texts


class Guess(Offline, MultiTurnEnv):
    """The row is a number; the reply to a guess is higher or lower; a hit is worth 1, a miss -0.25."""

    name = "guess"

    def load_rows(self, split: str) -> Any:
        return range(1, 9)

    def prompt(self, row: Any) -> Any:
        return "Guess my number."

    def step(self, episode: Episode, answer: str) -> Any:
        guess = int(answer)
        if guess == episode.row:
            return Step(reward=1.0, done=True, reason="found")
        return Step("higher" if guess < episode.row else "lower", reward=-0.25)


def count_up(request: HarnessRequest) -> str:
    """Guess 1, then 2, ..."""
    return str(request.prompt.count("<assistant>"))


def make(
    env_cls: type[Any] = Guess,
    *,
    respond: Callable[[HarnessRequest], str] = count_up,
    **settings: Any,
) -> Any:
    return make_env(env_cls, respond=respond, **settings)


async def test_each_turn_sends_the_sampled_tokens_and_all_answers_are_trained_and_scored() -> None:
    env = make()
    group = await group_of(env, 3)
    checked = check_group(group, strictness=Strictness.MEANING)
    assert checked.num_sequences == 2
    tokens = group["tokens"][0]
    assert env.tokenizer.decode(tokens) == (
        "<user>Guess my number.<eos><assistant>1<eos><user>higher<eos>"
        "<assistant>2<eos><user>higher<eos><assistant>3<eos>"
    )
    assert trained_texts(group)[0] == "1<eos>2<eos>3<eos>"
    sent = [r["input_ids"] for r in env.server.servers[0].requests]
    assert all(ids == tokens[: len(ids)] for ids in sent)
    assert len(sent) == 6
    assert group["scores"] == [0.5, 0.5]
    details = {"turn_rewards": [-0.25, -0.25, 1.0], "done_reason": "found"}
    assert group["overrides"] == [details, details]
    assert env.counts == {"done_found": 2, "turns": 6}


async def test_every_episode_is_ended_once_also_if_its_engine_fails() -> None:
    class Closing(Guess):
        ended: list[Any]

        async def end(self, episode: Episode) -> None:
            self.ended.append(episode.row)

    env = make(Closing)
    env.ended = []
    await group_of(env, 3)
    assert env.ended == [3, 3]
    env.server.servers[0].fail(EngineRejected("too long"))
    with pytest.raises(EngineRejected, match="too long"):  # as itself
        await group_of(env, 3)
    assert env.ended == [3, 3, 3, 3]


async def test_max_turns_ends_an_episode_with_the_unfinished_score() -> None:
    class Strict(Guess):
        unfinished_score = -1.0

    env = make(Strict, max_turns=2)
    group = await group_of(env, 8)
    assert group["scores"] == [-1.5, -1.5]
    assert env.counts["done_max_turns"] == 2


async def test_answer_that_was_cut_off_is_not_stepped() -> None:
    env = make(respond=lambda request: "not a number", max_token_length=5)
    group = await group_of(env, 3)
    assert group["scores"] == [0.0, 0.0]
    assert env.counts["done_length"] == 2


@pytest.mark.parametrize("limits", ["trainer", "engine"])
async def test_episode_ends_before_it_outgrows_the_trainer_or_the_engine(limits: str) -> None:
    env = make(max_turns=99, max_token_length=50)
    if limits == "trainer":
        env.max_token_len = 200
    else:
        env.server.servers[0].context_len = 200
    group = await group_of(env, -1)
    assert env.counts["done_tokens"] == 2
    assert 100 < max(map(len, group["tokens"])) < 200


async def test_turn_that_could_not_be_judged_fails_the_episode_without_a_score() -> None:
    class Unsure(Guess):
        async def step(self, episode: Episode, answer: str) -> Step:
            episode.state["seen"] = answer
            return Step("more", reward=None if episode.row == 1 else 0.5)

    env = make(Unsure, max_turns=1)
    assert await group_of(env, 1) is None
    assert env.num_reward_failures == 2
    assert env.counts["done_unjudged"] == 2
    assert (await env.collect_trajectories(2))[0]["scores"] == [0.5, 0.5]


async def test_reset_gives_each_episode_a_state_of_its_own() -> None:
    class Stateful(Guess):
        async def reset(self, row: Any) -> Episode:
            return Episode(row=row, messages=self.conversation(row), state={"left": 2})

        def step(self, episode: Episode, answer: str) -> Step:
            episode.state["left"] -= 1
            self.note(turn_rewards=9.0, left=episode.state["left"], sft=True)
            return Step("again", reward=1.0, done=episode.state["left"] == 0)

    env = make(Stateful)
    group = await group_of(env, 1)
    shown = {"turn_rewards": [1.0, 1.0], "done_reason": "done", "left": 0}  # no note replaces them
    assert group["overrides"] == [shown] * 2


@pytest.mark.parametrize("reply", ["", [], ["a text is no message"]])
async def test_step_that_says_nothing_is_an_error_that_names_it(reply: Any) -> None:
    class Mute(Guess):
        def step(self, episode: Episode, answer: str) -> Step:
            return Step(reply)

    env = make(Mute)
    await env.setup()
    with pytest.raises(EnvError, match=r"Mute\.step\(\) neither ended the episode nor replied"):
        await env.collect_trajectories(1)


async def test_evaluation_plays_episodes_and_counts_the_solved_ones() -> None:
    class Short(Guess):
        def step(self, episode: Episode, answer: str) -> Step:
            return Step(reward=float(int(answer) == episode.row), done=True)

    env = make(Short)
    await env.setup()
    metrics = await env.evaluate()
    assert metrics["eval/pass@1"] == 1 / 8
    assert env.counts == {}


class Forgetful(ByteTokenizer):
    """Its template shows only the last two messages: the past is rewritten at every turn."""

    def apply_chat_template(self, messages: Any, *args: Any, **options: Any) -> Any:
        return super().apply_chat_template(messages[-2:], *args, **options)


async def test_template_that_rewrites_the_past_makes_a_sequence_of_each_part() -> None:
    class Rewritten(Guess):
        def load_tokenizer(self) -> Any:
            return Forgetful()

    env = make(Rewritten, respond=lambda request: str(request.call % 3 + 1))
    group = await group_of(env, 3)
    checked = check_group(group, strictness=Strictness.MEANING)
    assert checked.num_sequences == 6
    assert group["group_overrides"] == {"group_size": 2}
    assert group["rollout"] == [0, 0, 0, 1, 1, 1]
    assert group["scores"] == [0.5] * 6
    assert sorted(trained_texts(group)) == [f"{guess}<eos>" for guess in (1, 1, 2, 2, 3, 3)]
