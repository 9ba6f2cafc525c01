import fcntl
import os
import re
import socket
import subprocess
import sys
import time
from pathlib import Path

import msgspec
import psutil
import pytest

from prime_rl import lifeline
from prime_rl.config.load import load
from prime_rl.config.roots import RLConfig
from prime_rl.config.writing import write_toml
from prime_rl.errors import ArtifactError, ConfigError, DataError
from prime_rl.journal import Entry, Journal, read_journal
from prime_rl.launch import runs
from prime_rl.launch.machine import Machine
from prime_rl.launch.plan import plan_rl
from prime_rl.launch.processes import MARK
from prime_rl.launch.runs import (
    INTERRUPTED,
    TERMINATED,
    Beginning,
    Decision,
    decide,
    end_leftovers,
    enter,
    finish,
    held,
)
from prime_rl.paths import RunPaths, step_dir
from prime_rl.resume import go_back, sources
from prime_rl.transport.checkpoints import choose
from prime_rl.transport.manifest import complete_steps, draft_dir, publish_dir, remove_dir, remove_drafts

NEW = Decision(Beginning.NEW)
GOES_ON = Decision(Beginning.GOES_ON)


@pytest.fixture
def paths(tmp_path):
    return RunPaths(tmp_path / "run")


def rl(paths, *argv):
    return load(RLConfig, ["--output-dir", str(paths.output_dir), *argv], {})


def began(paths, *argv, checkpoints=(), trained=3, ended=None, supervised=1):
    """What a launcher leaves that was started with `argv`, and ended so."""
    write_toml(rl(paths, *argv), paths.config("rl"))
    journal = Journal(paths.journal, "launcher")
    journal.note("run_started", supervised=supervised, token="1:1", host="elsewhere")
    for step in range(trained):
        for root, number in ((paths.rollouts, step), (paths.weights, step + 1)):
            with publish_dir(step_dir(root, number)) as draft:
                (draft / "content").write_text("x")
    for step in checkpoints:
        with publish_dir(step_dir(paths.checkpoints, step)) as draft:
            (draft / "content").write_text("x")
    if ended is not None:
        journal.note(ended[0], **({"reason": ended[1]} if ended[1:] else {}))


def test_in_an_empty_directory_a_run_begins(paths):
    assert decide(rl(paths), paths) == NEW


@pytest.mark.parametrize(
    "ended",
    [None, ("run_stopped", "SIGTERM"), ("run_stopped", INTERRUPTED), ("run_stopped", "trainer was killed by SIGKILL")],
    ids=["killed", "terminated", "ctrl-c", "failed"],
)
def test_the_same_command_goes_on_with_a_run_that_is_not_complete(paths, ended):
    began(paths, "--max-steps", "9", ended=ended)
    assert decide(rl(paths, "--max-steps", "9"), paths) == GOES_ON


def test_a_complete_run_is_refused(paths):
    began(paths, ended=("run_complete",))
    with pytest.raises(ConfigError, match=r"already holds a run \(rollouts, weights\).*--ckpt.resume-step"):
        decide(rl(paths), paths)
    assert decide(rl(paths, "--clean"), paths) == NEW


@pytest.mark.parametrize("supervised", [0, 1])
def test_without_supervision_no_run_goes_on(paths, supervised):
    began(paths, supervised=supervised)
    with pytest.raises(ConfigError, match="already holds a run"):
        decide(rl(paths, *(["--no-supervise"] if supervised else [])), paths)


def test_a_run_without_a_journal_is_refused(paths):
    began(paths)
    paths.journal.unlink()
    with pytest.raises(ConfigError, match="already holds a run"):
        decide(rl(paths), paths)


def test_a_run_that_came_to_nothing_begins_anew_whatever_has_changed(paths):
    began(paths, "--model.name", "a-misspelt-one", trained=0, ended=("run_stopped", "no such model"))
    assert decide(rl(paths), paths) == NEW


def test_another_configuration_is_refused_with_the_keys(paths):
    began(paths, "--trainer.optim.lr", "1e-5", "--seq-len", "1024")
    with pytest.raises(ConfigError) as caught:
        decide(rl(paths, "--trainer.optim.lr", "1e-6", "--seq-len", "1024", "--trainer.loss.kl-tau", "0.5"), paths)
    said = str(caught.value)
    assert "trainer.optim.lr is 1e-06 and was 1e-05" in said
    assert "trainer.loss.kl_tau is 0.5 and was " in said
    assert "seq_len" not in said
    assert str(paths.config("rl")) in said


