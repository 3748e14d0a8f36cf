"""The difference of two evaluations over the items that both have."""

import math
from pathlib import Path
from typing import Any

import pytest

from atroposlib.cli.compare_evals import compare, paired_items
from atroposlib.cli.environments import main
from tests.builders.programs import refusal
from tests.builders.rows import write_rows
from tests.frontend.helpers_pages import read_page


def samples(scores: dict[str, list[float | None]], **more: Any) -> list[dict[str, Any]]:
    """Return samples of the items by name, each with these scores."""
    return [
        {"score": score, "item_index": index, "item_hash": name, "sample_index": i, **more}
        for index, (name, listed) in enumerate(scores.items())
        for i, score in enumerate(listed)
    ]


def test_items_are_paired_in_any_order_and_others_left_out() -> None:
    before = samples({"a": [0.0], "b": [0.0, 1.0], "c": [1.0], "gone": [1.0]})
    after = samples({"c": [1.0], "b": [1.0, 1.0, None], "a": [1.0], "added": [0.0]})
    [(name, (old, new, difference))] = compare(paired_items(before, after)).items()
    assert (name, old, new) == ("score", 0.5, 1.0)
    assert difference == 0.5
    assert difference.n == 3
    assert difference.stderr == pytest.approx(math.sqrt(0.25 / 3))  # of 1, 0.5 and 0
    assert difference.low == pytest.approx(0.5 - 4.3027 * math.sqrt(0.25 / 3))


def test_equal_evaluations_differ_by_nothing() -> None:
    found = compare(paired_items(*[samples({"a": [0.0], "b": [1.0]})] * 2))["score"].difference
    assert (found, found.low, found.high) == (0.0, 0.0, 0.0)


def test_the_same_item_twice_is_two_items() -> None:
    twice = [*samples({"a": [0.0]}), {**samples({"a": [1.0]})[0], "item_index": 1}]
    assert compare(paired_items(twice, twice))["score"].difference.n == 2


def test_a_value_that_is_no_number_counts_as_missing() -> None:
    before, after = (
        samples({"a": [math.nan, 1.0], "b": [math.nan]}),
        samples({"a": [0.5], "b": [1]}),
    )
    assert compare(paired_items(before, after))["score"] == (1.0, 0.5, -0.5)


def test_a_question_of_several_parts_is_shown_as_text(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    parts = [{"type": "text", "text": "What is this?"}, {"type": "image_url"}]
    messages = [{"role": "user", "content": parts}, {"role": "assistant"}, {"content": "no role"}]
    for name, score in (("old", 0.0), ("new", 1.0)):
        [sample] = samples({"a": [score]}, messages=messages)
        write_rows(tmp_path / name, sample)
    assert main(["compare", str(tmp_path / "old"), str(tmp_path / "new")]) == 0
    assert "| What is this? [image_url] |" in capsys.readouterr().out


def test_command_prints_every_number_of_the_samples(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, right in (("old", 0.0), ("new", 1.0)):
        lines = samples({"a": [right], "b": [right]}, note="x", metrics={"length": 3})
        write_rows(tmp_path / name / "samples.jsonl", *lines)
    assert main(["compare", str(tmp_path / "old"), str(tmp_path / "new" / "samples.jsonl")]) == 0
    head, _, *rows = capsys.readouterr().out.splitlines()
    cells = [[cell.strip() for cell in row.split("|")[1:-1]] for row in (head, *rows)]
    assert cells[0] == [
        *("Value", "Before", "After", "Difference", "Stderr", "95 % interval", "Items"),
    ]
    assert cells[1] == ["score", "0.0000", "1.0000", "+1.0000", "0.0000", "[1.0000, 1.0000]", "2"]
    assert cells[2][:4] == ["length", "3.0000", "3.0000", "+0.0000"]


def test_the_items_that_changed_most_come_first_also_on_the_page(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    old = samples({"a": [1.0], "b": [0.0, 1.0], "c": [0.0]})
    new = samples({"a": [1.0], "b": [0.0, 0.0], "c": [1.0]})
    for name, listed in (("old", old), ("new", new)):
        for sample in listed:
            turns = [
                ("user", f"Question\n{sample['item_hash']} | ?"),
                ("assistant", f"{name} answer"),
            ]
            sample["messages"] = [{"role": role, "content": text} for role, text in turns]
        write_rows(tmp_path / f"{name}.jsonl", *listed)
    page = tmp_path / "page.html"
    assert (
        main(
            [
                "compare",
                str(tmp_path / "old.jsonl"),
                str(tmp_path / "new.jsonl"),
                "--html",
                str(page),
            ]
        )
        == 0
    )
    said = capsys.readouterr().out.split("\n\n")[1].splitlines()
    assert said[0] == "score changed in 2 of 3 items:"
    assert [line.split("|")[1:-1] for line in said[3:5]] == [
        [" 2    ", " 0.0000 ", " 1.0000 ", " +1.0000    ", " Question c / ? "],
        [" 1    ", " 0.5000 ", " 0.0000 ", " -0.5000    ", " Question b / ? "],
    ]
    groups = read_page(page).groups
    assert [group["item_id"] for group in groups] == [2, 1, 0]
    assert [(each["label"], each["score"]) for each in groups[1]["sequences"]] == [
        ("before", 0.0),
        ("before", 1.0),
        ("after", 0.0),
        ("after", 0.0),
    ]
    assert groups[0]["sequences"][0]["messages"][1]["content"] == "old answer"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "No such file"),
        ('{"score": 1}\n', "do not name their items"),
        (
            '{"score": 1, "item_index": 0, "item_hash": "other"}\n',
            "no item with a number in common",
        ),
    ],
)
def test_what_cannot_be_compared_is_one_line(
    text: str | None, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    good, bad = tmp_path / "good.jsonl", tmp_path / "bad.jsonl"
    write_rows(good, *samples({"a": [1.0]}))
    if text is not None:
        bad.write_text(text)
    assert message in refusal(main(["compare", str(good), str(bad)]), capsys)
