"""Data for a pydantic model: four formats, three containers, and schemas that misbehave in the sandbox."""

import json
from functools import partial
from typing import Any

import pytest

from atroposlib.envs.dataset_env import Rollout
from tests.environments.helpers_environments import load

schemas = load("pydantic_schema_following_environment.pydantic_schema_following_environment")

CODE = """from __future__ import annotations
from pydantic import BaseModel

class Person(BaseModel):
    name: str
    scores: list[int]
    friend: Friend | None = None

class Friend(BaseModel):
    name: str
"""
TASK = schemas.SchemaTask(prompt="Write a Person.", code=CODE, model_name="Person")


@pytest.fixture
def made(made: Any) -> Any:
    return partial(made, schemas.PydanticSchemaFollowingEnv)


def rollouts(*answers: str) -> list[Rollout]:
    return [
        Rollout(messages=[{"role": "assistant", "content": answer}], nodes=[]) for answer in answers
    ]


@pytest.mark.parametrize("form", ["json", "yaml", "toml", "xml"])
async def test_every_format_is_judged_by_the_model(made: Any, form: Any) -> None:
    env = made()
    task = TASK._replace(form=form, container="none")
    right = schemas.EXAMPLES[form]
    wrong = right.replace("2", "two")
    answers = [f"<think>a</think>{text}" for text in (right, wrong, "{<=", right[:-3])]
    outcomes = await env.score_group(task, rollouts(*answers))
    assert outcomes[:3] == [True, False, False]
    nested = (
        "<a><name>A</name><scores>1</scores><scores>2</scores><friend><name>B</name></friend></a>"
    )
    if form == "xml":
        assert await env.score_group(task, rollouts(f"<think>a</think>{nested}")) == [True]


@pytest.mark.parametrize(
    ("container", "answer", "content"),
    [
        ("tagged", "<think>a</think><json_output>{}</json_output>", "{}"),
        ("tagged", "<think>a</think>Here: <json_output>{}</json_output>", "{}"),
        ("tagged", "<think>a</think><json_output>{}</json_output><json_output>1</json_output>", None),
        ("tagged", "<think>a</think><yaml_output>{}</yaml_output>", None),
        ("tagged", "<think><json_output>{}</json_output></think>", None),
        ("markdown", "<think>a</think>\n```json\n{}\n```", "{}"),
        ("markdown", "<think>a</think>```json\r\n[\r\n]\r\n```\r\n", "[\n]"),
        ("markdown", "<think>a</think>```json\n{}\n```\nThere it is.\n```", None),
        ("markdown", "<think>a</think>Here:\n```json\n{}\n```", None),
        ("markdown", "<think>a</think>```json\n{}\n```\n```json\n1\n```", None),
        ("none", "<think>a</think> {} ", "{}"),
        ("none", "{}", None),
        ("none", "<think>a</think>", None),
    ],
)  # fmt: skip
def test_the_container_must_be_the_required_one(
    container: Any, answer: str, content: str | None
) -> None:
    assert schemas.content_of(answer, TASK._replace(container=container)) == content


async def test_an_answer_that_exhausts_the_sandbox_does_not_affect_the_others(made: Any) -> None:
    env = made()
    code = (
        "import os\nfrom pydantic import RootModel, AfterValidator\nfrom typing import Annotated\n"
    )
    code += (
        "M = RootModel[Annotated[str, AfterValidator(lambda s: os._exit(3) if s == 'x' else s)]]"
    )
    task = TASK._replace(code=code, model_name="M", container="none")
    outcomes = await env.score_group(
        task, rollouts('<think>a</think>"x"', '<think>a</think>"y"', "<think>a</think>1")
    )
    assert outcomes == [None, True, False]


async def test_a_schema_that_does_not_run_gives_no_scores(made: Any) -> None:
    env = made()
    task = TASK._replace(code="import nothing_like_this", container="none")
    assert await env.scores(task, ["<think>a</think>{}", "no thinking"]) == [None, 0.0]


async def test_a_row_to_correct_shows_the_model_and_the_wrong_data(made: Any) -> None:
    env = made()
    info = json.dumps({"pydantic_config": CODE, "model_name": "Person"})
    row = {"prompt": "p", "verification_info": info, "task_type": "editing"}
    assert env.parse_row(row) is None
    task = env.parse_row({**row, "erroneous_data": '{"name": 7}'})
    assert CODE in task.prompt
    assert '{"name": 7}' in task.prompt


async def test_each_epoch_asks_for_another_form_within_the_allowed(made: Any) -> None:
    env = made(allowed_structured_formats=["xml", "toml"])
    await env.setup()
    tasks = [await env.get_next_item() for _ in range(80)]
    assert {task.form for task in tasks} == {"xml", "toml"}
    assert {task.container for task in tasks} == {"tagged", "none", "markdown"}
