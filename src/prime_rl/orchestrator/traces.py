"""Every rollout that ended, with all that is known of it, in the form in which `verifiers` saves an evaluation.

traces/step_N/<environment>/results.jsonl     the rollouts of batch N, and those that were run for it in vain
traces/step_N/<environment>/metadata.json     what they are of, and their means

`verifiers` opens such a directory (`load_outputs`), and so does what is built on it. A row has the fields of its
`RolloutOutput`, with times in seconds since the rollout began, and of ours besides:

env, group, rollout_id, attempt     where it belongs
end                                 how it ended, and why: {"kind": "failed", "why": "timeout"}
policy                              weights served at dispatch, and the oldest and newest that sampled a token of it
advantage                           that of its group; a normalisation over the whole batch (`std_norm = "global"`) is
                                    not in it
tokens                              its samples, token by token: ids, which spans were sampled, and of the sampled ones
                                    the logprobs (5 decimals) and weights versions

`reward` is left out where there is none: a rollout that failed, or was cancelled before its end, has no reward of 0.

Rows are made and written in a thread of their own, so the event loop does nothing but put a rollout into a queue. What
goes wrong there (a full disk) ends the traces with a warning, and never the run; how many rollouts are missing is said
at the end. Where a run that was killed goes on, each rollout of its history has one row at most: rows of those that are
run again are dropped, and those that waited in the queue when it was killed are missing.
"""

from __future__ import annotations

import asyncio
import math
import os
import shutil
import threading
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any, Final

import msgspec
import numpy as np

from prime_rl.config.orchestrator import OrchestratorConfig, TrainEnvConfig
from prime_rl.disk import append_whole, refusal
from prime_rl.environments.rollouts import Failure, Rollout
from prime_rl.environments.trajectories import Chain, Strategy, merge_turns
from prime_rl.logs import get_logger
from prime_rl.orchestrator.generation import EndedRollout
from prime_rl.paths import step_dir

GIB: Final = 1 << 30
MAX_WAITING_TOKENS: Final = 8_000_000
"""Tokens of rollouts that wait to be written, about a gigabyte and two seconds' work; where the disk is slower than
that, others are left out and counted."""
CLOSE_TIMEOUT_S: Final = 60.0
"""For what waits at the end."""
MAX_AT_ONCE: Final = 256
"""Rollouts that are written together."""
DECIMALS: Final = 5
"""Of a logprob."""
OURS: Final = ("env", "group", "rollout_id", "attempt", "end", "policy", "advantage", "tokens")

_logger = get_logger(__name__)


def _none(rollout_id: int) -> bool:
    return False


@asynccontextmanager
async def open_traces(
    config: OrchestratorConfig, root: Path, *, ended: Callable[[int], bool] = _none
) -> AsyncIterator[Traces]:
    """The traces of a run below `root`; at the end, what still waits is written.

    `ended`: of the rollouts that have a row there, those that had ended when another process left off, by their ids.
    Rows of others go, for their ids are given again.
    """
    traces = Traces(config, root, ended)
    try:
        yield traces
    finally:
        await traces.close()


