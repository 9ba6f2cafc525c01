"""The orchestrator's process is killed and started again, beside a real server that goes on; a scripted trainer."""

import json
import signal

import httpx
import torch

from prime_rl.journal import read_journal
from prime_rl.models.hf import hf_tensors, load_decoder
from prime_rl.monitors.base import read_metrics
from prime_rl.orchestrator.buffer import Buffer
from prime_rl.paths import RunPaths, step_dir
from prime_rl.resume import go_back
from prime_rl.transport.batches import BatchReader, read_state
from prime_rl.transport.checkpoints import ORCHESTRATOR_STATE
from prime_rl.transport.manifest import publish_dir, read_manifest, verify
from prime_rl.transport.weights import publish_weights
from tests.integration.conftest import await_true
from tests.integration.test_orchestrator import model, orchestrate, processes, serve

__all__ = ["model", "orchestrate", "processes", "serve"]

STEPS = 7
EXAMPLES = 20


def publish(paths, model, step):
    decoder = load_decoder(str(model), device="cpu", dtype=torch.float32, seed=step)
    publish_weights(hf_tensors(decoder), step=step, weights_dir=paths.weights, assets=model)


def train(paths, model, process, steps):
    """Wait for the batches of `steps`, and publish other weights for each."""
    for step in steps:
        await_batch(paths, process, step)
        publish(paths, model, step + 1)


def await_batch(paths, process, step):
    def is_there():
        assert process.poll() is None, "the orchestrator ended"
        return (step_dir(paths.rollouts, step) / "STABLE").exists()

    await_true(f"batch {step}", is_there)


def kill(process):
    process.send_signal(signal.SIGKILL)
    process.wait(10)


def digests(paths):
    return {step: read_manifest(step_dir(paths.rollouts, step)).files for step in range(STEPS)}


def rows_of_traces(paths):
    files = sorted(paths.traces.glob("step_*/reverse-text/results.jsonl"))
    return [json.loads(line) for file in files for line in file.read_text().splitlines()]


def check_history(paths):
    """Each step once, in the journal's last word on it, in the metrics and on disk; examples in the buffer's order."""
    assert [row["step"] for row in read_metrics(paths.metrics("orchestrator"))] == list(range(STEPS))
    for step in range(STEPS):
        verify(step_dir(paths.rollouts, step))
        assert read_state(step_dir(paths.rollouts, step)) is not None
        assert BatchReader(paths.rollouts).read(step, 1).step == step
    traces = rows_of_traces(paths)
    ids = [row["rollout_id"] for row in traces]
    assert len(set(ids)) == len(ids), "a rollout has one row"
    used = [row for row in traces if row["end"]["kind"] == "used"]
    assert len(used) >= STEPS * 8 - 8, "rows that were in the queue of the process that was killed are missing"
    drawn = {row["group"]: row["example_id"] for row in traces}
    assert all(drawn[row["group"]] == row["example_id"] for row in traces)
    buffer = Buffer({"reverse-text": EXAMPLES}, seed=42)
    order = [buffer.next().index for _ in range(max(drawn) + 1)]
    assert all(order[group] == example for group, example in drawn.items())
    assert len(drawn) >= STEPS * 2 - 2


def test_after_a_kill_the_next_batch_comes_and_none_is_repeated_or_lost(
    processes, serve, orchestrate, model, free_port, tmp_path
):
    server = serve()
    flags = {"max-steps": STEPS, "max-async-level": 1}
    paths = RunPaths(tmp_path / "run")
    orchestrator = orchestrate(**flags)
    train(paths, model, orchestrator, range(2))
    await_batch(paths, orchestrator, 2)
    kill(orchestrator)
    before = {step: read_manifest(step_dir(paths.rollouts, step)).files for step in range(3)}
    publish(paths, model, 3)
    orchestrator = orchestrate(**flags, recover=True)
    train(paths, model, orchestrator, range(3, 5))
    await_true("a row of batch 5", lambda: len(read_metrics(paths.metrics("orchestrator"))) > 5)
    kill(orchestrator)  # with or without batch 5
    orchestrator = orchestrate(**flags, recover=True)
    train(paths, model, orchestrator, range(5, STEPS))
    assert orchestrator.wait(60) == 0, processes.output("orchestrator")
    assert server.poll() is None
    assert {step: files for step, files in digests(paths).items() if step < 3} == before
    check_history(paths)
    entries = [entry for entry in read_journal(paths.journal) if entry.process == "orchestrator"]
    complete = [entry.step for entry in entries if entry.event == "batch_complete"]
    assert sorted(set(complete)) == list(range(STEPS))
    assert len(complete) == STEPS
    assert {entry.step: entry.facts["digest"] for entry in entries if entry.event == "batch_complete"} == {
        step: files["batch.msgpack"].xxh3 for step, files in digests(paths).items()
    }
    recovered = [entry for entry in entries if entry.event == "recovered"]
    assert [entry.facts["how"] for entry in recovered] == ["recovered", "recovered"]
    assert recovered[0].step in (3, 4), "of level 1, with weights 2 served"
    assert recovered[1].step in (5, 6, 7)
    assert httpx.get(f"http://127.0.0.1:{free_port}/health").json()["version"] >= STEPS - 2  # what the last batch needs


def test_a_run_goes_back_to_a_checkpoint_and_the_server_with_it(
    processes, serve, orchestrate, model, free_port, tmp_path
):
    serve()
    flags = {"max-steps": STEPS, "max-async-level": 1}
    paths = RunPaths(tmp_path / "run")
    orchestrator = orchestrate(**flags)
    train(paths, model, orchestrator, range(5))
    kill(orchestrator)
    with publish_dir(step_dir(paths.checkpoints, 2)) as directory:
        (directory / ORCHESTRATOR_STATE).parent.mkdir()
        (directory / ORCHESTRATOR_STATE).write_bytes(read_state(step_dir(paths.rollouts, 1)) or b"")
    before = {step: read_manifest(step_dir(paths.rollouts, step)).files for step in range(2)}
    go_back(paths, 2, owns=("trainer",))
    orchestrator = orchestrate(**flags, **{"ckpt.resume-step": -1})
    await_true("what lies beyond to be set aside", lambda: any(paths.superseded.glob("*/rollouts/step_2")))
    await_true("batch 2 again", lambda: (step_dir(paths.rollouts, 2) / "STABLE").exists())
    batch = BatchReader(paths.rollouts).read(2, 1)
    assert batch.max_version <= 2, "the server had served newer weights"
    train(paths, model, orchestrator, range(2, STEPS))
    assert orchestrator.wait(60) == 0, processes.output("orchestrator")
    assert {step: files for step, files in digests(paths).items() if step < 2} == before
    check_history(paths)
    assert len(list(paths.superseded.glob("*/rollouts/step_2"))) == 1


def test_without_recover_or_resume_the_batches_of_a_run_are_left_alone(
    processes, serve, orchestrate, model, free_port, tmp_path
):
    paths = RunPaths(tmp_path / "run")
    with publish_dir(step_dir(paths.rollouts, 0)) as directory:
        (directory / "batch.msgpack").write_bytes(b"")
    orchestrator = orchestrate()
    assert orchestrator.wait(60) == 1
    assert "holds 1 batches of an earlier run; go on from one of its checkpoints" in processes.output("orchestrator")
