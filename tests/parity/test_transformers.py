"""Ours equals transformers: logits and gradients, for every model type and every feature of its config."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, PretrainedConfig, Qwen2Config, Qwen3Config

from prime_rl.models.attention import PackedAttention
from prime_rl.models.decoder import Decoder
from prime_rl.models.hf import copy_assets, hf_tensors, load_decoder, write_safetensors

SHAPE: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
CONFIGS: dict[str, PretrainedConfig] = {
    "llama": LlamaConfig(**SHAPE, head_dim=16),
    "llama3-rope-tied": LlamaConfig(**SHAPE, head_dim=16, rope_parameters=LLAMA3_ROPE, tie_word_embeddings=True),
    "llama-bias": LlamaConfig(**SHAPE, head_dim=16, attention_bias=True, mlp_bias=True),
    "qwen2": Qwen2Config(**SHAPE),
    "qwen2-tied": Qwen2Config(**SHAPE, tie_word_embeddings=True),
    "qwen3": Qwen3Config(**SHAPE, head_dim=32),
    "qwen3-linear-rope": Qwen3Config(
        **SHAPE, head_dim=16, rope_parameters={"rope_type": "linear", "rope_theta": 5000.0, "factor": 4.0}
    ),
    "qwen3-bias-tied": Qwen3Config(**SHAPE, head_dim=16, attention_bias=True, tie_word_embeddings=True),
}
LENGTHS = [40, 7, 33, 1, 60]


def reference_model(config: PretrainedConfig, directory: Path) -> Any:
    """A saved transformers model whose logits have a standard deviation of at least 1, as trained models' do."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager", dtype=torch.float32)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.uniform_(0.5, 1.5)
            elif name.endswith("bias"):
                parameter.normal_(0.0, 0.5)
            else:
                parameter.normal_(0.0, 0.2)
    model.save_pretrained(directory)
    return model


def sequences() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(0, 97, (length,), generator=generator) for length in LENGTHS]


def packed_logits(decoder: Decoder, rows: list[torch.Tensor]) -> torch.Tensor:
    positions = torch.cat([torch.arange(len(row)) for row in rows])
    hidden = decoder(torch.cat(rows), positions, PackedAttention([len(row) for row in rows]))
    return decoder.logits(hidden)


def loss_of(logits: torch.Tensor, rows: list[torch.Tensor]) -> torch.Tensor:
    return torch.nn.functional.cross_entropy(logits, torch.cat(rows).roll(-1))


@pytest.mark.parametrize("name", CONFIGS)
def test_packed_logits_and_gradients_equal_those_of_transformers_row_by_row(name: str, tmp_path: Path) -> None:
    reference = reference_model(CONFIGS[name], tmp_path)
    decoder = load_decoder(str(tmp_path))
    rows = sequences()

    expected = torch.cat([reference(input_ids=row[None]).logits[0] for row in rows])
    actual = packed_logits(decoder, rows)

    assert expected.std() >= 1.0
    assert (actual - expected).abs().max() <= 1e-4 * expected.abs().max()
    loss_of(expected, rows).backward()
    loss_of(actual, rows).backward()
    wanted = {key: value.grad for key, value in reference.named_parameters()}
    found = {key: value.grad for key, value in decoder.named_parameters()}
    assert found.keys() == wanted.keys()
    for key, gradient in found.items():
        assert (gradient - wanted[key]).abs().max() <= 1e-3 * wanted[key].abs().max(), key


@pytest.mark.parametrize("name", CONFIGS)
def test_packed_equals_unpacked(name: str, tmp_path: Path) -> None:
    reference_model(CONFIGS[name], tmp_path)
    decoder = load_decoder(str(tmp_path))
    rows = sequences()

    with torch.no_grad():
        packed = packed_logits(decoder, rows)
        alone = torch.cat([packed_logits(decoder, [row]) for row in rows])

    assert torch.allclose(packed, alone, rtol=0, atol=2e-5 * float(alone.abs().max()))


@pytest.mark.parametrize("name", ["llama3-rope-tied", "qwen2", "qwen3-bias-tied"])
@pytest.mark.parametrize("max_shard_bytes", [10**9, 40_000])
def test_saved_weights_open_in_transformers_with_the_same_logits(
    name: str, max_shard_bytes: int, tmp_path: Path
) -> None:
    reference_model(CONFIGS[name], tmp_path / "in")
    decoder = load_decoder(str(tmp_path / "in"))
    with torch.no_grad():
        for parameter in decoder.parameters():
            parameter.mul_(1.1)  # as if trained, so that the test cannot pass by reading the first copy

    write_safetensors(hf_tensors(decoder), tmp_path / "out", max_shard_bytes)
    copy_assets(tmp_path / "in", tmp_path / "out")
    reopened = AutoModelForCausalLM.from_pretrained(tmp_path / "out", attn_implementation="eager", dtype=torch.float32)

    assert (tmp_path / "out" / "model.safetensors.index.json").exists() == (max_shard_bytes < 10**9)
    row = sequences()[0]
    with torch.no_grad():
        expected = reopened(input_ids=row[None]).logits[0]
        actual = packed_logits(decoder, [row])
    assert (actual - expected).abs().max() <= 1e-4 * expected.abs().max()


def test_configs_in_the_spelling_before_transformers_5_are_read(tmp_path: Path) -> None:
    reference = reference_model(CONFIGS["llama3-rope-tied"], tmp_path)
    path = tmp_path / "config.json"
    config = json.loads(path.read_text())
    rope = config.pop("rope_parameters")
    config["rope_theta"] = rope.pop("rope_theta")
    config["rope_scaling"] = rope
    path.write_text(json.dumps(config))

    row = sequences()[0]
    with torch.no_grad():
        expected = reference(input_ids=row[None]).logits[0]
        actual = packed_logits(load_decoder(str(tmp_path)), [row])
    assert (actual - expected).abs().max() <= 1e-4 * expected.abs().max()
