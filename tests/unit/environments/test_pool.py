"""Real worker processes; the environments in them are scripted, so they load at once."""

import asyncio
import json
import os
import random
import signal
import sys
import textwrap
from collections import Counter

import msgspec
import psutil
import pytest
from tests.unit.environments.scripted import children, group_request_of, grown, pool_over, request_of, spec_of, until

from prime_rl.config.shared import ClientConfig, EnvConfig, LogConfig
from prime_rl.environments import place as places
from prime_rl.environments.pool import environment_spec
from prime_rl.environments.rollouts import EnvironmentSpec, FailureKind, Rollout
from prime_rl.errors import EnvironmentSetupError


async def test_rollouts_run_at_the_same_time_and_each_ends_once_in_what_became_of_it(tmp_path):
    script = ["ok", "raise", "fail", "hang", 0.3, "ok"]
    async with pool_over(spec_of(*script), tmp_path) as pool:
        assert (pool.size.num_train, pool.size.num_eval) == (6, 0)
        requests = [request_of(i, timeout_s=1.0 if what == "hang" else 30.0) for i, what in enumerate(script)]
        rollouts = await asyncio.gather(*map(pool.run, requests))
    assert [rollout.id for rollout in rollouts] == [100, 101, 102, 103, 104, 105]
    kinds = [rollout.failure.kind if rollout.failure else None for rollout in rollouts]
    assert kinds == [None, FailureKind.ENVIRONMENT, FailureKind.SCORER, FailureKind.TIMEOUT, None, None]
    assert "KeyError: 'environment broke'" in str(rollouts[1].failure)
    assert "took longer than 1 s" in str(rollouts[3].failure)


async def test_what_cannot_be_sent_is_a_failure_of_its_rollout_and_of_no_other(tmp_path):
    script = ["object", "surrogate", "huge", "garbled", "ok"]
    async with pool_over(spec_of(*script), tmp_path) as pool:
        rollouts = await asyncio.gather(*(pool.run(request_of(i)) for i in range(len(script))))
        assert pool.num_restarts == 0
    failures = [rollout.failure for rollout in rollouts]
    assert [failure and failure.kind for failure in failures] == [FailureKind.ENVIRONMENT] * 4 + [None]
    assert [failure.type for failure in failures[:4]] == [
        "TypeError", "UnicodeEncodeError", "OverflowError", "ValueError",
    ]  # fmt: skip


async def test_what_an_environment_prints_goes_to_the_log_and_harms_no_frame(tmp_path):
    async with pool_over(spec_of("ok"), tmp_path) as pool:
        rollouts = await asyncio.gather(*(pool.run(request_of(0)) for _ in range(50)))
    assert all(rollout.failure is None for rollout in rollouts)
    assert (tmp_path / "scripted-0.log").read_text().count("to standard output") == 50


async def test_without_a_log_it_is_said_how_to_get_one():
    async with pool_over(spec_of("ok"), None) as pool:
        assert (await pool.run(request_of(0))).failure is None
    with pytest.raises(
        EnvironmentSetupError, match=r"exit code 9 while it loaded; set log\.env_worker_logs to see why"
    ):
        async with pool_over(spec_of("ok", die=True), None):
            raise AssertionError("the pool was handed out")


async def test_a_worker_logs_as_its_parent_does(tmp_path):
    for name, as_json in (("text", False), ("json", True)):
        spec = msgspec.structs.replace(spec_of("ok", crash="No module named 'x'"), logs_json=as_json)
        with pytest.raises(EnvironmentSetupError, match="ModuleNotFoundError"):
            async with pool_over(spec, tmp_path / name):
                raise AssertionError("the pool was handed out")
    (line,) = (tmp_path / "json" / "scripted-0.log").read_text().splitlines()
    assert json.loads(line)["process"] == "env scripted"
    assert json.loads(line)["message"] == "The environment cannot be loaded"
    assert "ERROR   env scripted | The environment cannot" in (tmp_path / "text" / "scripted-0.log").read_text()


async def test_rollouts_go_to_the_worker_that_holds_the_fewest(tmp_path):
    logs = [tmp_path / f"scripted-{index}.log" for index in (0, 1)]
    async with pool_over(spec_of(0.2), tmp_path, num_workers=2, rollouts_per_worker=1) as pool:
        await grown(pool, 2)
        before = [log.read_text().count("to standard output") for log in logs]
        await asyncio.gather(*(pool.run(request_of(0)) for _ in range(10)))
    assert [log.read_text().count("to standard output") for log in logs] == [count + 5 for count in before]


