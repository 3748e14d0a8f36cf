"""Prometheus metrics, and one log line per failed or slow request.

`HubMetrics` has its own registry, so several applications can share a process. The state of the runs is read at scrape
time; events are counted as they happen. Clients cannot create label values: a route is labelled by its template, and
only existing runs are labels. No metric or log line contains a token or a body.
"""

from __future__ import annotations

import functools
import json
import logging
import time
from collections.abc import Callable, Iterator, Mapping

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4, generate_latest
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from atroposlib.api.http.routes import Route
from atroposlib.api.run.coordinator import Coordinator
from atroposlib.api.run.replica import Replica

logger = logging.getLogger(__name__)

SLOW_S = 1.0
"""Requests that take longer are logged even if they succeed, unless they ask to `wait`."""
HUNG_UP = 499
"""Status recorded if the client disconnects before the response starts (nginx's code)."""
_STALENESS_BUCKETS = (0, 1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 64)
_LATENCY_BUCKETS = (0.001, 0.005, 0.01, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120)
_LAG_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 5)
_MAX_LOGGED_CHARS = 200
_PLACES = ("queued", "buffered", "leased", "trained", "delivered_unconfirmed", "dead")


class HubMetrics:
    """All metrics of one application. `runs` returns the open runs by name."""

    content_type = CONTENT_TYPE_PLAIN_0_0_4

    def __init__(self, runs: Callable[[], Mapping[str, Coordinator]]) -> None:
        self._registry = registry = CollectorRegistry(auto_describe=False)
        registry.register(_RunCollector(runs))
        counter = functools.partial(Counter, registry=registry)
        histogram = functools.partial(Histogram, registry=registry)
        text = "From the request head to the end of the answer"
        labels = ["route", "method", "status"]
        self.requests = histogram("atropos_request_seconds", text, labels, buckets=_LATENCY_BUCKETS)
        self.staleness = histogram(
            "atropos_delivered_staleness_versions",
            "Policy versions between sampling and delivery of a group",
            ["run"],
            buckets=_STALENESS_BUCKETS,
        )
        text = "Requests that were not let in at once because the run was full"
        self.back_pressure = counter("atropos_back_pressure", text, ["run", "outcome"])
        text = "How late the event loop woke a sleeper"
        self.lag = histogram("atropos_event_loop_lag_seconds", text, buckets=_LAG_BUCKETS)
        text = "Requests passed on to the replica that owns the run: answered, failed, or without an owner"
        self.forwarded = counter("atropos_forwarded_requests", text, ["outcome"])
        self.certificate_end = Gauge(
            "atropos_certificate_expiry_timestamp_seconds",
            "When the certificate in force ends, in seconds since 1970",
            ["file"],
            registry=registry,
        )
        text = "Requests held while a run is full"
        self.held = Gauge("atropos_held_requests", text, registry=registry)

    def watch_replica(self, replica: Replica) -> None:
        """Add the metrics of one hub process among several."""
        self._registry.register(_ReplicaCollector(replica))

    def forget_run(self, run: str) -> None:
        """Drop the series of a deleted run."""
        self.staleness.remove_by_labels({"run": run})
        self.back_pressure.remove_by_labels({"run": run})

    def render(self, *, covers: Callable[[str], bool] | None = None) -> bytes:
        """Return the metrics in the text format of `content_type`: all, or only those of the runs that are covered."""
        if covers is None:
            return generate_latest(self._registry)
        registry = CollectorRegistry(auto_describe=False)
        registry.register(_SomeRuns(self._registry, covers))
        return generate_latest(registry)


class _SomeRuns(Collector):
    """What a registry has about some runs; series without a run are about the process, thus about every run."""

    def __init__(self, registry: CollectorRegistry, covers: Callable[[str], bool]) -> None:
        self._registry = registry
        self._covers = covers

    def collect(self) -> Iterator[Metric]:
        for metric in self._registry.collect():
            metric.samples = [
                sample
                for sample in metric.samples
                if "run" in sample.labels and self._covers(sample.labels["run"])
            ]
            if metric.samples:
                yield metric


