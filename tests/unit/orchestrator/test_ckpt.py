"""Where an orchestrator begins, by what it finds in the run directory."""

import json

import pytest
from tests.doubles.state import state_of

from prime_rl.config.orchestrator import OrchestratorConfig
from prime_rl.errors import ArtifactError, ConfigError, DeadlineExceeded
from prime_rl.journal import Journal
from prime_rl.monitors.base import JsonlMonitor, read_metrics
from prime_rl.orchestrator.ckpt import Begins, Start, prepare_start
from prime_rl.orchestrator.fleet import Fleet
from prime_rl.orchestrator.orchestrator import _serve_first_weights, _specs
from prime_rl.orchestrator.policy import Policy
from prime_rl.orchestrator.state import encode
from prime_rl.paths import RunPaths, step_dir
from prime_rl.resume import go_back
from prime_rl.transport.batches import STATE
from prime_rl.transport.checkpoints import ORCHESTRATOR_STATE
from prime_rl.transport.manifest import publish_dir


@pytest.fixture
def paths(tmp_path):
    return RunPaths(tmp_path / "run")


@pytest.fixture
def start(paths):
    def begin(**fields):
        fields = {"batch_size": 4, "rollouts_per_example": 2, "env": [{"id": "a"}, {"id": "b"}]} | fields
        return prepare_start(OrchestratorConfig.model_validate({"output_dir": paths.output_dir, **fields}), paths)

    return begin


def batch(paths, step, state=True):
    with publish_dir(step_dir(paths.rollouts, step)) as directory:
        (directory / "batch.msgpack").write_bytes(b"batch")
        if state:
            (directory / STATE).write_bytes(encode(state_of(num_batches=step + 1)))


def checkpoint(root, step, state=True):
    with publish_dir(step_dir(root, step)) as directory:
        (directory / "trainer").mkdir()
        (directory / "trainer" / "shard").write_bytes(b"shard")
        if state:
            (directory / ORCHESTRATOR_STATE).parent.mkdir()
            (directory / ORCHESTRATOR_STATE).write_bytes(encode(state_of(num_batches=step)))


def rows(paths, process, steps, name="reward/mean"):
    monitor = JsonlMonitor(paths.metrics(process))
    for step in steps:
        monitor.log({name: 0.5}, step=step)
    monitor.close()


def steps_of(paths, process):
    return [row["step"] for row in read_metrics(paths.metrics(process))]


def test_an_empty_directory_is_begun_in_anew_with_recover_too(start):
    assert start() == Start()
    assert start(recover=True) == Start(how=Begins.RECOVERED)
    assert start(ckpt={}) == Start()


def test_recover_takes_the_newest_complete_batch_and_its_state(start, paths):
    for step in range(3):
        batch(paths, step)
    checkpoint(paths.checkpoints, 1)
    (paths.rollouts / ".step_3.tmp-99").mkdir()
    rows(paths, "orchestrator", range(4))
    found = start(recover=True)
    assert (found.how, found.next_batch) == (Begins.RECOVERED, 3)
    assert found.state == state_of(num_batches=3)
    assert steps_of(paths, "orchestrator") == [0, 1, 2], "the row of a batch that was not complete comes again"
    assert not (paths.rollouts / ".step_3.tmp-99").exists()
    assert step_dir(paths.rollouts, 2).exists()


def test_recover_falls_back_on_the_newest_sound_checkpoint_where_there_is_no_batch(start, paths):
    checkpoint(paths.checkpoints, 1)
    checkpoint(paths.recovery, 3)
    checkpoint(paths.checkpoints, 2)
    assert start(recover=True).next_batch == 3
    (step_dir(paths.recovery, 3) / "trainer" / "shard").write_bytes(b"other")
    found = start(recover=True)
    assert (found.how, found.next_batch, found.state) == (Begins.RECOVERED, 2, state_of(num_batches=2))


