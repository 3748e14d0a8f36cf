"""`atropos-sft-gen` and `atropos-dpo-gen`: which rows they write, and what they do to the hub."""

import json
import random
from collections import Counter
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi import FastAPI

from atroposlib.cli import _write_rows, dpo, sft
from atroposlib.cli._rows import texts_of
from atroposlib.cli.dpo import DpoConfig, pairs_of
from atroposlib.config import parse_flags
from atroposlib.runtime.process import process
from atroposlib.scored_data import Strictness, check_group
from tests.api.helpers_api import serving
from tests.builders.rows import rows_in, write_rows
from tests.cli.helpers_cli import TOKENIZER, HubServer, text_group
from tests.runtime.test_group_rows import Adding, ByHand, harnessed, hosted


@pytest.fixture(autouse=True)
def short_polls(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_write_rows, "WAIT_S", 0.2)


def chat(answer: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": "Q"}, {"role": "assistant", "content": answer}]


def run_sft(hub: HubServer, path: Path, *flags: str) -> int:
    common = ["--api-url", hub.url, "--group-size=2", "--tasks-per-step=1"]
    return sft.main([str(path), *common, *flags])


def run_dpo(hub: HubServer, path: Path, *flags: str) -> int:
    return dpo.main([*flags, "--api_url", hub.url, "--group_size=1", str(path)])


# Supervised training.


def test_rows_are_the_best_answers_of_every_group(
    hub: HubServer, tokenizer_path: str, tmp_path: Path
) -> None:
    path = tmp_path / "sft.jsonl"
    hub.send(text_group("Q: 2+2? A: ", ["4", "four \u00e9"], [0.5, 1.0]))
    hub.send(text_group("Q: 3? A: ", ["3", "Q: 3? A: 4"], [1.0, 0.0]))
    assert run_sft(hub, path, "--tokenizer", tokenizer_path, "--num-seqs-to-save=3") == 0
    assert rows_in(path) == [
        {"prefix": "Q: 2+2? A: ", "completion": "four \u00e9", "score": 1.0},
        {"prefix": "Q: 2+2? A: ", "completion": "4", "score": 0.5},
        {"prefix": "Q: 3? A: ", "completion": "3", "score": 1.0},
    ]
    assert hub.get("/ledger")["trained"] == 2


def test_a_prefix_that_comes_again_does_not_cut_the_text(
    hub: HubServer, tokenizer_path: str, tmp_path: Path
) -> None:
    path = tmp_path / "sft.jsonl"
    hub.send(text_group("ab", ["ab1ab", "ab2"], [1.0, 2.0]), text_group("", ["x", "y"], [1.0, 2.0]))
    assert run_sft(hub, path, "--tokenizer", tokenizer_path, "--num-seqs-to-save=4") == 0
    assert [(row["prefix"], row["completion"]) for row in rows_in(path)] == [
        ("ab", "ab2"),
        ("ab", "ab1ab"),
        ("", "y"),
        ("", "x"),
    ]


def test_the_prefix_ends_where_training_begins() -> None:
    """Equal answers, or a group of one, still have a completion."""
    group = check_group(text_group("Q", ["same", "same"], [1, 1]), strictness=Strictness.MEANING)
    found = texts_of(group, TOKENIZER.decode)
    assert found == ("Q", ["same", "same"])


def test_exactly_the_wanted_number_of_rows_is_written(
    hub: HubServer, tokenizer_path: str, tmp_path: Path
) -> None:
    path = tmp_path / "sft.jsonl"
    hub.send(*[text_group("Q", ["a", "b"], [1, 2]) for _ in range(4)])
    assert run_sft(hub, path, "--tokenizer", tokenizer_path, "--num-seqs-to-save=3") == 0
    assert len(rows_in(path)) == 3
    ledger = hub.get("/ledger")
    assert (ledger["trained"], ledger["queued"], ledger["leased"]) == (2, 2, 0)


@pytest.mark.parametrize(
    ("flags", "scores"),
    [
        ([], [3.0, 1.0]),
        (["--allow-negative-scores"], [3.0, 1.0, 0.0]),
        (["--allow-negative-scores", "--save-top-n-per-group=4"], [3.0, 1.0, 0.0, -1.0]),
        (["--save-top-n-per-group=1"], [3.0]),
        (["--minimum-score-diff-max-min=2"], [3.0]),
        (["--minimum-score-diff-max-min=1.5"], [3.0, 1.0]),
        (["--min-score=1.5"], [3.0]),
        (["--min-score=-2", "--save-top-n-per-group=4"], [3.0, 1.0, 0.0, -1.0]),
    ],
)
def test_scores_decide_what_is_saved(flags: list[str], scores: list[float]) -> None:
    config = parse_flags(sft.SftConfig, ["--filepath=x", *flags], prog="atropos-sft-gen")
    given = [1.0, -1.0, 3.0, 0.0]
    left_out = Counter[str]()
    assert [given[i] for i in sft._best(given, config, left_out)] == scores
    assert left_out.total() == len(given) - len(scores)


@pytest.mark.parametrize(
    ("flags", "answers", "summary"),
    [
        ([], "abacde", "6 rows in"),
        (["--dedup"], "abcde", "; left out: 1 (repeats an earlier row)"),
        (["--max-per-item=3"], "abade", "; left out: 1 (beyond --max-per-item)"),
        (
            ["--dedup", "--max-per-item=1", "--min-score=0.5"],
            "ad",
            "; left out: 2 (beyond --max-per-item), 1 (low score), 1 (repeats an earlier row)",
        ),
    ],
)
@pytest.mark.parametrize("item", [True, False])
def test_repeated_rows_and_rows_of_one_item_are_left_out(
    flags: list[str], answers: str, summary: str, item: bool, tmp_path: Path, capsys: Any
) -> None:
    """The item is that of the line; without it, as from a hub, what is common to the rows is."""
    lines = []
    for number, texts, scores in [(0, "ab", [1, 0.6]), (0, "ac", [1, 0.9]), (1, "de", [1, 0.4])]:
        prompt = [{"role": "system", "content": "Add."}, {"role": "user", "content": f"Q{number}"}]
        messages = [[*prompt, {"role": "assistant", "content": text}] for text in texts]
        line = text_group(f"Q{number}", list(texts), scores, messages=messages)
        lines.append({**line, "item": {"q": number}} if item else line)
    stored = write_rows(tmp_path / "g.jsonl", *lines)
    path = tmp_path / "sft"
    form = "--format=chat" if item else "--save-messages"
    assert sft.main([str(path), "--from-file", str(stored), form, *flags]) == 0
    kept = [(row.get("completion") or row["messages"])[-1]["content"] for row in rows_in(path)]
    assert "".join(kept) == answers
    assert summary in capsys.readouterr().err


def test_messages_are_saved_as_they_are_and_need_no_tokenizer(
    hub: HubServer, tmp_path: Path
) -> None:
    path = tmp_path / "sft.jsonl"
    messages = [chat("a\u2028b\x85c"), [*chat("b"), {"role": "tool", "content": None, "reward": 1}]]
    hub.send(text_group("Q", ["a", "b"], [1, 2], messages=messages))
    assert run_sft(hub, path, "--save-messages", "--num-seqs-to-save=2") == 0
    assert rows_in(path) == [
        {"messages": messages[1], "score": 2.0},
        {"messages": messages[0], "score": 1.0},
    ]


def test_groups_without_messages_are_refused_and_given_back(
    hub: HubServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "sft.jsonl"
    hub.send(text_group("Q", ["a", "b"], [1, 2], env_id=None))
    assert run_sft(hub, path, "--save-messages") == 1
    assert "no messages; run it with --env.include_messages true" in capsys.readouterr().err
    assert not path.exists()
    ledger = hub.get("/ledger")
    assert (ledger["queued"], ledger["leased"], ledger["trained"]) == (1, 0, 0)


# The file and the hub.


def test_a_file_that_exists_is_refused_before_the_hub_is_spoken_to(
    tokenizer_path: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "sft.jsonl"
    path.write_text("mine")
    flags = ["--api-url=http://127.0.0.1:1", "--tokenizer", tokenizer_path]
    assert sft.main([str(path), *flags]) == 2
    assert "exists; give another name or --append-to-previous" in capsys.readouterr().err
    assert dpo.main([str(tmp_path / "no" / "dpo.jsonl"), *flags]) == 2
    assert "cannot write" in capsys.readouterr().err
    assert path.read_text() == "mine"


def test_rows_are_added_to_a_file_on_a_line_of_their_own(hub: HubServer, tmp_path: Path) -> None:
    path = tmp_path / "sft.jsonl"
    path.write_text('{"old": 1}')
    hub.send(text_group("Q", ["a", "b"], [1, 2], messages=[chat("a"), chat("b")]))
    flags = ["--save-messages", "--append-to-previous", "--num-seqs-to-save=1"]
    assert run_sft(hub, path, *flags) == 0
    assert rows_in(path) == [{"old": 1}, {"messages": chat("b"), "score": 2.0}]


def test_a_tokenizer_that_is_not_there_names_its_flag(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "sft.jsonl"
    assert sft.main([str(path), f"--tokenizer={tmp_path}"]) == 2
    assert "local directory with --tokenizer" in capsys.readouterr().err
    assert not path.exists()


def test_a_file_is_needed(capsys: pytest.CaptureFixture[str]) -> None:
    assert sft.main([]) == 2
    assert "--filepath: a value is required" in capsys.readouterr().err


def test_a_live_run_is_joined_and_not_reset(
    hub: HubServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    hub.register(batch_size=4, wandb_project="theirs")
    messages = [chat("a"), chat("b")]
    hub.send(*[text_group("Q", ["a", "b"], [1, 2], messages=messages) for _ in range(2)])
    path = tmp_path / "sft.jsonl"
    assert run_sft(hub, path, "--save-messages", "--num-seqs-to-save=4") == 0
    assert len(rows_in(path)) == 4
    assert hub.get("/wandb_info")["project"] == "theirs"
    assert hub.get("/info")["batch_size"] == 4
    assert "this hub has a trainer" in capsys.readouterr().err


def test_a_hub_that_forgot_the_run_is_told_again(
    hub: HubServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    group = text_group("Q", ["a", "b"], [1, 2], messages=[chat("a"), chat("b")])
    hub.send(group)

    def forget(line: str) -> None:
        if line.startswith("1 of"):
            httpx.get(f"{hub.url}/reset_data")
            hub.send(group)

    monkeypatch.setattr(_write_rows, "_say", forget)
    path = tmp_path / "sft.jsonl"
    flags = ["--save-messages", "--save-top-n-per-group=1", "--num-seqs-to-save=2"]
    assert run_sft(hub, path, *flags) == 0
    assert len(rows_in(path)) == 2


def original_hub(groups: list[Any]) -> FastAPI:
    """What the commands use of the original server: no leases, JSON, errors with status 200."""
    app = FastAPI()
    app.state.registered = None
    keys = ["advantages", "ref_logprobs", "messages", "overrides", "group_overrides"]
    keys += ["images", "inference_logprobs"]

    @app.get("/info")
    async def info() -> Any:
        return {"batch_size": -1, "max_token_len": -1}

    @app.post("/register")
    async def register(body: dict[str, Any]) -> Any:
        app.state.registered = body
        return {"uuid": 2**100}

    @app.get("/batch")
    async def batch() -> Any:
        found = groups.pop(0) if groups else None
        return {"batch": None if found is None else [dict.fromkeys(keys) | found]}

    return app


def test_an_original_hub_gives_the_same_rows(tokenizer_path: str, tmp_path: Path) -> None:
    app = original_hub([text_group("Q", ["a", "b"], [1, 2]), text_group("Q", ["c", "d"], [1, 2])])
    path = tmp_path / "sft.jsonl"
    with serving(app) as url:
        flags = ["--api-url", url, "--tokenizer", tokenizer_path, "--num-seqs-to-save=3"]
        assert sft.main([str(path), *flags]) == 0
    assert [row["completion"] for row in rows_in(path)] == ["b", "a", "d"]
    registered = app.state.registered
    assert registered | {"batch_size": 128, "num_steps": 6, "starting_step": 0} == registered


# Preferences.


def test_pairs_are_a_good_and_a_bad_answer_to_one_prompt(
    hub: HubServer, tokenizer_path: str, tmp_path: Path
) -> None:
    path = tmp_path / "dpo.jsonl"
    hub.send(*[text_group(f"Q{i}: ", ["bad", "good"], [0, 1]) for i in range(4)])
    assert run_dpo(hub, path, "--tokenizer", tokenizer_path, "--num-seqs-to-save=3") == 0
    assert rows_in(path) == [
        {"prefix": f"Q{i}: ", "pos": "good", "score": 1.0, "neg": "bad"} for i in range(3)
    ]
    assert hub.get("/info")["batch_size"] == 8


def test_pairs_of_messages_are_whole_conversations(hub: HubServer, tmp_path: Path) -> None:
    path = tmp_path / "dpo.jsonl"
    messages = [chat("bad"), chat("good")]
    hub.send(*[text_group("Q", ["bad", "good"], [0, 1], messages=messages) for _ in range(4)])
    assert run_dpo(hub, path, "--save-messages", "--num-seqs-to-save=4") == 0
    assert rows_in(path) == [{"pos": chat("good"), "score": 1.0, "neg": chat("bad")}] * 4


@pytest.mark.parametrize(
    ("scores", "changes", "pairs"),
    [
        ([0, 1], {}, [(1, 0)]),
        ([1, 1], {}, []),
        ([0.6, 1], {}, []),
        ([0.5, 1], {}, []),
        ([0.4, 1], {}, [(1, 0)]),
        ([-2, -1], {}, []),
        ([-2, -1], {"allow_negative_scores": True}, [(1, 0)]),
        ([0, 0, 1], {"save_n_pairs_per_group": 1}, [(2, 1)]),
        ([0, 3, 0.1, 2], {"save_n_pairs_per_group": 2}, None),
        ([1], {}, []),
        ([], {}, []),
    ],
)
def test_pairs_are_far_enough_apart(scores: list[float], changes: Any, pairs: Any) -> None:
    config = DpoConfig(filepath=Path("x"), **changes)
    found = pairs_of(scores, config, random.Random(0))
    if pairs is None:
        assert {pair.good for pair in found} == {1, 3}
        assert {pair.bad for pair in found} == {0, 2}
    else:
        assert found == pairs


def test_pairs_are_the_same_for_the_same_seed() -> None:
    scores = [i / 10 for i in range(40)]
    config = DpoConfig(filepath=Path("x"), save_n_pairs_per_group=10)
    first, again, other = (pairs_of(scores, config, random.Random(seed)) for seed in (1, 1, 2))
    assert first == again
    assert first != other
    assert len({pair.bad for pair in first}) == 10


# Stored files.


def test_a_stored_file_gives_the_rows_that_a_hub_gives(
    hub: HubServer, tokenizer_path: str, tmp_path: Path
) -> None:
    groups = [text_group(f"Q{i}: ", ["bad", "good"], [0, 1]) for i in range(4)]
    hub.send(*groups)
    flags = ["--tokenizer", tokenizer_path, "--num-seqs-to-save=4"]
    assert run_dpo(hub, tmp_path / "of_hub.jsonl", *flags) == 0
    stored = [str(write_rows(tmp_path / f"{i}.jsonl", *groups[i : i + 2])) for i in (0, 2)]
    path = tmp_path / "of_file.jsonl"
    assert dpo.main([str(path), "--from-file", *stored, "--tokenizer", tokenizer_path]) == 0
    assert rows_in(path) == rows_in(tmp_path / "of_hub.jsonl")
    assert len(rows_in(path)) == 4


def test_files_give_all_rows_unless_a_number_is_given(tokenizer_path: str, tmp_path: Path) -> None:
    stored = write_rows(tmp_path / "g.jsonl", *[text_group("Q", ["a", "b"], [1, 2])] * 60)
    flags = ["--from-file", str(stored), "--tokenizer", tokenizer_path]
    for number, wanted in (("all", []), ("some", ["--num-seqs-to-save=7"])):
        assert sft.main([str(tmp_path / number), *flags, *wanted]) == 0
    assert len(rows_in(tmp_path / "all")) == 120
    assert len(rows_in(tmp_path / "some")) == 7


def test_a_line_that_is_no_group_is_named_and_one_that_was_cut_off_is_left_out(
    tokenizer_path: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    stored = tmp_path / "g.jsonl"
    write_rows(stored, text_group("Q", ["a", "b"], [1, 2]))
    flags = ["--from-file", str(stored), "--tokenizer", tokenizer_path]
    with stored.open("a") as file:
        file.write('{"tokens": [[1')
    assert sft.main([str(tmp_path / "whole"), *flags]) == 0
    assert len(rows_in(tmp_path / "whole")) == 2
    with stored.open("a") as file:
        file.write("\n")
    assert sft.main([str(tmp_path / "broken"), *flags]) == 2
    assert f"{stored}, line 2: not JSON" in capsys.readouterr().err
    write_rows(stored, {"has_token_ids": False, "tokens": []})
    assert sft.main([str(tmp_path / "scoreless"), *flags]) == 2
    assert f"{stored}, line 1: not a group: " in capsys.readouterr().err
    write_rows(stored, text_group("Q", ["a", "b"], [1, 2]) | {"masks": [[1], [2]]})
    assert sft.main([str(tmp_path / "misaligned"), *flags]) == 2
    assert f"{stored}, line 1: not a group: sequences[0].masks" in capsys.readouterr().err


async def test_rows_of_process_become_prompts_and_answers(tmp_path: Path) -> None:
    """Of an environment that sends conversations, and of one that leaves them to the recorded requests."""
    for env_cls in (Adding, ByHand):
        folder = tmp_path / env_cls.__name__
        stored = await process(harnessed(env_cls, folder, use_wandb=False))
        flags = ["--from-file", str(stored.path), "--format=chat"]
        prompt = json.loads(stored.path.read_text())["prompt"]
        good, bad = ([{"role": "assistant", "content": f"answer {i}"}] for i in (1, 0))
        assert sft.main([str(folder / "sft"), *flags]) == 0
        assert rows_in(folder / "sft") == [{"prompt": prompt, "completion": good, "score": 1.0}]
        assert dpo.main([str(folder / "dpo"), *flags]) == 0
        assert rows_in(folder / "dpo") == [
            {"prompt": prompt, "chosen": good, "rejected": bad}
            | {"score_chosen": 1.0, "score_rejected": 0.0}
        ]


async def test_rows_without_token_ids_have_messages_but_no_text_of_tokens(
    tokenizer_path: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    stored = await process(hosted(Adding, tmp_path))
    [row] = rows_in(stored.path)
    flags = ["--from-file", str(stored.path), "--tokenizer", tokenizer_path]
    assert sft.main([str(tmp_path / "text"), *flags]) == 1
    assert "use --save-messages or --format chat" in capsys.readouterr().err
    assert sft.main([str(tmp_path / "messages"), *flags, "--save-messages"]) == 0
    assert rows_in(tmp_path / "messages") == [{"messages": row["messages"][1], "score": 1.0}]
    assert sft.main([str(tmp_path / "chat"), *flags, "--format=chat"]) == 0
    [chat_row] = rows_in(tmp_path / "chat")
    assert chat_row["prompt"] + chat_row["completion"] == row["messages"][1]


def test_chat_rows_of_a_hub_keep_tool_calls_and_reasoning(hub: HubServer, tmp_path: Path) -> None:
    calls = [{"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}]
    answer = [
        {"role": "assistant", "content": None, "reasoning_content": "hm", "tool_calls": calls},
        {"role": "tool", "content": "1"},
        {"role": "assistant", "content": "one"},
    ]
    messages = [[*chat("?")[:1], *answer], chat("two")]
    hub.send(text_group("Q", ["a", "b"], [1, 0], messages=messages))
    path = tmp_path / "sft.jsonl"
    assert run_sft(hub, path, "--format=chat", "--num-seqs-to-save=1") == 0
    assert rows_in(path) == [{"prompt": chat("?")[:1], "completion": answer, "score": 1.0}]


def test_chat_rows_need_a_message_of_the_assistant(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    messages = [[{"role": "user", "content": "all of the text"}]] * 2
    stored = write_rows(
        tmp_path / "g.jsonl", text_group("Q", ["a", "b"], [1, 2], messages=messages)
    )
    path = tmp_path / "sft.jsonl"
    assert sft.main([str(path), "--from-file", str(stored), "--format=chat"]) == 1
    assert "without a message of the assistant" in capsys.readouterr().err
    assert not path.exists()


def test_answers_to_different_prompts_are_no_pair(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = [{"role": "user", "content": "another"}, *chat("good")[1:]]
    group = text_group("Q", ["bad", "good"], [0, 1], messages=[chat("bad"), other])
    stored = write_rows(tmp_path / "g.jsonl", group)
    assert dpo.main([str(tmp_path / "dpo"), "--from-file", str(stored), "--format=chat"]) == 0
    assert not (tmp_path / "dpo").exists()
    said = capsys.readouterr().err
    assert "no rows: no score is high enough" in said
    assert "; left out: 1 (pair with different prompts)" in said
