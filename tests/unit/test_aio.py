import asyncio

import pytest

from prime_rl.aio import Supervisor, together


async def forever():
    await asyncio.Event().wait()


async def fail(message, after=0.0):
    await asyncio.sleep(after)
    raise ValueError(message)


async def give(value):
    await asyncio.sleep(0)
    return value


async def test_together_gives_results_in_order():
    assert await together(give(1), give(2), give(3)) == [1, 2, 3]


async def test_together_ends_the_others_before_it_raises():
    ended = []

    async def note_the_end():
        try:
            await forever()
        finally:
            await asyncio.sleep(0.01)
            ended.append(True)

    with pytest.raises(ValueError, match="broken"):
        await together(note_the_end(), fail("broken"))
    assert ended == [True]


async def test_a_supervised_run_returns_what_its_main_task_does_and_ends_the_others():
    supervisor = Supervisor()
    task = supervisor.start("background", forever(), endless=True)
    assert await supervisor.run("main", give(5)) == 5
    assert task.cancelled()


async def test_a_failed_background_task_ends_the_run_with_its_error_and_name():
    supervisor = Supervisor()
    supervisor.start("relay", fail("broken", after=0.01))
    with pytest.raises(ValueError, match="broken") as caught:
        await supervisor.run("main", forever())
    assert caught.value.__notes__ == ["raised in task 'relay'"]


async def test_a_failing_main_task_is_the_runs_failure():
    with pytest.raises(ValueError, match="main broke"):
        await Supervisor().run("main", fail("main broke"))


async def test_an_endless_task_that_returns_has_failed_and_another_may_return():
    supervisor = Supervisor()
    supervisor.start("short", give(1))
    supervisor.start("relay", give(None), endless=True)
    with pytest.raises(RuntimeError, match="task 'relay' ended, which it never should"):
        await supervisor.run("main", forever())


async def test_a_cancelled_task_is_no_failure():
    supervisor = Supervisor()
    task = supervisor.start("rollout", forever())
    task.cancel()

    async def main():
        await asyncio.sleep(0.01)
        return "done"

    assert await supervisor.run("main", main()) == "done"
