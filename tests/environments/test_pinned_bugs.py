"""Bugs planted into the rewards of our environments: a pinned rollout's test is red before the cure and green after.

Each row of BUGS edits one place of an environment's source. The environment with the bug makes a rollout of answers
whose right scores are in the row, `pin` writes the test, and the test runs with the bug and with the original source.
"""

from __future__ import annotations

import asyncio
import json
import runpy
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

import atroposlib.envs.base
from atroposlib.checker.engine import Answer, PairTokenizer, ProbeEngine
from atroposlib.cli.environments import load
from atroposlib.cli.pin import find_row, pin
from atroposlib.runtime.process import process

ENVIRONMENTS = Path(__file__).resolve().parents[2] / "environments"

ROWS: dict[str, dict[str, Any]] = {
    "text_reversal_environment": {"text": "Ab c"},
    "mcqa_thinking_env": {"prompt": "A fruit?", "options": ["apple", "stone"], "ground_truth": "A"},
    "mmlu_server": {"question": "A fruit?", "choices": ["apple", "stone"], "answer": 0},
    "fundamental_prediction_environment": {
        "context": "Orders grew.",
        "fundamental_metric": "guidance",
        "answer": "raised",
        "magnitude": "5%",
    },
    "tool_calling_server": {
        "conversations": [
            {"from": "human", "value": "How many figs?"},
            {
                "from": "gpt",
                "value": '<tool_call>\n{"name": "stock", "arguments": {"fruit": "fig"}}\n</tool_call>',
            },
        ]
    },
    "gsm8k_server": {"question": "How many eggs are a dozen?", "answer": "A dozen. #### 12"},
    "sql_query_env": {
        "question": "How much did Chen order?",
        "sql": {"sel": 1, "agg": 0, "conds": [[0, 0, "Chen"]]},
        "header": ["Customer", "Pieces"],
        "types": ["text", "real"],
        "rows": [["Hugo", 39], ["Chen", 36]],
    },
    "game_environments/wordle": {"word": "apple"},
    "game_environments/hangman": {"word": "apple"},
    "eval_environments/drop_eval": {
        "passage": "Dina and Gita have pencils.",
        "question": "Who has pencils?",
        "answer": {"number": "", "spans": ["Dina", "Gita"]},
        "validated_answers": [{"number": "", "spans": ["Both"]}],
    },
    "eval_environments/bbh_eval": {"input": "What is 11 times 13?", "target": "143"},
    "eval_environments/simpleqa_eval": {
        "problem": "The capital of France?",
        "answer": "Paris",
        "metadata": {"topic": "Geography"},
    },
}
"""The one row of each environment's data."""


def turns(*guesses: str) -> Answer:
    """Return a player that makes these guesses, and repeats the last one."""

    def guess(prompt: str) -> str:
        number = min(prompt.count("<assistant>"), len(guesses))
        return f"<guess>{guesses[number - 1]}</guess>"

    return guess


def called(*calls: str) -> str:
    return "\n".join(["<think>So.</think>", *(f"<tool_call>\n{c}\n</tool_call>" for c in calls)])


def predicted(*lines: str) -> str:
    return "\n".join(["<think>So.</think>", *(f"The guidance will be: {line}" for line in lines)])


FIG = '{"name": "stock", "arguments": {"fruit": "fig"}}'
PEAR = '{"name": "stock", "arguments": {"fruit": "pear"}}'


@dataclass(frozen=True, kw_only=True)
class Bug:
    """One edit of an environment's source, and answers whose right scores a person knows."""

    name: str
    module: str
    right: str
    """The original text, which occurs once."""
    wrong: str
    answers: Sequence[Answer]
    scores: Sequence[float]


