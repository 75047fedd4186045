"""OpenTelemetry: one trace per request, from the API to the engine. Off without `--otlp-endpoint`;
then nothing of this module is on the path but one comparison with None.

    llm_request   SERVER span, a child of the caller's `traceparent`: from arrival to the end of
                  the answer
      llm_core    one per generation (its first choice), with the events journey.QUEUED,
                  SCHEDULED, PREEMPTED, FIRST_TOKEN, FINISHED

The engine tells its times with the end of a request, and this process makes the span of them: the
core knows no tracing library. FINISHED comes exactly once on every path: by an end, an error, or
the client's leaving."""

from __future__ import annotations

import time
from typing import Any

from starlette.types import Scope

from headrace import __version__
from headrace.base.optional import require
from headrace.front.client.events import Ended, Generation
from headrace.front.server.conversation.context import Timeline

NS = 1_000_000_000


_NUM_PROMPT = ("gen_ai.usage.input_tokens", "gen_ai.usage.prompt_tokens")  # the latter: an old name


_NUM_OUTPUT = ("gen_ai.usage.output_tokens", "gen_ai.usage.completion_tokens")


class Tracer:
    """Makes the spans of requests to `model`. `exporter`: any OpenTelemetry span exporter; else
    OTLP over HTTP."""

    def __init__(self, endpoint: str, *, model: str, exporter: Any = None) -> None:
        purpose = "--otlp-endpoint"
        sdk = require("opentelemetry.sdk.trace", extra="otel", purpose=purpose)
        export = require("opentelemetry.sdk.trace.export", extra="otel", purpose=purpose)
        resources = require("opentelemetry.sdk.resources", extra="otel", purpose=purpose)
        if exporter is None:
            otlp = require(
                "opentelemetry.exporter.otlp.proto.http.trace_exporter",
                extra="otel",
                purpose=purpose,
            )
            exporter = otlp.OTLPSpanExporter(endpoint=endpoint)
        resource = resources.Resource.create(
            {"service.name": "headrace", "service.version": __version__}
        )
        self._provider = sdk.TracerProvider(resource=resource)
        self._provider.add_span_processor(export.BatchSpanProcessor(exporter))
        self._model = model
        self._tracer = self._provider.get_tracer("headrace", __version__)
        self._api = require("opentelemetry.trace", extra="otel", purpose=purpose)
        propagation = require(
            "opentelemetry.trace.propagation.tracecontext", extra="otel", purpose=purpose
        )
        self._propagator = propagation.TraceContextTextMapPropagator()

    def request(self, scope: Scope, request_id: str) -> RequestTrace:
        """The trace of one context; the caller ends it."""
        headers = {
            name.decode("latin-1"): value.decode("latin-1")
            for name, value in scope["headers"]
            if name in (b"traceparent", b"tracestate")
        }
        span = self._tracer.start_span(
            "llm_request",
            context=self._propagator.extract(headers),
            kind=self._api.SpanKind.SERVER,
            attributes={
                "http.request.method": scope.get("method", "GET"),
                "url.path": scope["path"],
                "headrace.request_id": request_id,
            },
        )
        return RequestTrace(self._tracer, self._api, span, model=self._model)

    def close(self) -> None:
        """Sends what is left."""
        self._provider.shutdown()


class RequestTrace:
    """The spans of one request."""

    def __init__(self, tracer: Any, api: Any, span: Any, *, model: str) -> None:
        self._model = model
        self._tracer = tracer
        self._api = api
        self._span = span

    def begin_core(self, generation: Generation) -> CoreTrace:
        """A generation goes to the engine."""
        context = self._api.set_span_in_context(self._span)
        attributes = _asked(generation, self._model)
        span = self._tracer.start_span("llm_core", context=context, attributes=attributes)
        span.add_event("journey.QUEUED")
        return CoreTrace(span)

    def end(self, status: int) -> None:
        """The answer is out, or its client is gone (499)."""
        self._span.set_attribute("http.response.status_code", status)
        if status >= 500:
            self._span.set_status(self._api.StatusCode.ERROR)
        self._span.end()


def _asked(generation: Generation, model: str) -> dict[str, Any]:
    """The request as attributes; what was not asked for is absent."""
    params = generation.params
    attributes = {
        "id": generation.label,
        "model": model,
        "max_tokens": params.max_tokens,
        "temperature": params.temperature,
        "top_p": params.top_p,
        "n": params.n,
    }
    return {f"gen_ai.request.{name}": v for name, v in attributes.items() if v is not None}


class CoreTrace:
    """The span of one generation in the engine; ended exactly once."""

    def __init__(self, span: Any) -> None:
        self._span = span
        self._began_ns = time.time_ns()
        self._ended = False

    def finished(self, end: Ended, timeline: Timeline, *, num_prompt: int) -> None:
        """The first choice has ended; the engine's times become events."""
        began = self._began_ns
        if end.scheduled_s is not None:
            self._span.add_event("journey.SCHEDULED", timestamp=began + int(end.scheduled_s * NS))
        for after_s in end.preempted_s:
            self._span.add_event("journey.PREEMPTED", timestamp=began + int(after_s * NS))
        if end.first_token_s is not None:
            at = began + int(end.first_token_s * NS)
            self._span.add_event("journey.FIRST_TOKEN", timestamp=at)
        self._span.set_attributes(
            {
                **dict.fromkeys(_NUM_PROMPT, num_prompt),
                **dict.fromkeys(_NUM_OUTPUT, end.num_output),
                "gen_ai.latency.time_in_queue": timeline.queue_s,
                "gen_ai.latency.time_to_first_token": timeline.total_s
                - timeline.decode_s
                - timeline.delivery_s,
                "gen_ai.latency.e2e": timeline.total_s,
                "gen_ai.latency.time_in_model_prefill": timeline.prefill_s,
                "gen_ai.latency.time_in_model_decode": timeline.decode_s,
                "gen_ai.latency.time_in_model_inference": timeline.prefill_s + timeline.decode_s,
                "headrace.num_preemptions": end.num_preemptions,
                "headrace.num_cached": end.num_cached,
                "headrace.time_for_grammar": end.hook_wait_s,
            }
        )
        self._end(end.reason)

    def lost(self, reason: str) -> None:
        """It ended without the engine's word: the client left ("abort"), or the engine failed
        ("error")."""
        self._end(reason)

    def _end(self, reason: str) -> None:
        if not self._ended:
            self._ended = True
            self._span.add_event("journey.FINISHED", {"reason": reason})
            self._span.end()
