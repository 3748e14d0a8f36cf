"""Stepped episodes: what the trainer is asked, what its answers become, and how episodes end."""

import asyncio
import json
import re
import textwrap
from collections.abc import Awaitable
from pathlib import Path
from typing import Any

import pytest

from atroposlib.envs.base import APIServerConfig, BaseEnv, BaseEnvConfig
from atroposlib.envs.stepwise import Answer, EpisodeEnd, Request, SteppedEnv
from atroposlib.envs.tool_env import hermes_call
from atroposlib.errors import EngineProtocolError, EnvError
from atroposlib.inference.harness import ByteTokenizer
from tests.contract.test_envs_readme import ENVIRONMENTS, offline

TOKENIZER = ByteTokenizer()
README = (Path(__file__).resolve().parents[2] / "environments/README.md").read_text()


def stepped(name: str, **settings: Any) -> SteppedEnv:
    """Return an example of the guides in envs/guides."""
    return SteppedEnv(offline(name, **settings))


def shop(request: Request) -> str:
    """Look the price up, then multiply."""
    question = re.search(r"What do (\d+) pieces of (\w+)", request.prompt)
    assert question
    price = re.search(r"<tool>(\d+)", request.prompt)
    if price is None:
        return hermes_call("price", fruit=question[2])
    return str(int(question[1]) * int(price[1]))


class Chatty(BaseEnv):
    """Asks in every way: plain chat twice at once, then a text; the score is the number of distinct answers."""

    name = "chatty"

    @classmethod
    def config_init(cls) -> Any:
        return BaseEnvConfig(), [APIServerConfig(model_name="m", base_url="http://127.0.0.1:9/v1")]

    def load_tokenizer(self) -> Any:
        return TOKENIZER

    async def setup(self) -> None:
        self.items = iter(["one", "two"])
        self.cancelled = 0

    async def get_next_item(self) -> str | None:
        return next(self.items, None)

    async def collect_trajectory(self, item: str) -> Any:
        try:
            asked = [{"role": "user", "content": item}]
            chat = await self.server.chat_completion(messages=asked, n=2, temperature=0.5)
            text = await self.server.completion(prompt="once", max_tokens=3, stop=[".", 36])
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        said = [choice.message.content for choice in chat.choices] + [text.choices[0].text]
        return {
            "tokens": [5, 6],
            "masks": [-100, 6],
            "scores": float(len(set(said))),
            "overrides": {"said": said},
        }, []

    async def evaluate(self, *args: Any, **kwargs: Any) -> None: ...


async def asked(turn: Awaitable[Any]) -> Request:
    """Return a turn that is a request."""
    found = await turn
    assert isinstance(found, Request)
    return found


async def ended(turn: Awaitable[Any]) -> EpisodeEnd:
    """Return a turn that ends its episode."""
    found = await turn
    assert isinstance(found, EpisodeEnd)
    return found


async def test_the_conversation_and_its_token_ids_are_asked_together() -> None:
    async with stepped("Shopping") as env:
        episode = env.episode()
        first = await asked(episode.reset(seed=3))
        assert [message["role"] for message in first.messages] == ["system", "user"]
        assert TOKENIZER.decode(first.prompt_ids) == first.prompt
        assert first.prompt.endswith(first.messages[-1]["content"] + "<eos><assistant>")
        assert first.sampling["max_tokens"] == env.env.config.max_token_length
        call = shop(first)
        second = await asked(episode.step(call))
        assert [message["role"] for message in second.messages[2:]] == ["assistant", "tool"]
        answered = first.prompt_ids + TOKENIZER.encode(call, add_special_tokens=False)
        assert second.prompt_ids[: len(answered)] == answered
        end = await ended(episode.step(shop(second)))
        assert end.reward == 1.0
        assert end.group is not None
        [mask] = end.group["masks"]
        assert TOKENIZER.decode([t for t in mask if t != -100]) == f"{call}<eos>{shop(second)}<eos>"
        assert end.group["inference_logprobs"] is None


async def test_token_ids_and_logprobs_reach_the_group_as_they_were_sampled() -> None:
    async with stepped("CountVowels") as env:
        episode = env.episode()
        request = await asked(episode.reset(seed=0))
        end = await ended(episode.step(Answer(token_ids=[54, 2], logprobs=[-0.25, -0.5])))
        assert end.group is not None
        assert end.group["tokens"] == [[*request.prompt_ids, 54, 2]]
        assert end.group["inference_logprobs"][0][-2:] == [-0.25, -0.5]


async def test_a_seed_is_an_item_whatever_was_asked_before() -> None:
    async with stepped("CountVowels") as env, stepped("CountVowels") as other:
        turns = [await env.episode().reset(seed) for seed in (2, 0, 2)]
        again = await asked(other.episode().reset(2))
        prompts = [turn.prompt_ids for turn in turns if isinstance(turn, Request)]
        assert prompts[0] == prompts[2] == again.prompt_ids != prompts[1]


async def test_without_a_seed_the_items_come_in_order() -> None:
    async with stepped("CountVowels") as env:
        unseeded = [await env.episode().reset() for _ in range(3)]
        seeded = [await env.episode().reset(seed) for seed in range(3)]
        assert unseeded == seeded


