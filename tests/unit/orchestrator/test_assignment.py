from prime_rl.orchestrator.assignment import Assignment

A, B, C = "abc"


def test_a_group_stays_together_and_others_go_where_least_is_in_flight():
    assignment = Assignment([A, B, C])
    assert [assignment.assign(rollout, 0, [A, B, C])[0] for rollout in range(3)] == [A, A, A]
    assert assignment.assign(3, 1, [A, B, C]) == (B, C, A)
    assert assignment.assign(4, 2, [A, B, C])[0] == C
    assert assignment.load == {A: 3, B: 1, C: 1}
    for rollout in (0, 1, 2):
        assignment.release(rollout)
    assert assignment.assign(5, 3, [A, B, C])[0] == A


def test_a_rollout_is_released_once_however_often_it_is_said():
    assignment = Assignment([A])
    assignment.assign(1, 0, [A])
    for _ in range(3):
        assignment.release(1)
    assignment.release(2)
    assert assignment.load[A] == 0


def test_a_server_that_is_not_able_comes_last_and_its_groups_move_for_good():
    assignment = Assignment([A, B, C])
    assert assignment.assign(0, 0, [A, B, C])[0] == A
    assert assignment.assign(1, 0, [B, C]) == (B, C, A)
    assert assignment.assign(2, 0, [A, B, C])[0] == B, "its prefix is cached there now"


def test_groups_of_long_ago_are_forgotten(monkeypatch):
    monkeypatch.setattr("prime_rl.orchestrator.assignment.MAX_GROUPS", 2)
    assignment = Assignment([A, B])
    for group in range(5):
        assignment.assign(group, group, [A, B])
    assert list(assignment._of_group) == [3, 4]
