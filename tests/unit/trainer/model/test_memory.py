import functools
import logging
import shutil
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed.tensor import DTensor

from prime_rl.config.trainer import TrainerModelConfig
from prime_rl.errors import ConfigError
from prime_rl.models.attention import PackedAttention
from prime_rl.models.decoder import Decoder
from prime_rl.models.packed_kernels import Kernel
from prime_rl.trainer.model import memory
from prime_rl.trainer.model.sharding import shard
from prime_rl.trainer.ranks import joined

CPU = torch.device("cpu")
SEQ_LENS = [9, 4, 9, 1]


class CountedAttention(PackedAttention):
    def __init__(self) -> None:
        super().__init__(SEQ_LENS)
        self.calls = 0

    def __call__(self, layer: int, q_THD: Tensor, k_TKD: Tensor, v_TKD: Tensor) -> Tensor:
        self.calls += 1
        return super().__call__(layer, q_THD, k_TKD, v_TKD)


class Run:
    """One forward and backward pass: values, gradients, what was kept between them, how often attention was called."""

    def __init__(self, decoder: Decoder) -> None:
        kept: dict[int, int] = {}
        own = {parameter.untyped_storage().data_ptr() for parameter in decoder.parameters()}

        def pack(tensor: Tensor) -> Tensor:
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in own:
                kept[storage.data_ptr()] = storage.nbytes()
            return tensor

        attention = CountedAttention()
        ids = torch.arange(sum(SEQ_LENS)) * 7 % decoder.vocab_size
        positions = torch.cat([torch.arange(length) for length in SEQ_LENS])
        decoder.zero_grad()
        with saved_tensors_hooks(pack, lambda tensor: tensor):
            self.hidden = decoder(ids, positions, attention)
        (self.hidden * torch.linspace(-1, 1, self.hidden.numel()).view_as(self.hidden)).sum().backward()
        self.gradients: Mapping[str, Tensor | None] = {
            name: None if parameter.grad is None else parameter.grad.clone()
            for name, parameter in decoder.named_parameters()
        }
        self.kept_bytes = sum(kept.values())
        self.attention_calls = attention.calls

    def assert_equals(self, other: "Run") -> None:
        assert torch.equal(self.hidden, other.hidden)
        assert self.gradients.keys() == other.gradients.keys()
        for name, gradient in self.gradients.items():
            assert gradient is not None
            assert torch.equal(gradient, other.gradients[name]), name


class Slices(torch.nn.Module):
    """What FSDP takes for the root of a decoder."""

    def __init__(self, decoder: Decoder) -> None:
        super().__init__()
        self.model = decoder

    def forward(self, *args: Any) -> Tensor:
        hidden: Tensor = self.model(*args)
        return hidden


def config(**keys: Any) -> TrainerModelConfig:
    return TrainerModelConfig.model_validate(keys)


@pytest.mark.parametrize(
    ("ac", "attention_calls"),
    [
        ({}, 2),
        ({"keep_attention": False}, 4),
        ({"keep_attention": False, "freq": 2}, 3),
        ({"mode": "selective", "targets": ["mlp"]}, 2),
        ({"mode": "selective", "targets": ["attn_proj"]}, 2),
        ({"mode": "selective", "targets": ["norm", "mlp", "attn_proj"]}, 2),
    ],
)
def test_recomputation_keeps_less_and_changes_no_bit(
    decoder: Decoder, ac: dict[str, Any], attention_calls: int
) -> None:
    names = [name for name, _ in decoder.named_parameters()]
    plain = Run(decoder)
    assert plain.attention_calls == 2
    memory.apply(decoder, config(ac=ac), CPU)
    recomputed = Run(decoder)
    recomputed.assert_equals(plain)
    assert recomputed.attention_calls == attention_calls
    assert recomputed.kept_bytes < 0.9 * plain.kept_bytes
    assert [name for name, _ in decoder.named_parameters()] == names


def test_whole_layers_train_adapters_behind_a_frozen_embedding(decoder: Decoder) -> None:
    for name, parameter in decoder.named_parameters():
        parameter.requires_grad_(".q_proj." in name or ".down_proj." in name)
    plain = Run(decoder)
    memory.apply(decoder, config(ac={"keep_attention": False}), CPU)
    recomputed = Run(decoder)
    assert torch.equal(recomputed.hidden, plain.hidden)
    trained = [name for name, gradient in recomputed.gradients.items() if gradient is not None]
    assert trained == [name for name, parameter in decoder.named_parameters() if parameter.requires_grad]
    for name in trained:
        assert torch.equal(recomputed.gradients[name], plain.gradients[name]), name  # type: ignore[arg-type]


def test_whole_layers_that_train_nothing_are_computed_once(decoder: Decoder) -> None:
    for name, parameter in decoder.named_parameters():
        parameter.requires_grad_(name == "model.norm.weight" or ".1." in name)
    plain = Run(decoder)
    memory.apply(decoder, config(ac={"keep_attention": False}), CPU)
    recomputed = Run(decoder)
    assert recomputed.attention_calls == 3
    for name, parameter in decoder.named_parameters():
        if parameter.requires_grad:
            assert torch.equal(recomputed.gradients[name], plain.gradients[name]), name  # type: ignore[arg-type]


