"""Answer formats by name: an example to show to the model, and a reader that accepts one answer in exactly that form.

Used by the environment `answer_format_environment`. Pure functions of the text after the thinking; the time that they
take is not bounded, so run `is_in_format` in a worker.
"""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Callable, Iterator
from typing import Any, Literal, NamedTuple

import yaml

from atroposlib.envs.answers import only_tagged

BLANK = "YOUR_ANSWER"
"""Stands for the answer in a format's example; an answer that still contains it earns nothing."""
MAX_DOCUMENT = 10_000
"""Characters; a longer text is not in a format of JSON, YAML or TOML, whose parsers do not all take linear time."""
PHRASES = {
    "answer": "The answer",
    "final": "The final answer",
    "conclusion": "The conclusion",
    "result": "The result",
    "best": "The best answer",
    "my_final": "My final answer",
    "correct": "The correct answer",
    "solution": "The solution",
    "response": "My response",
    "final_verdict": "The final verdict",
    "bottom_line": "The bottom line",
    "key_point": "The key point",
    "overall": "Overall, the answer",
}
"""Lead-ins that "is" follows."""
ADVERBS = ["therefore", "ultimately", "thus", "hence", "consequently", "to summarize", "in summary"]
SECTIONS = {
    "coding_format": "RESTATEMENT REASONING PLAN PYDANTIC_SCHEMAS DIAGRAM REFLECTION SOLUTION EXPLANATION UNIT_TEST",
    "coding_simple": "RESTATEMENT REASONING PLAN SOLUTION EXPLANATION",
    "coding_minimal": "ANALYSIS APPROACH SOLUTION TEST",
    "math_format": "RESTATEMENT REASONING APPROACH DERIVATION SOLUTION VERIFICATION",
    "math_simple": "PROBLEM_ANALYSIS SOLUTION_STEPS FINAL_ANSWER",
    "general_format": "RESTATEMENT ANALYSIS REASONING CONCLUSION REFLECTION",
    "general_simple": "ANALYSIS REASONING CONCLUSION",
    "research_format": "HYPOTHESIS METHODOLOGY ANALYSIS FINDINGS CONCLUSION",
    "scratchpad_full": "RESTATEMENT REASONING PLAN PYDANTIC_SCHEMAS DIAGRAM REFLECTION SOLUTION EXPLANATION SCRATCHPAD "
    "CITATIONS REVISED_PLAN",
    "scratchpad_simple": "SCRATCHPAD RESTATEMENT REASONING PLAN DIAGRAM",
    "classification_format": "COMPLETENESS_EXPLANATION COMPLETENESS_CLASSIFICATION GRAMMAR_EXPLANATION "
    "GRAMMAR_CLASSIFICATION SCIENTIFIC_EXPLANATION SCIENTIFIC_CLASSIFICATION PROGRAMMING_EXPLANATION "
    "PROGRAMMING_CLASSIFICATION",
    "analysis_with_answer": "ANALYSIS METHODOLOGY FINDINGS ANSWER",
    "evaluation_format": "CRITERIA ASSESSMENT OVERALL_SCORE JUDGMENT",
}
"""Tags of the formats of sections."""
Kind = Literal["generic", "math_only", "code_only"]


class AnswerFormat(NamedTuple):
    name: str
    example: str
    read: Callable[[str], str | None]
    """Returns the answer in a text; None (or an empty text) unless the text follows the format exactly once."""
    kind: Kind = "generic"
    """Which questions it is for: all, or those of mathematics or code alone."""
    is_sectioned: bool = False


def by_pattern(pattern: str) -> Callable[[str], str | None]:
    """Return a reader: the one group of the only match."""
    compiled = re.compile(pattern, re.IGNORECASE | re.MULTILINE)

    def read(text: str) -> str | None:
        found = compiled.findall(text)
        return found[0].strip() if len(found) == 1 else None

    return read


def by_parser(
    parse: Callable[[str], Any], *path: Any, num_entries: int = 1
) -> Callable[[str], str | None]:
    """Return a reader of a text that is one document: the value at `path`, in objects or lists of `num_entries`."""

    def read(text: str) -> str | None:
        if len(text) > MAX_DOCUMENT:
            return None
        try:
            value = parse(text.strip())
            for key in path:
                if not isinstance(value, list if key == 0 else dict) or len(value) != num_entries:
                    return None
                value = value[key]
            return str(value) if isinstance(value, str | int | float) else None
        except (ValueError, LookupError, RecursionError, yaml.YAMLError):  # also too many digits
            return None

    return read


def parse_json(text: str) -> Any:
    """Parse JSON; ValueError if a key occurs twice."""

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        if len(dict(pairs)) != len(pairs):
            raise ValueError("a key occurs twice")
        return dict(pairs)

    return json.loads(text, object_pairs_hook=unique)


