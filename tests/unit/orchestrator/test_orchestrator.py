"""The orchestrator over real worker processes, a real HTTP server and a trainer that publishes numbers."""

import asyncio
import json
import os
from contextlib import AsyncExitStack
from pathlib import Path

import pytest
from tests.doubles.inference import running_inference
from tests.doubles.trainer import publish_number, train

from prime_rl.config.orchestrator import OrchestratorConfig
from prime_rl.environments.client import open_clients
from prime_rl.environments.pool import PoolLimits, open_pools
from prime_rl.environments.rollouts import EnvironmentSpec
from prime_rl.errors import ArtifactError, DeadlineExceeded, InferenceError, PrimeRLError
from prime_rl.monitors.base import FakeMonitor
from prime_rl.monitors.events import EventLog
from prime_rl.orchestrator.orchestrator import Orchestrator, build_policy, orchestrate
from prime_rl.paths import RunPaths
from prime_rl.transport.batches import BatchReader, BatchWriter

ROOT = Path(__file__).parents[3]


@pytest.fixture(autouse=True)
def _workers_can_import_the_doubles(monkeypatch):
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(paths))


@pytest.fixture
def inference(tmp_path, free_port):
    with running_inference(tmp_path / "model", free_port) as (double, _):
        yield double


@pytest.fixture
def config_of(inference, tmp_path):
    def build(**fields):
        fields = {"batch_size": 4, "rollouts_per_example": 2, "max_steps": 5, "rollout_timeout": 1.0} | fields
        return OrchestratorConfig.model_validate(
            {
                "client": {"base_url": inference.base_url},
                "model": {"name": str(inference.model)},
                "output_dir": tmp_path / "run",
                "seq_len": 64,
                **fields,
            }
        )

    return build


async def produce(config, script, *, num_envs=1, kind=Orchestrator):
    """Run the orchestrator over scripted environments; returns its metric rows and the orchestrator."""
    paths = RunPaths(config.output_dir)
    specs = [
        EnvironmentSpec(
            id="scripted", label=f"env{number}", args={"script": list(script)}, base_urls=("",), model="",
            door="tests.doubles.door",
        )
        for number in range(num_envs)
    ]  # fmt: skip
    async with AsyncExitStack() as stack:
        clients = await stack.enter_async_context(open_clients(config.client))
        events = stack.enter_context(EventLog.opened(paths.events))
        limits = PoolLimits(grace_s=0.5)
        pools = await stack.enter_async_context(
            open_pools(specs, num_workers=1, log_dir=paths.logs / "envs", limits=limits)
        )
        policy = build_policy(config, clients, paths, events)
        await policy.start(5.0)
        monitor = FakeMonitor()
        writer = BatchWriter(paths.rollouts)
        orchestrator = kind(config=config, pools=pools, policy=policy, writer=writer, monitor=monitor)
        await orchestrator.run()
    return [row for _, row in monitor.rows], orchestrator


async def produce_and_train(config, script, *, step_s=0.0, num_envs=1):
    training = asyncio.create_task(train(config.output_dir, max_steps=config.max_steps, step_s=step_s))
    rows, orchestrator = await produce(config, script, num_envs=num_envs)
    return rows, await training, orchestrator


@pytest.mark.parametrize(("level", "off_policy_steps"), [(0, 8), (1, 8), (2, 1)])
async def test_no_token_is_older_than_the_bound_and_level_zero_is_on_policy(config_of, level, off_policy_steps):
    config = config_of(max_async_level=level, max_off_policy_steps=off_policy_steps, max_steps=8)
    script = [0.05, "ok", 0.2, "ok"]
    rows, batches, _ = await produce_and_train(config, script, step_s=0.05)
    gaps = [row["off_policy_gap/max"] for row in rows]
    assert max(gaps) <= config.staleness_bound
    assert [batch.step - batch.min_version for batch in batches] == gaps
    assert all(row["async_level"] <= level for row in rows)
    if level == 0:
        assert gaps == [0] * 8
    else:
        assert max(gaps) >= 1, "generation ran ahead of training"


async def test_a_batch_holds_whole_groups_with_advantages_that_cancel_and_readable_rollouts_beside_it(config_of):
    config = config_of(max_steps=2)
    rows, batches, _ = await produce_and_train(config, ["ok"] * 6)
    for step, (row, batch) in enumerate(zip(rows, batches, strict=True)):
        assert batch.num_sequences == 4
        assert sum(micro_batch.advantages.sum() for micro_batch in batch.micro_batches) == 0
        path = config.output_dir / f"rollouts/step_{step}/rollouts.jsonl"
        rollouts = [json.loads(line) for line in path.read_text().splitlines()]
        assert [rollout["group"] for rollout in rollouts] == [0, 0, 1, 1]
        assert {rollout["example"] for rollout in rollouts[:2]} == {rollouts[0]["example"]}
        assert row["reward/mean"] == sum(rollout["reward"] for rollout in rollouts) / 4
        assert rollouts[0]["messages"] == [{"role": "user", "content": "ok"}]
        assert rollouts[0]["num_tokens"] == 5
        assert rollouts[0]["versions"] == [0, 0]
    assert rows[-1]["progress/total_samples"] == 8
    assert rows[-1]["completion_len/mean"] == 3