@pytest.mark.parametrize(
    ("before", "now"),
    [
        (["--max-steps", "5"], ["--max-steps", "9"]),
        (["--max-steps", "5"], []),
        ([], ["--max-restarts", "3", "--recovery-interval", "9", "--log.level", "debug"]),
        (["--inference"], ["--inference", "--inference.server.port", "8123"]),
        (["--ckpt.interval", "5"], ["--ckpt.interval", "7", "--ckpt.keep-last", "2"]),
        (
            ["--inference"],
            ["--inference", "--inference.gpu-memory-utilization", "0.5", "--inference.max-num-seqs", "9"],
        ),
    ],
    ids=["more steps", "steps without end", "how it is watched", "another port", "retention", "less memory"],
)
def test_what_changes_nothing_that_is_trained_may_differ(paths, before, now):
    began(paths, *before)
    assert decide(rl(paths, *now), paths) == GOES_ON


LISTED = re.compile(r"These may differ, .*?: (.*?)To change others", re.DOTALL)
VALUES = {
    "supervise": None,  # without it, no run goes on
    "output_dir": None,
    "log": ("log.level", "debug"),
    "wandb": ("wandb.project", "p"),
    "heartbeat": ("trainer.heartbeat.url", "http://localhost:1"),
    "ckpt.save_async": ("ckpt.save-async", "true"),
    "ckpt.resume_step": None,
    "trainer.weights": ("trainer.weights.interval", "3"),
    "trainer.keep_batches": ("trainer.keep-batches", "true"),
    "inference.server": ("inference.server.port", "8123"),
    "inference.log": ("inference.log.level", "debug"),
    "inference.gpu_memory_utilization": ("inference.gpu-memory-utilization", "0.5"),
    "orchestrator.client": ("orchestrator.client.timeout", "7"),
    "trainer.wandb": ("trainer.wandb.name", "n"),
    "orchestrator.wandb": ("orchestrator.wandb.name", "n"),
}
"""Key of the list in docs/failures.md -> what to give for it; others are numbers."""


def listed():
    text = Path(__file__).parents[3].joinpath("docs", "failures.md").read_text()
    (told,) = LISTED.findall(text)
    return re.findall(r"`([a-z_.]+)`", told)


@pytest.mark.parametrize("key", [key for key in listed() if VALUES.get(key, ()) is not None])
def test_every_key_that_the_docs_call_free_may_be_added(paths, key):
    name, value = VALUES.get(key, (key.replace("_", "-"), "99"))
    server = ["--inference"]
    began(paths, *server, "--max-steps", "5", "--wandb.offline" if key.endswith(".wandb") else "--log.file")
    given = ["--wandb.offline"] if key.endswith(".wandb") else []
    argv = [*server, *given, *(["--max-steps", "5"] if key != "max_steps" else []), f"--{name}", value]
    assert decide(rl(paths, *argv), paths) == GOES_ON


def test_a_checkpoint_section_that_is_added_may_keep_no_less_than_before(paths):
    began(paths)
    with pytest.raises(ConfigError, match=r"but trainer.ckpt.weights_only is True and was False\. Give it"):
        decide(rl(paths, "--ckpt.interval", "5", "--trainer.ckpt.weights-only"), paths)


def test_more_steps_are_refused_where_learning_rates_depend_on_their_number(paths):
    schedule = ["--trainer.scheduler.type", "cosine", "--trainer.scheduler.warmup-steps", "1"]
    began(paths, "--max-steps", "5", *schedule)
    with pytest.raises(ConfigError, match=r"max_steps is 9 and was 5, on which the learning rates of trainer\.sched"):
        decide(rl(paths, "--max-steps", "9", *schedule), paths)
    assert decide(rl(paths, "--max-steps", "5", *schedule), paths) == GOES_ON


def test_fewer_steps_are_refused(paths):
    began(paths, "--max-steps", "9")
    with pytest.raises(ConfigError, match="max_steps is 5 and was 9"):
        decide(rl(paths, "--max-steps", "5"), paths)


