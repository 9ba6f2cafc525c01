"""Tasks that belong together: none is left behind, and the first that fails is the failure of all."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any, TypeVar, cast

from prime_rl import activity

T = TypeVar("T")


async def together(*work: Coroutine[Any, Any, Any]) -> list[Any]:
    """Run everything at the same time; results in order. When one fails, the others are ended before it is raised."""
    tasks = [asyncio.create_task(item) for item in work]
    try:
        return list(await asyncio.gather(*tasks))
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


@contextlib.asynccontextmanager
async def acting_timeout(seconds: float) -> AsyncIterator[None]:
    """`asyncio.timeout`, but for the time in which this process was stopped, and could do nothing of it."""
    loop = asyncio.get_running_loop()
    end, lost_s = loop.time() + seconds, activity.lost_s()
    handle: asyncio.TimerHandle
    async with asyncio.timeout(None) as timer:

        def look() -> None:
            nonlocal handle
            left_s = end + activity.lost_s() - lost_s - loop.time()
            if left_s > 0:
                handle = loop.call_later(left_s, look)
            else:
                timer.reschedule(loop.time())

        handle = loop.call_at(end, look)
        try:
            yield
        finally:
            handle.cancel()


async def in_daemon_thread(function: Callable[[], T]) -> T:
    """Run `function` in a thread of its own, for which the process does not wait when it ends.

    For code of others: one that never returns costs a thread, not the event loop and not the end of the process.
    Cancelled, it runs on, and nobody learns what came of it.
    """
    loop = asyncio.get_running_loop()
    result: asyncio.Future[T] = loop.create_future()

    def tell(value: T | None, error: Exception | None) -> None:
        if result.done():
            return  # cancelled
        if error is not None:
            result.set_exception(error)
        else:
            result.set_result(cast(T, value))

    def run() -> None:
        value: T | None = None
        error: Exception | None = None
        try:
            value = function()
        except Exception as caught:  # noqa: BLE001 - supervision point: raised where it is waited for
            error = caught
        except SystemExit as exit_:  # of a thread it would be heard by nobody
            error = RuntimeError(f"it called sys.exit({exit_.code!r})")
        with contextlib.suppress(RuntimeError):  # the loop was closed meanwhile
            loop.call_soon_threadsafe(tell, value, error)

    threading.Thread(target=run, name=getattr(function, "__name__", "work"), daemon=True).start()
    return await result


class Supervisor:
    """The named tasks of one run. The first failure ends the run and is raised from `run`.

    Example:
        supervisor = Supervisor()
        supervisor.start("weights", watch_weights(), endless=True)
        await supervisor.run("batches", produce_batches())
    """

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[Any]] = set()
        self._endless: set[asyncio.Task[Any]] = set()
        self._failure: tuple[str, BaseException] | None = None
        self._failed = asyncio.Event()

    def start(self, name: str, work: Coroutine[Any, Any, T], *, endless: bool = False) -> asyncio.Task[T]:
        """Run `work` in the background. An `endless` task that returns has failed too."""
        task = asyncio.create_task(work, name=name)
        self._tasks.add(task)
        if endless:
            self._endless.add(task)
        task.add_done_callback(self._ended)
        return task

    async def run(self, name: str, main: Coroutine[Any, Any, T]) -> T:
        """Run `main` beside the started tasks until it returns or any task fails; then end all of them.

        Raises: what the failed task raised, with a note that names the task.
        """
        main_task = self.start(name, main)
        failed = asyncio.create_task(self._failed.wait(), name="supervisor")
        try:
            await asyncio.wait({main_task, failed}, return_when=asyncio.FIRST_COMPLETED)
            if self._failure is not None:
                failed_name, error = self._failure
                error.add_note(f"raised in task {failed_name!r}")
                raise error
            return await main_task
        finally:
            failed.cancel()
            for task in list(self._tasks):
                task.cancel()
            await asyncio.gather(failed, *self._tasks, return_exceptions=True)

    def _ended(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if task.cancelled():
            return
        error = task.exception()
        if error is None and task in self._endless:
            error = RuntimeError(f"task {task.get_name()!r} ended, which it never should")
        self._endless.discard(task)
        if error is not None and self._failure is None:
            self._failure = (task.get_name(), error)
            self._failed.set()
