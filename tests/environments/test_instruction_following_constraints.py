"""The constraints of RLVR-IFeval and IFEval: a text that keeps each, and one that only seems to."""

from __future__ import annotations

from typing import Any

import pytest

from tests.environments.helpers_environments import load

constraints = load("instruction_following_constraints")
RULES = constraints.RLVR | constraints.IFEVAL
GERMAN, ENGLISH = "Dieser Satz ist auf Deutsch geschrieben.", "This sentence is written in English."

KEPT_AND_BROKEN: list[tuple[str, dict[str, Any], str, str]] = [
    ("verify_keywords", {"keyword_list": ["Sea", "sun"]}, "The SUN over the sea", "The sun"),
    ("verify_keyword_frequency", {"word": "a.b", "N": 2}, "A.b, then a.b", "a.b axb xa.b"),
    ("validate_forbidden_words", {"forbidden_words": ["cat"]}, "A dog", "A conCATenation"),
    ("verify_letter_frequency", {"letter": "a", "N": 1}, "An a", "A a a"),
    ("verify_paragraph_count", {"N": 2}, "one\n* * *\ntwo", "one\n* * *\n* * *\n"),
    ("validate_word_constraint", {"N": 2, "quantifier": "at least"}, "a b", "a"),
    ("validate_word_constraint", {"N": 2, "quantifier": "at most"}, "a b", "a b c"),
    ("validate_word_constraint", {"N": 20, "quantifier": "around"}, "a " * 22, "a " * 23),
    (
        "verify_sentence_constraint",
        {"N": 2, "quantifier": "at most"},
        "Dr. Wu e.g. a. B!",
        "A. B. C.",
    ),
    ("validate_paragraphs", {"N": 2, "first_word": "so", "i": 2}, "A.\n\nSo, b.", "So a.\n\nB."),
    ("validate_paragraphs", {"N": 2, "first_word": "so", "i": 2}, "A.\n \nSo b.", "A.\n\nSome b."),
    ("verify_postscript", {"postscript_marker": "P.S."}, "Hi. P.S. Bye", "Hi. PS Bye"),
    ("validate_placeholders", {"N": 2}, "[name] in [town]", "[name] [] in town"),
    ("verify_bullet_points", {"N": 2}, "* one\n- two", "* one\n*two\n-"),
    ("validate_title", {}, "<<My day>>", "<< >> <<a\nb>>"),
    ("validate_choice", {"options": ["Yes.", "No."]}, "yes.", "Yes. No."),
    ("validate_highlighted_sections", {"N": 2}, "*a* and **b**", "*a* and ** and * *"),
    (
        "validate_sections",
        {"N": 2, "section_splitter": "Section"},
        "SECTION 1: a Section 2. b",
        "section: a",
    ),
    ("validate_json_format", {}, '{"a": 1}', '```{"a": 1}```'),
    ("validate_json_format", {}, "[]", "[" * 100_000),
    ("validate_repeat_prompt", {"original_prompt": "Say  it."}, "Say\nit. Done", "Done. Say it."),
    ("validate_two_responses", {}, "a\n******\nb", "a\n******\na"),
    ("validate_two_responses", {}, "a ****** b", "a ****** b ****** c"),
    ("validate_uppercase", {}, "A 1", "A b"),
    ("validate_lowercase", {}, "a 1", "A b"),
    (
        "validate_frequency_capital_words",
        {"N": 2, "quantifier": "at least"},
        "AB and CD",
        "A B Cd EF",
    ),
    ("validate_end", {"end_phrase": "The end."}, "It is the end. The end. ", "The end. Or not"),
    ("validate_quotation", {}, '"a"', '"'),
    ("validate_no_commas", {}, "a b", "a, b"),
    ("keywords:existence", {"keywords": ["Sea", "c++"]}, "The SEA of C++", "The sea of c"),
    ("keywords:frequency", {"keyword": "a", "frequency": 2}, "A a", "A b"),
    (
        "keywords:frequency",
        {"keyword": "a", "frequency": 2, "relation": "less than"},
        "A b",
        "A a",
    ),
    ("keywords:forbidden_words", {"forbidden_words": ["cat"]}, "A category", "A Cat."),
    ("keywords:letter_frequency", {"letter": "#", "let_frequency": 2}, "# a #", "#"),
    ("length_constraints:number_sentences", {"num_sentences": 2}, "Hi. You!", "Dr. Wu e.g. me."),
    (
        "length_constraints:number_words",
        {"num_words": 3, "relation": "less than"},
        "one two",
        "one-two three",
    ),
    (
        "length_constraints:number_paragraphs",
        {"num_paragraphs": 2},
        "a\n***\nb\n***",
        "a\n***\n***\nb",
    ),
    (
        "length_constraints:nth_paragraph_first_word",
        {"num_paragraphs": 2, "nth_paragraph": 2, "first_word": "so"},
        'One.\n\n"So, two.',
        "One.\n\nSome two.",
    ),
    ("detectable_content:number_placeholders", {"num_placeholders": 2}, "[a] [b]", "[a] b"),
    ("detectable_content:postscript", {"postscript_marker": "P.S."}, "Hi\np. s. Bye", "Hi PS"),
    ("detectable_content:postscript", {"postscript_marker": "P.P.S"}, "P. P. S no", "P.S. no"),
    ("detectable_format:number_bullet_lists", {"num_bullets": 2}, "* a\n - b", "* a\n**b** c"),
    ("detectable_format:constrained_response", {}, "My answer is no.", "no."),
    (
        "detectable_format:number_highlighted_sections",
        {"num_highlights": 2},
        "*a* **b**",
        "*a* ** ** *",
    ),
    (
        "detectable_format:multiple_sections",
        {"section_spliter": "Part", "num_sections": 2},
        "Part 1 a\nPart 2 b",
        "Part 1 a\nPart b",
    ),
    ("detectable_format:json_format", {}, '```json\n{"a": 1}\n```', "{a: 1}"),
    ("detectable_format:title", {}, "<<My day>>", "<< >> <my day>"),
    ("combination:two_responses", {}, "a\n******\nb", "a\n******\na"),
    ("combination:repeat_prompt", {"prompt_to_repeat": "Say it."}, "say it. It.", "It. Say it."),
    ("startend:end_checker", {"end_phrase": "Any more?"}, 'Yes. "any more?"', "Any more? No."),
    ("startend:quotation", {}, ' "a" ', '"a" b'),
    (
        "change_case:capital_word_frequency",
        {"capital_frequency": 2},
        "USA and X-RAY",
        "USA and X-ray",
    ),
    ("punctuation:no_comma", {}, "a b", "a, b"),
]
WITH_LANGDETECT: list[tuple[str, dict[str, Any], str, str]] = [
    ("validate_response_language", {"language": "de"}, GERMAN, ENGLISH),
    ("validate_response_language", {"language": "de"}, GERMAN, "123"),
    ("language:response_language", {"language": "de"}, GERMAN, ENGLISH),
    ("language:response_language", {"language": "de"}, GERMAN, "123"),
    ("change_case:english_lowercase", {}, ENGLISH.lower(), ENGLISH),
    ("change_case:english_capital", {}, ENGLISH.upper(), GERMAN.upper()),
]


@pytest.mark.parametrize(
    ("name", "arguments", "kept", "broken"), [*KEPT_AND_BROKEN, *WITH_LANGDETECT]
)
def test_a_constraint_tells_kept_from_broken(
    name: str, arguments: dict[str, Any], kept: str, broken: str
) -> None:
    if name in (case[0] for case in WITH_LANGDETECT):
        pytest.importorskip("langdetect")
    assert RULES[name](kept, **arguments) is True
    assert RULES[name](broken, **arguments) is False


def test_every_constraint_of_the_data_has_a_test() -> None:
    assert {name for name, *_ in [*KEPT_AND_BROKEN, *WITH_LANGDETECT]} == RULES.keys()
    assert len(constraints.RLVR) == len(constraints.IFEVAL) == 25
