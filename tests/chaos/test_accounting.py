"""The checks themselves: each finds what it is for."""

from __future__ import annotations

import pytest

from tests.chaos.accounting import Ledger, check_failures, check_groups
from tests.chaos.draws import Stream


def row_of(kind: str, why: str = "", **fields: object) -> dict[str, object]:
    return {"end": {"kind": kind, "why": why}, "error": None, **fields}


def ledger_of(*rows: dict[str, object], unheard: int = 0) -> Ledger:
    """The last `unheard` never came to the environment."""
    return Ledger(ends=dict(enumerate(rows)), begun=set(range(len(rows) - unheard)))


@pytest.mark.parametrize("why", ["timeout", "worker_died"])
def test_a_rollout_that_nothing_struck_may_fail_only_beside_one_that_harmed_its_process(why: str):
    kind = "block" if why == "timeout" else "kill"
    ledger = ledger_of(*[row_of("failed", why)] * 3)
    with pytest.raises(AssertionError):
        check_failures(ledger)
    ledger.faults[0].append({"fault": kind, "held": 3})
    check_failures(ledger)
    ledger.faults[0][0]["held"] = 2 if why == "worker_died" else 1
    with pytest.raises(AssertionError):
        check_failures(ledger)


def test_those_on_their_way_to_a_process_die_with_it_but_no_more_than_were_in_flight():
    ledger = ledger_of(*[row_of("failed", "worker_died")] * 33, unheard=31)
    ledger.faults[0].append({"fault": "kill", "held": 2})
    with pytest.raises(AssertionError):
        check_failures(ledger)
    del ledger.ends[32]
    check_failures(ledger)


@pytest.mark.parametrize(
    "change",
    [{}, {"advantage": 0.25}, {"example_id": 2}, {"end": {"kind": "failed", "why": "inference"}}, {"group": 8}],
)
def test_groups_are_whole_of_one_example_and_with_their_mean_as_baseline(change: dict[str, object]):
    rows = [
        row_of("used", step=0, group=7, rollout_id=index, example_id=1, reward=reward, advantage=reward - 0.5)
        for index, reward in enumerate((0.0, 1.0))
    ]
    ledger = ledger_of(rows[0], rows[1] | change)
    if not change:
        check_groups(ledger, size=2)
        return
    with pytest.raises(AssertionError):
        check_groups(ledger, size=2)


def test_what_is_drawn_does_not_depend_on_when_faults_strike():
    one, other = (Stream("1", rates={"kill": 0.3, "nan": 0.3}, num_turns=4) for _ in range(2))
    drawn = [one.next() for _ in range(50)]
    for fault in drawn:
        other.random.random()
        assert other.next() == fault
