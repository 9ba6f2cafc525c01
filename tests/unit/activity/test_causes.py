from prime_rl.activity.causes import LAUNCHER, Hang, HangWatch, chain
from prime_rl.activity.files import Doing, Report, Wait


def wait(owner, reason="something", waited_s=10.0, deadline_s=60.0):
    return Wait(owner=owner, reason=reason, since=0.0, waited_s=waited_s, deadline_s=deadline_s)


def doing(text, for_s=1.0, deadline_s=None):
    return Doing(text=text, since=0.0, for_s=for_s, deadline_s=deadline_s)


def report(process, *waits, pid=1, age_s=1e6, **fields):
    token = f"{pid}:0"
    return Report(process=process, token=token, host="h", time=0.0, beat=0.0, age_s=age_s, waits=waits, **fields)


def reports(*all_of_them):
    return {one.process: one for one in all_of_them}


RUN = reports(
    report("trainer", wait("orchestrator", "batch 8")),
    report("orchestrator", wait("inference", "rollouts")),
    report("inference"),
)


def sick(*names):
    return lambda name: "is stopped" if name in names else ""


def test_the_chain_leads_over_the_waits_to_the_process_in_trouble():
    found = chain(RUN, "trainer", sick("inference"))
    assert [(name, one.reason) for name, one in found.waits] == [("trainer", "batch 8"), ("orchestrator", "rollouts")]
    assert (found.end, found.trouble) == ("inference", "is stopped")


def test_the_first_one_in_trouble_is_the_cause():
    assert chain(RUN, "trainer", sick("inference", "trainer")).waits == ()
    assert chain(RUN, "trainer", sick("inference", "orchestrator")).end == "orchestrator"


def test_without_trouble_the_chain_is_that_of_the_longest_waits():
    run = RUN | reports(report("orchestrator", wait("inference", "rollouts"), wait("teacher", "logprobs", 5.0)))
    found = chain(run, "trainer", sick())
    assert (found.end, found.trouble) == ("inference", "")


def test_another_wait_is_followed_where_it_leads_to_trouble():
    run = RUN | reports(report("orchestrator", wait("inference"), wait("teacher")), report("teacher"))
    assert chain(run, "trainer", sick("teacher")).end == "teacher"


def test_one_of_several_that_do_the_same_work_may_be_the_cause():
    run = reports(report("trainer", wait("orchestrator")), report("orchestrator", wait("inference")))
    run |= reports(report("inference-0"), report("inference-1"), report("trainer-1", wait("trainer")))
    assert chain(run, "trainer", sick("inference-1")).end == "inference-1"
    assert chain(run, "trainer", sick("trainer-1")).end == "trainer-1"


def test_a_circle_of_waits_ends():
    run = reports(report("trainer", wait("orchestrator")), report("orchestrator", wait("trainer")))
    found = chain(run, "trainer", sick())
    assert [name for name, _ in found.waits] == ["trainer"]
    assert found.end == "orchestrator"


class Looks:
    """A watch of which the launcher and, unless said otherwise, everybody gives a sign of life before every look."""

    def __init__(self, run, pids=None, hang_timeout_s=600.0):
        self.run = run
        self.pids = pids or dict.fromkeys(run, 1)
        self.now = 0.0
        self.signs = dict.fromkeys([*run, LAUNCHER], 0)
        self.watch = HangWatch(hang_timeout_s)
        self.after(0.0)
        self.after(1.0)

    def after(self, seconds, silent=()):
        self.now += seconds
        self.signs = {name: sign + (name not in silent) for name, sign in self.signs.items()}
        return self.watch.look(self.pids, self.run, self.signs, self.now)


def test_nobody_hangs_who_reports():
    looks = Looks(RUN)
    assert [looks.after(100.0) for _ in range(20)] == [[]] * 20


def test_a_process_without_a_sign_of_life_hangs_and_that_is_told_once_for_each_start():
    looks = Looks(RUN)
    assert looks.after(599.0, silent=["trainer"]) == []
    hang = [Hang(culprit="trainer", reason="has given no sign of life for 600 s")]
    assert looks.after(1.0, silent=["trainer"]) == hang
    assert looks.after(1.0, silent=["trainer"]) == []
    looks.pids["trainer"] = 2
    assert looks.after(1.0, silent=["trainer"]) == []
    assert looks.after(600.0, silent=["trainer"]) == hang


