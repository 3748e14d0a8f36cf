"""Puzzles of reasoning-gym: scores of the tagged answer, complexity, and what is not trained on."""

import random
import re
from ast import literal_eval
from collections.abc import Callable
from fractions import Fraction
from functools import partial
from math import prod
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from atroposlib.errors import ConfigError
from tests.environments.helpers_environments import load, restore

gym = load("reasoning_gym_environment.reasoning_gym_environment")
graders = load("reasoning_gym_environment.graders")


@pytest.fixture
def started(started: Any) -> Any:
    pytest.importorskip("reasoning_gym", reason="reasoning-gym (extra reasoning) is not installed")
    return partial(
        started, gym.ReasoningGymEnv, dataset_path=None, tasks=["gcd"], num_eval_samples_per_task=1
    )


async def test_only_one_tagged_answer_after_the_thinking_is_scored(started: Any) -> None:
    env = await started()
    puzzle = await env.get_next_item()
    right = f"<answer>{puzzle.answer}</answer>"
    assert await env.score(puzzle, f"<think>a</think> {right}") == 1.0
    assert await env.score(puzzle, right) == 1.0
    assert await env.score(puzzle, f"<think>{right}</think>") == 0.0
    assert await env.score(puzzle, f"<think>a</think> {right}{right}") == 0.0
    assert await env.score(puzzle, f"<think>a</think> {puzzle.answer}") == 0.0
    assert await env.score(puzzle, "<think>a</think> <answer>x</answer>") == 0.0
    assert await env.score(puzzle, f"<answer>-{puzzle.answer}</answer>") == 0.0
    assert await env.score(puzzle, f"<answer>1 2 3 4 5 6 {puzzle.answer}</answer>") == 0.0


def made(task: str, seed: int = 5) -> Any:
    """Return a function of an answer: its score by `score_answer`, in this process; with the puzzle."""
    pytest.importorskip("reasoning_gym", reason="reasoning-gym (extra reasoning) is not installed")
    for number in range(seed, seed + 20):
        puzzle = gym.make_puzzle(task, number, None)
        if isinstance(puzzle, list):
            break
    question, answer, sent = puzzle
    return SimpleNamespace(
        question=question,
        answer=answer,
        metadata=literal_eval(sent)["metadata"],
        score=partial(gym.score_answer, task, seed, None, sent),
    )


def tasks_of_the_library() -> list[str]:
    try:
        from reasoning_gym.factory import DATASETS
    except ImportError:
        return []
    return sorted(DATASETS.keys() - graders.REFUSED)


EVALUATED = {
    *("binary_matrix", "countdown", "intermediate_integration", "n_queens", "puzzle24"),
    *("polynomial_multiplication", "simple_integration", "spiral_matrix", "string_insertion"),
}
"""Tasks whose graders in the library run the answer."""
CODE = """__import__('os').system('touch {0}')|open('{0}', 'w')|[open('{0}', 'w')]|[[open('{0}', 'w')]]
x + open('{0}', 'w').write('1')|[x for x in [open('{0}', 'w')]]|(lambda: open('{0}', 'w'))()|{{'a': open('{0}', 'w')}}
f"{{open('{0}', 'w')}}"|sin(open('{0}', 'w').write('x'))|Symbol(open('{0}', 'w').name)|eval("open('{0}', 'w')")
().__class__.__base__.__subclasses__() and open('{0}', 'w')|{{"a": "open('{0}', 'w')"}}|A=open('{0}', 'w')
!!python/object/apply:os.system ['touch {0}']|$(touch {0})|"'+str(open('{0}', 'w'))+'"|24 if open('{0}', 'w') else 0
"""
JUNK = [
    *("zzz", " ", "nan", "n a n", "inf", "[NaN]", "[]", "{}", "()", "None", "null", "Q", "-"),
    *("...", "0.0001", "\x00", "9**9**9", "[0]*10**10", "1e999999999", "R99999999 U-999999"),
    *("zzz " * 5000, "9" * 5000, "[" * 5000, "-" * 5000),
]


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # of arc_agi's data
@pytest.mark.parametrize(
    "task",
    [
        pytest.param(task, marks=[] if task in EVALUATED else pytest.mark.drill)
        for task in tasks_of_the_library()
    ],
)
def test_no_text_runs_or_earns_without_an_answer(task: str, tmp_path: Path) -> None:
    puzzle = made(task)
    canary = tmp_path / "canary"
    wrong = str(int(puzzle.answer) + 1) if puzzle.answer and puzzle.answer.isdecimal() else "zzz"
    before = puzzle.score(wrong)
    for text in [*CODE.format(canary).replace("\n", "|").strip("|").split("|"), *JUNK]:
        for said in {text, text.strip()} - {puzzle.answer}:
            assert puzzle.score(said) < 0.5, said[:80]
        assert not canary.exists(), text
        assert puzzle.score(wrong) == before
    if puzzle.answer is not None:
        assert puzzle.score(puzzle.answer.strip()) == 1.0