@pytest.mark.parametrize(("asked", "chosen"), [("2", 2), ("-1", 4)])
def test_a_checkpoint_is_gone_back_to(paths, asked, chosen):
    began(paths, "--ckpt", checkpoints=(2, 4), ended=("run_complete",))
    config = rl(paths, "--trainer.ckpt.resume-step", asked, "--seq-len", "99")
    assert decide(config, paths) == Decision(Beginning.GOES_BACK, chosen)


def test_a_checkpoint_that_is_not_there_is_refused(paths):
    began(paths, "--ckpt", checkpoints=(2, 4), ended=("run_complete",))
    with pytest.raises(ArtifactError, match=r"no complete checkpoint of step 3.*2, 4"):
        decide(rl(paths, "--ckpt.resume-step", "3"), paths)
    with pytest.raises(ConfigError, match=r"--clean deletes what ckpt\.resume_step goes on from"):
        decide(rl(paths, "--ckpt.resume-step", "2", "--clean"), paths)


def test_a_command_that_went_back_and_was_killed_goes_on_and_does_not_go_back_again(paths):
    began(paths, "--ckpt.resume-step", "2", checkpoints=(2, 4))
    assert decide(rl(paths, "--ckpt.resume-step", "2"), paths) == GOES_ON
    assert decide(rl(paths, "--ckpt.resume-step", "4"), paths) == Decision(Beginning.GOES_BACK, 4)
    Journal(paths.journal, "launcher").note("run_stopped", reason=TERMINATED)
    assert decide(rl(paths, "--ckpt.resume-step", "2"), paths) == GOES_ON


@pytest.mark.parametrize("reason", [INTERRUPTED, "trainer ended with exit code 3: the weights are NaN"])
def test_a_command_that_went_back_and_was_stopped_for_a_reason_goes_back_again(paths, reason):
    began(paths, "--ckpt.resume-step", "2", checkpoints=(2, 4), ended=("run_stopped", reason))
    assert decide(rl(paths, "--ckpt.resume-step", "2"), paths) == Decision(Beginning.GOES_BACK, 2)


def test_another_configuration_goes_back_to_the_same_checkpoint(paths):
    began(paths, "--ckpt.resume-step", "2", checkpoints=(2, 4))
    changed = rl(paths, "--ckpt.resume-step", "2", "--trainer.optim.lr", "1e-7")
    assert decide(changed, paths) == Decision(Beginning.GOES_BACK, 2)


@pytest.mark.parametrize("clean", [[], ["--clean"]])
@pytest.mark.parametrize(
    ("where", "told"),
    [
        ("step_8", "holds checkpoints of an earlier run (up to step 8)"),
        ("superseded/1/step_8", "holds in superseded/1 what an earlier run has set aside"),
    ],
)
def test_a_new_run_is_refused_where_its_checkpoints_would_lie_among_those_of_another(
    paths, tmp_path, where, told, clean
):
    began(paths, trained=2 if clean else 0)
    shared = tmp_path / "big-disk"
    with publish_dir(shared / where) as draft:
        (draft / "content").write_text("of another run")
    with pytest.raises(ConfigError, match=re.escape(f"ckpt.output_dir = {shared} {told}")):
        entered(paths, "--ckpt.output-dir", str(shared), *clean)
    assert complete_steps((shared / where).parent) == [8]
    assert complete_steps(paths.weights) == ([1, 2] if clean else [])
    assert decide(rl(paths, "--ckpt.output-dir", str(tmp_path / "other"), *clean), paths) == NEW


def test_a_run_goes_on_and_back_where_its_own_checkpoints_lie_elsewhere(paths, tmp_path):
    elsewhere = ["--ckpt.output-dir", str(tmp_path / "big-disk")]
    began(paths, *elsewhere)
    with publish_dir(step_dir(tmp_path / "big-disk", 2)) as draft:
        (draft / "content").write_text("its own")
    assert decide(rl(paths, *elsewhere), paths) == GOES_ON
    assert decide(rl(paths, *elsewhere, "--ckpt.resume-step", "2"), paths) == Decision(Beginning.GOES_BACK, 2)


