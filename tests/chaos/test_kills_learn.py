"""Runs that are killed learn as much as those that are left alone.

    pytest -m slow -s tests/chaos/test_kills_learn.py

Five seeds of the game that `test_faults.py` learns, each once undisturbed and once with a kill of each kind of process.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Sequence
from pathlib import Path

import pytest

from prime_rl.journal import read_journal
from tests.chaos.endstate import check_batches, check_files, check_history, check_metrics
from tests.chaos.kills import Kill, KilledRun
from tests.chaos.phases import Phase, Victim
from tests.chaos.report import difference, final_reward, learned
from tests.chaos.runs import ENV, GAME, MAX_STEPS, Outcome
from tests.chaos.test_faults import LEAST_LEARNED, SEEDS, WARM_UP_S, model
from tests.integration.conftest import _free_port, command

__all__ = ["model"]

LIMIT_S = 900.0
"""Of one run; alone on two cores one that is killed takes two minutes."""
WITHIN = 0.05
KILLS = (
    Kill(Victim.TRAINER, Phase.TRAINING),
    Kill(Victim.ENV_WORKER, Phase.GENERATING),
    Kill(Victim.ORCHESTRATOR, Phase.GENERATING),
    Kill(Victim.LAUNCHER, Phase.TRAINING),
    Kill(Victim.INFERENCE, Phase.GENERATING),
)


def play(directory: Path, model: Path, *, seed: int, kills: Sequence[Kill]) -> Outcome:
    """One run of the game. Raises: AssertionError where something does not hold at its end."""
    argv = command(
        *("rl", "@", "tests/chaos/game.toml", "--model.name", str(model), "--output-dir", str(directory / "rl")),
        *("--max-steps", str(MAX_STEPS), "--seed", str(seed), "--max-model-len", "256"),
        *("--inference.server.port", str(_free_port())),
        *("--orchestrator.env", json.dumps([{"id": "higher-lower", "name": ENV, "args": GAME}])),
    )
    run = KilledRun(directory, argv, kills, max_steps=MAX_STEPS, limit_s=LIMIT_S)
    ended = run.run()
    assert (ended.code, ended.left) == (0, []), (directory / "rl.out").read_text()[-3000:]
    assert sorted(shot.kill.victim for shot in ended.shots if shot.counts) == sorted(kill.victim for kill in kills)
    entries = read_journal(run.paths.journal)
    check_history(entries, steps=MAX_STEPS)
    check_batches(entries, run.paths, steps=MAX_STEPS)
    check_files(run.paths, steps=MAX_STEPS)
    check_metrics(run.paths, steps=MAX_STEPS)
    return Outcome(directory=directory, code=ended.code, seconds=ended.seconds)


@pytest.mark.slow
@pytest.mark.timeout(2 * len(SEEDS) * LIMIT_S + WARM_UP_S)
def test_runs_that_are_killed_learn_as_much(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    outcomes: dict[str, list[Outcome]] = {"left alone": [], "killed": []}
    for seed in SEEDS:
        kills = [*KILLS[seed % len(KILLS) :], *KILLS[: seed % len(KILLS)]]
        outcomes["left alone"].append(play(tmp_path / f"alone-{seed}", model, seed=seed, kills=[]))
        outcomes["killed"].append(play(tmp_path / f"killed-{seed}", model, seed=seed, kills=kills))
        with capsys.disabled():
            for kind, runs in outcomes.items():
                print(
                    f"\nseed {seed}, {kind:10} {final_reward(runs[-1]):.3f} at the end, {runs[-1].seconds:.0f} s",
                    end="",
                )
    found = difference(outcomes["left alone"], outcomes["killed"])
    with capsys.disabled():
        means = {kind: statistics.fmean(map(final_reward, runs)) for kind, runs in outcomes.items()}
        print(f"\nfinal reward: {means}; killed minus left alone: {found}")
    for kind, runs in outcomes.items():
        assert learned(runs) >= LEAST_LEARNED, kind
    assert abs(found.value) < WITHIN, found