class _RunCollector(Collector):
    """Reads every run at scrape time."""

    def __init__(self, runs: Callable[[], Mapping[str, Coordinator]]) -> None:
        self._runs = runs

    def collect(self) -> Iterator[Metric]:
        families: dict[str, GaugeMetricFamily | CounterMetricFamily] = {}

        def show(
            kind: type[GaugeMetricFamily | CounterMetricFamily],
            name: str,
            text: str,
            value: float | None,
            /,
            **labels: str,
        ) -> None:
            family = families.setdefault(name, kind(name, text, labels=["run", *labels]))
            if value is not None:
                family.add_metric([run_name, *labels.values()], value)

        gauge = functools.partial(show, GaugeMetricFamily)
        counter = functools.partial(show, CounterMetricFamily)
        staleness = HistogramMetricFamily(
            "atropos_queued_staleness_versions",
            "Policy versions that queued groups lie behind now",
            labels=["run"],
        )
        for run_name, run in self._runs().items():
            ledger, status, usage = run.ledger(), run.status(), run.store.usage()
            queue, ages_s, times = run.state.queue, run.lease_ages_s(), run.state.trainer_times
            # Gauges, since they can fall: trained when a trainer resumes, dead when groups are requeued.
            for place in _PLACES:
                text = "Groups by where they are now"
                gauge("atropos_groups", text, getattr(ledger, place), place=place)
            fates = [
                (name, "", getattr(ledger, name)) for name in ("produced", "expired", "discarded")
            ]
            fates.append(("duplicate", "", ledger.duplicates))
            fates += [("rejected", reason, count) for reason, count in ledger.rejected.items()]
            for fate, reason, num_groups in fates:
                text = "Groups since the run began by what became of them; reason only for rejected"
                counter("atropos_group_fates", text, num_groups, fate=fate, reason=reason)
            for kind, num_bytes in ("payload", usage.payload_bytes), ("stored", usage.stored_bytes):
                gauge("atropos_store_bytes", "Bytes in the store", num_bytes, kind=kind)
            if status.policy_version is not None:
                _add_staleness(staleness, run_name, queue.versions(), status.policy_version)
            gauge("atropos_queued_sequences", "Sequences queued", queue.total_sequences)
            gauge("atropos_queued_tokens", "Tokens queued", queue.total_tokens)
            gauge("atropos_queued_bytes", "Bytes queued", queue.total_bytes)
            gauge("atropos_step", "Current step", status.current_step)
            text = "Steps that trainers resumed from and the hub does not know, as after a restore"
            gauge("atropos_unknown_steps", text, run.state.unknown_steps)
            text = "Environments that called the hub within the environment timeout"
            gauge("atropos_environments_connected", text, run.state.environments.num_active)
            gauge("atropos_leases", "Open leases", len(ages_s))
            text = "Answers that the audit of connected environments suspects"
            gauge("atropos_suspicious_answers", text, run.state.environments.num_suspicious)
            text = "Age of the oldest open lease"
            gauge("atropos_oldest_lease_age_seconds", text, max(ages_s, default=0.0))
            text = "Bytes left before the store is full"
            gauge("atropos_store_free_bytes", text, usage.free_bytes)
            text = "Whether groups are refused for want of space"
            gauge("atropos_store_full", text, run.refusal() is not None)
            text = "Lower quartile of the trainer's last steps, without waiting; 0: none yet"
            gauge("atropos_trainer_step_seconds", text, times.step_s or 0.0)
            gauge("atropos_set_aside_runs", "Earlier experiments kept", len(run.set_aside_bytes))
            gauge("atropos_set_aside_bytes", "Their stored bytes", sum(run.set_aside_bytes))
            text = "Earlier experiments deleted, as asked, since the run was opened"
            counter("atropos_set_aside_deleted", text, run.num_set_aside_deleted)
            counter("atropos_ingested_tokens", "Tokens of groups taken in", run.tokens_in)
            counter("atropos_delivered_tokens", "Tokens of delivered groups", run.tokens_out)
            text = "Time the trainer waited for batches, since the hub started"
            counter("atropos_trainer_wait_seconds", text, times.waited_s)
        yield from (*families.values(), staleness)


class _ReplicaCollector(Collector):
    """Reads the membership at scrape time."""

    def __init__(self, replica: Replica) -> None:
        self._replica = replica

    def collect(self) -> Iterator[Metric]:
        members = self._replica.owned_runs()
        yield GaugeMetricFamily(
            "atropos_owned_runs", "Runs that this replica serves", len(self._replica.hub.runs)
        )
        yield CounterMetricFamily(
            "atropos_takeovers",
            "Runs taken over from a replica that had stopped renewing",
            self._replica.num_takeovers,
        )
        yield GaugeMetricFamily(
            "atropos_replicas", "Living replicas", sum(member.is_alive for member, _ in members)
        )


def _add_staleness(
    family: HistogramMetricFamily, run: str, versions: Mapping[int, int], current: int
) -> None:
    """Add the queued groups of a run; `versions` counts them by the version that sampled them."""
    behind = {version: max(0, current - version) for version in versions}
    buckets = [
        (str(float(bound)), sum(n for version, n in versions.items() if behind[version] <= bound))
        for bound in _STALENESS_BUCKETS
    ]
    total = sum(behind[version] * n for version, n in versions.items())
    family.add_metric([run], [*buckets, ("+Inf", sum(versions.values()))], sum_value=total)


class Observe:
    """ASGI middleware, outside of `Access`: times every request and logs those that failed or were slow."""

    def __init__(self, app: ASGIApp, metrics: HubMetrics) -> None:
        self._app = app
        self._timer = functools.cache(metrics.requests.labels)

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
            known = ("unknown", "any") if route is None else (route.template, scope["method"])
            self._timer(*known, status).observe(seconds)
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
    """Return `value`, truncated and quoted unless it is one plain word, so that clients cannot forge log fields.

    >>> _logged("/status")
    '/status'
    >>> _logged("/a b")
    '"/a b"'
    """
    value = value[:_MAX_LOGGED_CHARS]
    is_plain = value.isascii() and value.isprintable() and not set(value) & set(' "\\=')
    return value if is_plain and value else json.dumps(value)
