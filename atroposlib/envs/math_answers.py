"""Read the answer to a mathematical problem out of a model's text, and compare it with the gold answer.

One span is judged: the content of the box that begins last (`boxed_answer`), or without a box what follows the last
`####` (`final_answer`). `compare` decides numbers; a worker decides the rest by `is_equal`, which calls math-verify.
"""

from __future__ import annotations

import math
import re
from decimal import Decimal
from fractions import Fraction
from typing import Any, NamedTuple

from atroposlib.envs.answers import BOX, boxes_in, solution_of

MAX_ANSWER_CHARS = 2000
"""A longer answer is wrong."""
_NUM_DECIMALS = 6
"""math-verify rounds to so many."""

_DRESSING = re.compile(r"\\[!,]|\\left(?![a-z])|\\right(?![a-z])|\\displaystyle|\\?\$|[€£¥₹]")
_SPACE = re.compile(r"\\[;: ]|~")
_WRAPPED = re.compile(
    r"(?:\\(?:text|math|mbox)[a-z]*\s*+)?\{([^{}]*)\}|\\\{([^{}]*)\\\}|\(([^()]*)\)|\\\((.*)\\\)|\\\[(.*)\\\]"
)
_DROPPED_UNIT = (
    r"(?:[.\s°]|(?:\^\s*+)?\{?\\circ\}?|\\degree|\\approx\s*+[\d.]++|"
    r"\\(?:text|math|mbox)[a-z]*\s*+\{[^{}]*\}(?:\^(?:\d|\{\d\}))?)"
)
_LITERAL = re.compile(
    # A name, as in `x =` or `\angle A =`, without operators and numbers.
    r"(?:(?=[A-Za-z\\|])(?:[A-Za-z\\{}()|', ]|_\{?[A-Za-z0-9]++|\(\d++\))++=\s*+)*+"
    r"(?P<sign>[+-]?)\s*+(?:"
    r"(?P<whole>\d++)?\s*+\\[dtc]?frac\s*+"
    r"(?:\{\s*+(?P<p>-?\d++)\s*+\}|(?P<p1>\d))\s*+(?:\{\s*+(?P<q>\d++)\s*+\}|(?P<q1>\d))"
    r"|(?P<p2>\d++)\s*+/\s*+(?P<q2>\d++)"
    r"|(?P<number>(?:[1-9]\d{0,2}(?:,\d{3})++|\d++)(?:\.\d*+)?|\.\d++)"
    r"(?:[eE](?P<e>[+-]?\d{1,3})(?!\d)"
    r"|\s*+(?:\\times|\\cdot|[*×])\s*+10\s*+\^\s*+(?:(?P<e1>\d)(?!\d)|\{\s*+(?P<e2>[+-]?\d{1,3})\s*+\}))?"
    r")\s*+(?P<percent>\\?%)?"
    rf"{_DROPPED_UNIT}*+"
    rf"(?P<unit>(?:{_DROPPED_UNIT}|[A-Za-z/](?:\^(?:\d|\{{\d\}}))?)*+)",
    re.ASCII,
)
_HASHED = re.compile(r"####\s*+(\S.*)")
_EQUALS = re.compile(r"(?<![\\<>!:])=")


class _Literal(NamedTuple):
    """A number as it is written: an integer, a decimal, a percentage, a fraction or a power of ten."""

    value: Fraction
    num_decimals: int
    is_fraction: bool
    is_reduced: bool
    is_percent: bool
    has_unit: bool
    """Whether a unit follows that is not marked as text."""


def last_box(text: str) -> str | None:
    """Return the content of the `\\boxed{}` (or `\\fbox{}`) that begins last; None without one, or if it is not closed.

    >>> last_box(r"\\boxed{1}, no, \\boxed{\\frac{1}{2}}."), last_box(r"\\boxed{16} \\boxed{16= $17$")
    ('\\\\frac{1}{2}', None)
    """
    starts = [mark.start() for mark in BOX.finditer(text)]
    return next(iter(boxes_in(text[starts[-1] :])), None) if starts else None


def boxed_answer(text: str) -> str | None:
    """Return the last box after the thinking; None without one, or if the thinking does not end."""
    return last_box(solution_of(text))


def final_answer(text: str) -> str | None:
    """Return the last box, else what follows the last `####` on its line; None without either.

    >>> final_answer("16 #### 17"), final_answer(r"#### 17 \\boxed{16")
    ('17', None)
    """
    if BOX.search(text):
        return last_box(text)
    hashed = _HASHED.findall(text)
    return hashed[-1].strip() if hashed else None