def numbers_as(text: str) -> Callable[[Any], str]:
    return lambda puzzle: re.sub(r"-?\d+(\.\d+)?", text, puzzle.answer)


def around(form: str) -> Callable[[Any], str]:
    return lambda puzzle: form.format(puzzle.answer)


def hidden_numbers(form: str) -> Callable[[Any], str]:
    """Return the target as a number that the library overlooks, beside the puzzle's own."""
    return lambda puzzle: form.format(
        hex(puzzle.metadata["target"]), "+".join(map(str, puzzle.metadata["numbers"]))
    )


def filled(puzzle: Any) -> str:
    return "\n".join(" ".join(str(n or 1) for n in row) for row in puzzle.metadata["puzzle"])


@pytest.mark.parametrize(
    ("task", "text"),
    [
        ("game_of_life_halting", "zzz"),
        ("puzzle24", "6*4*1*1"),
        ("puzzle24", "6*4*1*1.9"),
        ("countdown", hidden_numbers("{0} + 0x0*({1})")),
        ("countdown", hidden_numbers("{0} # {1}")),
        ("coin_flip", "0"),
        ("coin_flip", "0/1"),
        ("complex_arithmetic", "nan"),
        ("complex_arithmetic", "n a n"),
        ("complex_arithmetic", "1+nani"),
        ("number_sorting", numbers_as("NaN")),
        ("number_sorting", numbers_as("nan")),
        ("gsm_symbolic", around("-{}")),
        ("gsm_symbolic", around("{} or 7")),
        ("chain_sum", around("-{}")),
        ("products", around("1{}")),
        ("codeio", around("1{}")),
        ("tsumego", around("{}9")),
        ("manipulate_matrix", around("7 {}")),
        ("game_of_life", numbers_as("0")),
        ("knights_knaves", lambda puzzle: re.sub("an? (angel|devil|knight|knave|\\w+)", "a knight", puzzle.answer)),
        ("prime_factorization", lambda puzzle: str(prod(map(int, puzzle.answer.split(" × "))))),
        ("time_intervals", numbers_as("1")),
        ("polynomial_equations", "0.2"),
        ("mini_sudoku", filled),
        ("sudoku", filled),
        ("simple_integration", lambda puzzle: f"integrate({puzzle.metadata['integrand']})"),
        ("polynomial_multiplication", lambda puzzle: f"expand({puzzle.metadata['polynomial_expr']})"),
        ("string_insertion", "oracle_answer"),
        ("n_queens", "[valid_solutions[0].split()]"),
    ],
)  # fmt: skip
def test_a_text_that_solves_nothing_earns_nothing(task: str, text: Any) -> None:
    for seed in range(3):
        puzzle = made(task, seed)
        shown = text if isinstance(text, str) else text(puzzle)
        assert shown == puzzle.answer or puzzle.score(shown) in (0.0, 0.01), shown


@pytest.mark.parametrize(
    ("task", "text", "score"),
    [
        ("spiral_matrix", lambda puzzle: str(puzzle.answer.split()).replace("'", ""), 0.1),
        ("string_insertion", lambda puzzle: str([*puzzle.answer]), 0.1),
        ("binary_matrix", lambda puzzle: str([row.split() for row in puzzle.answer.split("\n")]), 0.1),
        ("n_queens", lambda puzzle: str([row.split() for row in puzzle.answer.split("\n")]), 0.5),
        ("n_queens", lambda puzzle: puzzle.metadata["valid_answers"][-1], 1.0),
        ("countdown", around("( {} )"), 1.0),
        ("puzzle24", around("(({}))"), 1.0),
        ("coin_flip", lambda puzzle: str(Fraction(puzzle.answer)), 1.0),
        ("coin_flip", lambda puzzle: f"{float(Fraction(puzzle.answer)):.6f}", 1.0),
        ("complex_arithmetic", around("( {} )"), 1.0),
        ("number_sorting", lambda puzzle: puzzle.answer.replace("'", '"'), 1.0),
        ("gsm_symbolic", around("${}.00"), 1.0),
        ("gsm_symbolic", around("{} apples"), 1.0),
        ("simple_integration", lambda puzzle: puzzle.answer.replace("+ C", ""), 1.0),
        ("simple_integration", lambda puzzle: puzzle.answer.replace("+ C", "+ C_1 + k"), 1.0),
        ("intermediate_integration", around("{} + sqrt(2)*pi + exp(3)"), 1.0),
        ("polynomial_multiplication", around("0 + {}"), 1.0),
        ("game_of_life_halting", around("{}"), 1.0),
        ("chain_sum", around("{}.0"), 1.0),
        ("sudoku", around("{}\n"), 1.0),
    ],
)  # fmt: skip
def test_right_answers_in_usual_forms_are_paid(task: str, text: Any, score: float) -> None:
    for seed in range(3):
        puzzle = made(task, seed)
        assert puzzle.score(text(puzzle).strip()) == score, text(puzzle)