def test_gradients_of_several_inputs_add_up_through_whole_layers(decoder: Decoder) -> None:
    def gradients() -> list[Tensor]:
        decoder.zero_grad()
        for start in (0, 5):
            ids = torch.arange(start, start + sum(SEQ_LENS)) * 7 % decoder.vocab_size
            positions = torch.cat([torch.arange(length) for length in SEQ_LENS])
            decoder(ids, positions, PackedAttention(SEQ_LENS)).square().sum().backward()
        return [parameter.grad.clone() for parameter in decoder.parameters() if parameter.grad is not None]

    plain = gradients()
    memory.apply(decoder, config(ac={"keep_attention": False}), CPU)
    assert all(torch.equal(a, b) for a, b in zip(gradients(), plain, strict=True))


def test_without_gradients_whole_layers_keep_nothing(decoder: Decoder) -> None:
    plain = Run(decoder)
    memory.apply(decoder, config(ac={"keep_attention": False}), CPU)
    ids, positions = (
        torch.arange(sum(SEQ_LENS)) * 7 % decoder.vocab_size,
        torch.cat([torch.arange(n) for n in SEQ_LENS]),
    )
    with torch.no_grad():
        hidden = decoder(ids, positions, PackedAttention(SEQ_LENS))
    assert torch.equal(hidden, plain.hidden)
    assert hidden.grad_fn is None


def test_recomputing_norms_alone_changes_no_bit(decoder: Decoder) -> None:
    plain = Run(decoder)
    memory.apply(decoder, config(ac={"mode": "selective"}), CPU)
    recomputed = Run(decoder)
    recomputed.assert_equals(plain)
    assert recomputed.kept_bytes <= plain.kept_bytes


def test_whole_layers_keep_less_than_layers_without_their_attention(decoder: Decoder) -> None:
    attention_kept, whole = ({"keep_attention": keep} for keep in (True, False))
    memory.apply(decoder, config(ac=attention_kept), CPU)
    more = Run(decoder).kept_bytes
    for block in decoder.blocks:
        for name in ("before", "after"):
            delattr(block, name)
    memory.apply(decoder, config(ac=whole), CPU)
    tokens, hidden, layers = sum(SEQ_LENS), decoder.config.hidden_size, len(decoder.blocks)
    # queries, keys, values and the mixed values of each layer
    attention_bytes = 4 * tokens * layers * (2 * decoder.config.num_heads + 2 * decoder.config.num_kv_heads) * 8
    less = Run(decoder).kept_bytes
    assert more - less >= attention_bytes
    assert less >= 4 * tokens * hidden * layers


def test_dropout_draws_the_same_numbers_when_it_is_computed_again(decoder: Decoder) -> None:
    for block in decoder.blocks:
        block.mlp.down_proj = torch.nn.Sequential(torch.nn.Dropout(0.5), block.mlp.down_proj)
    torch.manual_seed(3)
    plain = Run(decoder)
    memory.apply(decoder, config(ac={"keep_attention": False}), CPU)
    torch.manual_seed(3)
    Run(decoder).assert_equals(plain)


def test_offload_on_a_cpu_says_that_it_does_nothing_and_recomputes(
    decoder: Decoder, caplog: pytest.LogCaptureFixture
) -> None:
    plain = Run(decoder)
    with caplog.at_level(logging.WARNING, logger="prime_rl"):
        memory.apply(decoder, config(ac_offloading={}), CPU)
    assert "ac_offloading has no effect here" in caplog.text
    recomputed = Run(decoder)
    recomputed.assert_equals(plain)
    assert recomputed.kept_bytes < 0.9 * plain.kept_bytes
    assert decoder.kernel is Kernel.SDPA


@pytest.mark.parametrize(
    ("device", "dtype", "is_told"), [("cuda", "float32", True), ("cuda", "bfloat16", False), ("cpu", "float32", False)]
)
def test_32_bits_on_a_gpu_are_pointed_out(
    decoder: Decoder, caplog: pytest.LogCaptureFixture, device: str, dtype: str, is_told: bool
) -> None:
    attn = "varlen" if dtype == "bfloat16" else "auto"  # auto asks the GPU which it is
    memory.apply(decoder, config(optimization_dtype=dtype, attn=attn), torch.device(device))
    assert ("model.optimization_dtype is float32" in caplog.text) == is_told


@pytest.mark.parametrize("keys", [{"ac": {"mode": "selective"}}, {"compile": {"fullgraph": True}}])
def test_what_a_block_of_another_library_cannot_do_is_refused(decoder: Decoder, keys: dict[str, Any]) -> None:
    decoder.model.layers = torch.nn.ModuleList([torch.nn.Linear(2, 2)])
    with pytest.raises(ConfigError, match=r"set mode to full|drop fullgraph"):
        memory.apply(decoder, config(**keys), CPU)


