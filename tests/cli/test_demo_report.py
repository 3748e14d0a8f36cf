"""Progress lines, the learning curve, the rollouts page and the claimed directory."""

import io
import json
import os
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from fastapi import FastAPI
from rich.console import Console

from atroposlib.cli import demo
from atroposlib.cli._demo import report
from atroposlib.cli._demo.evaluation import Accuracy, measure
from atroposlib.cli._demo.progress import Display
from atroposlib.cli.launch.step_metrics import sparkline
from atroposlib.cli.launch.supervisor import Program
from atroposlib.errors import ConfigError, EngineRejected, MissingDependency
from tests.api.helpers_api import serving
from tests.frontend.helpers_pages import read_page


def metrics(reward: float) -> dict[str, object]:
    return {
        "reward_mean": reward,
        "num_trained_tokens": 1500,
        "wall_s": 0.5,
        "staleness_mean": 0.0,
        "queue_size": 3,
        "logprob_gap_max": 1.5e-5,
        "num_groups": 32,
        "batch_wait_s": 0.1,
    }


def quiet_display(steps: int = 3) -> tuple[Display, io.StringIO]:
    out = io.StringIO()
    return Display(Console(file=out, width=120), num_steps=steps), out


def test_without_a_terminal_steps_are_plain_lines_with_every_figure() -> None:
    display, out = quiet_display()
    with display:
        display.show_step(metrics(0.25))
    assert out.getvalue() == (
        "step    1/3  reward 0.250  3,000 trained tok/s  staleness 0.0  queue 3  logprob gap 1.5e-05\n"
    )


def test_a_long_run_prints_few_lines_but_always_the_first_and_the_last() -> None:
    display, out = quiet_display(steps=150)
    with display:
        for _ in range(150):
            display.show_step(metrics(0.5))
    lines = out.getvalue().splitlines()
    assert len(lines) == 31
    assert lines[0].startswith("step    1/150")
    assert lines[-1].startswith("step  150/150")


def test_a_sparkline_never_exceeds_its_width() -> None:
    assert len(sparkline([0.5] * 1000, width=40)) == 40
    assert sparkline([], width=40) == ""


def test_an_engine_that_refuses_a_prompt_is_one_error_with_its_answer() -> None:
    with serving(FastAPI()) as url, pytest.raises(EngineRejected, match="answered 404"):
        measure(url, "demo", ["abcde>", "edcba>"])


def test_the_results_are_a_summary_a_learning_curve_and_the_viewers_page(tmp_path: Path) -> None:
    files = demo.DemoFiles(tmp_path)
    group = {"group_id": "g0", "scores": [0.0, 1.0], "messages": ["abcde>edcba", "abcde>abcde"]}
    files.rollouts.write_text(json.dumps(group) + "\n")
    steps = [metrics(0.1 * step) for step in range(10)]
    files.metrics.write_text(
        "".join(json.dumps(s | {"step": i}) + "\n" for i, s in enumerate(steps))
    )
    before, after = Accuracy(sampled=0.3, greedy=0.6), Accuracy(sampled=0.8, greedy=0.9)
    outcome = demo.Outcome(before=before, after=after, steps=steps, stopped_by="steps")
    summary = demo.write_summary(demo.DemoConfig(), files, outcome, costs={"cpu_seconds": 90.0})
    demo.draw(files, outcome)
    page = read_page(tmp_path / "rollouts.html")
    assert [each["id"] for each in page.groups] == ["g0"]
    assert "reverse the letters, then stop" in page.head["about"]
    assert "reward" in [chart["title"] for chart in page.head["charts"]]
    assert (tmp_path / "learning_curve.png").read_bytes().startswith(b"\x89PNG")
    assert summary == json.loads(files.summary.read_text())
    assert (summary["groups"], summary["max_logprob_gap"]) == (320, 1.5e-5)
    assert summary["cpu_seconds"] == 90.0


def test_parts_are_started_early_but_not_a_vllm_of_another_interpreter(tmp_path: Path) -> None:
    files = demo.DemoFiles(tmp_path)
    vllm = Program(name="engine", argv=["/venv/bin/python", "-m", "vllm"])
    assert demo._early(vllm, files) == replace(vllm, needs=["warm up"])
    own = Program(name="engine", argv=[sys.executable, "-m", "atroposlib.engine", "--port=1"])
    *_, after, _, module, flag = demo._early(own, files).argv
    assert (after, module, flag) == (str(files.model), "atroposlib.engine", "--port=1")


def claim(out: Path) -> None:
    display, _ = quiet_display()
    with demo._claim(out, display) as files:
        (files.root / "config.yaml").write_text("demo: {}\n")


def test_an_earlier_run_is_moved_aside_and_keeps_its_files(tmp_path: Path) -> None:
    out = tmp_path / "runs" / "demo"
    for number in range(3):
        claim(out)
        (out / "mark").write_text(str(number))
    marks = [(out.with_name(name) / "mark").read_text() for name in ("demo-1", "demo-2", "demo")]
    assert marks == ["0", "1", "2"]


def test_a_directory_that_is_no_demo_run_is_refused(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("years of work")
    with pytest.raises(ConfigError, match="not a run of the demo"):
        claim(tmp_path)
    assert (tmp_path / "thesis.tex").exists()


def test_two_demos_do_not_share_a_directory(tmp_path: Path) -> None:
    display, _ = quiet_display()
    with demo._claim(tmp_path / "demo", display):
        with pytest.raises(ConfigError, match="another process runs there"):
            claim(tmp_path / "demo")


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--engine", "vllm"], "--vllm_python"),
        (["--vllm_python", sys.executable], "--engine vllm"),
        (["--engine", "vllm", "--vllm_python", "/no/python"], "/no/python: there is no such"),
        (["--steps", "0"], "steps"),
        (["--step", "3"], "--steps"),
    ],
)
def test_bad_flags_exit_2_before_anything_starts(
    flags: list[str], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert demo.main([*flags, "--out", str(tmp_path / "demo")]) == 2
    assert said in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_a_missing_package_names_the_extra(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(demo, "_NEEDED_MODULES", ("no_such_package",))
    with pytest.raises(MissingDependency, match=r"no_such_package.*\[demo\]"):
        demo._check_prerequisites(demo.DemoConfig())


def test_a_run_is_compared_with_the_latest_of_the_other_mode(tmp_path: Path) -> None:
    figures = report.mode_figures([metrics(0.5), metrics(0.75)])  # type: ignore[arg-type]
    assert figures == {"seconds_per_step": 0.5, "trainer_waits": 0.2, "staleness_mean": 0.0}
    summary = {"asynchronous": False, "heldout_sampled_after": 0.7, **figures}
    for number, accuracy in enumerate((0.5, 0.6)):
        (tmp_path / f"demo-{number}").mkdir()
        text = json.dumps(summary | {"heldout_sampled_after": accuracy})
        (tmp_path / f"demo-{number}" / "summary.json").write_text(text)
        os.utime(tmp_path / f"demo-{number}" / "summary.json", (number, number))
    alone = report.compare_modes(tmp_path / "demo", summary)
    assert alone.splitlines()[0].count("|") == 3
    both = report.compare_modes(tmp_path / "demo", summary | {"asynchronous": True})
    cells = [[cell.strip() for cell in line.split("|")[1:-1]] for line in both.splitlines()]
    assert [*zip(*cells[:1], *cells[2:], strict=True)][1:] == [
        ("synchronous", "0.6", "0.5", "0.2", "0"),
        ("asynchronous", "0.7", "0.5", "0.2", "0"),
    ]
    assert max(map(len, both.splitlines())) < 80
