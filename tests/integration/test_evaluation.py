"""Evaluation during training, by the real commands with a small model."""

import json

import pytest

from prime_rl.monitors.base import read_metrics
from prime_rl.paths import step_dir
from prime_rl.transport.manifest import complete_steps, verify


def rows_of(paths, kind):
    """By step: the figures of each evaluation of the kind."""
    rows = read_metrics(paths.metrics("eval"))
    return {row["step"]: row for row in rows if any(name.startswith(f"{kind}/") for name in row)}


def test_the_base_every_interval_and_the_last_weights_are_evaluated_each_on_one_version(sharded):
    rows = rows_of(sharded, "eval")
    assert list(rows) == [0, 2, 4] == complete_steps(sharded.evals)
    for step, row in rows.items():
        assert row["eval/reverse-text/version/min"] == row["eval/reverse-text/version/max"] == step
        assert 1 <= row["eval/reverse-text/completion_len/mean"] <= 8
        assert 0 <= row["eval/reverse-text/avg@2"] <= 1
        directory = step_dir(sharded.evals, step)
        verify(directory)
        results = (directory / "reverse-text" / "results.jsonl").read_text().splitlines()
        assert sorted(json.loads(line)["example"] for line in results) == [0, 0, 1, 1, 2, 2]
    said = sharded.log("orchestrator").read_text()
    positions = [said.index(f"eval of weights {step}:") for step in rows]
    assert positions == sorted(positions)
    assert said.count("3 x 2") == 3


def test_held_out_examples_are_rewarded_and_never_trained_on(sharded):
    rows = rows_of(sharded, "val")
    assert {0, 4} <= set(rows)
    assert all(0 <= row["val/reverse-text/avg@1"] <= 1 for row in rows.values())
    texts = [file.read_text() for file in sharded.rollouts.glob("step_*/rollouts.jsonl")]
    trained = {json.loads(line)["example"] for text in texts for line in text.splitlines()}
    assert trained
    assert len(texts) == 4
    assert max(trained) < 1000 - 4, "of the thousand examples the last four are held out"


@pytest.mark.slow
def test_training_goes_on_while_the_model_is_evaluated(start_rl):
    flags = ("--orchestrator.eval.interval", "2", "--orchestrator.eval.num-examples", "40")
    run = start_rl(*flags, "--orchestrator.eval.sampling.max-tokens", "64", "--max-async-level", "1", steps=6)
    out, err = run.process.communicate(timeout=280)
    assert run.process.returncode == 0, out + err
    assert run.steps() == 6
    rows = rows_of(run.paths, "eval")
    assert (min(rows), max(rows)) == (0, 6)
    assert rows[6]["eval/reverse-text/version/min"] == rows[6]["eval/reverse-text/version/max"] == 6
    shipped_at = {row["step"]: row["time"] for row in read_metrics(run.paths.metrics("orchestrator"))}
    assert shipped_at[0] < rows[0]["time"], "the first batch was there before the base was evaluated"