def test_a_machine_without_a_compiler_is_told_before_the_first_step(
    decoder: Decoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", "")
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.delenv("CC", raising=False)
    with pytest.raises(ConfigError, match=r"needs a C\+\+ compiler on this machine.*drop \[model.compile\]"):
        memory.apply(decoder, config(compile={}), CPU)


@pytest.mark.parametrize("keep_attention", [True, False])
def test_layers_whose_weights_are_gathered_when_they_are_needed_recompute_alike(
    decoder: Decoder, keep_attention: bool
) -> None:
    def gradients(module: torch.nn.Module) -> list[Tensor]:
        ids = torch.arange(23) * 7 % decoder.vocab_size
        decoder.zero_grad()
        hidden = module(ids, torch.cat([torch.arange(length) for length in SEQ_LENS]), PackedAttention(SEQ_LENS))
        (hidden * torch.linspace(-1, 1, hidden.numel()).view_as(hidden)).sum().backward()
        found = [parameter.grad for parameter in decoder.parameters() if parameter.grad is not None]
        return [gradient.full_tensor() if isinstance(gradient, DTensor) else gradient.clone() for gradient in found]

    wanted = gradients(decoder)
    keys = config(ac={"keep_attention": keep_attention})
    memory.apply(decoder, keys, CPU)
    with joined(lambda: CPU, timeout=30, always=True) as ranks:
        root = Slices(decoder)
        shard(root, keys, ranks)  # type: ignore[arg-type]
        for _ in range(2):
            found = gradients(root)
            assert len(found) == len(wanted)
            assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))


@pytest.mark.slow
@pytest.mark.filterwarnings("default")  # torch compiles with warnings of its own
@pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile needs a C++ compiler")
def test_compiled_layers_give_the_values_and_gradients_of_eager_ones_and_share_their_code(decoder: Decoder) -> None:
    plain = Run(decoder)
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    memory.apply(decoder, config(compile={"fullgraph": True}, ac={}), CPU)
    compiled = Run(decoder)
    torch.testing.assert_close(compiled.hidden, plain.hidden, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(dict(compiled.gradients), dict(plain.gradients), rtol=1e-4, atol=1e-5)
    assert compiled.attention_calls == plain.attention_calls
    assert compiled.kept_bytes < 0.5 * plain.kept_bytes
    # Two layers, each with a part before and a part after attention: two graphs.
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 2
    torch._dynamo.reset()


@pytest.mark.slow
@pytest.mark.filterwarnings("default")  # torch compiles with warnings of its own
@pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile needs a C++ compiler")
def test_whole_layers_are_compiled_once_with_gradients_and_once_without(decoder: Decoder) -> None:
    plain = Run(decoder)
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    memory.apply(decoder, config(compile={"fullgraph": True}, ac={"keep_attention": False}), CPU)
    compiled = Run(decoder)
    torch.testing.assert_close(compiled.hidden, plain.hidden, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(dict(compiled.gradients), dict(plain.gradients), rtol=1e-4, atol=1e-5)
    assert compiled.attention_calls == 2 * plain.attention_calls
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 4
    with torch.no_grad():
        decoder(torch.arange(23), torch.arange(23), PackedAttention(SEQ_LENS))
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 4
    torch._dynamo.reset()


@pytest.mark.filterwarnings("default")  # torch compiles with warnings of its own
@pytest.mark.parametrize("ac", [{"freq": 2}, {"keep_attention": False, "freq": 2}])
def test_no_way_of_recomputing_needs_more_versions_of_a_layer_than_the_compiler_keeps(
    monkeypatch: pytest.MonkeyPatch, decoder: Decoder, ac: dict[str, Any]
) -> None:
    """Beyond its limit it would go on without compiling, or end the run in a step. tests/gpu has it with kernels.

    Most are needed where the first layer's input has no gradient, and not all layers are recomputed: 6 of 8.
    """
    versions = []

    def count(graph: torch.fx.GraphModule, _inputs: list[Tensor]) -> Any:
        versions.append(graph)
        return graph.forward

    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend=count))
    torch._dynamo.reset()
    for name, parameter in decoder.named_parameters():
        parameter.requires_grad_(".q_proj." in name or ".down_proj." in name)
    memory.apply(decoder, config(compile={"fullgraph": True}, ac=ac), CPU)

    def train(length: int) -> None:
        decoder(torch.arange(length), torch.arange(length), PackedAttention([length])).sum().backward()
        with torch.no_grad():
            decoder(torch.arange(length), torch.arange(length), PackedAttention([length]))

    with torch._dynamo.config.patch(fail_on_recompile_limit_hit=True):
        for length in (
            1,
            7,
            128,
            65,
        ):  # the compiler specialises on 1, then on the first other length, and then on none
            train(length)
        num_versions = len(versions)
        assert num_versions >= 4, "before and after, each for one token and for several"
        train(33)
    assert len(versions) == num_versions, "another length is nothing new"