def test_a_process_that_never_reports_hangs():
    looks = Looks(RUN, pids=dict.fromkeys([*RUN, "inference-1"], 1))
    assert looks.after(597.0) == []
    assert [hang.culprit for hang in looks.after(3.0)] == ["inference-1"]


def test_where_the_launcher_cannot_report_itself_nobodys_silence_counts():
    looks = Looks(RUN)
    assert looks.after(1000.0, silent=[*RUN, LAUNCHER]) == []


def test_an_event_loop_that_stands_still_hangs():
    looks = Looks(RUN)
    looks.run = RUN | reports(report("inference", loop_s=601.4))
    assert looks.after(1.0) == [Hang(culprit="inference", reason="has an event loop that stands still for 601 s")]


def test_an_engine_that_takes_no_step_hangs_and_is_not_called_an_event_loop():
    looks = Looks(RUN)
    looks.run = RUN | reports(report("inference", loop_s=0.1, engine_s=601.4))
    reason = "has an engine that has taken no step with requests in it for 601 s"
    assert looks.after(1.0) == [Hang(culprit="inference", reason=reason)]


def test_what_a_process_has_been_at_for_too_long_hangs_and_a_rank_stands_for_its_process():
    looks = Looks(RUN | reports(report("trainer-1")), pids=dict.fromkeys(RUN, 1))
    looks.run = looks.run | reports(report("trainer-1", doing=(doing("training step 12", 3600.0, 3600.0),)))
    reason = "(trainer-1) has been at the same for 3600 s: training step 12"
    assert looks.after(1.0) == [Hang(culprit="trainer", reason=reason)]


def test_a_wait_past_its_deadline_is_the_fault_of_the_last_in_the_chain_of_such_waits():
    looks = Looks(RUN)
    looks.run = RUN | reports(
        report("trainer", wait("orchestrator", "batch 8", 70.0)),
        report("orchestrator", wait("inference", "rollouts", 65.0)),
    )
    assert {(hang.culprit, hang.reason) for hang in looks.after(1.0)} == {
        ("inference", "has kept trainer waiting 70 s for batch 8"),
    }
    assert looks.after(1.0) == []


def test_who_has_time_left_is_not_to_blame():
    late = report("trainer", wait("orchestrator", "batch 8", 70.0))
    for innocent in (
        report("orchestrator", age_s=20.0),
        report("orchestrator", doing=(doing("generating batch 8", 20.0, 100.0),)),
        report("orchestrator", wait("inference", "rollouts", 20.0)),
    ):
        looks = Looks(RUN)
        looks.run = RUN | reports(late, innocent)
        said = Hang(culprit=None, reason="trainer has waited 70 s for batch 8 of orchestrator")
        assert looks.after(1.0) == [said]
    looks = Looks(RUN)
    looks.run = RUN | reports(late, report("orchestrator"))
    assert [hang.culprit for hang in looks.after(1.0)] == ["orchestrator"]


def test_a_server_that_gets_on_is_blamed_for_no_wait_for_all_of_them_and_another_that_does_not_is():
    late = report("orchestrator", wait("inference", "rollouts", 70.0))
    run = reports(late, report("inference-0", got_on_s=0.1), report("inference-1", got_on_s=61.0), report("trainer"))
    looks = Looks(reports(report("orchestrator"), report("inference-0"), report("inference-1"), report("trainer")))
    looks.run = run
    assert looks.after(1.0) == [Hang(culprit="inference-1", reason="has kept orchestrator waiting 70 s for rollouts")]
    assert looks.after(1.0) == []


def test_servers_that_all_get_on_are_told_of_once_and_blamed_when_they_do_not_get_on_any_more():
    looks = Looks(RUN)
    late = reports(report("orchestrator", wait("inference", "rollouts", 70.0)))
    looks.run = RUN | late | reports(report("inference", got_on_s=3.0))
    assert looks.after(1.0) == [Hang(culprit=None, reason="orchestrator has waited 70 s for rollouts of inference")]
    assert looks.after(1.0) == []
    looks.run = RUN | late | reports(report("inference", got_on_s=59.9))
    assert looks.after(1.0) == []
    looks.run = RUN | late | reports(report("inference", got_on_s=60.0))
    assert [hang.culprit for hang in looks.after(1.0)] == ["inference"]
    assert looks.after(1.0) == []


def test_how_lately_somebody_got_on_is_no_longer_ago_than_what_counts_as_a_hang():
    looks = Looks(RUN, hang_timeout_s=30.0)
    looks.run = RUN | reports(report("orchestrator", wait("inference", "rollouts", 70.0)))
    looks.run |= reports(report("inference", got_on_s=31.0))
    assert [hang.culprit for hang in looks.after(1.0)] == ["inference"]