def parse_yaml(text: str) -> Any:
    """Parse YAML, scalars as text; ValueError if a key occurs twice, or for more than 50 brackets inside each other."""
    depth = 0
    for bracket in re.findall(r"[\[\]{}]", text):  # PyYAML takes quadratic time for them
        depth = depth + 1 if bracket in "[{" else max(0, depth - 1)
        if depth > 50:
            raise ValueError("too many brackets inside each other")
    node = yaml.compose(text, Loader=yaml.BaseLoader)
    if isinstance(node, yaml.MappingNode):
        keys = [key.value for key, _ in node.value if isinstance(key, yaml.ScalarNode)]
        if len(set(keys)) != len(keys):
            raise ValueError("a key occurs twice")
    return yaml.load(text, Loader=yaml.BaseLoader)


def by_tags(*tags: str) -> Callable[[str], str | None]:
    """Return a reader of nested tags, the outermost first."""

    def read(text: str) -> str | None:
        inside: str | None = text
        for tag in tags:
            inside = only_tagged(inside or "", tag)
        return inside

    return read


def by_sections(*tags: str) -> Callable[[str], str | None]:
    """Return a reader of sections that all occur once and are not empty."""

    def read(text: str) -> str | None:
        found = [only_tagged(text, tag) for tag in tags]
        return "\n".join(map(str, found)) if all(found) else None

    return read


TAGS = [
    *("answer", "output", "result", "response"),
    *("final_answer", "solution", "conclusion", "reply"),
]
NESTED_TAGS = {
    "response": "answer",
    "solution": "answer",
    "output": "result",
    "analysis": "conclusion",
    "reasoning": "answer",
}
"""Outer tag -> inner tag."""
DOCUMENTS: list[tuple[str, str, Callable[[str], Any], list[str | int]]] = [
    ("json", f'{{"answer": {BLANK}}}', parse_json, ["answer"]),
    ("json_array", f"[{BLANK}]", parse_json, [0]),
    ("json_simple", BLANK, parse_json, []),
    ("json_confidence", f'{{"answer": {BLANK}, "confidence": 0.9}}', parse_json, ["answer"]),
    ("yaml", f"answer: {BLANK}", parse_yaml, ["answer"]),
    ("yaml_list", f"- {BLANK}", parse_yaml, [0]),
    ("yaml_confidence", f"answer: {BLANK}\nconfidence: 0.9", parse_yaml, ["answer"]),
    ("toml", f"answer = {BLANK}", tomllib.loads, ["answer"]),
    ("toml_section", f"[response]\nanswer = {BLANK}", tomllib.loads, ["response", "answer"]),
    ("toml_confidence", f"answer = {BLANK}\nconfidence = 0.9", tomllib.loads, ["answer"]),
]
"""(name, example, parser, path of the answer)."""


