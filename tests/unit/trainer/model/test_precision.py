import math

import pytest
import torch

from prime_rl.config.trainer import LossConfig
from prime_rl.models.attention import PackedAttention
from prime_rl.models.hf import empty_decoder, load_hf_tensors
from prime_rl.trainer.model.precision import ComputeModel
from prime_rl.trainer.model.scoring import Scorer
from prime_rl.trainer.rl.loss import build_loss
from prime_rl.trainer.trainer import accumulate_gradients


def test_in_float32_the_masters_themselves_are_used(decoder):
    compute = ComputeModel(Scorer(decoder), torch.float32)
    assert compute.model is decoder
    for name, parameter in decoder.named_parameters():
        assert compute.parameters[name] is parameter
        assert compute.stored()[name].data_ptr() == parameter.data_ptr()
    compute.refresh()
    compute.collect()


def test_bfloat16_comes_close_to_float32_and_leaves_gradients_in_float32(decoder, make_batch):
    loss, batch = build_loss(LossConfig()), make_batch(count=9, seq_len=40)
    exact = accumulate_gradients(ComputeModel(Scorer(decoder), torch.float32), loss, batch)
    expected = {name: parameter.grad for name, parameter in decoder.named_parameters()}
    decoder.zero_grad(set_to_none=True)
    compute = ComputeModel(Scorer(decoder), torch.bfloat16)
    rough = accumulate_gradients(compute, loss, batch)
    assert len(batch.micro_batches) > 1
    assert rough.metrics["entropy/mean"] == pytest.approx(exact.metrics["entropy/mean"], rel=0.02)
    assert rough.metrics["entropy/mean"] != exact.metrics["entropy/mean"]
    assert math.fsum(rough.per_micro_batch) == pytest.approx(math.fsum(exact.per_micro_batch), rel=0.2)
    for name, parameter in compute.parameters.items():
        assert parameter.dtype == parameter.grad.dtype == torch.float32
        similarity = torch.cosine_similarity(parameter.grad.flatten(), expected[name].flatten(), dim=0)
        assert similarity > 0.98, name
    assert all(parameter.grad is None for parameter in compute.model.parameters())


def test_the_copy_computes_exactly_what_an_engine_with_the_published_weights_does(decoder):
    compute = ComputeModel(Scorer(decoder), torch.bfloat16)
    with torch.no_grad():
        compute.parameters["model.norm.weight"].mul_(1.37)
    compute.refresh()
    engine = empty_decoder(decoder.config, device="cpu", dtype=torch.bfloat16)
    load_hf_tensors(engine, ((name, tensor.bfloat16()) for name, tensor in compute.stored().items()))
    ids, positions = torch.arange(9), torch.arange(9)
    with torch.no_grad():
        ours = compute.model(ids, positions, PackedAttention([9]))
        theirs = engine(ids, positions, PackedAttention([9]))
    assert torch.equal(ours, theirs)


def test_what_is_frozen_exists_once_and_is_neither_trained_nor_left_out_of_what_is_stored(decoder, make_batch):
    expected = decoder.model.norm.weight.detach().bfloat16()
    decoder.model.norm.weight.requires_grad_(False)
    compute = ComputeModel(Scorer(decoder), torch.bfloat16)
    accumulate_gradients(compute, build_loss(LossConfig()), make_batch())
    stored = compute.stored()
    assert list(stored) == [name for name, _ in decoder.named_parameters()]
    assert set(stored) - set(compute.parameters) == {"model.norm.weight"}
    assert torch.equal(stored["model.norm.weight"], expected)
    assert stored["model.norm.weight"].data_ptr() == decoder.model.norm.weight.data_ptr()
    assert {tensor.dtype for name, tensor in stored.items() if name in compute.parameters} == {torch.float32}