@pytest.mark.parametrize(
    ("text", "is_allowed"),
    [
        ("x**3/3 + 2*sin(3*x)**2 - exp(-x)/4 + C1", True),
        ("(x**2 + 1)**(3/2)*log(abs_)", False),
        ("x**(-1/2)", True),
        ("((x + 1)**10)**10", True),
        ("x^2", False),
        ("x # y", False),
        ("x + " * 300 + "x", False),
        ("2**(999)", False),
        ("9**9**9", False),
        ("x**2**x", False),
        ("10000000000000", False),
        ("sin(x, 2)", False),
        ("sin(x=2)", False),
        ("x.diff(x)", False),
        ("sin.x(2)", False),
        ("x[0]", False),
        ("x; x", False),
        ("'x'", False),
        ("x if x else 1", False),
        ("Integral(x)", False),
        ("(" * 300 + "x" + ")" * 300, False),
    ],
)
def test_a_formula_is_bounded_and_calls_only_known_functions(text: str, is_allowed: bool) -> None:
    assert graders.is_formula(text, "sin|exp|log") == is_allowed


@pytest.mark.drill
async def test_a_formula_that_takes_too_long_is_not_paid(started: Any) -> None:
    env = await started(tasks=["simple_integration"], reward_timeout_s=2.0)
    puzzle = await env.get_next_item()
    bomb = "(" + "*".join(f"sin(x + {i})**99" for i in range(1, 30)) + ")"
    assert graders.is_formula(bomb, graders._FUNCTIONS)
    assert not await env.score(puzzle, f"<answer>{bomb}</answer>")
    assert await env.score(puzzle, f"<answer>{puzzle.answer}</answer>") == 1.0


async def test_a_puzzle_earns_the_same_in_every_process(started: Any) -> None:
    env = await started(tasks=["polynomial_multiplication", "codeio"])
    for _ in range(3):
        puzzle = await env.get_next_item()
        assert gym.score_answer(*puzzle.source, puzzle.entry, puzzle.answer) == 1.0


