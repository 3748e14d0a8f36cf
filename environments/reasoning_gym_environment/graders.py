"""Grade an answer to a puzzle of reasoning-gym without evaluating the answer.

Nine of the library's graders call `eval` or `sympy.parse_expr` on the model's text. They get only literals and bounded
formulas, or are replaced, as are graders that pay for a text that solves nothing. `GRADERS` says how each task is
graded; a task with another grader than the library's default is refused until it stands there.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Callable
from fractions import Fraction
from operator import add, mul, sub, truediv
from typing import Any

Entry = dict[str, Any]
"""The library's question, answer and metadata of a puzzle."""
Grader = Callable[[Any, Entry, str], float]
"""(dataset, entry, answer) -> score from 0 to 1. It may raise for an answer that it cannot read."""

REFUSED = {"composite": "mixes other tasks", "propositional_logic": "pays a repeated premise"}
_THOUSANDS = re.compile(r"[+-]?\d{1,3}(,\d{3})+(\.\d+)?")
_FUNCTIONS = r"Abs|a?(sin|cos|tan)|(sin|cos|tan)h|sec|csc|cot|exp|ln|log|sqrt"
_OPERATORS = {ast.Add: add, ast.Sub: sub, ast.Mult: mul, ast.Div: truediv}


def library(*, form: str = ".*", least: float = 0.0) -> Grader:
    """Return the library's grader for answers of a form; others, and scores below `least`, count as 0."""
    pattern = re.compile(form, re.ASCII | re.DOTALL)

    def grade(dataset: Any, entry: Entry, answer: str) -> float:
        if not pattern.fullmatch(answer):
            return 0.0
        score = float(dataset.score_answer(answer=answer, entry=entry))
        return min(score, 1.0) if score >= least else 0.0

    return grade


def whole(dataset: Any, entry: Entry, answer: str) -> float:
    """Require a right answer and nothing else; a number may have commas.

    The library's default gives credit for any text that contains the answer, such as -12 for 12.
    """
    plain = answer.replace(",", "") if _THOUSANDS.fullmatch(answer) else answer
    right = [str(entry["answer"]), *entry["metadata"].get("valid_answers", ())]
    return float(any(text.strip() in (answer, plain) for text in right))


def whole_or_list(dataset: Any, entry: Entry, answer: str) -> float:
    """Require a right answer, or a Python literal for which the library gives partial credit."""
    try:
        ast.literal_eval(answer)
    except (ValueError, SyntaxError, TypeError, RecursionError, MemoryError):
        return whole(dataset, entry, answer)
    return library()(dataset, entry, answer)


def formula(dataset: Any, entry: Entry, answer: str) -> float:
    """Require a formula that the library accepts, without calls for a polynomial."""
    functions = _FUNCTIONS if "integrand" in entry["metadata"] else ""
    return library()(dataset, entry, answer) if is_formula(answer, functions) else 0.0


def expression(dataset: Any, entry: Entry, answer: str) -> float:
    """Require each number of the puzzle once, combined by + - * / to the target or 24.

    The library overlooks hexadecimal numbers and comments, and its puzzle24 takes any four numbers.
    """
    tree = _parse(answer, r"[\d\s()+*/-]+")
    used = [node.value for node in ast.walk(tree) if isinstance(node, ast.Constant)]
    if sorted(used) != sorted(entry["metadata"]["numbers"]):
        return 0.0
    return float(_value(tree) == entry["metadata"].get("target", 24))


def probability(dataset: Any, entry: Entry, answer: str) -> float:
    """Require the probability within the library's 1e-4, and 5 %."""
    given = re.fullmatch(r"[\d./]{1,60}(e-\d\d?)?", answer, re.ASCII)
    right = Fraction(entry["answer"])
    off = abs(Fraction(given[0]) - right) if given else right
    return float(off <= min(Fraction("1e-4"), right / 20))