async def test_a_killed_worker_gives_back_its_rollouts_and_is_replaced(tmp_path):
    async with pool_over(spec_of(1.0, "ok"), tmp_path, num_workers=2, rollouts_per_worker=1) as pool:
        await grown(pool, 2)
        running = [asyncio.create_task(pool.run(request_of(0))) for _ in range(8)]
        logs = [tmp_path / f"scripted-{index}.log" for index in (0, 1)]
        await until(lambda: sum(log.read_text().count("to standard output") for log in logs) == 10)
        os.kill(children()[0].pid, signal.SIGKILL)
        rollouts = await asyncio.gather(*running)
        kinds = Counter(rollout.failure.kind if rollout.failure else "ok" for rollout in rollouts)
        assert kinds == {"ok": 4, FailureKind.WORKER_DIED: 4}
        again = await asyncio.gather(*(pool.run(request_of(1)) for _ in range(4)))
        assert all(rollout.failure is None for rollout in again)
        assert pool.num_restarts == 1
    assert children() == []


async def test_a_worker_that_is_beyond_reach_is_killed_at_the_deadline(tmp_path):
    async with pool_over(spec_of("stuck", "ok"), tmp_path, grace_s=0.2) as pool:
        blocked = await pool.run(request_of(0, timeout_s=0.2))
        assert blocked.failure is not None
        assert blocked.failure.kind == FailureKind.TIMEOUT
        assert blocked.failure.message == "took longer than 0.2 s, and its worker was blocked"
        assert (await pool.run(request_of(1))).failure is None
        assert pool.num_restarts == 1


@pytest.mark.parametrize("what", ["block", "spin"])
async def test_code_that_holds_the_event_loop_past_its_deadline_is_interrupted_and_harms_no_other(tmp_path, what):
    async with pool_over(spec_of(what, 2.0), tmp_path) as pool:
        held, other = await asyncio.gather(pool.run(request_of(0, timeout_s=0.3)), pool.run(request_of(1)))
        assert held.failure is not None
        assert held.failure.kind == FailureKind.TIMEOUT
        assert "took longer than 0.3 s, and held the event loop of its worker" in held.failure.message
        assert other.failure is None
        assert pool.num_restarts == 0


async def test_those_beside_code_that_holds_the_event_loop_are_given_the_time_that_it_took(tmp_path, monkeypatch):
    """One that began earlier has the same deadline, which passes meanwhile, in its worker and here."""
    monkeypatch.setattr(places, "SILENCE_S", 1.0)
    async with pool_over(spec_of(2.0, "block"), tmp_path, grace_s=0.3) as pool:
        other = asyncio.create_task(pool.run(request_of(0, timeout_s=2.5)))
        await asyncio.sleep(0.5)
        held = await pool.run(request_of(1, timeout_s=2.5))
        assert held.failure is not None
        assert "took longer than 2.5 s, and held the event loop of its worker" in held.failure.message
        assert (await other).failure is None
        assert pool.num_restarts == 0


async def test_a_worker_that_holds_too_much_memory_is_ended_and_replaced(tmp_path):
    spec = msgspec.structs.replace(spec_of("hog", "ok"), max_memory_gb=0.4)
    async with pool_over(spec, tmp_path) as pool:
        rollout = await pool.run(request_of(0))
        assert rollout.failure is not None
        assert rollout.failure.kind == FailureKind.WORKER_DIED
        assert "was ended for holding more than max_memory_gb = 0.4" in rollout.failure.message
        assert (await pool.run(request_of(1))).failure is None
    assert "holds more than max_memory_gb" in (tmp_path / "scripted-0.log").read_text()


@pytest.mark.skipif(not hasattr(os, "sched_getaffinity"), reason="binds no process to cores")
async def test_workers_keep_to_their_share_of_the_machine_and_stand_back(tmp_path):
    spec = msgspec.structs.replace(spec_of(0.1), num_cpus=1, niceness=3)
    async with pool_over(spec, tmp_path, num_workers=2, rollouts_per_worker=1) as pool:
        await grown(pool, 2)
        cores = sorted(os.sched_getaffinity(0))
        assert {tuple(child.cpu_affinity()) for child in children()} == {(core,) for core in cores[:2]}
        assert {child.nice() for child in children()} == {min(psutil.Process().nice() + 3, 19)}


