"""Real worker processes; the environments in them are scripted, so they load at once."""

import asyncio
import json
import os
import signal
import sys
import textwrap
from collections import Counter
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec
import psutil
import pytest

from prime_rl.config.shared import ClientConfig, EnvConfig, LogConfig
from prime_rl.environments.pool import PoolLimits, environment_spec, open_pools
from prime_rl.environments.rollouts import EnvironmentSpec, FailureKind, RolloutRequest
from prime_rl.errors import EnvironmentSetupError

ROOT = Path(__file__).parents[3]


@pytest.fixture(autouse=True)
def _workers_can_import_the_doubles(monkeypatch):
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(paths))


def spec_of(*script, **args):
    return EnvironmentSpec(
        id="scripted", label="scripted", args={"script": list(script), **args}, base_urls=("",), model="",
        door="tests.doubles.door",
    )  # fmt: skip


def request_of(index, *, timeout_s=30.0):
    return RolloutRequest(id=100 + index, example=index, sampling={}, version=0, timeout_s=timeout_s)


@asynccontextmanager
async def pool_over(spec, log_dir, *, num_workers=1, **limits):
    limits = PoolLimits(**limits)
    async with open_pools([spec], num_workers=num_workers, log_dir=log_dir, limits=limits) as pools:
        yield pools[spec.label]


def children():
    return [
        child
        for child in psutil.Process().children()
        if child.status() != psutil.STATUS_ZOMBIE and "prime_rl.environments.worker" in child.cmdline()
    ]


async def until(condition, seconds=10.0):
    async with asyncio.timeout(seconds):
        while not condition():  # noqa: ASYNC110 - it is another process's doing
            await asyncio.sleep(0.01)


async def test_rollouts_run_at_the_same_time_and_each_ends_once_in_what_became_of_it(tmp_path):
    script = ["ok", "raise", "fail", "hang", 0.3, "ok"]
    async with pool_over(spec_of(*script), tmp_path) as pool:
        assert (pool.size.num_train, pool.size.num_eval) == (6, 0)
        rollouts = await asyncio.gather(*(pool.run(request_of(i, timeout_s=1.0)) for i in range(len(script))))
    assert [rollout.id for rollout in rollouts] == [100, 101, 102, 103, 104, 105]
    kinds = [rollout.failure.kind if rollout.failure else None for rollout in rollouts]
    assert kinds == [None, FailureKind.ENVIRONMENT, FailureKind.SCORER, FailureKind.TIMEOUT, None, None]
    assert "KeyError: 'environment broke'" in str(rollouts[1].failure)
    assert "took longer than 1 s" in str(rollouts[3].failure)


async def test_what_cannot_be_sent_is_a_failure_of_its_rollout_and_of_no_other(tmp_path):
    script = ["object", "surrogate", "huge", "garbled", "ok"]
    async with pool_over(spec_of(*script), tmp_path) as pool:
        rollouts = await asyncio.gather(*(pool.run(request_of(i, timeout_s=2.0)) for i in range(len(script))))
        assert pool.num_restarts == 0
    failures = [rollout.failure for rollout in rollouts]
    assert [failure and failure.kind for failure in failures] == [FailureKind.ENVIRONMENT] * 4 + [None]
    assert [failure.type for failure in failures[:4]] == [
        "TypeError", "UnicodeEncodeError", "OverflowError", "ValueError",
    ]  # fmt: skip


async def test_what_an_environment_prints_goes_to_the_log_and_harms_no_frame(tmp_path):
    async with pool_over(spec_of("ok"), tmp_path) as pool:
        rollouts = await asyncio.gather(*(pool.run(request_of(0)) for _ in range(50)))
    assert all(rollout.failure is None for rollout in rollouts)
    assert (tmp_path / "scripted-0.log").read_text().count("to standard output") == 50


async def test_without_a_log_it_is_said_how_to_get_one():
    async with pool_over(spec_of("ok"), None) as pool:
        assert (await pool.run(request_of(0))).failure is None
    with pytest.raises(
        EnvironmentSetupError, match=r"exit code 9 while it loaded; set log\.env_worker_logs to see why"
    ):
        async with pool_over(spec_of("ok", die=True), None):
            raise AssertionError("the pool was handed out")