def test_checkpoints_in_the_run_directory_are_deleted_with_clean_however_that_is_spelt(paths):
    began(paths, "--ckpt", checkpoints=(2,))
    assert decide(rl(paths, "--ckpt.output-dir", str(paths.checkpoints), "--clean"), paths) == NEW


LAPTOP = Machine(gpus=(), num_cpus=2)


def entered(paths, *argv):
    config = rl(paths, *argv)
    decision, specs = enter(config, plan_rl(config, LAPTOP), paths)
    return decision, {spec.name: spec.config for spec in specs}


def test_a_run_that_goes_on_keeps_its_results_and_recovers(paths):
    began(paths, "--ckpt", checkpoints=(2,))
    (paths.broadcasts / "step_3").mkdir(parents=True)
    decision, configs = entered(paths, "--ckpt")
    assert decision == GOES_ON
    assert configs["trainer"].recover
    assert configs["trainer"].recovery_interval == 300.0
    assert configs["orchestrator"].recover
    assert step_dir(paths.weights, 3).is_dir()
    assert not paths.broadcasts.exists()
    started = [entry.facts for entry in read_journal(paths.journal) if entry.event == "run_started"]
    assert [facts.get("attempt") for facts in started] == [None, 2]
    assert (started[1]["beginning"], started[1]["token"]) == ("goes_on", lifeline.launcher_token())


def test_a_run_that_goes_back_sets_aside_what_lies_beyond_and_resumes(paths):
    began(paths, "--ckpt", checkpoints=(2, 3), ended=("run_complete",))
    _, configs = entered(paths, "--ckpt.resume-step", "2")
    for name in ("trainer", "orchestrator"):
        assert configs[name].ckpt.resume_step == 2
        assert not configs[name].recover
    assert not step_dir(paths.checkpoints, 3).exists()
    assert step_dir(paths.superseded / "1" / "checkpoints", 3).is_dir()
    assert step_dir(paths.superseded / "1" / "rollouts", 2).is_dir()


COUNTS_ANEW = ("--ckpt.resume-step", "2", "--ckpt.skip-progress")


@pytest.mark.parametrize("supervised", [["--supervise"], ["--no-supervise"]])
def test_of_a_run_that_counts_its_steps_anew_all_is_set_aside_before_either_process_starts(paths, supervised):
    began(paths, "--ckpt", checkpoints=(2, 3), ended=("run_complete",))
    with publish_dir(step_dir(paths.weights, 0)) as draft:
        (draft / "content").write_text("of an earlier resume")
    _, configs = entered(paths, *COUNTS_ANEW, *supervised)
    assert [list(root.glob("step_*")) for root in (paths.checkpoints, paths.weights, paths.rollouts)] == [[]] * 3
    for name in ("trainer", "orchestrator"):
        ckpt = configs[name].ckpt
        assert (ckpt.resume_step, ckpt.skip_progress, configs[name].recover) == (2, True, False)
    roots = sources(paths, None, 2, counts_anew=True)
    assert choose(roots, 2) == step_dir(paths.superseded / "1" / "checkpoints", 2)


def test_counting_anew_is_begun_again_after_a_launcher_was_killed_and_gone_on_with_once_there_is_something(paths):
    began(paths, "--ckpt", checkpoints=(2, 3), ended=("run_complete",))
    for _ in range(2):  # the second time, all is aside already
        decision, _ = entered(paths, *COUNTS_ANEW)
        assert decision == Decision(Beginning.GOES_BACK, 2)
        write_toml(rl(paths, *COUNTS_ANEW), paths.config("rl"))
    assert [path.name for path in paths.superseded.iterdir()] == ["1"]
    with publish_dir(step_dir(paths.weights, 0)) as draft:
        (draft / "content").write_text("x")
    for argv in (COUNTS_ANEW, ("--ckpt.skip-progress",)):
        decision, configs = entered(paths, *argv)
        assert decision == GOES_ON
        assert (configs["trainer"].recover, configs["trainer"].ckpt.resume_step) == (True, 2)
    assert [path.name for path in paths.superseded.iterdir()] == ["1"]


