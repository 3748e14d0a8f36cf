"""The constraints of RLVR-IFeval and IFEval: functions from a text and a constraint's arguments to whether it holds.

`RLVR` and `IFEVAL` map the names in the rows of a data set to its rules, whose parameters are named as in the rows. The
same constraint may have another rule in the other data set. Used by `instruction_following_algorithm_environment` and
`eval_environments/ifeval_eval`. Source of IFEval's rules: arXiv:2311.07911.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Sequence
from typing import TypeAlias

from atroposlib.errors import require

Rules: TypeAlias = dict[str, Callable[..., bool]]

TOLERANCE = 0.1
"""Fraction of N by which a number of words may differ from "around N"; at least 1."""
YES_NO_MAYBE = ("My answer is yes.", "My answer is no.", "My answer is maybe.")


def num(pattern: str, text: str) -> int:
    """Return the number of matches."""
    return len(re.findall(pattern, text))


def whole(word: str) -> str:
    """Return a pattern of a whole word, in any case."""
    return rf"(?i)(?<!\w){re.escape(word)}(?!\w)"


def has_all(text: str, words: Iterable[str]) -> bool:
    """Whether all words occur, in any case, maybe inside other words."""
    return all(word.lower() in text.lower() for word in words)


def filled(parts: Iterable[str]) -> list[str]:
    """Return the parts that are not blank, stripped."""
    return [part.strip() for part in parts if part.strip()]


def is_language(text: str, language: str) -> bool:
    """Whether the language with this ISO 639-1 code is the most likely one; needs langdetect."""
    langdetect = require("langdetect", extra="examples")
    langdetect.DetectorFactory.seed = 0
    try:
        return bool(langdetect.detect(text) == language)
    except langdetect.LangDetectException:  # no letters
        return False


def tokens_of(text: str) -> list[str]:
    """Return the words and marks as NLTK separates them, which `A/B` and `NASA's` show; needs nltk, not its data."""
    tokens: list[str] = require("nltk.tokenize", extra="examples").word_tokenize(
        text, preserve_line=True
    )
    return tokens


def is_json(text: str) -> bool:
    """Whether the whole text is JSON."""
    try:
        json.loads(text)
    except (ValueError, RecursionError):
        return False
    return True


def is_about(count: int, wanted: int, quantifier: str, tolerance: int | None = None) -> bool:
    """Whether a count is "at least", "at most" or "around" a number."""
    if quantifier == "at least":
        return count >= wanted
    if quantifier == "at most":
        return count <= wanted
    if tolerance is None:
        tolerance = max(round(wanted * TOLERANCE), 1)
    return quantifier == "around" and abs(count - wanted) <= tolerance


def is_related(count: int, relation: str | None, wanted: int) -> bool:
    """Whether a count is "less than" a number; with another relation, or none, at least the number."""
    return count < wanted if relation == "less than" else count >= wanted


# RLVR-IFeval


def verify_sentence_constraint(text: str, N: int, quantifier: str) -> bool:
    """Whether there are so many sentences; the points in "e.g." or "Dr." end none."""
    end = r"(?<!\w\.\w.)(?<![A-Z][a-z]\.)(?<=[.?!])\s+"
    return is_about(len(filled(re.split(end, text))), N, quantifier, tolerance=1)


def validate_paragraphs(text: str, N: int, first_word: str, i: int) -> bool:
    """Whether blank lines divide the text into N paragraphs, and number i (from 1) begins with a word, in any case."""
    paragraphs = filled(re.split(r"\n\s*\n", text))
    if len(paragraphs) != N or not 1 <= i <= N:
        return False
    return paragraphs[i - 1].split()[0].strip("\"'*_.,:;!?").lower() == first_word.lower()


def validate_sections(text: str, N: int, section_splitter: str) -> bool:
    """Whether there are N headings such as `Section 1:`, in any case; the number is optional."""
    return num(rf"(?i)(?<!\w){re.escape(section_splitter)}(?:[ \t]*\d+)?(?:[:.\s]|$)", text) == N


def validate_repeat_prompt(text: str, original_prompt: str) -> bool:
    """Whether the text begins with the prompt; the amount of white space does not matter."""
    prompt = " ".join(original_prompt.split())
    return bool(prompt) and " ".join(text.split()).startswith(prompt)


def validate_two_responses(text: str) -> bool:
    """Whether there are two different texts, divided by one `******`."""
    return text.count("******") == 1 and len(set(filled(text.split("******")))) == 2


RLVR: Rules = {
    "verify_keywords": lambda text, keyword_list: has_all(text, keyword_list),
    "verify_keyword_frequency": lambda text, word, N: num(whole(word), text) == N,
    # Not even inside another word.
    "validate_forbidden_words": lambda text, forbidden_words: (
        not any(has_all(text, [word]) for word in forbidden_words)
    ),
    # In this case.
    "verify_letter_frequency": lambda text, letter, N: len(letter) == 1 and text.count(letter) == N,
    "validate_response_language": lambda text, language: is_language(text, language),
    "verify_paragraph_count": lambda text, N: len(filled(text.split("* * *"))) == N,
    "validate_word_constraint": lambda text, N, quantifier: is_about(
        len(text.split()), N, quantifier
    ),
    "verify_sentence_constraint": verify_sentence_constraint,
    "validate_paragraphs": validate_paragraphs,
    "verify_postscript": lambda text, postscript_marker: postscript_marker in text,
    "validate_placeholders": lambda text, N: num(r"\[[^\[\]]+\]", text) >= N,
    # Lines that begin with `* `, `- ` or `+ `.
    "verify_bullet_points": lambda text, N: num(r"(?m)^[ \t]*[*+-][ \t]+\S", text) == N,
    "validate_title": lambda text: num(r"<<[^<>\n]*[^<>\s][^<>\n]*>>", text) > 0,
    # The whole text is an option, in any case.
    "validate_choice": lambda text, options: (
        text.strip().lower() in [option.strip().lower() for option in options]
    ),
    "validate_highlighted_sections": lambda text, N: (
        num(r"\*[^\s*](?:[^*\n]*[^\s*])?\*", text) >= N
    ),
    "validate_sections": validate_sections,
    "validate_json_format": is_json,
    "validate_repeat_prompt": validate_repeat_prompt,
    "validate_two_responses": validate_two_responses,
    "validate_uppercase": lambda text: text == text.upper(),
    "validate_lowercase": lambda text: text == text.lower(),
    "validate_frequency_capital_words": lambda text, N, quantifier: is_about(
        num(r"\b[A-Z]{2,}\b", text), N, quantifier
    ),
    "validate_end": lambda text, end_phrase: text.strip().endswith(end_phrase.strip()),
    "validate_quotation": lambda text: re.fullmatch(r'(?s)\s*".+"\s*', text) is not None,
    "validate_no_commas": lambda text: "," not in text,
}


# IFEval


def number_sentences(text: str, num_sentences: int, relation: str | None = None) -> bool:
    """Whether there are so many sentences; the points in "e.g." or "Dr." end none."""
    end = r"(?<!\w\.\w.)(?<!\bDr\.)(?<!\bM[rs]\.)(?<!\bMrs\.)(?<=[.?!])[\"')\]]*\s+"
    return is_related(len(filled(re.split(end, text))), relation, num_sentences)


def inner(parts: Sequence[str]) -> list[str]:
    """Return the parts, stripped, without a blank first or last one."""
    last = len(parts) - 1
    return [part.strip() for i, part in enumerate(parts) if part.strip() or 0 < i < last]


def number_paragraphs(text: str, num_paragraphs: int) -> bool:
    """Whether `***` divides the text into N paragraphs; none is empty, except before the first and after the last."""
    parts = inner(re.split(r"\s?\*\*\*\s?", text))
    return len(parts) == num_paragraphs and all(parts)


def nth_paragraph_first_word(
    text: str, num_paragraphs: int, nth_paragraph: int, first_word: str
) -> bool:
    """Whether blank lines divide the text into N paragraphs, and number n (from 1) begins with a word."""
    paragraphs = filled(text.split("\n\n"))
    if len(paragraphs) != num_paragraphs or not 1 <= nth_paragraph <= num_paragraphs:
        return False
    first = paragraphs[nth_paragraph - 1].split()[0].lstrip("\"'")
    return re.split(r"[.,?!'\"]", first)[0].lower() == first_word.lower()


def postscript(text: str, postscript_marker: str) -> bool:
    """Whether the marker occurs, in any case; the spaces in "P. S." do not matter."""
    marker = r"\s*".join(map(re.escape, postscript_marker.lower().replace(" ", "")))
    return num(marker, text.lower()) > 0


def number_highlighted_sections(text: str, num_highlights: int) -> bool:
    """Whether there are at least N highlights such as `*this*` or `**this**`."""
    found = [*re.findall(r"\*[^\n*]*\*", text), *re.findall(r"\*\*[^\n*]*\*\*", text)]
    return sum(bool(part.strip("* ")) for part in found) >= num_highlights


def two_responses(text: str) -> bool:
    """Whether `******` divides two different texts."""
    found = inner(text.split("******"))
    return len(found) == 2 and all(found) and found[0] != found[1]


IFEVAL: Rules = {
    "keywords:existence": lambda text, keywords: has_all(text, keywords),
    "keywords:frequency": lambda text, keyword, frequency, relation=None: is_related(
        text.lower().count(keyword.strip().lower()), relation, frequency
    ),
    "keywords:forbidden_words": lambda text, forbidden_words: (
        not any(num(whole(word), text) for word in forbidden_words)
    ),
    "keywords:letter_frequency": lambda text, letter, let_frequency, let_relation=None: is_related(
        text.lower().count(letter.lower()), let_relation, let_frequency
    ),
    "language:response_language": lambda text, language: is_language(text, language),
    "length_constraints:number_sentences": number_sentences,
    "length_constraints:number_words": lambda text, num_words, relation=None: is_related(
        num(r"\w+", text), relation, num_words
    ),
    "length_constraints:number_paragraphs": number_paragraphs,
    "length_constraints:nth_paragraph_first_word": nth_paragraph_first_word,
    "detectable_content:number_placeholders": lambda text, num_placeholders: (
        num(r"\[.*?\]", text) >= num_placeholders
    ),
    "detectable_content:postscript": postscript,
    # Lines that begin with `*` (not `**`) or `-`.
    "detectable_format:number_bullet_lists": lambda text, num_bullets: (
        num(r"(?m)^\s*(?:\*[^*\n]|-)", text) == num_bullets
    ),
    "detectable_format:constrained_response": lambda text: any(
        choice in text for choice in YES_NO_MAYBE
    ),
    "detectable_format:number_highlighted_sections": number_highlighted_sections,
    # Headings such as `Section 1`.
    "detectable_format:multiple_sections": lambda text, section_spliter, num_sections: (
        num(rf"\s?{re.escape(section_spliter.strip())}\s?\d+\s?", text) >= num_sections
    ),
    # Also in a fence.
    "detectable_format:json_format": lambda text: is_json(
        re.sub(r"^```\w*\s*|(?<!\s)\s*```$", "", text.strip())
    ),
    "detectable_format:title": lambda text: any(
        found.strip("<> ") for found in re.findall(r"<<[^\n]+?>>", text)
    ),
    "combination:two_responses": two_responses,
    "combination:repeat_prompt": lambda text, prompt_to_repeat: (
        text.strip().lower().startswith(prompt_to_repeat.strip().lower())
    ),
    # Inside of quotes or not, in any case.
    "startend:end_checker": lambda text, end_phrase: (
        text.strip().strip('"').lower().endswith(end_phrase.strip().lower())
    ),
    "startend:quotation": lambda text: re.fullmatch(r'(?s)\s*".*"\s*', text) is not None,
    "change_case:capital_word_frequency": lambda text, capital_frequency, capital_relation=None: (
        is_related(
            sum(map(str.isupper, tokens_of(text))),
            capital_relation,
            capital_frequency,
        )
    ),
    "change_case:english_capital": lambda text: text.isupper() and is_language(text, "en"),
    "change_case:english_lowercase": lambda text: text.islower() and is_language(text, "en"),
    "punctuation:no_comma": lambda text: "," not in text,
}
