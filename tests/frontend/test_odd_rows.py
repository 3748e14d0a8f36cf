"""Any JSON value in any field of a row, a sample or a step gives a page."""

import json
import time
from pathlib import Path
from typing import Any

import pytest

from atroposlib.frontend.jsonl2html import create_html_for_group, generate_html
from atroposlib.frontend.view_groups import images_in, view_of_row
from atroposlib.inference.harness import ByteTokenizer
from atroposlib.utils.json_lines import decode_object
from tests.frontend.helpers_pages import read_page

DIGITS, HUGE = "9" * 5000, "1" + "0" * 400
ODD = (
    *("null", "true", "0", "-1", "1.5", "1e400", "NaN", "-Infinity", HUGE, f"-{HUGE}", DIGITS),
    *(f'"{DIGITS}"', '"x"', '""', '"\\ud800"', '"\\u0000"', '"NaN"', "[]", "{}", '{"a": 1}'),
    *('["x", "y"]', '[[7], "x"]', "[{}, {}]", "[[[{}]], [null]]", "[null, null]"),
    *("[[]]", "[null]", "[[null]]", "[[[1]]]", "[{}]", '[{"a": null}]', "[true, false]", "[1, 2]"),
    *('["a", "b"]', '[["a", "b", "c"], ["a"]]', '[[1.5, "x", null], [1, 2, 3]]'),
    *("[[1, 2, 300], [1, 2, -4]]", f"[[{HUGE}, 2, 3], [1, 2, 4]]", f"[{HUGE}, 2]"),
    *("[1e308, -1e308]", "[[1e308, -1e308, 3], [-1e308, 1e308, 1]]", f"[[{DIGITS}], 7]"),
    *('[{"role": 1, "content": [1]}]', '[[{"role": "user", "content": {"a": 1}}], [{}]]'),
    *('[[{"content": [{"text": null}, {"type": 5}, 7]}], ["x"]]', "[[[" + "[" * 40 + "]" * 43),
    '[[{"start": 0, "num_tokens": 3, "weight_version": "9"}], []]'.replace("9", DIGITS),
    '[[{"start": -5, "num_tokens": 2e3, "weight_version": "1"}], [{"start": "a"}]]',
    '[[{"start": 0, "num_tokens": 3, "weight_version": "7"}], [{"start": 9}]]'.replace("9", HUGE),
)
TOKENS = {"tokens": [[1, 2, 3], [1, 2, 4]], "masks": [[-100, 2, 3], [-100, -100, 4]]}
ROW = {**TOKENS, "scores": [1.0, 0.0], "inference_logprobs": [[1.0, -0.25, -0.5], [1.0, 1.0, -2.0]]}
ONE_TURN = {"prompt": "How?", "completions": ["So.", "No."]}
SAMPLE = {"item_index": 0, "score": 1.0, "messages": [{"role": "user", "content": "a"}]}
STEP = {"step": 1, "reward_mean": 0.5, "loss": 0.1, "num_sequences": 8, "num_trained_tokens": 80}
FIELDS = {
    "row": (
        *("tokens", "masks", "scores", "inference_logprobs", "advantages", "messages", "images"),
        *("overrides", "group_overrides", "group_id", "environment", "env_id", "item_id", "item"),
        *("gold_answer", "policy_version", "prompt", "completions", "finish_reasons", "calls"),
        *("began_at", "duration_s", "usage", "generation_params", "weight_versions"),
    ),
    "sample": ("item_index", "score", "messages", "row", "item", "finish_reason", "correct"),
    "step": ("step", "reward_mean", "loss", "grad_norm", "num_sequences", "num_trained_tokens"),
}
CASES = [(kind, field) for kind, fields in FIELDS.items() for field in fields]


@pytest.mark.parametrize(("kind", "field"), CASES)
def test_a_file_with_every_odd_value_in_a_field_gives_a_page(
    tmp_path: Path, kind: str, field: str
) -> None:
    base: dict[str, Any] = {"row": ROW, "sample": SAMPLE, "step": STEP}[kind]
    lines = [json.dumps(base)]
    for less in ({}, {**ROW, **ONE_TURN}, {"scores": [1.0, 0.0], **TOKENS}, {"scores": [1.0, 0.0]}):
        rest = {name: value for name, value in (less or base).items() if name != field}
        inside = json.dumps(rest)[1:-1]
        lines += [f'{{{inside}{"," * bool(rest)} "{field}": {odd}}}' for odd in ODD]
        if kind != "row":
            break
    path = tmp_path / "file.jsonl"
    path.write_text("\n".join(lines) + "\n")
    page = generate_html(path, tokenizer=ByteTokenizer())
    assert page.stat().st_size > 1000
    if kind == "row" and field != "scores":
        groups = read_page(page).groups
        assert len(groups) == len(lines)
        assert all(group["sequences"] for group in groups)


@pytest.mark.parametrize("field", ["scores", "messages"])
def test_a_block_of_html_is_made_of_any_value(field: str) -> None:
    for odd in ODD:
        value = decode_object(f'{{"x": {odd}}}'.encode())["x"]
        create_html_for_group({"scores": [1, 0], "messages": [["a"], ["b"]], field: value}, 0)


def test_what_is_no_number_or_token_is_left_out_and_the_rest_is_shown() -> None:
    row = {**ROW, "scores": [10**400, 0.5], "advantages": [["a", 1, 2], [9, 9, -1]]}
    shown = view_of_row(row, name="n")
    assert shown is not None
    assert [each["score"] for each in shown["sequences"]] == [None, 0.5]
    assert [each["advantage"] for each in shown["sequences"]] == [1.5, -1.0]
    odd = view_of_row({**ROW, "tokens": [[1, -2, 3], [1, 2, 4]]}, name="n")
    assert odd is not None
    assert ["tokens" in each for each in odd["sequences"]] == [False, True]


def test_a_text_that_is_almost_an_image_is_refused_in_linear_time() -> None:
    start = "iVBORw0KGgo"
    assert images_in([f"{start}AA =\n", f"{start}AA==", f"{start} A"]) != []
    began = time.process_time()
    for tail in (" " * 400_000 + "!", "A " * 200_000 + "!", "=" * 400_000, " =" * 200_000):
        assert images_in(start + tail) == []
    assert time.process_time() - began < 2.0
