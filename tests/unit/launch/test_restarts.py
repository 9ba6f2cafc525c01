import pytest

from prime_rl.journal import Entry
from prime_rl.launch.restarts import Again, NoMore, Place, Restarts, place_of


def entries(*events: tuple[str, str, int | None]) -> list[Entry]:
    return [Entry(time=0.0, process=process, event=event, step=step) for process, event, step in events]


def died(restarts: Restarts, place: int, *, lived_s: float = 1.0, name: str = "trainer") -> Again | NoMore:
    return restarts.after_death(name, lived_s=lived_s, place=Place(place, f"at {place}"))


def test_a_process_that_dies_soon_after_its_start_waits_longer_each_time_up_to_a_minute():
    restarts = Restarts(limit=100)
    waits = [died(restarts, place) for place in range(9)]
    assert [one.wait_s for one in waits] == [1, 2, 4, 8, 16, 32, 60, 60, 60]
    assert [one.number for one in waits] == list(range(1, 10))


def test_one_that_lived_for_a_while_waits_a_second_again():
    restarts = Restarts(limit=100)
    assert [died(restarts, place).wait_s for place in range(3)] == [1, 2, 4]
    assert died(restarts, 3, lived_s=60.0) == Again(1.0, 4)
    assert died(restarts, 4) == Again(2.0, 5)


def test_the_third_death_in_one_place_is_the_last():
    restarts = Restarts(limit=100)
    assert isinstance(died(restarts, 6), Again)
    assert isinstance(died(restarts, 6, lived_s=1e6), Again)
    assert died(restarts, 6) == NoMore("it died 3 times in the same place, at 6: no restart gets it further")


def test_whoever_got_further_in_between_starts_counting_anew():
    restarts = Restarts(limit=100)
    for place in (6, 6, 7, 7, 8, 8, 9):
        assert isinstance(died(restarts, place), Again)


def test_each_process_is_counted_by_itself():
    restarts = Restarts(limit=100)
    for name in ("trainer", "orchestrator", "inference"):
        for _ in range(2):
            assert isinstance(died(restarts, 0, name=name), Again)
    assert isinstance(died(restarts, 0), NoMore)


def test_the_limit_ends_a_run_that_gets_further_with_every_restart():
    restarts = Restarts(limit=2)
    assert isinstance(died(restarts, 1), Again)
    assert isinstance(died(restarts, 2), Again)
    assert died(restarts, 3) == NoMore("it was started again 2 times already (max_restarts)")
    assert isinstance(died(Restarts(limit=0), 0), NoMore)


TRAINED = entries(
    ("launcher", "run_started", None),
    ("trainer", "went_back", 0),
    ("orchestrator", "batch_complete", 0),
    ("trainer", "batch_received", 0),
    ("trainer", "batch_consumed", 0),
    ("trainer", "batch_received", 1),
)


@pytest.mark.parametrize(
    ("process", "expected"),
    [
        ("trainer", Place(3, "after batch received 1")),
        ("orchestrator", Place(1, "after batch complete 0")),
        ("inference-1", Place(4, "after trainer's batch received 1")),
        ("router", Place(4, "after trainer's batch received 1")),
    ],
)
def test_a_place_is_how_far_a_process_came(process, expected):
    assert place_of(TRAINED, process) == expected


def test_what_is_done_again_after_a_restart_is_no_progress():
    again = entries(
        ("trainer", "went_back", 0),
        ("trainer", "checkpoint_complete", 1),
        ("trainer", "batch_received", 0),
        ("trainer", "batch_consumed", 0),
        ("trainer", "batch_received", 1),
    )
    assert place_of([*TRAINED, *again], "trainer") == place_of(TRAINED, "trainer")
    further = entries(("trainer", "batch_consumed", 1))
    assert place_of([*TRAINED, *again, *further], "trainer") == Place(4, "after batch consumed 1")


def test_a_process_that_dies_where_it_has_been_before_is_at_that_step_and_not_where_it_once_was():
    """It had come to batch 60, and goes on from a checkpoint of 10."""
    restarts, noted = Restarts(limit=100), [*TRAINED]
    verdicts = []
    for batch in (60, 25, 38, 47, 25, 25):
        again = Entry(time=0.0, process="launcher", event="process_started", facts={"name": "trainer"})
        noted += [again, *entries(*(("trainer", "batch_received", step) for step in range(2, batch + 1)))]
        verdicts.append(restarts.after_death("trainer", lived_s=60.0, place=place_of(noted, "trainer")))
    assert [type(one) for one in verdicts] == [Again] * 5 + [NoMore]
    assert verdicts[-1] == NoMore(
        "it died 3 times in the same place, after batch received 25: no restart gets it further"
    )
    again = Entry(time=0.0, process="launcher", event="process_started", facts={"name": "trainer"})
    assert place_of([*noted, again], "trainer").name == "before its first step"


def test_another_launcher_begins_to_count_anew():
    assert place_of([*TRAINED, *entries(("launcher", "run_started", None))], "trainer") == Place(
        0, "before its first step"
    )
