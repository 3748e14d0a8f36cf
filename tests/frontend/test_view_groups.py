"""Rows, checked groups and samples as the viewer shows them."""

import json
from typing import Any

import pytest

from atroposlib.frontend.view_groups import images_in, view_of_group, view_of_row, views_of_samples
from atroposlib.scored_data import Strictness, check_group

PNG = "iVBORw0KGgoAAAANSUhEUg=="
URI = f"data:image/png;base64,{PNG}"

ASKED = {"role": "user", "content": "How?"}
ANSWERED = {"role": "assistant", "content": "So."}


def row(**changes: Any) -> dict[str, Any]:
    """A row of two sequences of three tokens; the last two, or one, are trained."""
    return {
        "tokens": [[1, 2, 3], [1, 2, 4]],
        "masks": [[-100, 2, 3], [-100, -100, 4]],
        "scores": [1.0, 0.0],
        "inference_logprobs": [[1.0, -0.25, -0.12345678], [1.0, 1.0, -2.0]],
        **changes,
    }


def view(**changes: Any) -> dict[str, Any]:
    found = view_of_row(row(**changes), name="line-1")
    assert found is not None
    return found


def advantages(**changes: Any) -> list[Any]:
    return [each["advantage"] for each in view(**changes)["sequences"]]


def test_a_row_of_process_is_shown_with_its_item_and_its_tokens() -> None:
    shown = view(
        group_id="9f3c",
        environment="sums",
        item_id=12,
        item={"a": 1},
        gold_answer="2",
        prompt=[ASKED],
        completions=["So.", "No."],
        finish_reasons=["stop", "length"],
        policy_version=40,
        calls=[{"model": "m", "sampling": {"temperature": 0.5}, "answers": []}],
        began_at=0.5,
        duration_s=2.5,
        usage={"num_requests": 1},
        ref_logprobs=None,
    )
    sequences = shown.pop("sequences")
    assert shown == {
        "id": "9f3c",
        "environment": "sums",
        "env_id": None,
        "item_id": 12,
        "item": {"a": 1},
        "gold_answer": "2",
        "step": None,
        "policy_version": 40,
        "staleness": None,
        "fate": None,
        "loss_share": None,
        "facts": {
            "model": "m",
            "sampling": {"temperature": 0.5},
            "requests": 1,
            "began_at": "1970-01-01 00:00:00Z",
            "duration_s": 2.5,
            "usage": {"num_requests": 1},
        },
        "images": [],
    }
    assert sequences[0] == {
        "score": 1.0,
        "advantage": 0.9998,
        "finish_reason": "stop",
        "messages": [ASKED, ANSWERED],
        "text": None,
        "tokens": [1, 2, 3],
        "trained": [0, 1, 1],
        "sampled": [None, -0.25, -0.123457],
    }
    assert (sequences[1]["trained"], sequences[1]["finish_reason"]) == ([0, 0, 1], "length")


def test_a_row_of_the_original_has_scores_and_messages_only() -> None:
    line = '{"scores": [NaN, 1.5], "messages": [[{"role": "user", "content": "How?"}], ["text"]]}'
    shown = view_of_row(json.loads(line), name="line-7")
    assert shown is not None
    assert shown["id"] == "line-7"
    assert shown["facts"] == {"scores that are no numbers": "sequence 1: nan"}
    first, second = shown["sequences"]
    assert (first["score"], first["advantage"], first["messages"]) == (None, None, [ASKED])
    assert (second["score"], second["messages"], second["text"]) == (1.5, None, "text")
    assert "tokens" not in first


def test_masks_of_0_and_1_say_what_is_trained() -> None:
    assert view(masks=[[0, 1, 0], [0, 0, 1]])["sequences"][0]["trained"] == [0, 1, 0]


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, [0.9998, -0.9998]),
        ({"scores": [1.0, 1.0]}, [0.0, 0.0]),
        ({"advantages": [[9.0, 1.0, 2.0], [9.0, 9.0, -1.0]]}, [1.5, -1.0]),
        ({"advantages": [0.25, -0.75]}, [0.25, -0.75]),
        ({"overrides": [{"set_advantage_to_zero": True}, {}]}, [0.0, -0.9998]),
        ({"overrides": [{"sft": True}, {}]}, [None, 0.0]),
        ({"masks": [[-100] * 3, [-100, -100, 4]]}, [None, 0.0]),
        ({"scores": [None, 1.0]}, [None, None]),
        ({"tokens": [[], []], "masks": [[], []]}, [0.9998, -0.9998]),  # an API without token ids
    ],
)
def test_advantages_are_those_of_the_trainer(changes: dict[str, Any], expected: list[Any]) -> None:
    assert advantages(**changes) == expected


def test_token_advantages_are_shown_where_trained() -> None:
    given = view(advantages=[[9.0, 1.0, 2.0], [9.0, 9.0, -1.0]])["sequences"]
    assert [each["token_advantages"] for each in given] == [[None, 1.0, 2.0], [None, None, -1.0]]


def test_arrays_of_another_length_than_the_tokens_are_left_out() -> None:
    shown = view(inference_logprobs=[[-1.0], [1.0, 1.0, -2.0]], masks=[[-100, 2, 3], [-100]])
    first, second = shown["sequences"]
    assert "sampled" not in first
    assert first["tokens"] == [1, 2, 3]
    assert "tokens" not in second


