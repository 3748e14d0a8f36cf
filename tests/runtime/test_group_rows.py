"""Rows of `process`: what they say beside the group, with token ids and without."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from atroposlib.envs.base import APIServerConfig, BaseEnv
from atroposlib.envs.dataset_env import DatasetEnv, Split
from atroposlib.envs.env_config import ProcessOptions
from atroposlib.envs.judge_env import JudgeEnv
from atroposlib.envs.multi_turn_env import Episode, MultiTurnEnv, Step
from atroposlib.inference.harness import HarnessRequest, ServerHarness
from atroposlib.inference.servers.openai import OpenAIServer
from atroposlib.runtime.group_rows import item_json
from atroposlib.runtime.process import process
from tests.builders.environments import Offline

POLICY = APIServerConfig(model_name="policy", base_url="http://policy/v1", prompt_price=2.0)


def answers(request: HarnessRequest) -> str:
    return f"answer {request.choice}"


class Adding(Offline, DatasetEnv):
    """Rows of two numbers."""

    name = "adding"

    def load_rows(self, split: Split) -> Any:
        return [{"a": i, "b": 1} for i in range(6)] if split == "train" else []

    def prompt(self, row: Any) -> str:
        return f"{row['a']} + {row['b']}?"

    def gold_answer(self, row: Any) -> str:
        return str(row["a"] + row["b"])

    def score(self, row: Any, answer: str) -> float:
        return 1.0 if answer in (self.gold_answer(row), "answer 1") else 0.0


def config_of(env_cls: type[BaseEnv], folder: Path, **fields: Any) -> Any:
    values = {
        "group_size": 2,
        "total_steps": 1,
        "include_messages": True,
        "ensure_scores_are_not_same": False,
        "data_path_to_save_groups": str(folder / "g.jsonl"),
        **fields,
    }
    return env_cls.env_config_cls(**values)


def harnessed(env_cls: Any, folder: Path, *, config: Any = POLICY, **fields: Any) -> Any:
    env = env_cls(config_of(env_cls, folder, **fields), [config], testing=True)
    env.server.servers = [ServerHarness(config, respond=answers)]
    return env


async def rows_of(env: BaseEnv, options: ProcessOptions | None = None) -> list[dict[str, Any]]:
    result = await process(env, options)
    return [json.loads(line) for line in result.path.read_text().splitlines()]


async def test_a_row_tells_what_was_asked_answered_and_used(tmp_path: Path) -> None:
    env = harnessed(Adding, tmp_path)
    [row] = await rows_of(env)
    first = env.train_rows.index(row["item"])
    prompt = [{"role": "user", "content": f"{first} + 1?"}]
    assert row["item_id"] == 0
    assert row["gold_answer"] == str(first + 1)
    assert row["prompt"] == prompt
    assert row["completions"] == ["answer 0", "answer 1"]
    assert row["finish_reasons"] == ["stop", "stop"]
    assert row["scores"] == [0.0, 1.0]
    assert row["has_token_ids"] is True
    assert row["environment"] == "adding"
    assert row["environment_source"]["file"] == Path(__file__).name
    assert row["atroposlib_version"]
    assert row["group_id"]
    assert row["group_size"] == 2
    assert row["duration_s"] >= 0
    [call] = row["calls"]
    assert (call["model"], call["base_url"]) == ("policy", "http://policy/v1")
    assert call["prompt"] == prompt
    assert [answer["text"] for answer in call["answers"]] == ["answer 0", "answer 1"]
    assert call["sampling"] == {"n": 2, "max_tokens": 2048, "temperature": 1.0}
    num_prompt = sum(mask == -100 for mask in row["masks"][0])
    num_sampled = sum(mask != -100 for masks in row["masks"] for mask in masks)
    assert row["usage"] == {
        "num_requests": 1,
        "prompt_tokens": num_prompt,
        "completion_tokens": num_sampled,
        "cost_usd": pytest.approx(2e-6 * num_prompt),
    }


class Judged(Offline, JudgeEnv):
    """A judge that gives 7 to every answer."""

    def load_rows(self, split: Split) -> Any:
        return ["Write."] if split == "train" else []

    def prompt(self, row: Any) -> str:
        return str(row)


async def test_a_row_has_the_verdicts_of_a_judge(tmp_path: Path) -> None:
    env = harnessed(Judged, tmp_path)
    judge = APIServerConfig(model_name="judge", base_url="http://judge/v1")
    env.judge = type(env.server)([judge], testing=True)
    env.judge.servers = [ServerHarness(judge, respond=lambda request: "Good. Score: 7")]
    [row] = await rows_of(env)
    verdicts = [call for call in row["calls"] if call["model"] == "judge"]
    assert [call["answers"][0]["text"] for call in verdicts] == ["Good. Score: 7"] * 2
    assert row["scores"] == [0.7, 0.7]
    assert row["usage"]["num_requests"] == 3


class Guessing(Offline, MultiTurnEnv):
    """Two turns."""

    def load_rows(self, split: Split) -> Any:
        return ["Guess."] if split == "train" else []

    def prompt(self, row: Any) -> str:
        return str(row)

    def step(self, episode: Episode, answer: str) -> Step:
        return Step("Again.", reward=0.5, done=episode.num_turns == 1)


async def test_a_later_turn_holds_only_its_added_messages(tmp_path: Path) -> None:
    [row] = await rows_of(harnessed(Guessing, tmp_path))
    assert [each["turn_rewards"] for each in row["overrides"]] == [[0.5, 0.5]] * 2
    later = [call for call in row["calls"] if "continues" in call]
    assert len(row["calls"]) == 4
    assert [[message["content"] for message in call["prompt"]] for call in later] == [
        ["answer 0", "Again."]
    ] * 2
    assert row["prompt"] == [{"role": "user", "content": "Guess."}]


class Hosted(OpenAIServer):
    """An API without token ids that answers without a network."""

    async def _chat_completion_wrapper(self, **kwargs: Any) -> Any:
        return await ServerHarness(respond=answers)._chat_completion_wrapper(**kwargs)


HOSTED = APIServerConfig(model_name="gpt-4o-mini", base_url="http://hosted/v1", health_check=False)


@pytest.fixture
def _no_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ATROPOS_ALLOW_DUMMY_MANAGED_SERVER", raising=False)


def hosted(env_cls: Any, folder: Path, **fields: Any) -> Any:
    env = env_cls(config_of(env_cls, folder, **fields), [HOSTED])
    env.server.servers = [Hosted(HOSTED)]
    return env


@pytest.mark.usefixtures("_no_variable")
async def test_an_api_without_token_ids_gives_text_that_says_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    rows = await rows_of(hosted(Adding, tmp_path, total_steps=2))
    for row in rows:
        assert row["has_token_ids"] is False
        assert row["tokens"] == row["masks"] == row["inference_logprobs"] == [[], []]
        assert row["completions"] == ["answer 0", "answer 1"]
        assert row["messages"][1] == [*row["prompt"], {"role": "assistant", "content": "answer 1"}]
        assert row["finish_reasons"] == ["stop", "stop"]
    said = [
        record
        for record in caplog.records
        if "cannot be trained on token-exactly" in record.message
    ]
    assert len(said) == 1


@pytest.mark.usefixtures("_no_variable")
async def test_an_episode_without_token_ids_is_one_entry(tmp_path: Path) -> None:
    [row] = await rows_of(hosted(Guessing, tmp_path))
    assert len(row["scores"]) == 2
    said = [[message["content"] for message in messages] for messages in row["messages"]]
    assert said == [["Guess.", "answer 0", "Again.", "answer 0"]] * 2


class ByHand(Offline, BaseEnv):
    """Builds its group from nodes, as environments written for the original do."""

    name = "by_hand"

    async def setup(self) -> None:
        pass

    async def get_next_item(self) -> Any:
        return (frozenset({"role": "user", "content": "Hi"}.items()),)

    async def evaluate(self, *args: Any, **kwargs: Any) -> None:
        pass

    async def collect_trajectories(self, item: Any) -> Any:
        async with self.server.managed_server(tokenizer=self.tokenizer) as managed:
            await managed.chat_completion(messages=[dict(item[0])], n=2, max_tokens=20)
            nodes = managed.get_state()["nodes"]
        return {
            "tokens": [node.tokens for node in nodes],
            "masks": [node.masked_tokens for node in nodes],
            "inference_logprobs": [node.logprobs for node in nodes],
            "scores": [0.0, 1.0],
        }, []


@pytest.mark.usefixtures("_no_variable")
async def test_an_environment_without_messages_gets_the_text_of_the_api(tmp_path: Path) -> None:
    [row] = await rows_of(hosted(ByHand, tmp_path, use_wandb=False))
    assert [messages[-1]["content"] for messages in row["messages"]] == ["answer 0", "answer 1"]
    assert row["item"] == [[["content", "Hi"], ["role", "user"]]]
    assert row["gold_answer"] is None


class NoValues:
    """Stands for a tensor on the meta device."""

    def tolist(self) -> Any:
        raise NotImplementedError("no values")

    def __repr__(self) -> str:
        return "no values"


def test_items_without_a_json_form_are_text() -> None:
    assert bytes(item_json("a\u2028b")) == rb'"a\u2028b"'
    assert bytes(item_json({("a", 1): {2}})) == b"\"{('a', 1): {2}}\""
    assert bytes(item_json({"b": 1, "a": {3, 1, 2}})) == b'{"a":[1,2,3],"b":1}'
    assert bytes(item_json("a\ud800b")) == rb'"a\\ud800b"'
    assert bytes(item_json([NoValues()])) == b'"[no values]"'