def test_counting_anew_that_was_stopped_before_its_first_weights_goes_on_from_its_checkpoint(paths):
    began(paths, "--ckpt", checkpoints=(2, 3), ended=("run_complete",))
    entered(paths, *COUNTS_ANEW)
    write_toml(rl(paths, *COUNTS_ANEW), paths.config("rl"))
    Journal(paths.journal, "launcher").note("run_stopped", reason=INTERRUPTED)
    with pytest.raises(ConfigError, match="seed is 7 and was "):
        entered(paths, "--ckpt.skip-progress", "--seed", "7")
    decision, configs = entered(paths, "--ckpt.skip-progress")
    assert decision == GOES_ON
    ckpt = configs["trainer"].ckpt
    assert (configs["trainer"].recover, ckpt.resume_step, ckpt.skip_progress) == (True, 2, True)
    started = [entry.facts["beginning"] for entry in read_journal(paths.journal) if "beginning" in entry.facts]
    assert started == ["goes_back", "goes_on"]


def test_what_counting_anew_has_set_aside_is_not_left_for_a_new_run(paths):
    """The launcher was killed when all was aside, and before it could note that."""
    began(paths, "--ckpt", checkpoints=(2,), ended=("run_complete",))
    go_back(paths, 2, counts_anew=True)
    with pytest.raises(ConfigError, match=r"set aside \(superseded/1\).*--ckpt\.skip-progress.*--clean"):
        decide(rl(paths), paths)
    assert decide(rl(paths, *COUNTS_ANEW), paths) == Decision(Beginning.GOES_BACK, 2)
    assert decide(rl(paths, "--clean"), paths) == NEW


@pytest.mark.parametrize("argv", [["--ckpt.resume-step", "-1"], ["--ckpt"]])
def test_a_run_that_went_back_and_goes_on_still_knows_to_which_checkpoint(paths, argv):
    began(paths, "--ckpt", checkpoints=(1, 3), ended=("run_complete",))
    entered(paths, "--ckpt.resume-step", "-1")
    write_toml(rl(paths, "--ckpt.resume-step", "-1"), paths.config("rl"))
    for _ in range(2):
        decision, configs = entered(paths, *argv)
        assert decision == GOES_ON
        for name in ("trainer", "orchestrator"):
            assert (configs[name].recover, configs[name].ckpt.resume_step) == (True, 3)


def test_the_latest_checkpoint_is_the_same_for_all_processes(paths):
    began(paths, "--ckpt", checkpoints=(1, 3), ended=("run_complete",))
    _, configs = entered(paths, "--ckpt.resume-step", "-1")
    assert [configs[name].ckpt.resume_step for name in ("trainer", "orchestrator")] == [3, 3]


def test_with_clean_everything_is_deleted_even_under_a_damaged_journal(paths):
    began(paths, ended=("run_complete",))
    paths.journal.write_text("hm\n")
    with pytest.raises(DataError, match="line 1"):
        entered(paths)
    decision, configs = entered(paths, "--clean")
    assert decision == NEW
    assert not paths.weights.exists()
    assert not configs["trainer"].recover
    assert [entry.facts["attempt"] for entry in read_journal(paths.journal)] == [1]


@pytest.mark.parametrize(("boot", "left"), [("another", [1, 3]), (lifeline.boot_id(), [1, 2, 3])])
def test_weights_that_were_cut_when_the_machine_went_down_are_removed_and_said(paths, capsys, boot, left):
    began(paths)
    for step in (2, 3):
        remove_dir(step_dir(paths.weights, step))
        with draft_dir(step_dir(paths.weights, step), durable=False) as draft:
            (draft.directory / "content").write_text("x")
    (step_dir(paths.weights, 2) / "content").write_text("")
    Journal(paths.journal, "launcher").note("run_started", supervised=1, token="1:1", host="here", boot=boot)
    assert enter(rl(paths), [], paths)[0] == GOES_ON
    assert complete_steps(paths.weights) == left
    assert ("rl: weights 2 were not all on disk" in capsys.readouterr().err) == (left == [1, 3])
    assert read_journal(paths.journal)[-1].facts["boot"] == lifeline.boot_id()


def test_a_run_without_supervision_has_no_recovery_checkpoint(paths):
    _, configs = entered(paths, "--no-supervise")
    assert configs["trainer"].recovery_interval is None


def test_a_complete_run_has_nothing_to_recover(paths):
    began(paths)
    with publish_dir(step_dir(paths.recovery, 2)) as draft:
        (draft / "content").write_text("x")
    finish(paths)
    assert not paths.recovery.exists()
    assert read_journal(paths.journal)[-1].event == "run_complete"