def simple_formats() -> Iterator[AnswerFormat]:
    """Yield the formats with one place for the answer."""
    make = AnswerFormat
    for name, example, parse, path in DOCUMENTS:
        read = by_parser(parse, *path, num_entries=2 if name.endswith("confidence") else 1)
        yield make(name, example.replace(BLANK, f'"{BLANK}"'), read)
    for tag in TAGS:
        yield make(f"{tag}_tags", f"<{tag}>{BLANK}</{tag}>", by_tags(tag))
    for tag in ["code", "pre", "span", "div", "p"]:
        yield make(f"html_{tag}", f"<{tag}>{BLANK}</{tag}>", by_tags(tag))
    for outer, inner in NESTED_TAGS.items():
        example = f"<{outer}>\n<{inner}>{BLANK}</{inner}>\n</{outer}>"
        yield make(f"nested_{outer}_{inner}", example, by_tags(outer, inner))
    braced = r"\{((?:[^{}]|\{(?:[^{}]|\{[^{}]*\})*\})+)\}"
    for command in ["boxed", "textbf", "textit", "underline"]:
        yield make(command, f"\\{command}{{{BLANK}}}", by_pattern(rf"\\{command}{braced}"))
    for command in ["boxed", "text", "mathrm"]:
        read = by_pattern(rf"(?<!\$)\$\\{command}{braced}\$(?!\$)")
        yield make(f"latex_{command}", f"$\\{command}{{{BLANK}}}$", read, "math_only")
    for block in ["align", "equation", "displaymath", "matrix", "pmatrix"]:
        read = by_pattern(rf"\\begin\{{{block}\}}((?:(?!\\begin)[\s\S])+?)\\end\{{{block}\}}")
        yield make(
            f"latex_{block}", f"\\begin{{{block}}}\n{BLANK}\n\\end{{{block}}}", read, "math_only"
        )
    yield make("latex_inline", f"${BLANK}$", by_pattern(r"(?<!\$)\$([^$\n]+)\$(?!\$)"), "math_only")
    for symbol in ["therefore", "implies", "equiv"]:
        before = rf"(?:[^$\n\\]|\\(?!{symbol}\s))*+"  # possessive: linear time
        read = by_pattern(rf"\${before}\\{symbol}\s++([^$\n]++)\$")
        yield make(f"latex_{symbol}", f"$x \\{symbol} {BLANK}$", read, "math_only")
    yield make(
        "markdown_fence", f"```\n{BLANK}\n```", by_pattern(r"```\w*\n((?:(?!```)[\s\S])+?)\n```")
    )
    for name, left, right in [
        *[("bold", "**", "**"), ("italic", "*", "*"), ("bracket", "[", "]"), ("brace", "{", "}")],
        *[("double_bracket", "[[", "]]"), ("parenthesis", "(", ")"), ("angle", "<", ">")],
        *[("pipe", "|", "|"), ("hash", "#", "#"), ("underscore", "_", "_"), ("tilde", "~", "~")],
        *[("backtick", "`", "`"), ("double_backtick", "``", "``"), ("double_quote", '"', '"')],
        *[("single_quote", "'", "'"), ("triple_quote", '"""', '"""')],
    ]:
        a, b = re.escape(left), re.escape(right)
        first, last = re.escape(left[0]), re.escape(right[0])
        read = by_pattern(rf"(?<![{first}\w]){a}([^{first}{last}\n]+){b}(?![{last}\w])")
        yield make(name, f"{left}{BLANK}{right}", read)
    yield make("textarena", f"[{BLANK}]", by_pattern(r"\[([A-D])\]"))
    phrases = {
        **{f"natural_language_{name}": f"{phrase} is" for name, phrase in PHRASES.items()},
        **{
            f"natural_language_{word.replace(' ', '_')}": word.capitalize() + ","
            for word in ADVERBS
        },
        **{f"upper_{word.lower()}_is": f"{word} IS" for word in ["ANSWER", "SOLUTION", "RESULT"]},
        **{
            "upper_output_is": "OUTPUT IS",
            "answer_colon": "Answer",
            "arrow": "->",
            "wide_arrow": "=>",
        },
    }
    for name, phrase in phrases.items():
        read = by_pattern(rf"^{re.escape(phrase)}:?[ \t]+(\S.*)$")
        yield make(
            name, f"{phrase}: {BLANK}" if phrase[-1].isalpha() else f"{phrase} {BLANK}", read
        )
    prefixes = ["=", "+", "%", "&", "@", "!", "?", ";", "::", "---", ">>", ">>>", "##", ">"]
    for prefix in prefixes:
        name = {"##": "heading", ">": "quote"}.get(prefix, f"prefix_{prefix}")
        yield make(name, f"{prefix} {BLANK}", by_pattern(rf"^{re.escape(prefix)}[ \t]+(\S.*)$"))
    for name, example in {
        "call": f"answer({BLANK})",
        "assignment": f"answer = {BLANK}",
        "return": f"return {BLANK}",
        "print": f"print({BLANK})",
        "console_log": f"console.log({BLANK})",
        "hash_comment": f"# {BLANK}",
        "slash_comment": f"// {BLANK}",
        "block_comment": f"/* {BLANK} */",
        "echo": f'echo "{BLANK}"',
        "ini": f"[response]\nanswer={BLANK}",
        "env": f"ANSWER={BLANK}",
    }.items():
        before, after = example.split(BLANK)
        yield make(name, example, by_pattern(rf"^{re.escape(before)}(\S.*?){re.escape(after)}$"))
    yield make("shell_output", f"$ {BLANK}", by_pattern(r"^\$ (\S.*)$"), "code_only")


def all_formats() -> list[AnswerFormat]:
    """Return every format, in a fixed order."""
    sectioned = [
        AnswerFormat(
            f"complex_{name}",
            "\n".join(f"<{tag}>\n{BLANK}\n</{tag}>" for tag in tags.split()),
            by_sections(*tags.split()),
            _SECTION_KINDS.get(name.partition("_")[0], "generic"),
            is_sectioned=True,
        )
        for name, tags in SECTIONS.items()
    ]
    return [*simple_formats(), *sectioned]


_SECTION_KINDS: dict[str, Kind] = {"coding": "code_only", "math": "math_only"}
FORMATS = {each.name: each for each in all_formats()}


def is_in_format(text: str, name: str) -> bool:
    """Whether a text follows a format, with an answer in place of the blank; runs in a worker.

    >>> is_in_format("<answer>B</answer>", "answer_tags"), is_in_format("<answer>YOUR_ANSWER</answer>", "answer_tags")
    (True, False)
    """
    found = FORMATS[name].read(text)
    return bool(found and BLANK not in found)