def test_recover_never_makes_a_batch_again_that_is_there(start, paths):
    checkpoint(paths.checkpoints, 1)
    batch(paths, 1, state=False)
    with pytest.raises(ArtifactError, match=r"step_1 was written without state.msgpack.*ckpt.resume_step = 1"):
        start(recover=True)


def test_a_damaged_state_is_named(start, paths):
    batch(paths, 0)
    path = step_dir(paths.rollouts, 0) / STATE
    path.write_bytes(path.read_bytes()[:-1] + b"x")
    with pytest.raises(ArtifactError, match=r"rollouts/step_0/state.msgpack is damaged"):
        start(recover=True)


def test_without_either_a_directory_with_batches_is_refused(start, paths):
    batch(paths, 0)
    with pytest.raises(ArtifactError, match=r"holds 1 batches of an earlier run; go on from one of its checkpoints"):
        start()


@pytest.mark.parametrize("resume_step", [2, -1])
def test_resume_sets_aside_what_lies_beyond_its_checkpoint(start, paths, resume_step):
    for step in range(4):
        batch(paths, step)
    for step in (1, 2):
        checkpoint(paths.checkpoints, step)
    rows(paths, "orchestrator", range(4))
    rows(paths, "eval", range(4), "eval/a/avg@1")
    found = start(ckpt={"resume_step": resume_step}, eval={"env": [{"id": "a"}]})
    assert (found.how, found.next_batch, found.state) == (Begins.RESUMED, 2, state_of(num_batches=2))
    assert sorted(path.name for path in paths.rollouts.iterdir()) == ["step_0", "step_1"]
    assert (paths.superseded / "1" / "rollouts" / "step_3" / STATE).exists()
    assert steps_of(paths, "orchestrator") == [0, 1]
    assert steps_of(paths, "eval") == [0, 1, 2]
    assert found.evaluated == {"eval": 2}
    again = start(ckpt={"resume_step": resume_step}, eval={"env": [{"id": "a"}]})
    assert again == found, "going back twice is going back once"


def test_a_resumed_run_evaluates_the_step_it_begins_with_where_it_is_asked_to(start, paths):
    checkpoint(paths.checkpoints, 2)
    rows(paths, "eval", range(3), "eval/a/avg@1")
    found = start(ckpt={"resume_step": 2}, eval={"env": [{"id": "a"}], "skip_eval_on_resume": False})
    assert found.evaluated == {"eval": 1}
    assert steps_of(paths, "eval") == [0, 1]


def test_a_checkpoint_that_is_missing_or_damaged_is_named(start, paths):
    checkpoint(paths.checkpoints, 1)
    checkpoint(paths.checkpoints, 2)
    with pytest.raises(ArtifactError, match=r"no complete checkpoint of step 7 in .*complete are: 1, 2"):
        start(ckpt={"resume_step": 7})
    (step_dir(paths.checkpoints, 2) / ORCHESTRATOR_STATE).write_bytes(b"")
    with pytest.raises(ArtifactError, match=r"orchestrator/state.msgpack.*ckpt.resume_step = 1"):
        start(ckpt={"resume_step": -1})


def test_a_checkpoint_without_an_orchestrator_gives_the_step_alone(start, paths, caplog):
    checkpoint(paths.checkpoints, 2, state=False)
    assert start(ckpt={"resume_step": 2}) == Start(how=Begins.RESUMED, next_batch=2)
    assert "holds no state of an orchestrator" in caplog.text


def test_a_process_that_died_before_its_first_batch_resumes_again(start, paths):
    checkpoint(paths.checkpoints, 2)
    checkpoint(paths.checkpoints, 4)
    found = start(ckpt={"resume_step": 2}, recover=True)
    assert (found.how, found.next_batch) == (Begins.RESUMED, 2)


