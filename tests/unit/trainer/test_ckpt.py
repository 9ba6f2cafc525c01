import pytest
import torch
from tests.doubles.disks import small_disk

from prime_rl.config.optim import AdamWConfig
from prime_rl.errors import ArtifactError, DiskError
from prime_rl.models.decoder import DecoderConfig
from prime_rl.models.hf import empty_decoder, initial_tensors, load_hf_tensors
from prime_rl.trainer.checkpoints.writer import CheckpointWriter, Contents
from prime_rl.trainer.ckpt import Record, load_state, save_state, state_of
from prime_rl.trainer.model.precision import ComputeModel
from prime_rl.trainer.model.scoring import Scorer
from prime_rl.trainer.optim.optimizer import build_optimizer
from prime_rl.trainer.ranks import ALONE
from prime_rl.transport.checkpoints import complete_checkpoints, verify


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


def no_word() -> None:
    pass


def contents(final) -> Contents:
    record = Record(
        step=1, schedule_step=1, total_tokens=0, total_samples=0, num_skipped=0, has_optimizer=False, chance=[]
    )
    return Contents(final=final, record=record, orchestrator=lambda: b"state", begun=no_word, complete=no_word)


@pytest.mark.parametrize("num_elements", [1 << 20, 100_000], ids=["in a tensor", "at its end"])
def test_a_checkpoint_that_a_full_disk_refuses_is_said_in_words_and_leaves_those_before_it(tmp_path, num_elements):
    with small_disk(tmp_path / "disk", mib=2) as disk:
        root = disk.root / "checkpoints"
        writer = CheckpointWriter(ALONE)
        small = {"model": {"weight": torch.ones(10)}}
        writer.save(small, contents(root / "step_1"), in_background=False)
        disk.fill(leave_bytes=1 << 18)
        large = {"model": {"first": torch.ones(num_elements), "second": torch.ones(3 * num_elements)}}
        with pytest.raises(DiskError, match=r"cannot write .*/checkpoints/step_2: the disk is full \(.*MiB are free\)"):
            writer.save(large, contents(root / "step_2"), in_background=False)
        assert [path.name for path in root.iterdir()] == ["step_1"]
        verify(root / "step_1")
        disk.free()
        writer.save(small, contents(root / "step_2"), in_background=False)
        writer.close()
        assert complete_checkpoints(root) == [1, 2]
