"""One OpenTelemetry span for each generation, sent over OTLP. Needs the extra `otlp`; off unless an endpoint is given."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from kvboost.errors import ConfigError
from kvboost.server.usage import timing, usage

if TYPE_CHECKING:
    from kvboost.server.generation import Generation

INSTALL = "needs OpenTelemetry. Run: pip install 'kvboost[otlp]'"


class Tracing:
    """Spans carry numbers and the model's name, never text. They leave in batches, from a thread of the exporter."""

    def __init__(self, endpoint: str, model_name: str) -> None:
        """Raises `ConfigError` when the extra is missing or the endpoint is no URL."""
        if not endpoint.startswith(("http://", "https://")):
            raise ConfigError("otlp_traces_endpoint", f"got {endpoint!r}; give a URL: http://localhost:4318/v1/traces.")
        try:
            from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
            from opentelemetry.sdk.resources import Resource
            from opentelemetry.sdk.trace import TracerProvider
            from opentelemetry.sdk.trace.export import BatchSpanProcessor
        except ImportError as error:
            raise ConfigError("otlp_traces_endpoint", INSTALL) from error
        self._provider = TracerProvider(resource=Resource.create({"service.name": "kvboost"}))
        self._provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(endpoint=endpoint)))
        self._tracer = self._provider.get_tracer("kvboost")
        self._model = model_name

    def ended(self, generation: Generation) -> None:
        """Record a generation that is over. Cheap: the span is put into a queue."""
        request = generation.continuations[0].request
        now = time.time_ns()
        begin = now - int((time.perf_counter() - request.arrival_s) * 1e9)
        span = self._tracer.start_span("llm_request", start_time=begin, attributes=self._attributes(generation))
        if request.first_token_s is not None:
            first = begin + int((request.first_token_s - request.arrival_s) * 1e9)
            span.add_event("first token", timestamp=first)
        span.end(end_time=now)

    def close(self) -> None:
        """Send what is left; waits at most some seconds for the collector."""
        self._provider.shutdown()

    def _attributes(self, generation: Generation) -> dict[str, Any]:
        counts, times = usage(generation), timing(generation)
        params = generation.continuations[0].request.params
        return {
            "gen_ai.response.model": self._model,
            "gen_ai.request.max_tokens": params.max_tokens or 0,
            "gen_ai.request.temperature": params.temperature,
            "gen_ai.request.top_p": params.top_p,
            "gen_ai.request.n": params.n,
            "gen_ai.usage.prompt_tokens": counts["prompt_tokens"],
            "gen_ai.usage.completion_tokens": counts["completion_tokens"],
            "gen_ai.response.finish_reasons": [c.finish_reason or "abort" for c in generation.continuations],
            "gen_ai.latency.time_to_first_token": times["ttft_ms"] / 1e3,
            "gen_ai.latency.time_in_queue": times["queue_ms"] / 1e3,
            "gen_ai.latency.e2e": times["total_ms"] / 1e3,
            "kvboost.cached_tokens": counts["prompt_tokens_details"]["cached_tokens"],
            "kvboost.lookup_ms": times["lookup_ms"],
            "kvboost.load_ms": times["load_ms"],
            "kvboost.compute_ms": times["compute_ms"],
        }
