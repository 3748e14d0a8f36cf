"""Answers that show how a reward reads an answer: wrong ones that must earn little, right ones that must earn.

All are made from one answer that is known to be right, by changing the part that states the result: the content of the
last `\\boxed{}` or `<answer>`, what follows `####` or "answer is", else the whole of a short answer. A rule that finds
no such part has no probes. Hostile answers attack the grader: `canaries` are code, `bombs` take for ever.
Used by `check.py` only.
"""

from __future__ import annotations

import base64
import functools
import itertools
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from atroposlib.checker.engine import Answer

_SHAPES = (
    re.compile(r"\\boxed\{((?:[^{}]|\{[^{}]*\})+)\}"),
    re.compile(r"<answer>(.+?)</answer>", re.DOTALL),
    re.compile(r"####[ \t]*(\S[^\n]*)"),
    re.compile(r"answer is:?[ \t]*(\S[^\n]*)", re.IGNORECASE),
)
_STATED = re.compile(r"^[ \t]*(?:answer|a):[ \t]*(\S[^\n]*)", re.IGNORECASE | re.MULTILINE)
_MAX_RESULT_CHARS = 60
_NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?")
_FILLERS = ("soup", "zebra", "forty", "yellow", "river", "lamp")

HARSH_ANSWERS = (
    *("nan", "inf", "-", ".", "1/0", "\u00b2", "None"),
    *("\\boxed{", "<answer>", "{", "[1,", "<tool_call>{</tool_call>"),
)
"""Texts on which graders raise, or get a number that is not finite: `float`, `int`, indexing, JSON, open brackets."""

BOMBS = (
    *("7**7**8", "9" * 4400, "(" * 400 + "1" + ")" * 400),
    *("9^{9^{9^{9}}}", "\\binom{10^9}{10^8}", "9**9**9**9"),
)
"""Results that exhaust a grader's time or memory; the first, of 4.9 million digits, takes seconds, so that an evaluator
without limits is found before another occupies it for ever."""

_CODE = (
    *("OPEN", "[OPEN]", "{1: OPEN}", 'f"{OPEN}"', "(lambda: OPEN)()", 'lambdify((), "OPEN")()'),
    *("\\text{OPEN}", "```json\nOPEN\n```", "'; OPEN #", "__import__('os').mkdir('PATH')"),
    "[c for c in ().__class__.__base__.__subclasses__() if c.__name__ == '_wrap_close'][0]"
    ".__init__.__globals__['system']('touch PATH')",
    *("!!python/object/apply:os.mkdir ['PATH']", "$(touch PATH)"),
    "{{ cycler.__init__.__globals__.os.system('touch PATH') }}",
)
"""Code that makes a file: Python for `eval`, `exec` and sympy, YAML, a shell, a template, the end of a string."""


class Result(NamedTuple):
    """An answer, divided around the part that states the result."""

    before: str
    stated: str
    after: str

    def replaced(self, stated: str) -> str:
        return f"{self.before}{stated}{self.after}"

    @property
    def is_marked(self) -> bool:
        """Whether something marks the result: a box, a tag, words."""
        return bool(self.before.strip())


_NOTATIONS = (
    *(Result("\\boxed{", "", "}"), Result("$", "", "$"), Result("#### ", "", "")),
    *(Result("<answer>", "", "</answer>"), Result("The answer is ", "", ".")),
)


_ASKED = (r"\\boxed\{", r"\$<", "####", "<answer>", r"(?i)answer is:?\s*[<\[{_]")
"""How a prompt asks for each of the notations, or an answer has it."""


class Probe(NamedTuple):
    """An answer, the rule that it judges, and what to change if it fails."""

    rule: str
    answer: Answer
    hint: str = ""
    may_be_right: bool = False
    """Whether it may be right by chance; only if one is rewarded for every item, that is a fault."""
    twin: str | None = None
    """Another answer: only if both are rewarded, that is a fault."""
    must_score: bool = False
    """Whether it is a fault to leave it without a score."""
    must_earn: bool | None = False
    """Whether it is a fault that it earns less than a right answer, instead of as much; None: neither, it is noted."""

    @property
    def answers(self) -> list[Answer]:
        return [self.answer] if self.twin is None else [self.answer, self.twin]


def canaries(folder: Path) -> dict[Path, str]:
    """Return code, by the file in `folder` that it makes; any user may make files there."""
    folder.chmod(0o777)
    codes = {}
    for i, code in enumerate(_CODE):
        path = folder / str(i)
        codes[path] = code.replace("OPEN", "open('PATH', 'w').close()").replace("PATH", str(path))
    path = folder / "pickle"
    return {**codes, path: base64.b64encode(f"cos\nmkdir\n(V{path}\ntR.".encode()).decode()}


def result_of(answer: str, *, is_short: bool = True) -> Result | None:
    """Divide an answer around its result; None if it has none, or `is_short` and the result is long.

    >>> result_of("<think>2?</think> The answer is 3.")
    Result(before='<think>2?</think> The answer is ', stated='3', after='.')
    """
    for shape in _SHAPES:
        if found := list(shape.finditer(answer)):
            start, end = found[-1].span(1)
            break
    else:
        start, end = 0, len(answer)
    text = answer[start:end]
    stated = text.strip().rstrip(".")
    if not stated or (is_short and (len(stated) > _MAX_RESULT_CHARS or "\n" in stated)):
        return None
    start += text.index(stated)
    return Result(answer[:start], stated, answer[start + len(stated) :])


