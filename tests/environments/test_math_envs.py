"""Mathematics: what follows from a group, and what comparisons, verdicts and retries earn."""

from functools import partial
from typing import Any

import pytest

from atroposlib.envs.dataset_env import Rollout
from atroposlib.envs.math_env import Problem
from atroposlib.inference.harness import HarnessRequest
from tests.environments.helpers_environments import load, logged

pytest.importorskip("math_verify")
maths = load("math_server")
zero = load("math_server_zero")

RIGHT, WRONG = "I see.</think> So \\boxed{7}", "I guess.</think> It must be \\boxed{8}"


@pytest.fixture
def started(started: Any) -> Any:
    return partial(started, maths.MathEnv, group_size=4, max_token_length=900)


def problem() -> Any:
    return maths.Task(question="3 + 4?", answer="7")


async def test_a_mixed_group_is_followed_by_a_right_and_a_wrong_solution_to_judge(
    started: Any,
) -> None:
    env = await started(
        lambda request: [WRONG, RIGHT, RIGHT, WRONG][request.choice], percent_to_judge=1.0
    )
    [group], backlog = await env.collect_trajectories(problem())
    assert group["scores"] == [-1.0, 1.0, 1.0, -1.0]
    assert [(item.is_right, item.solution) for item in backlog] == [
        (True, " So \\boxed{7}"),
        (False, " It must be \\boxed{8}"),
    ]
    env.config.percent_to_judge = 0.0
    _, backlog = await env.collect_trajectories(problem())
    assert backlog == []


async def test_an_all_right_group_is_compared_and_sometimes_scored_by_length(started: Any) -> None:
    def respond(request: HarnessRequest) -> str:
        return RIGHT + " because it is so" * request.choice

    env = await started(respond, percent_length_penalty=0.0)
    groups, [comparison] = await env.collect_trajectories(problem())
    assert groups is None
    assert len(comparison.rollouts) == 2
    env.config.percent_length_penalty = 1.0
    [group], _ = await env.collect_trajectories(problem())
    assert group["scores"][0] == 1.0
    assert group["scores"][3] == -1.0
    assert group["scores"] == sorted(group["scores"], reverse=True)


async def test_equal_right_solutions_are_not_compared_and_all_wrong_ones_dropped(
    started: Any,
) -> None:
    env = await started(lambda request: RIGHT)
    assert await env.collect_trajectories(problem()) == (None, [])
    env = await started(lambda request: WRONG)
    assert await env.collect_trajectories(problem()) == (None, [])


async def test_an_evaluation_leads_to_no_further_items(started: Any) -> None:
    env = await started(
        lambda request: RIGHT + " because it is so" * request.choice, num_eval_samples=2
    )
    env.eval_rows = [problem()]
    assert (await env.evaluate())["eval/reward_failures"] == 0.0
    assert env.eval_rows[0].backlog == []


def test_long_solutions_that_differ_in_one_word_are_not_compared() -> None:
    long = " then it is 7, or so it is." * 40
    rollouts = [rollout(f"</think>{first}{long}") for first in ("If", "And")]
    assert maths.least_similar(rollouts) is None


def test_the_two_solutions_with_the_fewest_common_words_are_compared() -> None:
    texts = ["Add three to four.", "Count from three to seven", "Add 3 to four."]
    pair = maths.least_similar([rollout(f"</think>{text}") for text in texts])
    assert [each.completion for each in pair] == [f"</think>{text}" for text in texts[1:]]


def rollout(answer: str) -> Rollout:
    return Rollout(messages=[{"role": "assistant", "content": answer}], nodes=[])


def vote_for_the_longer(request: HarnessRequest) -> str:
    _, _, pair = request.prompt.partition("Solution 1:\n")
    first, _, rest = pair.partition("\n\nSolution 2:\n")
    second = rest.partition("\n\nWhich")[0]
    return f"\\boxed{{{1 if len(first) > len(second) else 2}}}"


async def test_votes_in_both_orders_decide_a_comparison(started: Any) -> None:
    policy = {"answer": lambda request: RIGHT + " because it is so" * request.choice}
    env = await started(lambda request: policy["answer"](request))
    _, [comparison] = await env.collect_trajectories(problem())
    lengths = [len(rollout.completion) for rollout in comparison.rollouts]
    policy["answer"] = vote_for_the_longer
    [group], backlog = await env.collect_trajectories(comparison)
    assert group["scores"] == ([1.0, -1.0] if lengths[0] > lengths[1] else [-1.0, 1.0])
    assert group["group_overrides"] == {"group_size": 2}
    assert backlog == []
    policy["answer"] = lambda request: "\\boxed{1}"  # a vote for the position is a tie
    assert await env.collect_trajectories(comparison) == (None, [])


