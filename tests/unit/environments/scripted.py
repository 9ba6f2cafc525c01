"""Pools of real worker processes over environments that are scripted, so that they load at once."""

import asyncio
import contextlib
from contextlib import asynccontextmanager

import msgspec
import psutil

from prime_rl.environments.pool import PoolLimits, open_pools
from prime_rl.environments.rollouts import EnvironmentSpec, RolloutRequest


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
    """Workers that run."""
    found = []
    for child in psutil.Process().children():
        with contextlib.suppress(psutil.NoSuchProcess):  # it ended while it was looked at, or is a zombie
            if "prime_rl.environments.worker" in child.cmdline():
                found.append(child)
    return found


async def grown(pool, num_workers, example=0):
    """Once so many workers are live."""
    await asyncio.gather(*(pool.run(request_of(example)) for _ in range(num_workers)))
    await until(lambda: pool.load.num_live == num_workers)


async def until(condition, seconds=30.0):
    async with asyncio.timeout(seconds):
        while not condition():  # noqa: ASYNC110 - it is another process's doing
            await asyncio.sleep(0.01)


def group_request_of(index, *, group, example=0, timeout_s=30.0):
    request = request_of(example, timeout_s=timeout_s)
    return msgspec.structs.replace(request, id=index, group=group, group_size=3)
