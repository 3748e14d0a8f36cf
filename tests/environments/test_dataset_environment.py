"""An environment by configuration: which rewards an answer earns, and what the rewards and the model are given."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import yaml

from atroposlib.config import build
from atroposlib.envs.reward_fns import RewardFunction, registry
from atroposlib.errors import ConfigError
from tests.environments.helpers_environments import load

datasets = load("dataset_environment.dataset_env")

THINKING = {"type": "format", "weight": 0.5, "params": {"preferred_tags": ["think"]}}
SPOILT = {"type": "format", "weight": 1.5, "params": {"preferred_tags": ["done"]}}


@pytest.fixture
def started(started: Any) -> Any:
    return partial(
        started,
        datasets.DatasetEnv,
        lambda request: request.prompt,
        prompt_field="question",
        reward_functions=[THINKING],
    )


@pytest.mark.parametrize(
    ("settings", "score"),
    [
        ({"reward_functions": [THINKING]}, 0.5),
        ({"reward_functions": ["format"]}, 1.0),
        ({"reward_functions": [THINKING, SPOILT]}, 0.25),
        ({"reward_functions": [], "reward_funcs": [THINKING, SPOILT]}, 0.5),
    ],
)
async def test_rewards_are_weighted(started: Any, settings: dict[str, Any], score: float) -> None:
    env = await started(**settings)
    assert await env.score(env.train_rows[0], "<think>a</think> b") == score
    assert await env.score(env.train_rows[0], "a") == 0.0


async def test_a_row_has_the_value_of_each_reward(started: Any) -> None:
    parts = [{"type": "format", "params": {"name": tag, "preferred_tags": [tag]}} for tag in "ab"]
    env = await started(reward_functions=parts, prefill="<a>", group_size=2)
    env.server.servers[0].respond = lambda request: ["x</a>", "y"][request.choice]
    group, _ = await env.collect_trajectories(env.train_rows[0])
    values = [
        (score, noted["a"], noted["b"])
        for score, noted in zip(group["scores"], group["overrides"], strict=True)
    ]
    assert values == [(0.5, 1.0, 0.0), (0.0, 0.0, 0.0)]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"reward_functions": []}, "give --env.reward_functions"),
        ({"reward_funcs": ["format"]}, "give --env.reward_functions"),
        ({"prompt_field": "query"}, "no field 'query'; it has question, answer"),
        ({"answer_field": "gold"}, "no field 'gold'"),
    ],
)
async def test_a_wrong_configuration_is_refused(
    started: Any, settings: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        await started(**settings)


async def test_a_reward_gets_the_row_and_the_whole_answer(
    started: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: dict[str, Any] = {}

    class Spy(RewardFunction):
        def compute(self, completions: Any, **kwargs: Any) -> list[float]:
            seen.update(kwargs, completions=completions)
            return [1.0] * len(completions)

    monkeypatch.setitem(registry._factories, "spy_of_this_test", Spy)
    env = await started(
        reward_functions=["spy_of_this_test"],
        answer_field="answer",
        ground_truth_field="question",
        system_prompt="Think.",
        prefill="<think>",
        max_token_length=1000,
        group_size=2,
    )
    row = env.train_rows[0]
    group, _ = await env.collect_trajectories(row)
    assert seen["solution"] == [row["answer"]] * 2
    assert seen["ground_truth"] == [row["question"]] * 2
    assert seen["item"] == [row] * 2
    assert all(text.startswith("<think>") for text in seen["completions"])
    assert [message["role"] for message in env.prompt(row)] == ["system", "user", "assistant"]
    assert env.tokenizer.decode(group["tokens"][0]).count("<assistant><think>") == 2
    assert env.reward_metrics["reward/spy/mean_raw"] == 1.0


async def test_the_token_limit_rises(started: Any) -> None:
    env = await started(min_tokens=10, max_tokens=30, length_warmup_steps=2)
    for step, split, limit in [
        (0, "train", 10),
        (1, "train", 20),
        (5, "train", 30),
        (0, "eval", 30),
    ]:
        env.curr_step = step
        async with env.chat_session(split) as chat:
            assert chat.max_tokens == limit


async def test_evaluation_rows_come_from_the_configured_data_set(started: Any) -> None:
    env = await started()
    assert env.hub_rows("train") is env.hub_rows("eval") is None
    own = await started(dataset_name="a", dataset_config="c", eval_split="test")
    assert own.hub_rows("eval") == datasets.HubRows(path="a", config="c", split="test")
    other = await started(dataset_name="a", dataset_config="c", eval_dataset_name="b")
    assert other.hub_rows("eval") == datasets.HubRows(path="b", config=None, split="test")


@pytest.mark.parametrize("name", ["gsm8k"])
def test_the_example_configurations_are_valid(name: str) -> None:
    path = Path(datasets.__file__).parent / "configs" / f"{name}.yaml"
    config = build(datasets.AnyDatasetConfig, yaml.safe_load(path.read_text())["env"], {})
    assert datasets.make_reward(config).normalization == "sum"