async def test_a_score_does_not_wait_for_the_puzzle_to_be_made_again(
    started: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    await started()
    question, answer, sent = gym.make_puzzle("knight_swap", 5, None)
    monkeypatch.setattr(
        type(gym.dataset_of(gym.Source("knight_swap", 5, None))), "__getitem__", None
    )
    assert gym.score_answer("knight_swap", 5, None, sent, answer) == 1.0


async def test_a_puzzle_that_pays_nonsense_or_not_its_answer_is_not_used(
    started: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    env = await started()
    for pays, fault in [(1.0, "the answer 'zzz' earns 0.5"), (0.9, "does not earn 1")]:
        monkeypatch.setattr(gym.graders, "grader_of", lambda *task, pays=pays: lambda *args: pays)
        assert fault in gym.make_puzzle("gcd", 1, None)

    async def in_worker(function: Any, *args: Any) -> Any:
        return function(*args)

    monkeypatch.setattr(env, "in_worker", in_worker)
    assert await env.puzzle(gym.Source("gcd", 1, None)) is None
    assert await env.puzzle(gym.Source("gcd", 2, None)) is None
    assert env.counts["puzzles_misgraded"] == 2
    assert len([r for r in caplog.records if "does not earn 1" in r.getMessage()]) == 1


def test_a_task_with_an_unexamined_grader_is_refused() -> None:
    class Base:
        def score_answer(self) -> None: ...

    class Own(Base):
        def score_answer(self) -> None: ...

    default = Base.score_answer
    assert graders.grader_of("later", Base, default) is graders.whole
    assert "not examined" in graders.grader_of("later", Own, default)
    assert "repeated premise" in graders.grader_of("propositional_logic", Own, default)


async def test_a_refused_task_is_named(started: Any, caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(ConfigError, match="propositional_logic cannot be graded: it pays"):
        await started(tasks=["propositional_logic"])
    assert "propositional_logic" not in gym.available_tasks(None)
    assert "propositional_logic (pays a repeated premise)" in caplog.text


async def test_a_number_may_have_commas(started: Any) -> None:
    await started()
    source = gym.Source("basic_arithmetic", 8, None)
    _, answer, sent = gym.make_puzzle(*source)
    assert answer == "-1043"
    texts = ("-1043", "-1,043", "-104,3", "1,043")
    assert [gym.score_answer(*source, sent, text) for text in texts] == [1.0, 1.0, 0.0, 0.0]


async def test_the_puzzles_depend_on_the_seed_alone(started: Any) -> None:
    tasks = ["gcd", "leg_counting"]
    first, second = [await started(tasks=tasks, seed=3) for _ in range(2)]
    puzzles = [await first.get_next_item() for _ in range(6)]
    assert puzzles == [await second.get_next_item() for _ in range(6)]
    assert {puzzle.source.task for puzzle in puzzles} == set(tasks)
    assert first.eval_rows == second.eval_rows
    assert len(first.eval_rows) == 2


async def test_an_unknown_task_is_refused(started: Any) -> None:
    with pytest.raises(ConfigError, match="did you mean sudoku"):
        await started(tasks=["suduko"])


async def test_complexity_changes_the_puzzle_and_stays_when_it_is_scored(started: Any) -> None:
    await started()
    easy, hard = (gym.dataset_of(gym.Source("gcd", 1, level)).config for level in (0.0, 1.0))
    assert hard.max_value > easy.max_value
    refused = gym.dataset_of(gym.Source("caesar_cipher", 1, 1.0))
    assert refused.config.max_rotation <= 25


async def test_the_curriculum_follows_the_success_and_is_saved(
    started: Any, tmp_path: Path
) -> None:
    env = await started(complexity_mode="curriculum")
    puzzle = await env.get_next_item()
    assert puzzle.source.complexity == 0.3
    for _ in range(3):
        env.shape_group(puzzle, {"scores": [1.0, 1.0], "masks": [[1], [1]]})
    assert env.complexity("gcd", random.Random(0)) == pytest.approx(0.4)
    resumed = restore(env, await started(complexity_mode="curriculum"), tmp_path)
    assert resumed.complexity("gcd", random.Random(0)) == pytest.approx(0.4)
    assert resumed.num_items == env.num_items


@pytest.mark.parametrize(
    ("level", "history", "expected"),
    [
        (0.6, [0.0, 0.0, 0.0], 0.5),
        (0.4, [0.0, 0.0, 0.0], 0.35),
        (0.6, [1.0, 1.0, 1.0], 0.65),
        (0.3, [0.0, 0.0, 1.0, 1.0, 1.0, 1.0, 1.0], 0.4),
        (0.3, [1.0, 0.5, 1.0, 1.0], 0.3 + 0.05 * (1 - 0.21650635)),
        (0.3, [0.7, 0.75, 0.7], 0.3),
        (0.98, [0.9, 0.9, 0.9], 1.0),
    ],
)
def test_the_size_of_a_step(level: float, history: list[float], expected: float) -> None:
    assert gym.next_complexity(level, history, target=0.7) == pytest.approx(expected)


async def test_long_answers_lose_score_only_in_a_group_without_a_wrong_one(started: Any) -> None:
    env = await started(max_token_length=100)
    puzzle = await env.get_next_item()
    masks = [[-100] * 99 + [1] * 70, [-100] * 99 + [1] * 90]  # the prompt does not count
    assert env.shape_group(puzzle, {"scores": [1.0, 0.5], "masks": masks})["scores"] == [
        1.0,
        pytest.approx(0.2),
    ]
    assert env.shape_group(puzzle, {"scores": [0.0, 1.0], "masks": masks})["scores"] == [0.0, 1.0]


async def test_an_answer_cut_at_the_limit_has_no_advantage(started: Any) -> None:
    env = await started(max_token_length=12, min_trained_tokens=1, group_size=2)
    right = iter(["<answer>1</answer>" * 3, "no"])
    env.server.servers[0].respond = lambda request: next(right)
    group, _ = await env.collect_trajectories(await env.get_next_item())
    assert group["scores"] == [0.0, 0.0]
    assert group["overrides"] == [{"set_advantage_to_zero": True}, {}]
