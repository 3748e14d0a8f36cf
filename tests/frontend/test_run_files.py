"""A run's directory as one page."""

import sys
from pathlib import Path
from typing import Any

import pytest

from atroposlib.errors import ConfigError
from atroposlib.frontend.run_files import find_run_files, write_run_page
from atroposlib.frontend.run_settings import compare_runs
from tests.builders.rows import write_rows
from tests.frontend.helpers_pages import Page, read_page
from tests.tiny_model import make_tiny_tokenizer

TOKENIZER = make_tiny_tokenizer()


def row(name: str, **more: Any) -> dict[str, Any]:
    tokens = TOKENIZER.encode("abc")
    return {
        "group_id": name,
        "tokens": [tokens, tokens],
        "masks": [[-100, *tokens[1:]]] * 2,
        "inference_logprobs": [[1.0, -0.5, -0.25]] * 2,
        "scores": [1.0, 0.0],
        **more,
    }


def trained(name: str, step: int, *sequences: dict[str, Any]) -> dict[str, Any]:
    return {
        "group_id": name,
        "step": step,
        "policy_version": step - 2,
        "env_id": 0,
        "sequences": list(sequences),
    }


KEPT = {
    "index": 0,
    "advantage": 0.75,
    "clip_fraction": 0.5,
    "at": [1, 2],
    "logprobs": [-0.5, -0.3],
    "sampled": [-0.5, -0.25],
    "advantages": [0.5, 1.0],
    "entropies": [0.1, 0.2],
    "clipped": [0, 1],
}
SKIPPED = {"index": 1, "skipped": "too_long"}


def names(page: Page, column: str) -> list[str | None]:
    """Return a column that holds numbers of names."""
    return [None if i < 0 else page.columns[f"{column}s"][i] for i in page.columns[column]]


def page_of(source: Path, **options: Any) -> Page:
    target = source.with_name("page.html")
    write_run_page(find_run_files(source), target, **options)
    return read_page(target)


def test_what_the_trainer_knows_joins_the_groups_by_their_id(tmp_path: Path) -> None:
    run = tmp_path / "run"
    write_rows(run / "rollouts.jsonl", *(row(f"g{i}") for i in range(4)))
    write_rows(
        run / "checkpoints" / "trained_groups.jsonl",
        trained("g2", 3, KEPT, SKIPPED),
        trained("g0", 4, {**SKIPPED, "index": 0}, SKIPPED),
        trained("of another run", 4, KEPT),
        rest='{"group_id": "g3"',
    )
    page = page_of(run)
    assert page.columns["step"] == [4, None, 3, None]
    assert page.columns["staleness"] == [1, None, 1, None]
    assert names(page, "fate") == ["too_long", "not traced", "trained", "not traced"]
    assert page.columns["gap_mean"] == [None, None, pytest.approx(0.025), None]
    first, second = page.groups[2]["sequences"]
    assert first["advantage"] == 0.75
    assert first["trainer"] == [None, -0.5, -0.3]
    assert first["sampled"] == [None, -0.5, -0.25]
    assert first["entropy"] == [None, 0.1, 0.2]
    assert first["token_advantages"] == [None, 0.5, 1.0]
    assert first["clipped"] == [None, 0, 1]
    assert second["metrics"] == {"not trained": "too_long"}
    assert page.groups[2]["policy_version"] == 1


def test_the_fates_of_all_groups_are_the_trainers_counts(tmp_path: Path) -> None:
    """Tokens are traced of one group only; a group without a line has not reached the trainer."""
    run = tmp_path / "run"
    write_rows(run / "rollouts.jsonl", *(row(f"g{i}", policy_version=1) for i in range(5)))
    fates = [("g0", "trained", 0.75), ("g1", "zero_advantage", 0.0), ("g2", "trained", 0.25)]
    lines = [
        {"group": name, "env_id": 0, "step": 3, "fate": fate, "loss_share": share}
        for name, fate, share in [("g0", "zero_advantage", 0.0), *fates, ("g3", "not_finite", 0.0)]
    ]
    write_rows(run / "checkpoints" / "group_fates.jsonl", *lines, rest='{"group": "g4"')
    write_rows(run / "checkpoints" / "trained_groups.jsonl", trained("g2", 3, KEPT, SKIPPED))
    earlier = {"group": "g0", "env_id": 0, "step": 9, "fate": "untrained", "loss_share": 0.0}
    write_rows(run / "checkpoints" / "earlier_run_1" / "group_fates.jsonl", earlier)
    page = page_of(run)
    found = ["trained", "zero_advantage", "trained", "not_finite", "not received"]
    assert names(page, "fate") == found
    assert page.columns["step"] == [3, 3, 3, 3, None]
    assert page.columns["staleness"] == [1, 1, 1, 1, None]
    assert page.columns["loss_share"] == [0.75, 0.0, 0.25, 0.0, None]
    assert "trainer" in page.groups[2]["sequences"][0]
    (run / "checkpoints" / "group_fates.jsonl").unlink()
    (run / "checkpoints" / "trained_groups.jsonl").unlink()
    assert page_of(run).columns["fates"] == []


