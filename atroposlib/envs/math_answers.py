"""Read the answer to a mathematical problem out of a model's text, and compare it with the gold answer.

One span is judged: the content of the box that begins last (`boxed_answer`), or without a box what follows the last
`####` (`final_answer`). `compare` decides numbers; a worker decides the rest by `is_equal`, which calls math-verify.
"""

from __future__ import annotations

import re
from decimal import Decimal
from fractions import Fraction
from typing import Any

from atroposlib.envs.answers import BOX, boxes_in, solution_of

MAX_ANSWER_CHARS = 2000
"""A longer answer is wrong."""

_SPELLINGS = (
    (r"\{,\}", ","),
    ("\u2212", "-"),
    (r"\\[!,]|\\(?:left|right)(?![a-z])|\\displaystyle|\\?\$|[€£¥₹]", ""),
    (r"\\[;: ]|~", " "),
    (r"\\[dtc]?frac\s*+(?:\{([^{}]*)\}|(\d))\s*+(?:\{([^{}]*)\}|(\d))", r" \1\2/\3\4"),
    (r"\s*+(?:\\times|\\cdot|[*×])\s*+10\s*+\^\s*+(?:\{([^{}]*)\}|(\d)(?!\d))", r"e\1\2"),
)
_TEXT = r"\\(?:text|math|mbox)[a-z]*\s*+"
_WRAPPED = re.compile(
    rf"(?:{_TEXT})?\{{([^{{}}]*)\}}|\\\{{([^{{}}]*)\\\}}|\(([^()]*)\)|\\\((.*)\\\)|\\\[(.*)\\\]"
)
_DROPPED = (  # units that math-verify drops, and an approximation of the answer
    rf"(?:[.\s°]|(?:\^\s*+)?\{{?\\circ\}}?|\\degree|{_TEXT}\{{[^{{}}]*\}}(?:\^(?:\d|\{{\d\}}))?"
    r"|\\approx\s*+[\d.]++)*+"
)
_FORM = re.compile(
    # A name, as in `x =` or `\angle A =`, without operators and numbers.
    r"(?:(?=[A-Za-z\\|])(?:\(\d++\)|[A-Za-z\\{}()|', ]|_\{?[A-Za-z0-9]++)++=\s*+)*+"
    r"\+?(?P<sign>-?)\s*+(?:(?:(?P<whole>\d++)\s++)?(?P<p>-?\d++)\s*+/\s*+(?P<q>-?\d++)"
    r"|(?P<decimal>(?:(?:[1-9]\d{0,2}(?:,\d{3})++|\d++)(?:\.\d*+)?|\.\d++)(?:[eE][+-]?\d{1,3}(?!\d))?)"
    rf")\s*+(?:\\?(?P<percent>%))?{_DROPPED}(?P<unit>(?:[A-Za-z/](?:\^(?:\d|\{{\d\}}))?{_DROPPED})*+)",
    re.ASCII,
)


def last_box(text: str) -> str | None:
    """Return the content of the `\\boxed{}` or `\\fbox{}` that begins last; None without one, or if it is open."""
    starts = [mark.start() for mark in BOX.finditer(text)]
    return next(iter(boxes_in(text[starts[-1] :])), None) if starts else None


def boxed_answer(text: str) -> str | None:
    """Return the last box after the thinking; None without one, or if the thinking does not end."""
    return last_box(solution_of(text))


def final_answer(text: str) -> str | None:
    """Return the last box, else what follows the last `####` on its line; None without either.

    >>> final_answer("16 #### 17"), final_answer(r"\\boxed{16}, no, \\boxed{17}"), final_answer(r"#### 16 \\boxed{17")
    ('17', '17', None)
    """
    if BOX.search(text):
        return last_box(text)
    hashed = re.findall(r"####\s*+(\S.*)", text)
    return hashed[-1].strip() if hashed else None


def ends_with_number(text: str, gold: str) -> bool | None:
    """Whether the last number after the thinking is the gold number; None if that is no number.

    Another way to read an answer than `boxed_answer`, for `audit_score`.

    >>> [ends_with_number(text, "12") for text in (r"\\boxed{12\\text{ cm}^2}", "12 or 13", "<think>12")]
    [True, False, False]
    """
    if re.fullmatch(r"-?\d+(?:\.\d+)?", gold) is None:
        return None
    found = re.findall(r"(?<![\^_\d.])(?<!\^\{)-?\d[\d,]*(?:\.\d+)?", solution_of(text))
    return bool(found) and Fraction(found[-1].replace(",", "")) == Fraction(gold)


