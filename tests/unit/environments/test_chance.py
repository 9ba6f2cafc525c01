import asyncio
import random
from collections.abc import Iterator

import numpy as np
import pytest

from prime_rl.environments.chance import Chance


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


async def test_a_rollout_draws_what_it_draws_alone_whatever_runs_beside_it():
    expected = [await alone(seed) for seed in range(5)]
    chance = Chance(1)
    together = await asyncio.gather(*(rollout(chance, seed) for seed in range(5)))
    assert together == expected
    backwards = await asyncio.gather(*(rollout(chance, seed) for seed in (4, 3, 2, 1, 0)))
    assert backwards == expected[::-1]
    assert len({number for drawn in expected for number in drawn}) == 5 * 9


async def test_without_it_a_rollout_draws_what_others_leave():
    class Free(Chance):
        def hand_over(self) -> None:
            pass

    free = Free(0)
    assert await asyncio.gather(*(rollout(free, seed) for seed in range(5))) != [await alone(seed) for seed in range(5)]


async def test_what_is_drawn_while_an_environment_is_loaded_follows_from_the_seed():
    def draws(seed: int) -> tuple[float, float]:
        Chance(seed)
        return random.random(), float(np.random.random())

    assert draws(2**61 + 5) == draws(2**61 + 5) != draws(5)


async def test_a_task_that_nobody_owns_takes_nothing_of_a_rollout():
    chance = Chance(0)
    beside = asyncio.create_task(later())
    assert await asyncio.create_task(rollout(chance, 3)) == await alone(3)
    await beside


async def test_tasks_end_as_they_do_without_it():
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
