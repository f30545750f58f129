"""Counters and timings of the server, in Prometheus's text format."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from prometheus_client import (
    CONTENT_TYPE_LATEST,
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    disable_created_metrics,
    generate_latest,
)
from prometheus_client.process_collector import ProcessCollector

NAMESPACE = "mlx_transformer"
SECONDS = (0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 30)
SENTENCES = (1, 2, 4, 8, 16, 32, 64, 128, 256)


class Metrics:
    """A registry per server. Gauges read a value when they are scraped (`watch`)."""

    content_type = CONTENT_TYPE_LATEST

    def __init__(self) -> None:
        disable_created_metrics()  # they would double the number of series
        self.registry = registry = CollectorRegistry()
        ProcessCollector(registry=registry)  # CPU seconds, memory, open files
        count = partial(Counter, namespace=NAMESPACE, registry=registry)
        spread = partial(Histogram, namespace=NAMESPACE, registry=registry)
        self.requests = count("requests", "Requests answered.", ["path", "status"])
        self.seconds = spread("request_seconds", "From a request's body to its answer.", ["path"], buckets=SECONDS)
        self.sentences = count("sentences", "Sentences translated.")
        self.tokens = count("generated_tokens", "Tokens of the translations given out.")
        self.dropped = count("dropped_requests", "Requests whose client left before the answer.")
        self.refused = count("refused_heads", "Requests refused before they were understood.", ["status"])
        self.batch = spread("batch_sentences", "Sentences that were computed together.", buckets=SENTENCES)
        self.batch_seconds = spread("batch_seconds", "Seconds of one batch.", buckets=SECONDS)

    def watch(self, name: str, text: str, value: Callable[[], float]) -> None:
        Gauge(name, text, namespace=NAMESPACE, registry=self.registry).set_function(value)

    def on_batch(self, sentences: int, seconds: float) -> None:
        self.batch.observe(sentences)
        self.batch_seconds.observe(seconds)

    def text(self) -> bytes:
        return generate_latest(self.registry)
