"""A model of which two workers hold a half each: both take weights, and an error answers only the question it is of."""

from dataclasses import replace

import pytest

from prime_rl.transport.manifest import read_manifest
from tests.contract.conftest import Api, http_client
from tests.contract.model import make_tokenizer, weights
from tests.contract.servers import KINDS, START_S, start
from tests.contract.weights import Publisher

PROMPT = [(7 * i) % 90 for i in range(60)]
TOLERANCE = 5e-5


@pytest.fixture(scope="module")
def halves(model, tmp_path_factory):
    """vLLM with tensor parallelism over two processes."""
    # vLLM would give each process a NUMA node of its own, and two are not to be expected.
    unbound = replace(KINDS["vllm"], environment={"VLLM_CPU_OMP_THREADS_BIND": "nobind"})
    running = start(unbound, model, tmp_path_factory.mktemp("halves"), parallel={"tp": 2})
    try:
        yield running.await_health()
    finally:
        running.stop()


async def assert_serves(api, truth, version: int) -> None:
    answer = await api.generate(PROMPT, max_tokens=8, ignore_eos=True, logprobs=1, seed=1)
    (choice,) = answer["choices"]
    sampled = [entry["logprob"] for entry in choice["logprobs"]["content"]]
    assert sampled == pytest.approx(truth.logprobs(PROMPT, choice["token_ids"]), abs=TOLERANCE)
    assert answer["versions"] == [[[version, 8]]]


@pytest.mark.slow
@pytest.mark.timeout(START_S + 300)
async def test_two_workers_take_weights_and_say_that_they_cannot_read_them_back(halves, model, tmp_path, truth, oracle):
    publisher = Publisher(model, tmp_path / "weights")
    async with http_client(halves) as http:
        api = Api(http, halves)
        await assert_serves(api, truth, 0)
        for version in (1, 2):
            directory = publisher.other(version)
            answer = await api.post("/update_weights", weight_dir=str(directory), version=version)
            assert answer == {"version": version, "digest": read_manifest(directory).weights.digest}
            await assert_serves(api, oracle(directory), version)
            for _ in range(2):
                refused = await http.get("/weights")
                assert refused.status_code == 503
                assert "tensor parallel" in refused.json()["error"]["message"]
            assert (await api.get("/health"))["version"] == version
        tensors = weights(make_tokenizer(), seed=5)
        tensors.pop("model.norm.weight")
        bad = await http.post("/update_weights", json={"weight_dir": str(publisher.publish(3, tensors)), "version": 3})
        assert bad.status_code == 400
        assert await api.post("/reload_weights") == {"version": 0, "digest": None}
        await assert_serves(api, truth, 0)
