import asyncio

import pytest
import torch

from prime_rl.inference.fake import FakeBackend
from prime_rl.transport.api import HealthResponse, ServedWeights, WeightsResponse
from prime_rl.transport.checksum import checksum
from prime_rl.transport.manifest import read_manifest
from prime_rl.transport.weights import publish_weights


@pytest.fixture
def publish(tmp_path):
    """Publish a fake backend's weights, every element changed by its own amount."""
    assets = tmp_path / "assets"
    assets.mkdir()
    (assets / "config.json").write_text("{}")

    def make(step):
        tensors = {
            name: tensor + step + torch.arange(tensor.numel()).view_as(tensor) / 8
            for name, tensor in FakeBackend().weights().items()
        }
        return publish_weights(tensors.items(), step=step, weights_dir=tmp_path / "weights", assets=assets)

    return make


def body(directory, version):
    return {"weight_dir": str(directory), "version": version}


async def test_health_tells_version_digest_and_which_start_of_the_server_it_is(serve, make_backend, publish):
    async with serve(make_backend()) as running:
        before = HealthResponse.model_validate_json((await running.http.get("/health")).content)
        await running.http.post("/update_weights", json=body(publish(3), 3))
        after = HealthResponse.model_validate_json((await running.http.get("/health")).content)
    async with serve(make_backend()) as restarted:
        other = HealthResponse.model_validate_json((await restarted.http.get("/health")).content)
    digest = read_manifest(publish(4).parent / "step_3").weights.digest
    assert (before.version, before.digest) == (0, None)
    assert (after.version, after.digest, after.instance) == (3, digest, before.instance)
    assert other.instance != before.instance


async def test_a_failed_engine_is_a_503_that_says_why(serve, make_backend):
    backend = make_backend()
    async with serve(backend) as running:
        backend.failure = RuntimeError("the GPU fell off the bus")
        answer = await running.http.get("/health")
    assert (answer.status_code, "Retry-After" in answer.headers) == (503, True)
    assert "fell off the bus" in answer.json()["error"]["message"]


async def test_pause_holds_requests_and_resume_lets_them_go_on(serve, make_backend, eventually):
    backend = make_backend()
    async with serve(backend) as running:
        assert (await running.http.post("/pause")).json() == {"status": "paused"}
        request = asyncio.create_task(running.openai.completions.create(model="tiny", prompt="hi", max_tokens=4))
        await eventually(lambda: len(backend.running) == 1)
        assert backend.generated == 0
        assert HealthResponse.model_validate_json((await running.http.get("/health")).content).paused
        assert (await running.http.post("/resume")).json() == {"status": "resumed"}
        assert not HealthResponse.model_validate_json((await running.http.get("/health")).content).paused
        assert (await request).usage.completion_tokens == 4


async def test_pausing_in_another_way_than_keeping_requests_is_refused(serve, make_backend):
    async with serve(make_backend()) as running:
        kept = await running.http.post("/pause", params={"mode": "keep", "clear_cache": "false"})
        aborted = await running.http.post("/pause", params={"mode": "abort"})
    assert (kept.status_code, aborted.status_code) == (200, 400)


async def test_new_weights_are_served_with_the_published_digest_and_every_tensors_checksum(
    serve, make_backend, publish
):
    directory = publish(4)
    announced = read_manifest(directory).weights
    async with serve(make_backend()) as running:
        answer = await running.http.post("/update_weights", json=body(directory, 4))
        found = WeightsResponse.model_validate_json((await running.http.get("/weights")).content)
        assert running.backend.updates == [(4, False)]
    assert ServedWeights.model_validate_json(answer.content) == ServedWeights(version=4, digest=announced.digest)
    assert (found.version, found.digest) == (4, announced.digest)
    assert found.tensors == {name: entry.checksum for name, entry in announced.tensors.items()}


async def test_reloading_brings_back_the_model_that_the_server_was_started_with(serve, make_backend, publish):
    first = {name: checksum(tensor) for name, tensor in FakeBackend().weights().items()}
    async with serve(make_backend()) as running:
        await running.http.post("/update_weights", json=body(publish(2), 2))
        changed = (await running.http.get("/weights")).json()["tensors"]
        answer = await running.http.post("/reload_weights")
        found = (await running.http.get("/weights")).json()
    assert answer.json() == {"version": 0, "digest": None}
    assert found == {"version": 0, "digest": None, "tensors": first}
    assert all(changed[name] != first[name] for name in first)


@pytest.mark.parametrize(
    "wrong",
    [
        {},
        {"weight_dir": "x"},
        {"weight_dir": "", "version": 1},
        {"weight_dir": "x", "version": -1},
        {"weight_dir": "x", "version": 2**64},
    ],
)
async def test_an_update_without_directory_or_version_is_refused(serve, make_backend, wrong):
    async with serve(make_backend()) as running:
        assert (await running.http.post("/update_weights", json=wrong)).status_code == 400
        assert running.backend.updates == []


async def test_weights_that_are_not_there_leave_the_old_ones(serve, make_backend, tmp_path):
    async with serve(make_backend()) as running:
        answer = await running.http.post("/update_weights", json=body(tmp_path / "step_9", 9))
        assert (await running.http.get("/health")).json()["version"] == 0
        assert running.backend.updates == []
    assert answer.status_code == 400
    assert "step_9" in answer.json()["error"]["message"]


async def test_an_nccl_transfer_is_refused_with_what_to_do_instead(serve, make_backend):
    async with serve(make_backend()) as running:
        request = {"host": "localhost", "port": 29501, "rank_offset": 1, "world_size": 2}
        answer = await running.http.post("/init_weight_transfer", json=request)
        nonsense = await running.http.post("/init_weight_transfer", json=request | {"rank_offset": 0})
    assert (answer.status_code, nonsense.status_code) == (400, 400)
    assert "weight_broadcast.type = 'filesystem'" in answer.json()["error"]["message"]


async def test_updates_run_one_at_a_time_and_to_their_end(serve, make_backend, publish, eventually):
    backend = make_backend()
    events: list[tuple[str, int]] = []
    go_on = asyncio.Event()

    async def slow(swap, version, *, recompute=False):
        events.append(("begin", version))
        await go_on.wait()
        events.append(("end", version))

    backend.update_weights = slow
    async with serve(backend) as running:

        def update(step):
            return asyncio.create_task(running.http.post("/update_weights", json=body(publish(step), step)))

        first = update(1)
        await eventually(lambda: events == [("begin", 1)])
        second = update(2)
        first.cancel()  # the client goes away; the weights are swapped in all the same
        go_on.set()
        await second
    assert events == [("begin", 1), ("end", 1), ("begin", 2), ("end", 2)]
