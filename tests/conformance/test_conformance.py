"""Benchmarks against lm-eval's own task code: prompts byte by byte, and verdicts on generated answers.

Forms of answers in which the verdicts differ have a name in `DIFFERENCES`, with the reason and who is right; outside of
them 99 % agree. The tables of `environments/README.md` are those of this run; CONFORMANCE_TABLE=1 writes them.
"""

from __future__ import annotations

import dataclasses
import importlib
import json
import os
import re
import subprocess
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.conformance.tasks import TASKS, Task, choices
from tests.environments.helpers_environments import load
from tests.processes import ROOT

pytestmark = pytest.mark.conformance

README = ROOT / "environments" / "README.md"
MARKS = re.compile(r"(?s)(<!-- conformance -->\n).*?(\n<!-- end of conformance -->)")
DIFFERENCES = {
    "letter alone": "lm-eval reads a letter in parentheses or after a colon; here also `B`, `Option B`, a box and a tag"
    " count. Ours: nothing else can be meant",
    "lead-in": "lm-eval reads `answer is (B)` alone; here every statement of one letter counts. Ours, as above",
    "two answers": "lm-eval takes one of the two; here none counts. Ours: two guesses earn nothing",
    "later mention": "lm-eval takes the last letter, number or word of the kind; here what is stated counts. Ours",
    "open thinking": "lm-eval reads a thought that does not end; here nothing is read. Ours: there is no answer yet",
    "more than a letter": "lm-eval compares the whole reply with the letter; here a named or boxed choice counts. Ours",
    "end of a formula": "lm-eval's pattern takes the `$.` at the end of a formula for the number. Ours",
    "decimals": "lm-eval compares texts, so that `18.00` is not 18; here numbers are compared. Ours",
    "no box": "lm-eval compares the whole reply where it has neither box nor formula; here the stated or last number"
    " counts. Ours reads what is meant; figures of lm-eval are lower",
    "decimal beside a mark": "lm-eval, as DROP's script, drops the point of `3.5.` and `$3.5`, which become 35; here it"
    " stays. Ours; published figures are lower",
    "sentences": "NLTK's Punkt splits at `P. S.`, and not after `p.m.`; here a rule counts. Theirs, by definition",
}
"""What differs; whose verdict is right."""
_LETTERS = dict.fromkeys(
    ("best", "no parentheses", "box alone", "tag", "letter", "option"), "letter alone"
)
_CHOICES = {"either": "two answers", "changed": "two answers", "unclosed thinking": "open thinking"}
NAMED: dict[str, dict[str, str]] = {
    "mmlu": {**_LETTERS, **_CHOICES, "later mention": "later mention"},
    "gpqa": {**_LETTERS, **_CHOICES, "later mention": "later mention"},
    "mmlu_pro": {
        **_CHOICES,
        **dict.fromkeys(("bold", "boxed", "line", "colon", "bold colon", "box alone"), "lead-in"),
        **dict.fromkeys(("tag", "letter", "option", "content alone"), "lead-in"),
    },
    "arc": dict.fromkeys(
        ("with content", "option", "boxed", "content alone"), "more than a letter"
    ),
    "gsm8k": {
        "boxed": "end of a formula",
        "decimal": "decimals",
        "later number": "later mention",
        "unclosed thinking": "open thinking",
    },
    "aime": {
        **dict.fromkeys(("usual", "after steps", "ends", "ends with point", "hashes"), "no box"),
        **dict.fromkeys(("dollar sign", "dollars", "bold", "later number"), "no box"),
        "decimal": "decimals",
    },
    "bbh": {
        "changed": "two answers",
        "later mention": "later mention",
        "unclosed thinking": "open thinking",
    },
    "ifeval": {"length_constraints:number_sentences": "sentences"},
    "drop": {
        f"{form} of a decimal": "decimal beside a mark"
        for form in ("point", "quotes", "percent", "comma", "dollars", "hyphen")
    },
}
"""Forms in which verdicts differ, by benchmark."""
PROMPTS: dict[str, tuple[str, Callable[[str, str], bool]]] = {
    "arc": ("equal, with line breaks for `\\n`", lambda one, two: one == two.replace("\\n", "\n")),
    "bbh": ("equal, without the task's description", lambda one, two: two.endswith(f"\n\n{one}")),
    "hellaswag": ("the same text; lm-eval asks nothing", lambda one, two: two in one),
    "drop": ("another: lm-eval's continues a text", lambda one, two: one != two),
}
"""How prompts compare where they are not equal."""


def theirs(tasks: dict[str, Task], home: Path) -> dict[str, Any]:
    """Return lm-eval's prompts and verdicts."""
    python = Path(os.environ.get("ATROPOS_CONFORMANCE_VENV", "no"), "bin/python").absolute()
    if not python.is_file():
        pytest.skip("set ATROPOS_CONFORMANCE_VENV, see .ci/conformance_env.sh")
    specs = {
        name: {**dataclasses.asdict(task), "answers": told(task)} for name, task in tasks.items()
    }
    done = subprocess.run(
        [python, Path(__file__).with_name("lm_eval_child.py")],
        input=json.dumps(specs),
        text=True,
        capture_output=True,
        env={"HF_HOME": str(home), "HF_HUB_OFFLINE": "1", "PATH": os.environ["PATH"]},
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout)  # type: ignore[no-any-return]


