"""What /metrics shows: the server's own observations, and the engine's counters as of the moment of asking."""

from __future__ import annotations

from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from sglite.protocol import RequestOutput, Usage

_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120)
_SMALL_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.04, 0.08, 0.16, 0.32, 0.64, 1.28)


class ServerMetrics:
    """One registry a server, so that several can live in one process."""

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        registry = self._registry
        self.requests = Counter(
            "sglite_requests",
            "Requests that were answered, by finish reason or error code.",
            ["outcome"],
            registry=registry,
        )
        self.queue_time = Histogram(
            "sglite_queue_seconds", "From arrival to the hand-over to the engine.", buckets=_SECONDS, registry=registry
        )
        self.first_token = Histogram(
            "sglite_time_to_first_token_seconds",
            "From arrival to the first token.",
            buckets=_SECONDS,
            registry=registry,
        )
        self.between_tokens = Histogram(
            "sglite_inter_token_seconds",
            "Between two outputs of a stream, per token.",
            buckets=_SMALL_SECONDS,
            registry=registry,
        )
        self.total_time = Histogram(
            "sglite_request_seconds", "From arrival to the last token.", buckets=_SECONDS, registry=registry
        )
        self.prompt_tokens = Counter("sglite_prompt_tokens", "Prompt tokens of finished requests.", registry=registry)
        self.cached_tokens = Counter("sglite_cached_tokens", "Of those, found in the prefix cache.", registry=registry)
        self.completion_tokens = Counter(
            "sglite_completion_tokens", "Output tokens of finished requests.", registry=registry
        )
        self.forced_tokens = Counter(
            "sglite_forced_tokens", "Of those, decided by a grammar or program.", registry=registry
        )
        self.grammar_time = Histogram(
            "sglite_grammar_compile_seconds", "Time to compile a constraint (cached ones are near 0).",
            buckets=_SECONDS, registry=registry,
        )  # fmt: skip
        self.waiting = Gauge(
            "sglite_waiting_requests", "Requests that wait for their turn at the server.", registry=registry
        )
        self.running = Gauge("sglite_running_requests", "Requests handed to the engine.", registry=registry)
        self.hit_rate = Gauge("sglite_cache_hit_rate", "cached / prompt tokens since the start.", registry=registry)
        self.kv_use = Gauge("sglite_kv_use_ratio", "Share of the KV pages that hold something.", registry=registry)
        self._engine: dict[str, Gauge] = {}

    def finished(self, output: RequestOutput) -> None:
        """Count the last output of a completion."""
        self.requests.labels(str(output.finish_reason)).inc()
        self.count(output.usage)

    def count(self, usage: Usage) -> None:
        self.prompt_tokens.inc(usage.prompt_tokens)
        self.cached_tokens.inc(usage.cached_tokens)
        self.completion_tokens.inc(usage.completion_tokens)
        self.forced_tokens.inc(usage.forced_tokens)

    def render(self, engine_stats: dict[str, Any]) -> bytes:
        """The text format. `engine_stats`: numbers by name; each becomes a gauge sglite_engine_NAME."""
        for name, value in engine_stats.items():
            if isinstance(value, int | float):
                if name not in self._engine:
                    self._engine[name] = Gauge(f"sglite_engine_{name}", "See Engine.stats().", registry=self._registry)
                self._engine[name].set(value)
        pages = engine_stats.get("pages_total", 0)
        if pages:
            self.kv_use.set(1 - engine_stats.get("pages_free", 0) / pages)
        prompt = engine_stats.get("prompt_tokens", 0)
        if prompt:
            self.hit_rate.set(engine_stats.get("cached_tokens", 0) / prompt)
        return generate_latest(self._registry)
