import copy
from collections.abc import Iterator

import pytest
import torch
import torch.nn.functional as F
from peft import PeftModel
from safetensors.torch import load_file
from torch import Tensor
from transformers import Qwen3Config, Qwen3ForCausalLM

from prime_rl.config.trainer import LoRAConfig
from prime_rl.errors import ConfigError
from prime_rl.models.attention import PackedAttention
from prime_rl.models.decoder import Decoder, DecoderConfig
from prime_rl.models.hf import hf_tensors
from prime_rl.models.lora import AdapterConfig, Factors, merge, read_config
from prime_rl.trainer.model.adapters import LoRALinear, adapter_config, add_adapters, initial_adapter_tensors
from prime_rl.transport.weights import publish_adapter

SHAPE = DecoderConfig(
    model_type="qwen3", vocab_size=60, hidden_size=32, intermediate_size=48, num_layers=2, num_heads=4, num_kv_heads=2,
    head_dim=8, qk_norm=True,
)  # fmt: skip


def adapted(decoder: Decoder, *, seed: int = 1, **options: object) -> Decoder:
    """`decoder` itself, with adapters at their initial values."""
    add_adapters(decoder, LoRAConfig.model_validate({"rank": 4, "alpha": 12.0, **options}))
    with torch.no_grad():
        for name, tensor in initial_adapter_tensors(decoder, seed):
            decoder.get_parameter(name).copy_(tensor)
    return decoder


def train_a_little(decoder: Decoder) -> None:
    """Change whatever is trained, each by its own amount."""
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in decoder.parameters():
            if parameter.requires_grad:
                parameter += 0.1 * torch.randn(parameter.shape, generator=generator)


def logits(decoder: Decoder, tokens: Tensor) -> Tensor:
    length = len(tokens)
    return decoder.logits(decoder(tokens, torch.arange(length), PackedAttention((length,), tokens.device)))


def factors_in(decoder: Decoder) -> Factors:
    named = dict(decoder.named_parameters())
    modules = [name.removesuffix(".lora_A") for name in named if name.endswith(".lora_A")]
    return {module: (named[f"{module}.lora_A"].detach(), named[f"{module}.lora_B"].detach()) for module in modules}


def trained(decoder: Decoder) -> set[str]:
    return {name for name, parameter in decoder.named_parameters() if parameter.requires_grad}


@pytest.fixture
def untied() -> Decoder:
    torch.manual_seed(5)
    return Decoder(SHAPE)


TOKENS = torch.tensor([3, 1, 4, 1, 5, 9, 2, 6])


def test_only_the_adapters_are_trained_and_the_first_forward_is_the_models_own(decoder):
    before = logits(decoder, TOKENS)
    names = [name for name, _ in hf_tensors(decoder)]
    adapted(decoder)
    kinds = {name.rpartition(".")[2] for name in trained(decoder)}
    assert kinds == {"lora_A", "lora_B"}
    assert len(trained(decoder)) == 2 * 7 * 2, "two factors of seven matrices in two layers"
    assert [name for name, _ in hf_tensors(decoder) if not name.endswith(("lora_A", "lora_B"))] == names
    assert torch.equal(logits(decoder, TOKENS), before)


def test_the_forward_equals_that_of_the_merged_matrices(decoder):
    base = copy.deepcopy(decoder)
    train_a_little(adapted(decoder))
    merged = merge(
        hf_tensors(base), AdapterConfig(rank=4, alpha=12.0, target_modules="all-linear"), factors_in(decoder)
    )
    with torch.no_grad():
        for name, tensor in merged:
            base.get_parameter(name).copy_(tensor)
    torch.testing.assert_close(logits(decoder, TOKENS), logits(base, TOKENS), rtol=1e-4, atol=1e-4)