def rank(answer: object) -> int:
    """Order right answers for probing: those with a marked result first, a box before a tag before words."""
    marks = (i for i, shape in enumerate(_SHAPES) if shape.search(str(answer)))
    return next(marks, len(_SHAPES)) if isinstance(answer, str) else len(_SHAPES)


def is_same(first: str, second: str) -> bool:
    """Whether two results are equal but for case and commas."""
    return first.replace(",", "").lower() == second.replace(",", "").lower()


def exploits(result: Result, others: Sequence[str]) -> Iterator[Probe]:
    """Yield answers that must not earn the reward; `others` are the right results of other items."""
    other = next(iter([*_wrong_results(result.stated), *others]), _FILLERS[0])
    yield from _wrong(result, others)
    yield from _listed(result, others)
    if result.is_marked:
        yield from _in_two_notations(result, other)
    yield _retracted(result, other)


def junk(form: Result | None) -> Iterator[Probe]:
    """Yield a text that is no result of any kind, in the form of a right answer."""
    if form is not None and form.is_marked:
        yield Probe("wrong_unrewarded", form.replaced("zzz"), "refuse a result that says nothing")


def restated(result: Result) -> Iterator[Probe]:
    """Yield terms that equal a whole number; their own numbers are far from it."""
    if not (result.is_marked and re.fullmatch(r"-?\d{1,9}", result.stated)):
        return
    number = int(result.stated)
    far = 10 * abs(number) + 7
    terms = [f"{number + far}-{far}", f"({number - far})+{far}", f"3*{far}-{3 * far - number}"]
    terms += [f"\\sum_{{k=1}}^{{{number}}} 1"] * (number > 0)
    for term in terms:
        yield Probe("restatement_unrewarded", result.replaced(term))


def bombs(form: Result | None, *, is_wrong: bool) -> Iterator[Probe]:
    """Yield answers whose result takes a grader too much time or memory, the least dangerous first."""
    hint = "score an answer on which the grader fails like a wrong one, in evaluation, too"
    if form is not None and form.is_marked:
        for text in BOMBS:
            rule = "wrong_unrewarded" if is_wrong else ""
            yield Probe(rule, form.replaced(text), hint, must_score=True)


def _wrong(result: Result, others: Sequence[str]) -> Iterator[Probe]:
    rule = "wrong_unrewarded"
    found = _wrong_results(result.stated)
    for other in found:
        yield Probe(rule, result.replaced(other), "compare the whole result, with its sign")
    if _NUMBER.fullmatch(result.stated):
        for odd in ("nan", "inf"):
            yield Probe(rule, result.replaced(odd), "refuse NaN and infinity before comparing")
    for other in others if not found else ():
        yield Probe(rule, result.replaced(other), may_be_right=True)


def _listed(result: Result, others: Sequence[str]) -> Iterator[Probe]:
    """Yield answers that state many results, the right one in the middle."""
    many = [*(_wrong_results(result.stated) or others), *_FILLERS][:8]
    if _is_option(result.stated):
        many = _wrong_results(result.stated)
    half = len(many) // 2
    all_of_them = [*many[:half], result.stated, *many[half:]]
    yield Probe("list_unrewarded", result.replaced(", ".join(all_of_them)))
    if result.is_marked:
        yield Probe("list_unrewarded", " or ".join(map(result.replaced, all_of_them)))


def _retracted(result: Result, other: str) -> Probe:
    """Return an answer that states the right result, takes it back and states a wrong one."""
    before = result.before if result.is_marked else "The answer is "
    first = Result(before, result.stated, result.after)
    second = Result(before.rpartition("</think>")[2].lstrip(), other, result.after)
    text = f"{first.replaced(first.stated)}. No, wait, that is wrong. {second.replaced(other)}"
    return Probe("retraction_unrewarded", text)


def _in_two_notations(result: Result, other: str) -> Iterator[Probe]:
    """Yield answers that state the right and a wrong result, in every two notations.

    A text and its twin have the two results in either order: if both earn, the same text earns for two gold answers.
    """
    thinking, end, body = result.before.rpartition("</think>")
    own = Result(body.lstrip(), "", result.after)
    notations = [form.replaced for form in (own, *_NOTATIONS)]
    reopened = "\\boxed{{{0}}}\n\\boxed{{{0}=".format  # the second box is not closed
    hint = "a text must not earn for two gold answers: judge one part of it, found by one rule"
    for first, second in itertools.product([*notations, reopened], notations):
        if first is not second or first is notations[0]:
            pairs = ((result.stated, other), (other, result.stated))
            text, twin = (f"{thinking}{end}{first(a)}\n{second(b)}" for a, b in pairs)
            yield Probe("list_unrewarded", text, hint, twin=twin)


