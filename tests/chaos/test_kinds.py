"""Kills in the kinds of runs that the matrix of `test_kills.py` leaves out, a few in each.

    pytest -m slow -s tests/chaos/test_kinds.py        # ten minutes on two cores

A run is killed as in the matrix, in a phase of its journal, or by volleys: processes that die at once, as soon as the
journal tells something. What holds afterwards is in `endstate.py`, and here what the kind of run promises besides.
"""

from __future__ import annotations

import json
import os
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest

from prime_rl.journal import Entry, read_journal
from prime_rl.models import lora
from prime_rl.models.hf import model_tensors
from prime_rl.monitors.base import read_metrics
from prime_rl.paths import RunPaths, step_dir
from prime_rl.transport.batches import BatchReader
from prime_rl.transport.manifest import complete_steps, verify
from prime_rl.transport.weights import load_weights
from tests.chaos.endstate import BATCH, check, check_batches, check_history, check_metrics
from tests.chaos.kills import ENV, Kill, KilledRun, steps_trained, tiny
from tests.chaos.phases import Phase, Victim, opened
from tests.chaos.runs import PACKAGES
from tests.chaos.victims import named
from tests.integration.conftest import MODEL, ROOT, _free_port
from tests.integration.conftest import run as run_command
from tests.integration.test_fleet import two_ports

__all__ = ["two_ports"]

pytestmark = [pytest.mark.slow, pytest.mark.timeout(960)]

LIMIT_S = 900.0
"""Of one run; alone on two cores one takes a minute."""
OFTEN = ("--recovery-interval", "1")
SAME = 1e-6
"""The most that logprobs of the same weights differ by, as KL."""

Row = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Volley:
    """Processes, by their names in the plan, that are killed at once when `is_due`."""

    names: tuple[str, ...]
    is_due: Callable[[Sequence[Entry]], bool]


class Volleys:
    """Fires one volley after the other; the launcher's death is followed by the same command."""

    def __init__(self, run: KilledRun, volleys: Sequence[Volley]) -> None:
        self.pending = list(volleys)
        self.fired: list[int] = []
        """Entries that the journal had when all of a volley were dead."""
        self._run = run

    def __call__(self, entries: Sequence[Entry]) -> None:
        if not self.pending or not self.pending[0].is_due(entries):
            return
        if self.pending[0].names == ("launcher",):
            if self._run.kill_now(Victim.LAUNCHER, Phase.GENERATING):
                self._hit()
            return
        victims = [named(self._run.launcher, name) for name in self.pending[0].names]
        alive = [victim for victim in victims if victim is not None and victim.status() != psutil.STATUS_ZOMBIE]
        if len(alive) == len(victims):
            for victim in alive:
                victim.kill()
            self._hit()

    def _hit(self) -> None:
        self.pending.pop(0)
        self.fired.append(len(self._run.entries()))


def after(*steps: int) -> list[Callable[[Sequence[Entry]], bool]]:
    """Once so many steps are trained, for each of these."""
    return [lambda entries, step=step: steps_trained(entries) >= step for step in steps]


@dataclass(frozen=True, slots=True, kw_only=True)
class Played:
    """A run that was killed and has reached its last step."""

    paths: RunPaths
    entries: list[Entry]
    fired: list[int]
    """As `Volleys.fired`."""

    def rows(self, process: str) -> list[Row]:
        return read_metrics(self.paths.metrics(process))

    def restarts(self) -> Counter[str]:
        """How often each process was started again."""
        return Counter(str(entry.facts["name"]) for entry in self.entries if entry.event == "restart")


def play(
    directory: Path,
    *flags: str,
    steps: int,
    kills: Sequence[Kill] = (),
    volleys: Sequence[Volley] = (),
    port: int | None = None,
) -> Played:
    """Raises: AssertionError where something was not killed, or does not hold at the end."""
    argv = tiny(directory, port=_free_port() if port is None else port, max_steps=steps, flags=flags)
    run = KilledRun(directory, argv, kills, max_steps=steps, limit_s=LIMIT_S)
    run.on_entries = watch = Volleys(run, volleys)
    ended = run.run()
    check(ended, run.paths, steps=steps)
    assert [shot.kill for shot in ended.shots if shot.counts] == list(kills)
    assert not watch.pending, f"{watch.pending[0].names} were never killed"
    return Played(paths=run.paths, entries=read_journal(run.paths.journal), fired=watch.fired)


