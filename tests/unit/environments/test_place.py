"""Deaths of real workers: who fails with them, who is to blame, and who is not to notice."""

import asyncio
import errno
import os
import re
import signal
from collections import Counter

import pytest
from tests.unit.environments.scripted import children, group_request_of, grown, pool_over, request_of, spec_of, until

from prime_rl.environments import place as places
from prime_rl.environments import process as processes
from prime_rl.environments.rollouts import FailureKind
from prime_rl.errors import EnvironmentSetupError


def outcome(rollout):
    """Kind of its failure, and whether that is its own."""
    return (rollout.failure.kind, rollout.failure.is_own) if rollout.failure is not None else "ok"


async def in_worker(pool, number):
    """Once so many rollouts run in workers, which have begun them."""
    await until(lambda: pool.load.in_flight == number)
    await asyncio.sleep(0.3)


async def test_of_those_that_ran_in_a_worker_which_ended_none_is_blamed_at_once(tmp_path):
    async with pool_over(spec_of("exit", 20.0, 30.0), tmp_path) as pool:
        running = [asyncio.create_task(pool.run(request_of(index))) for index in (1, 2)]
        await in_worker(pool, 2)
        rollouts = [await pool.run(request_of(0)), *await asyncio.gather(*running)]
        assert [outcome(rollout) for rollout in rollouts] == [(FailureKind.WORKER_DIED, False)] * 3
        running = [asyncio.create_task(pool.run(request_of(2)))]
        await in_worker(pool, 1)
        await pool.run(request_of(0))
        await running[0]
        assert outcome(await pool.run(request_of(0))) == (FailureKind.WORKER_DIED, True), "it was alone"


async def test_neighbours_of_one_that_blocks_its_worker_are_told_from_it_when_it_does_so_again(tmp_path):
    script = ["stuck", *[30.0] * 3]
    async with pool_over(spec_of(*script), tmp_path, grace_s=0.2) as pool:
        for neighbour, is_known in ((1, False), (2, True)):
            other = asyncio.create_task(pool.run(request_of(neighbour)))
            await in_worker(pool, 1)
            stuck = await pool.run(request_of(0, timeout_s=0.3))
            assert outcome(stuck) == (FailureKind.TIMEOUT, is_known)
            assert outcome(await other) == (FailureKind.WORKER_DIED, False)
            assert (await other).failure.message == (
                "the worker process did not answer and was killed while the rollout ran in it"
            )
        assert pool.num_restarts == 2


async def test_a_deadline_is_put_off_by_the_time_for_which_this_process_was_stopped(tmp_path, monkeypatch):
    async with pool_over(spec_of("stuck"), tmp_path, grace_s=0.2) as pool:
        began = asyncio.get_running_loop().time()
        running = asyncio.create_task(pool.run(request_of(0, timeout_s=0.3)))
        await until(lambda: pool.load.in_flight == 1)
        monkeypatch.setattr(places.activity, "lost_s", lambda: 1.5)
        assert outcome(await running)[0] is FailureKind.TIMEOUT
        assert asyncio.get_running_loop().time() - began >= 0.3 + 0.2 + 1.5


async def test_a_rollout_that_waits_for_its_group_is_not_to_blame_for_its_worker(tmp_path):
    async with pool_over(spec_of("ok", "exit", scores_groups=True), tmp_path) as pool:
        waits = asyncio.create_task(pool.run(group_request_of(0, group=1)))
        await until(lambda: 1 in pool._groups and len(pool._groups[1].generated) == 1)
        assert outcome(await pool.run(group_request_of(1, group=1, example=1))) == (FailureKind.WORKER_DIED, True)
        assert outcome(await waits) == (FailureKind.WORKER_DIED, False)
        assert "while the rollout waited in it for its group" in (await waits).failure.message


async def test_a_group_that_is_begun_anew_is_another_than_the_one_its_dead_worker_held(tmp_path):
    """Those of the dead worker leave only when it is gone, by when others of their number are in another."""
    spec = spec_of("ok", "stuck", scores_groups=True)
    async with pool_over(spec, tmp_path, num_workers=2, rollouts_per_worker=4, grace_s=0.2) as pool:
        await asyncio.gather(*(pool.run(request_of(0)) for _ in range(8)))
        await until(lambda: pool.load.num_live == 2)
        old = [asyncio.create_task(pool.run(group_request_of(index, group=7))) for index in (0, 1)]
        await until(lambda: 7 in pool._groups and len(pool._groups[7].generated) == 2)
        assert outcome(await pool.run(group_request_of(2, group=7, example=1, timeout_s=0.2)))[0] == FailureKind.TIMEOUT
        new = [asyncio.create_task(pool.run(group_request_of(2, group=7)))]
        assert [outcome(rollout) for rollout in await asyncio.gather(*old)] == [(FailureKind.WORKER_DIED, False)] * 2
        new += [asyncio.create_task(pool.run(group_request_of(index, group=7))) for index in (0, 1)]
        rollouts = await asyncio.gather(*new)
        assert [(rollout.reward, rollout.is_group_scored) for rollout in rollouts] == [(3.0, True)] * 3
        assert pool._groups == {}
        assert not pool._given_up.done()


