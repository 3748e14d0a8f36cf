"""OpenTelemetry spans: environment `item` and its `request`s, hub `store` and `deliver`, trainer `train` and `step`.

All spans of a group are in one trace, whose id every process computes from the group id: no header carries it, and a
sampler by trace id (`OTEL_TRACES_SAMPLER=traceidratio`) keeps or drops a group as a whole. `step` is its own trace and
links to its groups. Spans are recorded when they have ended, because a group has its id only then.

Configured by OpenTelemetry's own variables; without `OTEL_EXPORTER_OTLP_ENDPOINT` or `OTEL_TRACES_EXPORTER` nothing is
recorded and OpenTelemetry is not imported.
"""

from __future__ import annotations

import functools
import hashlib
import logging
import os
import sys
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from importlib.metadata import entry_points
from pathlib import Path
from typing import TYPE_CHECKING

from atroposlib.errors import ConfigError, require

if TYPE_CHECKING:
    from opentelemetry.sdk.trace.export import SpanExporter
    from opentelemetry.trace import SpanContext

logger = logging.getLogger(__name__)

Attributes = Mapping[str, str | int | float | bool | None]
"""None: the span does not get the attribute."""


def is_on() -> bool:
    """Whether spans are recorded; starts the exporter at the first call."""
    return _recorder() is not None


# Hub and trainer


def record_group(
    name: str, group_id: str | None, *, began_at: float, attributes: Attributes
) -> None:
    """Record what happened to a group between `began_at` (`time.time()`) and now."""
    if group_id is not None and (recorder := _recorder()) is not None:
        parent = recorder.root_of(group_id)
        recorder.record(name, began_at, time.time(), attributes, parent=parent)


def record_step(group_ids: Iterable[str | None], *, step: int, began_at: float) -> None:
    """Record an optimizer step that ends now: `step`, which links to its groups, and `train` in each group's trace."""
    if (recorder := _recorder()) is None:
        return
    roots = [recorder.root_of(group_id) for group_id in group_ids if group_id is not None]
    ended_at, attributes = time.time(), {"atropos.step": step}
    span = recorder.record("step", began_at, ended_at, attributes, links=roots)
    for root in roots:
        recorder.record("train", began_at, ended_at, attributes, parent=root, links=[span])


# Environments


@dataclass(slots=True, kw_only=True)
class _Item:
    """An item in progress."""

    began_at: float
    requests: list[tuple[float, float, Attributes]] = field(default_factory=list)
    """When each began and ended."""
    results: list[tuple[str | None, Attributes]] = field(default_factory=list)
    """The id of each group; None if it was dropped or the item failed."""


_item: ContextVar[_Item | None] = ContextVar("item", default=None)


@contextmanager
def item_span(attributes: Attributes) -> Iterator[None]:
    """Record the block as an `item` span in the trace of each of its groups; requests are in the first group's."""
    recorder = _recorder()
    if recorder is None:
        yield
        return
    item = _Item(began_at=time.time())
    token = _item.set(item)
    try:
        yield
    except BaseException as error:
        item.results.append((None, {"error.type": type(error).__name__}))
        raise
    finally:
        _item.reset(token)
        _record_item(recorder, item, attributes)


def note_request(*, duration_s: float, attributes: Callable[[], Attributes]) -> None:
    """Add a request that ends now to the current item, if one is recorded."""
    if (item := _item.get()) is not None:
        now = time.time()
        item.requests.append((now - duration_s, now, attributes()))


def note_group(group_id: str | None, attributes: Attributes) -> None:
    """Add a group to the current item, if one is recorded; None: a dropped group."""
    if (item := _item.get()) is not None:
        item.results.append((group_id, attributes))


def _record_item(recorder: _Recorder, item: _Item, attributes: Attributes) -> None:
    ended_at = time.time()
    for group_id, more in item.results or [(None, {})]:
        root = recorder.root_of(group_id or uuid.uuid4().hex)
        described = {**attributes, **more, "atropos.group_id": group_id}
        recorder.record("item", item.began_at, ended_at, described, own=root)
        for began_at, answered_at, request in item.requests:
            recorder.record("request", began_at, answered_at, request, parent=root)
        item.requests = []


# OpenTelemetry


