"""Figures for Prometheus, and one log line per request that failed or was slow.

`HubMetrics` has a registry of its own: no global state, so several applications live in one process. What the runs know
is read from them at scrape time; what only happens is observed. Labels never hold what a client made up: a
route is its template, and a run is one that exists. No line and no figure holds a token or a body.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable, Iterable, Mapping

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4, generate_latest
from prometheus_client.registry import Collector
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from atroposlib.api.http.routes import Route
from atroposlib.api.run.coordinator import Coordinator

logger = logging.getLogger(__name__)

SLOW_S = 1.0
"""Requests that take longer are logged even if they succeed, unless they asked to wait."""
HUNG_UP = 499
"""Status shown for a client that left before its answer began (nginx's number)."""
_STALENESS_BUCKETS = (0, 1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 64)
_LATENCY_BUCKETS = (0.001, 0.005, 0.01, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120)
_LAG_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 5)
_MAX_LOGGED_CHARS = 200


class HubMetrics:
    """All figures of one application. `runs` gives the open runs by name whenever it is asked."""

    content_type = CONTENT_TYPE_PLAIN_0_0_4

    def __init__(self, runs: Callable[[], Mapping[str, Coordinator]]) -> None:
        self._registry = CollectorRegistry(auto_describe=False)
        self._registry.register(_RunCollector(runs))
        self._requests = Histogram(
            "atropos_request_seconds",
            "From the request head to the end of the answer",
            ["route", "method", "status"],
            buckets=_LATENCY_BUCKETS,
            registry=self._registry,
        )
        self._staleness = Histogram(
            "atropos_delivered_staleness_versions",
            "Policy versions between sampling and delivery of a group",
            ["run"],
            buckets=_STALENESS_BUCKETS,
            registry=self._registry,
        )
        self._back_pressure = Counter(
            "atropos_back_pressure",
            "Requests that were not let in at once because the run was full",
            ["run", "outcome"],
            registry=self._registry,
        )
        self._lag = Histogram(
            "atropos_event_loop_lag_seconds",
            "How late the event loop woke a sleeper",
            buckets=_LAG_BUCKETS,
            registry=self._registry,
        )
        self._held = Gauge(
            "atropos_held_requests", "Requests held while a run is full", registry=self._registry
        )

    def observe_request(self, *, route: str, method: str, status: int, seconds: float) -> None:
        """Note an answered request. `route` is a template, never a path."""
        self._requests.labels(route, method, str(status)).observe(seconds)

    def observe_staleness(self, run: str, versions: int) -> None:
        """Note a delivered group that was sampled so many policy versions ago."""
        self._staleness.labels(run).observe(versions)

    def count_back_pressure(self, run: str, outcome: str) -> None:
        """Note what became of a request that found its run full. For `limits.Gate`."""
        self._back_pressure.labels(run, outcome).inc()

    def show_held(self, num_held: Callable[[], int]) -> None:
        """Read the number of held requests from `num_held` at scrape time."""
        self._held.set_function(num_held)

    def observe_lag(self, seconds: float) -> None:
        """Note how late the event loop woke a sleeper."""
        self._lag.observe(max(0.0, seconds))

    def forget_run(self, run: str) -> None:
        """Drop the series of a deleted run."""
        self._staleness.remove_by_labels({"run": run})
        self._back_pressure.remove_by_labels({"run": run})

    def render(self) -> bytes:
        """Return all figures in the text format, `content_type`."""
        return generate_latest(self._registry)