def test_a_line_of_the_trainer_for_another_sequence_adds_no_figures_of_tokens(
    tmp_path: Path,
) -> None:
    write_rows(tmp_path / "run" / "g.jsonl", row("g0"))
    far = {**KEPT, "at": [1, 99]}
    write_rows(
        tmp_path / "run" / "trained_groups.jsonl", trained("g0", 3, far, {**KEPT, "index": 7})
    )
    [group] = page_of(tmp_path / "run").groups
    assert group["step"] == 3
    assert "trainer" not in group["sequences"][0]


HOSTILE = {
    "half a surrogate pair": '{"scores": [1], "messages": ["a\\ud800b"]}',
    "a message without content": '{"scores": [1], "tokens": [[1]], "messages": [{"role": "user"}]}',
    "a date beyond all calendars": '{"scores": [1], "messages": ["a"], "began_at": 1e300}',
    "spans of more tokens than memory holds": '{"scores": [1], "tokens": [[1]], "masks": [[1]], "weight_versions":'
    ' [[{"start": 0, "num_tokens": 1000000000000, "weight_version": "1"}]]}',
}


@pytest.mark.parametrize("line", HOSTILE.values(), ids=HOSTILE)
def test_a_malformed_field_is_left_out(tmp_path: Path, line: str) -> None:
    (tmp_path / "g.jsonl").write_text(line + "\n")
    [group] = page_of(tmp_path / "g.jsonl").groups
    assert group["sequences"][0]["score"] == 1.0
    assert group["sequences"][0]["text"] in ("a?b", "a", "", None)
    assert "began_at" not in group["facts"]
    assert "versions" not in group["sequences"][0]


@pytest.mark.parametrize("share", [0.75, 100])
def test_a_line_nested_beyond_pythons_limit_is_one_error(tmp_path: Path, share: float) -> None:
    """Near the limit it can be decoded, but its messages cannot be listed."""
    depth = int(share * sys.getrecursionlimit())
    deep = f'{{"scores": [1], "messages": {"[" * depth}{"]" * depth}}}\n'
    write_rows(tmp_path / "g.jsonl", row("g0"), rest=deep)
    with pytest.raises(ConfigError, match="nested too deeply"):
        page_of(tmp_path / "g.jsonl")


@pytest.mark.parametrize(
    "fault", [{"step": [1]}, {"sequences": [[1]]}, {"sequences": [{"at": [1]}]}], ids=str
)
def test_a_line_of_the_trainer_that_is_none_is_one_error(
    tmp_path: Path, fault: dict[str, Any]
) -> None:
    write_rows(tmp_path / "run" / "g.jsonl", row("g0"))
    write_rows(tmp_path / "run" / "t.jsonl", trained("g1", 3), {**trained("g0", 3), **fault})
    with pytest.raises(ConfigError, match="is no line of a trainer"):
        page_of(tmp_path / "run")


def test_metrics_that_are_no_numbers_are_not_drawn(tmp_path: Path) -> None:
    lines = [{"step": i, "reward_mean": 0.5, "loss": 1.0} for i in (1, 2)]
    lines += [{"step": [], "reward_mean": 0.5}, {"step": 3, "reward_mean": {}, "loss": "x"}]
    write_rows(tmp_path / "m.jsonl", *lines)
    charts = page_of(tmp_path / "m.jsonl").head["charts"]
    assert [chart["title"] for chart in charts] == ["reward", "loss"]


