"""What goes wrong in the rubrics of verifiers' classic API, which makes a reward of 0 of it, is seen here.

    rubric --> reward function raises, or returns no number   -> 0, in `Rubric`
           --> process that checks answers was killed         -> 0, in `MathRubric`
           --> judge that answers without text                -> the word "None", in `JudgeRubric`
           --> no environment of that name                    -> 0, in the rubric of an `EnvGroup` in another

Each is noted for the rollout, or group, that is being scored in the current task, and fails it. What a rubric decides
of an answer that was looked at is its own.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, cast

import verifiers.legacy as vf

_errors: ContextVar[list[BaseException]] = ContextVar("_errors")


@contextmanager
def noted() -> Iterator[list[BaseException]]:
    """What goes wrong in the scorers that run in the block, in the order in which it was seen."""
    errors: list[BaseException] = []
    token = _errors.set(errors)
    try:
        yield errors
    finally:
        _errors.reset(token)


def watched_rubrics(rubric: vf.Rubric) -> list[vf.Rubric]:
    """The rubric and those in it, from now on watched."""
    rubrics = list(_rubrics(rubric))
    for one in rubrics:
        if hasattr(one, "env_map"):
            one.env_map = _Environments(one.env_map)
        one.funcs = [_watched(function, is_group=one._is_group_func(function)) for function in one.funcs]
        for holder in (one, getattr(one, "math_rubric", one)):  # that of `HybridMathRubric` is no member of it
            if isinstance(getattr(holder, "executor", None), ProcessPoolExecutor):
                holder.executor = _Processes(holder.executor)
        if (client := getattr(one, "judge_client", None)) is not None:
            _watch_judge(client)
    return rubrics


def _rubrics(rubric: vf.Rubric) -> Iterator[vf.Rubric]:
    """The rubric and those in it: of a group of rubrics, and of the environments of an `EnvGroup`."""
    yield rubric
    for inner in getattr(rubric, "rubrics", ()):
        yield from _rubrics(inner)
    for environment in getattr(rubric, "env_map", {}).values():
        yield from _rubrics(environment.rubric)


class _Environments(dict[str, vf.Environment]):
    """Those of an `EnvGroup` by name; another name is an error."""

    def get(self, name: str, default: Any = None) -> Any:
        if name not in self:
            raise LookupError(f"the group of environments {sorted(self)} has none that is named {name!r}")
        return self[name]


def _note(error: BaseException) -> None:
    if (errors := _errors.get(None)) is not None:
        errors.append(error)


def _watched(function: Callable[..., Any], *, is_group: bool) -> Callable[..., Any]:
    """`function` with the same name and signature, noting what it raises, and that it returned no number."""

    @functools.wraps(function)
    async def watched(*args: Any, **kwargs: Any) -> Any:
        try:
            result = function(*args, **kwargs)
            result = await result if inspect.isawaitable(result) else result
            return result if is_group else _number(result, function)
        except Exception as error:  # noted and raised on
            _note(error)
            raise

    return watched


def _number(result: Any, function: Callable[..., Any]) -> float:
    try:
        return float(result)
    except (TypeError, ValueError):
        name = getattr(function, "__name__", repr(function))
        raise TypeError(f"the reward function {name} returned {result!r}, which is no number") from None


class _Processes(Executor):
    """A pool of processes whose calls are noted where they fail, and that is replaced when it broke: one process that
    is killed breaks a pool for ever."""

    def __init__(self, inner: ProcessPoolExecutor) -> None:
        self._inner = inner

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        try:
            future = self._inner.submit(fn, *args, **kwargs)
        except BrokenProcessPool:
            self._inner = ProcessPoolExecutor(cast(Any, self._inner)._max_workers)  # which verifiers sets
            future = self._inner.submit(fn, *args, **kwargs)
        errors = _errors.get(None)

        def note(done: Future[Any]) -> None:
            """Runs before whoever waits for the call goes on, for it is the first to be called back."""
            if errors is None:
                return
            if done.cancelled():
                errors.append(TimeoutError("no process was free to check the answer"))
            elif (error := done.exception()) is not None:
                errors.append(error)

        future.add_done_callback(note)
        return future

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        self._inner.shutdown(wait=wait, cancel_futures=cancel_futures)


class _Completions:
    """`chat.completions` of a judge's client: an answer that says nothing is an error."""

    def __init__(self, inner: Any) -> None:
        self._inner = inner

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    async def create(self, *args: Any, **kwargs: Any) -> Any:
        answer = self._inner.create(*args, **kwargs)
        answer = await answer if inspect.isawaitable(answer) else answer
        for choice in getattr(answer, "choices", ()):
            if not (choice.message.content or getattr(choice.message, "tool_calls", None)):
                why = getattr(choice, "finish_reason", None)
                raise ValueError(f"the judge's answer holds no text (finish_reason {why!r})")
        return answer


def _watch_judge(client: Any) -> None:
    completions = getattr(getattr(client, "chat", None), "completions", None)
    if completions is not None and not isinstance(completions, _Completions):
        client.chat.completions = _Completions(completions)
