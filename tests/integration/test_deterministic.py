"""Two runs of the same seed train the same weights to the last bit, also where one is killed; and training again from
what was recorded does."""

import os
import socket
import subprocess
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from prime_rl.paths import RunPaths, step_dir
from tests.chaos.kills import Kill, KilledRun
from tests.chaos.phases import Phase, Victim
from tests.integration.conftest import MODEL, ROOT, command

STEPS = 3
RUN = (
    *("rl", "--model.name", MODEL, "--deterministic", "--max-async-level", "0", "--max-steps", str(STEPS)),
    *("--seq-len", "128", "--trainer.optim.lr", "1e-2", "--orchestrator.batch-size", "16"),
    *("--orchestrator.rollouts-per-example", "4", "--orchestrator.sampling.max-tokens", "12"),
    *("--orchestrator.oversampling-factor", "1.5", "--trainer.weights.interval", "1", "--trainer.keep-batches"),
)
OTHER_TIMING = (
    *("--inference.max-num-seqs", "3", "--inference.max-num-batched-tokens", "9"),
    *("--no-inference.enable-prefix-caching", "--orchestrator.workers-per-env", "2"),
    *("--orchestrator.max-concurrent", "5"),
)
"""Nothing that is learned may depend on any of this; without the mode all of it does."""


def batches(run: RunPaths) -> list[bytes]:
    return [(step_dir(run.rollouts, step) / "batch.msgpack").read_bytes() for step in range(STEPS)]


def weights(run: RunPaths, step: int = STEPS) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = load_file(step_dir(run.weights, step) / "model.safetensors")
    return found


def assert_same(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    assert [name for name in expected if not torch.equal(found[name], expected[name])] == []


def free_ports(number: int) -> list[int]:
    """Ports on loopback that nobody listens on just now."""
    probes = [socket.create_server(("127.0.0.1", 0)) for _ in range(number)]
    ports = [int(probe.getsockname()[1]) for probe in probes]
    for probe in probes:
        probe.close()
    return ports


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> list[RunPaths]:
    """The same command twice, at the same time, in another shape of what must not matter."""
    out = tmp_path_factory.mktemp("deterministic")
    made = [RunPaths(out / name) for name in ("one", "other")]
    processes = []
    for run, flags, port in zip(made, ((), OTHER_TIMING), free_ports(2), strict=True):
        argv = command(*RUN, *flags, "--inference.server.port", str(port), "--output-dir", str(run.output_dir))
        env = os.environ | {"OMP_NUM_THREADS": "1"}
        processes.append(subprocess.Popen(argv, cwd=ROOT, env=env, stdout=subprocess.PIPE, text=True))
    said = [process.communicate(timeout=280)[0] for process in processes]
    assert [process.returncode for process in processes] == [0, 0], "\n".join(said)
    return made


@pytest.mark.timeout(300)
def test_the_same_seed_trains_the_same_weights_to_the_last_bit(runs: list[RunPaths]) -> None:
    one, other = runs
    assert len(set(batches(one))) == STEPS
    assert batches(other) == batches(one)
    assert_same(weights(other), weights(one))
    with pytest.raises(AssertionError):
        assert_same(weights(one, STEPS - 1), weights(one))


@pytest.mark.timeout(300)
def test_training_again_from_what_was_recorded_gives_the_same_weights(runs: list[RunPaths], tmp_path: Path) -> None:
    one = runs[0]
    argv = ("--model.name", MODEL, "--model.seq-len", "128", "--deterministic", "--optim.lr", "1e-2")
    steps = ("--max-steps", str(STEPS), "--max-async-level", "0")
    subprocess.run(
        command("trainer", "--replay", str(one.rollouts), *argv, *steps, "--output-dir", str(tmp_path)),
        cwd=ROOT,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        check=True,
        timeout=200,
    )
    assert_same(weights(RunPaths(tmp_path)), weights(one))


@pytest.mark.timeout(300)
def test_a_run_that_is_killed_trains_the_same_weights_to_the_last_bit(runs: list[RunPaths], tmp_path: Path) -> None:
    """Of every step: so every batch counted once, and was made as if nobody had died."""
    one = runs[0]
    argv = command(*RUN, "--recovery-interval", "0.1", "--inference.server.port", str(free_ports(1)[0]))
    kills = [Kill(Victim.ORCHESTRATOR, Phase.GENERATING), Kill(Victim.TRAINER, Phase.TRAINING)]
    run = KilledRun(tmp_path, [*argv, "--output-dir", str(tmp_path / "rl")], kills, max_steps=STEPS, limit_s=240)
    ended = run.run()
    assert (ended.code, ended.left) == (0, [])
    assert {shot.victim for shot in ended.shots} == {Victim.ORCHESTRATOR, Victim.TRAINER}
    assert batches(run.paths) == batches(one)
    for step in range(1, STEPS + 1):
        assert_same(weights(run.paths, step), weights(one, step))
