"""The orchestrator over real worker processes, a real HTTP server and a trainer that publishes numbers."""

import asyncio
import json
import sys
from collections import Counter
from contextlib import AsyncExitStack
from functools import partial

import pytest
from tests.doubles.inference import running_inference
from tests.doubles.spoilt_door import OVERPAID, SPOILT
from tests.doubles.trainer import publish_number, train

from prime_rl.config.orchestrator import OrchestratorConfig
from prime_rl.environments.client import open_clients
from prime_rl.environments.pool import PoolLimits, open_pools
from prime_rl.environments.rollouts import EnvironmentSpec, Failure
from prime_rl.errors import ArtifactError, DeadlineExceeded, Hopeless, InferenceError, PrimeRLError
from prime_rl.monitors.base import FakeMonitor
from prime_rl.monitors.events import EventLog
from prime_rl.orchestrator import generation, orchestrator, scheduler
from prime_rl.orchestrator.dispatch import Job
from prime_rl.orchestrator.faults import FaultLedger
from prime_rl.orchestrator.orchestrator import Extensions, Orchestrator, build_policy, orchestrate
from prime_rl.orchestrator.scoring import build_scorer
from prime_rl.orchestrator.state import EvaluationState
from prime_rl.paths import RunPaths
from prime_rl.transport.batches import BatchReader, BatchWriter

pytestmark = pytest.mark.usefixtures("workers_import_the_doubles")


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
                "env": [{"id": "env0"}, {"id": "env1"}],
                **fields,
            }
        )

    return build


