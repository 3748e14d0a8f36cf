"""Benchmarks: how answers are read and scored, row by row of their edges."""

import json
import re
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest

from atroposlib.cli.compare_evals import compare, paired_items
from atroposlib.envs.dataset_env import ABORTED, Rollout
from atroposlib.envs.eval_run import hash_of, stored_samples
from atroposlib.errors import ConfigError
from tests.environments.helpers_environments import load

FOLDER = "eval_environments"


AIME = load(f"{FOLDER}.aime_eval").AIMEEvalEnv
ARC = load(f"{FOLDER}.arc_eval").ARCEvalEnv
BBH = load(f"{FOLDER}.bbh_eval").BBHEvalEnv
DROP = load(f"{FOLDER}.drop_eval").DROPEvalEnv
GSM8K = load(f"{FOLDER}.gsm8k_eval").GSM8KEvalEnv
GPQA = load(f"{FOLDER}.gpqa_eval").GPQAEvalEnv
HellaSwag = load(f"{FOLDER}.hellaswag_eval").HellaSwagEvalEnv
MMLU = load(f"{FOLDER}.mmlu_eval").MMLUEvalEnv
SimpleQA = load(f"{FOLDER}.simpleqa_eval").SimpleQAEvalEnv


CHOICE = {"question": "Which?", "choices": ["red", "blue", "New York"], "answer": "B"}


@pytest.mark.parametrize(
    ("golds", "answer", "score"),
    [
        ([["10"]], "1", 0.0),
        ([["10"]], "10.0", 1.0),
        ([["1,200"]], "1200", 1.0),
        ([["-5"]], "5", 0.0),
        ([["10 yards"]], "yards", 0.0),
        ([["the Red car"]], "red car.", 1.0),
        ([["red car"]], "car", 2 / 3),
        ([["Ann", "Bob"]], "bob; Ann", 1.0),
        ([["Ann", "Bob"]], "Ann", 0.5),
        ([["Ann"]], "Ann; Bob; Cy; Di", 0.25),
        ([["Ann"], ["Bob"]], "Bob", 1.0),
        ([["Ann"]], ";", 0.0),
    ],
)
async def test_drop_is_scored_by_the_best_f1(
    made: Any, golds: list[list[str]], answer: str, score: float
) -> None:
    env = made(DROP)
    row = {"question": "?", "answer": "; ".join(golds[0]), "golds": golds}
    assert await env.score(row, f"<answer>{answer}</answer>") == pytest.approx(score)


@pytest.mark.parametrize("by_columns", [False, True])
async def test_drop_reads_all_annotators(made: Any, by_columns: bool) -> None:
    date = {"day": "7", "month": "May", "year": ""}
    none = {"day": "", "month": "", "year": ""}
    more: Any = [
        {"number": "", "spans": ["a week"], "date": none},
        {"number": "", "spans": [], "date": date},
    ]
    if by_columns:
        more = {key: [each[key] for each in more] for key in more[0]}
    row = {
        "passage": "P",
        "question": "Q",
        "answer": {"number": "3", "spans": [], "date": none},
        "validated_answers": more,
    }
    env = made(DROP)
    assert env.parse_row(row)["golds"] == [["3"], ["a week"], ["7 May"]]


@pytest.mark.parametrize(
    ("verdict", "score"),
    [
        ("Grade: CORRECT", 1.0),
        ("It is not CORRECT. Grade: INCORRECT", 0.0),
        ("**Grade:** NOT_ATTEMPTED", 0.1),
        ("<think>Grade: CORRECT</think> Grade: INCORRECT", 0.0),
        ("I cannot say.", None),
    ],
)
async def test_simpleqa_takes_the_judges_grade(
    made: Any, verdict: str, score: float | None
) -> None:
    env = made(SimpleQA, verdict, use_llm_judge=True)
    assert await env.score({"question": "Who?", "answer": "Obama"}, "Perhaps he") == score


