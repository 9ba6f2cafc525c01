import pytest
import torch

from prime_rl.config.trainer import AdamWConfig
from prime_rl.errors import ArtifactError
from prime_rl.models.decoder import DecoderConfig
from prime_rl.models.hf import empty_decoder, initial_tensors, load_hf_tensors
from prime_rl.trainer.ckpt import load_state, save_state, state_of
from prime_rl.trainer.model.precision import ComputeModel
from prime_rl.trainer.model.scoring import Scorer
from prime_rl.trainer.optim.optimizer import build_optimizer


def training(config: DecoderConfig, *, seed: int):
    model = empty_decoder(config, device="cpu", dtype=torch.float32)
    load_hf_tensors(model, initial_tensors(config, seed))
    compute = ComputeModel(Scorer(model), torch.bfloat16)
    return compute, build_optimizer(compute.parameters.items(), AdamWConfig(lr=0.1), lambda step: 0.1)


def step(compute: ComputeModel, optimizer, number: int) -> None:
    for index, parameter in enumerate(compute.parameters.values()):
        parameter.grad = torch.full_like(parameter, 0.01 * (index + number + 1))
    optimizer.apply(number)


def test_what_was_saved_goes_on_as_if_it_had_never_ended(decoder, tmp_path):
    ours, optimizer = training(decoder.config, seed=1)
    step(ours, optimizer, 0)
    save_state(tmp_path / "state", state_of(ours, optimizer))
    step(ours, optimizer, 1)
    theirs, other = training(decoder.config, seed=2)
    load_state(tmp_path / "state", theirs, other)
    step(theirs, other, 1)
    for name, parameter in ours.parameters.items():
        assert parameter.dtype == torch.float32
        assert torch.equal(parameter, theirs.parameters[name]), name


def test_the_state_of_another_model_is_refused(decoder, tmp_path):
    save_state(tmp_path / "state", state_of(*training(decoder.config, seed=1)))
    wider = DecoderConfig(
        **{name: getattr(decoder.config, name) for name in DecoderConfig.__dataclass_fields__} | {"vocab_size": 301}
    )
    with pytest.raises(ArtifactError, match="or it is that of another model"):
        load_state(tmp_path / "state", *training(wider, seed=1))


def test_a_state_that_is_not_there_is_named(decoder, tmp_path):
    with pytest.raises(ArtifactError, match=r"cannot read the trainer's state from .*nothing"):
        load_state(tmp_path / "nothing", *training(decoder.config, seed=1))
