import pytest
import torch

from prime_rl.config.trainer import TrainerModelConfig
from prime_rl.errors import ConfigError
from prime_rl.models.hf import hf_tensors
from prime_rl.trainer.model.build import build_model
from prime_rl.trainer.ranks import ALONE


def build(model_dir, **model):
    return build_model(TrainerModelConfig(name=str(model_dir), **model), model_dir, ALONE, seed=7)


def test_the_values_are_those_of_the_files_and_masters_are_float32(decoder, model_dir):
    built = build(model_dir, optimization_dtype="bfloat16")
    expected = dict(hf_tensors(decoder))
    assert list(built.stored()) == list(expected) == list(built.parameters)
    for name, tensor in built.stored().items():
        assert torch.equal(tensor, expected[name]), name
    assert {parameter.dtype for parameter in built.model.parameters()} == {torch.bfloat16}


def test_of_frozen_weights_there_are_no_masters(decoder, model_dir):
    built = build(model_dir, optimization_dtype="bfloat16", lora={"rank": 2})
    assert built.parameters
    assert all("lora" in name for name in built.parameters)
    assert {parameter.dtype for parameter in built.parameters.values()} == {torch.float32}
    frozen = {name: tensor for name, tensor in built.stored().items() if name not in built.parameters}
    for name, tensor in hf_tensors(decoder):
        assert torch.equal(frozen[name], tensor.bfloat16()), name


def test_only_the_first_layers_are_kept_when_asked_for(decoder, model_dir):
    built = build(model_dir, debug={"num_layers": 1})
    expected = dict(hf_tensors(decoder))
    assert len(built.model.blocks) == 1
    assert set(built.stored()) == {name for name in expected if "layers.1." not in name}
    assert all(torch.equal(tensor, expected[name]) for name, tensor in built.stored().items())


def test_weights_are_drawn_from_the_seed_when_asked_for_although_there_are_some(decoder, model_dir, caplog):
    first, again = (build(model_dir, debug={"random_init": True}).stored() for _ in range(2))
    name = "model.embed_tokens.weight"
    assert torch.equal(first[name], again[name])
    assert not torch.equal(first[name], dict(hf_tensors(decoder))[name])
    assert "initialised at random from seed 7" in caplog.text


@pytest.mark.parametrize("impl", ["custom", "hf"])
def test_either_code_loads_the_same_values_under_the_same_names(decoder, model_dir, impl):
    stored = build(model_dir, impl=impl).stored()
    expected = dict(hf_tensors(decoder))
    assert set(stored) == set(expected)
    assert all(torch.equal(tensor, expected[name]) for name, tensor in stored.items())


@pytest.mark.parametrize("offload", [False, True])
def test_one_process_cannot_be_several_groups(model_dir, offload):
    with pytest.raises(ConfigError, match=r"model\.dp_replicate is 2, but (the trainer is one process|1 ranks)"):
        build(model_dir, dp_replicate=2, fsdp_cpu_offload=offload)
