"""What became of the rollouts of a run, held against what was done to them."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Final

from tests.chaos.runs import AT_ONCE, Outcome, Row, Trained

FATAL: Final = frozenset({"exception", "await", "block", "kill", "nan", "malformed"})
"""Faults after which a rollout has nothing to learn from. The two others only cost a request, which is sent again."""
EXPECTED: Final = {
    "exception": {"environment", "timeout"},
    "await": {"timeout"},
    "block": {"timeout"},
    "kill": {"worker_died"},
    "nan": {"bad_reward"},
    "malformed": {"inference", "empty_completion"},
    "error": {"inference"},
    "lost": {"inference"},
}
"""As what a rollout fails that is struck by it; an environment's TimeoutError is a timeout."""
FROM_OUTSIDE: Final = frozenset({"timeout", "worker_died"})
"""As what a rollout may fail because of a neighbour."""
TOLERANCE: Final = 2e-5
"""Of a logprob: traces have five decimals."""


@dataclass(slots=True)
class Ledger:
    """The rollouts of a run by their numbers."""

    ends: dict[int, Row] = field(default_factory=dict)
    """The trace of each that ended."""
    faults: defaultdict[int, list[Row]] = field(default_factory=lambda: defaultdict(list))
    """What struck each."""
    answers: defaultdict[int, list[Row]] = field(default_factory=lambda: defaultdict(list))
    """What the server answered to each, where it was handed on whole."""
    begun: set[int] = field(default_factory=set)
    """Those that the environment began."""

    def kinds(self, rollout: int) -> set[str]:
        return {fault["fault"] for fault in self.faults[rollout]}

    def of_kind(self, kind: str) -> list[Row]:
        """All faults of one kind."""
        return [fault for faults in self.faults.values() for fault in faults if fault["fault"] == kind]

    def end(self, rollout: int) -> str:
        """How it ended, as the orchestrator words it."""
        end = self.ends[rollout]["end"]
        return f"{end['kind']} ({end['why']})" if end["why"] else str(end["kind"])


def ledger_of(run: Outcome) -> Ledger:
    """Raises: AssertionError where a rollout ended twice, or two of the same number were begun."""
    ledger = Ledger()
    for row in run.traces():
        assert row["rollout_id"] not in ledger.ends, f"rollout {row['rollout_id']} ended twice"
        ledger.ends[row["rollout_id"]] = row
    noted = run.noted()
    rollout_of: dict[str, int] = {}
    for line in noted:
        if "rollout" in line and "session" in line:
            assert line["rollout"] not in ledger.begun, f"rollout {line['rollout']} was begun twice"
            ledger.begun.add(line["rollout"])
            rollout_of[line["session"]] = line["rollout"]
    for line in noted:
        rollout = line["rollout"] if "rollout" in line else rollout_of[line["session"]]
        if "fault" in line:
            ledger.faults[rollout].append(line)
        elif "ids" in line:
            ledger.answers[rollout].append(line)
    return ledger


def check_counts(run: Outcome, ledger: Ledger) -> None:
    """Every rollout that was dispatched ended once, and the counters say how."""
    dispatched, ends = run.counted
    assert sorted(ledger.ends) == list(range(dispatched))
    assert Counter(map(ledger.end, ledger.ends)) == ends
    assert ends.total() == dispatched
    assert ledger.begun <= ledger.ends.keys()
    # What the environment never heard of died on its way there, or was cancelled.
    unheard = [ledger.end(rollout) for rollout in ledger.ends.keys() - ledger.begun]
    assert {end for end in unheard if not end.startswith("cancelled")} <= {f"failed ({why})" for why in FROM_OUTSIDE}
    last = run.metrics[-1]
    for kind in ("used", "filtered", "failed"):
        seen = sum(row.get(f"rollouts/game/{kind}", 0) for row in run.metrics)
        assert seen == last[f"scheduler/rollouts_{kind}"], kind
        assert seen <= sum(count for end, count in ends.items() if end.startswith(kind)), kind


def check_failures(ledger: Ledger) -> None:
    """A rollout that was struck fails for what struck it; one that was not fails for its neighbours alone."""
    for rollout, row in ledger.ends.items():
        end, struck = row["end"], ledger.kinds(rollout)
        if end["kind"] == "failed":
            own = set().union(*(EXPECTED[kind] for kind in struck))
            assert end["why"] in own | FROM_OUTSIDE, (
                f"rollout {rollout}, struck by {struck}, ended {end}, {row['error']}"
            )
            assert "reward" not in row
        elif end["kind"] != "cancelled":
            assert not struck & FATAL, f"rollout {rollout}, struck by {struck}, ended {end}"
    _check_neighbours(ledger)


