import pytest
import torch
from torch import nn

from prime_rl.errors import InferenceError
from prime_rl.inference.vllm.served import served_tensors, served_types, without_adapters


class Joined(nn.Module):
    """Several matrices in one, as vLLM's layers have them."""

    def __init__(self, sizes, num_inputs):
        super().__init__()
        self.output_sizes = list(sizes)
        self.input_size = num_inputs
        self.weight = nn.Parameter(torch.randn(sum(sizes), num_inputs))
        self.bias = nn.Parameter(torch.randn(sum(sizes)))


class Embedding(nn.Module):
    def __init__(self):
        super().__init__()
        self.org_vocab_size = 5
        self.weight = nn.Parameter(torch.randn(8, 4))


class Model(nn.Module):
    packed_modules_mapping = {"qkv_proj": ["q_proj", "k_proj", "v_proj"]}

    def __init__(self):
        super().__init__()
        self.embed_tokens = Embedding()
        self.attn = nn.Module()
        self.attn.qkv_proj = Joined([4, 2, 2], 4)
        self.attn.o_proj = nn.Linear(4, 4, bias=False)
        self.head = self.embed_tokens


def test_joined_matrices_are_cut_and_paddings_left_out():
    model = Model()
    served = dict(served_tensors(model))
    joined = model.attn.qkv_proj
    assert set(served) == {
        "embed_tokens.weight",
        *(f"attn.{part}.{kind}" for part in ("q_proj", "k_proj", "v_proj") for kind in ("weight", "bias")),
        "attn.o_proj.weight",
    }
    assert torch.equal(served["embed_tokens.weight"], model.embed_tokens.weight[:5])
    assert torch.equal(served["attn.k_proj.weight"], joined.weight[4:6])
    assert torch.equal(served["attn.v_proj.bias"], joined.bias[6:])


def test_a_packed_weight_is_read_through_its_own_kernel_exactly():
    model = Model()
    layer = model.attn.qkv_proj
    packed = layer.weight.detach().clone()
    layer.params_dtype = torch.float32
    layer.cpu_linear = lambda x, weight, bias: nn.functional.linear(x, packed, bias)
    layer.weight = nn.Parameter(torch.empty(0), requires_grad=False)
    served = dict(served_tensors(model))
    assert torch.equal(served["attn.q_proj.weight"], packed[:4])
    assert served_types(model) == {name: tensor.dtype for name, tensor in served.items()}


def test_types_are_known_of_every_tensor_that_is_served():
    model = Model().bfloat16()
    model.attn.o_proj.float()
    model.attn.qkv_proj.bias.data = model.attn.qkv_proj.bias.data.half()
    assert served_types(model) == {name: tensor.dtype for name, tensor in served_tensors(model)}
    assert len(set(served_types(model).values())) == 3


def test_a_packed_weight_without_a_kernel_to_ask_is_said_so():
    model = Model()
    model.attn.o_proj.weight = nn.Parameter(torch.empty(0))
    with pytest.raises(InferenceError, match=r"attn\.o_proj\.weight, which cannot be read back"):
        dict(served_tensors(model))


def test_a_matrix_that_cannot_be_cut_is_named():
    model = Model()
    model.attn.qkv_proj.output_sizes = [4, 2]
    with pytest.raises(InferenceError, match=r"attn\.qkv_proj\.weight"):
        dict(served_tensors(model))


def test_joined_experts_are_not_read_back():
    model = Model()
    model.experts = nn.Module()
    model.experts.w13_weight = nn.Parameter(torch.randn(2, 3, 4))
    with pytest.raises(InferenceError, match="experts"):
        dict(served_tensors(model))


class WithAdapters(nn.Module):
    def __init__(self, base):
        super().__init__()
        self.base_layer = base
        self.lora_a_stacked = (torch.zeros(1),)


def test_layers_that_are_wrapped_for_adapters_have_their_own_names_meanwhile():
    model = Model()
    plain = {name: tensor.clone() for name, tensor in served_tensors(model)}
    wrapper = WithAdapters(model.attn.qkv_proj)
    model.attn.qkv_proj = wrapper
    with without_adapters(model):
        served = dict(served_tensors(model))
    assert served.keys() == plain.keys()
    assert all(torch.equal(served[name], plain[name]) for name in plain)
    assert model.attn.qkv_proj is wrapper
