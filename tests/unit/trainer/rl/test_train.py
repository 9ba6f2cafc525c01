import itertools
import shutil
import sys

import msgspec
import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

from prime_rl.config.algorithms import CustomLossConfig, RefKLConfig
from prime_rl.config.artifacts import AutoBroadcastConfig, NCCLBroadcastConfig
from prime_rl.config.optim import AdamWConfig
from prime_rl.config.trainer import FakeDataConfig, RLDataConfig, TrainerConfig, TrainerModelConfig, WeightsConfig
from prime_rl.errors import ArtifactError, ConfigError, DeadlineExceeded
from prime_rl.models.attention import PackedAttention
from prime_rl.models.hf import load_decoder
from prime_rl.monitors.base import read_metrics
from prime_rl.paths import RunPaths
from prime_rl.trainer.rl.data import RolloutBatches
from prime_rl.trainer.rl.train import run
from prime_rl.transport.batches import BatchWriter
from prime_rl.transport.manifest import complete_steps, verify


@pytest.fixture
def config(tmp_path, model_dir, make_batch) -> TrainerConfig:
    """Six steps on recorded batches."""
    paths = RunPaths(tmp_path / "run")
    for step in range(6):
        BatchWriter(paths.rollouts).write(make_batch(step, seed=step))
    return TrainerConfig(
        model=TrainerModelConfig(name=str(model_dir), seq_len=32),
        optim=AdamWConfig(lr=1e-3),
        max_steps=6,
        max_async_level=1,
        batch_timeout=0.5,
        device="cpu",
        output_dir=tmp_path / "run",
    )


def test_recorded_batches_become_weights_and_metrics(config, model_dir):
    run(config)
    paths = RunPaths(config.output_dir)
    assert complete_steps(paths.weights) == [4, 5, 6]
    assert set(verify(paths.weights / "step_6").files) >= {"model.safetensors", "config.json", "tokenizer.json"}
    rows = read_metrics(paths.metrics("trainer"))
    assert [row["step"] for row in rows] == list(range(6))
    for row in rows:
        assert row["optim/lr"] == 1e-3
        assert row["optim/grad_norm"] > 0
        assert row["mismatch_kl/max"] >= row["mismatch_kl/mean"] >= 0
        assert "perf/mfu" not in row


