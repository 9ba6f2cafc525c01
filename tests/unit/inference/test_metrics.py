from prometheus_client import CollectorRegistry

from prime_rl.inference.backend import EngineStats
from prime_rl.inference.fake import FakeBackend
from prime_rl.inference.metrics import BackendCollector, RequestMetrics, exposition


class Busy(FakeBackend):
    def stats(self):
        return EngineStats(
            num_running=2,
            num_waiting=3,
            num_preemptions=4,
            kv_blocks_used=5,
            kv_blocks_total=20,
            prompt_tokens_total=7,
            generated_tokens_total=8,
            prefix_query_tokens_total=10,
            prefix_hit_tokens_total=6,
            version=9,
        )


def test_the_backends_counts_are_read_when_asked():
    registry = CollectorRegistry()
    registry.register(BackendCollector(Busy(), "m"))

    def value(name):
        return registry.get_sample_value(name, {"model_name": "m"})

    assert value("vllm:num_requests_running") == 2
    assert value("vllm:num_requests_waiting") == 3
    assert value("vllm:num_preemptions_total") == 4
    assert value("vllm:kv_cache_usage_perc") == 0.25
    assert value("vllm:prompt_tokens_total") == 7
    assert value("vllm:generation_tokens_total") == 8
    assert value("vllm:prefix_cache_queries_total") == 10
    assert value("vllm:prefix_cache_hits_total") == 6
    assert value("prime_rl:weights_version") == 9


def test_requests_are_observed_once_they_end():
    registry = CollectorRegistry()
    metrics = RequestMetrics(registry, "m")
    metrics.first_token(0.2)
    metrics.finished("stop", 0.7)
    metrics.finished("length", 0.9)
    labels = {"model_name": "m"}
    assert registry.get_sample_value("vllm:time_to_first_token_seconds_sum", labels) == 0.2
    assert registry.get_sample_value("vllm:e2e_request_latency_seconds_count", labels) == 2
    assert registry.get_sample_value("vllm:request_success_total", labels | {"finished_reason": "stop"}) == 1
    assert b"vllm:e2e_request_latency_seconds_bucket" in exposition(registry)
