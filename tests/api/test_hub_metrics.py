"""Figures for Prometheus and the request log."""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any, ClassVar

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families
from starlette.types import ASGIApp, Receive, Scope, Send

from atroposlib.api.http.handlers import ROUTES
from atroposlib.api.http.metrics import HubMetrics, Observe
from atroposlib.api.http.security import Access
from atroposlib.api.stores.base import StoreUsage
from tests.api.helpers_api import unexpected_receive, unexpected_send

LEDGER = {
    "produced": 100,
    "queued": 7,
    "buffered": 2,
    "leased": 3,
    "trained": 57,
    "delivered_unconfirmed": 3,
    "expired": 5,
    "dead": 1,
    "discarded": 4,
    "rejected": {"invalid": 10, "empty": 8},
    "duplicates": 11,
}


def showing(**runs: Run) -> HubMetrics:
    shown: Any = runs
    return HubMetrics(lambda: shown)


class Run:
    """What a coordinator shows."""

    tokens_in = 5000
    tokens_out = 3000
    set_aside_bytes: ClassVar = [100, 50]
    num_set_aside_deleted = 4
    store = SimpleNamespace(
        usage=lambda: StoreUsage(payload_bytes=10_000, stored_bytes=16_384, free_bytes=None)
    )
    state = SimpleNamespace(
        queue=SimpleNamespace(
            total_sequences=14,
            total_tokens=1400,
            total_bytes=9000,
            versions=lambda: {10: 4, 7: 2, -40: 1},
        ),
        environments=SimpleNamespace(num_active=2, num_suspicious=7),
        trainer_times=SimpleNamespace(step_s=2.5, waited_s=30.0),
        unknown_steps=5,
    )

    def __init__(self, policy_version: int | None = 10) -> None:
        self._status = SimpleNamespace(current_step=6, queue_size=7, policy_version=policy_version)

    def ledger(self) -> Any:
        return SimpleNamespace(**LEDGER)

    def status(self) -> Any:
        return self._status

    def refusal(self) -> None:
        return None

    def lease_ages_s(self) -> list[float]:
        return [3.0, 41.5]


def samples(metrics: HubMetrics) -> dict[str, float]:
    """Name and labels -> value, of a whole scrape."""
    found = {}
    for family in text_string_to_metric_families(metrics.render().decode()):
        for sample in family.samples:
            labels = ",".join(f"{key}={value}" for key, value in sorted(sample.labels.items()))
            key = f"{sample.name}{{{labels}}}"
            assert key not in found
            found[key] = sample.value
    return found


def test_scrape_shows_every_run_and_its_ledger_adds_up() -> None:
    found = samples(showing(default=Run(), math=Run()))
    assert found["atropos_groups{place=queued,run=default}"] == 7
    assert found["atropos_groups{place=leased,run=math}"] == 3
    assert found["atropos_group_fates_total{fate=rejected,reason=invalid,run=math}"] == 10
    assert found["atropos_group_fates_total{fate=duplicate,reason=,run=math}"] == 11
    produced = found["atropos_group_fates_total{fate=produced,reason=,run=math}"]
    parts = [
        value
        for key, value in found.items()
        if key.startswith(("atropos_groups{", "atropos_group_fates_total{"))
        and "run=math" in key
        and "produced" not in key
        and "duplicate" not in key
    ]
    assert produced == sum(parts) == 100


def test_scrape_shows_queue_leases_tokens_and_store() -> None:
    found = samples(showing(math=Run()))
    expected = {
        "atropos_queued_sequences{run=math}": 14,
        "atropos_queued_tokens{run=math}": 1400,
        "atropos_queued_bytes{run=math}": 9000,
        "atropos_environments_connected{run=math}": 2,
        "atropos_suspicious_answers{run=math}": 7,
        "atropos_step{run=math}": 6,
        "atropos_unknown_steps{run=math}": 5,
        "atropos_set_aside_runs{run=math}": 2,
        "atropos_set_aside_bytes{run=math}": 150,
        "atropos_set_aside_deleted_total{run=math}": 4,
        "atropos_leases{run=math}": 2,
        "atropos_oldest_lease_age_seconds{run=math}": 41.5,
        "atropos_ingested_tokens_total{run=math}": 5000,
        "atropos_delivered_tokens_total{run=math}": 3000,
        "atropos_store_bytes{kind=payload,run=math}": 10_000,
        "atropos_store_bytes{kind=stored,run=math}": 16_384,
    }
    assert {key: found.get(key) for key in expected} == expected
    assert found["atropos_store_full{run=math}"] == 0
    assert "atropos_store_free_bytes{run=math}" not in found  # not bounded is not zero


def test_queued_staleness_is_a_cumulative_histogram_of_groups() -> None:
    found = samples(showing(math=Run()))
    name = "atropos_queued_staleness_versions"
    at_most = {
        bound: found[f"{name}_bucket{{le={bound},run=math}}"]
        for bound in ("0.0", "2.0", "3.0", "32.0", "64.0", "+Inf")
    }
    assert at_most == {"0.0": 4, "2.0": 4, "3.0": 6, "32.0": 6, "64.0": 7, "+Inf": 7}
    assert found[f"{name}_count{{run=math}}"] == 7
    assert found[f"{name}_sum{{run=math}}"] == 2 * 3 + 50


def test_without_a_policy_version_nothing_is_stale() -> None:
    found = samples(showing(math=Run(policy_version=None)))
    assert not [key for key in found if key.startswith("atropos_queued_staleness")]


