import pytest

from prime_rl.config.trainer import SFTConfig, TrainerConfig


def test_the_trainer_has_no_data_to_start_anew():
    with pytest.raises(ValueError, match="the trainer has no data of its own"):
        TrainerConfig.model_validate({"ckpt": {"skip_dataloader": True}})
    assert SFTConfig.model_validate({"ckpt": {"skip_dataloader": True}}).ckpt is not None


def test_batches_are_recorded_or_made_up_and_not_both():
    with pytest.raises(ValueError, match="batches are either recorded or made up"):
        TrainerConfig.model_validate({"replay": "outputs/rollouts", "data": {"fake": {}}})
