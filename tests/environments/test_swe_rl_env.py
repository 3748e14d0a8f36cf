"""SEARCH/REPLACE edits: which are applied, and how similar their patch is to the real one."""

from functools import partial
from typing import Any

import pytest

from atroposlib.envs import patches
from atroposlib.envs.patches import apply_diff
from tests.environments.helpers_environments import load, logged

swe = load("swe_rl_env")

CODE = ["def f(x):", "    y = x", "    return y", "", "", "def g(x):", "    return x"]
ROW = {
    "problem_statement": "f is wrong.",
    "text": "\n".join(["[start of a.py]", *CODE, "[end of a.py]"]),
    "patch": "diff --git a/a.py b/a.py\nindex 1..2 100644\n--- a/a.py\n+++ b/a.py\n"
    "@@ -1,3 +1,3 @@ def\n def f(x):\n-    y = x\n+    y = x + 1\n     return y\n",
}


def edit(search: str, replacement: str, path: str = "a.py") -> str:
    return f"### {path}\n<<<<<<< SEARCH\n{search}\n=======\n{replacement}\n>>>>>>> REPLACE"


GOOD = edit("    y = x", "    y = x + 1")
OTHER = edit("    return x", "    return 2 * x")


@pytest.fixture
def started(started: Any) -> Any:
    return partial(started, swe.SWERLEnv)


@pytest.mark.parametrize(
    ("answer", "low", "high"),
    [
        (f"<think>a</think>{GOOD}".replace("###", "\n###"), 1.0, 1.0),
        (f"<think>a</think>\n{GOOD}", 1.0, 1.0),
        (f"<think>a</think>\n```python\n{GOOD}\n```\nDone.", 1.0, 1.0),
        (f"<think>a</think>\n{edit(CODE[1] + chr(10) + CODE[2], '    return x + 1')}", 0.4, 0.95),
        (f"<think>a</think>\n{OTHER}", 0.01, 0.8),
        (f"<think>a</think>\n{GOOD}\n{edit('', 'x = 1', 'new.py')}", 0.5, 0.5),
        (GOOD, 0.0, 0.0),
        (f"<think>{GOOD}</think>", 0.0, 0.0),
        (f"<think>a</think><think>b</think>\n{GOOD}", 0.0, 0.0),
        (f"<think>a</think>\n{edit('y = x', 'y = x + 1')}", 0.0, 0.0),
        (f"<think>a</think>\n{edit('    y = x', '    y = x')}", 0.0, 0.0),
        (f"<think>a</think>\n{edit('', 'x')}", 0.0, 0.0),
        (f"<think>a</think>\n{GOOD.replace('### a.py', '')}", 0.0, 0.0),
        (f"<think>a</think>\n{GOOD}\n### a.py\n<<<<<<< SEARCH\n", 0.0, 0.0),
        (f"<think>a</think>\n{ROW['patch']}", 0.0, 0.0),
    ],
)
async def test_well_formed_edits_earn_their_similarity(
    started: Any, answer: str, low: float, high: float
) -> None:
    env = await started([""])
    score = await env.score(env.parse_row(ROW), answer)
    assert low <= score <= high


def test_a_row_whose_patch_does_not_apply_is_skipped() -> None:
    files = swe.files_of(ROW["text"])
    assert apply_diff(files, ROW["patch"])["a.py"][1] == "    y = x + 1"
    for broken in (
        ROW["patch"].replace("y = x\n", "y = z\n"),
        "",
        ROW["patch"].replace("a.py", "b.py"),
    ):
        with pytest.raises(ValueError, match=r"is not|changes no file"):
            apply_diff(files, broken)


def test_patches_that_add_and_delete_files_apply() -> None:
    diff = (
        "--- /dev/null\n+++ b/new.py\n@@ -0,0 +1,2 @@\n+x = 1\n+\n\\ No newline at end of file\n"
        "--- a/old.py\n+++ /dev/null\n@@ -1 +0,0 @@\n-y = 1\n"
        "--- a/a.py\n+++ b/a.py\n@@ -1,0 +2 @@\n+second\n@@ -2 +3,2 @@\n third\n+fourth\n"
    )
    after = apply_diff({"old.py": ["y = 1"], "a.py": ["first", "third"]}, diff)
    assert after == {
        "new.py": ["x = 1", ""],
        "old.py": [],
        "a.py": ["first", "second", "third", "fourth"],
    }


async def test_the_example_is_shown_until_enough_answers_are_well_formed(started: Any) -> None:
    answers = ["<think>a</think> I do not know what to do."] * 2
    env = await started(answers, group_size=2, icl_prompt_threshold=0.5)
    item = env.parse_row(ROW)
    metrics = []
    for answer in ("", f"<think>a</think>\n{GOOD}", ""):
        answers[0] = answer or answers[0]
        shown = env.shows_example
        assert (swe.EXAMPLE in env.prompt(item)) == shown
        await env.collect_trajectories(item)
        metrics.append(await logged(env))
    assert [each["env/using_icl_prompt"] for each in metrics] == [1.0, 1.0, 0.0]
    assert [each["train/avg_patch_format_accuracy"] for each in metrics] == [0.0, 0.5, 0.5]
    assert metrics[1]["train/avg_similarity_score_for_correct_patches"] == 1.0


async def test_a_log_between_sampling_and_judging_spoils_no_share(started: Any) -> None:
    right, wrong = f"<think>a</think>\n{GOOD}", "<think>a</think> I do not know what to do."
    env = await started([right, wrong, wrong, wrong], group_size=4, icl_prompt_threshold=0.5)
    item = env.parse_row(ROW)
    rollouts = await env.roll_out(item, 4, split="train")
    await logged(env)
    await env.score_group(item, rollouts)
    assert (await logged(env))["train/avg_patch_format_accuracy"] == 0.25
    assert env.shows_example


async def test_edits_are_applied_once_and_in_a_worker(
    started: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    env = await started([f"<think>a</think>\n{GOOD}"] * 2, group_size=2)
    in_worker, calls = env.in_worker, []

    async def counted(function: Any, *args: Any) -> Any:
        calls.append(function)
        return await in_worker(function, *args)

    monkeypatch.setattr(env, "in_worker", counted)
    monkeypatch.setattr(patches, "apply_edits", None)  # in this process
    group, _ = await env.collect_trajectories(env.parse_row(ROW))
    assert group["scores"] == [1.0, 1.0]
    assert env.train_metrics()["train/avg_patch_format_accuracy"] == 1.0
    assert calls == [patches.similarity_of_edits] * 2


async def test_evaluation_counts_well_formed_answers(started: Any) -> None:
    env = await started(["<think>a</think> I do not know."])
    metrics = await env.evaluate()
    assert metrics["eval/total_eval_items"] == len(env.eval_rows) > 0
    assert metrics["eval/patch_format_accuracy"] == metrics["eval/pass_at_1"] == 0.0
    assert metrics["eval/avg_think_tags_well_formed"] == 1.0
