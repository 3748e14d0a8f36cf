"""Spans: one trace per group, nothing without an exporter, and OTLP as a collector receives it."""

import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from atroposlib.utils import tracing

Finished = Callable[[], list[ReadableSpan]]


def start_recorder(monkeypatch: pytest.MonkeyPatch) -> Finished:
    exporter = InMemorySpanExporter()
    recorder = tracing._Recorder([exporter])
    monkeypatch.setattr(tracing, "_recorder", lambda: recorder)

    def finished() -> list[ReadableSpan]:
        recorder.provider.force_flush()
        return list(exporter.get_finished_spans())

    return finished


@pytest.fixture
def finished(monkeypatch: pytest.MonkeyPatch) -> Finished:
    return start_recorder(monkeypatch)


def request_of(model: str) -> None:
    tracing.note_request(duration_s=0.25, attributes=lambda: {"gen_ai.request.model": model})


def test_each_group_of_an_item_has_a_trace_and_the_first_has_the_requests(
    finished: Finished,
) -> None:
    with tracing.item_span({"atropos.environment": "e"}):
        request_of("m")
        tracing.note_group("a", {"atropos.score_mean": 0.5})
        tracing.note_group("b", {"atropos.policy_version": None})
    tracing.note_group("outside an item", {})
    request_of("outside an item")
    found = [(s.name, f"{s.context.trace_id:032x}", dict(s.attributes or {})) for s in finished()]
    # sha256("a") and sha256("b") begin so.
    trace_a, trace_b = "ca978112ca1bbdcafac231b39a23dc4d", "3e23e8160039594a33894f6564e1b134"
    item = {"atropos.environment": "e"}
    assert found == [
        ("item", trace_a, item | {"atropos.score_mean": 0.5, "atropos.group_id": "a"}),
        ("request", trace_a, {"gen_ai.request.model": "m"}),
        ("item", trace_b, item | {"atropos.group_id": "b"}),
    ]
    request = finished()[1]
    assert request.start_time is not None
    assert request.end_time is not None
    assert request.end_time - request.start_time == pytest.approx(0.25e9, abs=1e3)


def test_items_without_a_group_say_why(finished: Finished) -> None:
    with tracing.item_span({}):
        tracing.note_group(None, {"atropos.dropped": "equal_scores"})
    with pytest.raises(ValueError, match="of the author"), tracing.item_span({}):
        raise ValueError("of the author")
    with tracing.item_span({}):
        pass
    found = finished()
    assert [dict(span.attributes or {}) for span in found] == [
        {"atropos.dropped": "equal_scores"},
        {"error.type": "ValueError"},
        {},
    ]
    assert len({span.context.trace_id for span in found}) == 3


def test_a_sampler_keeps_or_drops_a_group_in_every_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_TRACES_SAMPLER", "parentbased_traceidratio")
    monkeypatch.setenv("OTEL_TRACES_SAMPLER_ARG", "0.5")
    kept = []
    names = [f"g{i}" for i in range(40)]
    for record in ("item", "store"):
        finished = start_recorder(monkeypatch)  # of another process
        for name in names:
            if record == "item":
                with tracing.item_span({}):
                    tracing.note_group(name, {})
            else:
                tracing.record_group("store", name, began_at=1.0, attributes={})
        kept.append([span.context.trace_id for span in finished()])
    assert kept[0] == kept[1]
    assert 8 < len(kept[0]) < 32


CODE = """
import sys
from atroposlib.utils import tracing
with tracing.item_span({}):
    tracing.note_group("a", {})
tracing.record_group("store", "a", began_at=1.0, attributes={"atropos.run": "default"})
tracing.record_step(["a", None], step=3, began_at=1.0)
print(tracing.is_on(), "opentelemetry" in sys.modules)
"""


def run_code(code: str = CODE, **variables: str) -> subprocess.CompletedProcess[str]:
    clean = {name: value for name, value in os.environ.items() if not name.startswith("OTEL_")}
    command = [sys.executable, "-c", code]
    return subprocess.run(
        command, env=clean | variables, capture_output=True, text=True, check=True
    )


@pytest.mark.parametrize(
    "variables",
    [
        {},
        {"OTEL_TRACES_EXPORTER": "none", "OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:9"},
        {"OTEL_SDK_DISABLED": "true", "OTEL_TRACES_EXPORTER": "console"},
    ],
)
def test_without_an_exporter_nothing_is_imported(variables: dict[str, str]) -> None:
    assert run_code(**variables).stdout.split() == ["False", "False"]


def test_an_exporter_that_is_missing_is_named_and_the_run_continues() -> None:
    run = run_code(OTEL_TRACES_EXPORTER="jaeger")
    assert run.stdout.split()[0] == "False"
    assert "no OpenTelemetry spans are recorded: OpenTelemetry exporter 'jaeger'" in run.stderr
    hidden = "import sys; sys.modules['opentelemetry.sdk.trace'] = None\n"
    run = run_code(hidden + CODE, OTEL_TRACES_EXPORTER="console")
    assert "pip install" in run.stderr
    assert run.stderr.count("no OpenTelemetry spans") == 1


@pytest.fixture
def collector() -> Iterator[tuple[str, list[Any]]]:
    """A server that keeps the OTLP requests it receives."""
    received: list[Any] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            received.append((self.path, ExportTraceServiceRequest.FromString(body)))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    server = HTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield f"http://127.0.0.1:{server.server_address[1]}", received
    server.shutdown()
    thread.join()
    server.server_close()


def test_a_collector_receives_the_spans_when_the_process_ends(
    collector: tuple[str, list[Any]],
) -> None:
    url, received = collector
    run = run_code(OTEL_EXPORTER_OTLP_ENDPOINT=url, OTEL_SERVICE_NAME="a-hub")
    assert run.stdout.split() == ["True", "True"]
    [(path, message)] = received
    assert path == "/v1/traces"
    [resource] = message.resource_spans
    names = {a.key: a.value.string_value for a in resource.resource.attributes}
    assert names["service.name"] == "a-hub"
    spans = {span.name: span for scope in resource.scope_spans for span in scope.spans}
    assert spans.keys() == {"item", "store", "step", "train"}
    assert spans["store"].parent_span_id == spans["item"].span_id == spans["train"].parent_span_id
    assert [link.span_id for link in spans["step"].links] == [spans["item"].span_id]


def test_a_faulty_variable_does_not_stop_the_program() -> None:
    run = run_code(OTEL_TRACES_EXPORTER="console", OTEL_BSP_MAX_QUEUE_SIZE="-1")
    assert run.stdout.split()[0] == "False"
    assert "no OpenTelemetry spans are recorded: max_queue_size" in run.stderr