FIGURES = (
    *("is_correct", "is_incorrect", "is_not_attempted", "is_given_attempted"),
    *("accuracy_given_attempted", "f1"),
)


@pytest.mark.parametrize(
    ("grades", "figures"),
    [
        ("CORRECT CORRECT INCORRECT NOT_ATTEMPTED", (1 / 2, 1 / 4, 1 / 4, 3 / 4, 2 / 3, 4 / 7)),
        ("CORRECT INCORRECT unreadable", (1 / 3, 1 / 3, 1 / 3, 2 / 3, 1 / 2, 2 / 5)),
        ("CORRECT CORRECT", (1, 0, 0, 1, 1, 1)),
        ("INCORRECT NOT_ATTEMPTED", (0, 1 / 2, 1 / 2, 1 / 2, 0, 0)),
        ("NOT_ATTEMPTED", (0, 0, 1, 0, 0, 0)),
    ],
)
async def test_the_grades_of_simpleqa_give_the_figures_of_its_reference(
    made: Any, grades: str, figures: tuple[float, ...]
) -> None:
    """Expected: counts of the grades divided by all, by hand, as simple-evals defines its figures."""

    def respond(request: Any) -> str:
        asked = re.search(r"<question>\n(\w+)", request.prompt)
        if "<model_answer>\nyes\n" in request.prompt:  # else the row is faulty
            return "Grade: CORRECT"
        return f"Grade: {asked[1]}" if asked else "<answer>yes, sir</answer>"

    env = made(SimpleQA, respond, use_llm_judge=True)
    env.eval_rows = [{"question": grade, "answer": "yes", "groups": {}} for grade in grades.split()]
    metrics = await env.evaluate()
    assert [metrics[f"eval/{name}"] for name in FIGURES] == pytest.approx(figures)
    assert metrics["eval/accuracy"] == metrics["eval/is_correct"]
    assert metrics["eval/accuracy_if_attempted"] == metrics["eval/accuracy_given_attempted"]
    assert (metrics["eval/exact_match_accuracy"], metrics["eval/fuzzy_match_accuracy"]) == (0, 1)


@pytest.mark.parametrize(
    "text", ["**-50**", "So.\nThe answer is $-50.0$.", "<answer>\u221250</answer>"]
)
def test_bbh_reads_a_line_a_statement_or_the_tag(made: Any, text: str) -> None:
    env = made(BBH)
    row = {"question": "((-1 + 2) * -50) =", "answer": "-50"}
    assert env.grade(row, env.read(row, text).answer) == 1.0
    assert env.read(row, "-50\nor 50").answer is None


async def test_bbh_counts_every_task_alike_in_its_mean(made: Any) -> None:
    env = made(BBH)
    rows = [{"groups": {"subset": name}} for name in ("navigate", "navigate", "snarks")]
    samples = [{"correct": i < 1, "item_index": i} for i in range(3)]
    metrics = env.rates_of_parts(rows, samples)
    assert metrics["eval/subset_navigate_accuracy"] == 0.5
    assert metrics["eval/macro_accuracy"] == 0.25


async def test_gpqa_has_the_same_order_in_every_run_and_every_letter(started: Any) -> None:
    rows = []
    for _ in range(2):
        env = await started(GPQA)
        rows.append(env.eval_rows)
    assert list(map(hash_of, rows[0])) == list(map(hash_of, rows[1]))
    assert {row["answer"] for row in rows[0]} == {*"ABCD"}


def test_labels_that_are_digits_become_letters(made: Any) -> None:
    env = made(ARC)
    choices = {"text": ["up", "down", "left"], "label": ["1", "2", "3"]}
    row = env.parse_row({"question": "?", "choices": choices, "answerKey": "3"})
    assert (row["answer"], row["choices"][2]) == ("C", "left")


