"""On-policy distillation end to end: a student near the uniform distribution, a teacher that is far from it."""

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, Qwen3Config

from prime_rl.monitors.base import read_metrics
from prime_rl.paths import RunPaths
from prime_rl.transport.batches import BatchReader
from tests.doubles.inference import save_tokenizer
from tests.integration.conftest import _free_port, run

STEPS = 8

CONFIG = Qwen3Config(
    vocab_size=104,
    hidden_size=32,
    intermediate_size=64,
    num_hidden_layers=2,
    num_attention_heads=2,
    num_key_value_heads=1,
    head_dim=16,
    max_position_embeddings=512,
    tie_word_embeddings=False,
    eos_token_id=2,
)


def save_model(directory: Path, spread: float) -> str:
    """A Qwen3 of 25,000 parameters whose logits have a fixed part of this standard deviation, whatever the context.

    All embeddings have a common direction, so what is to be learned is a column of the head.
    """
    directory.mkdir()
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(CONFIG, dtype=torch.float32)
    with torch.no_grad():
        model.get_input_embeddings().weight[:, 0] = 1.0
        model.get_output_embeddings().weight[:, 0] = torch.randn(CONFIG.vocab_size) * spread / CONFIG.hidden_size**0.5
    model.save_pretrained(directory)
    save_tokenizer(directory)
    return str(directory)


@pytest.fixture(scope="module")
def distilled(tmp_path_factory: pytest.TempPathFactory) -> RunPaths:
    """A run without rewards, with a schedule of temperatures."""
    directory = tmp_path_factory.mktemp("distilled")
    student, teacher = save_model(directory / "student", 0.1), save_model(directory / "teacher", 1.5)
    ports = [str(_free_port()) for _ in range(2)]
    run(
        *("rl", "--model.name", student, "--max-steps", str(STEPS), "--seq-len", "128"),
        *("--inference.server.port", ports[0], "--teacher-inference.server.port", ports[1]),
        *("--orchestrator.teacher-model.model.name", teacher, "--orchestrator.teacher-model.kl-weight", "1"),
        *("--orchestrator.advantage.type", "distillation", "--orchestrator.buffer.skip-verification"),
        *("--orchestrator.batch-size", "32", "--orchestrator.sampling.max-tokens", "16"),
        *("--orchestrator.sampling.temp-scheduler.start-temperature", "1.1"),
        *("--orchestrator.sampling.temp-scheduler.end-temperature", "1.0"),
        *("--trainer.optim.lr", "3e-2", "--trainer.device", "cpu", "--output-dir", str(directory / "run")),
    )
    return RunPaths(directory / "run")


def test_a_teacher_that_is_the_policy_itself_is_at_no_distance(sharded):
    """At level 0 it scores samples with the weights that sampled them, so all of it agrees or something is wrong."""
    rows = read_metrics(sharded.metrics("orchestrator"))
    assert [row["teacher/samples"] for row in rows] == [8.0] * 4
    assert max(abs(row["teacher/kl/mean"]) for row in rows) < 1e-6
    trainer = read_metrics(sharded.metrics("trainer"))
    assert [row["ref_kl/max"] for row in trainer] == pytest.approx([0.0] * 4, abs=1e-5)


@pytest.mark.slow
def test_the_students_kl_to_the_teacher_falls(distilled):
    for process, name in (("orchestrator", "teacher/kl/mean"), ("trainer", "ref_kl/mean")):
        found = [row[name] for row in read_metrics(distilled.metrics(process))]
        assert len(found) == STEPS
        assert sum(found[-3:]) < 0.5 * sum(found[:3])


@pytest.mark.slow
def test_nothing_is_learned_from_rewards(distilled):
    rows = read_metrics(distilled.metrics("orchestrator"))
    assert {row["reward/mean"] for row in rows} == {0.0}
    batch = BatchReader(distilled.rollouts).read(STEPS - 1, timeout=0)
    assert batch.stream_tokens["rl"] == 0
    assert batch.stream_tokens["ref_kl"] == batch.num_loss_tokens > 0


@pytest.mark.slow
def test_the_temperature_follows_its_schedule_into_samples_and_metrics(distilled):
    rows = read_metrics(distilled.metrics("orchestrator"))
    assert (rows[0]["sampling/temperature"], rows[-1]["sampling/temperature"]) == pytest.approx((1.1, 1.0), abs=0.02)