async def test_a_deadline_of_the_environment_stands_over_that_of_the_request(tmp_path):
    spec = msgspec.structs.replace(spec_of("hang"), rollout_timeout_s=0.2)
    async with pool_over(spec, tmp_path) as pool:
        rollout = await pool.run(request_of(0, timeout_s=600))
        assert rollout.failure is not None
        assert rollout.failure.message == "took longer than 0.2 s"


async def test_a_pool_grows_with_its_rollouts_and_shrinks_when_they_are_gone(tmp_path):
    async with pool_over(spec_of(0.5), tmp_path, num_workers=4, rollouts_per_worker=2, idle_s=0.5) as pool:
        assert (pool.load.num_workers, pool.load.num_live) == (1, 1)
        running = [asyncio.create_task(pool.run(request_of(0))) for _ in range(6)]
        await asyncio.sleep(0)
        assert pool.load.num_workers == 3
        assert (pool.load.in_flight, pool.load.waiting) == (2, 4), "four wait for the workers that come up"
        assert all(rollout.failure is None for rollout in await asyncio.gather(*running))
        await until(lambda: pool.load.num_workers == 1)
        await until(lambda: len(children()) == 1)  # those that were let go are given time to end
        assert (await pool.run(request_of(0))).failure is None


async def test_a_pool_grows_when_its_workers_are_late_however_few_rollouts_they_have(tmp_path):
    async with pool_over(spec_of("busy", "ok"), tmp_path, num_workers=2) as pool:
        running = [asyncio.create_task(pool.run(request_of(0))) for _ in range(2)]
        await until(lambda: pool.load.num_workers == 2)
        assert pool.load.lag_s > 0.25
        assert all(rollout.failure is None for rollout in await asyncio.gather(*running))


async def test_loading_an_environment_counts_as_no_lateness(tmp_path):
    async with pool_over(spec_of(1.5, load_s=3.0), tmp_path) as pool:
        assert (await pool.run(request_of(0))).failure is None
        await until(lambda: pool.load.lag_s > 0)
        assert pool.load.lag_s < 2.5


async def test_one_that_gives_up_waiting_for_a_worker_leaves_its_place_to_the_next(tmp_path):
    async with pool_over(spec_of(0.3), tmp_path, num_workers=2, rollouts_per_worker=1) as pool:
        pool._most = 3  # never to be reached: so two stay at one rollout each
        running = [asyncio.create_task(pool.run(request_of(0))) for _ in range(6)]
        await asyncio.sleep(0)
        running[3].cancel()
        rollouts = await asyncio.gather(*running, return_exceptions=True)
        assert [isinstance(rollout, Rollout) for rollout in rollouts] == [True, True, True, False, True, True]


async def test_a_group_is_scored_together_in_one_worker_once_all_of_it_is_there(tmp_path):
    spec = spec_of("ok", "raise", 0.2, scores_groups=True)
    async with pool_over(spec, tmp_path, num_workers=2, rollouts_per_worker=1) as pool:
        await grown(pool, 2)
        first = asyncio.create_task(pool.run(group_request_of(0, group=7)))
        broken = await pool.run(group_request_of(1, group=7, example=1))
        assert broken.failure is not None
        assert broken.failure.kind == FailureKind.ENVIRONMENT
        assert not first.done(), "it waits for its group"
        rest = await asyncio.gather(*(pool.run(group_request_of(i, group=7, example=2)) for i in (2, 3)))
        assert [rollout.reward for rollout in (await first, *rest)] == [3.0, 3.0, 3.0]
        alone = await pool.run(request_of(0))
        assert alone.reward == 1.0
        unscored = await pool.run(msgspec.structs.replace(request_of(0), is_scored=False))
        assert unscored.reward == 0.0
        assert pool._groups == {}


async def test_members_of_a_group_that_wait_for_room_meet_in_one_worker(tmp_path):
    spec = spec_of("ok", 0.3, 0.6, scores_groups=True)
    async with pool_over(spec, tmp_path, num_workers=2, rollouts_per_worker=1) as pool:
        await grown(pool, 2)
        pool._most = 3  # never to be reached: so two stay at one rollout each
        busy = [asyncio.create_task(pool.run(request_of(index))) for index in (1, 2)]
        await until(lambda: pool.load.in_flight == 2)
        members = [asyncio.create_task(pool.run(group_request_of(index, group=7, timeout_s=5.0))) for index in range(3)]
        await asyncio.sleep(0)
        assert pool.load.waiting == 3
        assert [rollout.reward for rollout in await asyncio.gather(*members)] == [3.0] * 3
        await asyncio.gather(*busy)