def test_hellaswag_prepares_its_texts_as_lm_eval(made: Any) -> None:
    env = made(HellaSwag)
    raw = {"activity_label": "Run", "ctx_a": "A man in NYC", "ctx_b": "he and IBM", "label": "0"}
    row = env.parse_row({**raw, "endings": ["[step] run [title] Go [odd] on."] * 4})
    assert row["question"].endswith("Run: A man in NYC He and ibm")
    assert row["choices"][0] == " run. Go on."
    assert env.parse_row({**raw, "label": "", "endings": []}) is None


async def test_examples_are_of_the_same_subject_and_not_the_question_itself(started: Any) -> None:
    settings = {"num_few_shot": 3, "few_shot_path": "sample"}
    env = await started(MMLU, **settings)
    for row in env.eval_rows:
        shown = env.examples_for(row)
        assert len(shown) == 3
        assert {each["groups"]["subject"] for each in shown} == {row["groups"]["subject"]}
        assert env.prompt(row).count(row["question"]) == 1


async def test_examples_of_mmlu_pro_show_their_reasoning(made: Any) -> None:
    env = made(load(f"{FOLDER}.mmlu_pro_eval").MMLUProEvalEnv, num_few_shot=1)
    raw = {"question": "Which?", "options": ["1", "2"], "answer_index": 1, "category": "math"}
    env.examples = [
        env.parse_row(
            {**raw, "cot_content": "A: Let's think step by step. Add up. The answer is (B)."}
        )
    ]
    row = env.parse_row({**raw, "question": "And?", "cot_content": ""})
    assert "B. 2\n\nAdd up. The answer is (B).\n\n<answer>B</answer>\n\nAnd?" in env.prompt(row)
    assert "reasoning" not in row


async def test_a_part_of_the_rows_is_the_same_part_every_time(started: Any) -> None:
    chosen = []
    for seed in (1, 1, 2):
        env = await started(ARC, num_eval_rows=10, seed=seed)
        chosen.append(env.eval_rows)
    assert len(chosen[0]) == 10
    assert chosen[0] == chosen[1] != chosen[2]


@pytest.mark.parametrize(
    ("settings", "system"),
    [
        ({}, None),
        ({"custom_system_prompt": "Be brief."}, "Be brief."),
        ({"thinking_mode": True, "custom_thinking_prompt": "Think."}, "Think."),
        ({"thinking_mode": True, "custom_thinking_prompt": "Think.", "custom_system_prompt": "Be."}, "Think.\n\nBe."),
    ],
)  # fmt: skip
def test_system_prompts_are_joined(made: Any, settings: dict[str, Any], system: str | None) -> None:
    env = made(ARC, **settings)
    messages = env.conversation(CHOICE)
    said = [message["content"] for message in messages if message["role"] == "system"]
    assert said == ([] if system is None else [system])


async def test_settings_that_select_nothing_are_refused(started: Any) -> None:
    with pytest.raises(ConfigError, match="select none of 40 rows"):
        await started(MMLU, subjects=["astrology"])
    with pytest.raises(ConfigError, match="there is no 2023, only 2024, 2025"):
        await started(AIME, dataset_path=None, years=["2023"])
    with pytest.raises(ConfigError, match="there is no nim"):
        await started(BBH, dataset_path=None, subsets=["nim"])
    with pytest.raises(ConfigError, match="give --env.few_shot_path"):
        await started(GPQA, num_few_shot=1)


async def test_several_answers_per_row_give_avg_and_pass_at_k(started: Any, tmp_path: Any) -> None:
    settings = {"num_eval_samples": 2, "data_dir_to_save_evals": str(tmp_path)}
    env = await started(ARC, ["<answer>A</answer>", "<answer>B</answer>"], **settings)
    metrics = await env.evaluate()
    share = sum(row["answer"] in "AB" for row in env.eval_rows) / len(env.eval_rows)
    assert metrics["eval/pass@2"] == pytest.approx(share)
    assert metrics["eval/avg@2"] == metrics["eval/accuracy"] == pytest.approx(share / 2)
    assert metrics["eval/extraction_answer_tag_count"] == 2 * len(env.eval_rows)


