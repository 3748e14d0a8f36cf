"""The index that is read without decoding tokens is the one of the whole page."""

import json
import logging
from pathlib import Path
from typing import Any

import pytest

from atroposlib.errors import ConfigError
from atroposlib.frontend import indexed_run
from atroposlib.frontend.indexed_run import IndexedRun
from atroposlib.frontend.run_files import find_run_files, write_run_page
from tests.builders.rows import write_rows
from tests.frontend.helpers_pages import Page, read_page
from tests.frontend.test_run_files import HOSTILE, KEPT, SKIPPED, TOKENIZER, row, trained

TALK = [{"role": "user", "content": "What is\n1 + 1?"}, {"role": "assistant", "content": "2"}]
IMAGE = "data:image/png;base64,aGVsbG8="
MASKS = [[-100, 1, 2], [-100, 1, 2]]

ROWS: dict[str, dict[str, Any]] = {
    "plain": {"messages": [TALK, TALK], "item_id": 3, "item": {"q": "1 + 1"}, "environment": "a"},
    "no messages": {"item": "an item"},
    "a prompt and completions": {"prompt": TALK[:1], "completions": ["2", "3"]},
    "a prompt that is a text": {"prompt": "Q", "completions": ["2", None]},
    "a prompt that is continued": {
        "prompt": "Q",
        "completions": ["2", "3"],
        "calls": [{"continues": 0}],
    },
    "equal scores": {"scores": [1, 1]},
    "a score that is no number": {"scores": [1.0, float("nan")]},
    "a score that is a text": {"scores": ["1", "x"]},
    "more scores than sequences": {"scores": [1.0, 0.0, 0.5]},
    "fewer messages than scores": {"messages": [TALK]},
    "messages that are texts": {"messages": ["one text", "another"]},
    "a single user message": {"messages": [TALK[:1], TALK[:1]]},
    "nested messages": {"messages": [[[TALK[0]], TALK[1]], TALK]},
    "an image": {"messages": [[{"role": "user", "content": IMAGE}], TALK]},
    "masks of 0 and 1": {"masks": [[0, 1, 1], [0, 1, 1]]},
    "untrained": {"masks": [MASKS[0], [-100] * 3]},
    "trained in the middle": {"masks": [[-100, 1, -100], MASKS[0]]},
    "masks of another length": {"masks": [MASKS[0], [-100]]},
    "no masks": {"masks": None},
    "tokens that are none": {"tokens": [[1, 2.5, 3], [1, 2, 3]], "masks": MASKS},
    "nested tokens": {"tokens": [[[1], 2, 3], [1, 2, 3]], "masks": MASKS},
    "negative tokens": {"tokens": [[1, -2, 3], [1, 2, 3]], "masks": MASKS},
    "no tokens": {"tokens": [[], []], "masks": [[], []], "messages": [TALK, TALK]},
    "advantages of its own": {"advantages": [0.25, -3.0]},
    "rollouts": {"rollout": [0, 0]},
    "overrides": {"overrides": [{"set_advantage_to_zero": True}, {}]},
    "notes": {"overrides": [{"explanation": "no", "turn_rewards": [1.0, None]}, {}]},
    "a suspicion": {"overrides": [{"suspicious": "swap_gold"}, {}]},
    "examples": {"group_overrides": {"sft": True}},
    "no scores": {"scores": []},
    "an odd environment": {"environment": {"a": 1}, "policy_version": "x", "item_id": [1]},
    "the same id": {"group_id": "plain"},
    "traced": {"policy_version": 1},
    "received": {"policy_version": 1},
}


@pytest.fixture
def run(tmp_path: Path) -> Path:
    run = tmp_path / "run"
    rows = [row(name, **changes) | changes for name, changes in ROWS.items()]
    lines = "".join(HOSTILE[name] + "\n" for name in HOSTILE) + '\n{"scores": [1'
    write_rows(run / "rollouts.jsonl", *rows, rest=lines)
    write_rows(run / "more.jsonl", *(row(f"more {i}") for i in range(60)))
    write_rows(run / "metrics.jsonl", {"step": 1, "reward_mean": 0.5})
    write_rows(run / "trained_groups.jsonl", trained("traced", 3, KEPT, SKIPPED))
    fate = {"env_id": 0, "step": 3, "fate": "trained", "loss_share": 0.5}
    write_rows(
        run / "group_fates.jsonl", {"group": "traced", **fate}, {"group": "received", **fate}
    )
    return run


