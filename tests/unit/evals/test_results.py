import json
from pathlib import Path

import pytest

from prime_rl.environments.rollouts import Rollout
from prime_rl.errors import ArtifactError
from prime_rl.evals.report import Outcome, make_report
from prime_rl.evals.results import Results


def rollout_of(env, example):
    return Rollout(id=example, env=env, example=example, reward=1.0)


def report_of(env, *rollouts):
    outcomes = [Outcome.of(rollout) for rollout in rollouts]
    return make_report(outcomes, env=env, step=3, rollouts_per_example=1, seconds=1.0)


def lines_of(path: Path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_each_environment_has_its_files_also_where_names_differ_in_a_slash_alone(tmp_path):
    results = Results(tmp_path, 3)
    rollouts = [rollout_of("a/b", 1), rollout_of("a_b", 2), rollout_of("a/b", 0)]
    for rollout in rollouts:
        results.add(rollout.env, rollout)
    results.publish([report_of("a/b", rollouts[0], rollouts[2]), report_of("a_b", rollouts[1]), report_of("c")])
    step = tmp_path / "step_3"
    assert [row["example"] for row in lines_of(step / "a/b/results.jsonl")] == [1, 0]
    assert [row["example"] for row in lines_of(step / "a_b/results.jsonl")] == [2]
    assert lines_of(step / "c/results.jsonl") == []
    assert json.loads((step / "a/b/report.json").read_text())["num_rollouts"] == 2
    results.discard()
    assert step.is_dir(), "what is published stays"
    assert [path.name for path in tmp_path.iterdir()] == ["step_3"]


def test_rollouts_are_on_disk_before_the_last_has_ended_and_hidden_until_then(tmp_path):
    results = Results(tmp_path, 3)
    results.add("e", Rollout(id=0, env="e", example=0, messages=[{"role": "user", "content": "x" * 100_000}]))
    assert not (tmp_path / "step_3").exists()
    assert sum(path.stat().st_size for path in tmp_path.rglob("results.jsonl")) > 50_000
    results.discard()
    assert list(tmp_path.iterdir()) == []


def test_what_cannot_be_written_is_an_error_in_words_and_leaves_nothing(tmp_path):
    results = Results(tmp_path, 4)
    results.add("e", rollout_of("e", 0))
    (hidden,) = tmp_path.glob(".step_4.*")
    (hidden / "other").write_text("not a directory")
    with pytest.raises(ArtifactError, match=r"cannot write .*step_4"):
        results.add("other", rollout_of("other", 0))
    with pytest.raises(ArtifactError, match="step_4 is no longer written"):
        results.add("e", rollout_of("e", 1))
    assert list(tmp_path.iterdir()) == []
