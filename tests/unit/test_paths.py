import pytest

from prime_rl.errors import ConfigError
from prime_rl.paths import check_run_dir, claim_run_dir


def test_a_used_run_directory_is_refused_and_left_alone(tmp_path):
    (tmp_path / "weights" / "step_3").mkdir(parents=True)
    with pytest.raises(ConfigError, match=r"already holds a run \(weights\).*--clean"):
        claim_run_dir(tmp_path, clean=False)
    assert (tmp_path / "weights" / "step_3").is_dir()


def test_results_of_an_evaluation_are_results(tmp_path):
    (tmp_path / "evals" / "step_5").mkdir(parents=True)
    with pytest.raises(ConfigError, match=r"already holds a run \(evals\)"):
        claim_run_dir(tmp_path, clean=False)


def test_a_run_that_was_killed_before_its_results_is_not_mistaken_for_the_next(tmp_path):
    (tmp_path / "journal.jsonl").write_text("{}\n")
    claim_run_dir(tmp_path, clean=False)
    assert not (tmp_path / "journal.jsonl").exists()


def test_nothing_is_deleted_unasked(tmp_path):
    (tmp_path / "trainer").mkdir()
    (tmp_path / "trainer" / "metrics.jsonl").touch()
    (tmp_path / "rollouts").mkdir()
    claim_run_dir(tmp_path, clean=False)
    assert (tmp_path / "trainer" / "metrics.jsonl").exists()


def test_clean_deletes_what_a_run_makes_and_nothing_else(tmp_path):
    mine = ["notes.txt", "configs/mine.toml", "configs/trainer/debug.toml", "trainer/code.py", "evals/notes.txt"]
    its = ["reward.svg", "configs/rl.toml", "trainer/metrics.jsonl", "logs/envs/a.log", "weights/step_3/x"]
    its += ["broadcasts/step_3/x", "broadcasts/ready_3", "broadcasts/FALLBACK", "broadcasts/DONE", "events.jsonl"]
    its += ["journal.jsonl", "activity/trainer.json", "recovery/step_4/x", "superseded/1/weights/step_5/x"]
    its += ["logs/trainer/rank_1.log", "logs/sft/rank_12.log", "traces/step_0/a/results.jsonl"]
    for name in [*mine, *its]:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("x")
    claim_run_dir(tmp_path, clean=True)
    left = {str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*") if path.is_file()}
    assert left == set(mine)
    assert not (tmp_path / "weights").exists()
    assert not (tmp_path / "logs" / "sft").exists()


def test_clean_never_follows_a_link_out_of_the_run_directory(tmp_path):
    elsewhere = tmp_path / "elsewhere"
    (elsewhere / "step_1").mkdir(parents=True)
    run = tmp_path / "run"
    run.mkdir()
    (run / "weights").symlink_to(elsewhere)
    claim_run_dir(run, clean=True)
    assert (elsewhere / "step_1").is_dir()
    assert not (run / "weights").exists()


def test_a_look_at_a_used_directory_deletes_nothing(tmp_path):
    (tmp_path / "weights" / "step_3").mkdir(parents=True)
    check_run_dir(tmp_path, clean=True)
    assert (tmp_path / "weights" / "step_3").is_dir()
    with pytest.raises(ConfigError, match="--clean"):
        check_run_dir(tmp_path, clean=False)