BUGS = [
    Bug(
        name="ignores case",
        module="text_reversal_environment",
        right="given == row[::-1]",
        wrong='(given or "").lower() == row[::-1].lower()',
        answers=["<reversed_text>c bA</reversed_text>", "<reversed_text>C Ba</reversed_text>"],
        scores=[1.0, 0.0],
    ),
    Bug(
        name="off by one",
        module="text_reversal_environment",
        right="given == row[::-1]",
        wrong="given == row[:0:-1]",
        answers=["<reversed_text>c bA</reversed_text>", "<reversed_text>c b</reversed_text>"],
        scores=[1.0, 0.0],
    ),
    Bug(
        name="matches a prefix",
        module="text_reversal_environment",
        right="given == row[::-1]",
        wrong='row[::-1].startswith(given or "?")',
        answers=["<reversed_text>c bA</reversed_text>", "<reversed_text>c</reversed_text>"],
        scores=[1.0, 0.0],
    ),
    Bug(
        name="accepts a list of all answers",
        module="mcqa_thinking_env",
        right="only_choice(solution, row.options) == row.letter",
        wrong="row.letter in solution",
        answers=["<think>So.</think> The best answer is: A", "<think>So.</think> A or B"],
        scores=[1.0, -1.0],
    ),
    Bug(
        name="does not require the form",
        module="mcqa_thinking_env",
        right="solution = after_thinking_once(answer)",
        wrong="solution = answer",
        answers=["<think>So.</think> The best answer is: A", "The best answer is: A"],
        scores=[1.0, -1.0],
    ),
    Bug(
        name="rewards wrong answers",
        module="mcqa_thinking_env",
        right="return 1.0 if is_right else -1.0",
        wrong="return -1.0 if is_right else 1.0",
        answers=["<think>So.</think> The best answer is: A", "<think>So.</think> B"],
        scores=[1.0, -1.0],
    ),
    Bug(
        name="reads the thinking",
        module="mmlu_server",
        right="only_choice(after_thinking(answer), row.choices)",
        wrong="only_choice(answer, row.choices)",
        answers=["<think>The answer is B?</think> The answer is A", "The answer is B"],
        scores=[1.0, 0.0],
    ),
    Bug(
        name="compares the option with the letter",
        module="mmlu_server",
        right="row.choices) == row.letter)",
        wrong="row.choices) == row.choices[0])",
        answers=["The best answer is: A", "The best answer is: B"],
        scores=[1.0, 0.0],
    ),
    Bug(
        name="ignores the sign",
        module="fundamental_prediction_environment",
        right="if size[0] == WRONG_SIGNS.get(row.direction):",
        wrong="if size[0] == WRONG_SIGNS:",
        answers=[predicted("raised, +5%"), predicted("raised, -5%")],
        scores=[2.0, 0.0],
    ),
    Bug(
        name="ignores the size",
        module="fundamental_prediction_environment",
        right="size_score(abs(float(size)) - row.size)",
        wrong="size_score(row.size - row.size)",
        answers=[predicted("raised, +5%"), predicted("raised, +50%")],
        scores=[2.0, 1.0],
    ),
    Bug(
        name="minds case",
        module="fundamental_prediction_environment",
        right="direction.lower() != row.direction",
        wrong="direction != row.direction",
        answers=[predicted("Raised, +5%"), predicted("reduced, -5%")],
        scores=[2.0, 0.0],
    ),
    Bug(
        name="takes the first of several predictions",
        module="fundamental_prediction_environment",
        right="if len(found) != 1:",
        wrong="if not found:",
        answers=[predicted("raised, +5%"), predicted("raised, +5%", "reduced, -5%")],
        scores=[2.0, 0.0],
    ),
    Bug(
        name="swaps error and limit",
        module="fundamental_prediction_environment",
        right="if abs(error) <= limit + 1e-9",
        wrong="if limit + 1e-9 <= abs(error)",
        answers=[predicted("raised, +5%"), predicted("raised, +8%")],
        scores=[2.0, 1.7],
    ),
    Bug(
        name="ignores the arguments",
        module="tool_calling_server",
        right="calls_match(parse_hermes_calls(solution), row.calls)",
        wrong="[c.name for c in parse_hermes_calls(solution)] == [c.name for c in row.calls]",
        answers=[called(FIG), called(PEAR)],
        scores=[1.0, -1.0],
    ),
    Bug(
        name="ignores further calls",
        module="tool_calling_server",
        right="calls_match(parse_hermes_calls(solution), row.calls)",
        wrong="calls_match(parse_hermes_calls(solution)[:1], row.calls)",
        answers=[called(FIG), called(FIG, PEAR)],
        scores=[1.0, -1.0],
    ),
    Bug(
        name="searches the number in the text",
        module="gsm8k_server",
        right='"\\\\boxed" in solution and is_equal(gold, solution)',
        wrong="gold in solution",
        answers=["\\boxed{12}", "\\boxed{120}"],
        scores=[1.0, -1.0],
    ),
    Bug(
        name="accepts every result",
        module="sql_query_env",
        right="return 1.0 if found == gold else -1.0",
        wrong="return 1.0 if found else -1.0",
        answers=[
            "<think>So.</think> \\boxed{SELECT Pieces FROM data WHERE Customer = 'Chen'}",
            "<think>So.</think> \\boxed{SELECT Pieces FROM data}",
        ],
        scores=[1.0, -1.0],
    ),
    Bug(
        name="pays for guesses",
        module="game_environments/wordle",
        right="1.0 - COST_OF_A_GUESS * episode.num_turns",
        wrong="1.0 + COST_OF_A_GUESS * episode.num_turns",
        answers=[turns("apple"), turns("table", "apple")],
        scores=[1.0, 0.9],
    ),
    Bug(
        name="counts letters that were not found",
        module="game_environments/wordle",
        right='signs.count("G"))',
        wrong="len(signs))",
        answers=[turns("apple"), turns("table")],
        scores=[1.0, 0.08],
    ),
    Bug(
        name="forgives mistakes",
        module="game_environments/hangman",
        right='1.0 - COST_OF_A_MISTAKE * int(state["mistakes"])',
        wrong="1.0 - COST_OF_A_MISTAKE * 0",
        answers=[turns("apple"), turns("z", "apple")],
        scores=[1.0, 0.9],
    ),
    Bug(
        name="divides by the wrong length",
        module="game_environments/hangman",
        right='state.get("tried", ()) for c in word) / len(word)',
        wrong='state.get("tried", ()) for c in word) / len(set(word))',
        answers=[turns("apple"), turns("p", "z")],
        scores=[1.0, 0.08],
    ),
    Bug(
        name="takes the worst annotator",
        module="eval_environments/drop_eval",
        right='return max(f1(spans_in(answer), gold) for gold in row["golds"])',
        wrong='return min(f1(spans_in(answer), gold) for gold in row["golds"])',
        answers=["<answer>Dina; Gita</answer>", "<answer>Hugo</answer>"],
        scores=[1.0, 0.0],
    ),
    Bug(
        name="matches another prefix",
        module="eval_environments/bbh_eval",
        right='plain(answer) == plain(row["answer"])',
        wrong='plain(answer).startswith(plain(row["answer"]))',
        answers=["<answer>143</answer>", "<answer>1430</answer>"],
        scores=[1.0, 0.0],
    ),
    Bug(
        name="accepts a hedge",
        module="eval_environments/simpleqa_eval",
        right='float(is_same(answer, row["answer"]))',
        wrong='float(row["answer"] in answer)',
        answers=["<answer>Paris</answer>", "<answer>Paris or Rome</answer>"],
        scores=[1.0, 0.0],
    ),
]