async def test_episodes_at_once_do_not_mix() -> None:
    async with stepped("GuessNumber") as env:
        episodes = [env.episode() for _ in range(3)]
        turns = [await episode.reset(seed=0) for episode in episodes]
        assert turns[0] == turns[1] == turns[2]
        turns = list(await asyncio.gather(*(e.step(f"{i + 1}") for i, e in enumerate(episodes))))
        for i, turn in enumerate(turns):
            assert isinstance(turn, Request)
            assert turn.messages[-2]["content"] == f"{i + 1}"


async def test_requests_made_at_once_are_asked_one_by_one() -> None:
    async with SteppedEnv(Chatty(*Chatty.config_init())) as env:
        episode = env.episode()
        first = await episode.reset()
        second = await episode.step("a")
        third = await asked(episode.step("b"))
        assert first == second
        assert first.sampling == {"temperature": 0.5}
        assert (third.messages, third.prompt) == ([], "once")
        assert third.sampling == {"max_tokens": 3, "stop": ["."], "stop_token_ids": [36]}
        end = await ended(episode.step("c."))
        assert end.reward == 3.0
        assert end.group is not None
        assert end.group["overrides"] == [{"said": ["a", "b", "c"]}]


async def test_tools_of_a_plain_chat_are_in_its_prompt() -> None:
    class Describing(ByteTokenizer):
        def apply_chat_template(self, messages: Any, *args: Any, **options: Any) -> Any:
            tools = json.dumps(options.pop("tools", None))
            return tools + str(super().apply_chat_template(messages, *args, **options))

    class Tooled(Chatty):
        def load_tokenizer(self) -> Any:
            return Describing()

        async def collect_trajectory(self, item: str) -> Any:
            asked = [{"role": "user", "content": item}]
            await self.server.chat_completion(messages=asked, tools=[{"name": "look"}])

    async with SteppedEnv(Tooled(*Tooled.config_init())) as env:
        episode = env.episode()
        request = await asked(episode.reset())
        assert request.prompt.startswith('[{"name": "look"}]<user>one')
        assert TOKENIZER.decode(request.prompt_ids) == request.prompt
        await episode.close()


async def test_a_reset_abandons_the_episode_before() -> None:
    env = SteppedEnv(Chatty(*Chatty.config_init()))
    async with env:
        episode = env.episode()
        await episode.reset(0)
        await episode.reset(1)
        assert env.env.cancelled == 1  # type: ignore[attr-defined]
        await episode.close()
        assert env.env.cancelled == 2  # type: ignore[attr-defined]
        with pytest.raises(EnvError, match="call reset first"):
            await episode.step("a")
        with pytest.raises(EnvError, match="chatty has only 2 items"):
            await episode.reset(2)
        assert isinstance(await episode.reset(0), Request)


async def test_a_trainer_that_takes_too_long_gets_the_timeout() -> None:
    async with stepped("CountVowels", worker_timeout=0.01) as env:
        episode = env.episode()
        await episode.reset(0)
        await asyncio.sleep(0.05)
        with pytest.raises(TimeoutError, match="worker_timeout"):
            await episode.step("3")


async def test_closing_while_the_environment_works_ends_the_step() -> None:
    async with SteppedEnv(Chatty(*Chatty.config_init())) as env:
        episode = env.episode()
        await episode.reset(0)
        await episode.step("a")
        working = asyncio.create_task(episode.step("b"))
        await asyncio.sleep(0)
        await episode.close()
        with pytest.raises(EnvError, match="abandoned"):
            await working


async def test_an_answer_that_was_not_completed_has_no_reward() -> None:
    async with stepped("CountVowels") as env:
        episode = env.episode()
        await episode.reset(0)
        end = await ended(episode.step(Answer(token_ids=[54], finish_reason="abort")))
        assert (end.reward, end.group) == (None, None)
        assert "no score" in end.reason


async def test_wrong_logprobs_are_refused_and_the_request_waits() -> None:
    async with stepped("CountVowels") as env:
        episode = env.episode()
        await episode.reset(0)
        with pytest.raises(EngineProtocolError, match="1 logprobs for 2 token ids"):
            await episode.step(Answer(token_ids=[54, 2], logprobs=[-0.5]))
        assert isinstance(await episode.step("3"), EpisodeEnd)


async def test_every_conversation_of_an_agent_belongs_to_its_own_episode() -> None:
    assert "Doubling" in ENVIRONMENTS
    async with stepped("Doubling") as env:
        episodes = [env.episode() for _ in range(3)]
        turns = await asyncio.gather(*(e.reset(seed) for seed, e in enumerate(episodes)))
        rewards = []
        for i, (turn, episode) in enumerate(zip(turns, episodes, strict=True)):
            assert isinstance(turn, Request)
            found = re.search(r"Double (\d+)", turn.prompt)
            assert found
            end = await ended(episode.step(str(2 * int(found[1]) + i % 2)))
            rewards.append(end.reward)
        assert rewards == [1.0, 0.0, 1.0]


async def test_the_example_of_the_readme_runs(capsys: pytest.CaptureFixture[str]) -> None:
    [block] = [
        each for each in re.findall(r"```python\n(.*?)```", README, re.S) if "SteppedEnv" in each
    ]
    known = {"env": offline("CountVowels"), "sample": lambda prompt_ids, sampling: "3"}
    exec(f"async def example():\n{textwrap.indent(block, '    ')}", known)
    await known["example"]()  # type: ignore[operator]
    assert re.match(r"[01]\.0 \[\[-100, .*54, 2\]\]\n", capsys.readouterr().out)
