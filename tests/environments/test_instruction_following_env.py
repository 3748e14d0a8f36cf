"""Verifiable instructions: what counts of an answer, and the queue of unsolved ones."""

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.builders.rows import write_rows
from tests.environments.helpers_environments import load, restore

following = load("instruction_following_algorithm_environment")


@pytest.fixture
def started(started: Any) -> Any:
    return partial(started, following.InstructionFollowingEnv, group_size=2, max_token_length=1000)


def row(function: str, **args: Any) -> dict[str, Any]:
    return {
        "messages": [{"role": "user", "content": "Write."}],
        "ground_truth": json.dumps({"func_name": function, "unused": None, **args}),
    }


async def test_rows_that_cannot_be_checked_are_left_out(started: Any) -> None:
    env = await started("")
    assert env.parse_row(row("validate_repeat_prompt")) is None
    assert env.parse_row(row("validate_nothing")) is None


async def test_a_solved_instruction_returns_after_all_others(started: Any, tmp_path: Path) -> None:
    rows = [row("validate_no_commas"), row("validate_uppercase")]
    path = write_rows(tmp_path / "rows.jsonl", *rows)
    settings = {"dataset_path": str(path), "num_eval_rows": 0}
    env = await started("<think>it is easy</think> lower case", **settings)
    asked = []
    for _ in range(6):
        item = await env.get_next_item()
        asked.append(item.function)
        await env.collect_trajectories(item)
    assert asked.count("validate_no_commas") == 1
    assert [env.instructions[key].function for key in env.solved_items] == ["validate_no_commas"]


def only_file(folder: Path, name: str) -> str:
    [path] = folder.rglob(name)
    return str(path)


async def test_a_checkpoint_keeps_unsolved_instructions_also_those_in_flight(
    started: Any, tmp_path: Path
) -> None:
    env = await started("")
    in_flight = await env.get_next_item()
    solved = await env.get_next_item()
    group = {"scores": [1.0, 1.0]}
    assert env.shape_group(solved, group) is None
    env.in_flight.remove(solved.key)
    restarted = restore(env, await started(""), tmp_path)
    assert restarted.solved_items == [solved.key]
    assert (await restarted.get_next_item()).key == in_flight.key

    unsolved = only_file(tmp_path, following.UNSOLVED_FILE)
    resumed = await started("", resume_from_unsolved_dataset=unsolved)
    assert resumed.instructions.keys() == env.instructions.keys() - {solved.key}
    assert resumed.eval_rows == env.eval_rows


async def test_a_checkpoint_of_other_rows_keeps_those_that_are_still_there(
    started: Any, tmp_path: Path
) -> None:
    functions = ["validate_no_commas", "validate_uppercase", "validate_quotation"]
    path = tmp_path / "rows.jsonl"

    async def started_with(functions: list[str]) -> Any:
        write_rows(path, *map(row, functions))
        return await started("", dataset_path=str(path), num_eval_rows=0)

    env = await started_with(functions[:2])
    resumed = restore(env, await started_with(functions[1:]), tmp_path / "checkpoints")
    asked = [(await resumed.get_next_item()).function for _ in range(2)]
    assert asked == functions[1:]
    resumed.save_checkpoint(2)


async def test_an_instruction_is_queued_again_after_an_error(started: Any) -> None:
    env = await started("an answer that is long enough")

    def fail(*args: Any) -> float:
        raise RuntimeError("score")

    env.score = fail
    item = await env.get_next_item()
    with pytest.raises(RuntimeError):
        await env.collect_trajectories(item)
    assert env.active_train_queue[-1] == item.key
    assert env.in_flight == []
