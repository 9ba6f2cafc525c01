"""What `rl` shows while a run goes: a line a step, and at the end the reward curve and where everything lies.

Everything shown is read from the run directory, so the console knows no process and can be thrown away.
"""

import time
from collections.abc import Mapping, Sequence
from typing import Final

from rich.console import Console

from prime_rl.disk import refusal
from prime_rl.monitors.base import MetricsRow, MetricsTail
from prime_rl.monitors.events import EventTail
from prime_rl.paths import RunPaths, step_dir
from prime_rl.view.curve import svg_curve, text_curve

Row = Mapping[str, float | None]

HEADER = "   step   reward  entropy  mismatch KL   gen tok/s  train tok/s  async  off-policy   step time   left"
QUIET_S = 15.0
ERRORS: Final = "errors/"
SHOWN: Final = (
    *("step", "reward/mean", "entropy/mean", "mismatch_kl/mean", "perf/throughput", "async_level"),
    *("off_policy_gap/max", "time/step"),
)
"""What is kept of a row, of which a long run has thousands, beside failures."""


class RLConsole:
    """Prints the steps of a run as their metrics arrive. `tick` is called a few times a second."""

    def __init__(self, paths: RunPaths, *, max_steps: int | None, has_server: bool, is_new: bool = True) -> None:
        """Not `is_new`: a run that goes on, of which only what is to come is shown."""
        self._paths = paths
        self._max_steps = max_steps
        self._has_server = has_server
        self._out = Console(highlight=False, soft_wrap=True)
        self._trained = MetricsTail(paths.metrics("trainer"), _shown)
        self._batches = MetricsTail(paths.metrics("orchestrator"), _shown)
        self._events = EventTail(paths.events)
        self._num_before = 0 if is_new else len(self._trained.read())
        self._num_shown = self._num_before
        if not is_new:
            self._events.read()
        self._has_header = False
        self._started = self._last_word = time.monotonic()

    def opening(self, model: str) -> None:
        """Say what is about to happen."""
        steps = f"{self._max_steps} steps" if self._max_steps else "until stopped"
        self._out.print(f"training {model} with asynchronous RL, {steps}; logs in {self._paths.logs}/")
        if self._num_before:
            self._out.print(f"the run that is there goes on after {self._num_before} steps")
        if not self._has_server:
            self._out.print("no \\[inference] section: no inference server is started, a running one is used")

    def tick(self) -> None:
        """Print what happened since the last call, or, after a while of silence, what is waited for."""
        trained, batches = self._trained.read(), self._batches.read()
        for event in self._events.read():
            self._last_word = time.monotonic()
            self._out.print(f"  {self._last_word - self._started:5.0f} s, {event}", style="yellow", markup=False)
        batch_of = {batch["step"]: batch for batch in batches} if self._num_shown < len(trained) else {}
        while self._num_shown < len(trained):
            row = trained[self._num_shown]
            batch = batch_of.get(row["step"], {})
            if not self._has_header:
                self._has_header = True
                self._out.print(HEADER, style="bold")
            self._num_shown += 1
            self._last_word = time.monotonic()
            self._out.print(self._line(row, batch))
            self._show_errors(batch)
        if time.monotonic() - self._last_word > QUIET_S:
            self._last_word = time.monotonic()
            waiting = "the trainer" if len(batches) > len(trained) else "rollouts"
            self._out.print(f"  {time.monotonic() - self._started:5.0f} s, {len(trained)} steps; waiting for {waiting}")

    def _show_errors(self, batch: Row) -> None:
        """Failed rollouts of a batch by kind; they were not trained on, and somebody should know."""
        kinds = {name: count for name, count in batch.items() if name.startswith(ERRORS) and name != "errors/rate"}
        told = ", ".join(f"{count:.0f} {kind.removeprefix(ERRORS)}" for kind, count in kinds.items() if count)
        if told:
            self._out.print(f"        failed rollouts, not trained on: {told}", style="yellow")

    def _line(self, trained: Row, batch: Row) -> str:
        step = int(trained["step"] or 0)
        of = f"/{self._max_steps}" if self._max_steps else ""
        cells = [
            f"{step + 1:>5}{of:<3}",
            _cell(batch, "reward/mean", "7.4f"),
            _cell(trained, "entropy/mean", "8.4f"),
            _cell(trained, "mismatch_kl/mean", "12.2e"),
            _cell(batch, "perf/throughput", "11,.0f"),
            _cell(trained, "perf/throughput", "12,.0f"),
            _cell(batch, "async_level", "6.0f"),
            _cell(batch, "off_policy_gap/max", "11.0f"),
            _cell(trained, "time/step", "10.2f") + "s",
            self._left(step),
        ]
        return " ".join(cells)

    def _left(self, step: int) -> str:
        if not self._max_steps:
            return ""
        per_step = (time.monotonic() - self._started) / max(step + 1 - self._num_before, 1)
        seconds = round(per_step * (self._max_steps - step - 1))
        return f"{seconds // 60:>3}:{seconds % 60:02}"

    def interrupted(self) -> None:
        """Say what there is after a Ctrl-C."""
        self._out.print(f"\nstopped after {self._num_shown} steps; everything so far is in {self._paths.output_dir}/")

    def closing(self) -> None:
        """The reward curve, and where weights, logs and metrics are."""
        rows = self._batches.read()
        points = [(int(row["step"] or 0), row["reward/mean"] or 0.0) for row in rows if "reward/mean" in row]
        if points:
            self._out.print()
            self._draw(points)
            self._out.print(text_curve([value for _, value in points], label="mean reward over steps"), markup=False)
            self._out.print(f"reward: {points[0][1]:.3f} at the first step, {points[-1][1]:.3f} at the last")
        paths = self._paths
        self._out.print(f"\nweights  {step_dir(paths.weights, self._num_shown)}")
        self._out.print(f"logs     {paths.logs}/")
        self._out.print(f"metrics  {paths.metrics('orchestrator')}, {paths.metrics('trainer')}")
        if paths.reward_curve.exists():
            self._out.print(f"curve    {paths.reward_curve}")

    def _draw(self, points: Sequence[tuple[int, float]]) -> None:
        """The curve as a file, which nobody needs."""
        curve = self._paths.reward_curve
        try:
            curve.write_text(svg_curve(points, title="mean reward"), encoding="utf-8")
        except OSError as error:
            curve.unlink(missing_ok=True)
            self._out.print(f"{curve} is not written: {refusal(error, curve)}", style="yellow", markup=False)


def _shown(row: MetricsRow) -> MetricsRow:
    failures = {name: count for name, count in row.items() if count and name.startswith(ERRORS)}
    return {name: row[name] for name in SHOWN if name in row} | failures


def _cell(row: Row, name: str, form: str) -> str:
    value = row.get(name)
    width = int("".join(c for c in form.partition(".")[0] if c.isdigit()))
    return f"{'-':>{width}}" if value is None else f"{value:{form}}"
