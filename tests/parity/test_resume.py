"""A run that was stopped and resumed gives what one that never stopped gives: to the last bit, and on other ranks."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
import torch.distributed as dist
from tests.doubles.ranks import on_ranks
from tests.doubles.training import VOCAB_SIZE, batch_of

from prime_rl.config.trainer import SFTConfig, TrainerConfig
from prime_rl.journal import history, read_journal
from prime_rl.models.hf import hf_tensors, load_decoder, write_safetensors
from prime_rl.monitors.base import read_metrics
from prime_rl.paths import RunPaths
from prime_rl.trainer import build
from prime_rl.trainer.model.build import TrainedModel
from prime_rl.trainer.ranks import Ranks
from prime_rl.trainer.rl.build import train_rl
from prime_rl.trainer.sft.build import train_sft
from prime_rl.transport.batches import BatchWriter
from prime_rl.transport.checkpoints import complete_checkpoints
from prime_rl.transport.weights import load_weights

HALF, ALL = 10, 20
TOLERANCE = 1e-5
"""Of the change of all weights, by norm."""
SHAPE = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 32,
    "intermediate_size": 50,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "tie_word_embeddings": True,
    "initializer_range": 0.2,
}
RL_CASES: dict[str, dict[str, Any]] = {
    "adamw": {"scheduler": {"type": "cosine", "warmup_steps": 3}},
    "muon": {"optim": {"type": "muon"}},
    "sgd": {"optim": {"type": "sgd"}},
    "adapters": {"model": {"lora": {"rank": 4, "modules_to_save": ["norm"], "dropout": 0.2}}},
    "in the host's memory": {"model": {"fsdp_cpu_offload": True}},
    "optimizer in the host's memory": {"model": {"optim_cpu_offload": True}},
    "written beside training": {"ckpt": {"save_async": True}},
}
TWINS = ("muon", "sgd", "optimizer in the host's memory")
"""Of which `tests/unit/trainer/optim` tests the state; here with the long tests."""


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model, recorded batches, and conversations."""
    root = tmp_path_factory.mktemp("resume")
    model = root / "model"
    model.mkdir()
    (model / "config.json").write_text(json.dumps(SHAPE))
    write_safetensors(hf_tensors(load_decoder(str(model), seed=3)), model)
    for step in range(ALL):
        BatchWriter(root / "rollouts").write(batch_of(step, 6))
    return root


def rl_config(root: Path, output_dir: Path, case: dict[str, Any], **more: Any) -> TrainerConfig:
    ckpt = {"interval": None, **case.get("ckpt", {}), **more.pop("ckpt", {})}
    return TrainerConfig.model_validate(
        {
            "output_dir": str(output_dir),
            "replay": str(root / "rollouts"),
            "max_steps": ALL,
            "device": "cpu",
            "optim": {"type": "adamw", "lr": 1e-3, **case.get("optim", {})},
            "scheduler": case.get("scheduler", {}) or {"type": "constant"},
            "ckpt": ckpt,
            **more,
            "model": {"name": str(root / "model"), "seq_len": 64, **case.get("model", {})},
        }
    )


def weights(output_dir: Path, step: int) -> dict[str, torch.Tensor]:
    return load_weights(RunPaths(output_dir).weights / f"step_{step}").tensors


def assert_same_to_the_last_bit(one: Path, two: Path) -> None:
    ours, theirs = weights(one, ALL), weights(two, ALL)
    assert ours.keys() == theirs.keys()
    for name, tensor in ours.items():
        assert torch.equal(tensor, theirs[name]), name
    rows = [read_metrics(RunPaths(path).metrics("trainer")) for path in (one, two)]
    for name in ("step", "loss/mean", "optim/grad_norm", "optim/lr", "progress/total_tokens", "progress/total_samples"):
        assert [row[name] for row in rows[0]] == [row[name] for row in rows[1]], name


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow) if name in TWINS else name for name in RL_CASES]
)
def test_ten_steps_and_ten_equal_twenty_fed_by_recorded_batches(root, tmp_path, name):
    case = RL_CASES[name]
    train_rl(rl_config(root, tmp_path / "whole", case))
    # Ten steps of the same run: a checkpoint in the middle, which a kill right behind it leaves.
    with killed_after(HALF):
        train_rl(rl_config(root, tmp_path / "halves", case, ckpt={"interval": HALF}))
    assert complete_checkpoints(tmp_path / "halves" / "checkpoints") == [HALF]
    train_rl(rl_config(root, tmp_path / "halves", case, ckpt={"interval": HALF, "resume_step": -1}))
    assert complete_checkpoints(tmp_path / "halves" / "checkpoints") == [HALF, ALL]
    assert_same_to_the_last_bit(tmp_path / "whole", tmp_path / "halves")
    consumed = [entry.step for entry in history(read_journal(RunPaths(tmp_path / "halves").journal))]
    assert consumed == list(range(ALL))