def test_observed_figures_are_shown_until_their_run_is_forgotten() -> None:
    metrics = HubMetrics(dict)
    for run in ("math", "code"):
        metrics.staleness.labels(run).observe(3)
        metrics.back_pressure.labels(run, "refused").inc()
        metrics.back_pressure.labels(run, "refused").inc()
    metrics.lag.observe(0.004)
    metrics.held.set_function(lambda: 5)
    found = samples(metrics)
    assert found["atropos_delivered_staleness_versions_bucket{le=2.0,run=math}"] == 0
    assert found["atropos_delivered_staleness_versions_bucket{le=3.0,run=math}"] == 1
    assert found["atropos_back_pressure_total{outcome=refused,run=math}"] == 2
    assert found["atropos_event_loop_lag_seconds_count{}"] == 1
    assert found["atropos_event_loop_lag_seconds_sum{}"] == 0.004
    assert found["atropos_held_requests{}"] == 5
    metrics.forget_run("math")
    metrics.forget_run("never seen")
    found = samples(metrics)
    assert [key for key in found if "run=math" in key] == []
    assert found["atropos_back_pressure_total{outcome=refused,run=code}"] == 2


# Requests


def answering(status: int) -> ASGIApp:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        scope["token_name"] = "ops"
        await send({"type": "http.response.start", "status": status, "headers": []})
        await send({"type": "http.response.body", "body": b"12345"})

    return app


async def call(
    app: ASGIApp, method: str, path: str, *, address: str = "10.0.0.7"
) -> httpx.Response:
    transport = httpx.ASGITransport(app, raise_app_exceptions=False, client=(address, 1))
    async with httpx.AsyncClient(transport=transport, base_url="http://hub") as http:
        return await http.request(method, path)


def lines(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [r.getMessage() for r in caplog.records if r.name == "atroposlib.api.http.metrics"]


async def test_requests_are_counted_by_template_whatever_the_path(
    caplog: pytest.LogCaptureFixture,
) -> None:
    metrics = HubMetrics(dict)
    app = Observe(Access(answering(404), ROUTES, None), metrics)
    for number in range(20):
        await call(app, "POST", f"/runs/r{number}/batches/{number}/ack")
        await call(app, "GET", f"/nothing/{number}")
        await call(app, f"VERB{number}", "/status")
    counts = {
        key: value
        for key, value in samples(metrics).items()
        if key.startswith("atropos_request_seconds_count")
    }
    name = "atropos_request_seconds_count"
    assert counts == {
        f"{name}{{method=POST,route=/batches/{{batch_id}}/ack,status=404}}": 20,
        f"{name}{{method=any,route=unknown,status=404}}": 20,
        f"{name}{{method=any,route=unknown,status=405}}": 20,
    }


async def test_only_failed_requests_are_logged_each_in_one_line(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO)
    for status in (200, 307, 422, 503):
        await call(Observe(answering(status), HubMetrics(dict)), "GET", "/status?key=hidden")
    found = lines(caplog)
    assert [line.replace(line.split(" ms=")[1].split()[0], "0") for line in found] == [
        f"request method=GET path=/status run=- status={status} ms=0 sent=5 client=10.0.0.7 token=ops"
        for status in (422, 503)
    ]
    levels = [r.levelname for r in caplog.records if r.name == "atroposlib.api.http.metrics"]
    assert levels == ["INFO", "WARNING"]


async def test_slow_requests_are_logged_unless_they_asked_to_wait(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    caplog.set_level(logging.INFO)
    monkeypatch.setattr("atroposlib.api.http.metrics.SLOW_S", -1.0)
    app = Observe(answering(200), HubMetrics(dict))
    await call(app, "GET", "/batch?wait=60")
    await call(app, "GET", "/batch")
    [line] = lines(caplog)
    assert line.startswith("request method=GET path=/batch run=- status=200 ")


async def test_a_path_and_an_address_cannot_forge_a_log_line(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO)
    app = Observe(answering(404), HubMetrics(dict))
    forged = "1.2.3.4 token=admin\nrequest status=200"  # as a proxy's header would set it
    path = "/x%0Arequest%20status=200%20token=admin%22" + "y" * 5000
    await call(app, "GET", path, address=forged)
    [line] = lines(caplog)
    assert 'client="1.2.3.4 token=admin\\nrequest status=200"' in line
    assert "\n" not in line
    assert line.startswith('request method=GET path="/x\\nrequest status=200 token=admin\\"y')
    assert len(line) < 500


async def test_handler_that_fails_is_a_500_and_its_error_goes_on() -> None:
    async def failing(scope: Scope, receive: Receive, send: Send) -> None:
        raise RuntimeError("bug")

    metrics = HubMetrics(dict)
    app = Observe(Access(failing, ROUTES, None), metrics)
    scope = {"type": "http", "method": "GET", "path": "/status", "headers": []}
    with pytest.raises(RuntimeError, match="bug"):
        await app(scope, unexpected_receive, unexpected_send)
    name = "atropos_request_seconds_count"
    assert samples(metrics)[f"{name}{{method=GET,route=/status,status=500}}"] == 1


async def test_client_that_left_before_the_answer_is_499(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)

    async def silent(scope: Scope, receive: Receive, send: Send) -> None:
        return

    scope = {"type": "http", "method": "GET", "path": "/batch", "headers": []}
    await Observe(silent, HubMetrics(dict))(scope, None, None)  # type: ignore[arg-type]
    [line] = lines(caplog)
    assert " status=499 " in line
    assert line.endswith("client=- token=-")
