"""Packages of environments in real workers: a directory laid out as a user's is, beside one from elsewhere."""

import asyncio
import os
import socket
import textwrap

import pytest
from tests.doubles.door import Scripted
from tests.doubles.inference import running_inference
from tests.unit.environments.scripted import request_of, spec_of

from prime_rl.config.shared import ClientConfig, EnvConfig, LogConfig
from prime_rl.environments.frames import Frames
from prime_rl.environments.pool import environment_spec, open_pools
from prime_rl.environments.rollouts import CancelRollout, Rollout, RolloutRequest
from prime_rl.environments.watch import Watch
from prime_rl.environments.worker import Worker

FILES = {
    "my_env/pyproject.toml": """
        [build-system]
        requires = ["hatchling"]
        build-backend = "hatchling.build"

        [project]
        name = "my-env"
        version = "0.1.0"
        dependencies = ["verifiers"]
    """,
    "my_env/my_env.py": """
        import verifiers as vf
        from datasets import Dataset

        def load_environment(difficulty: str = "easy", **kwargs) -> vf.Environment:
            def right(completion, answer) -> float:
                print("scoring", flush=True)
                return float(completion[-1]["content"] == answer)

            rows = [{"question": f"{difficulty} {number}", "answer": str(number)} for number in range(3)]
            return vf.SingleTurnEnv(dataset=Dataset.from_list(rows), rubric=vf.Rubric(funcs=[right]))
    """,
    "rg_sums/rg_sums.py": """
        from verifiers.envs.integrations.reasoninggym_env import ReasoningGymEnv

        def load_environment(**args):
            return ReasoningGymEnv(gym="basic_arithmetic", num_train_examples=5, num_eval_examples=2, **args)
    """,
}


@pytest.fixture
def environments(tmp_path, monkeypatch):
    """`./environments` of a user, each package installed as `pip install -e` does it: its directory is on the path."""
    for name, text in FILES.items():
        path = tmp_path / "environments" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(textwrap.dedent(text))
    paths = [str(path) for path in (tmp_path / "environments").iterdir()]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([*paths, os.environ.get("PYTHONPATH", "")]))
    monkeypatch.chdir(tmp_path)


async def test_several_environments_run_beside_each_other_in_workers_of_their_own(environments, tmp_path, free_port):
    with running_inference(tmp_path / "model", free_port) as (inference, _):
        inference.context = 4096
        inference.reply = lambda text: text[-1]
        client, log = ClientConfig(base_url=inference.base_url), LogConfig()
        envs = [EnvConfig(id="my-env", args={"difficulty": "hard"}), EnvConfig(id="rg-sums", name="sums")]
        specs = [environment_spec(env, client=client, model=str(inference.model), log=log) for env in envs]
        requests = [RolloutRequest(id=i, example=i, sampling={}, version=0, timeout_s=60) for i in range(3)]
        async with open_pools(specs, num_workers=2, log_dir=tmp_path / "logs") as pools:
            assert {label: (pool.size.num_train, pool.size.num_eval) for label, pool in pools.items()} == {
                "my-env": (3, 3), "sums": (5, 2),
            }  # fmt: skip
            runs = [pools[label].run(request) for label in ("my-env", "sums") for request in requests]
            rollouts = await asyncio.gather(*runs)
    assert [rollout.failure for rollout in rollouts] == [None] * 6
    assert [rollout.env for rollout in rollouts] == ["my-env"] * 3 + ["sums"] * 3
    assert [rollout.reward for rollout in rollouts[:3]] == [1.0] * 3
    assert rollouts[0].messages[0]["content"] == "hard 0"
    assert (tmp_path / "logs" / "my-env-0.log").read_text().count("scoring") == 3
    assert (tmp_path / "logs" / "sums-0.log").exists()


async def test_a_rollout_that_is_cancelled_before_it_begins_is_forgotten():
    ours, theirs = [await Frames.over(connection) for connection in socket.socketpair()]
    spec = spec_of("ok")
    worker = Worker(spec, Scripted(spec), theirs, Watch())
    serving = asyncio.create_task(worker.serve())
    ours.send(request_of(0))
    ours.send(CancelRollout(id=100))  # both are there when the worker reads
    ours.send(request_of(1))
    answer = await ours.read()
    assert isinstance(answer, Rollout)
    assert answer.id == 101
    await asyncio.sleep(0)
    assert worker._running == {}
    await ours.close()
    await serving
    await worker.close()
    await theirs.close()
