"""The reader of mathematical answers: which span of a text is judged, and what equals a gold answer."""

import random
import time
from decimal import Decimal

import pytest

from atroposlib.envs.math_answers import boxed_answer, compare, final_answer, is_equal


def verdict(gold: str, text: str, *, allows_restating: bool = False) -> bool | None:
    answer = boxed_answer(text)
    decided = compare(gold, answer, allows_restating=allows_restating)
    return is_equal(gold, answer) if decided is None else decided


RIGHT_NUMBERS = {
    "12": r"12|12.|12.0|+12|012|$12$|\$12|12\%|x = 12|x=y=12|\angle A_1 = 12^\circ|12^{\circ}|12 \text{ cm}^2|(12)"
    r"|12\,\mathrm{km/h}|\text{12}|\mathbf{12}|\left(12\right)|12 \approx 12.0|120\times10^{-1}|\(12\)|{12}|12 cm"
    r"|f(3)=12",
    "1000": r"1,000|1{,}000|1\,000|1,\!000|1000.00|10\times 10^2|1\cdot 10^{3}|1E3|P(A)=1,000",
    "-5": "-5|- 5|\u2212 5|$-5.0$",
    "0.5": r".5|0.50|1/2|\frac{1}{2}|\frac12|\dfrac 12|50\%",
    r"\frac{3}{4}": r"3/4|0.75|\frac{6}{8}|75\%|\tfrac{3}{4}",
    "1.5": r"1\frac{1}{2}|\frac{3}{2}|3/2",
    r"50\%": r"50\%|50|\frac{1}{2}|0.5",
    r"\$12.50": r"12.5|\$12.50|12.50\text{ dollars}",
    "0": "-0|0.0|0",
}
RESTATED = {
    "375": "24*16-9|3\\cdot 125|366+9=375|750/2|5^3 \\cdot 3|(375+0)",
    "5050": r"\sum_{k=1}^{100}k|\int_0^{5050} 1 dx",
    "3628800": "10!",
    "1024": "2^{10}|4^5",
    "10": r"\binom{5}{2}|\frac{20}{2}|\frac{\sqrt{400}}{2}|\lim_{x\to 10} x",
    "12": r"\sqrt{144}|\frac{24}{2}|-(-12)|12\cdot 1|\max(11,12)",
    "0.75": r"\frac{6}{8}|1-\frac{1}{4}",
}
WRONG = [
    *(
        ("16", box)
        for box in ["17", "1 6", "16, 17", "160", "16.1", "-16", "answer: $16$", "16=17"]
    ),
    *(("18", box) for box in ["19 = 18", "x = 19 = 18", "18=19", r"19 \approx 18", ""]),
    *(("1000", box) for box in ["1,00", "10,00", "0,1000", "1.000", "1e4"]),
    ("0.5", "5"),
    ("0.5", r"1\frac{-1}{2}"),
    ("16", "\u0661\u0666"),
    ("x", "y {} \\boxed x"),
    (r"2\sqrt{3}", "3 = 2\\sqrt{3}"),
    ("2x", r"junk \foo ( $2x$"),
    (r"\sqrt{2}", r"\boxed2 \sqrt{2}"),
    (r"\frac{1}{2}", r"1/2 or \frac{1}{3}"),
]
RIGHT = [
    (r"(-\infty,3]", r"x \le 3"),
    (r"x \le 3", r"(-\infty,3]"),
    (r"2\sqrt{3}", r"\sqrt{12}"),
    (r"2\sqrt{3}", r"x = \sqrt{12} = 2\sqrt{3}"),
    (r"\{1,2\}", "2, 1"),
    ("x^2+1", "$1 + x^2$"),
    ("y=2x+1", "2x+1"),
    ("x=5", "5"),
    ("1/3", "0.333333"),
    (r"\frac{\sqrt{2}}{2}", r"\(\frac{1}{\sqrt{2}}\)"),
    (r"\begin{pmatrix}1\\2\end{pmatrix}", r"\begin{pmatrix} 1 \\ 2 \end{pmatrix}"),
    (r"\text{Tuesday}", "Tuesday"),
]