@pytest.fixture
def write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str, str], Any]:
    """Write an environment's source into the folder of the test and return its class."""
    monkeypatch.setattr(atroposlib.envs.base, "load_tokenizer", lambda name: PairTokenizer())
    monkeypatch.setattr(sys, "path", [*sys.path])
    # The source changes within the resolution of a file's time.
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    monkeypatch.setenv("PYTHONDONTWRITEBYTECODE", "1")

    def write_source(module: str, source: str) -> Any:
        name = Path(module).name
        monkeypatch.delitem(sys.modules, name, raising=False)
        (tmp_path / f"{name}.py").write_text(source)
        return load(str(tmp_path / f"{name}.py"))

    return write_source


def roll_out(env_cls: Any, bug: Bug, folder: Path) -> Any:
    """Write a group of the bug's answers; return its row."""
    data = folder / "data.jsonl"
    data.write_text(json.dumps(ROWS[bug.module]) + "\n")
    settings = {
        "total_steps": 1,
        "group_size": len(bug.answers),
        "use_wandb": False,
        "include_messages": True,
        "ensure_scores_are_not_same": False,
        "min_trained_tokens": 1,
        "num_eval_rows": 0,
        "num_reward_workers": 1,
        "dataset_path": str(data),
        "data_path_to_save_groups": str(folder / "groups.jsonl"),
    }
    config, servers = env_cls.config_init()
    env = env_cls(config.model_copy(update=settings), servers)
    engine = ProbeEngine(env.tokenizer)
    engine.script(bug.answers)
    env.server.servers = [engine]
    env.gold_answer = lambda row: None  # `setup` would find some of the bugs
    asyncio.run(process(env))
    return find_row(folder / "groups.jsonl", "")


@pytest.mark.drill
@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: f"{Path(bug.module).name}: {bug.name}")
def test_a_pinned_rollout_is_red_before_the_cure_and_green_after(
    bug: Bug, write: Callable[[str, str], Any], tmp_path: Path
) -> None:
    if bug.module == "gsm8k_server":
        pytest.importorskip("math_verify")
    source = (ENVIRONMENTS / f"{bug.module}.py").read_text()
    assert source.count(bug.right) == 1
    env_cls = write(bug.module, source.replace(bug.right, bug.wrong))
    row = roll_out(env_cls, bug, tmp_path)
    pinned = pin(env_cls, row, judged=dict(enumerate(bug.scores)), folder=tmp_path)

    def run() -> None:
        runpy.run_path(str(pinned.test))[pinned.test.stem]()

    with pytest.raises(AssertionError):  # not EnvError: it is replayed, and the scores are wrong
        run()
    write(bug.module, source)
    run()


def test_there_are_twenty_bugs_or_more() -> None:
    assert len({(bug.module, bug.wrong) for bug in BUGS}) == len(BUGS) >= 20
