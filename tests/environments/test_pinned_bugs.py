"""Bugs planted into the rewards of our environments: a pinned rollout's test is red before the cure and green after.

Each bug of data/planted_bugs.yaml edits one place of an environment's source. The environment with the bug makes a
rollout of answers whose right scores are in the table, `pin` writes the test, and the test runs with the bug and with
the original source.
"""

import asyncio
import json
import runpy
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from atroposlib.checker.engine import Answer, PairTokenizer, ProbeEngine
from atroposlib.cli.environments import load
from atroposlib.cli.pin import find_row, pin
from atroposlib.runtime.process import process
from tests.builders.tables import table

ENVIRONMENTS = Path(__file__).resolve().parents[2] / "environments"
BUGS = [
    (case["module"], case["row"], bug)
    for case in table("environments/planted_bugs")
    for bug in case["bugs"]
]


def player(answer: str | list[str]) -> Answer:
    """Return an answer, or a player that makes these guesses and repeats the last one."""
    if isinstance(answer, str):
        return answer

    def guess(prompt: str) -> str:
        number = min(prompt.count("<assistant>"), len(answer))
        return f"<guess>{answer[number - 1]}</guess>"

    return guess


@pytest.fixture
def write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str, str], Any]:
    """Write an environment's source into the folder of the test and return its class."""
    monkeypatch.setattr("atroposlib.envs.hooks.load_tokenizer", lambda name: PairTokenizer())
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


def roll_out(env_cls: Any, row: Any, answers: Sequence[Any], folder: Path) -> Any:
    """Write a group of these answers to the row of data; return its row."""
    data = folder / "data.jsonl"
    data.write_text(json.dumps(row) + "\n")
    settings = {
        "total_steps": 1,
        "group_size": len(answers),
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
    engine.script([player(answer) for answer in answers])
    env.server.servers = [engine]
    env.gold_answer = lambda row: None  # `setup` would find some of the bugs
    asyncio.run(process(env))
    return find_row(folder / "groups.jsonl", "")


@pytest.mark.drill
@pytest.mark.parametrize(
    ("module", "row", "bug"),
    [pytest.param(*case, id=f"{Path(case[0]).name}: {case[2]['name']}") for case in BUGS],
)
def test_a_pinned_rollout_is_red_before_the_cure_and_green_after(
    module: str, row: Any, bug: Any, write: Callable[[str, str], Any], tmp_path: Path
) -> None:
    if module == "gsm8k_server":
        pytest.importorskip("math_verify")
    source = (ENVIRONMENTS / f"{module}.py").read_text()
    assert source.count(bug["right"]) == 1
    env_cls = write(module, source.replace(bug["right"], bug["wrong"]))
    answers, scores = zip(*bug["scores"], strict=True)
    group = roll_out(env_cls, row, answers, tmp_path)
    pinned = pin(env_cls, group, judged=dict(enumerate(scores)), folder=tmp_path)

    def run() -> None:
        runpy.run_path(str(pinned.test))[pinned.test.stem]()

    with pytest.raises(AssertionError):  # not EnvError: it is replayed, and the scores are wrong
        run()
    write(module, source)
    run()


def test_there_are_twenty_bugs_or_more() -> None:
    assert len({(module, bug["wrong"]) for module, _, bug in BUGS}) == len(BUGS) >= 20