async def test_turns_become_one_sample_or_one_each_and_the_figures_do_not_tell_the_difference(config_of):
    figures, shapes = [], []
    for strategy in ("interleaved", "branching"):
        config = config_of(max_steps=2, max_async_level=2, trajectory_strategy=strategy)
        config = config.model_copy(update={"output_dir": config.output_dir / strategy})
        rows, _ = await produce(config, ["talk"])
        reader = BatchReader(RunPaths(config.output_dir).rollouts)
        batches = [reader.read(step, 1) for step in range(2)]
        names = ("reward/mean", "completion_len/mean", "num_turns/mean", "off_policy_gap/max", "progress/total_samples")
        figures.append([[row[name] for name in names] for row in rows])
        shapes.append([(batch.num_sequences, batch.num_tokens, batch.num_loss_tokens) for batch in batches])
    assert figures[0] == figures[1]
    assert shapes == [[(4, 4 * 9, 4 * 6)] * 2, [(8, 4 * (5 + 9), 4 * 6)] * 2]


async def test_without_a_trainer_as_many_batches_come_as_the_asynchrony_allows(config_of):
    config = config_of(max_steps=3, max_async_level=3)
    rows, orchestrator = await produce(config, ["ok"])
    assert [row["async_level"] for row in rows] == [0, 1, 2]
    assert orchestrator._scheduler.counters.cancelled == 0


async def test_the_first_rollout_of_every_batch_is_logged_when_asked_for(config_of, caplog):
    for log_data in (False, True):
        config = config_of(max_steps=2, max_async_level=2, log={"log_data": log_data})
        config = config.model_copy(update={"output_dir": config.output_dir / str(log_data)})
        with caplog.at_level("INFO", logger="prime_rl"):
            await produce(config, ["ok"])
    lines = [line for line in caplog.messages if "begins with" in line]
    assert lines == [f'Batch {step} begins with [{{"role":"user","content":"ok"}}]' for step in range(2)]


async def test_failed_rollouts_are_counted_by_kind_and_never_trained_on(config_of):
    script = ["ok"] * 12 + ["raise", "fail", "hang", "long", "exit"]
    config = config_of(max_steps=12, max_attempts=2, max_error_rate=1.0)
    rows, batches, orchestrator = await produce_and_train(config, script)
    counters = orchestrator._scheduler.counters
    counted = {
        kind: sum(row[f"errors/{kind}"] for row in rows)
        for kind in ("environment", "scorer", "timeout", "too_long", "worker_died")
    }
    assert all(number >= 1 for number in counted.values()), counted
    assert sum(counted.values()) == counters.failed
    assert counters.dispatched == counters.succeeded + counters.failed + counters.cancelled
    assert counters.groups_given_up >= 1
    assert sum(batch.num_sequences for batch in batches) == 48
    for path in config.output_dir.glob("rollouts/*/rollouts.jsonl"):
        assert {json.loads(line)["messages"][0]["content"] for line in path.read_text().splitlines()} == {"ok"}


async def test_what_a_server_sampled_before_it_was_brought_up_to_date_is_never_trained_on(config_of):
    config = config_of(max_steps=8, max_async_level=0, max_attempts=2, max_error_rate=1.0)
    rows, batches, _ = await produce_and_train(config, ["ok"] * 6 + ["old"])
    assert sum(row["errors/inference"] for row in rows) >= 2
    assert [batch.min_version for batch in batches] == list(range(8))


async def test_several_environments_share_batches_in_proportion(config_of):
    config = config_of(max_steps=6)
    rows, _, _ = await produce_and_train(config, ["ok"] * 4, num_envs=2)
    assert sum("reward/env0/mean" in row for row in rows) >= 2
    assert sum("reward/env1/mean" in row for row in rows) >= 2


async def test_a_run_whose_rollouts_mostly_fail_stops_with_the_commonest_error(config_of):
    with pytest.raises(PrimeRLError, match=r"of the last 64 rollouts failed.*KeyError: 'environment broke'"):
        await produce(config_of(), ["raise"])


async def test_weights_that_do_not_come_end_the_run_in_words(config_of):
    config = config_of(weights_timeout=0.3, max_async_level=1)
    with pytest.raises(DeadlineExceeded, match=r"waited 0\.\d s for weights 1 \(serving 0\) for batch 2"):
        await produce(config, ["ok"])


async def test_waiting_for_rollouts_does_not_spin_once_the_patience_with_weights_is_used_up(config_of, caplog):
    class UsedUp(Orchestrator):
        async def run(self):
            self._waited_for_weights_s = self._config.weights_timeout
            await super().run()

    with caplog.at_level("INFO"):
        await produce(config_of(max_steps=1), [0.3], kind=UsedUp)
    assert not [record for record in caplog.records if "Waiting for rollouts" in record.message]


async def test_a_crashed_worker_pool_is_the_runs_crash(config_of):
    with pytest.raises(PrimeRLError, match=r"exit code 7, 6 times in a row"):
        await produce(config_of(max_error_rate=1.0, max_attempts=100), ["exit"])


async def test_a_used_run_directory_is_refused(config_of):
    config = config_of()
    publish_number(RunPaths(config.output_dir).rollouts, 0)
    with pytest.raises(ArtifactError, match="holds 1 batches of an earlier run"):
        await orchestrate(config)


async def test_a_server_of_another_model_is_refused(config_of):
    config = config_of(model={"name": "another"})
    with pytest.raises(InferenceError, match="not another; start it with the same model name"):
        await orchestrate(config)


async def test_a_server_with_the_weights_of_another_run_is_refused_where_nothing_may_be_reloaded(config_of, inference):
    inference.version = 3
    with pytest.raises(InferenceError, match="serves weights 3 of another run"):
        await orchestrate(config_of(reload_weights_on_start=False))
