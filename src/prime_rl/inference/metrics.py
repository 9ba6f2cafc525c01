"""Prometheus metrics of the server, under vLLM's names where the meaning is vLLM's.

Counts of tokens, blocks and queues are read from the backend when a scraper asks; what is observed while serving is a
few numbers a request, nothing a token.
"""

from collections.abc import Iterator

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from prime_rl.inference.backend import Backend

LATENCY_BUCKETS_S = (0.01, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0)
LABELS = ("model_name",)


class RequestMetrics:
    """What is observed once a choice."""

    def __init__(self, registry: CollectorRegistry, model_name: str) -> None:
        self._success = Counter(
            "vllm:request_success", "Finished choices.", (*LABELS, "finished_reason"), registry=registry
        )
        self._first_token = Histogram(
            "vllm:time_to_first_token_seconds",
            "Time from the request to its first token.",
            LABELS,
            buckets=LATENCY_BUCKETS_S,
            registry=registry,
        ).labels(model_name)
        self._latency = Histogram(
            "vllm:e2e_request_latency_seconds",
            "Time from the request to its last token.",
            LABELS,
            buckets=LATENCY_BUCKETS_S,
            registry=registry,
        ).labels(model_name)
        self._model_name = model_name

    def first_token(self, seconds: float) -> None:
        """A choice got its first token this long after its request."""
        self._first_token.observe(seconds)

    def finished(self, reason: str, seconds: float) -> None:
        """A choice ended this long after its request."""
        self._success.labels(self._model_name, str(reason)).inc()
        self._latency.observe(seconds)


class BackendCollector:
    """The backend's own counts, read at scrape time."""

    def __init__(self, backend: Backend, model_name: str) -> None:
        self._backend = backend
        self._model_name = model_name

    def collect(self) -> Iterator[Metric]:
        """One metric family after the other."""
        stats = self._backend.stats()
        usage = stats.kv_blocks_used / stats.kv_blocks_total if stats.kv_blocks_total else 0.0
        yield self._gauge("vllm:num_requests_running", "Requests that are decoding.", stats.num_running)
        yield self._gauge("vllm:num_requests_waiting", "Requests that wait for room.", stats.num_waiting)
        yield self._gauge("vllm:kv_cache_usage_perc", "Share of the KV cache in use, 0 to 1.", usage)
        yield self._gauge("prime_rl:weights_version", "Version of the weights in use.", stats.version)
        yield self._counter("vllm:num_preemptions", "Requests put back to make room.", stats.num_preemptions)
        yield self._counter("vllm:prompt_tokens", "Prompt tokens taken in.", stats.prompt_tokens_total)
        yield self._counter("vllm:generation_tokens", "Tokens sampled.", stats.generated_tokens_total)
        yield self._counter(
            "vllm:prefix_cache_queries", "Tokens looked for in the prefix cache.", stats.prefix_query_tokens_total
        )
        yield self._counter("vllm:prefix_cache_hits", "Tokens found there.", stats.prefix_hit_tokens_total)

    def _gauge(self, name: str, text: str, value: float) -> Metric:
        family = GaugeMetricFamily(name, text, labels=LABELS)
        family.add_metric([self._model_name], value)
        return family

    def _counter(self, name: str, text: str, value: float) -> Metric:
        family = CounterMetricFamily(name, text, labels=LABELS)
        family.add_metric([self._model_name], value)
        return family


def exposition(registry: CollectorRegistry) -> bytes:
    """The registry in Prometheus' text format."""
    return generate_latest(registry)
