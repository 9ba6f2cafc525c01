from prime_rl.view.breakdown import breakdown


def trained(step_s, wait_s):
    return {"time/step": step_s, "time/wait_for_batch": wait_s, "time/forward_backward": 0.5, "mismatch_kl/mean": 2e-4}


def batch(step_s, for_rollouts_s, for_weights_s):
    return {
        "time/step": step_s,
        "time/generate": for_rollouts_s,
        "time/wait_for_weights": for_weights_s,
        "reward/mean": 0.5,
    }


def test_a_trainer_that_waits_tells_of_slow_generation():
    text = breakdown([trained(9, 9), trained(2, 1.5), trained(2, 1.5)], [batch(9, 9, 0), batch(2, 1.9, 0.1)] * 2)
    assert "the trainer waited for batches 75% of its time" in text
    assert text.endswith("generation sets the pace")


def test_an_orchestrator_that_waits_tells_of_slow_training():
    text = breakdown([trained(9, 9), trained(2, 0.1)], [batch(9, 9, 0), batch(2, 0.5, 1.5)])
    assert "the orchestrator for weights 75%" in text
    assert text.endswith("training sets the pace")


def test_sums_leave_out_the_first_step_and_what_cannot_be_added():
    lines = breakdown([trained(9, 9), trained(2, 1), trained(3, 1)], [batch(1, 1, 0)] * 3).splitlines()
    assert lines[0].split()[:2] == ["step", "trainer"]
    assert lines[4].split() == ["sum", "from", "1", "5.00", "2.00", "1.00", "0.00", "2.00", "2.00", "0.00", "0.00"]


def test_a_step_that_only_one_side_has_finished_is_left_out():
    assert len(breakdown([trained(1, 0)] * 3, [batch(1, 1, 0)] * 2).splitlines()) == 1 + 2 + 1 + 2


def test_one_step_is_too_few_for_a_verdict():
    assert breakdown([trained(1, 0)], [batch(1, 1, 0)]).endswith("too few steps to say who waited for whom")