def _check_neighbours(ledger: Ledger) -> None:
    """No more came to harm through others than were in a process that was killed, or that stood still, at the time."""
    kills, blocks = ledger.of_kind("kill"), ledger.of_kind("block")
    by_kills, by_blocks = (sum(fault["held"] for fault in faults) for faults in (kills, blocks))
    fell: Counter[str] = Counter()
    for rollout, row in ledger.ends.items():
        own = set().union(*(EXPECTED[kind] for kind in ledger.kinds(rollout)))
        why = row["end"]["why"] if row["end"]["kind"] == "failed" else ""
        if rollout not in ledger.begun and why in FROM_OUTSIDE:
            fell["unheard"] += 1
        elif why == "worker_died" or (why == "timeout" and why not in own):
            fell[why] += 1
    assert fell["timeout"] <= by_blocks, fell
    assert fell["worker_died"] <= by_kills + by_blocks, fell
    # Those on their way to the process are not among those that it held.
    assert fell.total() <= AT_ONCE * (len(kills) + len(blocks)), fell


def check_groups(ledger: Ledger, *, size: int) -> None:
    """What is trained on are whole groups of `size`, each of one example, and an advantage is the reward over the
    mean of its group."""
    groups: defaultdict[tuple[int, int], list[Row]] = defaultdict(list)
    for row in ledger.ends.values():
        if row["end"]["kind"] == "used":
            groups[row["step"], row["group"]].append(row)
    for place, rows in groups.items():
        assert len(rows) == size, place
        assert len({row["example_id"] for row in rows}) == 1, place
        mean = math.fsum(row["reward"] for row in rows) / size
        for row in rows:
            assert math.isclose(row["advantage"], row["reward"] - mean, abs_tol=1e-6), (place, row["rollout_id"])


def check_batches(run: Outcome, ledger: Ledger) -> None:
    """The batches hold the rollouts that were used, token by token as the server sampled them, each with its advantage,
    and nothing else."""
    used: defaultdict[int, list[int]] = defaultdict(list)
    for rollout, row in ledger.ends.items():
        if row["end"]["kind"] == "used":
            used[row["step"]].append(rollout)
    assert sorted(used) == list(range(len(run.metrics)))
    for step, rollouts in used.items():
        expected = [
            Trained(
                ids=sample["ids"],
                places=(places := _places(sample["sampled"])),
                logprobs=sample["logprobs"],
                advantages=[ledger.ends[rollout]["advantage"]] * len(places),
            )
            for rollout in rollouts
            for sample in ledger.ends[rollout]["tokens"]
        ]
        for trained in run.trained_on(step):
            match = next((sample for sample in expected if _is_same(trained, sample)), None)
            assert match is not None, f"batch {step} holds {trained}, which is no sample of a rollout that was used"
            expected.remove(match)
        assert not expected, f"batch {step} lacks {expected[0]}"
        written = [(row["example"], row["reward"]) for row in run.readable(step)]
        assert sorted(written) == sorted((ledger.ends[i]["example_id"], ledger.ends[i]["reward"]) for i in rollouts)
        for rollout in rollouts:
            _check_tokens(ledger.ends[rollout]["tokens"], ledger.answers[rollout])


def _is_same(one: Trained, other: Trained) -> bool:
    if (one.ids, one.places) != (other.ids, other.places):
        return False
    pairs = zip((*one.logprobs, *one.advantages), (*other.logprobs, *other.advantages), strict=True)
    return all(abs(a - b) <= TOLERANCE for a, b in pairs)


def _check_tokens(samples: Sequence[Row], answers: Sequence[Row]) -> None:
    """The sampled tokens of a rollout are those of the last answer to each of its prompts, turn after turn."""
    last = {tuple(answer["prompt"]): answer for answer in answers}
    turns = [last[prompt] for prompt in sorted(last, key=len)]
    assert [token for turn in turns for token in turn["ids"]] == [
        sample["ids"][place] for sample in samples for place in _places(sample["sampled"])
    ]
    expected = [round(logprob, 5) for turn in turns for logprob in turn["logprobs"]]
    logprobs = [logprob for sample in samples for logprob in sample["logprobs"]]
    assert max((abs(a - b) for a, b in zip(expected, logprobs, strict=True)), default=0) <= TOLERANCE


def _places(spans: Iterable[Sequence[int]]) -> list[int]:
    return [place for start, end in spans for place in range(start, end)]


def table(ledgers: Sequence[Ledger]) -> str:
    """What was injected and what became of it, over several runs: rollouts by kind of fault and end; and by the ways
    in which answers were spoilt."""
    became: defaultdict[str, Counter[str]] = defaultdict(Counter)
    ways: defaultdict[str, Counter[str]] = defaultdict(Counter)
    for ledger in ledgers:
        for rollout in ledger.ends:
            kinds = " and ".join(sorted(ledger.kinds(rollout))) or "no fault"
            became[kinds][ledger.end(rollout)] += 1
            for fault in ledger.faults[rollout]:
                if fault.get("detail"):
                    ways[f"{fault['fault']}: {fault['detail']}"][ledger.end(rollout)] += 1
    return "\n".join([*_lines("injected", became), "", *_lines("in which way", ways)])


def _lines(title: str, became: dict[str, Counter[str]]) -> Iterator[str]:
    total = sum(counts.total() for counts in became.values())
    yield f"{title:41} {'rollouts':>8} {'share':>6}  what became of them"
    for kinds, counts in sorted(became.items(), key=lambda item: -item[1].total()):
        ends = ", ".join(f"{count} {end}" for end, count in counts.most_common())
        yield f"{kinds:41} {counts.total():8} {counts.total() / total:6.1%}  {ends}"
