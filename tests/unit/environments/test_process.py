"""Whatever instant a pool or a process is ended at, nothing of it is left."""

import asyncio
import os
import random
import signal
import time

import msgspec
import pytest
from tests.doubles.disks import small_disk
from tests.unit.environments.scripted import children, grown, pool_over, request_of, spec_of, until

from prime_rl.environments import process as processes
from prime_rl.environments.frames import Frames
from prime_rl.environments.pool import EnvPool, PoolLimits
from prime_rl.environments.process import WorkerProcess
from prime_rl.environments.rollouts import FailureKind, WorkerReady
from prime_rl.errors import EnvironmentSetupError


@pytest.fixture
def spawned(monkeypatch):
    """Every process that is started. Each must have been waited for."""
    found = []
    spawn = processes._spawn
    monkeypatch.setattr(processes, "_spawn", lambda *arguments: found.append(spawn(*arguments)) or found[-1])
    return found


def open_descriptors():
    return len(os.listdir("/dev/fd"))


async def test_a_pool_that_is_closed_while_it_lets_a_worker_go_leaves_none(tmp_path, spawned):
    async with pool_over(spec_of(0.1, close_s=2.0), tmp_path, num_workers=2, rollouts_per_worker=1) as pool:
        await grown(pool, 2)
        next(iter(pool._places.values())).is_retiring = True
        await until(lambda: pool.load.num_workers == 1)
        assert [process.poll() for process in spawned] == [None, None], "one is still ending"
    assert [process.returncode for process in spawned] == [0, 0]


async def test_a_pool_that_is_closed_at_any_instant_leaves_no_process_and_no_descriptor(tmp_path, spawned):
    draw = random.Random(1)
    limits = PoolLimits(rollouts_per_worker=1, idle_s=0.1, close_s=0.5)
    before = open_descriptors()
    for number in range(6):
        spec = spec_of(0.05, "exit", "hang", close_s=draw.choice([0.0, 0.2, 5.0]))
        pool = EnvPool(spec, num_workers=2, log_dir=tmp_path, limits=limits)
        running = []
        if number > 1:
            await pool.wait_live()
            running = [asyncio.create_task(pool.run(request_of(draw.randrange(3)))) for _ in range(3)]
        await asyncio.sleep(draw.uniform(0, 1.0) if number else 0.0)
        closing = asyncio.create_task(pool.close())
        if number % 2:
            await asyncio.sleep(draw.uniform(0, 0.3))
            closing.cancel()
        await asyncio.wait([closing])
        assert all(process.returncode is not None for process in spawned)
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
        await asyncio.sleep(0.05)  # transports close their sockets in the next step
    assert children() == []
    assert open_descriptors() == before


async def test_one_that_waits_for_a_worker_is_told_that_the_pool_was_closed(tmp_path):
    async with pool_over(spec_of("hang"), tmp_path, num_workers=2, rollouts_per_worker=1) as pool:
        pool._most = 3  # never to be reached: so the second waits
        running = [asyncio.create_task(pool.run(request_of(0))) for _ in range(2)]
        await until(lambda: pool.load.in_flight == 1)
        running.append(asyncio.create_task(pool.run(request_of(0))))
        await until(lambda: pool.load.waiting >= 1)
    held, *waiting = await asyncio.gather(*running, return_exceptions=True)
    assert held.failure.kind == FailureKind.WORKER_DIED
    assert not held.failure.is_own
    assert any(isinstance(error, EnvironmentSetupError) and "were ended" in str(error) for error in waiting)


async def test_a_worker_that_reads_nothing_does_not_keep_its_pool_from_closing(tmp_path, spawned):
    """What was sent to it would be flushed first, for ever."""
    async with pool_over(spec_of("hang"), tmp_path, close_s=0.5) as pool:
        os.kill(children()[0].pid, signal.SIGSTOP)
        huge = msgspec.structs.replace(request_of(0), sampling={"prompt": "x" * (4 << 20)})
        running = asyncio.create_task(pool.run(huge))
        await until(lambda: pool.load.in_flight == 1)
        started = time.monotonic()
    assert time.monotonic() - started < 5.0
    assert (await running).failure.kind == FailureKind.WORKER_DIED
    assert [process.returncode for process in spawned] == [-signal.SIGKILL]


async def test_a_process_that_does_not_even_end_when_it_is_killed_is_left_behind_and_told(
    tmp_path, spawned, monkeypatch, caplog
):
    monkeypatch.setattr(processes, "KILL_S", 0.1)
    process = await WorkerProcess.start(tmp_path / "log")
    with monkeypatch.context() as patch:
        patch.setattr(WorkerProcess, "_signal_all", lambda self: None)
        os.kill(spawned[0].pid, signal.SIGSTOP)
        assert await asyncio.wait_for(process.end(0.1), 5.0) is None
    assert f"Process {spawned[0].pid} was killed and does not end" in caplog.text
    assert await process.end(0.0) == -signal.SIGKILL


async def test_a_pool_that_is_closed_in_the_moment_in_which_a_worker_is_ready_ends(tmp_path, spawned, monkeypatch):
    read = Frames.read

    async def read_and_close(frames):
        message = await read(frames)
        if isinstance(message, WorkerReady):
            place.served.cancel()
        return message

    monkeypatch.setattr(Frames, "read", read_and_close)
    pool = EnvPool(spec_of("ok"), num_workers=1, log_dir=tmp_path, limits=PoolLimits())
    (place,) = pool._places.values()
    await asyncio.wait([place.served], timeout=20)
    assert place.served.done()
    await pool.close()
    assert [process.returncode for process in spawned] != [None]


async def test_a_worker_whose_log_a_disk_refuses_works_without_one(tmp_path, spawned, caplog):
    with small_disk(tmp_path / "disk", mib=1) as disk:
        disk.make_read_only()
        worker = await WorkerProcess.start(disk.root / "worker.log")
        await worker.end(0.0)
    assert len(spawned) == 1
    assert "worker.log is not written, and the run goes on: the file system is read-only" in caplog.text
