"""HLE, Arena-Hard and MT-Bench: answers, judges, and what the evaluation reports."""

from typing import Any

import pytest

from tests.environments.helpers_environments import load

HLE = load("eval_environments.hle_eval")
ARENA = load("eval_environments.arena_hard_eval")
MT = load("eval_environments.mt_bench_eval").MTBenchEnv

EXACT = {
    "id": "1",
    "question": "What is 5/2?",
    "image": "",
    "answer": "2.5",
    "answer_type": "exactMatch",
    "category": "Math",
}
CHOICE = {
    **EXACT,
    "question": "Which?\n\nAnswer Choices:\nA. red\nB. blue",
    "answer": "B",
    "answer_type": "multipleChoice",
}


@pytest.mark.parametrize(
    ("raw", "answer", "score"),
    [
        (EXACT, "<answer>2.50</answer>\nConfidence: 90%", 1.0),
        (EXACT, "<answer>25</answer>", 0.0),
        ({**EXACT, "answer": "6.62607e-34"}, "<answer>0.0</answer>", 0.0),
        ({**EXACT, "answer": "6.62607e-34"}, "<answer>6.626070E-34</answer>", 1.0),
        (EXACT, "<answer>2.5 or 3</answer>", 0.0),
        (EXACT, "<answer>2.5</answer><answer>3</answer>", 0.0),
        (CHOICE, "<answer>B</answer>\nConfidence: 90%", 1.0),
        (CHOICE, "<answer>blue</answer>", 1.0),
        (CHOICE, "<answer>A</answer> <answer>B</answer>", 0.0),
        (CHOICE, "Confidence: 100%", 0.0),
    ],
)
async def test_hle_compares_answers_and_choices(
    made: Any, raw: Any, answer: str, score: float
) -> None:
    env = made(HLE.HLEEvalEnv)
    assert await env.score(env.parse_row(raw), answer) == score


async def test_hle_asks_a_judge_for_exact_answers_alone_and_skips_images(made: Any) -> None:
    env = made(HLE.HLEEvalEnv, "**Correct:** yes", use_llm_judge=True)
    assert await env.score(env.parse_row(EXACT), "<answer>five halves</answer>") == 1.0
    assert await env.score(env.parse_row(CHOICE), "<answer>A</answer>") == 0.0
    assert env.counts["judge_calls"] == 1
    assert env.parse_row({**EXACT, "image": "data:image/png;base64,AA"}) is None


def test_calibration_has_bins_of_a_hundred_with_the_rest_in_the_last() -> None:
    stated = [(0.2, i < 20) for i in range(100)] + [(0.9, i < 60) for i in range(150)]
    assert HLE.calibration_error(stated) == pytest.approx((150 / 250 * 0.5**2) ** 0.5)


def test_calibration_is_of_judged_answers(made: Any) -> None:
    env = made(HLE.HLEEvalEnv)
    fields = env.sample_fields(env.parse_row(EXACT), "<answer>2.5</answer>\nConfidence: 100%")
    right = {**fields, "item_index": 0, "finish_reason": "stop", "score": 1.0, "correct": True}
    unjudged = {**right, "score": None, "correct": False, "unscored": "unjudged"}
    assert env.summarize_samples([right, unjudged])["eval/calibration_error"] == 0.0


ROW = {"prompt": "Explain it.", "baseline": "b" * 100, "category": "coding"}


@pytest.mark.parametrize(
    ("verdict", "score"),
    [
        (lambda r: "Verdict: A", 0.5),
        (lambda r: "Verdict: tie", 0.5),
        (lambda r: "Verdict: " + ("A" if "_a>\nmine" in r.prompt else "B"), 1.0),
        (lambda r: "no verdict", None),
    ],
)
async def test_a_preference_for_a_position_is_a_tie(
    made: Any, verdict: Any, score: float | None
) -> None:
    env = made(ARENA.ArenaHardEnv, verdict)
    assert await env.score(env.parse_row(ROW), "<think>I</think>mine") == score


def test_a_win_by_length_alone_is_none_at_equal_lengths() -> None:
    rate = ARENA.win_rate_at_equal_lengths
    gaps = [(i % 21 - 10) / 10 for i in range(420)]
    by_length = [float(gap > 0) + 0.5 * (gap == 0) for gap in gaps]
    assert rate(by_length, gaps) == pytest.approx(0.5, abs=0.01)
    assert rate([1.0] * 400, [0.5] * 400) > 0.95
    longer_wins = [float(gap > -0.35) for gap in gaps]
    assert rate(longer_wins, gaps) > sum(longer_wins) / len(gaps) + 0.1


async def test_both_turns_are_marked_with_what_was_said_before(made: Any) -> None:
    seen: list[str] = []

    def respond(request: Any) -> str:
        if "Score: N" not in request.prompt:
            return "<think>secret</think>an answer"
        seen.append(request.prompt)
        return f"Score: {4 * len(seen)}"

    env = made(MT, respond, group_size=1)
    row = {"prompt": ["First?", "Second?"], "reference": ["", "42"], "category": "math"}
    [rollout] = await env.roll_out(row, 1, split="eval")
    assert rollout.outcome == pytest.approx(0.6)
    assert "Second?" not in seen[0]
    assert "First?" in seen[1]
    assert "Reference answer: 42" in seen[1]
    assert "secret" not in seen[1]
    sample = {
        "row": row,
        "score": 0.6,
        "correct": False,
        "item_index": 0,
        "turn_rewards": rollout.overrides["turn_rewards"],
    }
    metrics = env.summarize_samples([sample])
    assert [metrics[f"eval/mark{turn}"] for turn in ("_turn_1", "_turn_2", "")] == pytest.approx([4, 8, 6])  # fmt: skip