def test_a_launcher_that_is_killed_at_the_end_leaves_no_part_of_the_recovery_checkpoint(paths):
    began(paths)
    with publish_dir(step_dir(paths.recovery, 30)) as draft:
        for shard in range(3):
            (draft / str(shard)).write_text("x")
    if (child := os.fork()) == 0:
        unlink, left = os.unlink, iter(range(2))
        os.unlink = lambda *args, **kwargs: unlink(*args, **kwargs) if next(left, None) is not None else os._exit(9)
        finish(paths)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 9
    assert list(paths.recovery.glob("step_*")) == []
    remove_drafts(paths.recovery)
    assert list(paths.recovery.iterdir()) == []


def test_what_is_not_noted_as_complete_can_be_recovered(paths, monkeypatch):
    began(paths)
    with publish_dir(step_dir(paths.recovery, 2)) as draft:
        (draft / "content").write_text("x")

    def full(journal, line):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(Journal, "_append", full)
        finish(paths)
    assert step_dir(paths.recovery, 2).is_dir()
    assert entered(paths)[0] == GOES_ON
    with paths.journal.open("a") as file:
        file.write("hm\n")
    finish(paths)
    assert step_dir(paths.recovery, 2).is_dir()


HOLDS = (
    "import sys; from pathlib import Path; from prime_rl.launch.runs import held; from prime_rl.paths import RunPaths\n"
)
HOLDS += "with held(RunPaths(Path(sys.argv[1]))): print('held', flush=True); sys.stdin.read()"


def test_one_launcher_works_in_a_directory_until_it_is_gone_however_it_ended(paths):
    argv = [sys.executable, "-c", HOLDS, str(paths.output_dir)]
    with subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == "held\n"
        message = rf"another rl \(pid {other.pid} on {socket.gethostname()}\) works in {paths.output_dir}"
        with pytest.raises(ConfigError, match=message), held(paths):
            pass
        other.kill()
        other.wait()
        with held(paths):
            assert paths.lock.read_text() == f"pid {os.getpid()} on {socket.gethostname()}\n"
    with held(paths):
        pass


def test_a_file_system_without_locks_is_no_reason_not_to_begin(paths, monkeypatch):
    def flock(file, how):
        raise OSError(95, "Operation not supported")

    monkeypatch.setattr(fcntl, "flock", flock)
    with held(paths):
        pass


def test_a_directory_that_cannot_be_made_is_said_in_a_sentence(tmp_path):
    (tmp_path / "file").touch()
    with (
        pytest.raises(ConfigError, match="cannot be written: Not a directory"),
        held(RunPaths(tmp_path / "file" / "run")),
    ):
        pass


@pytest.fixture
def orphan():
    """A process of a launcher that is gone, in a session of its own; the launcher's entry in the journal."""
    dead = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    token = lifeline.token_of(dead.pid)
    env = os.environ | {MARK: f"{token}/orchestrator/0"}
    left = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE, env=env, start_new_session=True)
    await_env(left.pid)
    entry = Entry(
        time=0.0, process="launcher", event="run_started", facts={"token": token, "host": socket.gethostname()}
    )
    yield dead, left, entry
    for one in (dead, left):
        one.kill()
        one.communicate()


def await_env(pid):
    """Until a child has become what it executes; before, it looks like its parent."""
    end = time.monotonic() + 30
    while MARK not in psutil.Process(pid).environ():
        assert time.monotonic() < end
        time.sleep(0.01)


def test_what_a_killed_launcher_left_is_waited_for_and_then_ended(orphan, monkeypatch, capsys):
    monkeypatch.setattr(runs, "LEFTOVER_S", 0.3)
    dead, left, entry = orphan
    end_leftovers([entry])
    assert left.poll() is None  # its launcher is there
    dead.kill()
    dead.wait()
    elsewhere = msgspec.structs.replace(entry, facts=entry.facts | {"host": "elsewhere"})
    end_leftovers([elsewhere])
    assert left.poll() is None
    end_leftovers([elsewhere, entry])
    assert left.wait(timeout=10) == -9
    assert capsys.readouterr().err == "rl: waiting for what a launcher that was killed has left running (1 process)\n"
