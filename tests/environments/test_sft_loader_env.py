"""Supervised rows: which tokens each format trains, and how many rows a step gets."""

from functools import partial
from typing import Any

import pytest

from atroposlib.errors import ConfigError
from atroposlib.samples import samples
from atroposlib.scored_data import IGNORE_INDEX, Strictness, check_group
from tests.environments.helpers_environments import load

sft = load("sft_loader_server")

CHAT = [
    {"from": "system", "value": "s"},
    {"from": "human", "value": "q"},
    {"from": "gpt", "value": "first"},
    {"from": "human", "value": "r"},
    {"from": "gpt", "value": "last"},
]


@pytest.fixture
def started(started: Any) -> Any:
    return partial(started, sft.SFTEnv)


async def trained_text(env: Any, row: dict[str, Any]) -> str:
    """Return the trained part of the group of a row that passes the gate and gets advantage 1."""
    group, _ = await env.collect_trajectories(row)
    checked = check_group(group, strictness=Strictness.MEANING)
    [sample] = samples([checked])
    assert sample.is_supervised
    masks = group["masks"][0]
    is_trained = [float(label != IGNORE_INDEX) for label in masks]
    assert sample.advantages[1:].tolist() == is_trained[1:]  # nothing predicts the first token
    return env.tokenizer.decode([label for label in masks if label != IGNORE_INDEX])


ORIGINAL = {"conversations": CHAT}
OPENAI = {"conversations": [sft.message_of(turn) for turn in CHAT]}
TEXT = {"dataset_format": "completion", "dataset_column_name": "text"}
PREFIXED = TEXT | {"dataset_format": "prefix_completion", "prefix_column_name": "prefix"}
REST = {"text": " and the rest", "prefix": "The begin"}


@pytest.mark.parametrize(
    ("settings", "row", "trained"),
    [
        ({}, ORIGINAL, "first<eos>last<eos>"),
        ({"mask_everything_but_last_step": True}, ORIGINAL, "last<eos>"),
        ({"dataset_format": "oai_format"}, OPENAI, "first<eos>last<eos>"),
        (TEXT, {"text": "all of it"}, "<bos>all of it<eos>"),
        (PREFIXED, REST, " and the rest<eos>"),
        (PREFIXED | {"mask_everything_but_assistant_answer": False}, REST, "<bos>The begin and the rest<eos>"),
    ],
)  # fmt: skip
async def test_each_format_trains_the_answer(
    started: Any, settings: dict[str, Any], row: dict[str, Any], trained: str
) -> None:
    assert await trained_text(await started(**settings), row) == trained


async def test_a_missing_column_is_named(started: Any) -> None:
    env = await started(dataset_column_name="text")
    with pytest.raises(ConfigError, match="no column 'text'; it has conversations"):
        await env.collect_trajectories(await env.get_next_item())


async def test_evaluation_measures_the_rows(started: Any) -> None:
    env = await started(max_token_length=10)
    metrics = await env.evaluate()
    assert metrics["eval/mean_tokens"] > metrics["eval/mean_trained_tokens"] > 10
    assert metrics["eval/share_longer_than_max_token_length"] == 1.0


async def test_a_step_gets_its_rows_and_some_steps_none(started: Any) -> None:
    env = await started(max_sft_per_step=2, add_every_n_steps=2)
    num_rows = []
    for step in range(4):
        env.curr_step = step
        rows = [await env.get_next_item() for _ in range(4)]
        num_rows.append(sum(row is not None for row in rows))
    assert num_rows == [2, 0, 2, 0]
    assert env.num_items == 4