def test_of_two_servers_one_dies_and_then_both(tmp_path: Path, two_ports: tuple[int, int]):
    first, second, third = after(3, 8, 13)
    played = play(
        tmp_path,
        *OFTEN,
        *("--inference.parallel.dp", "2", "--inference.backend", "embedded"),
        steps=20,
        port=two_ports[0],
        volleys=[
            Volley(("inference-1",), first),
            Volley(("inference-0", "inference-1"), second),
            Volley(("inference-0", "inference-1", "orchestrator"), third),
        ],
    )
    assert played.restarts() == {"inference-0": 2, "inference-1": 3, "orchestrator": 1}
    assert played.rows("orchestrator")[-1]["inference/servers_up"] == 2


@pytest.fixture
def packages(monkeypatch: pytest.MonkeyPatch) -> None:
    """Environments of these tests can be imported by the processes of a run."""
    path = [str(PACKAGES), str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(path))


@pytest.mark.usefixtures("packages")
def test_groups_that_are_scored_as_a_whole_are_whole(tmp_path: Path):
    kills = [
        Kill(Victim.ENV_WORKER, Phase.GENERATING),
        Kill(Victim.ORCHESTRATOR, Phase.GENERATING),
        Kill(Victim.INFERENCE, Phase.GENERATING),
        Kill(Victim.LAUNCHER, Phase.GENERATING),
    ]
    env = [{"id": "grouped-env", "name": ENV, "args": {"max_words": 3, "num_examples": 1000}}]
    played = play(tmp_path, *OFTEN, "--orchestrator.env", json.dumps(env), steps=20, kills=kills)
    for file in played.paths.rollouts.glob("step_*/rollouts.jsonl"):
        rewards: dict[int, list[float]] = defaultdict(list)
        for line in file.read_text().splitlines():
            row = json.loads(line)
            rewards[row["group"]].append(row["reward"])
        for group in rewards.values():
            assert sorted(group) == pytest.approx([0, 1 / 3, 2 / 3, 1]), file


EVALUATED = ({"id": ENV, "name": "short", "args": {"max_words": 3}}, {"id": ENV, "name": "long"})
EXAMPLES = 24


def evaluating(*, interval: int, tries: int) -> tuple[str, ...]:
    """Flags for an evaluation on several environments."""
    section = "--orchestrator.eval"
    return (
        *(f"{section}.env", json.dumps(EVALUATED), f"{section}.interval", str(interval)),
        *(f"{section}.num-examples", str(EXAMPLES), f"{section}.rollouts-per-example", str(tries)),
        *(f"{section}.sampling.max-tokens", "16"),
        *(f"{section}.sampling.extra-body", '{"ignore_eos": true}'),
    )


def check_evaluations(played: Played, *, tries: int) -> list[int]:
    """Which weights were evaluated: each once, whole, in all environments."""
    rows = played.rows("eval")
    found = [row["step"] for row in rows]
    assert found == sorted(set(found)) == complete_steps(played.paths.evals)
    for step in found:
        verify(step_dir(played.paths.evals, step))
        for env in EVALUATED:
            lines = (step_dir(played.paths.evals, step) / str(env["name"]) / "results.jsonl").read_text().splitlines()
            everything = Counter(dict.fromkeys(range(EXAMPLES), tries))
            assert Counter(json.loads(line)["example"] for line in lines) == everything, (step, env)
    for env in EVALUATED:
        name = f"eval/{env['name']}/version"
        assert rows[-1][f"{name}/min"] == rows[-1][f"{name}/max"] == found[-1], "nothing is published behind the last"
    return found


def test_evaluations_on_several_environments_are_whole_whoever_dies_in_them(tmp_path: Path):
    kills = [
        Kill(Victim.ENV_WORKER, Phase.EVALUATING),
        Kill(Victim.INFERENCE, Phase.EVALUATING),
        Kill(Victim.ORCHESTRATOR, Phase.EVALUATING),
        Kill(Victim.TRAINER, Phase.EVALUATING),
        Kill(Victim.LAUNCHER, Phase.EVALUATING),
    ]
    played = play(tmp_path, *OFTEN, *evaluating(interval=2, tries=2), steps=26, kills=kills)
    found = check_evaluations(played, tries=2)
    assert (found[0], found[-1]) == (0, 26)
    assert len(found) >= 4