def test_usual_forms_are_right_and_others_wrong() -> None:
    pytest.importorskip("math_verify")
    numbers = [(g, box) for g, row in RIGHT_NUMBERS.items() for box in row.split("|")]
    restated = [(g, box) for g, row in RESTATED.items() for box in row.split("|")]
    for gold, box in [*numbers, *RIGHT]:
        assert verdict(gold, f"so \\boxed{{{box}}}.") is True, (gold, box)
    for gold, box in [*restated, *WRONG]:
        assert verdict(gold, f"so \\boxed{{{box}}}.") is False, (gold, box)
    for gold, box in restated:
        assert verdict(gold, f"\\boxed{{{box}}}", allows_restating=True) is True, (gold, box)
    assert verdict("", r"\boxed{7}") is None
    assert verdict("18", r"\boxed{19 = 18}", allows_restating=True) is False
    assert compare("16", "x") is False
    undecided = [("2x", "2x"), ("12", "12 x"), ("12", "12 m^2"), ("x=5", "y=5"), ("1", r"100\%")]
    assert [compare(gold, box) for gold, box in undecided] == [None] * 5


PIECES = (
    r"""
\boxed{@}|\boxed{@|\boxed{@=|#### @|$@$|\(@\)|\[@\]|answer: $@$|\fbox{@}|\boxed{@, @}|\boxed{@ \text{ or } @}|@|x = @
\boxed{@=@}|\boxed{$@$}|\boxed @|}|{|<think>|</think>|\boxed{}|\boxed{@\%}|\boxed{? [ @ ] }|\boxed{@\approx @}
The final answer is $@$. I hope it is correct.
""".replace("\n", "|")
    .strip("|")
    .split("|")
)


def test_no_text_is_right_for_two_gold_answers() -> None:
    pytest.importorskip("math_verify")
    rng = random.Random(5)
    num_paid = 0
    for _ in range(700):
        pieces = rng.choices(PIECES, k=rng.randint(2, 4))
        text = rng.choice(["\n", " ", " or ", ", "]).join(pieces)
        while "@" in text:
            text = text.replace("@", rng.choice(["16", "17"]), 1)
        for allows_restating in (False, True):
            paid = [verdict(g, text, allows_restating=allows_restating) for g in ("16", "17")]
            assert paid != [True, True], text
            num_paid += any(paid)
        marked = final_answer(text)
        assert not (compare("16", marked) and compare("17", marked)), text
    assert num_paid > 250


def test_numbers_are_compared_as_math_verify_does() -> None:
    pytest.importorskip("math_verify")
    rng = random.Random(3)
    forms = ["{:,}", "{}", "${}$", "{}\\text{{ cm}}", "0{}", "{}.0", "{}\\%", "x={}", "{}^\\circ"]

    def number() -> str:
        value = Decimal(rng.choice([rng.randint(0, 30), rng.randint(0, 10**9)]))
        return str(value.scaleb(-rng.choice([0, 0, 0, 1, 2, 6, 8])).normalize()).replace("E+", "E")

    num_decided = 0
    for _ in range(180):
        gold, other = number(), number()
        for said in (gold, other):
            form = rng.choice(forms)
            if "E" in said or ("." in said and form in ("{:,}", "{}.0")):
                form = "{}"
            answer = form.format(int(said) if form == "{:,}" else said)
            decided = compare(gold, answer)
            num_decided += decided is not None
            assert decided in (None, is_equal(gold, answer)), (gold, answer)
    assert num_decided > 250


@pytest.mark.parametrize(
    "box",
    [
        "10^{10^{10}}",
        "9^{9^{9^{9}}}",
        "2^{99999999999}",
        r"\binom{10^9}{10^8}",
        r"3\times10^{999999999}",
        "1e999999999",
        "1" * 100_000,
        "1," * 50_000,
        "a" * 100_000,
        "(" * 50_000 + "1" + ")" * 50_000,
        r"\text{" * 20_000 + "1" + "}" * 20_000,
        "x=" * 50_000 + "1",
        "_a" * 50_000 + "=1",
        "1" + " " * 100_000 + "x2",
        "(" * 999 + "1" + ")" * 999,
        r"\boxed{" * 20_000 + "1" + "}" * 20_000,
        r"\boxed" + " " * 100_000,
    ],
)
def test_a_hostile_box_is_wrong_at_once(box: str) -> None:
    started = time.process_time()
    assert compare("7", boxed_answer(f"\\boxed{{{box}}}")) is False
    assert time.process_time() - started < 0.5
