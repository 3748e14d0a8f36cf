"""Every answer format reads its own example, once and not twice, and no prose."""

import time

import pytest

from atroposlib.envs.answer_formats import BLANK, FORMATS, MAX_DOCUMENT
from tests.builders.tables import table

DOCUMENTS = ("json", "yaml", "toml")
PROSE = "I think that it may be the second one but this is hard to tell"


@pytest.mark.parametrize("name", FORMATS)
def test_a_format_is_read_once_and_not_twice(name: str) -> None:
    answer_format = FORMATS[name]
    example = answer_format.example.replace(BLANK, "B")
    assert set(answer_format.read(f"\n{example}\n").split()) == {"B"}
    assert answer_format.read(f"{example}\n{example}") is None
    assert not answer_format.read(PROSE)
    assert not answer_format.read("")


def test_there_are_about_130_formats_of_three_kinds() -> None:
    kinds = [each.kind for each in FORMATS.values()]
    assert len(kinds) >= 125
    assert set(kinds) == {"generic", "math_only", "code_only"}


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("italic", "**B**"),
        ("bracket", "[[B]]"),
        ("backtick", "``B``"),
        ("json", '{"answer": "B", "a": 1, "b": 2}'),
        ("json", 'so {"answer": "B"}'),
        ("json_array", '["A", "B"]'),
        ("nested_response_answer", "<answer>B</answer>"),
        ("textarena", "[E]"),
        ("natural_language_answer", "The answer is: A\nThe answer is: B"),
        ("complex_general_simple", "<ANALYSIS>a</ANALYSIS><CONCLUSION>b</CONCLUSION>"),
    ],
)
def test_a_near_miss_is_not_the_format(name: str, text: str) -> None:
    assert not FORMATS[name].read(text)


@pytest.mark.parametrize(
    ("name", "text", "answer"),
    [
        ("boxed", "\\boxed{\\frac{1}{2}}", "\\frac{1}{2}"),
        ("nested_output_result", "<output>  <result>B</result></output>", "B"),
        ("json", '{"answer": "a \\"b\\""}', 'a "b"'),
        ("yaml", "answer: 12", "12"),
        ("yaml", "answer: 0x" + "f" * 5_000, "0x" + "f" * 5_000),
        ("yaml", "answer: 2020-13-45", "2020-13-45"),
        ("latex_implies", "$a \\implies b \\in c$", "b \\in c"),
    ],
)
def test_spaces_escapes_and_nested_braces_are_read(name: str, text: str, answer: str) -> None:
    assert FORMATS[name].read(text) == answer


@pytest.mark.parametrize("name", [name for name in FORMATS if name.startswith(DOCUMENTS)])
@pytest.mark.parametrize(
    "value",
    [
        *("0x" + "f" * 9_000, "9" * 9_000, "1e999", "NaN", ".nan", "1:" * 9_000 + "1.5"),
        *("[" * 9_000, "{" * 9_000, "- " * 9_000, "]" * 60 + "[" * 9_000, "!!timestamp x"),
        *("!!int ''", "2020-99-99", "*a", "? [a]\n: b"),
        "&a [x]\n" + "\n".join(f"k{i}: &k{i} {{<<: [*k{i - 1}, *k{i - 1}]}}" for i in range(1, 40)),
    ],
)
def test_a_document_that_cannot_be_read_is_not_in_the_format(name: str, value: str) -> None:
    for text in (value, FORMATS[name].example.replace(f'"{BLANK}"', value), f"? {value}\n: 1"):
        found = FORMATS[name].read(text)
        assert found is None or isinstance(found, str)


UNITS = table("envs/repeated")["formats"]


@pytest.mark.parametrize("name", FORMATS)
def test_reading_takes_linear_time(name: str) -> None:
    before, after = FORMATS[name].example.split(BLANK)[:: FORMATS[name].example.count(BLANK)]

    def seconds(unit: str, length: int) -> float:
        text = (unit * length)[:length]
        begin = time.process_time()
        for whole in (text, before + text, before + text + after):
            FORMATS[name].read(whole)
        return time.process_time() - begin

    long = MAX_DOCUMENT - 100 if name.startswith(DOCUMENTS) else 20_000
    slow = [unit for unit in (*UNITS, before + after, before) if seconds(unit, long) > 0.1]
    longest, half = (
        {unit: min(seconds(unit, length) for _ in range(3)) for unit in slow}
        for length in (long, long // 2)
    )
    assert [unit for unit in slow if longest[unit] > 3 * half[unit]] == []  # quadratic: 4
