"""Simulated users: who sees what, what is trained, and what the final database earns."""

import copy
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from atroposlib.envs.tool_env import hermes_call as call
from atroposlib.errors import EngineRejected, EnvError
from atroposlib.inference.harness import ByteTokenizer, ServerHarness, create_chat_completion
from tests.environments.helpers_environments import load

ShopEnv = load("simulated_user_env").ShopEnv

DATABASE: dict[str, Any] = {
    "customers": {"ann@example.org": {"name": "Ann", "orders": ["W1", "W2"]}},
    "orders": {
        "W1": {"status": "pending", "address": "A", "items": [{"product": "rug", "price": 12.5}]},
        "W2": {"status": "shipped", "address": "A", "items": [{"product": "rug", "price": 12.5}]},
    },
    "products": {"rug": {"kind": "rug", "price": 12.5, "stock": 1}},
}
TASK: dict[str, Any] = {
    "id": "0",
    "description": {"purpose": None},
    "user_scenario": {
        "persona": "curt",
        "instructions": {"reason_for_call": "Cancel W1.", "known_info": "ann@example.org"},
    },
    "initial_state": {"initialization_data": {"agent_data": DATABASE}},
    "evaluation_criteria": {
        "actions": [{"action_id": "0_0", "name": "cancel_order", "arguments": {"order_id": "W1"}}],
        "communicate_info": ["12.50"],
        "nl_assertions": None,
        "reward_basis": ["DB", "COMMUNICATE"],
    },
}


CANCEL = call("cancel_order", order_id="W1")


def player(*turns: str) -> Any:
    """Answer with these turns, the last one again and again."""
    return lambda request: turns[min(request.prompt.count("<assistant>"), len(turns)) - 1]


@pytest.mark.parametrize(
    ("turns", "score"),
    [
        (["E-mail?", CANCEL, "You get 12.50 back."], 1.0),
        (["E-mail?", CANCEL, "Done.", "You get 12.50 back."], 0.0),
        ([CANCEL, call("cancel_order", order_id="W2"), "12.50", "12.50"], 0.0),
        (["12.50", "12.50"], 0.0),
        (["E-mail?", CANCEL, "<think>12.50</think> Done."], 0.0),
        (["###STOP###", "12.50"], 0.0),
        (["E-mail?", call("cancel_order", order_id="W9"), CANCEL, CANCEL, "It is 12.50."], 1.0),
        ([call("get_order", order_id="W1")], 0.0),
    ],
)
async def test_the_final_database_and_what_was_said_decide(
    made: Any, turns: list[str], score: float
) -> None:
    env = made(ShopEnv, player(*turns), group_size=1, max_turns=6)
    group, _ = await env.collect_trajectories(copy.deepcopy(TASK))
    assert group["scores"] == [score]


async def test_a_users_tokens_are_never_trained_and_it_sees_the_text_alone(made: Any) -> None:
    heard: list[Any] = []

    def user(request: Any) -> str:
        heard.append(request.prompt)
        return ["Cancel W1, please.", "ann@example.org", "###STOP###"][len(heard) - 1]

    env = made(ShopEnv, player("<think>Who?</think>E-mail?", CANCEL, "12.50"), group_size=1)
    env.user = ServerHarness(respond=user)
    group, _ = await env.collect_trajectories(copy.deepcopy(TASK))
    assert group["scores"] == [1.0]
    [mask] = group["masks"]
    trained = ByteTokenizer().decode([label for label in mask if label != -100])
    assert "E-mail?" in trained
    assert "12.50" in trained
    assert "please" not in trained
    assert "reason_for_call: Cancel W1." in heard[0]
    assert "persona: curt" in heard[0]
    assert "E-mail?" in heard[1]
    assert "Who?" not in heard[1]
    assert "tool_call" not in heard[2]
    assert "<policy>" not in heard[2]
    assert "reason_for_call" not in json.dumps(group["messages"])


async def test_check_plays_the_user(made: Any) -> None:
    env = made(ShopEnv, player("E-mail?", CANCEL, "12.50"), group_size=1)
    env.user = ServerHarness(respond=lambda request: env.example_verdict(request.prompt))
    group, _ = await env.collect_trajectories(copy.deepcopy(TASK))
    assert group["scores"] == [1.0]
    assert env.example_verdict("<user>Cancel W1.<assistant>") is None


@pytest.mark.parametrize(
    ("text", "reason", "score"),
    [
        ("Well, I", "length", 0.0),
        ("<think>Well", "length", 0.0),
        ("", "stop", 0.0),
        (EngineRejected("maximum context length"), "stop", 0.0),
        ("Well, I", "abort", None),
    ],
)
async def test_the_model_cannot_make_the_user_leave_it_without_a_score(
    made: Any, text: Any, reason: str, score: float | None
) -> None:
    answers = iter([("Cancel W1.", "stop"), (text, reason), ("###STOP###", "stop")])

    async def answer(**kwargs: Any) -> Any:
        said, why = next(answers)
        if isinstance(said, EngineRejected):
            raise said
        return create_chat_completion(said, finish_reason=why)

    env = made(ShopEnv, "E-mail?", group_size=1)
    env.user = SimpleNamespace(chat_completion=answer)
    group, _ = await env.collect_trajectories(copy.deepcopy(TASK))
    assert (group and group["scores"]) == (score if score is None else [score])
    assert env.counts["user_failed"] == (text != "Well, I" or score is None)


async def test_a_user_that_never_answers_is_an_error(made: Any) -> None:
    env = made(ShopEnv, "E-mail?", group_size=1)
    for text in ("", "<think>Well"):
        env.user = ServerHarness(respond=lambda request, text=text: text)
        with pytest.raises(EnvError, match="did not begin"):
            await env.reset(TASK)


def test_tasks_of_tau2_share_a_database_and_those_that_need_more_are_skipped(
    made: Any, tmp_path: Path
) -> None:
    (tmp_path / "db.json").write_text(json.dumps(DATABASE))
    env = made(ShopEnv, database_path=str(tmp_path / "db.json"))
    assert env.database_of({**TASK, "initial_state": None}) == DATABASE
    moved = {"initialization_data": {"agent_data": {"orders": {"W1": {"address": "B"}}}}}
    changed = env.database_of({**TASK, "initial_state": moved})
    assert changed["orders"]["W1"] == {**DATABASE["orders"]["W1"], "address": "B"}
    assert changed["orders"]["W2"] == DATABASE["orders"]["W2"]
    assert env.parse_row({**TASK, "initial_state": {"message_history": [{}]}}) is None
    criteria = {**TASK["evaluation_criteria"], "reward_basis": ["DB", "NL_ASSERTIONS"]}
    assert env.parse_row({**TASK, "evaluation_criteria": criteria}) is None
    assert env.parse_row(TASK) == TASK


async def test_actions_count_only_where_the_task_judges_them(made: Any) -> None:
    task = copy.deepcopy(TASK)
    task["evaluation_criteria"] = {
        "actions": [
            {"name": "get_order", "arguments": {"order_id": "W1"}},
            {"name": "toggle", "arguments": {}, "requestor": "user"},
        ],
        "communicate_info": [],
        "reward_basis": ["ACTION"],
    }
    for turns, score in (([call("get_order", order_id="W1"), "So."], 1.0), (["So."], 0.0)):
        env = made(ShopEnv, player(*turns), group_size=1)
        group, _ = await env.collect_trajectories(task)
        assert group["scores"] == [score]
