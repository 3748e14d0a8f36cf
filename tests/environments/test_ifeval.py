"""IFEval: strict and loose accuracy, and rows that cannot be checked."""

from typing import Any

import pytest

from atroposlib.errors import ConfigError
from tests.environments.helpers_environments import load

ifeval = load("eval_environments.ifeval_eval")


async def test_loose_accuracy_forgives_an_opening_line(made: Any) -> None:
    env = made(ifeval.IFEvalEnv)
    raw = {
        "prompt": "?",
        "instruction_id_list": ["startend:quotation", "punctuation:no_comma"],
        "kwargs": [{"num_words": None}, {}],
    }
    row = env.parse_row(raw)
    texts = ['<think>,</think>"a"', 'Sure, here:\n"a"', "<think>a", ""]
    samples = [
        {
            "row": row,
            "score": (score := await env.score(row, text)),
            "correct": score == 1.0,
            "item_index": i,
            **env.sample_fields(row, text),
        }
        for i, text in enumerate(texts)
    ]
    assert [sample["score"] for sample in samples] == [1.0, 0.0, 0.0, 0.0]
    metrics = env.summarize_samples(samples)
    assert metrics["eval/prompt_level_strict_acc"] == 0.25
    assert metrics["eval/prompt_level_loose_acc"] == 0.5
    assert metrics["eval/inst_level_strict_acc"] == 2 / 8
    assert metrics["eval/inst_level_loose_acc"] == 4 / 8
    assert metrics["eval/punctuation:no_comma_accuracy"] == 0.25


@pytest.mark.parametrize(
    ("name", "arguments"),
    [("keywords:rhyme", {}), ("keywords:existence", {}), ("punctuation:no_comma", {"n": 1})],
)
def test_a_constraint_that_cannot_be_checked_is_refused(
    made: Any, name: str, arguments: dict[str, Any]
) -> None:
    env = made(ifeval.IFEvalEnv)
    with pytest.raises(ConfigError, match=name):
        env.parse_row({"prompt": "?", "instruction_id_list": [name], "kwargs": [arguments]})