async def test_a_group_is_left_by_those_that_are_cancelled_and_by_those_that_wait_too_long(tmp_path):
    async with pool_over(spec_of("ok", scores_groups=True), tmp_path, grace_s=0.2) as pool:
        running = [asyncio.create_task(pool.run(group_request_of(i, group=1, timeout_s=3.0))) for i in range(2)]
        await until(lambda: len(pool._groups[1].generated) == 2 if 1 in pool._groups else False)
        running[0].cancel()
        rollout = await running[1]
        assert rollout.failure is not None
        assert rollout.failure.message == "waited 3 s for the other rollouts of its group"
        assert pool._groups == {}
        await until(lambda: "forgot; 0 kept" in (tmp_path / "scripted-0.log").read_text())
        assert pool.num_restarts == 0


@pytest.mark.parametrize(
    ("word", "kind"), [("score-hangs", FailureKind.TIMEOUT), ("score-raises", FailureKind.ENVIRONMENT)]
)
async def test_a_group_that_cannot_be_scored_fails_and_its_worker_goes_on(tmp_path, word, kind):
    spec = msgspec.structs.replace(spec_of("ok", word, scores_groups=True), score_timeout_s=0.3)
    async with pool_over(spec, tmp_path) as pool:
        rollouts = await asyncio.gather(*(pool.run(group_request_of(i, group=1)) for i in range(3)))
        assert [rollout.failure and rollout.failure.kind for rollout in rollouts] == [kind] * 3
        assert pool.num_restarts == 0


async def test_a_group_whose_worker_dies_fails_and_begins_anew_in_another(tmp_path):
    async with pool_over(spec_of("ok", scores_groups=True), tmp_path) as pool:
        first = asyncio.create_task(pool.run(group_request_of(0, group=1)))
        await until(lambda: len(pool._groups[1].generated) == 1 if 1 in pool._groups else False)
        os.kill(children()[0].pid, signal.SIGKILL)
        rollout = await first
        assert rollout.failure is not None
        assert rollout.failure.kind == FailureKind.WORKER_DIED
        rollouts = await asyncio.gather(*(pool.run(group_request_of(i, group=1)) for i in range(3)))
        assert [rollout.reward for rollout in rollouts] == [3.0] * 3


async def test_an_environment_that_ends_its_workers_again_and_again_is_given_up(tmp_path):
    async with pool_over(spec_of("exit"), tmp_path, max_restarts=1) as pool:
        watch = asyncio.create_task(pool.watch())
        for _ in range(2):
            rollout = await pool.run(request_of(0))
            assert rollout.failure is not None
            assert rollout.failure.kind == FailureKind.WORKER_DIED
        with pytest.raises(EnvironmentSetupError, match="exit code 7, 2 times in a row"):
            await watch
        with pytest.raises(EnvironmentSetupError, match="2 times in a row"):
            await pool.run(request_of(0))


async def test_workers_are_replaced_always_where_that_is_asked_for(tmp_path):
    async with pool_over(spec_of("exit"), tmp_path, max_restarts=-1) as pool:
        for _ in range(7):
            rollout = await pool.run(request_of(0))
            assert rollout.failure is not None
            assert rollout.failure.kind == FailureKind.WORKER_DIED
        await until(lambda: pool.num_restarts == 7)


async def test_a_cancelled_rollout_is_given_up_by_its_worker(tmp_path):
    async with pool_over(spec_of("hang", "ok"), tmp_path) as pool:
        running = asyncio.create_task(pool.run(request_of(0)))
        await until(lambda: "to standard output" in (tmp_path / "scripted-0.log").read_text())
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
        assert (await pool.run(request_of(1))).failure is None
        assert pool.num_restarts == 0


async def test_an_environment_that_refuses_to_load_is_told_in_its_own_words(tmp_path):
    with pytest.raises(EnvironmentSetupError, match=r"^no such split$"):
        async with pool_over(spec_of("ok", refuse="no such split"), tmp_path):
            raise AssertionError("the pool was handed out")
    assert children() == []


async def test_whatever_keeps_a_worker_from_loading_is_told(tmp_path):
    with pytest.raises(EnvironmentSetupError, match=r"'scripted': ModuleNotFoundError: No module named 'x'$"):
        async with pool_over(spec_of("ok", crash="No module named 'x'"), tmp_path):
            raise AssertionError("the pool was handed out")