async def test_a_rollout_tells_whether_its_group_was_scored(tmp_path):
    spec = spec_of("ok", "raise", "unreadable", scores_groups=True)
    async with pool_over(spec, tmp_path) as pool:
        rollouts = await asyncio.gather(
            *(pool.run(group_request_of(index, group=1, example=example)) for index, example in enumerate((0, 0, 2)))
        )
        assert [outcome(rollout) for rollout in rollouts] == ["ok", "ok", (FailureKind.ENVIRONMENT, True)]
        assert [rollout.is_group_scored for rollout in rollouts] == [True] * 3
        broken = await pool.run(group_request_of(1, group=2, example=1))
        assert (outcome(broken), broken.is_group_scored) == ((FailureKind.ENVIRONMENT, True), False)


async def test_a_rollout_that_waited_too_long_for_its_group_is_not_scored_with_those_that_come_after_all(tmp_path):
    async with pool_over(spec_of("ok", scores_groups=True), tmp_path) as pool:
        (place,) = pool._places.values()
        told = place._on_generated

        def late(place, wire_id):
            if wire_id == 3:
                place._overdue(1)  # between two steps of the event loop: it has still to leave
            told(place, wire_id)

        place._on_generated = late
        running = [asyncio.create_task(pool.run(group_request_of(index, group=1))) for index in range(3)]
        first = await running[0]
        assert outcome(first) == (FailureKind.TIMEOUT, False)
        assert not running[1].done()
        rollouts = [await pool.run(group_request_of(0, group=1)), *await asyncio.gather(*running[1:])]
        assert [rollout.reward for rollout in rollouts] == [3.0] * 3


async def test_what_is_sent_but_cannot_be_read_is_a_failure_of_its_rollout_and_of_no_other(tmp_path):
    async with pool_over(spec_of("unreadable", 0.5), tmp_path) as pool:
        broken, other = await asyncio.gather(*(pool.run(request_of(index)) for index in (0, 1)))
        assert (outcome(broken), outcome(other)) == ((FailureKind.ENVIRONMENT, True), "ok")
        assert "cannot be read: ValidationError: Expected `str`, got `int`" in broken.failure.message
        assert pool.num_restarts == 0


async def test_a_worker_that_dies_while_it_loads_is_replaced_once_the_environment_was_loaded_before(
    tmp_path, monkeypatch
):
    monkeypatch.setattr(places, "MAX_PAUSE_S", 0.1)
    hiccup = tmp_path / "hiccup"
    spec = spec_of(0.3, "exit", die_while=str(hiccup))
    async with pool_over(spec, tmp_path, num_workers=2, rollouts_per_worker=1) as pool:
        hiccup.touch()
        assert outcome(await pool.run(request_of(1))) == (FailureKind.WORKER_DIED, True)
        running = [asyncio.create_task(pool.run(request_of(0))) for _ in range(2)]
        await until(lambda: pool.num_restarts >= 3)
        hiccup.unlink()
        assert [outcome(rollout) for rollout in await asyncio.gather(*running)] == ["ok", "ok"]


async def test_an_environment_that_cannot_be_loaded_again_and_again_is_given_up_with_what_it_said(
    tmp_path, monkeypatch
):
    monkeypatch.setattr(places, "MAX_PAUSE_S", 0.1)
    hiccup = tmp_path / "hiccup"
    async with pool_over(spec_of("ok", die_while=str(hiccup)), tmp_path, max_restarts=2) as pool:
        hiccup.touch()
        os.kill(children()[0].pid, signal.SIGKILL)
        with pytest.raises(EnvironmentSetupError, match=r"exit code 9 while it loaded; .*\), 3 times in a row; see "):
            await pool.watch()


async def test_a_machine_without_room_for_a_process_is_waited_for_or_told(tmp_path, monkeypatch):
    spawn = processes._spawn
    full = OSError(errno.EAGAIN, "Resource temporarily unavailable")
    failures = [full]

    def sometimes(connection, log):
        if failures:
            raise failures.pop()
        return spawn(connection, log)

    monkeypatch.setattr(processes, "_spawn", sometimes)
    monkeypatch.setattr(places, "MAX_PAUSE_S", 0.1)
    with pytest.raises(EnvironmentSetupError, match=r"cannot be started: .*temporarily unavailable; see how many"):
        async with pool_over(spec_of("ok"), tmp_path):
            raise AssertionError("the pool was handed out")
    async with pool_over(spec_of("ok"), tmp_path) as pool:
        failures.append(full)
        os.kill(children()[0].pid, signal.SIGKILL)
        await until(lambda: pool.num_restarts == 2)
        assert outcome(await pool.run(request_of(0))) == "ok"