def test_a_process_that_died_before_its_first_batch_after_going_back_resumes_again_as_it_was_asked_to(start, paths):
    for step in range(4):
        batch(paths, step)
    checkpoint(paths.checkpoints, 2)
    asked = {"ckpt": {"resume_step": 2, "skip_buffer": True}, "eval": {"env": [{"id": "a"}]}}
    first = start(**asked)
    assert start(**asked, recover=True) == first
    assert (first.how, first.next_batch, first.state.scheduler.groups) == (Begins.RESUMED, 2, [])
    assert first.evaluated == {"eval": 2}
    resumed = start(ckpt={"resume_step": 2}, recover=True)
    assert resumed.fitting({"a": 9, "b": 10}, {"a": [1] * 9, "b": []}) is not None, "other data are allowed still"
    assert [path.name for path in paths.superseded.iterdir()] == ["1"], "nothing more was set aside"


@pytest.mark.parametrize("resume_step", [2, -1])
def test_a_process_that_made_a_batch_since_the_run_was_resumed_recovers(start, paths, resume_step):
    checkpoint(paths.checkpoints, 2)
    for step in (1, 2):
        batch(paths, step)
    found = start(ckpt={"resume_step": resume_step, "skip_buffer": True}, recover=True)
    assert (found.how, found.next_batch, found.state) == (Begins.RECOVERED, 3, state_of(num_batches=3))
    assert not paths.superseded.exists()


def test_a_resumed_run_never_makes_a_batch_again_whose_state_is_missing(start, paths):
    checkpoint(paths.checkpoints, 2)
    batch(paths, 2, state=False)
    with pytest.raises(ArtifactError, match=r"step_2 was written without state.msgpack"):
        start(ckpt={"resume_step": 2}, recover=True)
    assert step_dir(paths.rollouts, 2).exists()


def test_counting_anew_is_begun_again_until_there_is_a_batch_of_that_count(start, paths):
    asked = {"ckpt": {"resume_step": 2, "skip_progress": True}}
    checkpoint(paths.checkpoints, 2)
    batch(paths, 1)
    go_back(paths, 2, counts_anew=True)  # by the launcher
    first = start(**asked)
    assert (first.how, first.next_batch, first.state.next_batch) == (Begins.RESUMED, 0, 0)
    checkpoint(paths.recovery, 0, state=False)  # by the trainer
    again = start(**asked, recover=True)
    assert again == first
    batch(paths, 0)
    found = start(**asked, recover=True)
    assert (found.how, found.next_batch, found.state) == (Begins.RECOVERED, 1, state_of(num_batches=1))


def test_skip_buffer_and_skip_progress(start, paths):
    checkpoint(paths.checkpoints, 2)
    without = start(ckpt={"resume_step": 2, "skip_buffer": True})
    assert (without.next_batch, without.state.scheduler.groups, without.state.buffer.pools) == (2, [], {})
    batch(paths, 0)
    rows(paths, "orchestrator", range(2))
    rows(paths, "eval", (0, 2), "eval/reward")
    anew = start(ckpt={"resume_step": 2, "skip_progress": True})
    assert (anew.next_batch, anew.state.next_batch, anew.state.scheduler.groups) == (0, 0, [])
    assert anew.state.buffer.pools == state_of(num_batches=2).buffer.pools
    assert steps_of(paths, "orchestrator") == steps_of(paths, "eval") == []
    assert not step_dir(paths.rollouts, 0).exists()


def test_groups_of_another_size_are_generated_anew(start, paths, caplog):
    batch(paths, 0)
    before = state_of()
    found = start(recover=True, rollouts_per_example=4, batch_size=8)
    assert found.state.scheduler.groups == []
    assert found.state.scheduler.again == [group.example for group in before.scheduler.groups]
    assert "The size of groups or batches has changed" in caplog.text
    tokens = start(recover=True, batch_size=128, token_batch_size=100, seq_len=16)
    assert (tokens.state.scheduler.estimate, tokens.state.scheduler.groups) == (32.0, [])


def test_a_run_that_is_beyond_its_last_step_is_refused(start, paths):
    for step in range(3):
        batch(paths, step)
    assert start(recover=True, max_steps=3).next_batch == 3
    with pytest.raises(ConfigError, match="the run is at step 3 already, beyond max_steps = 2"):
        start(recover=True, max_steps=2)


