import pytest

from prime_rl.config.sampling import TrainSamplingConfig
from prime_rl.orchestrator.temperature import temperature_at


def temperatures(steps: range, max_steps: int | None = None, **schedule) -> list[float]:
    sampling = TrainSamplingConfig.model_validate({"temp_scheduler": schedule})
    return [temperature_at(sampling, step, max_steps) for step in steps]


def test_without_a_schedule_it_is_the_same_at_every_step():
    sampling = TrainSamplingConfig(temperature=0.7)
    assert [temperature_at(sampling, step, None) for step in (0, 1, 1000)] == [0.7] * 3


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("linear", [1.2, 1.1, 1.0, 0.9, 0.8, 0.8]),
        ("cosine", [1.2, 1.2 - 0.4 * 0.1464466, 1.0, 1.2 - 0.4 * 0.8535534, 0.8, 0.8]),  # (1 - cos(pi / 4)) / 2
    ],
)
def test_a_schedule_goes_from_the_first_temperature_to_the_last_and_stays_there(kind, expected):
    found = temperatures(range(6), type=kind, start_temperature=1.2, end_temperature=0.8, total_steps=5)
    assert found == pytest.approx(expected)


def test_its_steps_are_those_of_the_run_unless_they_are_given():
    ends = {"start_temperature": 0.5, "end_temperature": 1.5}
    assert temperatures(range(3), max_steps=3, **ends) == pytest.approx([0.5, 1.0, 1.5])
    assert temperatures(range(3), max_steps=3, total_steps=2, **ends) == pytest.approx([0.5, 1.5, 1.5])
    assert temperatures(range(1), max_steps=1, **ends) == [0.5]