async def test_results_name_protocol_prompts_and_graders(started: Any, tmp_path: Path) -> None:
    found = {}
    for protocol in ("ours", "lm_eval"):
        folder = tmp_path / protocol
        env = await started(GSM8K, protocol=protocol, data_dir_to_save_evals=str(folder))
        await env.evaluate()
        general = json.loads((folder / "metrics.json").read_text())["config_general"]
        found[protocol] = general["generation_parameters"]
    assert [each["protocol"] for each in found.values()] == [*found]
    assert found["ours"]["prompts_hash"] != found["lm_eval"]["prompts_hash"]
    assert found["ours"]["versions"]["math-verify"] == metadata.version("math-verify")


async def test_a_protocol_that_a_benchmark_lacks_is_refused(started: Any) -> None:
    with pytest.raises(ConfigError, match="drop_eval has no prompt of lm-eval"):
        await started(DROP, protocol="lm_eval")


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("7 * 2 = 14. The answer is 1,200 dollars.", "1,200"),
        ("The answer is 18, found in 2 steps.", "18"),
        ("Final Answer: The final answer is $\\frac{1}{2}$. I hope it is correct.", "\\frac{1}{2}"),
        ("7 * 2 = 14, so she has 3.50.", "3.50"),
        ("It is \\boxed{4}, not 5.", "4"),
        ("It is \\boxed{4, not 5.", None),
        ("I cannot tell.", None),
    ],
)
def test_a_number_outside_of_a_box_counts_for_lm_evals_prompt_alone(
    made: Any, text: str, answer: str | None
) -> None:
    assert made(GSM8K, protocol="lm_eval").read({}, text).answer == answer
    assert made(GSM8K).read({}, text).answer == (answer if "boxed{4}" in text else None)


BOMBS = ["10^{10^{10}}", "9^{9^{9^{9}}}", "2^{99999999999}", "\\binom{10^9}{10^8}", "9" * 10_000]


async def test_bombs_count_in_the_accuracy_and_so_do_aborted_answers(
    made: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("math_verify")
    said = ["7", *BOMBS, "cut off"]
    env = made(
        GSM8K, reward_timeout_s=0.3, max_eval_workers=1, data_dir_to_save_evals=str(tmp_path / "a")
    )
    env.eval_rows = [{"question": f"{i}?", "answer": "7", "groups": {}} for i in range(len(said))]

    async def roll_out(row: Any, n: int, *, split: str) -> list[Rollout]:
        i = int(row["question"][:-1])
        messages = [{"role": "assistant", "content": f"\\boxed{{{said[i]}}}"}]
        aborted = ABORTED if said[i] == "cut off" else "stop"
        return [Rollout(messages=messages, nodes=[], finish_reason=aborted)]

    env.roll_out = roll_out
    metrics = await env.evaluate()
    assert metrics["eval/accuracy"] == pytest.approx(1 / 7)
    assert metrics["eval/accuracy_judged"] == pytest.approx(1 / 6)
    assert metrics["eval/unscored_aborted"] == metrics["eval/reward_failures"] == 1.0
    assert metrics["eval/wrong_by_timeout"] >= 2.0
    table = capsys.readouterr().out
    assert "accuracy judged" in table and "unscored aborted" in table  # noqa: PT018
    again = made(GSM8K, reward_timeout_s=0.3, data_dir_to_save_evals=str(tmp_path / "b"))
    again.eval_rows = env.eval_rows
    rescored = await again.rescore(stored_samples(tmp_path / "a"))
    assert rescored["eval/accuracy"] == metrics["eval/accuracy"]
    pairs = paired_items(stored_samples(tmp_path / "a"), stored_samples(tmp_path / "b"))
    difference = compare(pairs)["correct"]
    assert difference.before == difference.after == pytest.approx(1 / 7)
