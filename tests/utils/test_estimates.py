"""Standard errors and intervals against their definitions, not against a copy of the formulas."""

import math
import random
from typing import Any

import pytest

from atroposlib.utils.estimates import Estimate, estimate_mean, with_estimates


@pytest.mark.parametrize(("right", "n"), [(0, 1), (1, 1), (0, 10), (3, 10), (50, 100), (999, 1000)])
def test_ends_of_the_wilson_interval_lie_1_96_standard_errors_from_the_share(
    right: int, n: int
) -> None:
    share = estimate_mean([1.0] * right + [0.0] * (n - right))
    assert share == right / n
    for end, is_open in ((share.low, right > 0), (share.high, right < n)):
        assert end is not None
        if is_open:  # at 0 and 1 the interval ends there
            distance = abs(share - end) / math.sqrt(end * (1 - end) / n)
            assert distance == pytest.approx(1.959964, abs=1e-4)
        else:
            assert end == pytest.approx(float(share), abs=1e-9)


def density_of_t(x: float, degrees: int) -> float:
    norm = math.gamma((degrees + 1) / 2) / math.sqrt(degrees * math.pi) / math.gamma(degrees / 2)
    return norm * (1 + x * x / degrees) ** (-(degrees + 1) / 2)


@pytest.mark.parametrize("n", [2, 3, 4, 5, 6, 11, 41, 201])
def test_interval_of_other_values_holds_95_percent_of_students_t(n: int) -> None:
    draw = random.Random(n)
    values = [draw.gauss(3.0, 2.0) for _ in range(n)]
    mean = estimate_mean(values)
    variance = sum((value - mean) ** 2 for value in values) / (n - 1)
    assert mean.stderr == pytest.approx(math.sqrt(variance / n))
    assert mean.low is not None
    assert mean.high is not None
    assert mean.high - mean == pytest.approx(mean - mean.low)
    half = (mean.high - mean) / math.sqrt(variance / n)
    steps = 20_000
    inside = sum(density_of_t((i + 0.5) * half / steps, n - 1) for i in range(steps)) * half / steps
    assert 2 * inside == pytest.approx(0.95, abs=2e-4)


def test_one_value_has_no_error_and_no_interval_unless_it_is_a_share() -> None:
    assert estimate_mean([0.4]).as_dict() == {"stderr": None, "low": None, "high": None, "n": 1}
    assert estimate_mean([1.0]).low == pytest.approx(0.2065, abs=1e-4)
    with pytest.raises(ValueError, match="no values"):
        estimate_mean([])


@pytest.mark.parametrize("values", [[0.5, 1.5, 4.0, 2.0], [1.0, 0.0, 0.0, 1.0, 1.0]])
def test_repeated_answers_to_an_item_add_no_certainty(values: list[float]) -> None:
    single = estimate_mean(values)
    clusters = [index for index in range(len(values)) for _ in range(7)]
    repeated = estimate_mean([values[index] for index in clusters], clusters=clusters)
    assert repeated.n == 7 * single.n
    assert repeated == pytest.approx(float(single))
    assert repeated.stderr == pytest.approx(single.stderr)
    assert repeated.high is not None
    assert single.high is not None
    assert repeated.high >= single.high - 1e-9


def test_equal_answers_count_as_often_as_there_are_items() -> None:
    clusters = [index // 8 for index in range(80)]
    assert estimate_mean([1.0] * 80, clusters=clusters).low == estimate_mean([1.0] * 10).low
    half = estimate_mean([0.0, 1.0] * 40, clusters=clusters)  # every item has the same share
    assert (half.stderr, half.low) == (0.0, estimate_mean([0.0, 1.0] * 40).low)


def test_interval_covers_the_truth_where_items_differ() -> None:
    draw = random.Random(1)
    hits = 0
    for _ in range(400):
        rates = [draw.random() for _ in range(40)]
        answers = [float(draw.random() < rate) for rate in rates for _ in range(8)]
        share = estimate_mean(answers, clusters=[i for i in range(40) for _ in range(8)])
        assert share.low is not None
        assert share.high is not None
        hits += share.low <= 0.5 <= share.high
    assert 0.92 <= hits / 400 <= 0.98  # without clusters: 0.72


SAMPLES: list[dict[str, Any]] = [
    {"correct": True, "score": 2.0, "length": 3},
    {"correct": False, "score": 4.0, "length": 5},
    {"correct": True, "score": None},
]


@pytest.mark.parametrize(
    ("name", "value", "n"),
    [
        ("eval/correct", 2 / 3, 3),
        ("eval/percent_correct", 2 / 3, 3),
        ("accuracy", 2 / 3, 3),
        ("eval/avg_score", 3.0, 2),
        ("eval/mean_length", 4, 2),
        ("eval/score", 3.1, None),  # not the mean
        ("eval/other", 3.0, None),  # no such key
        ("eval/correct", True, None),
        ("eval/correct", "2/3", None),
    ],
)
def test_metric_that_is_the_mean_of_a_value_in_the_samples_gets_its_error(
    name: str, value: Any, n: int | None
) -> None:
    found = with_estimates({name: value}, SAMPLES)[name]
    assert found == value
    assert (found.n if isinstance(found, Estimate) else None) == n
    assert with_estimates({name: value}, []) == {name: value}


def test_samples_of_any_form_are_accepted() -> None:
    odd = ["text", ["list"], None, {"score": "high"}, {"score": 1.0, "item_index": [0]}]
    assert with_estimates({"eval/score": 1.0, 5: 1.0}, odd) == {"eval/score": 1.0, 5: 1.0}  # type: ignore[dict-item]
    found = with_estimates({"eval/score": 1.0}, [*odd[:3], *odd[4:]])
    assert found["eval/score"].n == 1


def test_samples_of_one_item_form_a_cluster_and_an_estimate_stays() -> None:
    samples = [{"item_index": i // 4, "score": float(i // 4)} for i in range(8)]
    own = estimate_mean([1.0, 2.0])
    found = with_estimates({"eval/score": 0.5, "eval/mean_score": own}, samples)
    assert found["eval/score"].stderr == pytest.approx(0.5)
    assert found["eval/mean_score"] is own
