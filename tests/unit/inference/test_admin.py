import asyncio

import pytest

from prime_rl.errors import ArtifactError
from prime_rl.transport import manifest
from prime_rl.transport.api import HealthResponse, ServedWeights


def publish(root, step):
    final = root / f"step_{step}"
    with manifest.publish_dir(final) as directory:
        (directory / "model.safetensors").write_bytes(b"weights")
    return final


async def test_health_tells_the_version(serve, make_backend):
    async with serve(make_backend()) as running:
        running.backend.version = 3
        answer = await running.http.get("/health")
    assert HealthResponse.model_validate_json(answer.content).version == 3


async def test_pause_holds_requests_and_resume_lets_them_go_on(serve, make_backend, eventually):
    backend = make_backend()
    async with serve(backend) as running:
        assert (await running.http.post("/pause")).json() == {"status": "paused"}
        request = asyncio.create_task(running.openai.completions.create(model="tiny", prompt="hi", max_tokens=4))
        await eventually(lambda: len(backend.running) == 1)
        assert backend.generated == 0
        assert (await running.http.post("/resume")).json() == {"status": "resumed"}
        assert (await request).usage.completion_tokens == 4


async def test_pausing_in_another_way_than_keeping_requests_is_refused(serve, make_backend):
    async with serve(make_backend()) as running:
        kept = await running.http.post("/pause", params={"mode": "keep", "clear_cache": "false"})
        aborted = await running.http.post("/pause", params={"mode": "abort"})
    assert (kept.status_code, aborted.status_code) == (200, 400)


async def test_new_weights_are_loaded_and_their_digest_told(serve, make_backend, tmp_path):
    directory = publish(tmp_path, 4)
    async with serve(make_backend()) as running:
        answer = await running.http.post("/update_weights", json={"weight_dir": str(directory), "version": 4})
        assert running.backend.updates == [(directory, 4)]
    response = ServedWeights.model_validate_json(answer.content)
    assert (response.version, response.digest) == (4, manifest.digest(directory))


@pytest.mark.parametrize(
    "body", [{}, {"weight_dir": "x"}, {"weight_dir": "", "version": 1}, {"weight_dir": "x", "version": -1}]
)
async def test_an_update_without_directory_or_version_is_refused(serve, make_backend, body):
    async with serve(make_backend()) as running:
        assert (await running.http.post("/update_weights", json=body)).status_code == 400
        assert running.backend.updates == []


async def test_weights_that_are_not_there_leave_the_old_ones(serve, make_backend, tmp_path):
    async with serve(make_backend()) as running:
        body = {"weight_dir": str(tmp_path / "step_9"), "version": 9}
        answer = await running.http.post("/update_weights", json=body)
        assert (await running.http.get("/health")).json()["version"] == 0
    assert answer.status_code == 400
    assert "step_9" in answer.json()["error"]["message"]


async def test_weights_that_the_engine_refuses_are_a_400(serve, make_backend, tmp_path):
    backend = make_backend()

    async def refuse(weight_dir, version):
        raise ArtifactError("model.safetensors does not match its digest")

    backend.update_weights = refuse
    async with serve(backend) as running:
        body = {"weight_dir": str(publish(tmp_path, 1)), "version": 1}
        answer = await running.http.post("/update_weights", json=body)
    assert answer.status_code == 400
    assert "does not match its digest" in answer.json()["error"]["message"]


async def test_updates_run_one_at_a_time_and_to_their_end(serve, make_backend, tmp_path, eventually):
    backend = make_backend()
    events: list[tuple[str, int]] = []
    go_on = asyncio.Event()

    async def slow(weight_dir, version):
        events.append(("begin", version))
        await go_on.wait()
        events.append(("end", version))

    backend.update_weights = slow
    async with serve(backend) as running:

        def update(step):
            body = {"weight_dir": str(publish(tmp_path, step)), "version": step}
            return asyncio.create_task(running.http.post("/update_weights", json=body))

        first = update(1)
        await eventually(lambda: events == [("begin", 1)])
        second = update(2)
        first.cancel()  # the client goes away; the weights are swapped in all the same
        go_on.set()
        await second
    assert events == [("begin", 1), ("end", 1), ("begin", 2), ("end", 2)]