async def test_a_verdict_earns_the_share_of_retries_that_it_makes_right(started: Any) -> None:
    def respond(request: HarnessRequest) -> str:
        if "Its review" in request.prompt:
            is_helped = "add them" in request.prompt and request.choice < 3
            return RIGHT if is_helped else WRONG
        return ["\\boxed{True}", "add them: \\boxed{False}", "\\boxed{False}", ""][request.choice]

    env = await started(respond, min_trained_tokens=0)
    wrong = maths.Judgement(
        question="3 + 4?", answer="7", solution="It is \\boxed{8}", is_right=False
    )
    [group, retries], _ = await env.collect_trajectories(wrong)
    assert group["scores"] == [-1.0, 0.75, 0.0, -1.0]
    assert retries["scores"] == [1.0, 1.0, 1.0, -1.0]
    metrics = await logged(env)
    assert {name: x for name, x in metrics.items() if name.startswith("judge_train/")} == {
        "judge_train/percent_judge_correct": 0.5,
        "judge_train/judge_success_rate": 3 / 8,
        "judge_train/judge_rollouts": 1,
        "judge_train/selfcorrect_rollouts": 2,
    }


async def test_a_verdict_whose_retries_cannot_be_judged_has_no_score(started: Any) -> None:
    env = await started(lambda request: RIGHT)
    wrong = maths.Judgement(question="3 + 4?", answer="", solution="\\boxed{8}", is_right=False)
    assert await env.score(wrong, "add them: \\boxed{False}") is None


async def test_a_verdict_on_a_right_solution_is_right_or_wrong(started: Any) -> None:
    env = await started(lambda request: f"so \\boxed{{{request.choice == 0}}}")
    right = maths.Judgement(question="3 + 4?", answer="7", solution="\\boxed{7}", is_right=True)
    [group], _ = await env.collect_trajectories(right)
    assert group["scores"] == [1.0, -1.0, -1.0, -1.0]


@pytest.mark.parametrize("is_masked", [True, False])
async def test_a_cut_answer_is_wrong_and_by_default_gets_no_advantage(
    started: Any, is_masked: bool
) -> None:
    env = await started(
        lambda request: RIGHT if request.choice else "x" * 2000,
        mask_too_long_completions=is_masked,
        percent_to_judge=1.0,
    )
    [group], backlog = await env.collect_trajectories(problem())
    assert group["scores"] == [-1.0, 1.0, 1.0, 1.0]
    assert backlog == []  # no wrong solution that is whole
    await env.collect_trajectories(
        maths.Judgement(question="3 + 4?", answer="7", solution="7", is_right=True)
    )
    metrics = await logged(env)
    assert metrics["train/pass_at_groupsize"] == 1.0
    assert metrics["train/percent_correct"] == 0.75  # of problems alone
    assert metrics["train/percent_overanswer"] == 0.25
    assert metrics["train/avg_correct_answer_len"] == len(RIGHT) + 1
    assert "train/avg_incorrect_answer_len" not in metrics
    overrides = group.get("overrides") or [{}] * 4
    assert [bool(each.get("set_advantage_to_zero")) for each in overrides] == [
        is_masked,
        False,
        False,
        False,
    ]


async def test_a_gold_answer_that_cannot_be_read_gives_no_verdict(started: Any) -> None:
    env = await started(lambda request: RIGHT)
    rows = [(gold, f"\\boxed{{{box}}}") for gold, box in (("7", "7"), ("7", "8"), ("", "7"))]
    verdicts = [await env.verify(maths.Task(question="?", answer=g), text) for g, text in rows]
    assert verdicts == [1.0, -1.0, None]


async def test_a_base_model_continues_a_text_up_to_a_limit_that_rises(made: Any) -> None:
    requests = []

    def respond(request: HarnessRequest) -> str:
        requests.append(request)
        blocks = ["\\boxed{7}", "so 7", "\\boxed{8}", "\\boxed{8}</answer><answer>\\boxed{7}"]
        return f"I see.</think> <answer>{blocks[request.choice]}"

    env = made(
        zero.MathZeroEnv,
        respond,
        dataset_path="sample",
        **{"group_size": 4, "num_reward_workers": 1, "start_tok_length": 500},
        **{"max_token_length": 2500, "total_steps": 10},
    )
    await env.setup()
    group, _ = await env.collect_trajectories(Problem(question="3 + 4?", answer="7"))
    # The stop "</answer>" ends the last answer at its first block.
    assert group["scores"] == [1.0, -1.0, -1.0, -1.0]
    assert requests[0].prompt.endswith("User: 3 + 4?\nAssistant: <think>")
    assert requests[0].kwargs["stop"] == zero.STOPS
    prompt = "x" * 100
    assert env.token_limit(prompt, "train") == 500
    env.curr_step = 5
    assert env.token_limit(prompt, "train") == 1500
    env.curr_step = 10
    assert env.token_limit(prompt, "train") == env.token_limit(prompt, "eval") < 2500
    assert env.token_limit("x" * 3000, "train") == env.token_limit("x" * 3000, "eval") == 1