def test_gradients_of_the_factors_equal_those_of_the_formula():
    torch.manual_seed(0)
    layer = LoRALinear(torch.nn.Linear(6, 5), LoRAConfig(rank=2, alpha=3.0))
    with torch.no_grad():
        layer.lora_A.normal_()
        layer.lora_B.normal_()
    x, up = torch.randn(7, 6, requires_grad=True), torch.randn(7, 5)
    layer(x).backward(up)
    expected = 1.5 * up.t() @ (x @ layer.lora_A.t())
    torch.testing.assert_close(layer.lora_B.grad, expected)
    torch.testing.assert_close(layer.lora_A.grad, 1.5 * (up @ layer.lora_B).t() @ x)
    torch.testing.assert_close(x.grad, up @ (layer.weight + 1.5 * layer.lora_B @ layer.lora_A))


def test_a_row_of_batches_goes_through_as_its_rows_do():
    layer = LoRALinear(torch.nn.Linear(6, 5), LoRAConfig(rank=2))
    with torch.no_grad():
        layer.lora_A.normal_()
        layer.lora_B.normal_()
    x = torch.randn(2, 3, 6)
    torch.testing.assert_close(layer(x), layer(x.view(6, 6)).view(2, 3, 5))


def test_dropout_is_of_the_adapters_input_and_in_training_alone():
    torch.manual_seed(0)
    layer = LoRALinear(torch.nn.Linear(64, 3, bias=False), LoRAConfig(rank=2, alpha=2.0, dropout=0.5))
    with torch.no_grad():
        layer.lora_A.normal_()
        layer.lora_B.normal_()
    x = torch.randn(4, 64)
    torch.manual_seed(9)
    dropped = layer(x)
    torch.manual_seed(9)
    kept = F.dropout(x, 0.5)
    assert 80 < int((kept == 0).sum()) < 176
    torch.testing.assert_close(dropped, x @ layer.weight.t() + kept @ layer.lora_A.t() @ layer.lora_B.t())
    torch.testing.assert_close(layer.eval()(x), x @ (layer.weight + layer.lora_B @ layer.lora_A).t())


def test_initial_factors_depend_on_the_seed_and_their_name_alone(decoder):
    few, all_of_them = copy.deepcopy(decoder), copy.deepcopy(decoder)
    one = dict(initial_adapter_tensors(adapted(few, target_modules=("q_proj",)), 7))
    two = dict(initial_adapter_tensors(adapted(all_of_them), 7))
    other = dict(initial_adapter_tensors(all_of_them, 8))
    assert all(torch.equal(tensor, two[name]) for name, tensor in one.items())
    first, second = ("model.layers.0.self_attn.q_proj.lora_A", "model.layers.1.self_attn.q_proj.lora_A")
    assert not torch.equal(two[first], other[first])
    assert not torch.equal(two[first], two[second])
    assert float(two[first].abs().max()) <= 32**-0.5
    assert float(two[first].std()) == pytest.approx(32**-0.5 / 3**0.5, rel=0.2)
    assert not any(tensor.any() for name, tensor in two.items() if name.endswith("lora_B"))


def test_targets_are_ends_of_names_or_regular_expressions(decoder):
    adapted(decoder, target_modules=("q_proj", r"model\.layers\.1\.mlp\..*"))
    modules = {name.rpartition(".")[0] for name in trained(decoder)}
    assert modules == {
        *(f"model.layers.{layer}.self_attn.q_proj" for layer in (0, 1)),
        *(f"model.layers.1.mlp.{kind}_proj" for kind in ("gate", "up", "down")),
    }


