"""`atropos-env audit`: stored groups, from before the audit or from elsewhere, and an exit code for a pipeline."""

from pathlib import Path

import msgspec
import pytest

from atroposlib.cli.audit_rows import audit_file, judged_of
from atroposlib.cli.environments import main
from tests.cli.helpers_rollouts import RIGHT, SumsFolder

NUM_GROUPS = 40
GOLD = """
    def gold_answer(self, row):
        return str(row["a"] + row["b"])

    def prompt("""


def write_groups(path: Path, said: str) -> None:
    """Write groups whose first answer is rewarded: `said`, with the right result in place of X."""
    rows = [
        {
            "scores": [1.0, 0.0],
            "completions": [said.replace("X", str(n + 103)), "3!"],
            "gold_answer": str(n + 103),
            "item": {"a": n + 100, "b": 3},
            "item_id": n,
            "group_id": f"group-{n}",
        }
        for n in range(NUM_GROUPS)
    ]
    path.write_bytes(b"\n".join(map(msgspec.json.encode, rows)))


def test_an_answer_without_the_result_is_named_without_an_environment(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "rows.jsonl"
    write_groups(path, "It is X.")
    assert main(["audit", str(path)]) == 0
    assert "no alarm" in capsys.readouterr().out
    write_groups(path, "Trust me.")
    assert main(["audit", str(path)]) == 1
    assert "gold_absent: since step 1, 9 of 9 answers do not contain" in capsys.readouterr().out
    assert main(["audit", str(path), "--success", "2"]) == 0


def test_the_answer_of_a_conversation_is_the_models_last_message() -> None:
    said = [{"role": "assistant", "content": "7"}, {"role": "tool", "content": "ok"}]
    [only] = judged_of({"scores": [True], "messages": [said]})
    assert (only.text, only.score) == ("7", 1.0)
    [unscored] = judged_of({"scores": ["high"], "messages": [said]})
    assert unscored.score is None


async def test_rows_of_serve_are_told_apart_by_their_items(tmp_path: Path) -> None:
    row = {"scores": [1.0], "completions": ["I agree."], "item_id": None}
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b"\n".join(msgspec.json.encode({**row, "item": n // 2}) for n in range(6)))
    audit = await audit_file(path, env=None, success_score=1.0)
    assert audit.watches["equal_answers"].hits == 2


ALL = " ".join(str(n + 103) for n in range(NUM_GROUPS))


@pytest.mark.parametrize(
    ("score", "said", "code"),
    [(RIGHT, "X", 0), ("""float(str(row["a"] + row["b"]) in answer)""", ALL, 1)],
)
def test_the_environment_grades_the_answers_for_other_gold_answers(
    sums: SumsFolder, capsys: pytest.CaptureFixture[str], score: str, said: str, code: int
) -> None:
    sums.write(score=score)
    sums.env.write_text(sums.env.read_text().replace("\n    def prompt(", GOLD))
    path = sums.folder / "rows.jsonl"
    write_groups(path, said)
    assert main(["audit", str(path), "--env", str(sums.env)]) == code
    text = capsys.readouterr().out
    assert ("\nswap_gold: since step 2, 5 of 5 answers are paid for other" in text) == bool(code)
    [row] = [line.split("|")[2:4] for line in text.splitlines() if line.startswith("| swap_gold")]
    assert int(row[0]) > NUM_GROUPS * 0.9
    assert int(row[1]) == code * int(row[0])