_RULES: list[tuple[str, Grader]] = [
    (
        """ab advanced_geometry arc_agi bitwise_arithmetic boxnet calendar_arithmetic circuit_logic color_cube_rotation
        cryptarithm decimal_arithmetic decimal_chain_sum dice emoji_mystery family_relationships figlet_font
        fraction_simplification futoshiki graph_color group_anagrams jugs kakurasu knight_swap letter_jumble
        needle_haystack number_format palindrome_generation palindrome_partitioning path_star pool_matrix power_function
        quantum_lock rearc self_reference sentence_reordering shortest_path sokoban spell_backward survo
        tower_of_hanoi word_ladder word_sorting zebra_puzzles""",
        library(),
    ),
    # The library pays a text that contains the answer.
    ("chain_sum codeio manipulate_matrix products tsumego", library(least=1.0)),
    # It pays the question repeated, or one guess for all puzzles: dead cells, half of the names, 4, 12:00, 0, ones.
    (
        "game_of_life knights_knaves prime_factorization rectangle_count time_intervals",
        library(least=1.0),
    ),
    ("polynomial_equations", library(least=0.99)),
    ("mini_sudoku sudoku", library(least=0.75)),
    # It pays any text.
    ("game_of_life_halting", whole),
    # It pays NaN, whose distance to the answer is not larger than any.
    ("complex_arithmetic", library(form=r"[\d\s.eijEIJ*()+-]+")),
    ("number_sorting", library(form=r"""[\d\s.,eE\[\]'"+-]+""")),
    # It pays the wrong sign, and the first of several numbers.
    ("gsm_symbolic", library(form=r"[^\d-]*\d+(\.\d+)?\D*")),
    # It pays each prefix of the answer.
    ("coin_flip", probability),
    # It repeats a move as often as asked: R99999999.
    ("rubiks_cube rush_hour", library(form=r"(?!.*\d{3}).*")),
    # It evaluates the answer.
    ("binary_matrix n_queens spiral_matrix string_insertion", whole_or_list),
    ("intermediate_integration polynomial_multiplication simple_integration", formula),
    ("countdown puzzle24", expression),
]
GRADERS = {task: grader for tasks, grader in _RULES for task in tasks.split()}


def grader_of(task: str, dataset_cls: Any, default: Any) -> Grader | str:
    """Return the task's grader, or why it has none; `default` is the library's default rule."""
    if task in REFUSED:
        return REFUSED[task]
    if task not in GRADERS and dataset_cls.score_answer is not default:
        return "has a grader of its own that was not examined"
    return GRADERS.get(task, whole)


def right_answer(entry: Entry) -> str | None:
    """Return a right answer; None if the library gives none."""
    metadata, answer = entry["metadata"], entry["answer"]
    if "possible_answer" in metadata:
        return json.dumps(metadata["possible_answer"])
    return metadata.get("example_correct_answer") if answer is None else str(answer)


def is_formula(text: str, functions: str) -> bool:
    """Whether the text is a formula of bounded size: numbers, symbols of one letter, pi, + - * / **, `functions`.

    >>> [is_formula(text, "sin|cos") for text in ("x**2*sin(3*x) + C", "9**9**9", "x.y", "open(x)", "abc")]
    [True, False, False, False, False]
    """
    try:
        tree = _parse(text, r"[\w .()+*/-]+")
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return False
    return all(_is_known(node, functions) for node in ast.walk(tree))


def _is_known(node: ast.AST, functions: str) -> bool:
    match node:
        case ast.Constant(value=value):
            return isinstance(value, int | float) and value <= 10**12
        case ast.Name(id=name):
            return bool(re.fullmatch(rf"[A-Za-z](_?\d)?|pi|{functions}", name))
        case ast.Call(func=ast.Name(id=name)):
            return bool(re.fullmatch(functions, name))
        case ast.BinOp(op=ast.Pow(), right=right):  # no power nor number above 99 in an exponent
            return bool(re.fullmatch(r"(?!.*(\*\*|\d{3})).{1,20}", ast.unparse(right)))
    return isinstance(node, ast.BinOp | ast.UnaryOp | ast.operator | ast.USub | ast.UAdd | ast.Load)


def _parse(text: str, characters: str) -> ast.expr:
    if len(text) > 1000 or not re.fullmatch(characters, text, re.ASCII):
        raise ValueError("too long, or with other characters")
    return ast.parse(text.strip(), mode="eval").body


def _value(node: ast.AST) -> Fraction:
    match node:
        case ast.Constant(value=int() as value):
            return Fraction(value)
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return -_value(operand)
        case ast.BinOp(op=op, left=left, right=right):
            return _OPERATORS[type(op)](_value(left), _value(right))
    raise ValueError("not arithmetic")