@pytest.mark.parametrize("is_kept", [False, True], ids=["recovery", "ckpt"])
def test_the_last_weights_are_evaluated_when_only_that_is_left_and_killed(tmp_path: Path, is_kept: bool):
    """The trainer has ended then, and nobody else knows how to go on from where it was."""
    steps = 4

    def is_alone(entries: Sequence[Entry]) -> bool:
        """While the evaluation goes on, the trainer is done and nobody is missing."""
        begun = opened(entries, Phase.EVALUATING, Victim.ORCHESTRATOR, max_steps=steps)
        last = {entry.facts["name"]: entry for entry in entries if entry.event in ("process_started", "process_ended")}
        if begun is None or begun.step != steps or last.pop("trainer").facts.get("how") != "done":
            return False
        return all(entry.event == "process_started" for entry in last.values())

    names = (("orchestrator",), ("inference",), ("launcher",))
    flags = ("--ckpt.interval", "2") if is_kept else ()
    volleys = [Volley(name, is_alone) for name in names]
    evaluated = (*evaluating(interval=1000, tries=12), "--no-orchestrator.eval.eval-base-model")
    played = play(tmp_path, *OFTEN, *flags, *evaluated, steps=steps, volleys=volleys)
    assert check_evaluations(played, tries=12) == [steps]
    behind = [entry for entry in played.entries[played.fired[0] :] if entry.event == "batch_consumed"]
    assert not behind, "steps were trained again though all weights were there"
    assert played.restarts() == {"orchestrator": 1, "inference": 1}


def test_adapters_are_served_and_merged(tmp_path: Path):
    """At level 0 every token is sampled by the weights it trains, so logprobs agree only if the adapter is served."""
    steps = 20
    kills = [
        Kill(Victim.TRAINER, Phase.PUBLISHING),
        Kill(Victim.INFERENCE, Phase.GENERATING),
        Kill(Victim.TRAINER, Phase.CHECKPOINTING),
        Kill(Victim.LAUNCHER, Phase.PUBLISHING),
    ]
    section = "--trainer.model.lora"
    played = play(
        tmp_path,
        *("--ckpt.interval", "1", "--ckpt.keep-last", "1", "--max-async-level", "0"),
        *("--trainer.optim.lr", "1e-2", f"{section}.rank", "4", f"{section}.alpha", "8", f"{section}.merge"),
        *("--trainer.weights.interval", "5"),
        steps=steps,
        kills=kills,
    )
    assert max(row["mismatch_kl/max"] for row in played.rows("trainer")) <= SAME
    merged = complete_steps(played.paths.merged)
    assert merged == [5, 10, 15, 20]
    base = dict(model_tensors(ROOT / MODEL, 42))
    for step in merged:
        adapter = step_dir(played.paths.weights, step)
        config = lora.read_config(adapter)
        expected = dict(lora.merge(base.items(), config, lora.factors_of(config, load_weights(adapter).tensors)))
        found = load_weights(step_dir(played.paths.merged, step)).tensors
        assert found.keys() == expected.keys()
        assert all(bool((found[name] == tensor).all()) for name, tensor in expected.items()), step


def test_a_teacher_that_dies_has_scored_every_sample(tmp_path: Path):
    model = "--orchestrator.teacher-model"
    flags = ["--teacher-inference.server.port", str(_free_port())]
    flags += [f"{model}.model.name", MODEL, f"{model}.kl-weight", "1"]
    first, second = after(3, 8)
    played = play(
        tmp_path,
        *OFTEN,
        *flags,
        "--trainer.keep-batches",
        steps=16,
        volleys=[Volley(("teacher",), first), Volley(("teacher", "orchestrator"), second)],
    )
    assert played.restarts() == {"teacher": 2, "orchestrator": 1}
    batches = BatchReader(played.paths.rollouts)
    for step in range(16):
        batch = batches.read(step, timeout=0)
        assert batch.stream_tokens["ref_kl"] == batch.num_loss_tokens > 0, step


EACH = [
    Kill(Victim.TRAINER, Phase.TRAINING),
    Kill(Victim.ENV_WORKER, Phase.GENERATING),
    Kill(Victim.ORCHESTRATOR, Phase.WRITING),
    Kill(Victim.INFERENCE, Phase.GENERATING),
    Kill(Victim.TRAINER, Phase.PUBLISHING),
    Kill(Victim.LAUNCHER, Phase.TRAINING),
]


