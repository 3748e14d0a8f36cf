"""The charts of a run."""

import xml.etree.ElementTree as ET
from typing import Any

import pytest

from atroposlib.errors import MissingDependency
from atroposlib.frontend.charts import charts_of

pytest.importorskip("matplotlib")


def step(number: int, **more: Any) -> dict[str, Any]:
    return {"step": number, "reward_mean": number / 10, "loss": None, **more}


def texts(svg: str) -> list[str]:
    return [element.text or "" for element in ET.fromstring(svg).iter() if "text" in element.tag]


def test_a_chart_is_drawn_for_what_the_metrics_hold() -> None:
    of_a_users_trainer = {"eval": 0.5, "reward_mean": 1.0}
    steps = [step(1), of_a_users_trainer, step(2)]
    assert [chart.title for chart in charts_of(steps)] == ["reward"]
    skipped = {"num_sequences": 8, "num_skipped_zero_advantage": 2, "num_trained_tokens": 30}
    charts = charts_of([step(i, **skipped, staleness_mean=1.0) for i in range(1, 4)])
    assert [chart.title for chart in charts] == [
        "reward",
        "length [trained tokens]",
        "staleness [steps]",
        "sequences kept and skipped",
    ]
    by_title = {chart.title: texts(chart.svg) for chart in charts}
    assert {"kept", "zero_advantage"} <= set(by_title["sequences kept and skipped"])
    assert "too_long" not in by_title["sequences kept and skipped"]
    assert "5.0" in by_title["length [trained tokens]"]  # 30 tokens of 6 kept sequences


def test_text_of_a_chart_has_the_colour_of_the_page() -> None:
    [chart] = charts_of([step(1), step(2)])
    assert chart.svg.startswith("<svg")
    assert "fill: currentColor" in chart.svg
    assert "#000000" not in chart.svg
    assert "optimizer step" in texts(chart.svg)


def test_without_matplotlib_there_are_no_charts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "matplotlib.figure", None)
    with pytest.raises(MissingDependency, match="matplotlib is not installed"):
        charts_of([step(1)])