class Traces:
    """Writes rollouts from a thread. Made by `open_traces`."""

    def __init__(self, config: OrchestratorConfig, root: Path, ended: Callable[[int], bool] = _none) -> None:
        self._num_noted = self._num_done = self._num_left_out = 0
        """Rollouts that were to be written, that were taken care of by the thread, and for which there was no room."""
        self._noted_tokens = self._done_tokens = 0
        self._files = _Files(config, root)
        self._ended = ended
        self._waiting: SimpleQueue[EndedRollout | None] = SimpleQueue()
        self._thread: threading.Thread | None = None
        if config.max_traces_gb > 0 and not config.bench:
            self._thread = threading.Thread(target=self._write, name="traces", daemon=True)
            self._thread.start()

    def note(self, ended: EndedRollout) -> None:
        """Have it written. Takes no time."""
        if self._thread is None:
            return
        self._num_noted += 1
        num_waiting = self._noted_tokens - self._done_tokens
        if num_waiting < MAX_WAITING_TOKENS and self._thread.is_alive():
            self._noted_tokens += _num_tokens(ended)
            self._waiting.put(ended)
            return
        self._num_left_out += 1
        if self._num_left_out == 1 and self._thread.is_alive():
            _logger.warning("The disk is too slow for every rollout: some are left out of %s", self._files.root)

    async def close(self) -> None:
        """Write what waits, for `CLOSE_TIMEOUT_S` at most, and say how many rollouts are missing."""
        if self._thread is None:
            return
        self._waiting.put(None)
        await asyncio.to_thread(self._thread.join, CLOSE_TIMEOUT_S)
        if self._thread.is_alive():
            _logger.warning("The disk does not take what waits for %s within %g s", self._files.root, CLOSE_TIMEOUT_S)
        if missing := self._num_noted - self._num_done + self._files.num_left_out:
            _logger.warning("%d rollouts are not in %s", missing, self._files.root)

    def _write(self) -> None:
        """The thread. It ends with what goes wrong in it; `note` and `close` see that."""
        is_open = True
        try:
            self._files.take_up(self._ended)
            while is_open:
                batch, is_open = self._next()
                self._files.add(batch)
                self._num_done += len(batch)
                self._done_tokens += sum(map(_num_tokens, batch))
        except Exception as error:  # noqa: BLE001 - supervision point: told, and its rollouts are counted as missing
            what = refusal(error, self._files.root) if isinstance(error, OSError) else repr(error)
            _logger.warning("Rollouts are no longer written to %s: %s", self._files.root, what)

    def _next(self) -> tuple[list[EndedRollout], bool]:
        """What waits, once something does; and whether more may come."""
        batch: list[EndedRollout] = []
        item = self._waiting.get()
        while item is not None:
            batch.append(item)
            if len(batch) == MAX_AT_ONCE:
                return batch, True
            try:
                item = self._waiting.get_nowait()
            except Empty:
                return batch, True
        return batch, False


def _num_tokens(ended: EndedRollout) -> int:
    """What it holds in memory, in tokens. Turns share the tokens of their prompts."""
    if ended.result is None:
        return 0
    turns = ended.result.turns
    return ended.result.num_completion_tokens + max((len(turn.prompt_ids) for turn in turns), default=0)


@dataclass(slots=True)
class _Mean:
    total: float = 0.0
    count: int = 0

    def add(self, value: float) -> None:
        self.total += value
        self.count += 1

    @property
    def value(self) -> float:
        return self.total / self.count if self.count else math.nan


@dataclass(slots=True)
class _Means:
    """Means over the rows of one file."""

    rewards: _Mean = field(default_factory=_Mean)
    metrics: dict[str, _Mean] = field(default_factory=dict)
    input_tokens: _Mean = field(default_factory=_Mean)
    output_tokens: _Mean = field(default_factory=_Mean)
    failed: _Mean = field(default_factory=_Mean)
    examples: set[int] = field(default_factory=set)

    def add(self, row: dict[str, Any]) -> None:
        self.examples.add(row["example_id"])
        self.failed.add(row["error"] is not None)
        self.input_tokens.add(row["token_usage"]["input_tokens"])
        self.output_tokens.add(row["token_usage"]["output_tokens"])
        if "reward" in row:
            self.rewards.add(row["reward"])
        for name, value in row["metrics"].items():
            self.metrics.setdefault(name, _Mean()).add(math.nan if value is None else value)


class _Row(msgspec.Struct):
    """What the means need of a row, and what names it."""

    rollout_id: int
    example_id: int
    error: dict[str, Any] | None
    token_usage: dict[str, int]
    metrics: dict[str, float | None]
    reward: float | msgspec.UnsetType = msgspec.UNSET


