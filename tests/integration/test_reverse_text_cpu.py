"""The demo's parts as a user runs them: SFT, RL, evaluation, and the three processes one by one."""

import subprocess

import pytest
import torch
from transformers import AutoModelForCausalLM

from prime_rl.models.attention import PackedAttention
from prime_rl.models.hf import load_decoder
from prime_rl.paths import RunPaths, step_dir
from tests.integration.conftest import EXAMPLE, MODEL, ROOT, command, rewards, run


@pytest.mark.timeout(400)
def test_the_reward_climbs(trained):
    curve = rewards(trained.run_dir)
    assert len(curve) == 50
    assert curve[0] <= 0.5
    assert sum(curve[-3:]) / 3 >= curve[0] + 0.2


def test_the_console_shows_every_step_and_where_the_results_are(trained):
    assert "50/50" in trained.console
    assert "mean reward over steps" in trained.console
    assert str(step_dir(trained.run_dir / "weights", 50)) in trained.console
    assert (trained.run_dir / "reward.svg").read_text().startswith("<svg")
    assert (trained.run_dir / "logs" / "rl.log").read_text().rstrip().endswith("complete")


def test_the_weights_open_in_transformers_and_give_our_logits(trained):
    directory = step_dir(trained.run_dir / "weights", 50)
    ids = torch.arange(3, 33)
    theirs = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    ours = load_decoder(str(directory))
    with torch.no_grad():
        expected = theirs(ids[None]).logits[0]
        logits = ours.logits(ours(ids, torch.arange(len(ids)), PackedAttention([len(ids)])))
    assert expected.std() >= 1
    torch.testing.assert_close(logits, expected, rtol=0, atol=1e-4 * float(expected.abs().max()))


def test_eval_measures_before_and_after_with_a_server_of_its_own(evaluated):
    assert "base" in evaluated.table
    assert "step_50" in evaluated.table
    assert evaluated.reports[50]["avg"] > evaluated.reports[0]["avg"] + 0.1


def test_the_three_processes_run_one_by_one_and_eval_finds_the_server(tmp_path, free_port):
    """As in three terminals: each from its own file, with only the place and the length of the run changed."""
    out = ("--output-dir", str(tmp_path))
    model = ("--model.name", MODEL)
    server = subprocess.Popen(
        command("inference", "@", f"{EXAMPLE}/rl/infer.toml", *model, *out, "--server.port", str(free_port)), cwd=ROOT
    )
    client = ("--client.base-url", f"http://localhost:{free_port}/v1")
    small = ("--batch-size", "8", "--rollouts-per-example", "4", "--max-steps", "2")
    orchestrator = subprocess.Popen(
        command("orchestrator", "@", f"{EXAMPLE}/rl/orch.toml", *model, *out, *client, *small), cwd=ROOT
    )
    flags = ("--max-steps", "2", "--scheduler.type", "linear", "--scheduler.warmup-steps", "0")
    try:
        run("trainer", "@", f"{EXAMPLE}/rl/train.toml", *model, *out, *flags, "--scheduler.decay-steps", "2")
        assert orchestrator.wait(timeout=30) == 0
        run(
            *("eval", "@", f"{EXAMPLE}/eval.toml", *model, "--inference.server.port", str(free_port)),
            *("--weights-dir", str(tmp_path / "weights"), "--steps", "2", "--no-eval-base", "--num-examples", "2"),
            *("--output-dir", str(tmp_path / "eval")),
        )
    finally:
        for process in (orchestrator, server):
            process.terminate()
            process.wait(timeout=10)
    assert server.returncode == 0
    assert (tmp_path / "weights" / "step_2" / "STABLE").exists()
    assert len(rewards(tmp_path)) == 2
    assert (step_dir(RunPaths(tmp_path / "eval").evals, 2) / "reverse-text" / "report.json").exists()
    assert not RunPaths(tmp_path / "eval").config("inference").exists()  # no server of its own
