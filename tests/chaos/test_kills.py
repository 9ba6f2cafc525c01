"""A run is killed at any instant, in any process, and goes on as if nothing had happened.

The whole matrix, with its table of cells at the end (half an hour on two cores):

    pytest -m slow -s tests/chaos/test_kills.py

In CI a handful of its cells. What is killed when is in `cells.py`, how in `kills.py`, what holds afterwards in
`endstate.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.chaos.cells import FLAVOURS, RUNS, Result, kills_of, max_steps_of, never_fired, place, table
from tests.chaos.endstate import check
from tests.chaos.kills import Ended, Kill, KilledRun, tiny
from tests.chaos.phases import Phase, Victim
from tests.integration.conftest import _free_port

LIMIT_S = 900.0
"""Of one run; alone on two cores they take between one and two minutes."""
CI_LIMIT_S = 300.0
"""Of the one in CI, which alone takes one."""
LEAST_KILLS = 60


@pytest.fixture(scope="module")
def results() -> list[Result]:
    """Of the runs of the matrix, as they end."""
    return []


def disturb(directory: Path, kills: Sequence[Kill], *, steps: int, flags: Sequence[str], limit_s: float) -> Ended:
    """A run that is killed. Raises: AssertionError where something does not hold at its end."""
    argv = tiny(directory, port=_free_port(), max_steps=steps, flags=flags)
    run = KilledRun(directory, argv, kills, max_steps=steps, limit_s=limit_s)
    ended = run.run()
    check(ended, run.paths, steps=steps)
    return ended


@pytest.mark.timeout(CI_LIMIT_S + 60)
def test_a_run_survives_a_kill_of_each_of_its_processes(tmp_path: Path):
    kills = [
        Kill(Victim.TRAINER, Phase.TRAINING),
        Kill(Victim.ENV_WORKER, Phase.GENERATING),
        Kill(Victim.ORCHESTRATOR, Phase.WRITING),
        Kill(Victim.INFERENCE, Phase.GENERATING),
        Kill(Victim.LAUNCHER, Phase.TRAINING),
    ]
    ended = disturb(tmp_path, kills, steps=20, flags=("--recovery-interval", "1"), limit_s=CI_LIMIT_S)
    assert [shot.kill for shot in ended.shots if shot.counts] == kills


@pytest.mark.slow
@pytest.mark.timeout(LIMIT_S + 60)
@pytest.mark.parametrize(("name", "phase"), RUNS, ids=[place(name, phase) for name, phase in RUNS])
def test_whoever_is_killed_in_whatever_phase_nothing_is_lost(
    name: str, phase: Phase, tmp_path: Path, results: list[Result]
):
    directory = tmp_path / place(name, phase)
    kills, flags = kills_of(name, phase), FLAVOURS[name].flags
    complaint = "the run was never ended"
    try:
        disturb(directory, kills, steps=max_steps_of(name, phase), flags=flags, limit_s=LIMIT_S)
        complaint = ""
    except BaseException as error:
        complaint = str(error)
        (directory / "complaint.txt").write_text(complaint)
        raise
    finally:
        results.append(Result(name, phase, Ended.read(directory), complaint))


@pytest.mark.slow
def test_every_cell_was_fired_and_every_run_recovered(results: list[Result], capsys: pytest.CaptureFixture[str]):
    """Behind all others of the matrix."""
    if len(results) < len(RUNS):
        pytest.skip(f"only {len(results)} of the {len(RUNS)} runs of the matrix were selected")
    with capsys.disabled():
        print("", table(results), sep="\n")
    assert not never_fired(results), [str(kill) for kill in never_fired(results)]
    assert sum(shot.counts for result in results for shot in result.ended.shots) >= LEAST_KILLS
    assert not [result.complaint for result in results if result.complaint]