async def produce(config, *scripts, num_envs=1, kind=Orchestrator, door="door", scores_groups=False, **extensions):
    """Run the orchestrator over environments, each with its script; returns its metric rows and the orchestrator."""
    paths = RunPaths(config.output_dir)
    specs = [
        EnvironmentSpec(
            id="scripted", label=f"env{number}", base_urls=("",), model="", door=f"tests.doubles.{door}",
            args={"script": list(script), "scores_groups": scores_groups, "marker": str(config.output_dir / "marker")},
        )
        for number, script in enumerate(scripts * num_envs)
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
        orchestrator = kind(
            config=config,
            pools=pools,
            policy=policy,
            writer=writer,
            monitor=monitor,
            scorer=build_scorer(config),
            extensions=Extensions(**extensions),
        )
        await orchestrator.run()
    return [row for _, row in monitor.rows], orchestrator


async def produce_and_train(config, *scripts, step_s=0.0, num_envs=1, **extensions):
    training = asyncio.create_task(train(config.output_dir, max_steps=config.max_steps, step_s=step_s))
    rows, orchestrator = await produce(config, *scripts, num_envs=num_envs, **extensions)
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


@pytest.mark.parametrize("kinds", [("environment", "scorer", "timeout"), ("worker_died",)])
async def test_failed_rollouts_are_counted_by_kind_and_never_trained_on(config_of, kinds):
    words = {"environment": "raise", "scorer": "fail", "timeout": "hang", "worker_died": "exit"}
    script = ["ok"] * 12 + [words[kind] for kind in kinds]
    config = config_of(max_steps=12, max_attempts=2, max_error_rate=1.0)
    ended = []
    rows, batches, orchestrator = await produce_and_train(config, script, on_end=ended.append)
    counters = orchestrator._scheduler.counters
    counted = {kind: sum(row[f"errors/{kind}"] for row in rows) for kind in words}
    assert {kind for kind, number in counted.items() if number} == set(kinds), counted
    assert sum(counted.values()) == counters.failed
    assert counters.dispatched == counters.ends.total() == len(ended)
    assert counters.groups_given_up >= 1
    assert counters.number("used") == sum(batch.num_sequences for batch in batches) == 48
    for one in ended:
        assert one.end.kind in ("used", "failed", "cancelled")
        assert (one.result is None) == (one.end.kind == "cancelled" and one.scored is None)
        if one.end.kind == "failed":
            assert one.result.failure.kind == one.end.why
    for path in config.output_dir.glob("rollouts/*/rollouts.jsonl"):
        assert {json.loads(line)["messages"][0]["content"] for line in path.read_text().splitlines()} == {"ok"}


async def test_answers_that_cannot_be_trained_on_fail_their_rollouts_and_never_the_run(config_of):
    advantage = {"type": "default", "std_norm": "local"}
    config, ended = config_of(max_steps=8, max_attempts=2, max_error_rate=1.0, advantage=advantage), []
    script = ["ok", "ok", *SPOILT, *OVERPAID]
    producing = produce_and_train(config, script, door="spoilt_door", on_end=ended.append)
    rows, batches, _ = await asyncio.wait_for(producing, 40)
    assert sum(row["errors/inference"] for row in rows) >= 2 * len(SPOILT)
    assert sum(row["errors/bad_reward"] for row in rows) >= 2 * len(OVERPAID)
    told = {one.result.failure.message for one in ended if one.end.kind == "failed"}
    future = {message for message in told if message.startswith("the server sampled with weights 10000, newer than ")}
    assert len(future) >= 1
    assert told - future == {
        "turn 1 has a logprob of 0.5", "turn 1 has a logprob of nan", "turn 1 has no prompt",
        "turn 1 has 3 sampled tokens, 2 logprobs and 3 versions", "turn 1 has token ids from -5 to 5",
        "turn 1 has a logprob of -1e+39", f"turn 1 has a logprob of {-sys.float_info.max}",
        "turn 1 has a token of weights 2147483648",
        *(f"the reward is {reward}; it must be a number between -1e+30 and 1e+30" for reward in OVERPAID.values()),
    }  # fmt: skip
    assert [batch.num_sequences for batch in batches] == [4] * 8


async def test_a_rollout_that_is_too_long_is_left_out_of_training_and_neither_failed_nor_run_again(config_of):
    config, ended = config_of(max_steps=6), []
    rows, batches, _ = await produce_and_train(config, ["ok", "long"], on_end=ended.append)
    assert {str(one.end) for one in ended} <= {"used", "filtered (too_long)", "cancelled (run_over)"}
    long = [one for one in ended if one.end.kind == "filtered"]
    assert {one.result.messages[0]["content"] for one in long} == {"long"}
    assert {one.scored.advantage for one in long} == {0.5, -0.5}, "of the rewards 1 and 0, as if it had been trained on"
    assert {one.result.messages[0]["content"] for one in ended if one.end.kind == "used"} == {"ok"}
    assert sum(row["filter/too_long/count"] for row in rows) == len(long) >= 6
    assert sum(batch.num_sequences for batch in batches) == 6 * 4 - len(long)


async def test_a_group_that_was_scored_as_one_is_run_again_whole_when_one_of_it_cannot_be_used(config_of):
    config, ended = config_of(max_steps=6, rollouts_per_example=4, batch_size=8, rollout_timeout=5.0), []
    producing = produce_and_train(
        config, ["nan-once", "spoilt-once", "ok", "ok"], door="spoilt_door", scores_groups=True, on_end=ended.append
    )
    rows, batches, orchestrator = await asyncio.wait_for(producing, 20)
    counters = orchestrator._scheduler.counters
    ends = {str(end): number for end, number in counters.ends.items()}
    assert ends["failed (bad_reward)"] == ends["failed (inference)"] == 1
    assert ends["cancelled (group_failed)"] == 2 * 3
    assert counters.dispatched == len(ended) == counters.ends.total()
    assert sum(row["errors/timeout"] for row in rows) == counters.groups_given_up == 0
    assert {one.result.reward for one in ended if one.end.kind == "used"} == {4.0}, "each was scored with three others"
    assert sum(batch.num_sequences for batch in batches) == 48


async def test_of_groups_that_are_scored_as_one_whole_groups_are_in_the_budget_of_errors(config_of, monkeypatch):
    """Half of the groups have one member without a reward, whose answer may be the first of its group or the last."""
    judged = []
    monkeypatch.setattr(FaultLedger, "_note", lambda self, end: judged.append(end))
    config = config_of(max_steps=4, rollouts_per_example=4, batch_size=8, max_attempts=1, rollout_timeout=5.0)
    script = ["ok", "nan-once", "ok", "nan-once"]
    await asyncio.wait_for(produce_and_train(config, script, door="spoilt_door", scores_groups=True), 20)
    failures = [one for one in judged if isinstance(one, Failure)]
    assert len(failures) == 2
    assert judged.count("lost") == 2 * 3
    assert judged.count(None) % 4 == 0


async def test_rollouts_beside_one_that_ends_its_worker_cost_no_attempt_and_are_in_no_budget_of_errors(config_of):
    config = config_of(max_steps=3, batch_size=64, rollouts_per_example=1, max_attempts=1, max_error_rate=0.1)
    ended, script = [], ["exit-once"] + [0.3] * 99
    _, batches, orchestrator = await produce_and_train(config, script, door="spoilt_door", on_end=ended.append)
    lost = [one.end.why for one in ended if one.end.kind == "failed"]
    assert set(lost) == {"worker_died"}
    assert len(lost) > 32
    assert orchestrator._scheduler.counters.groups_given_up == 0
    assert [batch.num_sequences for batch in batches] == [64] * 3


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


async def test_batches_are_drawn_in_the_ratio_of_their_environments(config_of):
    config = config_of(batch_size=16, max_steps=6, env=[{"id": "env0", "ratio": 3}, {"id": "env1", "ratio": 1}])
    rows, _, _ = await produce_and_train(config, ["ok"] * 4, ["ok"] * 40)
    drawn = Counter()
    for step in range(6):
        text = (config.output_dir / f"rollouts/step_{step}/rollouts.jsonl").read_text()
        drawn.update(json.loads(line)["env"] for line in text.splitlines())
    # 8 groups of 2 a batch; of those that the last batch did not need, the other environment may have had one
    assert abs(drawn["env0"] - 72) <= 4
    assert drawn.total() == 96
    assert rows[-1]["pool/env0/normal"] == 4


async def test_groups_that_are_all_right_or_all_wrong_are_replaced_and_their_examples_put_aside(config_of):
    buffer = {"online_difficulty_filtering": True, "easy_threshold": 1.0, "hard_threshold": 0.0}
    config = config_of(max_steps=4, buffer=buffer, oversampling_factor=1.5)
    ended = []
    script = ["right"] * 3 + ["ok"] * 4 + ["wrong"] * 2
    rows, batches, orchestrator = await produce_and_train(config, script, on_end=ended.append)
    for path in config.output_dir.glob("rollouts/*/rollouts.jsonl"):
        assert {json.loads(line)["messages"][0]["content"] for line in path.read_text().splitlines()} == {"ok"}
    assert sum(batch.num_sequences for batch in batches) == 16
    why = Counter(one.end.why for one in ended if one.end.kind == "filtered")
    metrics = orchestrator._generation.buffer.metrics()
    assert 2 <= metrics["pool/easy"] + metrics["pool/hard"] <= 5
    assert why == {f"too_{name}": 2 * metrics[f"pool/{name}"] for name in ("easy", "hard") if metrics[f"pool/{name}"]}
    assert rows[-1]["scheduler/rollouts_used"] == 16
    assert orchestrator._scheduler.counters.dispatched == len(ended)


async def test_a_strict_level_generates_each_batch_by_exactly_the_weights_it_is_to_have(config_of):
    config = config_of(max_steps=6, max_async_level=1, strict_async_level=True, oversampling_factor=1.5)
    _, batches, _ = await produce_and_train(config, ["ok", 0.1, "ok", 0.02])
    assert [(batch.min_version, batch.max_version) for batch in batches] == [(max(0, n - 1),) * 2 for n in range(6)]
    assert config.staleness_bound == 1


async def test_a_batch_may_be_as_many_tokens_instead_of_rollouts(config_of):
    config = config_of(token_batch_size=33, batch_size=128, max_steps=3)
    _, batches, _ = await produce_and_train(config, ["ok"] * 5)
    # a rollout has 5 tokens, a group of two 10
    assert [batch.num_tokens for batch in batches] == [40] * 3


async def test_no_more_rollouts_start_in_a_minute_than_an_environment_may_have(config_of):
    config = config_of(max_steps=3, batch_size=8, tasks_per_minute=8, max_async_level=3)
    used = asyncio.Queue()
    producing = asyncio.create_task(produce(config, ["ok"], ["ok"], on_end=used.put_nowait))
    ends = [await asyncio.wait_for(used.get(), 20) for _ in range(16)]
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(asyncio.shield(producing), 0.5)
    producing.cancel()
    await asyncio.gather(producing, return_exceptions=True)
    assert Counter(one.dispatch.example.env for one in ends) == {"env0": 8, "env1": 8}
    assert used.empty()


async def test_every_environment_has_a_budget_of_errors_of_its_own(config_of):
    config = config_of(batch_size=16, max_steps=100, max_async_level=100, env=[{"id": "env0"}, {"id": "env1"}])
    with pytest.raises(Hopeless, match=r"environment 'env1': \d\d of the last 64 rollouts failed, more than") as error:
        await produce(config, ["ok"] * 4, ["ok", "fail", "fail"])
    assert "scorer broke" in str(error.value)


async def test_an_advantage_function_that_hangs_ends_the_run_in_words(config_of, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "slow_advantage.py").write_text("import time\ndef never(group):\n    time.sleep(60)\n")
    monkeypatch.setattr(generation, "SCORE_TIMEOUT_S", 0.2)
    config = config_of(advantage={"type": "custom", "import_path": "slow_advantage.never"})
    with pytest.raises(
        DeadlineExceeded,
        match=r"the advantage slow_advantage.never took longer than 0.2 s on a group of environment 'env0', example \d",
    ):
        await asyncio.wait_for(produce(config, ["ok"]), 20)


async def test_a_group_that_is_dropped_while_it_is_scored_moves_neither_pools_nor_ratios(
    config_of, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "late_advantage.py").write_text(
        "import time\ndef late(group):\n    time.sleep(0.03)\n    return group.rewards\n"
    )
    config = config_of(
        max_steps=8,
        max_async_level=3,
        max_off_policy_steps=0,
        buffer={"online_difficulty_filtering": True},
        advantage={"type": "custom", "import_path": "late_advantage.late"},
    )
    rows, _, orchestrator = await produce_and_train(config, ["ok", "right"])
    counters = orchestrator._scheduler.counters
    assert counters.groups_stale > 5
    assert rows[-1]["buffer/filtered/easy"] <= counters.groups_filtered
    assert sum(orchestrator._generation.buffer._filtered.values()) == counters.groups_filtered


async def test_a_run_in_which_every_group_is_filtered_says_so_and_ends(config_of, monkeypatch, caplog):
    monkeypatch.setattr(scheduler, "HOPELESS_GROUPS", 60)
    monkeypatch.setattr(orchestrator, "NOTICE_INTERVAL_S", 0.02)
    config = config_of(buffer={"online_difficulty_filtering": True})
    with (
        caplog.at_level("INFO"),
        pytest.raises(PrimeRLError, match=r"60 groups in a row had nothing to train on: .* 120 as too_hard were left"),
    ):
        await produce(config, ["wrong"])
    notices = [line for line in caplog.messages if line.startswith("Waiting for rollouts of batch 0: ")]
    assert any("groups in a row had nothing to train on: of the rollouts, " in line for line in notices)


@pytest.mark.parametrize("level", [0, 2])
@pytest.mark.parametrize(("word", "why"), [("wrong", "zero_advantage"), ("long", "too_long")])
async def test_a_run_in_which_filters_leave_out_every_rollout_says_so_and_ends(
    config_of, monkeypatch, word, why, level
):
    monkeypatch.setattr(scheduler, "HOPELESS_GROUPS", 20)
    config = config_of(max_async_level=level, max_steps=2, filters=[{"type": "zero_advantage", "enforce": True}])
    producing = produce(config, [word])
    with pytest.raises(PrimeRLError, match=rf"^2\d groups in a row had nothing .* 4\d as {why} were left out"):
        await asyncio.wait_for(producing, 20)


async def test_a_batch_of_which_nothing_is_left_is_generated_anew_even_when_it_is_the_last(config_of):
    config = config_of(max_async_level=0, max_steps=3, env=[{"id": "env0"}], rollouts_per_example=4, batch_size=4)
    _, batches, orchestrator = await asyncio.wait_for(produce_and_train(config, ["long", "ok"]), 20)
    assert [batch.num_sequences for batch in batches] == [4] * 3
    counters = orchestrator._scheduler.counters
    assert counters.groups_started == counters.groups_filtered + 3
    assert 2 <= counters.groups_filtered <= 4


class TwentyForEveryVersion:
    """An evaluation that wants twenty rollouts at once whenever there are new weights."""

    share = 0.5
    pools = ()
    is_alone = False

    def __init__(self):
        self.wanted = []
        self.begun = []
        self.done = []
        self.is_over = asyncio.Event()

    def on_weights(self, version):
        self.wanted += [version] * 20
        self.is_over.clear()

    def wants(self, now):
        return bool(self.wanted)

    def next(self, now):
        version = self.wanted.pop(0)
        self.begun.append(version)
        return Job(key=("eval", len(self.begun)), group=None, version=version, run=partial(self.run, version))

    def delay(self, now):
        return None

    def metrics(self):
        return {"evaluation/dispatched": float(len(self.begun))}

    def snapshot(self):
        return EvaluationState(dispatched=len(self.begun), ends=[])

    async def run(self, version, servers):
        assert len(servers) == 1
        await asyncio.sleep(0.02)
        self.done.append(version)
        if not self.wanted and len(self.done) == len(self.begun):
            self.is_over.set()

    async def finish(self):
        await self.is_over.wait()


async def test_an_evaluation_runs_beside_training_and_neither_waits_for_the_other(config_of):
    evaluation, done_before = TwentyForEveryVersion(), []
    config = config_of(max_steps=4, max_concurrent=4, max_async_level=1)
    rows, _, orchestrator = await produce_and_train(
        config, [0.02, 0.02], evaluation=evaluation, on_end=lambda one: done_before.append(len(evaluation.done))
    )
    assert len(rows) == 4
    assert 0 < rows[-1]["evaluation/dispatched"] <= len(evaluation.begun)
    assert len(evaluation.done) == len(evaluation.begun) >= 40
    assert Counter(evaluation.done)[0] == 20
    assert done_before[3] < 20, "training did not wait until the first evaluation was over"
    assert done_before[-1] > 10, "nor the evaluation for the end of training"
    assert orchestrator._dispatcher.concurrency.in_flight.total() == 0


async def test_a_run_whose_rollouts_mostly_fail_stops_with_the_commonest_error(config_of):
    with pytest.raises(Hopeless, match=r"of the last 64 rollouts failed.*KeyError: 'environment broke'"):
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
