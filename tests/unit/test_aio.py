import asyncio
import subprocess
import sys
import textwrap
import threading

import pytest

from prime_rl.aio import Supervisor, acting_timeout, in_daemon_thread, together


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


async def test_work_in_a_daemon_thread_gives_its_result_or_its_error():
    assert await in_daemon_thread(lambda: threading.current_thread().daemon) is True
    with pytest.raises(ZeroDivisionError):
        await in_daemon_thread(lambda: 1 // 0)
    with pytest.raises(RuntimeError, match=r"it called sys\.exit\(3\)"):
        await in_daemon_thread(lambda: sys.exit(3))


async def test_work_that_is_given_up_may_still_end_and_nobody_hears_of_it():
    goes_on, has_ended = threading.Event(), threading.Event()

    def work():
        goes_on.wait(5)
        has_ended.set()

    with pytest.raises(TimeoutError):
        await asyncio.wait_for(in_daemon_thread(work), 0.05)
    goes_on.set()
    assert await asyncio.to_thread(has_ended.wait, 5)
    await asyncio.sleep(0.01)


def test_a_process_ends_though_work_in_a_daemon_thread_never_does():
    script = """
        import asyncio, time
        from prime_rl.aio import in_daemon_thread
        async def main():
            await asyncio.wait_for(in_daemon_thread(lambda: time.sleep(3600)), 0.1)
        asyncio.run(main())
    """
    ended = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)], capture_output=True, text=True, timeout=60, check=False
    )
    assert ended.returncode == 1
    assert ended.stderr.rstrip().endswith("TimeoutError")


async def test_a_deadline_runs_out_unless_the_process_was_stopped_meanwhile(monkeypatch):
    with pytest.raises(TimeoutError):
        async with acting_timeout(0.05):
            await asyncio.sleep(60)
    async with acting_timeout(60.0):
        await asyncio.sleep(0)
    loop = asyncio.get_running_loop()
    began, lost = loop.time(), iter([0.0, 0.3])  # at the beginning, and at the end of the deadline
    monkeypatch.setattr("prime_rl.activity.lost_s", lambda: next(lost, 0.3))
    with pytest.raises(TimeoutError):
        async with acting_timeout(0.05):
            await asyncio.sleep(60)
    assert loop.time() - began >= 0.35
