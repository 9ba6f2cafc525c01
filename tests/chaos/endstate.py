"""What holds at the end of a run that was disturbed: nothing is lost, nothing is there twice, nothing is half there."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from prime_rl.config.load import load
from prime_rl.config.orchestrator import OrchestratorConfig
from prime_rl.journal import Entry, history, read_journal
from prime_rl.monitors.base import read_metrics
from prime_rl.orchestrator.buffer import Buffer
from prime_rl.paths import RunPaths, drafts, step_dir
from prime_rl.transport.manifest import MARKER, read_manifest, verify
from tests.chaos.kills import ENV, NUM_EXAMPLES, Ended

BATCH = "batch.msgpack"
READABLE = "rollouts.jsonl"


def check(ended: Ended, paths: RunPaths, *, steps: int) -> None:
    """All that holds for a run that has reached its last step. Raises: AssertionError."""
    where = paths.output_dir
    out = where.parent / "rl.out"
    assert ended.code == 0, f"{where} ended with {ended.code}:\n{out.read_text()[-3000:] if out.exists() else ''}"
    assert not ended.left, f"{where} has ended, but there is still {ended.left}"
    entries = read_journal(paths.journal)
    check_history(entries, steps=steps)
    check_batches(entries, paths, steps=steps)
    check_files(paths, steps=steps)
    check_metrics(paths, steps=steps)
    check_examples(paths, steps=steps)


def check_history(entries: Sequence[Entry], *, steps: int) -> None:
    """Each step counts once for the final weights, and no step was ever made of two batches, or into two weights."""
    assert [entry.step for entry in history(entries)] == list(range(steps))
    for event, what in (("batch_consumed", "batches"), ("batch_complete", "batches"), ("weights_published", "weights")):
        for step, digests in _digests(entries, event).items():
            assert len(set(digests)) == 1, f"step {step} has several {what} ({event}): {digests}"
    assert entries[-1].event == "run_complete", entries[-1]


def check_batches(entries: Sequence[Entry], paths: RunPaths, *, steps: int) -> None:
    """Every batch was written once, and what was trained on is what was written."""
    written = _digests(entries, "batch_complete")
    for entry in history(entries):
        assert entry.step is not None
        on_disk = step_dir(paths.rollouts, entry.step)
        digests = {entry.facts["digest"], *written[entry.step]}
        if (on_disk / MARKER).exists():
            digests.add(read_manifest(on_disk).files[BATCH].xxh3)
        assert len(digests) == 1, f"batch {entry.step} has several digests: {digests}"
        # Killed between the batch and the word of it, the orchestrator goes on behind it.
        goes_on = any(one.event == "recovered" and one.step == entry.step + 1 for one in entries)
        assert len(written[entry.step]) == 1 or goes_on, f"batch {entry.step} was complete {len(written[entry.step])}x"
    names = {path.name for path in paths.rollouts.iterdir()}
    assert names == {f"step_{step}" for step in range(steps)}, names


def check_files(paths: RunPaths, *, steps: int) -> None:
    """Every directory under a final name is whole, and there are no others; the recovery checkpoint is gone."""
    roots = (paths.rollouts, paths.weights, paths.merged, paths.checkpoints, paths.recovery, paths.broadcasts)
    for root in roots:
        for directory in root.glob("step_*"):
            if root == paths.rollouts and not (directory / MARKER).exists():
                left = {path.name for path in directory.iterdir()}
                assert left == {READABLE}, f"{directory} has no marker, but {left}"
            else:
                verify(directory)
        hidden = [path.name for path in root.glob(".*")]
        assert not drafts(root), drafts(root)
        assert not hidden, f"{root} holds {hidden}"
    assert (step_dir(paths.weights, steps) / MARKER).exists()
    assert not list(paths.recovery.glob("*")), list(paths.recovery.glob("*"))
    assert not list(paths.superseded.glob("*")), "nobody went back by choice"
    scraps = [path for path in paths.output_dir.rglob("*.tmp*") if path.parent != paths.activity]
    assert not scraps, scraps


def check_metrics(paths: RunPaths, *, steps: int) -> None:
    for process in ("orchestrator", "trainer"):
        found = [row["step"] for row in read_metrics(paths.metrics(process))]
        assert found == list(range(steps)), f"{process}'s metrics are of the steps {found}"


def check_examples(paths: RunPaths, *, steps: int) -> None:
    """No example is trained on twice or left out: those used are the first of the order, but for those whose group came
    to nothing, was still under way at the end, or waited for a batch that never came."""
    used: list[int] = []
    for step in range(steps):
        groups: dict[int, list[int]] = defaultdict(list)
        for row in _rows(step_dir(paths.rollouts, step) / READABLE):
            groups[row["group"]].append(row["example"])
        for number, examples in groups.items():
            assert len(set(examples)) == 1, f"group {number} of batch {step} is of the examples {examples}"
            assert len(examples) == _config(paths).rollouts_per_example, f"group {number} of batch {step}: {examples}"
        used += [examples[0] for examples in groups.values()]
    order = example_order(paths, count=NUM_EXAMPLES)
    places = sorted(order.index(example) for example in used)
    assert len(set(places)) == len(places), f"examples were used twice: {_twice(used)}"
    missing = [order[place] for place in range(places[-1]) if place not in set(places)]
    unexplained = set(missing) - _came_to_nothing(paths)
    assert not unexplained, f"examples {sorted(unexplained)} were left out of {len(used)} groups; order {order[:60]}"


def example_order(paths: RunPaths, *, count: int) -> list[int]:
    """The examples of the one environment as they are drawn, of one epoch."""
    config = _config(paths)
    buffer = Buffer({ENV: count}, config.buffer, seed=config.seed)
    return [buffer.next().index for _ in range(count)]


def _config(paths: RunPaths) -> OrchestratorConfig:
    return load(OrchestratorConfig, ["@", str(paths.config("orchestrator"))], {})


def _came_to_nothing(paths: RunPaths) -> set[int]:
    """Examples of which a rollout ended otherwise than in a batch."""
    return {
        row["example_id"]
        for file in paths.traces.glob(f"step_*/{ENV}/results.jsonl")
        for row in _rows(file)
        if row["end"]["kind"] != "used"
    }


def _twice(used: Sequence[int]) -> list[int]:
    return sorted({example for example in used if used.count(example) > 1})


def _digests(entries: Sequence[Entry], event: str) -> Mapping[int, list[Any]]:
    found: dict[int, list[Any]] = defaultdict(list)
    for entry in entries:
        if entry.event == event and entry.step is not None:
            found[entry.step].append(entry.facts["digest"])
    return found


def _rows(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()]
