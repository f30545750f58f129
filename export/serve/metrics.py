"""What the server counts, in the text format of Prometheus."""

from __future__ import annotations

from collections.abc import Callable

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.process_collector import ProcessCollector

PREFIX = "mlx_transformer_"
SECONDS = (0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 30)
SENTENCES = (1, 2, 4, 8, 16, 32, 64, 128, 256)


class Metrics:
    """One registry a server. Values that the server knows anyway are read when somebody asks (`watch`)."""

    content_type = CONTENT_TYPE_LATEST

    def __init__(self) -> None:
        self.registry = registry = CollectorRegistry()
        ProcessCollector(registry=registry)  # CPU seconds, memory, open files
        self.requests = Counter(PREFIX + "requests", "Requests answered.", ["path", "status"], registry=registry)
        self.seconds = Histogram(
            PREFIX + "request_seconds",
            "From a request's body to its answer.",
            ["path"],
            buckets=SECONDS,
            registry=registry,
        )
        self.sentences = Counter(PREFIX + "sentences", "Sentences translated.", registry=registry)
        self.tokens = Counter(PREFIX + "generated_tokens", "Tokens of the translations given out.", registry=registry)
        self.dropped = Counter(
            PREFIX + "dropped_requests", "Requests whose client left before the answer.", registry=registry
        )
        self.refused = Counter(
            PREFIX + "refused_heads", "Requests refused before they were understood.", ["status"], registry=registry
        )
        self.batch = Histogram(
            PREFIX + "batch_sentences", "Sentences that were computed together.", buckets=SENTENCES, registry=registry
        )
        self.batch_seconds = Histogram(
            PREFIX + "batch_seconds", "Seconds of one batch.", buckets=SECONDS, registry=registry
        )

    def watch(self, name: str, text: str, value: Callable[[], float]) -> None:
        Gauge(PREFIX + name, text, registry=self.registry).set_function(value)

    def on_refused(self, status: int) -> None:
        self.refused.labels(status).inc()

    def on_batch(self, sentences: int, seconds: float) -> None:
        self.batch.observe(sentences)
        self.batch_seconds.observe(seconds)

    def text(self) -> bytes:
        return generate_latest(self.registry)