async def test_a_worker_that_ends_while_it_loads_is_told_with_its_log(tmp_path):
    with pytest.raises(EnvironmentSetupError, match=r"exit code 9 while it loaded; see .*scripted-0\.log"):
        async with pool_over(spec_of("ok", die=True), tmp_path):
            raise AssertionError("the pool was handed out")


async def test_a_worker_that_is_killed_while_it_loads_the_first_time_is_replaced(tmp_path):
    (tmp_path / "kill").touch()
    async with pool_over(spec_of("ok", kill_once=str(tmp_path / "kill")), tmp_path) as pool:
        assert (await pool.run(request_of(0))).failure is None
        assert pool.num_restarts == 1
    assert not (tmp_path / "kill").exists()


async def test_an_environment_that_never_loads_because_its_worker_is_killed_is_given_up(tmp_path, caplog):
    with pytest.raises(EnvironmentSetupError, match=r"its worker ended with SIGKILL while it loaded"):
        async with pool_over(spec_of("ok", kill=True), tmp_path):
            raise AssertionError("the pool was handed out")
    assert caplog.text.count("starting another") == 2


async def test_an_environment_that_is_slow_to_load_is_loaded_again(tmp_path):
    (tmp_path / "slow").touch()
    async with pool_over(spec_of("ok", slow_once=str(tmp_path / "slow")), tmp_path, setup_s=6.0) as pool:
        assert (await pool.run(request_of(0))).failure is None
    assert not (tmp_path / "slow").exists()


async def test_an_environment_that_is_always_too_slow_to_load_ends_the_run_for_good(tmp_path, caplog):
    words = r"^environment 'scripted' was not loaded within 0\.3 s; see .*scripted-0\.log, or raise env_setup_timeout$"
    with pytest.raises(EnvironmentSetupError, match=words) as raised:
        async with pool_over(spec_of("ok", load_s=600.0), tmp_path, setup_s=0.3):
            raise AssertionError("the pool was handed out")
    assert raised.value.is_final
    assert caplog.text.count("starting another") == 2
    assert children() == []


async def test_lost_servers_are_told_to_every_worker_and_to_those_that_come_after(tmp_path):
    def told(number):
        return (tmp_path / f"scripted-{number}.log").read_text()

    async with pool_over(spec_of("exit", 0.1), tmp_path, num_workers=2, rollouts_per_worker=1) as pool:
        await grown(pool, 2, example=1)
        pool.avoid(frozenset({"http://a/v1"}))
        await until(lambda: all("avoiding ['http://a/v1']" in told(number) for number in (0, 1)))
        await pool.run(request_of(0))
        await until(lambda: told(0).count("avoiding ['http://a/v1']") + told(1).count("avoiding") == 3)
        pool.avoid(frozenset())
        await until(lambda: all("avoiding []" in told(number) for number in (0, 1)))


async def test_workers_end_with_all_they_started_when_their_parent_is_killed_even_when_they_are_blocked(tmp_path):
    program = textwrap.dedent(f"""
        import asyncio, pathlib
        from tests.unit.environments.scripted import pool_over, request_of, spec_of
        async def main():
            spec = spec_of("fork", "block")
            async with pool_over(spec, pathlib.Path({str(tmp_path)!r}), num_workers=2, rollouts_per_worker=1) as pool:
                await pool.run(request_of(0))
                running = [asyncio.create_task(pool.run(request_of(1, timeout_s=600))) for _ in range(2)]
                while pool.load.in_flight < 2:
                    await asyncio.sleep(0.05)
                print("ready", flush=True)
                await asyncio.gather(*running)
        asyncio.run(main())
    """)
    parent = await asyncio.create_subprocess_exec(sys.executable, "-c", program, stdout=asyncio.subprocess.PIPE)
    assert parent.stdout is not None
    assert await parent.stdout.readline() == b"ready\n"
    workers = psutil.Process(parent.pid).children(recursive=True)
    assert len(workers) == 3
    parent.kill()
    await parent.wait()
    _, alive = await asyncio.to_thread(psutil.wait_procs, workers, timeout=15)
    assert alive == []