class _RunCollector(Collector):
    """Reads every run at scrape time."""

    def __init__(self, runs: Callable[[], Mapping[str, Coordinator]]) -> None:
        self._runs = runs

    def collect(self) -> Iterable[GaugeMetricFamily | CounterMetricFamily | HistogramMetricFamily]:
        run = ["run"]
        groups = GaugeMetricFamily(
            "atropos_groups", "Groups by where they are now", labels=["run", "place"]
        )
        fates = CounterMetricFamily(
            "atropos_group_fates",
            "Groups since the run began by what became of them; reason only for rejected",
            labels=["run", "fate", "reason"],
        )
        sequences = GaugeMetricFamily("atropos_queued_sequences", "Sequences queued", labels=run)
        queued_tokens = GaugeMetricFamily("atropos_queued_tokens", "Tokens queued", labels=run)
        queued_bytes = GaugeMetricFamily("atropos_queued_bytes", "Bytes queued", labels=run)
        staleness = HistogramMetricFamily(
            "atropos_queued_staleness_versions",
            "Policy versions that queued groups lie behind now",
            labels=run,
        )
        step = GaugeMetricFamily("atropos_step", "Current step", labels=run)
        connected = GaugeMetricFamily(
            "atropos_environments_connected", "Environments heard of lately", labels=run
        )
        leases = GaugeMetricFamily("atropos_leases", "Open leases", labels=run)
        oldest = GaugeMetricFamily(
            "atropos_oldest_lease_age_seconds", "Age of the oldest open lease", labels=run
        )
        tokens_in = CounterMetricFamily(
            "atropos_ingested_tokens", "Tokens of groups taken in", labels=run
        )
        tokens_out = CounterMetricFamily(
            "atropos_delivered_tokens", "Tokens of groups handed out", labels=run
        )
        stored = GaugeMetricFamily(
            "atropos_store_bytes", "Bytes in the store", labels=["run", "kind"]
        )
        free = GaugeMetricFamily(
            "atropos_store_free_bytes", "Bytes left before the store is full", labels=run
        )
        for name, view in self._runs().items():
            ledger = view.ledger()
            status = view.status()
            usage = view.store.usage()
            queue = view.state.queue
            for place, num_groups in [
                ("queued", ledger.queued),
                ("buffered", ledger.buffered),
                ("leased", ledger.leased),
                # May go down again: trained when a trainer resumes, dead when somebody requeues.
                ("trained", ledger.trained),
                ("dead", ledger.dead),
            ]:
                groups.add_metric([name, place], num_groups)
            for fate, num_groups in [
                ("produced", ledger.produced),
                ("expired", ledger.expired),
                ("discarded", ledger.discarded),
                ("duplicate", ledger.duplicates),
            ]:
                fates.add_metric([name, fate, ""], num_groups)
            for reason, num_groups in ledger.rejected.items():
                fates.add_metric([name, "rejected", reason], num_groups)
            sequences.add_metric([name], queue.total_sequences)
            queued_tokens.add_metric([name], queue.total_tokens)
            queued_bytes.add_metric([name], queue.total_bytes)
            if status.policy_version is not None:
                _add_staleness(staleness, name, queue.versions(), status.policy_version)
            step.add_metric([name], status.current_step)
            connected.add_metric([name], view.state.environments.num_active)
            ages = view.lease_ages_s()
            leases.add_metric([name], len(ages))
            oldest.add_metric([name], max(ages, default=0.0))
            tokens_in.add_metric([name], view.tokens_in)
            tokens_out.add_metric([name], view.tokens_out)
            stored.add_metric([name, "payload"], usage.payload_bytes)
            stored.add_metric([name, "stored"], usage.stored_bytes)
            if usage.free_bytes is not None:
                free.add_metric([name], usage.free_bytes)
        return [
            groups,
            fates,
            sequences,
            queued_tokens,
            queued_bytes,
            staleness,
            step,
            connected,
            leases,
            oldest,
            tokens_in,
            tokens_out,
            stored,
            free,
        ]


def _add_staleness(
    family: HistogramMetricFamily, run: str, versions: Mapping[int, int], current: int
) -> None:
    buckets = dict.fromkeys(_STALENESS_BUCKETS, 0)
    total = 0
    num_groups = 0
    for version, count in versions.items():
        behind = max(0, current - version)
        total += behind * count
        num_groups += count
        for bound in buckets:
            if behind <= bound:
                buckets[bound] += count
    rows = [(str(float(bound)), float(count)) for bound, count in buckets.items()]
    family.add_metric([run], [*rows, ("+Inf", num_groups)], sum_value=total)


class Observe:
    """ASGI middleware, outside of `Access`: times every request and logs those that failed or were slow."""

    def __init__(self, app: ASGIApp, metrics: HubMetrics) -> None:
        self._app = app
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        path = scope["path"]
        query = scope.get("query_string", b"")
        start = time.perf_counter()
        status = HUNG_UP
        num_bytes = 0

        async def watch(message: Message) -> None:
            nonlocal status, num_bytes
            if message["type"] == "http.response.start":
                status = message["status"]
            else:
                num_bytes += len(message.get("body", b""))
            await send(message)

        try:
            await self._app(scope, receive, watch)
        except Exception:
            status = 500
            raise
        finally:
            seconds = time.perf_counter() - start
            route: Route | None = scope.get("hub_route")
            self._metrics.observe_request(
                route="unknown" if route is None else route.template,
                method=scope["method"] if route is not None else "any",
                status=status,
                seconds=seconds,
            )
            if status >= 400 or (seconds > SLOW_S and b"wait=" not in query):
                level = logging.WARNING if status >= 500 else logging.INFO
                client = scope.get("client")
                logger.log(
                    level,
                    "request method=%s path=%s run=%s status=%d ms=%d sent=%d client=%s token=%s",
                    _logged(scope["method"]),
                    _logged(path),
                    scope.get("run", "-"),
                    status,
                    seconds * 1000,
                    num_bytes,
                    _logged(client[0]) if client else "-",
                    _logged(scope.get("token_name", "-")),
                )


def _logged(value: str) -> str:
    """Return `value` as one word on one line, whatever a client put into it.

    >>> _logged("/status")
    '/status'
    >>> _logged("/a b")
    '"/a b"'
    """
    value = value[:_MAX_LOGGED_CHARS]
    is_plain = value.isascii() and value.isprintable() and not set(value) & set(' "\\=')
    return value if is_plain and value else json.dumps(value)
