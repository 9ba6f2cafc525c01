"""Where the time of a training step went, from the trace of `trace_path` (torch.profiler, Chrome format). Pure.

A kernel belongs to the part of the step whose code launched it: it carries the number of its launch, a launch lies
within the spans of the operators that were running on its thread, and their names tell. A trace without kernels (a
CPU's) is taken apart the same way by the time that operators spend in themselves.

    python benchmarks/step_profile.py TRACE.json.gz
"""

import gzip
import json
import re
import sys
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

KERNELS = ("kernel", "gpu_memcpy", "gpu_memset")
SPANS = ("cpu_op", "user_annotation", "cuda_runtime", "cuda_driver")
BY_SPAN = (  # the first that matches any span around a launch
    ("head", re.compile("Logprobs", re.IGNORECASE)),
    (
        "optimizer",
        re.compile(r"Optimizer\.step|adamw?_|_foreach_norm|linalg_vector_norm|clip_grad|newton", re.IGNORECASE),
    ),
    ("attention", re.compile("scaled_dot_product|flash_attn|varlen_attn|_efficient_attention", re.IGNORECASE)),
    ("master copies", re.compile("_foreach_(copy|add|mul)_|_foreach_zero")),
)
BY_NAME = (  # the first that matches the kernel, or the operator, itself
    ("communication", re.compile("nccl|c10d::|gloo", re.IGNORECASE)),
    ("copies", re.compile("memcpy|memset", re.IGNORECASE)),
    ("attention", re.compile("flash|fmha|sdpa|attention", re.IGNORECASE)),
    ("matmul", re.compile(r"gemm|nvjet|cutlass|xmma|cublas|aten::(mm|bmm|addmm)\b|mkldnn", re.IGNORECASE)),
)
OTHER = "other"
"""Norms, rotations, activations, the loss, and what compiled code fuses of them."""


@dataclass(slots=True)
class Part:
    """What one part of the step took."""

    seconds: float = 0.0
    num_kernels: int = 0
    largest: str = ""
    by_kernel: dict[str, float] = field(default_factory=lambda: defaultdict(float))

    def add(self, name: str, seconds: float) -> None:
        self.seconds += seconds
        self.num_kernels += 1
        self.by_kernel[name] += seconds
        if self.by_kernel[name] >= self.by_kernel.get(self.largest, 0.0):
            self.largest = name


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One step, taken apart."""

    seconds: float
    """From its first span to the end of its last kernel."""
    busy_s: float
    """While at least one kernel ran."""
    parts: Mapping[str, Part]

    def as_json(self) -> dict[str, Any]:
        parts = {
            name: {"seconds": part.seconds, "kernels": part.num_kernels, "largest": part.largest}
            for name, part in self.parts.items()
        }
        return {"seconds": self.seconds, "busy_s": self.busy_s, "parts": parts}


def read_step(file: Path) -> Step:
    """The step of a trace file."""
    with gzip.open(file, "rt", encoding="utf-8") if file.suffix == ".gz" else file.open(encoding="utf-8") as opened:
        return take_apart(json.load(opened)["traceEvents"])


def take_apart(events: Iterable[Mapping[str, Any]]) -> Step:
    """The parts of a step from the events of its trace; times in them are microseconds."""
    timed = [event for event in events if event.get("ph") == "X" and "dur" in event]
    kernels = [event for event in timed if event.get("cat") in KERNELS]
    spans = [event for event in timed if event.get("cat") in SPANS]
    threads = {thread: _Thread(found) for thread, found in _by_thread(spans).items()}
    parts: dict[str, Part] = defaultdict(Part)
    if kernels:
        launches = {
            event["args"]["correlation"]: event
            for event in spans
            if event["cat"].startswith("cuda_") and "correlation" in event.get("args", {})
        }
        for kernel in kernels:
            launch = launches.get(kernel.get("args", {}).get("correlation"))
            around = threads[_thread(launch)].around(launch["ts"]) if launch else []
            parts[_part_of(kernel["name"], around)].add(kernel["name"], kernel["dur"] / 1e6)
    else:
        for thread in threads.values():
            for name, around, own_us in thread.own_times():
                parts[_part_of(name, around)].add(name, own_us / 1e6)
    ran = kernels or spans
    start, stop = min(event["ts"] for event in timed), max(event["ts"] + event["dur"] for event in ran)
    return Step(seconds=(stop - start) / 1e6, busy_s=_covered(ran) / 1e6, parts=dict(parts))


def _part_of(name: str, around: Sequence[str]) -> str:
    named = next((part for part, pattern in BY_NAME if pattern.search(name)), None)
    if named == "communication":
        return named
    by_span = next((part for part, pattern in BY_SPAN if any(map(pattern.search, [*around, name]))), None)
    return by_span or named or OTHER


def _thread(event: Mapping[str, Any]) -> tuple[Any, Any]:
    return event.get("pid"), event.get("tid")


def _by_thread(spans: Iterable[Mapping[str, Any]]) -> dict[tuple[Any, Any], list[Mapping[str, Any]]]:
    threads: dict[tuple[Any, Any], list[Mapping[str, Any]]] = defaultdict(list)
    for span in spans:
        threads[_thread(span)].append(span)
    return threads


class _Thread:
    """The nested spans of one thread, in the order of their beginnings; each knows the one around it."""

    def __init__(self, spans: list[Mapping[str, Any]]) -> None:
        self._spans = sorted(spans, key=lambda span: (span["ts"], -span["dur"]))
        self._starts = [span["ts"] for span in self._spans]
        self._outer: list[int | None] = []
        open_spans: list[int] = []
        for index, span in enumerate(self._spans):
            while open_spans and self._end(open_spans[-1]) <= span["ts"]:
                open_spans.pop()
            self._outer.append(open_spans[-1] if open_spans else None)
            open_spans.append(index)

    def around(self, time: float) -> list[str]:
        """Names of the spans that were open at a time, the innermost first."""
        index: int | None = bisect_right(self._starts, time) - 1
        names = []
        while index is not None and index >= 0:
            if self._end(index) >= time:
                names.append(self._spans[index]["name"])
            index = self._outer[index]
        return names

    def own_times(self) -> Iterable[tuple[str, list[str], float]]:
        """Of every span its name, those around it, and its time less that of the spans right inside it."""
        inside = [0.0] * len(self._spans)
        for index, outer in enumerate(self._outer):
            if outer is not None:
                inside[outer] += self._spans[index]["dur"]
        for index, span in enumerate(self._spans):
            yield span["name"], self.around(span["ts"]), max(0.0, span["dur"] - inside[index])

    def _end(self, index: int) -> float:
        return float(self._spans[index]["ts"] + self._spans[index]["dur"])


def _covered(events: Iterable[Mapping[str, Any]]) -> float:
    """Length of the union of their times."""
    total, reached = 0.0, float("-inf")
    for event in sorted(events, key=lambda event: event["ts"]):
        stop = event["ts"] + event["dur"]
        total += max(0.0, stop - max(event["ts"], reached))
        reached = max(reached, stop)
    return total


if __name__ == "__main__":
    for part, spent in sorted(read_step(Path(sys.argv[1])).parts.items(), key=lambda item: -item[1].seconds):
        print(f"{part:15s} {spent.seconds:9.4f} s {spent.num_kernels:7d}")
        for kernel, seconds in sorted(spent.by_kernel.items(), key=lambda item: -item[1])[:5]:
            print(f"    {seconds:9.4f} s  {kernel[:110]}")
