import gc
import weakref

import pytest
import torch
from torch import Tensor, nn

from prime_rl.config.trainer import TrainerModelConfig
from prime_rl.models.attention import PackedAttention
from prime_rl.models.decoder import Decoder
from prime_rl.trainer.model import memory
from prime_rl.trainer.model.offload import ActivationOffload

CPU = torch.device("cpu")


def gradients(decoder: Decoder) -> list[Tensor]:
    ids = torch.arange(20)
    decoder.zero_grad()
    hidden = decoder(ids, torch.cat([torch.arange(12), torch.arange(8)]), PackedAttention([12, 8]))
    (hidden * torch.linspace(-1, 1, hidden.numel()).view_as(hidden)).sum().backward()
    return [parameter.grad.clone() for parameter in decoder.parameters() if parameter.grad is not None]


@pytest.mark.parametrize("keep_attention", [True, False])
@pytest.mark.parametrize("max_inflight", [1, 50])
def test_offloaded_layers_give_the_gradients_of_layers_that_are_not(
    decoder: Decoder, keep_attention: bool, max_inflight: int
) -> None:
    wanted = gradients(decoder)
    ac = {"keep_attention": keep_attention}
    memory.apply(decoder, TrainerModelConfig.model_validate({"ac": ac}), CPU)
    offload = ActivationOffload(CPU, pin_memory=True, max_inflight=max_inflight, min_bytes=1)
    for block in decoder.blocks:
        block.forward = offload.wrap(block.forward)  # type: ignore[method-assign]
    for _ in range(2):
        moved_before = offload.num_moved
        found = gradients(decoder)
        assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))
        # A layer keeps its input; and with its attention q, k, v and the output, which is saved twice, and moved once.
        # (Of two groups of sequences those are gathered ones, and the output is put together from the two.)
        moved = offload.num_moved - moved_before
        assert moved == 2 if not keep_attention else moved > 2 * 5


def test_what_is_moved_leaves_the_device_once_the_copies_under_way_are_enough() -> None:
    offload = ActivationOffload(CPU, pin_memory=False, max_inflight=1, min_bytes=64)
    x = torch.randn(4, 16, requires_grad=True)

    def squares(x: Tensor) -> Tensor:
        return x * x

    forward = offload.wrap(squares)
    first = x * 2
    address = weakref.ref(first)
    out = forward(first)
    del first
    second = forward(out)  # its input pushes the first one out
    del out
    gc.collect()
    assert address() is None
    assert offload.num_moved == 2
    second.sum().backward()
    assert x.grad is not None
    torch.testing.assert_close(x.grad, 64 * x.detach() ** 3)


def test_shared_and_small_tensors_and_parameters_stay() -> None:
    offload = ActivationOffload(CPU, pin_memory=False, max_inflight=1, min_bytes=64)
    cos, weight = torch.randn(64), nn.Parameter(torch.randn(64))
    x, small = torch.randn(64, requires_grad=True), torch.randn(2, requires_grad=True)
    out = offload.wrap(lambda x, cos, *, small: (x * cos).sum() * weight.sum() * small.prod())(x, cos, small=small)
    out.backward()
    assert offload.num_moved == 0
    offload.wrap(lambda x: x * weight)(x).sum().backward()
    assert offload.num_moved == 1
    assert weight.grad is not None


def test_a_storage_at_the_address_of_one_that_is_gone_is_moved_anew() -> None:
    offload = ActivationOffload(CPU, pin_memory=False, max_inflight=1, min_bytes=64)
    forward = offload.wrap(lambda x: x * x)
    outs = []
    for number in range(1, 30):
        x = torch.full((1024,), float(number), requires_grad=True)
        outs.append((forward(x * 1.0), x, number))
    for out, x, number in outs:
        out.sum().backward()
        assert x.grad is not None
        assert torch.equal(x.grad, torch.full((1024,), 2.0 * number))
    assert offload.num_moved == 29
