"""`atropos-env rescore`: what changed, what cannot be replayed, and an exit code for a pipeline."""

import hashlib
import re
from pathlib import Path
from typing import Any

import msgspec
import pytest

from atroposlib.cli import rescore
from atroposlib.cli.environments import main
from atroposlib.cli.sft import main as sft_main
from atroposlib.runtime.replay import Replay
from atroposlib.scored_data import Strictness, check_group
from atroposlib.utils.wording import counted
from tests.builders.rows import rows_in
from tests.cli.helpers_rollouts import RIGHT, SumsFolder
from tests.frontend.helpers_pages import read_page


def rescored(sums: SumsFolder, *more: str) -> int:
    return main(["rescore", str(sums.rollouts), "--env", str(sums.env), *more])


def test_unchanged_code_exits_with_zero(
    sums: SumsFolder, capsys: pytest.CaptureFixture[str]
) -> None:
    assert rescored(sums, "--env.temperature", "0.5") == 0
    assert capsys.readouterr().out == (
        "3 of 3 groups scored again: 0 with other scores (0 of 6 sequences), 0 advantages flip\n"
    )


def test_changed_scores_and_flipped_advantages_are_listed(
    sums: SumsFolder, capsys: pytest.CaptureFixture[str]
) -> None:
    sums.write(score=f"1.0 - {RIGHT}")
    assert rescored(sums) == 1
    table = capsys.readouterr().out
    cells = [[cell.strip() for cell in line.split("|")[2:-1]] for line in table.splitlines()[2:-1]]
    assert cells[:3] == [
        ["0", "0", "1 -> 0", "0.9998 -> -0.9998", "flips"],
        ["0", "1", "0 -> 1", "-0.9998 -> 0.9998", "flips"],
        ["1", "0", "0 -> 1", "0 -> 0", ""],
    ]
    assert "3 with other scores (6 of 6 sequences), 4 advantages flip" in table


def test_changed_requests_are_counted_with_their_reason(
    sums: SumsFolder, capsys: pytest.CaptureFixture[str]
) -> None:
    sums.write(prompt="""f"Add {row['a']} and 3." if row["a"] % 2 else f"{row['a']} + 3?\"""")
    lines = sums.rollouts.read_bytes().splitlines()
    num_odd = sum(msgspec.json.decode(line)["item"]["a"] % 2 for line in lines)
    assert 0 < num_odd < 3
    assert rescored(sums) == 1
    text = capsys.readouterr().out
    assert f"{3 - num_odd} of 3 groups scored again: 0 with other scores" in text
    assert f"{counted(num_odd, 'group')} cannot be replayed: its requests changed\n" in text
    assert re.search(r"  [0-9a-f]{8}: its requests changed: 'Add \d+ and 3.' has 0 more", text)


def test_a_random_reward_is_named(sums: SumsFolder, capsys: pytest.CaptureFixture[str]) -> None:
    sums.write(score="__import__('random').random()")
    assert rescored(sums) == 1
    text = capsys.readouterr().out
    assert "| not repeatable |" in text or "| flips, not repeatable |" in text
    assert "3 of them got other scores again when scored twice: the reward is random" in text


def test_the_page_has_both_scores_of_changed_groups_first(sums: SumsFolder) -> None:
    sums.write(score="0.0")
    page = sums.folder / "page.html"
    assert rescored(sums, "--out", str(page)) == 1
    groups = read_page(page).groups
    assert [group["item_id"] for group in groups] == [0, 2, 1]
    assert [sequence["metrics"] for sequence in groups[0]["sequences"]] == [
        {"old score": 1.0, "new score": 0.0},
        {"old score": 0.0, "new score": 0.0},
    ]
    assert main(["rescore", str(sums.folder), "--env", str(sums.env), "--out", str(page)]) == 2


