"""`trainer` and `sft` alone, on data that they make up: the debug configurations with another schedule."""

import pytest

from prime_rl.monitors.base import read_metrics
from prime_rl.transport.manifest import complete_steps, verify

COSINE = [0.0, 1e-2, 0.75e-2, 0.25e-2, 0.0]
"""Learning rates of five steps, one of them warm-up."""


@pytest.mark.parametrize(("name", "published"), [("trainer", [3, 4, 5]), ("sft", [5])])
def test_it_takes_its_steps_and_publishes_weights_as_in_any_run(made_up, name, published):
    rows = read_metrics(made_up[name].metrics("trainer"))
    assert [row["optim/lr"] for row in rows] == pytest.approx(COSINE)
    assert all(row["optim/grad_norm"] > 0 for row in rows)
    assert complete_steps(made_up[name].weights) == published
    assert "model.safetensors" in verify(made_up[name].weights / "step_5").files


def test_every_step_of_rl_has_samples_of_its_own(made_up):
    rows = read_metrics(made_up["trainer"].metrics("trainer"))
    assert {row["progress/sequences"] for row in rows} == {8}
    assert len({row["progress/tokens"] for row in rows}) > 1


def test_the_beginning_of_every_batch_is_in_the_log(made_up):
    for name, paths in made_up.items():
        log = paths.log(name).read_text()
        assert [f"Batch {step} begins with " in log for step in range(5)] == [True] * 5
