from prime_rl.environments.rollouts import Failure, FailureKind
from prime_rl.orchestrator.faults import MIN_JUDGED, FaultLedger

SLOW = Failure(kind=FailureKind.TIMEOUT, message="took longer than 5 s")
BROKEN = Failure(kind=FailureKind.SCORER, type="KeyError", message="'x'")


def test_more_failures_than_allowed_stop_the_run_with_the_commonest():
    faults = FaultLedger(0.5)
    for number in range(MIN_JUDGED):
        if number < 31:
            faults.succeeded()
        else:
            faults.failed(BROKEN if number % 3 else SLOW, now=0.0)
    verdict = faults.verdict()
    assert verdict is not None
    assert verdict.startswith("33 of the last 64 rollouts failed, more than max_error_rate = 0.5 allows")
    assert verdict.endswith("(22 times) with scorer: KeyError: 'x'")


def test_exactly_the_allowed_share_and_fewer_than_64_rollouts_are_no_verdict():
    faults = FaultLedger(0.5)
    for _ in range(MIN_JUDGED // 2):
        faults.failed(SLOW, now=0.0)
        assert faults.verdict() is None
        faults.succeeded()
    assert faults.verdict() is None


def test_a_rate_of_one_stops_a_run_in_which_nothing_works():
    faults = FaultLedger(1.0)
    for _ in range(MIN_JUDGED):
        assert faults.verdict() is None
        faults.failed(SLOW, now=0.0)
    verdict = faults.verdict()
    assert verdict is not None
    assert verdict.startswith("64 of the last 64 rollouts failed, which ends a run even with max_error_rate = 1; most")
    faults.succeeded()
    assert faults.verdict() is None


def test_only_the_last_rollouts_are_judged_and_outages_not_at_all():
    faults = FaultLedger(0.5)
    for _ in range(MIN_JUDGED):
        faults.failed(SLOW, now=0.0, num_judged=0)
    assert faults.verdict() is None
    for _ in range(MIN_JUDGED - 1):
        faults.failed(SLOW, now=0.0)
    for _ in range(MIN_JUDGED):
        faults.succeeded()
    assert faults.verdict() is None


def test_a_kind_is_logged_once_in_a_while_with_what_came_in_between():
    faults = FaultLedger(1.0)
    assert faults.failed(SLOW, now=0.0) == "1 rollout failed, the last with timeout: took longer than 5 s"
    assert faults.failed(BROKEN, now=1.0) is not None
    assert faults.failed(SLOW, now=5.0) is None
    assert faults.failed(SLOW, now=9.0) is None
    assert faults.failed(SLOW, now=10.0) == "3 rollouts failed, the last with timeout: took longer than 5 s"


def test_counts_are_since_they_were_last_taken():
    faults = FaultLedger(1.0)
    faults.failed(SLOW, now=0.0)
    faults.failed(SLOW, now=0.0)
    assert faults.take_counts() == {FailureKind.TIMEOUT: 2}
    assert faults.take_counts() == {}


def test_a_failure_that_made_a_group_worthless_is_judged_as_all_of_it_and_counted_and_told_as_one():
    faults = FaultLedger(0.5)
    faults.succeeded(8)
    for _ in range(7):
        assert faults.verdict() is None
        faults.failed(BROKEN, now=0.0, num_judged=8)
    assert faults.verdict() == (
        "56 of the last 64 rollouts failed (49 of them were lost with another one of their group), more than "
        "max_error_rate = 0.5 allows; most often (7 times) with scorer: KeyError: 'x'"
    )
    assert faults.take_counts() == {FailureKind.SCORER: 7}