def test_groups_that_are_added_meanwhile_are_not_on_the_page(
    sums: SumsFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    page = sums.folder / "page.html"
    score, line = rescore.rescore, sums.rollouts.read_bytes().split(b"\n")[0] + b"\n"

    async def score_while_the_file_grows(env: Any, path: Path, **options: Any) -> rescore.Rescored:
        found = await score(env, path, **options)
        with path.open("ab") as file:
            file.write(line)
        return found

    monkeypatch.setattr(rescore, "rescore", score_while_the_file_grows)
    assert rescored(sums, "--out", str(page)) == 0
    assert "3 groups" in page.read_text()


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b"{", "line 1: "),
        (b"[]", "line 1: expected a JSON object"),
        (b"{}", "line 1: not a group: it has no scores"),
        (b"", "the file has no groups"),
    ],
)
def test_a_file_without_groups_is_refused(
    sums: SumsFolder, line: bytes, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    sums.rollouts.write_bytes(line + b"\n")
    assert rescored(sums) == 2
    assert message in capsys.readouterr().err


def test_the_groups_are_written_with_the_scores_of_today(
    sums: SumsFolder, capsys: pytest.CaptureFixture[str]
) -> None:
    before = rows_in(sums.rollouts)
    sums.write(score=f"1.0 - {RIGHT}")
    target = sums.folder / "new.jsonl"
    assert rescored(sums, "--write", str(target)) == 1
    assert capsys.readouterr().out.endswith("\n3 groups written\n")
    for old, new in zip(before, rows_in(target), strict=True):
        assert new["scores"] == [1.0 - score for score in old["scores"]]
        assert new["scored_before"] == {
            key: old[key] for key in ("scores", "environment_source", "atroposlib_version")
        }
        sums_py = hashlib.sha256(sums.env.read_bytes()).hexdigest()
        assert new["environment_source"] == {"file": "sums.py", "sha256": sums_py}
        unchanged = old.keys() - {"scores", "environment_source"}
        assert {key: new[key] for key in unchanged} == {key: old[key] for key in unchanged}
    sft = sums.folder / "sft.jsonl"
    read = ["--from-file", str(target), "--save-messages"]
    assert sft_main([str(sft), *read]) == 0
    texts = {row["messages"][-1]["content"].removesuffix("<eos>") for row in rows_in(sft)}
    assert texts == {"3!", *texts}
    assert rescored(sums, "--write", str(target)) == 2, "it would be overwritten"
    again = ["rescore", str(target), "--env", str(sums.env)]
    assert main(again) == 0, "today's scores are in the file"


def test_sequences_that_are_left_out_today_are_not_written(sums: SumsFolder) -> None:
    old = {**rows_in(sums.rollouts)[0], "advantages": [1.0, -1.0], "rollout": [0, 1]}
    new = rescore.row_of_today(Replay(row=old, scores=[None, 0.5]), None)
    assert (new["scores"], new["advantages"]) == ([0.5], None)
    assert new["scored_before"]["scores"] == old["scores"][1:]
    for key in ("tokens", "masks", "inference_logprobs", "messages", "completions", "rollout"):
        assert new[key] == old[key][1:], key
    check_group(new, strictness=Strictness.MEANING)
    today = Replay(row=old, scores=[0.5, 1.0], advantages=[[2.0], 3.0])
    assert rescore.row_of_today(today, None)["advantages"] == [[2.0], 3.0]


def test_a_group_that_todays_code_drops_is_not_written(
    sums: SumsFolder, capsys: pytest.CaptureFixture[str]
) -> None:
    sums.write(score="None if answer == '3!' else 0.5")
    target = sums.folder / "new.jsonl"
    assert rescored(sums, "--write", str(target)) == 1
    assert capsys.readouterr().out.endswith(
        "\n0 groups written, 3 left out: dropped by today's code\n"
    )


def test_a_random_reward_is_not_written(
    sums: SumsFolder, capsys: pytest.CaptureFixture[str]
) -> None:
    sums.write(score="__import__('random').random()")
    target = sums.folder / "new.jsonl"
    assert rescored(sums, "--write", str(target)) == 1
    left_out = "0 groups written, 3 left out: got other scores when scored twice\n"
    assert capsys.readouterr().out.endswith(left_out)
    assert target.read_bytes() == b""