def test_the_last_weights_open_in_transformers_and_give_the_trainers_logits(config, model_dir):
    run(config)
    directory = RunPaths(config.output_dir).weights / "step_6"
    theirs = AutoModelForCausalLM.from_pretrained(directory)
    ours, start = load_decoder(str(directory)), load_decoder(str(model_dir))
    ids = torch.randint(0, 300, (10,), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        logits, before = (m.logits(m(ids, torch.arange(10), PackedAttention([10]))) for m in (ours, start))
        expected = theirs(ids[None]).logits[0]
    assert (logits - expected).abs().max() <= 1e-4 * expected.abs().max()
    assert (logits - before).abs().max() > 1e-2
    assert PreTrainedTokenizerFast.from_pretrained(directory).decode([0]) == "!"


def test_the_same_batches_give_the_same_weights(config, tmp_path):
    run(config)
    again = config.model_copy(update={"output_dir": tmp_path / "again"})
    (tmp_path / "again").mkdir()
    (tmp_path / "again" / "rollouts").symlink_to(config.output_dir / "rollouts")
    run(again)
    last = [RunPaths(directory).weights / "step_6" for directory in (config.output_dir, again.output_dir)]
    assert verify(last[0]) == verify(last[1])


def test_multiples_of_the_interval_stay(config):
    run(config.model_copy(update={"weights": WeightsConfig(interval=2)}))
    assert complete_steps(RunPaths(config.output_dir).weights) == [2, 4, 5, 6]


def test_bfloat16_publishes_bfloat16(config):
    model = config.model.model_copy(update={"optimization_dtype": "bfloat16"})
    run(config.model_copy(update={"model": model, "max_steps": 2}))
    directory = RunPaths(config.output_dir).weights / "step_2"
    assert AutoModelForCausalLM.from_pretrained(directory).dtype == torch.bfloat16


@pytest.mark.parametrize("length", ["fixed", "variable"])
def test_made_up_batches_train_without_an_orchestrator(config, tmp_path, length):
    """Longer micro-batches than `model.seq_len` are what was asked for."""
    fake = FakeDataConfig(batch_size=8, micro_batch_size=4, seq_len=32, length=length, generate_samples=True)
    alone = {"data": RLDataConfig(fake=fake), "output_dir": tmp_path / "alone", "max_steps": 4}
    run(config.model_copy(update=alone))
    paths = RunPaths(tmp_path / "alone")
    assert complete_steps(paths.weights) == [2, 3, 4]
    rows = read_metrics(paths.metrics("trainer"))
    assert [row["progress/sequences"] for row in rows] == [8] * 4
    assert all(row["optim/grad_norm"] > 0 and row["mismatch_kl/mean"] > 0 for row in rows)
    assert len({row["loss/mean"] for row in rows}) == 4


def test_a_loss_of_the_users_trains_and_its_metrics_are_logged(config, tmp_path, monkeypatch):
    (tmp_path / "run_losses.py").write_text(
        "def mine(streams, scale):\n"
        "    return -scale * streams.advantages_N * streams.logprobs_N, {'mine': streams.advantages_N * 0 + scale}\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    loss = CustomLossConfig(import_path="run_losses.mine", kwargs={"scale": 3.0})
    run(config.model_copy(update={"loss": loss, "max_steps": 1}))
    (row,) = read_metrics(RunPaths(config.output_dir).metrics("trainer"))
    assert row["mine/mean"] == row["mine/max"] == 3
    assert row["optim/grad_norm"] > 0


def test_distillation_is_configured_beside_the_loss(config, tmp_path, model_dir, make_batch):
    """The same batch with its sampled tokens in ref_kl instead of rl: only `ref_kl` decides what is learned of it."""
    losses = []
    for number, ref_kl in enumerate((RefKLConfig(kl_tau=0.0), RefKLConfig(kl_tau=1.0))):
        paths = RunPaths(tmp_path / f"distilled_{number}")
        batch = make_batch(0, seed=0)
        rows = [
            msgspec.structs.replace(
                row,
                rl_weights=np.zeros(row.num_tokens, np.float32),
                ref_kl_weights=row.loss_mask.astype(np.float32),
                ref_logprobs=-row.loss_mask.astype(np.float32),
            )
            for row in batch.micro_batches
        ]
        BatchWriter(paths.rollouts).write(msgspec.structs.replace(batch, micro_batches=rows))
        run(config.model_copy(update={"ref_kl": ref_kl, "max_steps": 1, "output_dir": paths.output_dir}))
        (metrics,) = read_metrics(paths.metrics("trainer"))
        assert "is_masked/mean" not in metrics  # no token is in the policy gradient
        assert metrics["ref_kl/max"] > metrics["ref_kl/mean"]
        losses.append(metrics["loss/mean"])
    assert losses[1] > losses[0]


@pytest.mark.parametrize("step", [3, 6])
def test_weights_that_cannot_be_written_end_training_the_last_ones_too(config, step):
    weights = RunPaths(config.output_dir).weights
    weights.mkdir()
    (weights / f"step_{step}").touch()
    with pytest.raises(ArtifactError, match=f"step_{step} exists already"):
        run(config)


def test_weights_that_cannot_be_written_are_told_while_a_batch_is_waited_for_that_needs_them(config):
    paths = RunPaths(config.output_dir)
    shutil.rmtree(paths.rollouts / "step_3")
    paths.weights.mkdir()
    (paths.weights / "step_3").touch()
    with pytest.raises(ArtifactError, match="step_3 exists already"):
        run(config.model_copy(update={"batch_timeout": 200}))


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit])
def test_what_ends_training_leaves_the_weights_before_complete_and_nothing_half_written(config, monkeypatch, error):
    def interrupted(*_args, **_options):
        raise error

    monkeypatch.setattr("prime_rl.trainer.rl.data.RolloutBatches.next", after(2, interrupted))
    with pytest.raises(error):
        run(config)
    weights = RunPaths(config.output_dir).weights
    assert sorted(path.name for path in weights.iterdir()) == ["step_1", "step_2"]
    assert all(verify(path) for path in weights.iterdir())