def test_who_has_begun_only_lately_when_a_deadline_passes_is_blamed_once_that_is_long_ago():
    looks = Looks(RUN)
    found = []
    for waited_s, age_s in ((61.0, 30.0), (90.0, 59.0), (91.0, 60.0), (92.0, 61.0)):
        looks.run = RUN | reports(
            report("trainer", wait("orchestrator", "batch 8", waited_s)), report("orchestrator", age_s=age_s)
        )
        found.append([hang.culprit for hang in looks.after(1.0)])
    assert found == [[None], [], ["orchestrator"], []]


def test_who_is_between_two_things_with_time_left_is_not_blamed_for_that_moment():
    late = report("trainer", wait("orchestrator", "batch 8", 70.0))
    for at in (
        report("orchestrator", wait("inference", "rollouts", 20.0)),
        report("orchestrator", doing=(doing("generating batch 8", 20.0, 100.0),)),
    ):
        looks, found = Looks(RUN), []
        for orchestrator, seconds in ((at, 1.0), (report("orchestrator"), 59.0), (at, 1.0)):
            looks.run = RUN | reports(late, orchestrator)
            found.append([hang.culprit for hang in looks.after(seconds)])
        looks.run = RUN | reports(late, report("orchestrator"))
        found += [[hang.culprit for hang in looks.after(seconds)] for seconds in (59.0, 1.0)]
        assert found == [[None], [], [], [], ["orchestrator"]]


def test_a_wait_that_was_renewed_is_told_of_and_blamed_on_somebody_anew():
    looks, found = Looks(RUN), []
    for pid, waited_s, got_on_s in ((1, 70.0, 61.0), (2, 10.0, 1.0), (2, 70.0, 0.5), (2, 80.0, 61.0)):
        looks.pids["inference"] = pid
        looks.run = RUN | reports(
            report("orchestrator", wait("inference", "rollouts", waited_s)),
            report("inference", pid=pid, got_on_s=got_on_s),
        )
        found.append([hang.culprit for hang in looks.after(1.0)])
    assert found == [["inference"], [], [None], ["inference"]]


def test_a_second_server_is_blamed_for_the_wait_that_a_first_one_was_blamed_for():
    everybody = reports(report("orchestrator"), report("inference-0"), report("inference-1"), report("trainer"))
    looks, found = Looks(everybody), []
    late = report("orchestrator", wait("inference", "rollouts", 70.0))
    for got_on_s in ((1.0, 61.0), (61.0, 90.0)):
        servers = [report(f"inference-{index}", got_on_s=seconds) for index, seconds in enumerate(got_on_s)]
        looks.run = reports(late, report("trainer"), *servers)
        found.append([hang.culprit for hang in looks.after(1.0)])
    assert found == [["inference-1"], ["inference-0"]]


def test_a_server_that_starts_shields_no_other_one():
    everybody = reports(report("orchestrator"), report("inference-0"), report("inference-1"), report("trainer"))
    looks = Looks(everybody)
    late = report("orchestrator", wait("inference", "rollouts", 70.0))
    looks.pids["inference-1"] = 2
    looks.run = everybody | reports(late, report("inference-0", got_on_s=61.0))
    assert [hang.culprit for hang in looks.after(1.0, silent=["inference-1"])] == ["inference-0"]


def test_while_the_only_one_that_somebody_waits_for_starts_nothing_is_told():
    looks = Looks(RUN)
    looks.pids["inference"] = 2
    looks.run = RUN | reports(report("orchestrator", wait("inference", "rollouts", 70.0)))
    assert looks.after(1.0, silent=["inference"]) == []


def test_a_wait_for_what_is_no_process_of_the_run_is_only_told():
    looks = Looks(RUN)
    looks.run = RUN | reports(report("trainer", wait("disk", "it to take step_8", 70.0)))
    assert looks.after(1.0) == [Hang(culprit=None, reason="trainer has waited 70 s for it to take step_8 of disk")]


def test_the_report_of_a_process_that_was_started_again_counts_from_its_own_first_one_on():
    looks = Looks(RUN)
    looks.run = RUN | reports(report("inference", loop_s=700.0))
    looks.pids["inference"] = 2
    assert looks.after(1.0, silent=["inference"]) == []
    assert [hang.culprit for hang in looks.after(1.0)] == ["inference"]