def compare(
    gold: str, answer: str | None, *, tolerance: float = 0.0, allows_restating: bool = False
) -> bool | None:
    """Whether an answer is the gold number, in linear time; None if `is_equal` must decide.

    Where the gold answer is a number, an answer with an operation (`24*16-9`, `10!`, `\\frac{32}{2}`) restates the
    problem and is wrong, unless `allows_restating`. These are numbers: 1/2, 3\\times10^5, 12 cm, 50\\%, x = 12.

    >>> [compare("1200", answer) for answer in ("1,200", r"x = \\$1200.0\\text{ cm}", "30*40", None, "12 m")]
    [True, True, False, False, None]
    """
    wanted = None if "=" in gold else _number(gold, may_divide=True)
    if wanted is None or wanted[1]["unit"]:
        return None
    found = _number(answer or "", may_divide=wanted[1]["decimal"] is None)
    if found is None:
        return None if allows_restating and answer else False
    (value, form), (said, said_form) = wanted, found
    if said_form["unit"]:
        return None
    if form["percent"] != said_form["percent"] and (
        said in (value * 100, value / 100) or "." in form[0] + said_form[0]
    ):
        return None  # math-verify: 50% is 50, and is 0.5
    if abs(said - value) <= tolerance:
        return True
    # math-verify rounds to 6 decimals, the 4 of a percentage.
    is_exact = all(v.denominator == 1 or v_form["q"] for v, v_form in (wanted, found))
    is_short = all(
        v_form["decimal"] and 10**4 % v.denominator == 0 for v, v_form in (wanted, found)
    )
    return False if is_exact or is_short else None


def _number(text: str, *, may_divide: bool) -> tuple[Fraction, re.Match[str]] | None:
    """Return a number and how it is written; `may_divide`: also 32/2 and 6/8, which are not in lowest terms."""
    if len(text) > MAX_ANSWER_CHARS:
        return None
    for spelling, plain in _SPELLINGS:
        text = re.sub(spelling, plain, text)
    while (wrapped := _WRAPPED.fullmatch(text := text.strip())) is not None:
        text = next(filter(None, wrapped.groups()), "")
    if (form := _FORM.fullmatch(text)) is None:
        return None
    if form["decimal"]:
        value = Fraction(Decimal(form["decimal"].replace(",", "")))
    else:
        whole, p, q = (int(form[name] or 0) for name in ("whole", "p", "q"))
        if q == 0 or (whole and p * q < 0):
            return None
        value = whole + Fraction(p, q)
        if not may_divide and not abs(q) == value.denominator > 1:
            return None
    return -value if form["sign"] else value, form


def warm_up() -> None:
    """Fill the caches of math-verify and sympy, which the processes of a worker share."""
    is_equal("\\frac{x}{2}+1", "\\frac{x^2}{2x}+1")


def is_equal(gold: str, answer: str | None) -> bool | None:
    """Whether math-verify finds an answer equal to the gold answer; None if that cannot be read. Runs in a worker.

    An equation counts as its last side; it is wrong if two of its sides are numbers that differ (`19 = 18`).
    """
    from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse, verify

    def read(content: str) -> Any:
        if len(content) > MAX_ANSWER_CHARS:
            return []
        formula = content.strip().removeprefix("\\(").removesuffix("\\)")
        # "first_match": no fall-back to a formula inside of the box.
        box = f"\\boxed{{{formula}}}"
        return parse(box, latex, extraction_mode="first_match", parsing_timeout=None)

    def equals(content: str) -> Any:
        found = read(content)
        return verify(expected, found, allow_set_relation_comp=True, timeout_seconds=None)

    # math-verify's time limits work in the main thread alone; the worker has a deadline.
    latex = [LatexExtractionConfig(boxed_match_priority=0)]
    formulas = [LatexExtractionConfig(), ExprExtractionConfig()]
    expected = parse(f"${gold}$", formulas, parsing_timeout=None)
    if not answer or not equals(answer):
        return False if equals(gold) else None
    if "=" in gold or re.search("[,;]", answer):
        return True
    sides = [side for text in re.split(r"(?<![\\<>!:])=", answer) for side in read(text)[:1]]
    numbers = [side for side in sides if getattr(side, "free_symbols", True) == set()]
    return all(verify(numbers[-1], number, timeout_seconds=None) for number in numbers[:-1])
