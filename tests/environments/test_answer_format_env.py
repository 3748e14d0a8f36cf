"""Answer formats: which question gets which, and which pause."""

import asyncio
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from atroposlib.envs.answer_formats import FORMATS
from atroposlib.errors import ConfigError
from tests.environments.helpers_environments import load, restore

formats = load("answer_format_environment.answer_format_environment")


@pytest.fixture
def started(started: Any) -> Any:
    return partial(started, formats.AnswerFormatEnv)


async def test_formats_fit_their_questions(started: Any) -> None:
    env = await started()
    kinds = {row.text: row.kind for row in env.train_rows}
    for _ in range(100):
        item = await env.get_next_item()
        kind = FORMATS[item.answer_format].kind
        assert kind in ("generic", kinds[item.question])


async def test_a_format_with_enough_mixed_groups_pauses(started: Any) -> None:
    settings = {"supported_formats": ["json", "yaml"], "format_group_threshold": 1}
    env = await started(ensure_equivalent_ratios=True, **settings)
    env.shape_group(formats.Item("?", "yaml"), {"scores": [1.0, 1.0]})  # teaches nothing
    env.shape_group(formats.Item("?", "json"), {"scores": [1.0, 0.0]})
    assert {(await env.get_next_item()).answer_format for _ in range(20)} == {"yaml"}
    env.shape_group(formats.Item("?", "yaml"), {"scores": [1.0, 0.0]})
    assert {(await env.get_next_item()).answer_format for _ in range(20)} == {"json", "yaml"}


async def test_the_success_of_every_format_survives_a_restart(started: Any, tmp_path: Path) -> None:
    settings = {"supported_formats": ["json", "yaml"], "format_group_threshold": 1}
    env = await started(**settings)
    env.shape_group(formats.Item("?", "yaml"), {"scores": [1.0] * 4})  # too few for a rate
    env.shape_group(formats.Item("?", "json"), {"scores": [0.0] * 4})
    env.shape_group(formats.Item("?", "json"), {"scores": [1.0] * 5 + [0.0] * 3})
    resumed = restore(env, await started(**settings), tmp_path)
    assert resumed.train_metrics() == {
        "balance/min_successful_groups": 0,
        "balance/max_successful_groups": 1,
        "balance/avg_successful_groups": 0.5,
        "balance/completion_percentage": 50.0,
        "balance/formats_completed": 1,
        "balance/formats_total": 2,
        **{f"balance/formats_{percent}pct_progress": 1 for percent in (25, 50, 75)},
        "formats/total_attempts": 16,
        "formats/total_successes": 9,
        "formats/overall_success_rate": 9 / 16,
        "formats/num_formats_tested": 1,
        "formats/high_performing_count": 0,
        "formats/medium_performing_count": 0,
        "formats/low_performing_count": 1,
        "formats/avg_success_rate": 5 / 12,
        "formats/best_success_rate": 5 / 12,
        "formats/worst_success_rate": 5 / 12,
        "groups/total_processed": 3,
        "groups/successful": 2,
        "groups/failed": 1,
        "groups/success_rate": pytest.approx(2 / 3),
        "groups/avg_score_overall": 9 / 16,
        "groups/avg_score_recent": pytest.approx((1 + 5 / 8) / 3),
        "groups/best_score_recent": 1.0,
        "groups/worst_score_recent": 0.0,
        "distribution/most_used_format_pct": pytest.approx(200 / 3),
        "distribution/least_used_format_pct": pytest.approx(100 / 3),
        "distribution/usage_ratio": 2.0,
    }


async def test_an_unknown_format_is_refused(started: Any) -> None:
    with pytest.raises(ConfigError, match="there is no format 'jsn'"):
        await started(supported_formats=["jsn"])


async def test_a_text_that_takes_long_to_read_earns_nothing_and_blocks_nothing(
    started: Any,
) -> None:
    env = await started(reward_timeout_s=0.5)
    score = asyncio.ensure_future(
        env.score(formats.Item("?", "yaml"), f"<think>x</think>{'{' * 20_000}")
    )
    await asyncio.sleep(0)
    assert not score.done()  # it runs elsewhere
    assert await score == 0.0
    assert await env.score(formats.Item("?", "yaml"), "<think>x</think>answer: B") == 1.0