def test_files_are_found_by_what_they_hold(tmp_path: Path) -> None:
    run = tmp_path / "run"
    write_rows(run / "b" / "anything.jsonl", row("g1", item=7))
    write_rows(run / "a.jsonl", row("g0"), rest='{"scores": [')
    write_rows(
        run / "metrics.jsonl", {"step": 1, "reward_mean": 0.5}, {"step": 2, "reward_mean": 1.0}
    )
    write_rows(run / "evals" / "sums" / "samples.jsonl", {"score": 1.0, "item_index": 3})
    write_rows(run / "warm_up.jsonl", {"step": 1, "accuracy": 0.5})
    write_rows(run / "broken.jsonl", rest="no json\n")
    write_rows(run / "1" / "2" / "3" / "4" / "far.jsonl", row("far"))
    page = page_of(run, about="About", title="Title")
    assert page.columns["id"] == ["g0", "g1", "item-3"]
    assert page.head["title"] == "Title"
    assert page.head["about"].startswith("About. 2 optimizer steps. 3 groups, 5 sequences")
    assert [chart["title"] for chart in page.head["charts"]] == ["reward"]


def test_two_runs_share_a_page_with_what_differs_in_their_settings(tmp_path: Path) -> None:
    for name, rate, more in (("a", 1e-5, "seed: 1"), ("b", 3e-5, "parts: [x, {y: 2}]")):
        run = tmp_path / name
        write_rows(run / "g.jsonl", row("g0", environment="sums"), row("g1"))
        write_rows(run / "m.jsonl", {"step": 1, "reward_mean": rate})
        (run / "config.yaml").write_text(f"trainer: {{lr: {rate}, loss: grpo}}\n{more}\n")
    runs = [find_run_files(tmp_path / name) for name in "ab"]
    write_run_page(runs[0], tmp_path / "page.html", other=runs[1])
    page = read_page(tmp_path / "page.html")
    assert page.head["title"] == "a and b"
    assert page.head["about"].startswith("1 optimizer step and 1 optimizer step. 4 groups")
    assert page.head["compared"] == {
        "names": ["a", "b"],
        "settings": [
            ["trainer.lr", "1e-05", "3e-05"],
            ["seed", "1", None],
            ["parts.0", None, "x"],
            ["parts.1.y", None, "2"],
        ],
        "num_settings": 5,
    }
    [reward] = page.head["charts"]
    assert [(curve["run"], curve["values"]) for curve in reward["curves"]] == [
        (0, [1e-5]),
        (1, [3e-5]),
    ]
    assert page.columns["environments"] == ["a: sums", "a", "b: sums", "b"]
    assert page.columns["id"] == ["g0", "g1", "g0~2", "g1~2"]


def test_two_runs_of_the_same_name_are_called_by_their_paths(tmp_path: Path) -> None:
    for folder in "ab":
        write_rows(tmp_path / folder / "run" / "g.jsonl", row("g0"))
    compared = compare_runs(tmp_path / "a" / "run", tmp_path / "b" / "run")
    assert compared.names == [str(tmp_path / folder / "run") for folder in "ab"]
    assert (compared.settings, compared.num_settings) == ([], 0)


def test_pieces_come_from_the_tokenizer_of_a_model_in_the_directory(tmp_path: Path) -> None:
    write_rows(tmp_path / "run" / "g.jsonl", row("g0"))
    assert page_of(tmp_path / "run").chunks[0]["vocabulary"] == {}
    TOKENIZER.save_pretrained(tmp_path / "run" / "checkpoints" / "final_model")
    page = page_of(tmp_path / "run")
    assert sorted(page.chunks[0]["vocabulary"].values()) == ["a", "b", "c"]
    assert page.groups[0]["sequences"][0]["text"] == "abc"


def test_a_directory_without_files_of_a_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no such file or directory"):
        find_run_files(tmp_path / "absent")
    write_rows(tmp_path / "trained_groups.jsonl", trained("g0", 3))
    write_rows(tmp_path / "other.jsonl", {"text": "x"})
    with pytest.raises(ConfigError, match="hold no groups, samples of an evaluation or metrics"):
        find_run_files(tmp_path)


def test_a_line_that_is_no_object_is_named_and_leaves_an_earlier_page(tmp_path: Path) -> None:
    write_rows(tmp_path / "g.jsonl", row("g0"), rest="[]\n")
    (tmp_path / "page.html").write_text("earlier")
    with pytest.raises(ConfigError, match="line 2: expected a JSON object"):
        page_of(tmp_path / "g.jsonl")
    write_rows(tmp_path / "run" / "g.jsonl", row("g0"))
    write_rows(tmp_path / "run" / "trained_groups.jsonl", trained("g0", 3), rest='{"loss": NaN}\n')
    with pytest.raises(ConfigError, match="NaN.* is no line of a trainer"):
        write_run_page(find_run_files(tmp_path / "run"), tmp_path / "page.html")
    assert (tmp_path / "page.html").read_text() == "earlier"
    assert sorted(each.name for each in tmp_path.iterdir()) == ["g.jsonl", "page.html", "run"]