async def test_what_a_worker_started_ends_with_it_and_does_not_hide_that_it_is_gone(tmp_path):
    """A child that was forked holds the worker's end of the socket open."""
    async with pool_over(spec_of("fork", 30.0, "ok"), tmp_path) as pool:
        assert outcome(await pool.run(request_of(0))) == "ok"
        (left,) = re.findall(r"left (\d+)", (tmp_path / "scripted-0.log").read_text())
        running = asyncio.create_task(pool.run(request_of(1)))
        await in_worker(pool, 1)
        os.kill(children()[0].pid, signal.SIGKILL)
        assert outcome(await running)[0] == FailureKind.WORKER_DIED
        assert outcome(await pool.run(request_of(2))) == "ok"
        await until(lambda: not is_running(int(left)), 5.0)


def is_running(pid):
    try:
        with open(f"/proc/{pid}/stat") as stat:
            return stat.read().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


async def test_one_that_ends_its_worker_each_time_is_found_among_many_and_they_end_well(tmp_path):
    num_examples, own = 20, Counter()
    async with pool_over(spec_of("exit", *[0.2] * (num_examples - 1)), tmp_path) as pool:

        async def repaired(index):
            """As the orchestrator does it: given up after three failures that are its own."""
            while (rollout := await pool.run(request_of(index))).failure is not None and own[index] < 3:
                own[index] += rollout.failure.is_own
            return outcome(rollout)

        ends = await asyncio.gather(*map(repaired, range(num_examples)))
        assert ends == [(FailureKind.WORKER_DIED, True), *["ok"] * (num_examples - 1)]
        assert own == Counter({0: 3, **dict.fromkeys(range(1, num_examples), 0)})
        assert not pool._given_up.done()
        assert pool.load.waiting == 0


def counted(rollouts):
    return sum(rollout.failure.is_counted for rollout in rollouts)


async def test_each_end_of_a_worker_counts_once_in_the_error_budget_whoever_was_in_it(tmp_path):
    async with pool_over(spec_of("exit", *[30.0] * 3), tmp_path) as pool:
        for neighbours, num_counted in (((1, 2), 1), ((3,), 0)):
            running = [asyncio.create_task(pool.run(request_of(index))) for index in neighbours]
            await in_worker(pool, len(neighbours))
            rollouts = [await pool.run(request_of(0)), *await asyncio.gather(*running)]
            assert counted(rollouts) == num_counted
            assert sum(rollout.failure.is_own for rollout in rollouts) == 1 - num_counted, "it is blamed or nobody is"


async def test_the_end_of_a_worker_in_which_all_wait_for_their_group_counts_once(tmp_path):
    async with pool_over(spec_of("ok", scores_groups=True), tmp_path) as pool:
        waiting = [asyncio.create_task(pool.run(group_request_of(index, group=1))) for index in (0, 1)]
        await until(lambda: 1 in pool._groups and len(pool._groups[1].generated) == 2)
        os.kill(children()[0].pid, signal.SIGKILL)
        rollouts = await asyncio.gather(*waiting)
        assert [outcome(rollout) for rollout in rollouts] == [(FailureKind.WORKER_DIED, False)] * 2
        assert counted(rollouts) == 1


async def test_a_place_whose_workers_die_again_and_again_is_given_up_however_well_others_do(tmp_path):
    spec = spec_of("ok", 0.2)
    async with pool_over(spec, tmp_path, num_workers=2, rollouts_per_worker=1, max_restarts=2) as pool:
        await grown(pool, 2, example=1)
        place = pool._places[0]
        for number in range(3):
            await until(lambda: pool.load.num_live == 2)
            os.kill(place._process._process.pid, signal.SIGKILL)
            await until(lambda: not place.is_live)
            assert outcome(await pool.run(request_of(0))) == "ok", f"the other is well after {number + 1}"
        with pytest.raises(EnvironmentSetupError, match=r"SIGKILL, 3 times in a row"):
            await pool.watch()


async def test_a_worker_that_does_not_come_up_again_ends_nothing_while_another_is_there(tmp_path, monkeypatch):
    monkeypatch.setattr(places, "MAX_PAUSE_S", 0.05)
    hiccup = tmp_path / "hiccup"
    spec = spec_of(0.2, die_while=str(hiccup))
    async with pool_over(spec, tmp_path, num_workers=2, rollouts_per_worker=1, max_restarts=1) as pool:
        await grown(pool, 2)
        hiccup.touch()
        first, second = pool._places.values()
        os.kill(first._process._process.pid, signal.SIGKILL)
        await until(lambda: first._failed_loads >= 3)
        assert outcome(await pool.run(request_of(0))) == "ok"
        assert not pool._given_up.done()
        os.kill(second._process._process.pid, signal.SIGKILL)
        with pytest.raises(EnvironmentSetupError, match=r"while it loaded; .* times in a row"):
            await pool.watch()
        assert min(place._failed_loads for place in (first, second)) == 2, "the second was tried as often as is allowed"


async def test_a_rollout_that_waits_in_vain_for_its_group_counts_but_costs_no_attempt(tmp_path):
    async with pool_over(spec_of("ok", scores_groups=True), tmp_path, grace_s=0.1) as pool:
        rollout = await pool.run(group_request_of(0, group=1, timeout_s=0.2))
        assert outcome(rollout) == (FailureKind.TIMEOUT, False)
        assert rollout.failure.is_counted
