import pytest
import torch
from tests.doubles.ranks import on_ranks

from prime_rl.config.trainer import (
    LoRAConfig,
    SFTConfig,
    SFTFakeDataConfig,
    TrainerConfig,
    TrainerModelConfig,
    WeightsConfig,
)
from prime_rl.monitors.base import read_metrics
from prime_rl.paths import RunPaths
from prime_rl.trainer.build import patience, seed_dropout
from prime_rl.trainer.ranks import Ranks
from prime_rl.trainer.sft.train import run


@pytest.fixture
def losses(tmp_path, model_dir):
    """The losses of three steps with adapters of some dropout; by their second step, adapters are no longer 0."""

    def train(name: str, dropout: float) -> list[float]:
        config = SFTConfig(
            model=TrainerModelConfig(
                name=str(model_dir), seq_len=32, lora=LoRAConfig(rank=4, dropout=dropout, target_modules=["q_proj"])
            ),
            data=SFTFakeDataConfig(batch_size=2, seq_len=32),
            weights=WeightsConfig(interval=3),
            max_steps=3,
            device="cpu",
            output_dir=tmp_path / name,
        )
        run(config)
        return [row["loss/mean"] for row in read_metrics(RunPaths(config.output_dir).metrics("trainer"))]

    return train


def test_a_run_with_dropout_can_be_repeated(losses):
    torch.manual_seed(1)
    one = losses("one", 0.5)
    torch.manual_seed(2)
    assert losses("two", 0.5) == one
    assert losses("none", 0.0) != one


def masks(ranks: Ranks) -> tuple[list[float], list[float]]:
    drawn = []
    for _ in range(2):
        seed_dropout(7, ranks)
        drawn.append(torch.nn.functional.dropout(torch.ones(64), 0.5).tolist())
    return drawn[0], drawn[1]


def test_ranks_drop_different_elements_and_each_the_same_again():
    (first, first_again), (second, second_again) = on_ranks(2, masks)
    assert first == first_again != second == second_again


@pytest.mark.parametrize(("kind", "seconds"), [("filesystem", 60), ("auto", 60), ("nccl", 60 + 3 * 1200)])
def test_ranks_wait_for_as_long_as_the_first_may_for_others(kind, seconds):
    config = TrainerConfig.model_validate({"batch_timeout": 60, "weight_broadcast": {"type": kind}})
    assert patience(config) == seconds