async def test_a_worker_logs_as_its_parent_does(tmp_path):
    for name, as_json in (("text", False), ("json", True)):
        spec = msgspec.structs.replace(spec_of("ok", crash="No module named 'x'"), logs_json=as_json)
        with pytest.raises(EnvironmentSetupError, match="ModuleNotFoundError"):
            async with pool_over(spec, tmp_path / name):
                raise AssertionError("the pool was handed out")
    (line,) = (tmp_path / "json" / "scripted-0.log").read_text().splitlines()
    assert json.loads(line)["process"] == "env scripted"
    assert json.loads(line)["message"] == "The environment cannot be loaded"
    assert "ERROR   env scripted | The environment cannot" in (tmp_path / "text" / "scripted-0.log").read_text()


async def test_rollouts_go_to_the_worker_that_holds_the_fewest(tmp_path):
    async with pool_over(spec_of(0.2), tmp_path, num_workers=2) as pool:
        await asyncio.gather(*(pool.run(request_of(0)) for _ in range(10)))
    counts = [(tmp_path / f"scripted-{index}.log").read_text().count("to standard output") for index in (0, 1)]
    assert counts == [5, 5]


async def test_a_killed_worker_gives_back_its_rollouts_and_is_replaced(tmp_path):
    async with pool_over(spec_of(1.0, "ok"), tmp_path, num_workers=2) as pool:
        running = [asyncio.create_task(pool.run(request_of(0))) for _ in range(8)]
        logs = [tmp_path / f"scripted-{index}.log" for index in (0, 1)]
        await until(lambda: sum(log.read_text().count("to standard output") for log in logs) == 8)
        os.kill(children()[0].pid, signal.SIGKILL)
        rollouts = await asyncio.gather(*running)
        kinds = Counter(rollout.failure.kind if rollout.failure else "ok" for rollout in rollouts)
        assert kinds == {"ok": 4, FailureKind.WORKER_DIED: 4}
        again = await asyncio.gather(*(pool.run(request_of(1)) for _ in range(4)))
        assert all(rollout.failure is None for rollout in again)
        assert pool.num_restarts == 1
    assert children() == []


async def test_a_worker_whose_event_loop_is_blocked_is_killed_at_the_deadline(tmp_path):
    async with pool_over(spec_of("block", "ok"), tmp_path, grace_s=0.2) as pool:
        blocked = await pool.run(request_of(0, timeout_s=0.2))
        assert blocked.failure is not None
        assert blocked.failure.kind == FailureKind.TIMEOUT
        assert "blocked its worker" in blocked.failure.message
        assert (await pool.run(request_of(1))).failure is None


async def test_an_environment_that_ends_its_workers_again_and_again_is_given_up(tmp_path):
    async with pool_over(spec_of("exit"), tmp_path, max_restarts=1) as pool:
        watch = asyncio.create_task(pool.watch())
        for _ in range(2):
            rollout = await pool.run(request_of(0))
            assert rollout.failure is not None
            assert rollout.failure.kind == FailureKind.WORKER_DIED
        with pytest.raises(EnvironmentSetupError, match="exit code 7, 2 times in a row"):
            await watch
        with pytest.raises(EnvironmentSetupError, match="2 times in a row"):
            await pool.run(request_of(0))


async def test_workers_are_replaced_always_where_that_is_asked_for(tmp_path):
    async with pool_over(spec_of("exit"), tmp_path, max_restarts=-1) as pool:
        for _ in range(7):
            rollout = await pool.run(request_of(0))
            assert rollout.failure is not None
            assert rollout.failure.kind == FailureKind.WORKER_DIED
        await until(lambda: pool.num_restarts == 7)


async def test_a_cancelled_rollout_is_given_up_by_its_worker(tmp_path):
    async with pool_over(spec_of("hang", "ok"), tmp_path) as pool:
        running = asyncio.create_task(pool.run(request_of(0)))
        await until(lambda: "to standard output" in (tmp_path / "scripted-0.log").read_text())
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
        assert (await pool.run(request_of(1))).failure is None
        assert pool.num_restarts == 0