class Killed(BaseException):
    pass


@contextmanager
def killed_after(steps: int) -> Iterator[None]:
    """The training loop ends in the middle of the step behind so many, and finishes nothing."""
    step = build.Trainer._step

    def stepping(trainer, number: int) -> None:
        if number == steps + 1:
            trainer._keeper._writer.finish()  # a checkpoint that is being written would have come in time
            raise Killed
        step(trainer, number)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(build.Trainer, "_step", stepping)
        with pytest.raises(Killed):
            yield
    if dist.is_initialized():
        dist.destroy_process_group()


def sft_config(root: Path, output_dir: Path, data: dict[str, Any], **ckpt: Any) -> SFTConfig:
    return SFTConfig.model_validate(
        {
            "output_dir": str(output_dir),
            "max_steps": ALL,
            "device": "cpu",
            "model": {"name": str(root / "model"), "seq_len": 64},
            "data": {"batch_size": 3, "seq_len": 48, **data},
            "optim": {"type": "adamw", "lr": 1e-3},
            "scheduler": {"type": "linear", "warmup_steps": 2, "decay_steps": 5},
            "ckpt": {"interval": HALF, **ckpt},
        }
    )


@pytest.mark.parametrize("save_async", [False, True])
def test_ten_steps_and_ten_equal_twenty_of_sft(root, tmp_path, save_async):
    data = {"type": "fake", "length": "variable", "input_ids": "random"}
    train_sft(sft_config(root, tmp_path / "whole", data))
    with killed_after(HALF):
        train_sft(sft_config(root, tmp_path / "halves", data, save_async=save_async))
    train_sft(sft_config(root, tmp_path / "halves", data, resume_step=HALF, save_async=save_async))
    assert_same_to_the_last_bit(tmp_path / "whole", tmp_path / "halves")


def trained_on_ranks(ranks: Ranks, config: TrainerConfig) -> dict[str, npt.NDArray[np.float32]]:
    """What a rank of a test does: the trainer, on ranks that are joined already."""
    with pytest.MonkeyPatch.context() as patch:
        found: list[TrainedModel] = []
        loaded = build._loaded
        patch.setattr(build, "joined", lambda *args, **options: _already(ranks))
        patch.setattr(build, "_loaded", lambda *args: found.append(loaded(*args)) or found[-1])
        train_rl(config)
    tensors = {name: tensor.detach() for name, tensor in found[0].parameters.items()}
    return {
        name: (tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor).numpy()
        for name, tensor in tensors.items()
    }


@contextmanager
def _already(ranks: Ranks) -> Iterator[Ranks]:
    yield ranks


def distance(found: dict[str, Any], expected: dict[str, Any], start: dict[str, Any]) -> float:
    """How far weights are from the expected ones, as a share of how far those moved."""
    moved = sum(float(np.square(value - start[name]).sum()) for name, value in expected.items())
    off = sum(float(np.square(found[name] - value).sum()) for name, value in expected.items())
    assert moved > 0
    return float(np.sqrt(off / moved))


@pytest.mark.parametrize(("before", "after"), [(2, 1), (1, 2)])
def test_a_run_is_resumed_on_another_number_of_ranks(root, tmp_path, before, after):
    half = {"name": str(root / "model"), "seq_len": 64}
    common = {"model": half, "optim": {"type": "adamw", "lr": 1e-3}, "replay": str(root / "rollouts"), "device": "cpu"}

    def config(name: str, max_steps: int, **ckpt: Any) -> TrainerConfig:
        return TrainerConfig.model_validate(
            {**common, "output_dir": str(tmp_path / name), "max_steps": max_steps, "ckpt": {"interval": 4, **ckpt}}
        )

    (expected,) = on_ranks(1, trained_on_ranks, config("whole", 8))
    (first, *_) = on_ranks(before, trained_on_ranks, config("parts", 4, save_async=True))
    (found, *_) = on_ranks(after, trained_on_ranks, config("parts", 8, resume_step=-1))
    start = {
        name: tensor.detach().numpy() for name, tensor in load_decoder(str(root / "model"), seed=0).named_parameters()
    }
    assert distance(first, expected, start) > 0.1
    assert distance(found, expected, start) < TOLERANCE
    shards = list((tmp_path / "parts" / "checkpoints" / "step_4" / "trainer").glob("*.distcp"))
    assert len(shards) == before
    rows = read_metrics(RunPaths(tmp_path / "parts").metrics("trainer"))
    assert [row["step"] for row in rows] == list(range(8))
