"""Multiple choice, text reversal and predictions: the edges of their rewards."""

import statistics
from typing import Any

import pytest

from atroposlib.envs.eval_run import hash_of
from tests.environments.helpers_environments import load, logged

mcqa = load("mcqa_thinking_env")
mmlu = load("mmlu_server")
reversal = load("text_reversal_environment")
fundamentals = load("fundamental_prediction_environment")
REPORT = fundamentals.Report("...", "revenue", "reduced", 3.5)


async def test_options_are_added_to_a_prompt_without_them(started: Any) -> None:
    env = await started(mcqa.MCQAThinkingEnv)
    row = {"prompt": "Which?", "options": ["red", "blue"], "ground_truth": "B"}
    assert env.parse_row(row).text == "Which?\n\nA. red\nB. blue"
    assert env.parse_row({**row, "prompt": "Red or red, blue?"}).text == "Red or red, blue?"


async def test_mmlu_reports_each_chosen_subject_also_of_few_stored_answers(started: Any) -> None:
    path = {"eval_dataset_path": "sample"}
    env = await started(mmlu.MMLUEnv, **path, subjects=["small_products"])
    assert {row.subject for row in env.eval_rows} == {"small_products"}
    assert {row.subject for row in env.train_rows} == {"large_products"}, "no evaluation rows"
    samples = [{"item_hash": hash_of(row), "messages": []} for row in env.eval_rows[:3]]
    samples[0]["messages"] = [{"role": "assistant", "content": env.gold_answer(env.eval_rows[0])}]
    metrics = await env.rescore([{**each, "item_index": i} for i, each in enumerate(samples)])
    assert metrics["eval/percent_correct_small_products"] == 1 / 3


async def test_figures_of_reversals(started: Any) -> None:
    answers = ["<reversed_text>c ba</reversed_text>", "<reversed_text>abc</reversed_text>", "c ba"]
    env = await started(reversal.TextReversalEnv, answers, group_size=3, num_eval_samples=3)
    await env.collect_trajectories("ab c")
    expected = {
        "train/thinking_mode_enabled": 0.0,
        "train/total_attempts": 3.0,
        "train/successful_reversals": 1.0,
        "train/failed_reversals": 2.0,
        "train/success_rate": pytest.approx(1 / 3),
        "train/failure_rate": pytest.approx(2 / 3),
        "train/format_error_rate": pytest.approx(1 / 3),
        "train/format_compliance_rate": pytest.approx(2 / 3),
    }
    found = await logged(env)
    assert {name: found[name] for name in expected} == expected
    metrics = await env.evaluate()
    assert metrics["eval/evaluated_items"] == metrics["eval/valid_scores"] == 3 * len(env.eval_rows)
    assert metrics["eval/format_compliance_rate"] == pytest.approx(2 / 3)
    assert metrics["eval/thinking_utilization_rate"] == 0.0
    lengths = [len(answer) for answer in answers]
    assert metrics["eval/avg_response_length"] == pytest.approx(statistics.fmean(lengths))
    assert metrics["eval/response_length_std"] == pytest.approx(statistics.pstdev(lengths))
    assert metrics["eval/format_errors"] == len(env.eval_rows)


async def test_answers_of_nearly_the_limit_lose_half_a_point(started: Any) -> None:
    env = await started(fundamentals.FundamentalPredictionEnv, max_token_length=100)
    group = {"masks": [[-100, *[7] * 100], [-100, *[7] * 95]], "scores": [2.0, 2.0]}
    assert env.shape_group(REPORT, group)["scores"] == [1.5, 2.0]
