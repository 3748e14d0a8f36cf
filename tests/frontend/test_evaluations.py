"""The first page of an evaluation: its result with an interval, and what became of every answer."""

import json
from pathlib import Path
from typing import Any

import pytest

from atroposlib.envs.eval import evaluate_log
from atroposlib.frontend.evaluations import TEXT_CHARS, Metric, stored_metrics
from atroposlib.frontend.jsonl2html import generate_html
from atroposlib.frontend.view_groups import views_of_samples
from atroposlib.utils.estimates import estimate_mean
from tests.builders.rows import write_rows
from tests.frontend.helpers_pages import read_page


def sample(index: int, **changes: Any) -> dict[str, Any]:
    return {"item_index": index, "row": {"answer": "4"}, "finish_reason": "stop", **changes}


@pytest.mark.parametrize(
    ("keys", "score", "kind"),
    [
        ({"correct": True}, 1.0, "right"),
        ({"correct": False}, 0.0, "wrong"),
        ({"is_correct": True}, 1.0, "right"),
        ({"metrics": {"correct": 1.0}}, 1.0, "right"),
        ({"score": 0.0}, 0.0, "wrong"),
        ({"score": 0.5}, 0.5, "scored"),
        ({"score": 0.5, "correct": False}, 0.5, "wrong"),
        ({"score": None, "correct": False, "unscored": "timeout"}, None, "wrong"),
        ({"score": None, "correct": None, "unscored": "faulty"}, None, "not judged"),
        ({}, None, "not judged"),
    ],
)
def test_a_sample_without_a_score_has_that_of_a_right_or_a_wrong_answer(
    keys: dict[str, Any], score: float | None, kind: str
) -> None:
    [view] = views_of_samples([sample(0, **keys)])
    [sequence], [verdict] = view["sequences"], view["verdicts"]
    assert (sequence["score"], verdict["kind"]) == (score, kind)
    assert verdict["why"] == keys.get("unscored")


def test_a_verdict_says_what_was_expected_and_what_was_read() -> None:
    more = {"extracted_answer": 5, "usage": {"completion_tokens": 7}, "explanation": "5 is not 4."}
    [view] = views_of_samples([sample(3, correct=False, **more), sample(3, correct=True)])
    first, second = view["verdicts"]
    assert first == {
        **{"seq": 0, "kind": "wrong", "target": "4", "read": "5", "tokens": 7},
        "why": "5 is not 4.",
    }
    assert (second["seq"], second["kind"], second["read"]) == (1, "right", None)


def evaluation_in(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = read_page(generate_html(folder / "samples.jsonl")).columns["evaluation"]
    return found


def test_the_result_is_the_metric_of_the_evaluation_with_its_interval(tmp_path: Path) -> None:
    samples = [sample(i, correct=i > 0, length=i) for i in range(4)]
    evaluate_log(
        {
            "eval/mean_length": 1.5,
            "eval/percent_correct": 0.75,
            "eval/other": 2.0,
            "eval/name": "x",
        },
        str(tmp_path),
        samples=samples,
        verbose=False,
    )
    found = evaluation_in(tmp_path)
    share = estimate_mean([0, 1, 1, 1])
    assert found["metrics"][0] == Metric.of("eval/percent_correct", share)._asdict()
    assert [each["name"] for each in found["metrics"][1:]] == ["eval/mean_length", "eval/other"]
    assert found["rows"]["kind"] == ["wrong", "right", "right", "right"]
    assert found["rows"]["row"] == [0, 1, 2, 3]


def test_samples_without_metrics_have_the_share_of_right_answers(tmp_path: Path) -> None:
    long = "x" * 2 * TEXT_CHARS
    samples = [sample(i // 2, correct=i < 2, extracted_answer=long) for i in range(4)]
    write_rows(tmp_path / "samples.jsonl", *samples)
    (tmp_path / "metrics.json").write_text("[]")
    found = evaluation_in(tmp_path)
    share = estimate_mean([1, 1, 0, 0], clusters=[0, 0, 1, 1])
    assert found["metrics"] == [Metric.of("accuracy", share)._asdict()]
    assert (found["rows"]["row"], found["rows"]["seq"]) == ([0, 0, 1, 1], [0, 1, 0, 1])
    assert found["rows"]["read"] == [long[:TEXT_CHARS]] * 4


@pytest.mark.parametrize("document", [None, "{", "[]", {"results": {}}, {"results": {"all": []}}])
def test_a_file_that_holds_no_metrics_is_none(tmp_path: Path, document: Any) -> None:
    if document is not None:
        text = document if isinstance(document, str) else json.dumps(document)
        (tmp_path / "metrics.json").write_text(text)
    assert stored_metrics(tmp_path / "metrics.json") == []
