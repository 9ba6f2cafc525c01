import pytest

from prime_rl.errors import ConfigError
from prime_rl.paths import check_run_dir, claim_run_dir


def test_a_used_run_directory_is_refused_and_left_alone(tmp_path):
    (tmp_path / "weights" / "step_3").mkdir(parents=True)
    with pytest.raises(ConfigError, match=r"already holds a run \(weights\).*--clean"):
        claim_run_dir(tmp_path, clean=False)
    assert (tmp_path / "weights" / "step_3").is_dir()


def test_what_a_run_left_that_failed_before_its_first_batch_is_no_obstacle(tmp_path):
    (tmp_path / "trainer").mkdir()
    (tmp_path / "trainer" / "metrics.jsonl").touch()
    (tmp_path / "rollouts").mkdir()
    claim_run_dir(tmp_path, clean=False)
    assert list(tmp_path.iterdir()) == []


def test_clean_deletes_what_a_run_makes_and_nothing_else(tmp_path):
    (tmp_path / "weights" / "step_3").mkdir(parents=True)
    (tmp_path / "reward.svg").write_text("x")
    (tmp_path / "notes.txt").write_text("mine")
    claim_run_dir(tmp_path, clean=True)
    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]


def test_clean_never_follows_a_link_out_of_the_run_directory(tmp_path):
    elsewhere = tmp_path / "elsewhere"
    (elsewhere / "step_1").mkdir(parents=True)
    run = tmp_path / "run"
    run.mkdir()
    (run / "weights").symlink_to(elsewhere)
    claim_run_dir(run, clean=True)
    assert (elsewhere / "step_1").is_dir()
    assert not (run / "weights").exists()


def test_a_dry_look_at_a_used_directory_deletes_nothing(tmp_path):
    (tmp_path / "weights" / "step_3").mkdir(parents=True)
    assert check_run_dir(tmp_path, clean=True)
    assert (tmp_path / "weights" / "step_3").is_dir()
    with pytest.raises(ConfigError, match="--clean"):
        check_run_dir(tmp_path, clean=False)
