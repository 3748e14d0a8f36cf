"""The charts of a run."""

from typing import Any

from atroposlib.frontend.charts import charts_of, outliers


def step(number: int, **more: Any) -> dict[str, Any]:
    return {"step": number, "reward_mean": number / 10, "loss": None, **more}


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
    by_title = {chart.title: {c.name: c.values for c in chart.curves} for chart in charts}
    names = ["kept", "zero_advantage"]  # too_long is 0 at all steps
    assert list(by_title["sequences kept and skipped"]) == names
    assert by_title["length [trained tokens]"]["tokens_per_sequence"] == [5.0] * 3  # 30 of 6 kept


def test_a_logarithmic_chart_leaves_out_what_has_no_logarithm() -> None:
    [_, chart] = charts_of([step(i, grad_norm=[0.0, 1.0, -1.0, 2.0][i]) for i in range(4)])
    [curve] = chart.curves
    assert chart.is_log
    assert (curve.steps, curve.values) == ([1, 3], [1.0, 2.0])


def test_the_curves_of_two_runs_share_a_chart() -> None:
    [reward] = charts_of([step(1), step(2)], [step(1)])
    found = [(curve.run, curve.steps) for curve in reward.curves]
    assert found == [(0, [1, 2]), (1, [1])]


def test_outliers_are_far_from_their_neighbours() -> None:
    rising = [i + 0.3 * (i % 2) for i in range(100)]
    assert outliers(rising) == []
    assert outliers([*rising[:50], 80.0, *rising[51:]]) == [50]
    assert outliers([0.0] * 30 + [0.5] + [0.0] * 30) == [30]
    assert outliers([1.0] * 9) == outliers([1.0]) == []