def take_up_rows(path: Path, ended: Callable[[int], bool]) -> tuple[_Means, int]:
    """The means of a file and its size in bytes, once it holds each of the `ended` rollouts once, and no others.

    Raises: OSError; msgspec.MsgspecError where a row is damaged, other than a last one that was cut off.
    """
    means, seen, keeps = _Means(), set[int](), list[bool]()
    with path.open("rb") as file:
        for line in file:
            row = msgspec.json.decode(line, type=_Row) if line.endswith(b"\n") else None
            keeps.append(row is not None and row.rollout_id not in seen and ended(row.rollout_id))
            if row is not None and keeps[-1]:
                seen.add(row.rollout_id)
                means.add(msgspec.to_builtins(row))
    if not all(keeps):
        partial = path.with_name(f".{path.name}.tmp")
        with path.open("rb") as file, partial.open("wb") as kept:
            kept.writelines(line for line, is_kept in zip(file, keeps, strict=True) if is_kept)
        os.replace(partial, path)
    return means, path.stat().st_size


class _Files:
    """The files of a run, together no larger than is allowed. Used by one thread."""

    def __init__(self, config: OrchestratorConfig, root: Path) -> None:
        self.root = root
        self._config = config
        self._max_bytes = int(config.max_traces_gb * GIB)
        self._envs = {env.label: env for env in config.env}
        self._means: dict[tuple[int, str], _Means] = {}
        self._bytes: dict[int, int] = {}
        """By step."""
        self.num_left_out = 0
        """Rollouts of a step whose traces alone are as large as is allowed."""
        self._started_at = time.monotonic()
        self._first_step = 0
        """What belongs to earlier ones is left out: they were deleted."""

    def add(self, batch: Sequence[EndedRollout]) -> None:
        """Append rollouts to their files. Raises: OSError."""
        lines: dict[tuple[int, str], list[bytes]] = {}
        for ended in batch:
            if ended.batch < self._first_step:
                continue
            if self._bytes.get(ended.batch, 0) >= self._max_bytes:
                self.num_left_out += 1
                continue
            place = ended.batch, ended.dispatch.example.env
            row = trace_row(ended, self._config.trajectory_strategy)
            if place not in self._means:
                self._begin(*place)
            self._means[place].add(row)
            lines.setdefault(place, []).append(msgspec.json.encode(row) + b"\n")
        for (step, env), encoded in lines.items():
            directory = step_dir(self.root, step) / env
            with (directory / "results.jsonl").open("ab+", buffering=0) as file:
                append_whole(file.fileno(), b"".join(encoded))
            self._bytes[step] = self._bytes.get(step, 0) + sum(map(len, encoded))
            self._describe(directory, self._envs[env], self._means[step, env])
        self._make_room()

    def take_up(self, ended: Callable[[int], bool]) -> None:
        """Go on with the files that are there, less the rows of other rollouts than the `ended`.

        Raises: OSError; msgspec.MsgspecError where a row is damaged.
        """
        for path in sorted(self.root.glob("step_*/**/results.jsonl")):
            number, *env = path.parent.relative_to(self.root).parts
            step = int(number.removeprefix("step_"))
            means, num_bytes = take_up_rows(path, ended)
            if num_bytes == 0:
                shutil.rmtree(path.parent)
                with suppress(OSError):  # other environments have rows of that step
                    step_dir(self.root, step).rmdir()
                continue
            self._means[step, "/".join(env)] = means
            self._bytes[step] = self._bytes.get(step, 0) + num_bytes
        self._first_step = min(self._bytes, default=0)

    def _begin(self, step: int, env: str) -> None:
        (step_dir(self.root, step) / env).mkdir(parents=True, exist_ok=True)
        self._means[step, env] = _Means()

    def _make_room(self) -> None:
        """Delete the oldest steps, but never the newest."""
        while sum(self._bytes.values()) > self._max_bytes and len(self._bytes) > 1:
            step = min(self._bytes)
            shutil.rmtree(step_dir(self.root, step))
            del self._bytes[step]
            self._means = {place: means for place, means in self._means.items() if place[0] != step}
            self._first_step = step + 1

    def _describe(self, directory: Path, env: TrainEnvConfig, means: _Means) -> None:
        """Write `metadata.json`, with the fields of verifiers' `GenerateMetadata`."""
        config = self._config
        described = {
            "env_id": env.id,
            "name": env.label,
            "env_args": env.args,
            "model": config.model.name,
            "base_url": ",".join(config.client.base_url),
            "num_examples": len(means.examples),
            "rollouts_per_example": config.rollouts_per_example,
            "shuffle": False,
            "shuffle_seed": None,
            "sampling_args": {"temperature": config.sampling.temperature, "max_tokens": config.sampling.max_tokens},
            "time": time.monotonic() - self._started_at,
            "avg_reward": means.rewards.value,
            "avg_metrics": {name: mean.value for name, mean in means.metrics.items()},
            "avg_error": means.failed.value,
            "pass_at_k": {},
            "pass_all_k": {},
            "pass_threshold": 0.5,
            "usage": {"input_tokens": means.input_tokens.value, "output_tokens": means.output_tokens.value},
            "state_columns": OURS,
            "tools": None,
        }
        partial = directory / ".metadata.json.tmp"
        partial.write_bytes(msgspec.json.encode(described) + b"\n")
        os.replace(partial, directory / "metadata.json")