def test_other_data_end_a_run_that_was_interrupted_and_not_one_that_is_resumed(start, paths):
    batch(paths, 0)
    checkpoint(paths.checkpoints, 1)
    found = start(recover=True)
    assert found.tells_examples == frozenset()
    assert found.fitting({"a": 10, "b": 10}, {}) is found.state
    with pytest.raises(ConfigError, match=r"interrupted with training examples \{'a': 10, 'b': 10\}, and there are"):
        found.fitting({"a": 9, "b": 10}, {})
    resumed = start(ckpt={"resume_step": 1})
    assert resumed.tells_examples == {"a", "b"}
    fitting = resumed.fitting({"a": 9, "b": 10}, {"a": [1] * 9, "b": []})
    assert {group.example.env for group in fitting.scheduler.groups} == {"b"}


def test_rollouts_that_had_not_ended_are_told_from_those_that_had(start, paths):
    batch(paths, 0)
    found = start(recover=True)
    scheduler = found.state.scheduler
    unended = {one.rollout_id for group in scheduler.groups for one in group.in_flight}
    unended |= {one.rollout_id for group in scheduler.groups for one, _ in group.results}
    number = scheduler.counts["dispatched"]
    assert len(unended) >= 6
    assert {one for one in range(number + 5) if found.ended()(one)} == set(range(number)) - unended
    assert not Start().ended()(0)
    assert not Start(how=Begins.RECOVERED).ended()(0)
    assert Start(how=Begins.RESUMED, next_batch=3).ended()(0), "nothing is known, so nothing goes"


def test_the_evaluation_that_the_end_cut_off_is_known(start, paths):
    batch(paths, 0)
    journal = Journal(paths.journal, "orchestrator")
    rows(paths, "eval", [0], "eval/a/avg@1")
    journal.note("evaluation_begun", step=0, kind="eval")
    assert start(recover=True).cut_off is None, "its row is there, only the journal was not told any more"
    journal.note("evaluation_begun", step=1, kind="eval")
    found = start(recover=True)
    assert (found.cut_off, found.evaluated) == (1, {"eval": 0})
    journal.note("evaluation_complete", step=1, kind="eval")
    assert start(recover=True).cut_off is None


def test_a_row_that_was_cut_off_goes(start, paths):
    batch(paths, 0)
    rows(paths, "eval", [0], "val/a/avg@1")
    with paths.metrics("eval").open("a") as file:
        file.write(json.dumps({"step": 1, "val/a/avg@1": 0.5})[:-3])
    assert start(recover=True).evaluated == {"val": 0}
    rows(paths, "eval", [1], "val/a/avg@1")
    assert steps_of(paths, "eval") == [0, 1]


def test_checkpoints_may_lie_elsewhere(start, paths, tmp_path):
    checkpoint(tmp_path / "elsewhere", 3)
    found = start(ckpt={"resume_step": -1, "output_dir": tmp_path / "elsewhere"})
    assert (found.how, found.next_batch, found.state) == (Begins.RESUMED, 3, state_of(num_batches=3))


def test_workers_are_told_by_which_columns_examples_are_recognised():
    config = OrchestratorConfig.model_validate({"buffer": {"hash_keys": ["question"]}})
    assert [spec.hash_keys for spec in _specs(config, Start())] == [("question",)]


async def test_a_resumed_run_waits_for_its_weights_as_long_as_its_checkpoints_section_says(paths):
    config = OrchestratorConfig.model_validate({"ckpt": {"resume_step": 4, "wait_for_weights_timeout": 1}})
    policy = Policy(Fleet([], model="m", outage_timeout_s=1.0), paths.weights)
    with pytest.raises(DeadlineExceeded, match=r"step_4, which the run is to go on with, did not appear within 1 s"):
        await _serve_first_weights(config, Start(how=Begins.RESUMED, next_batch=4), policy)