def test_published_targets_are_short_where_that_says_it(decoder):
    few, part = copy.deepcopy(decoder), copy.deepcopy(decoder)
    config = LoRAConfig(target_modules=("v_proj", "mlp.up_proj"))
    add_adapters(few, config)
    assert adapter_config(few, config).target_modules == ("up_proj", "v_proj")
    config = LoRAConfig(target_modules=(r".*layers\.1.*q_proj",))
    add_adapters(part, config)
    assert adapter_config(part, config).target_modules == ("model.layers.1.self_attn.q_proj",)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"target_modules": ("qkv_proj",)}, "'qkv_proj' is no linear layer of the model; it has down_proj, gate_proj"),
        ({"target_modules": ("experts",)}, "matches nothing in the model, which has down_proj, gate"),
        ({"target_modules": ("q_proj", "(")}, r"'\(' is neither a module's name nor a regular expression"),
        ({"target_modules": (".*",)}, "takes in lm_head, which cannot have an adapter"),
        ({"modules_to_save": ("wte",)}, "modules_to_save: 'wte' is no module of the model"),
        ({"modules_to_save": ("q_proj",)}, "q_proj in both target_modules and modules_to_save"),
    ],
)
def test_names_that_cannot_be_trained_are_told_with_those_that_can(untied, options, says):
    with pytest.raises(ConfigError, match=says):
        add_adapters(untied, LoRAConfig.model_validate(options))


def test_nothing_is_allocated_on_the_meta_device(untied):
    empty = copy.deepcopy(untied).to("meta")
    add_adapters(empty, LoRAConfig(rank=4))
    assert all(parameter.is_meta for parameter in empty.parameters())


def hugging_face(decoder: Decoder) -> Qwen3ForCausalLM:
    """The base of `decoder` in transformers."""
    shape = decoder.config
    model = Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=shape.vocab_size, hidden_size=shape.hidden_size, intermediate_size=shape.intermediate_size,
            num_hidden_layers=shape.num_layers, num_attention_heads=shape.num_heads,
            num_key_value_heads=shape.num_kv_heads, head_dim=shape.head_dim, tie_word_embeddings=shape.tie_embeddings,
            attn_implementation="eager",
        )
    )  # fmt: skip
    missing, unexpected = model.load_state_dict(dict(hf_tensors(decoder)), strict=False)
    assert (missing, unexpected) == (["lm_head.weight"] if shape.tie_embeddings else [], [])
    return model.eval()


def saved_in(decoder: Decoder) -> Iterator[tuple[str, Tensor]]:
    for name, parameter in decoder.named_parameters():
        if parameter.requires_grad and not name.endswith(("lora_A", "lora_B")):
            yield name, parameter.detach()


# peft 0.21 asks transformers 5.23 by an older name.
@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
@pytest.mark.filterwarnings("ignore:Model has `tie_word_embeddings=True`:UserWarning")
@pytest.mark.parametrize(
    ("is_tied", "options"),
    [
        (True, {}),
        (False, {"target_modules": (r".*\.1\..*_proj",)}),
        (False, {"modules_to_save": ("lm_head", "model.norm")}),
        (True, {"modules_to_save": ("embed_tokens", "q_norm")}),
    ],
)
def test_peft_loads_what_is_published_and_gives_the_same_logits(request, tmp_path, is_tied, options):
    decoder = request.getfixturevalue("decoder" if is_tied else "untied")
    base = hugging_face(decoder)
    train_a_little(adapted(decoder, **options))
    config = adapter_config(decoder, LoRAConfig.model_validate({"rank": 4, "alpha": 12.0, **options}))
    saved = dict(saved_in(decoder))
    if is_tied and saved:
        saved["lm_head.weight"] = saved["model.embed_tokens.weight"]
    directory = publish_adapter(config, factors_in(decoder), step=1, weights_dir=tmp_path, base_model="x", saved=saved)
    assert all(".0.weight" not in name for name in load_file(directory / "adapter_model.safetensors"))
    if not saved:
        assert read_config(directory).target_modules == config.target_modules
    plain = base(TOKENS[None]).logits[0]
    peft = PeftModel.from_pretrained(base, directory).eval()
    found = peft(TOKENS[None]).logits[0]
    expected = logits(decoder, TOKENS)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    assert not torch.allclose(plain, expected, atol=0.1)