def after(num_calls, end):
    """`RolloutBatches.next` so many times, then `end`."""
    original, calls = RolloutBatches.next, itertools.count()
    return lambda *arguments: end() if next(calls) == num_calls else original(*arguments)


def test_weights_of_an_earlier_run_are_not_mixed_in(config):
    run(config)
    with pytest.raises(ConfigError, match=r"holds weights of an earlier run \(up to step 6\)"):
        run(config)


def test_a_batch_that_never_comes_ends_the_run_and_leaves_what_was_done(config):
    with pytest.raises(DeadlineExceeded, match="no batch for step 6"):
        run(config.model_copy(update={"max_steps": 7}))
    assert complete_steps(RunPaths(config.output_dir).weights) == [4, 5, 6]


def test_a_gpu_that_is_not_there_is_said(config, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)  # as on a machine without one
    with pytest.raises(ConfigError, match="torch sees no GPU here"):
        run(config.model_copy(update={"device": "cuda"}))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_gpu_trains_as_the_cpu_does(config, tmp_path, dtype):
    rows = {}
    for device in ("cpu", "cuda"):
        output_dir = tmp_path / device
        output_dir.mkdir()
        (output_dir / "rollouts").symlink_to(config.output_dir / "rollouts")
        model = config.model.model_copy(update={"optimization_dtype": dtype})
        run(config.model_copy(update={"model": model, "device": device, "output_dir": output_dir}))
        rows[device] = read_metrics(RunPaths(output_dir).metrics("trainer"))
        assert complete_steps(RunPaths(output_dir).weights) == [4, 5, 6]
    tolerance = 1e-3 if dtype == "float32" else 0.1
    for on_cpu, on_gpu in zip(rows["cpu"], rows["cuda"], strict=True):
        for name in ("entropy/mean", "mismatch_kl/mean", "optim/grad_norm"):
            assert on_gpu[name] == pytest.approx(on_cpu[name], rel=tolerance), name


def test_sending_from_a_cpu_is_refused_before_anything_is_trained(config):
    with pytest.raises(ConfigError, match="nccl sends from a GPU, and the trainer runs on cpu"):
        run(config.model_copy(update={"weight_broadcast": NCCLBroadcastConfig()}))
    assert not RunPaths(config.output_dir).metrics("trainer").exists()


def test_a_trainer_that_is_started_alone_takes_auto_for_files(config):
    run(config.model_copy(update={"weight_broadcast": AutoBroadcastConfig()}))
    assert complete_steps(RunPaths(config.output_dir).weights) == [4, 5, 6]


def test_the_sender_meets_the_servers_where_and_as_long_as_is_configured(config, monkeypatch):
    class Met(Exception):
        pass

    def meet(**given):
        raise Met({name: value for name, value in given.items() if name != "device"})

    monkeypatch.setattr("prime_rl.trainer.publish.build.NcclSender", meet)
    broadcast = NCCLBroadcastConfig(host="node0", port=29502, timeout=7, inference_world_size=3)
    with pytest.raises(Met) as met:
        run(config.model_copy(update={"weight_broadcast": broadcast}))
    assert met.value.args == ({"host": "node0", "port": 29502, "timeout": 7, "world_size": 4},)