@pytest.mark.parametrize("level", [0, 2])
def test_a_strict_run_stays_strict(tmp_path: Path, level: int):
    """Batch n is of weights n - level, all of it: also what a process makes that was started again."""
    steps = 5 * len(EACH) + 1
    flags = ("--max-async-level", str(level), "--orchestrator.strict-async-level")
    played = play(tmp_path, *OFTEN, *flags, steps=steps, kills=EACH)
    for row in played.rows("orchestrator"):
        assert row["off_policy_gap/max"] == min(level, row["step"]), row["step"]
    for step in range(steps):
        for line in (step_dir(played.paths.rollouts, step) / "rollouts.jsonl").read_text().splitlines():
            assert json.loads(line)["versions"] == [max(0, step - level)] * 2
    if level == 0:
        assert max(row["mismatch_kl/max"] for row in played.rows("trainer")) <= SAME


def test_a_deterministic_run_that_is_killed_makes_the_weights_of_one_that_is_not(tmp_path: Path):
    """To the last bit, of every step: so every batch counted once, and was made as if nobody had died."""
    steps = 5 * len(EACH) + 1
    flags = ("--deterministic", "--max-async-level", "0", "--trainer.weights.interval", "1", "--trainer.keep-batches")
    whole = play(tmp_path / "whole", *flags, steps=steps).paths
    killed = play(tmp_path / "killed", *OFTEN, *flags, steps=steps, kills=EACH).paths
    for step in range(steps):
        assert batch_of(killed, step) == batch_of(whole, step), f"batch {step}"
        assert weights_of(killed, step + 1) == weights_of(whole, step + 1), f"weights {step + 1}"
    assert len({weights_of(whole, step) for step in range(1, steps + 1)}) == steps


def batch_of(paths: RunPaths, step: int) -> bytes:
    return (step_dir(paths.rollouts, step) / BATCH).read_bytes()


def weights_of(paths: RunPaths, step: int) -> bytes:
    return (step_dir(paths.weights, step) / "model.safetensors").read_bytes()


def test_going_back_to_a_checkpoint_that_is_killed_goes_on_with_the_same_command(tmp_path: Path):
    """It goes back once, and not again when the command is given again."""
    steps, back = 16, 4
    flags = ("--ckpt.interval", "2", *OFTEN)
    run_command(*tiny(tmp_path, port=_free_port(), max_steps=8, flags=flags)[3:])
    argv = tiny(tmp_path, port=_free_port(), max_steps=steps, flags=(*flags, "--ckpt.resume-step", str(back)))
    kills = [Kill(Victim.LAUNCHER, Phase.TRAINING), Kill(Victim.TRAINER, Phase.TRAINING)]
    run = KilledRun(tmp_path, argv, kills, max_steps=steps, limit_s=LIMIT_S)
    ended = run.run()
    assert (ended.code, ended.left) == (0, []), (tmp_path / "rl.out").read_text()[-3000:]
    assert [shot.kill for shot in ended.shots if shot.counts] == kills
    entries = read_journal(run.paths.journal)
    begun = [entry.facts["beginning"] for entry in entries if entry.event == "run_started"]
    assert begun == ["new", "goes_back", *["goes_on"] * (len(begun) - 2)]
    assert [entry.name for entry in run.paths.superseded.iterdir()] == ["1"], "it went back once"
    assert complete_steps(run.paths.superseded / "1" / "rollouts") == [4, 5, 6, 7]
    again = [entry.step for entry in entries if entry.event == "batch_complete"][8:]
    assert again == list(range(back, steps)), "batches before the checkpoint were not made again"
    check_batches(line_of(entries, back), run.paths, steps=steps)
    check_history(line_of(entries, back), steps=steps)
    check_metrics(run.paths, steps=steps)


def line_of(entries: Sequence[Entry], back: int) -> list[Entry]:
    """The journal without what the run had left behind it when it went back."""
    turn = next(index for index, entry in enumerate(entries) if entry.facts.get("beginning") == "goes_back")
    before = [entry for entry in entries[:turn] if entry.step is not None and entry.step < back + is_state(entry)]
    return [*before, *entries[turn:]]


def is_state(entry: Entry) -> bool:
    """Whether it tells of the state after so many steps, and not of a step."""
    return entry.event.startswith(("weights", "checkpoint"))
