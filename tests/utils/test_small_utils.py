"""Selection, summaries, HTTP answers, the metrics table, and the helpers of home-made command lines."""

import itertools
import logging
import statistics
import sys
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer
from pydantic import BaseModel, Field, ValidationError

from atroposlib.utils.best_of_n_selection import select_best_index
from atroposlib.utils.cli import (
    adjust_model_defaults,
    extract_namespace,
    get_double_dash_flags,
    get_prefixed_pydantic_model,
    merge_dicts,
)
from atroposlib.utils.display import display_metrics_table, metrics_table
from atroposlib.utils.estimates import estimate_mean
from atroposlib.utils.io import parse_http_response
from atroposlib.utils.metrics import get_std_min_max_avg


@pytest.mark.parametrize("primary_higher", [True, False])
@pytest.mark.parametrize("secondary_lower", [True, False])
def test_best_index_beats_or_ties_every_other(primary_higher: bool, secondary_lower: bool) -> None:
    for primary in itertools.product([0, 1], repeat=3):
        for secondary in itertools.product([0, 1], repeat=3):
            best = select_best_index(primary, secondary, primary_higher, secondary_lower)
            top = max(primary) if primary_higher else min(primary)
            tied = [i for i in range(3) if primary[i] == top]
            seconds = [secondary[i] for i in tied]
            wanted = min(seconds) if secondary_lower else max(seconds)
            assert best == next(i for i in tied if secondary[i] == wanted)


@pytest.mark.parametrize(("primary", "secondary"), [([], []), ([1], [1, 2])])
def test_nothing_to_select_is_an_error(primary: list[float], secondary: list[float]) -> None:
    with pytest.raises(ValueError, match="primary"):
        select_best_index(primary, secondary)


def test_summary_adds_four_metrics_and_none_for_no_data() -> None:
    data = [1.0, 2.0, 4.0]
    assert get_std_min_max_avg("t", data, {"kept": 1}) == {
        "kept": 1,
        "t_mean": pytest.approx(statistics.fmean(data)),
        "t_std": pytest.approx(statistics.pstdev(data)),
        "t_max": 4.0,
        "t_min": 1.0,
    }
    assert get_std_min_max_avg("t", [], {}) == {}


async def test_http_answers_are_json_or_an_error_with_the_body_in_the_log(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def answer(request: web.Request) -> web.Response:
        return web.Response(
            status=int(request.query["status"]),
            text=request.query["body"],
            content_type="application/json",
        )

    app = web.Application()
    app.router.add_get("/", answer)
    async with TestServer(app) as server, aiohttp.ClientSession() as session:

        async def fetch(status: int, body: str) -> Any:
            params = {"status": str(status), "body": body}
            async with session.get(server.make_url("/"), params=params) as response:
                return await parse_http_response(response)

        assert await fetch(200, '{"a": 1}') == {"a": 1}
        with caplog.at_level(logging.ERROR):
            with pytest.raises(aiohttp.ClientResponseError):
                await fetch(503, "try the other door")
            with pytest.raises(ValueError):
                await fetch(200, "not json at all")
    assert "try the other door" in caplog.text
    assert "not json at all" in caplog.text


def test_metrics_table_shows_any_value_and_only_errors_that_are_known(
    capsys: pytest.CaptureFixture[str],
) -> None:
    share = estimate_mean([0.0, 1.0])
    metrics = {"eval/percent_correct": share, "eval/mean_len": 12, "note": "none", "nothing": None}
    display_metrics_table("task", metrics, 10.0, 12.5)
    header, rule, *rows, elapsed = capsys.readouterr().out.splitlines()
    assert [cell.strip() for cell in rows[0].split("|")[1:-1]] == [
        "task",
        "1",
        "none",
        "",
        "percent correct",
        "\u2191",
        "0.5000",
        "\u00b1",
        "0.5000",
        "[0.0945, 0.9055]",
        "2",
    ]
    assert [cell.strip() for cell in rows[1].split("|")[-4:-1]] == ["n/a"] * 3
    assert "mean len" in rows[1]
    assert "12.0000" in rows[1]
    assert "\u2191" not in rows[1]
    assert [row.split("|")[7].strip() for row in rows[2:]] == ["none", "None"]
    assert elapsed == "Evaluation took 2.50 seconds"
    assert len({len(line) for line in (header, rule, *rows)}) == 1
    assert metrics_table("task", {}).count("\n") == 2


class Settings(BaseModel):
    size: int = Field(default=4, ge=1)
    names: list[str] = Field(default_factory=list)


def test_prefixed_fields_keep_their_constraints() -> None:
    prefixed = get_prefixed_pydantic_model(Settings, "env.")
    assert prefixed(**{"env.size": "3"}).model_dump() == {"env.size": 3, "env.names": []}
    with pytest.raises(ValidationError):
        prefixed(**{"env.size": 0})
    assert extract_namespace(prefixed(), "env.") == {"size": 4, "names": []}


def test_defaults_are_replaced_and_the_original_left_alone() -> None:
    changed = adjust_model_defaults(Settings, Settings(size=9, names=["a"]))
    assert changed().model_dump() == {"size": 9, "names": ["a"]}
    assert issubclass(changed, Settings)
    assert Settings().size == 4
    with pytest.raises(ValidationError):
        changed(size=0)


def test_dicts_merge_recursively_and_later_ones_win() -> None:
    left = {"a": {"x": 1, "y": 1}, "b": 1}
    assert merge_dicts(left, {"a": {"y": 2}}, {"b": {"z": 3}}) == {
        "a": {"x": 1, "y": 2},
        "b": {"z": 3},
    }
    assert left == {"a": {"x": 1, "y": 1}, "b": 1}


def test_flags_are_read_from_the_command_line(monkeypatch: pytest.MonkeyPatch) -> None:
    line = "env.py serve --env.a 1 --b=-2 --c -3 --d --e None --f [1,2] --g {oops --slurm=false -x"
    monkeypatch.setattr(sys, "argv", line.split())
    assert get_double_dash_flags() == {
        "env.a": "1",
        "b": "-2",
        "c": "-3",
        "d": True,
        "e": None,
        "f": [1, 2],
        "g": "{oops",
        "slurm": "false",
    }
