"""Bugs planted into the rewards of our environments: a pinned rollout's test is red before the cure and green after.

Each row of BUGS edits one place of an environment's source. The environment with the bug makes a rollout of answers
whose right scores are in the row, `pin` writes the test, and the test runs with the bug and with the original source.
"""

from __future__ import annotations

import asyncio
import json
import runpy
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

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


class Bug(NamedTuple):
    """One edit of an environment's source, and answers whose right scores a person knows."""

    module: str
    name: str
    right: str
    """The original text, which occurs once."""
    wrong: str
    scores: dict[Answer, float]


BUGS = [
    Bug(
        "text_reversal_environment",
        "ignores case",
        "given == row[::-1]",
        '(given or "").lower() == row[::-1].lower()',
        {"<reversed_text>c bA</reversed_text>": 1.0, "<reversed_text>C Ba</reversed_text>": 0.0},
    ),
    Bug(
        "text_reversal_environment",
        "matches a prefix",
        "given == row[::-1]",
        'row[::-1].startswith(given or "?")',
        {"<reversed_text>c bA</reversed_text>": 1.0, "<reversed_text>c</reversed_text>": 0.0},
    ),
    Bug(
        "mcqa_thinking_env",
        "accepts a list of all answers",
        "read_choice(solution, row.options)[0] == row.letter",
        "row.letter in solution",
        {"<think>So.</think> The best answer is: A": 1.0, "<think>So.</think> A or B": -1.0},
    ),
    Bug(
        "mcqa_thinking_env",
        "does not require the form",
        "solution = after_thinking_once(answer)",
        "solution = answer",
        {"<think>So.</think> The best answer is: A": 1.0, "The best answer is: A": -1.0},
    ),
    Bug(
        "mcqa_thinking_env",
        "rewards wrong answers",
        "return 1.0 if is_right else -1.0",
        "return -1.0 if is_right else 1.0",
        {"<think>So.</think> The best answer is: A": 1.0, "<think>So.</think> B": -1.0},
    ),
    Bug(
        "mmlu_server",
        "reads the thinking",
        "read_choice(solution_of(answer), row.options)",
        "read_choice(answer, row.options)",
        {"<think>The answer is B?</think> The answer is A": 1.0, "The answer is B": 0.0},
    ),
    Bug(
        "mmlu_server",
        "compares the option with the letter",
        "row.options)[0] == row.letter)",
        "row.options)[0] == row.options[0])",
        {"The best answer is: A": 1.0, "The best answer is: B": 0.0},
    ),
    Bug(
        "fundamental_prediction_environment",
        "ignores the sign",
        "if size[0] == WRONG_SIGNS.get(row.direction):",
        "if size[0] == WRONG_SIGNS:",
        {predicted("raised, +5%"): 2.0, predicted("raised, -5%"): 0.0},
    ),
    Bug(
        "fundamental_prediction_environment",
        "ignores the size",
        "size_score(abs(float(size)) - row.size)",
        "size_score(row.size - row.size)",
        {predicted("raised, +5%"): 2.0, predicted("raised, +50%"): 1.0},
    ),
    Bug(
        "fundamental_prediction_environment",
        "takes the first of several predictions",
        "if len(found) != 1:",
        "if not found:",
        {predicted("raised, +5%"): 2.0, predicted("raised, +5%", "reduced, -5%"): 0.0},
    ),
    Bug(
        "tool_calling_server",
        "ignores the arguments",
        "calls_match(parse_hermes_calls(solution), row.calls)",
        "[c.name for c in parse_hermes_calls(solution)] == [c.name for c in row.calls]",
        {called(FIG): 1.0, called(PEAR): -1.0},
    ),
    Bug(
        "tool_calling_server",
        "ignores further calls",
        "calls_match(parse_hermes_calls(solution), row.calls)",
        "calls_match(parse_hermes_calls(solution)[:1], row.calls)",
        {called(FIG): 1.0, called(FIG, PEAR): -1.0},
    ),
    Bug(
        "gsm8k_server",
        "searches the number in the text",
        "return 1.0 if is_right else -1.0",
        "return 1.0 if row.answer in answer else -1.0",
        {"\\boxed{12}": 1.0, "\\boxed{120}": -1.0},
    ),
    Bug(
        "sql_query_env",
        "accepts every result",
        "return 1.0 if found == gold else -1.0",
        "return 1.0 if found else -1.0",
        {
            "<think>So.</think> \\boxed{SELECT Pieces FROM data WHERE Customer = 'Chen'}": 1.0,
            "<think>So.</think> \\boxed{SELECT Pieces FROM data}": -1.0,
        },
    ),
    Bug(
        "game_environments/wordle",
        "pays for guesses",
        "1.0 - COST_OF_A_GUESS * episode.num_turns",
        "1.0 + COST_OF_A_GUESS * episode.num_turns",
        {turns("apple"): 1.0, turns("table", "apple"): 0.9},
    ),
    Bug(
        "game_environments/hangman",
        "forgives mistakes",
        '1.0 - COST_OF_A_MISTAKE * int(state["mistakes"])',
        "1.0 - COST_OF_A_MISTAKE * 0",
        {turns("apple"): 1.0, turns("z", "apple"): 0.9},
    ),
    Bug(
        "game_environments/hangman",
        "divides by the wrong length",
        'state.get("tried", ()) for c in word) / len(word)',
        'state.get("tried", ()) for c in word) / len(set(word))',
        {turns("apple"): 1.0, turns("p", "z"): 0.08},
    ),
    Bug(
        "eval_environments/drop_eval",
        "takes the worst annotator",
        'return max(f1(spans_in(answer), gold) for gold in row["golds"])',
        'return min(f1(spans_in(answer), gold) for gold in row["golds"])',
        {"<answer>Dina; Gita</answer>": 1.0, "<answer>Hugo</answer>": 0.0},
    ),
    Bug(
        "eval_environments/bbh_eval",
        "matches another prefix",
        'plain(last_answer(answer) or answer) == plain(row["answer"])',
        'plain(answer).startswith(plain(row["answer"]))',
        {"<answer>143</answer>": 1.0, "<answer>1430</answer>": 0.0},
    ),
    Bug(
        "eval_environments/simpleqa_eval",
        "accepts a hedge",
        'float(is_same(answer, row["answer"]))',
        'float(row["answer"] in answer)',
        {"<answer>Paris</answer>": 1.0, "<answer>Paris or Rome</answer>": 0.0},
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
        "group_size": len(bug.scores),
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
    engine.script(list(bug.scores))
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
    pinned = pin(env_cls, row, judged=dict(enumerate(bug.scores.values())), folder=tmp_path)

    def run() -> None:
        runpy.run_path(str(pinned.test))[pinned.test.stem]()

    with pytest.raises(AssertionError):  # not EnvError: it is replayed, and the scores are wrong
        run()
    write(bug.module, source)
    run()


def test_there_are_twenty_bugs_or_more() -> None:
    assert len({(bug.module, bug.wrong) for bug in BUGS}) == len(BUGS) >= 20