def trace_row(ended: EndedRollout, strategy: Strategy) -> dict[str, Any]:
    """One line of `results.jsonl`."""
    dispatch, rollout = ended.dispatch, ended.result
    if rollout is None:
        rollout = Rollout(id=dispatch.rollout_id, env=dispatch.example.env, example=dispatch.example.index)
    has_reward = ended.result is not None and rollout.failure is None
    num_prompt = _prompt_length(rollout)
    versions = [version for turn in rollout.turns for version in turn.versions]
    scored = {"reward": rollout.reward} if has_reward else {}
    return {
        "example_id": rollout.example,
        "prompt": rollout.messages[:num_prompt],
        "completion": rollout.messages[num_prompt:],
        **scored,
        "metrics": rollout.metrics,
        "error": None if rollout.failure is None else _error(rollout.failure),
        "is_completed": has_reward,
        "is_truncated": rollout.truncated,
        "stop_condition": rollout.stop_reason or None,
        "timing": _timing(rollout.timings),
        "token_usage": {
            "input_tokens": sum(len(turn.prompt_ids) for turn in rollout.turns),
            "output_tokens": rollout.num_completion_tokens,
        },
        "env": dispatch.example.env,
        "group": dispatch.group,
        "rollout_id": dispatch.rollout_id,
        "attempt": dispatch.attempt,
        "end": {"kind": ended.end.kind, "why": ended.end.why},
        "policy": {
            "at_dispatch": dispatch.version,
            "oldest": min(versions, default=None),
            "newest": max(versions, default=None),
        },
        "advantage": None if ended.scored is None else ended.scored.advantage,
        "tokens": [_sample(chain) for chain in merge_turns(rollout.turns, strategy)],
    }


def _sample(chain: Chain) -> dict[str, Any]:
    logprobs: list[float] = []
    versions: list[int] = []
    for start, end in chain.sampled:
        logprobs += chain.logprobs[start:end]
        versions += chain.versions[start:end]
    rounded = np.round(np.array(logprobs, np.float64), DECIMALS).tolist()
    return {"ids": chain.token_ids, "sampled": chain.sampled, "logprobs": rounded, "versions": versions}


def _prompt_length(rollout: Rollout) -> int:
    """Messages before the first that the model wrote: of the assistant's, as many as there are turns, the last ones."""
    by_assistant = [index for index, message in enumerate(rollout.messages) if message.get("role") == "assistant"]
    num_given = max(0, len(by_assistant) - len(rollout.turns))
    return by_assistant[num_given] if num_given < len(by_assistant) else len(rollout.messages)


def _timing(seconds: dict[str, float]) -> dict[str, Any]:
    """In the form of verifiers' `RolloutTiming`, as far as it is known."""
    total = seconds.get("total", 0.0)
    score = seconds.get("score", 0.0)
    generated = seconds.get("generate", max(0.0, total - score))
    return {
        "start_time": 0.0,
        "generation": {"start": 0.0, "end": generated},
        "scoring": {"start": max(generated, total - score), "end": total},
        "total": total,
    }


def _error(failure: Failure) -> dict[str, str]:
    """In the form of verifiers' `ErrorData`."""
    return {
        "error": failure.type or failure.kind.value,
        "message": failure.message,
        "error_chain_repr": str(failure),
        "error_chain_str": str(failure),
    }
