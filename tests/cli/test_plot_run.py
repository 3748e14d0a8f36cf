"""`atropos-grpo plot`: the picture, and what is said where there is nothing to draw."""

from pathlib import Path

import pytest

from atroposlib.cli import plot_run
from tests.builders.rows import write_rows


def test_a_run_can_be_drawn(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    lines = [{"step": i, "reward_mean": i / 10, "loss": None, "train_s": 0.5} for i in range(1, 6)]
    write_rows(tmp_path / "metrics.jsonl", *lines, rest='{"step": 6, "rew')  # a run in progress
    assert plot_run.main([str(tmp_path)]) == 0
    picture = tmp_path / "learning_curve.png"
    assert capsys.readouterr().out.strip() == str(picture)
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_a_run_without_metrics_is_refused_by_name(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert plot_run.main([str(tmp_path / "absent")]) == 2
    assert "absent: there is no such file or directory" in capsys.readouterr().err
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "rew')
    assert plot_run.main([str(tmp_path / "metrics.jsonl")]) == 2
    assert "metrics.jsonl: no metrics of a trainer's step yet" in capsys.readouterr().err