@functools.cache
def _recorder() -> _Recorder | None:
    """Return this process's recorder; None if no exporter is configured or installed."""
    names = _exporter_names(os.environ)
    if not names:
        return None
    try:
        require("opentelemetry.sdk.trace", extra="otel")
        return _Recorder([_exporter(name) for name in names])
    except (ImportError, ValueError) as error:
        logger.warning("no OpenTelemetry spans are recorded: %s", error)
        return None


def _exporter_names(variables: Mapping[str, str]) -> list[str]:
    """Return the exporters that OpenTelemetry's variables name.

    >>> _exporter_names({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://collector:4318"})
    ['otlp_proto_http']
    >>> _exporter_names({"OTEL_TRACES_EXPORTER": "console"}), _exporter_names({})
    (['console'], [])
    """
    endpoints = ("OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT")
    default = "otlp" if any(variables.get(name) for name in endpoints) else "none"
    if variables.get("OTEL_SDK_DISABLED", "").lower() == "true":
        return []
    named = (variables.get("OTEL_TRACES_EXPORTER") or default).split(",")
    is_grpc = variables.get("OTEL_EXPORTER_OTLP_PROTOCOL") == "grpc"
    full_names = {"otlp": "otlp_proto_grpc" if is_grpc else "otlp_proto_http"}
    return [full_names.get(name.strip(), name.strip()) for name in named if name.strip() != "none"]


def _exporter(name: str) -> SpanExporter:
    found = entry_points(group="opentelemetry_traces_exporter", name=name)
    if not found:
        raise ConfigError(f"OpenTelemetry exporter {name!r} is not installed (extra `otel`: OTLP)")
    exporter: SpanExporter = next(iter(found)).load()()
    return exporter


class _Recorder:
    """A tracer provider whose spans get the ids that are chosen for them."""

    def __init__(self, exporters: Iterable[SpanExporter]) -> None:
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
        from opentelemetry.sdk.trace.id_generator import RandomIdGenerator

        chosen: ContextVar[SpanContext | None] = ContextVar("chosen_ids", default=None)

        class ChosenIds(RandomIdGenerator):
            def generate_trace_id(self) -> int:
                ids = chosen.get()
                return super().generate_trace_id() if ids is None else ids.trace_id

            def generate_span_id(self) -> int:
                ids = chosen.get()
                return super().generate_span_id() if ids is None else ids.span_id

        resource = Resource.create()
        if str(resource.attributes["service.name"]).startswith("unknown_service"):
            resource = resource.merge(Resource({"service.name": Path(sys.argv[0]).stem}))
        self.provider = TracerProvider(resource=resource, id_generator=ChosenIds())
        for exporter in exporters:
            self.provider.add_span_processor(BatchSpanProcessor(exporter))
        self._tracer = self.provider.get_tracer("atroposlib")
        self._chosen = chosen

    def root_of(self, group_id: str) -> SpanContext:
        """Return the ids of a group's trace and of its `item` span: 16 and 8 bytes of the SHA-256 of the group id."""
        from opentelemetry.sdk.trace.sampling import Decision
        from opentelemetry.trace import SpanContext, TraceFlags

        digest = hashlib.sha256(group_id.encode()).digest()
        trace_id, span_id = int.from_bytes(digest[:16]), int.from_bytes(digest[16:24])
        decision = self.provider.sampler.should_sample(None, trace_id, "item").decision
        is_sampled = decision is Decision.RECORD_AND_SAMPLE
        flag = TraceFlags.SAMPLED if is_sampled else TraceFlags.DEFAULT
        return SpanContext(trace_id, span_id, is_remote=True, trace_flags=TraceFlags(flag))

    def record(
        self,
        name: str,
        began_at: float,
        ended_at: float,
        attributes: Attributes,
        *,
        own: SpanContext | None = None,
        parent: SpanContext | None = None,
        links: Sequence[SpanContext] = (),
    ) -> SpanContext:
        """Record a span with the ids of `own`, or under `parent`, or in a new trace; times are `time.time()`."""
        from opentelemetry.context import Context
        from opentelemetry.trace import Link, NonRecordingSpan, set_span_in_context

        context = Context()
        if parent is not None:
            context = set_span_in_context(NonRecordingSpan(parent), context)
        token = self._chosen.set(own)
        try:
            span = self._tracer.start_span(
                name,
                context,
                attributes={key: value for key, value in attributes.items() if value is not None},
                links=[Link(each) for each in links],
                start_time=int(began_at * 1e9),
            )
        finally:
            self._chosen.reset(token)
        span.end(int(ended_at * 1e9))
        return span.get_span_context()