def test_a_worker_is_told_what_the_configuration_says():
    client = ClientConfig(base_url="http://h:1/v1", api_key_var="KEY", headers={"a": "b"}, timeout=7)
    client = client.model_copy(update={"base_url": ("http://h:1/v1", "http://i:1/v1")})
    log = LogConfig(level="debug", vf_level="info", json_logging=True)
    env = EnvConfig(
        id="sums", name="mine", args={"n": 3}, api="v1", agent={"max_turns": 4}, rollout_timeout=50, score_timeout=5,
        max_memory_gb=2, max_cpus=1, niceness=3,
    )  # fmt: skip
    spec = environment_spec(env, client=client, model="m", log=log, retry_s=9, renderer="qwen3")
    assert spec == EnvironmentSpec(
        id="sums", label="mine", args={"n": 3}, api="v1", agent={"max_turns": 4}, renderer="qwen3",
        rollout_timeout_s=50, score_timeout_s=5, max_memory_gb=2, num_cpus=1, niceness=3,
        base_urls=("http://h:1/v1", "http://i:1/v1"), model="m",
        api_key_var="KEY", headers={"a": "b"}, request_timeout_s=7, retry_s=9,
        log_level="debug", library_log_level="info", logs_json=True,
    )  # fmt: skip


class Orchestrator:
    """Runs single rollouts and groups, and counts how each request ended."""

    def __init__(self, pool, draw):
        self.pool = pool
        self.draw = draw
        self.ends = Counter()
        self.is_over = False

    async def work(self, lane):
        for number in range(1000):
            await (self.single() if self.draw.random() < 0.5 else self.group(1000 * lane + number))
            if self.is_over:
                return

    async def single(self):
        """Cancelled now and then."""
        is_scored = self.draw.random() < 0.5
        request = msgspec.structs.replace(request_of(self.draw.randrange(4)), is_scored=is_scored)
        task = asyncio.create_task(self.run(request))
        if self.draw.random() < 0.3:
            await asyncio.sleep(self.draw.uniform(0, 0.3))
            task.cancel()
        await asyncio.wait([task])

    async def group(self, number):
        """A member that failed is run again, and, once they were scored, all of them."""
        rollouts = []
        while len(rollouts) < 3:
            running, rollouts = {self.member(number, index) for index in range(3)}, []
            while running:
                done, running = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
                for rollout in [task.result() for task in done]:
                    if not rollout.is_group_scored:
                        running.add(self.member(number, rollout.id))
                    elif rollout.failure is None:
                        assert rollout.reward == 3.0, "with all of its group"
                        rollouts.append(rollout)

    def member(self, number, index):
        request = group_request_of(index, group=number, example=self.draw.choice([0, 0, 0, 1, 2, 3]))
        return asyncio.create_task(self.run(request))

    async def run(self, request):
        try:
            rollout = await self.pool.run(request)
        except asyncio.CancelledError:
            self.ends["cancelled"] += 1
            raise
        assert (rollout.id, rollout.example) == (request.id, request.example)
        self.ends["ok" if rollout.failure is None else rollout.failure.kind] += 1
        return rollout


async def kill(draw, *, most):
    """Kill up to so many workers at random instants, loading ones too. Returns how many were."""
    num_killed = 0
    for _ in range(most):
        await asyncio.sleep(draw.uniform(0, 0.5))
        if found := children():
            draw.choice(found).kill()
            num_killed += 1
    return num_killed


@pytest.mark.parametrize(
    ("seed", "num_bursts"), [(1, 3), *(pytest.param(seed, 30, marks=pytest.mark.slow) for seed in (2, 3, 4))]
)
async def test_whatever_instants_workers_are_killed_at_each_request_ends_once_and_the_pool_lives(
    tmp_path, monkeypatch, seed, num_bursts
):
    """Never are there more deaths in a row than `max_restarts`."""
    monkeypatch.setattr(places, "MAX_PAUSE_S", 0.2)
    draw = random.Random(seed)
    spec = spec_of(0.05, 0.3, "raise", "unreadable", scores_groups=True)
    limits = {"max_restarts": 3, "rollouts_per_worker": 4, "close_s": 1.0}
    async with pool_over(spec, tmp_path, num_workers=3, **limits) as pool:
        run = Orchestrator(pool, draw)
        working = [asyncio.create_task(run.work(lane)) for lane in range(6)]
        num_killed = 0
        for _ in range(num_bursts):
            num_killed += await kill(draw, most=3)
            await until(lambda killed=num_killed: pool.num_restarts == killed, 60)
            ended = run.ends.total()
            await until(lambda ended=ended: run.ends.total() > ended + 10, 60)
        run.is_over = True
        await asyncio.wait_for(asyncio.gather(*working), 60)
        assert not pool._given_up.done()
        assert (pool.load.in_flight, pool.load.waiting, pool._groups, pool._members) == (0, 0, {}, {})
    assert set(run.ends) == {"ok", "cancelled", FailureKind.ENVIRONMENT, FailureKind.WORKER_DIED}
    assert children() == []