def compare(
    gold: str, answer: str | None, *, tolerance: float = 0.0, allows_restating: bool = False
) -> bool | None:
    """Whether an answer is the gold number, in linear time; None if `is_equal` must decide.

    Where the gold answer is a number, an answer with an operation (`24*16-9`, `10!`, `\\frac{32}{2}`) restates the
    problem and is wrong, unless `allows_restating`. These are numbers: 1/2, 3\\times10^5, 12 cm, 50\\%, x = 12.

    >>> [compare("1200", answer) for answer in ("1,200", "$1200.00$", r"x = 1200\\text{ cm}", r"1.2\\times10^3")]
    [True, True, True, True]
    >>> [compare("16", answer) for answer in ("17", "4^2", "19 = 16", None)]
    [False, False, False, False]
    >>> compare("16", "4^2", allows_restating=True), compare("x", "16")
    (None, None)
    """
    wanted = None if "=" in gold else _literal(gold)
    if wanted is None or wanted.has_unit:
        return None
    found = _literal(answer or "")
    if found is None or (found.is_fraction and not (wanted.is_fraction or found.is_reduced)):
        return None if allows_restating and answer else False
    if found.has_unit:
        return None
    is_whole = found.num_decimals == wanted.num_decimals == 0
    if found.is_percent != wanted.is_percent:  # math-verify reads 50% as 50 and as 0.5
        return True if is_whole and found.value == wanted.value else None
    if abs(found.value - wanted.value) <= tolerance:
        return True
    if found.is_percent or found.is_fraction != wanted.is_fraction:
        return False if is_whole else None
    return False if max(found.num_decimals, wanted.num_decimals) <= _NUM_DECIMALS else None


def _literal(text: str) -> _Literal | None:
    if len(text) > MAX_ANSWER_CHARS:
        return None
    text = text.replace("{,}", ",").replace("\u2212", "-")
    text = _SPACE.sub(" ", _DRESSING.sub("", text)).strip()
    while (wrapped := _WRAPPED.fullmatch(text)) is not None:
        text = next(filter(None, wrapped.groups()), "").strip()
    match = _LITERAL.fullmatch(text)
    if match is None:
        return None
    p, q = (match[name] or match[f"{name}1"] or match[f"{name}2"] for name in "pq")
    is_reduced, num_decimals = True, 0
    if p is None:
        exponent = match["e"] or match["e1"] or match["e2"] or "0"
        number = Decimal(f"{match['number'].replace(',', '')}e{exponent}")
        value, num_decimals = Fraction(number), max(0, -int(number.as_tuple().exponent))
    elif int(q) == 0 or (match["whole"] and "-" in p):
        return None
    else:
        is_reduced = int(q) > 1 and math.gcd(int(p), int(q)) == 1
        value = Fraction(int(p), int(q)) + int(match["whole"] or 0)
    return _Literal(
        value=-value if match["sign"] == "-" else value,
        num_decimals=num_decimals,
        is_fraction=p is not None,
        is_reduced=is_reduced,
        is_percent=match["percent"] is not None,
        has_unit=bool(match["unit"]),
    )


def is_equal(gold: str, answer: str | None) -> bool | None:
    """Whether math-verify finds an answer equal to the gold answer; None if that cannot be read. Runs in a worker.

    An equation counts as its last side; it is wrong if two of its sides are numbers that differ (`19 = 18`).
    """
    from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse

    expected = parse(
        f"${gold}$", [LatexExtractionConfig(), ExprExtractionConfig()], parsing_timeout=None
    )
    if answer is not None and _is_right(expected, answer, is_equation="=" in gold):
        return True
    return False if _is_right(expected, gold, is_equation=True) else None


def _is_right(expected: list[Any], answer: str, *, is_equation: bool) -> bool:
    from math_verify import verify

    found = _parsed(answer)
    # math-verify has time limits of its own, which work in the main thread alone; the worker has a deadline.
    if not (found and expected) or not verify(
        expected, found, allow_set_relation_comp=True, timeout_seconds=None
    ):
        return False
    if is_equation or re.search("[,;]", answer):
        return True
    sides = [side for text in _EQUALS.split(answer) for side in _parsed(text)[:1]]
    numbers = [side for side in sides if getattr(side, "free_symbols", True) == set()]
    return all(verify(numbers[-1], number, timeout_seconds=None) for number in numbers[:-1])


def _parsed(answer: str) -> list[Any]:
    """Return what math-verify reads in an answer, and only there: without a fall-back to formulas inside of it."""
    from math_verify import LatexExtractionConfig, parse

    if len(answer) > MAX_ANSWER_CHARS or re.search(r"\\f?box", answer):
        return []
    text = answer.strip().removeprefix("\\(").removesuffix("\\)")
    found: list[Any] = parse(
        f"\\boxed{{{text}}}",
        [LatexExtractionConfig(boxed_match_priority=0)],
        extraction_mode="first_match",
        parsing_timeout=None,
    )
    return found