@pytest.mark.parametrize("tokenizer", [None, TOKENIZER])
def test_the_index_and_the_chunks_are_those_of_the_whole_page(
    run: Path, tmp_path: Path, tokenizer: Any
) -> None:
    files = find_run_files(run)
    write_run_page(files, tmp_path / "whole.html", tokenizer=tokenizer)
    whole = read_page(tmp_path / "whole.html")
    indexed = IndexedRun(files, tokenizer=tokenizer)
    (tmp_path / "served.html").write_bytes(indexed.page("chunk/", render="render"))
    served = read_page(tmp_path / "served.html")
    columns = {name: values for name, values in served.columns.items() if name != "chunk"}
    assert columns == {name: values for name, values in whole.columns.items() if name != "chunk"}
    assert served.head == {**whole.head, "chunks": "chunk/", "render": "render"}
    assert [chart["title"] for chart in served.head["charts"]] == ["reward"]
    chunks = [json.loads(indexed.chunk(i)) for i in range(max(served.columns["chunk"]) + 1)]
    assert Page(served.head, served.columns, chunks).groups == whole.groups
    assert [[each["id"] for each in chunk["groups"]] for chunk in chunks][0] == [
        name for name, i in zip(served.columns["id"], served.columns["chunk"], strict=True) if not i
    ]


def test_the_index_of_two_runs_is_that_of_their_page(run: Path, tmp_path: Path) -> None:
    write_rows(tmp_path / "other" / "g.jsonl", row("plain", environment="b"), row("received"))
    runs = find_run_files(run), find_run_files(tmp_path / "other")
    write_run_page(runs[0], tmp_path / "whole.html", other=runs[1])
    whole = read_page(tmp_path / "whole.html")
    indexed = IndexedRun(*runs)
    (tmp_path / "served.html").write_bytes(indexed.page("chunk/", render="render"))
    served = read_page(tmp_path / "served.html")
    for name in ("id", "environment", "environments", "fate", "fates", "length_correlation"):
        assert served.columns[name] == whole.columns[name]
    assert served.head["compared"]["names"] == whole.head["compared"]["names"] == ["run", "other"]
    last = json.loads(indexed.chunk(served.columns["chunk"][-1]))["groups"][-2:]
    assert last == whole.groups[-2:]
    assert [each["environment"] for each in last] == ["other: b", "other"]


def test_plain_rows_are_read_without_decoding_their_tokens(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole: list[str] = []
    view_of_row = indexed_run.view_of_row

    def counted(row: Any, **options: Any) -> Any:
        whole.append(str(row.get("group_id")))
        return view_of_row(row, **options)

    monkeypatch.setattr(indexed_run, "view_of_row", counted)
    IndexedRun(find_run_files(run))
    assert "traced" in whole
    quick = {
        "plain",
        "notes",
        "no messages",
        "equal scores",
        "trained in the middle",
        "received",
        "more 1",
    }
    assert quick.isdisjoint(whole)


def test_a_long_index_says_how_far_it_is(
    run: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(indexed_run, "PROGRESS_S", 0.0)
    with caplog.at_level(logging.INFO):
        IndexedRun(find_run_files(run))
    said = [r.getMessage() for r in caplog.records if r.getMessage().startswith("index: ")]
    assert said[0] == "index: 1 group, 0 %"
    assert said[-1].endswith(" %")


@pytest.mark.parametrize("line", ["[]\n", "x\n", '{"scores": [1}\n', '{"a": NaN, "a"}\n'])
def test_a_line_that_is_no_object_is_named(tmp_path: Path, line: str) -> None:
    write_rows(tmp_path / "g.jsonl", row("g0"), rest=line)
    with pytest.raises(ConfigError, match=r"g.jsonl, line 2: "):
        IndexedRun(find_run_files(tmp_path / "g.jsonl"))