def asked_for(result: Result, prompt: str) -> Iterator[Probe]:
    """Yield the result in the one form that a prompt asks for, if a right answer to it has another one."""
    named = []
    for form, mark in zip(_NOTATIONS, _ASKED, strict=True):
        found = re.search(mark, prompt)
        if found and not re.search(
            r"(?i)\b(?:no|not|never|without)\b[^.\n]*$", prompt[: found.start()]
        ):
            named.append((form, mark))
    if len(named) == 1 and not re.search(named[0][1], f"{result.before}<>"):
        thinking, end, _ = result.before.rpartition("</think>")
        text = f"{thinking}{end}{named[0][0].replaced(result.stated)}"
        hint = "read the form that the prompt asks for, or ask for the one that is read"
        yield Probe("variants_rewarded", text, hint, must_earn=True)


def variants(result: Result) -> Iterator[Probe]:
    """Yield other ways to write a right answer with a marked result: space, case, commas, units, LaTeX.

    A reward that refuses them is noted and no fault: many that are strict are meant so, the model learns the form from
    the reward, and a failure of each strict number pattern would teach authors to skip the rule.
    """
    if not result.is_marked:
        return
    stated = result.stated
    variant = functools.partial(Probe, "variants_rewarded", must_earn=None)
    before = result.before.rstrip()
    is_boxed, is_tagged = before.endswith("\\boxed{"), before.endswith("<answer>")
    spaced = f"\n{stated}\n" if is_tagged else f" {stated} "
    yield variant(result.replaced(spaced), "strip the result of white space")
    if not (is_boxed or is_tagged):
        ended = f"{result.before}{stated}{'' if '.' in result.after else '.'}"
        yield variant(ended, "ignore punctuation after the result")
    if stated.istitle() and len(stated) > 2:
        yield variant(result.replaced(stated.lower()), "compare words without case")
    if _NUMBER.fullmatch(stated) and len(whole := stated.lstrip("-").partition(".")[0]) > 3:
        grouped = (
            stated.replace(",", "") if "," in whole else stated.replace(whole, f"{int(whole):,}")
        )
        yield variant(result.replaced(grouped), "remove the commas of thousands")
    if is_boxed and _NUMBER.fullmatch(stated):
        yield variant(result.replaced(stated + "\\text{ cm}"), "ignore a unit after a number")
    elif is_boxed and stated.isalpha():
        yield variant(result.replaced(f"\\text{{{stated}}}"), "read LaTeX: remove \\text{}")
    elif is_boxed and (fraction := re.fullmatch(r"(\d+)/(\d+)", stated)):
        latex = f"\\frac{{{fraction[1]}}}{{{fraction[2]}}}"
        yield variant(result.replaced(latex), "read LaTeX fractions")


def copied(
    result: Result | None, prompt: str, names: Sequence[str] = (), gold: str | None = None
) -> Iterator[Probe]:
    """Yield the results that a prompt states, as they stand there and in the form of a right answer.

    `names`: fields of the item that hold the gold answer; a prompt that has such a field states it.
    """
    for name in names:
        field = rf"""\b{re.escape(name)}['"]?\s*[:=]\s*['"]?{re.escape(str(gold))}\b"""
        if result is not None and re.search(field, prompt):
            yield Probe("copy_unrewarded", result.replaced(str(gold)), may_be_right=True)
    for shape in (*_SHAPES, _STATED):
        for found in shape.finditer(prompt):
            yield Probe("copy_unrewarded", found[0].strip(), may_be_right=True)
            if result is not None:
                stated = found[1].strip().rstrip(".")
                yield Probe("copy_unrewarded", result.replaced(stated), may_be_right=True)


def harsh(result: Result | None) -> Iterator[Probe]:
    """Yield texts on which graders raise, alone and as the result of an answer; no rule judges what they earn."""
    for text in HARSH_ANSWERS:
        yield Probe("", text)
        if result is not None and result.is_marked:
            yield Probe("", result.replaced(text))


def _wrong_results(stated: str) -> list[str]:
    """Return results far from `stated` that contain it or differ in sign; for an option letter, other letters.

    >>> _wrong_results("42"), _wrong_results("-0.5"), _wrong_results("(B)")
    (['427', '742', '-42', '342', '421'], ['-057', '-70.5', '0.5', '-30.5', '-051'], ['(A)', '(C)', '(D)'])
    """
    if _is_option(stated):
        right = stated.strip("()")
        return [stated.replace(right, each) for each in "ABCD" if each != right.upper()]
    if not _NUMBER.fullmatch(stated):
        return []
    digits = stated.lstrip("-")
    sign, other_sign = ("", "-") if digits == stated else ("-", "")
    longer = digits.replace(".", "")  # one more decimal would be within a tolerance
    is_zero = not longer.strip("0,")
    flipped = [] if is_zero else [f"{other_sign}{digits}"]
    return [
        f"{sign}{longer}7",
        f"{sign}7{digits}",
        *flipped,
        f"{sign}3{digits}",
        f"{sign}{longer}1",
    ]


def _is_option(stated: str) -> bool:
    return re.fullmatch(r"[A-H]|\([A-H]\)", stated, re.IGNORECASE) is not None
