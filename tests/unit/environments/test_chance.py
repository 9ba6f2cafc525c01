import asyncio
import random
import socket
from collections.abc import Iterator

import msgspec
import numpy as np
import pytest
from tests.doubles.door import Scripted
from tests.unit.environments.scripted import request_of, spec_of

from prime_rl.environments.chance import Chance
from prime_rl.environments.frames import Frames
from prime_rl.environments.rollouts import Rollout, RolloutRequest
from prime_rl.environments.watch import Watch
from prime_rl.environments.worker import Worker


@pytest.fixture(autouse=True)
def generators_as_they_were() -> Iterator[None]:
    python, numpy = random.getstate(), np.random.get_state()
    yield
    random.setstate(python)
    np.random.set_state(numpy)


async def rollout(chance: Chance, seed: int, turns: int = 3) -> list[float]:
    """Draws of a rollout that lets others have a turn between them, and of tasks that it starts."""
    chance.own(seed)
    drawn = []
    for _ in range(turns):
        drawn += [random.random(), float(np.random.random())]
        await asyncio.sleep(0)
        drawn.append(await asyncio.create_task(later()))
    return drawn


async def later() -> float:
    await asyncio.sleep(0)
    return random.random()


async def alone(seed: int) -> list[float]:
    return await asyncio.create_task(rollout(Chance(0), seed))


async def test_a_rollout_draws_what_it_draws_alone_whatever_runs_beside_it() -> None:
    expected = [await alone(seed) for seed in range(5)]
    chance = Chance(1)
    together = await asyncio.gather(*(rollout(chance, seed) for seed in range(5)))
    assert together == expected
    backwards = await asyncio.gather(*(rollout(chance, seed) for seed in (4, 3, 2, 1, 0)))
    assert backwards == expected[::-1]
    assert len({number for drawn in expected for number in drawn}) == 5 * 9


async def test_without_it_a_rollout_draws_what_others_leave() -> None:
    class Free(Chance):
        def hand_over(self) -> None:
            pass

    free = Free(0)
    assert await asyncio.gather(*(rollout(free, seed) for seed in range(5))) != [await alone(seed) for seed in range(5)]


async def test_what_is_drawn_while_an_environment_is_loaded_follows_from_the_seed() -> None:
    def draws(seed: int) -> tuple[float, float]:
        Chance(seed)
        return random.random(), float(np.random.random())

    assert draws(2**61 + 5) == draws(2**61 + 5) != draws(5)


async def test_a_task_that_nobody_owns_takes_nothing_of_a_rollout() -> None:
    chance = Chance(0)
    beside = asyncio.create_task(later())
    assert await asyncio.create_task(rollout(chance, 3)) == await alone(3)
    await beside


async def test_tasks_end_as_they_do_without_it() -> None:
    Chance(0)

    async def fails() -> None:
        await asyncio.sleep(0)
        raise KeyError("as it is")

    with pytest.raises(KeyError, match="as it is"):
        await asyncio.create_task(fails())
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.01):
            await asyncio.create_task(asyncio.Event().wait())
    task = asyncio.create_task(asyncio.Event().wait(), name="waits")
    await asyncio.sleep(0)
    assert task.get_name() == "waits"
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


class Gambling(Scripted):
    """Rewards by luck, after some turns of the others."""

    async def run(self, request: RolloutRequest) -> Rollout:
        for _ in range(request.id % 4):
            await asyncio.sleep(0)
        luck = random.random()
        await asyncio.sleep(0)
        rollout = await super().run(request)
        return msgspec.structs.replace(rollout, reward=luck + float(np.random.random()))


async def rewards_of(seeds: list[int]) -> dict[int, float]:
    """By seed, of rollouts that a worker runs side by side."""
    ours, theirs = [await Frames.over(connection) for connection in socket.socketpair()]
    spec = spec_of("ok")
    worker = Worker(spec, Gambling(spec), theirs, Watch(), Chance(0))
    serving = asyncio.create_task(worker.serve())
    for number, seed in enumerate(seeds):
        ours.send(msgspec.structs.replace(request_of(0), id=number, sampling={"seed": seed}))
    answers = [await ours.read() for _ in seeds]
    await ours.close()
    await serving
    await worker.close()
    await theirs.close()
    return {seeds[answer.id]: answer.reward for answer in answers if isinstance(answer, Rollout)}


async def test_a_worker_gives_every_rollout_the_luck_of_its_seed() -> None:
    rewards = await rewards_of([1, 2, 3, 4, 5])
    assert len(set(rewards.values())) == 5
    assert await rewards_of([5, 3, 1, 4, 2]) == rewards