def test_the_text_of_a_sequence_without_messages_is_that_of_its_tokens() -> None:
    def decode(tokens: Any) -> str:
        return " ".join(map(str, tokens))

    for more in ({}, {"prompt": "How?", "completions": ["So."] * 2, "calls": [{"continues": 0}]}):
        shown = view_of_row(row(**more), name="x", decode=decode)
        assert shown is not None
        assert [each["text"] for each in shown["sequences"]] == ["1 2 3", "1 2 4"]
    whole = [
        [{"role": "user", "content": "<user>How?<end>So."}]
    ] * 2  # as include_messages writes it
    assert view(messages=whole)["sequences"][0]["text"] == "<user>How?<end>So."


def test_the_conversation_of_one_turn_is_its_prompt_and_completion() -> None:
    shown = view(prompt="How?", completions=["So.", None])["sequences"]
    assert shown[0]["messages"] == [ASKED, ANSWERED]
    assert (shown[1]["messages"], shown[1]["text"]) == (None, None)


def test_images_are_found_in_any_shape_once_and_in_order_and_in_texts() -> None:
    jpeg = "/9j/4AAQSkZJRg=="
    value = [[URI, None], {"a": {"b": jpeg}}, PNG, "text", 3, f"{URI} and more"]
    assert images_in(value) == [URI, f"data:image/jpeg;base64,{jpeg}"]
    assert images_in(None) == []
    shown = view_of_row(
        row(images=[jpeg, "javascript:alert(1)"]), name="x", decode=lambda _: f"Look: {URI}."
    )
    assert shown is not None
    assert shown["images"] == [f"data:image/jpeg;base64,{jpeg}", URI]
    assert shown["sequences"][0]["text"] == "Look: [image]."


def test_a_row_without_sequences_is_not_shown(caplog: pytest.LogCaptureFixture) -> None:
    assert view_of_row({}, name="x") is None
    assert view_of_row({"scores": [], "messages": []}, name="x") is None
    cut = view_of_row({"scores": [0.5, 0.25], "messages": ["a1"]}, name="line-3")
    assert cut is not None
    assert len(cut["sequences"]) == 1
    assert "line-3: messages of 1 sequences, scores of 2" in caplog.text


def test_a_checked_group_is_shown_as_its_row_is_and_named_by_its_content() -> None:
    group = check_group(row(policy_version=3), strictness=Strictness.MEANING)
    shown = view_of_group(group)
    assert shown is not None
    assert shown == {**view(policy_version=3), "id": shown["id"]}
    assert view_of_group(group.replace(group_id="9f3c"))["id"] == "9f3c"  # type: ignore[index]
    other = view_of_group(check_group(row(scores=[0, 1]), strictness=Strictness.MEANING))
    assert other is not None
    assert len({shown["id"], other["id"], "line-1"}) == 3


def test_the_samples_of_an_item_are_one_group() -> None:
    sample = {
        "row": {"question": "1+1?"},
        "messages": [ASKED, ANSWERED],
        "score": 1.0,
        "finish_reason": "stop",
        "gold_answer": "2",
        "extracted_answer": "2",
        "category": "sums",
        "format_valid": True,
        "response_length": 34,
        "item_index": 4,
        "item_hash": "05a4",
        "num_samples": 2,
        "sample_index": 0,
    }
    other = {**sample, "score": 0.0, "extracted_answer": "3", "sample_index": 1}
    first, last = views_of_samples([sample, other, {**sample, "item_index": 5}])
    assert (first["id"], first["item_id"], first["item"]) == ("item-4", 4, {"question": "1+1?"})
    assert first["gold_answer"] == "2"
    assert first["facts"] == {"category": "sums", "format_valid": True, "response_length": 34}
    assert [each["metrics"] for each in first["sequences"]] == [
        {"extracted_answer": "2"},
        {"extracted_answer": "3"},
    ]
    assert [each["score"] for each in first["sequences"]] == [1.0, 0.0]
    assert first["sequences"][0]["messages"] == [ASKED, ANSWERED]
    assert (last["id"], len(last["sequences"])) == ("item-5", 1)


def test_samples_of_any_shape_are_shown_one_by_one() -> None:
    long = "x" * 300
    first, second = views_of_samples([{"question": "1+1?", "answer": long}, {"score": 0.5}])
    assert (first["id"], second["id"]) == ("sample-1", "sample-2")
    [sequence] = first["sequences"]
    assert sequence["metrics"] == {"question": "1+1?"}
    assert sequence["text"] == f"answer: {long}"
    assert (sequence["score"], second["sequences"][0]["score"]) == (None, 0.5)


def test_what_an_environment_notes_of_a_sequence_stays_with_it() -> None:
    overrides = [
        {"turn_rewards": [0.5, None, "x"], "done_reason": "won", "format": 0.2},
        {"turn_rewards": []},
        None,
    ]
    view = view_of_row({"scores": [1.0, 0.0, 0.0], "overrides": overrides}, name="g")
    assert view is not None
    found = [(each.get("turn_rewards"), each.get("notes")) for each in view["sequences"]]
    noted = {"done_reason": "won", "format": 0.2}
    assert found == [([0.5, None, None], noted), (None, None), (None, None)]
    assert "overrides" not in view["facts"]
    sample = {"score": 1.0, "turn_rewards": [1.0], "extracted_answer": "4", "strict": [True]}
    long = {"explanation": "It is " * 50}
    [shown] = [view["sequences"][0] for view in views_of_samples([{**sample, **long}])]
    assert shown["turn_rewards"] == [1.0]
    assert shown["notes"] == {"strict": [True], **long}
    assert shown["metrics"] == {"extracted_answer": "4"}
