import asyncio
from types import SimpleNamespace

import pytest

from prime_rl.errors import InferenceError
from prime_rl.orchestrator import controller
from prime_rl.orchestrator.concurrency import Concurrency
from prime_rl.orchestrator.controller import FixedBound, Load, Loads, parse_load
from prime_rl.orchestrator.fleet import State

VLLM = """# HELP vllm:num_requests_running Number of requests in model execution batches.
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="m"} 3.0
vllm:num_requests_running{engine="1",model_name="m"} 4.0
vllm:num_requests_waiting{engine="0",model_name="m"} 12.0
vllm:num_requests_waiting_by_reason{engine="0",model_name="m"} 99.0
vllm:kv_cache_usage_perc{engine="0",model_name="a } b"} 0.25
vllm:kv_cache_usage_perc{engine="1",model_name="a } b"} 0.75
vllm:num_preemptions_total{engine="0",model_name="m"} 7.0
vllm:num_preemptions_created{engine="0",model_name="m"} 1.7e+09
vllm:generation_tokens_total{engine="0",model_name="m"} 123456.0
"""


def test_requests_of_all_engines_are_added_and_the_fullest_cache_counts():
    assert parse_load(VLLM) == Load(running=7, waiting=12, kv_usage=0.75, preemptions=7)


def test_the_older_name_of_the_cache_is_known_and_what_is_not_told_is_zero():
    old = "vllm:gpu_cache_usage_perc 0.5\nvllm:num_requests_running 2 1700000000000\n"
    assert parse_load(old) == Load(running=2, waiting=0, kv_usage=0.5, preemptions=0)
    assert parse_load("") == Load(running=0, waiting=0, kv_usage=0.0, preemptions=0)


@pytest.mark.parametrize("length", range(0, len(VLLM), 7))
def test_an_answer_that_was_cut_off_tells_what_it_tells(length):
    load = parse_load(VLLM[:length])
    assert (load.running, load.waiting, load.preemptions) in {
        (0, 0, 0), (3, 0, 0), (7, 0, 0), (7, 1, 0), (7, 12, 0), (7, 12, 7)
    }  # fmt: skip


@pytest.mark.parametrize("value", ["", "NaN", "+Inf", "-3", "three", "{", '} "'])
def test_what_is_no_number_of_requests_is_zero(value):
    assert parse_load(f"vllm:num_requests_running {value}\nvllm:num_requests_waiting 2") == Load(
        running=0, waiting=2, kv_usage=0.0, preemptions=0
    )


class Halves:
    """Half as many whenever a request waits, down to one."""

    def bound(self, loads, current):
        return max(1, current // 2) if any(load.waiting for load in loads) else current


def fleet_of(*answers):
    """Servers that answer so; an exception is raised, None is one that is down."""

    async def metrics(answer):
        if isinstance(answer, Exception):
            raise answer
        return answer

    return SimpleNamespace(
        servers=[
            SimpleNamespace(
                state=State.DOWN if answer is None else State.UP,
                client=SimpleNamespace(metrics=lambda answer=answer: metrics(answer)),
            )
            for answer in answers
        ]
    )


async def looked_at(fleet, controller_, looks, monkeypatch):
    monkeypatch.setattr(controller, "LOOK_INTERVAL_S", 0.0)
    concurrency, changes = Concurrency(32, {"training": 1.0}, usual=1), []
    loads = Loads(fleet, concurrency, controller_, on_change=lambda: changes.append(concurrency.bound))
    task = asyncio.create_task(loads.watch())
    for _ in range(20 * looks):
        await asyncio.sleep(0)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    return loads.metrics(), changes


async def test_a_controller_changes_the_bound_while_the_run_goes_on(monkeypatch):
    metrics, changes = await looked_at(fleet_of(VLLM), Halves(), 10, monkeypatch)
    assert changes == [16, 8, 4, 2, 1]
    assert metrics["scheduler/max_in_flight"] == 1


async def test_the_loads_of_all_servers_that_answer_are_told_and_the_bound_stays_as_configured(monkeypatch):
    fleet = fleet_of(VLLM, InferenceError("no such route"), None, VLLM)
    metrics, changes = await looked_at(fleet, FixedBound(), 1, monkeypatch)
    assert metrics == {
        "inference/requests_running": 14, "inference/requests_waiting": 24, "inference/kv_usage/max": 0.75,
        "inference/preemptions": 14, "scheduler/max_in_flight": 32,
    }  # fmt: skip
    assert changes == []
    nothing, _ = await looked_at(fleet_of(None), FixedBound(), 1, monkeypatch)
    assert nothing == {}


async def test_what_is_no_servers_fault_ends_the_run(monkeypatch):
    concurrency = Concurrency(None, {"training": 1.0}, usual=1)
    loads = Loads(fleet_of(ZeroDivisionError("ours")), concurrency, FixedBound(), on_change=lambda: None)
    with pytest.raises(ZeroDivisionError):
        await loads.watch()