async def test_an_environment_that_refuses_to_load_is_told_in_its_own_words(tmp_path):
    with pytest.raises(EnvironmentSetupError, match=r"^no such split$"):
        async with pool_over(spec_of("ok", refuse="no such split"), tmp_path):
            raise AssertionError("the pool was handed out")
    assert children() == []


async def test_whatever_keeps_a_worker_from_loading_is_told(tmp_path):
    with pytest.raises(EnvironmentSetupError, match=r"'scripted': ModuleNotFoundError: No module named 'x'$"):
        async with pool_over(spec_of("ok", crash="No module named 'x'"), tmp_path):
            raise AssertionError("the pool was handed out")


async def test_a_worker_that_ends_while_it_loads_is_told_with_its_log(tmp_path):
    with pytest.raises(EnvironmentSetupError, match=r"exit code 9 while it loaded; see .*scripted-0\.log"):
        async with pool_over(spec_of("ok", die=True), tmp_path):
            raise AssertionError("the pool was handed out")


async def test_lost_servers_are_told_to_every_worker_and_to_those_that_come_after(tmp_path):
    def told(number):
        return (tmp_path / f"scripted-{number}.log").read_text()

    async with pool_over(spec_of("exit", 0.1), tmp_path, num_workers=2) as pool:
        pool.avoid(frozenset({"http://a/v1"}))
        await until(lambda: all("avoiding ['http://a/v1']" in told(number) for number in (0, 1)))
        await pool.run(request_of(0))
        await until(lambda: told(0).count("avoiding ['http://a/v1']") + told(1).count("avoiding") == 3)
        pool.avoid(frozenset())
        await until(lambda: all("avoiding []" in told(number) for number in (0, 1)))


async def test_workers_end_when_their_parent_is_killed_even_when_they_are_blocked(tmp_path):
    program = textwrap.dedent(f"""
        import asyncio, pathlib
        from prime_rl.environments.pool import open_pools
        from prime_rl.environments.rollouts import EnvironmentSpec, RolloutRequest
        async def main():
            spec = EnvironmentSpec(id="s", label="s", args={{"script": ["block"]}}, base_urls=("",), model="",
                                   door="tests.doubles.door")
            async with open_pools([spec], num_workers=2, log_dir=pathlib.Path({str(tmp_path)!r})) as pools:
                request = RolloutRequest(id=1, example=0, sampling={{}}, version=0, timeout_s=600)
                running = asyncio.create_task(pools["s"].run(request))
                await asyncio.sleep(0.2)
                print("ready", flush=True)
                await running
        asyncio.run(main())
    """)
    parent = await asyncio.create_subprocess_exec(sys.executable, "-c", program, stdout=asyncio.subprocess.PIPE)
    assert parent.stdout is not None
    assert await parent.stdout.readline() == b"ready\n"
    workers = psutil.Process(parent.pid).children()
    assert len(workers) == 2
    parent.kill()
    await parent.wait()
    _, alive = await asyncio.to_thread(psutil.wait_procs, workers, timeout=15)
    assert alive == []


def test_a_worker_is_told_what_the_configuration_says():
    client = ClientConfig(base_url="http://h:1/v1", api_key_var="KEY", headers={"a": "b"}, timeout=7)
    client = client.model_copy(update={"base_url": ("http://h:1/v1", "http://i:1/v1")})
    log = LogConfig(level="debug", vf_level="info", json_logging=True)
    env = EnvConfig(id="sums", name="mine", args={"n": 3}, api="v1")
    assert environment_spec(env, client=client, model="m", log=log, retry_s=9) == EnvironmentSpec(
        id="sums", label="mine", args={"n": 3}, api="v1", base_urls=("http://h:1/v1", "http://i:1/v1"), model="m",
        api_key_var="KEY", headers={"a": "b"}, request_timeout_s=7, retry_s=9,
        log_level="debug", library_log_level="info", logs_json=True,
    )  # fmt: skip