def told(task: Task) -> list[tuple[int, str]]:
    """Return the answers as lm-eval gets them: cut where it stops, after a begin that is in its prompt."""
    cut = (lambda text: re.split(r"\n\n|\.", text)[0]) if task.prefix else str
    return [(answer.row, cut(answer.text)) for answer in task.answers]


async def called(function: Any, *args: Any) -> Any:
    """Call a grader in this process: these answers are harmless."""
    if isinstance(function, str):
        module, _, name = function.replace(":", ".").rpartition(".")
        function = getattr(importlib.import_module(module), name)
    return function(*args)


@pytest.mark.timeout(600)
async def test_verdicts_agree_with_lm_eval(made: Any, tmp_path: Path) -> None:
    pytest.importorskip("langdetect")
    pytest.importorskip("math_verify")
    tasks: dict[str, Task] = {}
    envs, rows = {}, {}
    for benchmark, listed in TASKS.items():
        for number, task in enumerate(listed):
            name = f"{benchmark}/{number}"
            module, env_cls = task.env.split(".")
            settings: dict[str, Any] = {"num_few_shot": len(task.shots)} if task.shots else {}
            if benchmark not in ("hellaswag", "drop"):
                settings["protocol"] = "lm_eval"
            env = made(getattr(load(f"eval_environments.{module}"), env_cls), **settings)
            env.in_worker = called
            env.examples = [env.parse_row(row) for row in task.shots]
            envs[name], rows[name] = env, [env.parse_row(row) for row in task.rows]
            tasks[name] = shuffled_alike(task, rows[name]) if benchmark == "gpqa" else task
    found = theirs(tasks, tmp_path)
    counts: Counter[tuple[str, bool, bool]] = Counter()
    for name, task in tasks.items():
        benchmark, env = name.split("/")[0], envs[name]
        is_same = PROMPTS.get(benchmark, ("", str.__eq__))[1]
        for row, prompt in zip(rows[name], found[name]["prompts"], strict=True):
            assert is_same(env.conversation(row)[-1]["content"], prompt), (name, prompt)
        for answer, [verdict, *_] in zip(task.answers, found[name]["verdicts"], strict=True):
            text = f"<answer>{answer.text}</answer>" if benchmark == "drop" else answer.text
            score = await env.score(rows[name][answer.row], task.prefix + text)
            is_named = answer.form in NAMED.get(benchmark, {})
            counts[benchmark, is_named, abs((score or 0.0) - verdict) < 0.006] += 1
    written = README.read_text()
    table = MARKS.sub(lambda marks: marks[1] + tables(counts) + marks[2], written)
    if os.environ.get("CONFORMANCE_TABLE"):
        README.write_text(table)
    for benchmark in TASKS:
        agreed, differed = (counts[benchmark, False, is_equal] for is_equal in (True, False))
        assert agreed >= 0.99 * (agreed + differed), benchmark
        forms = set(NAMED.get(benchmark, ())) - {a.form for t in tasks.values() for a in t.answers}
        assert not forms, "forms that no answer has"
    assert table == written


def shuffled_alike(task: Task, rows: list[Any]) -> Task:
    """Return a task whose choices have our order: lm-eval's is another one in every run."""
    processed = [
        {
            "Question": row["question"],
            "choices": row["choices"],
            "answer": f"({row['answer']})",
            **{f"choice{i}": choice for i, choice in enumerate(row["choices"], start=1)},
        }
        for row in rows
    ]
    golds = ["ABCD".index(row["answer"]) for row in rows]
    answers = choices([row["choices"] for row in rows], golds)
    return dataclasses.replace(task, processed=processed, answers=answers)


def tables(counts: Counter[tuple[str, bool, bool]]) -> str:
    """Return both tables as Markdown."""
    lines = [
        "| benchmark | lm-eval's task | prompt | answers | agree | outside named differences | named differences |",
        "|---|---|---|---|---|---|---|",
    ]
    for benchmark, [task, *_] in TASKS.items():
        agreed, total, named = 0, 0, 0
        for (name, is_named, is_equal), number in counts.items():
            if name == benchmark:
                agreed, total = agreed + number * is_equal, total + number
                named += number * is_named
        plain = counts[benchmark, False, True]
        shares = f"{agreed / total:.1%} | {plain / (total - named):.1%}" if total else "- | -"
        names = ", ".join(dict.fromkeys(NAMED.get(benchmark, {}).values())) or "none"
        task_name = (
            Path(task.task).parent if benchmark == "bbh" else task.task.removesuffix(".yaml")
        )
        prompt = PROMPTS.get(benchmark, ("equal", None))[0]
        lines.append(
            f"| {benchmark} | `{task_name}` | {prompt} | {total or 'none: by likelihood'} | {shares} | {names} |"
        )
    lines += ["", "| difference | what differs, and who is right |", "|---|---|"]
    lines += [f"| {name} | {reason} |" for name, reason in DIFFERENCES.items()]
    return "\n".join(lines)
