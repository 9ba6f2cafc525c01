"""`impl = "hf"`: a model of transformers equals itself computed document by document, packed or side by side."""

import functools
import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from prime_rl.config.trainer import ActivationCheckpointConfig, TrainerModelConfig
from prime_rl.errors import ModelError
from prime_rl.models.attention import PackedAttention
from prime_rl.models.decoder import Decoder
from prime_rl.models.hf import (
    chosen_impl,
    copy_assets,
    load_decoder,
    load_hf_tensors,
    read_safetensors,
    write_safetensors,
)
from prime_rl.models.language_model import LanguageModel
from prime_rl.models.local_attention import _PIECE
from prime_rl.models.transformers_model import TransformersModel, empty_transformers_model
from prime_rl.trainer.model import memory

SHAPE: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 1024,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
GPT2 = {
    "n_embd": 32,
    "n_head": 4,
    "n_layer": 2,
    "n_positions": 64,
    "vocab_size": 97,
    "eos_token_id": 2,
    "bos_token_id": 1,
}
PACKED: dict[str, dict[str, Any]] = {
    "gemma2": {  # scores and logits capped, every other layer with a window, a scale of its own
        **{"head_dim": 8, "sliding_window": 6, "query_pre_attn_scalar": 32},
        **{"attn_logit_softcapping": 5.0, "final_logit_softcapping": 3.0},
    },
    "mistral": {"sliding_window": 5},
    "phi3": {},  # one matrix for queries, keys and values
    "granite": {"logits_scaling": 8.0, "attention_multiplier": 0.3, "residual_multiplier": 0.5},
    "gpt2": {"attn_pdrop": 0.1, "resid_pdrop": 0.1},  # learned positions, tied, dropout
    "gpt_oss": {
        "num_local_experts": 4,
        "head_dim": 8,
        "sliding_window": 4,
        "rope_parameters": {"rope_theta": 1e4, "rope_type": "default"},
    },
}
SIDE_BY_SIDE: dict[str, tuple[dict[str, Any], str]] = {
    "mamba": ({"state_size": 4}, "carry a state along the row"),
    "lfm2": ({"layer_types": ["conv", "full_attention"]}, "carry a state along the row"),
    "nemotron": ({}, "do not tell its attention"),
}
LENGTHS = [7, 12, 3, 12, 1]


def saved(model_type: str, changes: dict[str, Any], directory: Path) -> Any:
    """A transformers model with random weights, and its directory."""
    config = AutoConfig.for_model(model_type, **(GPT2 if model_type == "gpt2" else SHAPE), **changes)
    torch.manual_seed(0)
    reference = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="eager").eval()
    with torch.no_grad():
        for parameter in reference.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
    reference.config.save_pretrained(directory)
    write_safetensors(((name, parameter.detach()) for name, parameter in reference.named_parameters()), directory)
    return reference


def loaded(directory: Path) -> TransformersModel:
    model = empty_transformers_model(directory, dtype=torch.float32)
    assert all(parameter.is_meta for parameter in model.parameters())
    model.to_empty(device="cpu")
    load_hf_tensors(model, read_safetensors(directory))
    return model


def documents(lengths: list[int]) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(3, 97, (length,), generator=generator) for length in lengths]


def logits_of(model: LanguageModel, rows: list[Tensor]) -> Tensor:
    positions = torch.cat([torch.arange(len(row)) for row in rows])
    logits = model(torch.cat(rows), positions, PackedAttention([len(row) for row in rows])) @ model.head_weight.T
    cap = model.logit_softcap
    return logits if cap is None else cap * torch.tanh(logits / cap)


def compare(model: TransformersModel, reference: Any, rows: list[Tensor]) -> None:
    """Logits, and gradients under the library's names."""
    found = logits_of(model, rows)
    expected = torch.cat([reference(input_ids=row[None], use_cache=False).logits[0] for row in rows])
    assert expected.std() > 0.1
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    weights = torch.linspace(-1, 1, 97)
    (found * weights).square().mean().backward()
    (expected * weights).square().mean().backward()
    gradients = {name: parameter.grad for name, parameter in reference.named_parameters()}
    assert dict(model.named_parameters()).keys() == gradients.keys()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(
            parameter.grad, gradients[name], rtol=1e-3, atol=1e-5, msg=lambda text, n=name: n + text
        )


@pytest.mark.parametrize("model_type", PACKED)
def test_a_packed_row_equals_transformers_document_by_document(model_type: str, tmp_path: Path) -> None:
    reference = saved(model_type, PACKED[model_type], tmp_path)
    assert chosen_impl(tmp_path, "auto") == "hf"
    model = loaded(tmp_path)
    assert model.is_packed
    assert (model.vocab_size, len(model.blocks)) == (97, 2)
    compare(model, reference, documents(LENGTHS))


@pytest.mark.parametrize("model_type", SIDE_BY_SIDE)
def test_documents_that_cannot_be_packed_are_computed_side_by_side_and_it_is_said(
    model_type: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    changes, reason = SIDE_BY_SIDE[model_type]
    reference = saved(model_type, changes, tmp_path)
    with caplog.at_level(logging.WARNING, "prime_rl"):
        model = loaded(tmp_path)
    assert not model.is_packed
    assert reason in caplog.text
    compare(model, reference, documents(LENGTHS))


def test_a_window_is_kept_where_a_document_is_longer_than_a_piece_of_the_computation(tmp_path: Path) -> None:
    reference = saved("mistral", {"sliding_window": 300}, tmp_path)
    compare(loaded(tmp_path), reference, documents([2 * _PIECE - 40, 5]))


@pytest.mark.parametrize("tied", [True, False])
def test_the_library_and_our_decoder_are_the_same_model(tied: bool, tmp_path: Path) -> None:
    saved("qwen3", {"head_dim": 16, "tie_word_embeddings": tied}, tmp_path)
    assert chosen_impl(tmp_path, "auto") == "custom"
    theirs, ours = loaded(tmp_path), load_decoder(str(tmp_path))
    assert isinstance(ours, Decoder)
    assert {name for name, _ in theirs.named_parameters()} == {name for name, _ in ours.named_parameters()}
    rows = documents(LENGTHS)
    torch.testing.assert_close(logits_of(theirs, rows), logits_of(ours, rows), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("model_type", ["gemma2", "mamba"])
def test_computing_layers_again_changes_nothing(model_type: str, tmp_path: Path) -> None:
    reference = saved(model_type, PACKED.get(model_type) or SIDE_BY_SIDE[model_type][0], tmp_path)
    model = loaded(tmp_path)
    memory.apply(model, TrainerModelConfig(ac=ActivationCheckpointConfig()), torch.device("cpu"))
    compare(model, reference, documents(LENGTHS))


def test_weights_drawn_from_a_seed_are_the_librarys_and_fill_the_model(tmp_path: Path) -> None:
    saved("phi3", {}, tmp_path)
    model = empty_transformers_model(tmp_path, dtype=torch.float32, num_layers=1)
    first, again, other = (dict(model.initial_tensors(seed)) for seed in (3, 3, 4))
    assert first.keys() == {name for name, _ in model.named_parameters()}
    assert len(model.blocks) == 1
    name = "model.layers.0.mlp.down_proj.weight"
    assert torch.equal(first[name], again[name])
    assert not torch.equal(first[name], other[name])
    assert first[name].std() == pytest.approx(0.02, rel=0.1)


@pytest.mark.parametrize(
    ("model_type", "changes", "message"),
    [
        ("qwen3_moe", {"num_experts": 4, "moe_intermediate_size": 16}, "laid out otherwise in files"),
        ("phi", {}, "has a bias"),
        ("opt", {}, "does not show how it makes its logits"),
    ],
)
def test_what_would_be_trained_wrongly_is_refused(
    model_type: str, changes: dict[str, Any], message: str, tmp_path: Path
) -> None:
    AutoConfig.for_model(model_type, **(SHAPE | changes)).save_pretrained(tmp_path)
    with pytest.raises(ModelError, match=message):
        empty_transformers_model(tmp_path, dtype=torch.float32)


def test_a_config_that_transformers_does_not_know_is_refused_with_its_directory(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "nobody"}')
    with pytest.raises(ModelError, match=f"{tmp_path}: transformers cannot read"):
        empty_transformers_model(tmp_path, dtype=torch.float32)


def test_code_that_comes_with_a_model_runs_only_where_it_is_trusted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    source = tmp_path / "model"
    reference = saved("mistral", {"sliding_window": 4}, source)
    (source / "ours.py").write_text(
        "from transformers import MistralConfig, MistralForCausalLM\n"
        "class OursConfig(MistralConfig):\n    model_type = 'ours'\n"
        "class OursForCausalLM(MistralForCausalLM):\n    config_class = OursConfig\n"
    )
    config = json.loads((source / "config.json").read_text()) | {"model_type": "ours"}
    config["auto_map"] = {"AutoConfig": "ours.OursConfig", "AutoModelForCausalLM": "ours.OursForCausalLM"}
    (source / "config.json").write_text(json.dumps(config))

    assert chosen_impl(source, "auto", trust_remote_code=True) == "hf"
    with pytest.raises(ModelError, match="trust_remote_code"):
        empty_transformers_model(source, dtype=torch.float32)
    model = empty_transformers_model(source, dtype=torch.float32, trust_remote_code=True)
    model.to_empty(device="cpu")
    load_hf_tensors(model, read_safetensors(source))
    assert model.is_packed
    compare(model, reference, documents(LENGTHS))
    copy_assets(source, tmp_path / "published")
    assert (tmp_path / "published" / "ours.py").exists()


def test_what_is_published_can_be_loaded_by_transformers(tmp_path: Path) -> None:
    reference = saved("gemma2", PACKED["gemma2"], tmp_path / "model")
    model = loaded(tmp_path / "model")
    out = tmp_path / "out"
    write_safetensors(((name, parameter.detach()) for name, parameter in model.named_parameters()), out)
    copy_assets(tmp_path / "model", out)
    again = AutoModelForCausalLM.from_pretrained(out, attn_implementation="eager")
    ids = documents([9])[0][None]
    torch.testing.assert_close(again(input_ids=ids).logits, reference(input_ids=ids).logits)


def test_code_that_cannot_run_without_values_is_packed_all_the_same(tmp_path, monkeypatch):
    reference = saved("granite", PACKED["granite"], tmp_path)
    original = type(reference.base_model).forward

    @functools.wraps(original)
    def forward(self: Any, input_ids: Tensor, **kwargs: Any) -> Any:
        if input_ids.max().item() < 0:  # asks for a value, which a tensor on the meta device has not
            raise AssertionError
        return original(self, input_ids, **kwargs)

    monkeypatch.setattr(type(reference.base_model), "forward", forward)
    model = loaded(tmp_path)
    assert model.is_packed
    compare(model, reference, documents(LENGTHS))


def test_layers_that_do_not_use_the_attention_they_are_given_end_the_run(tmp_path):
    saved("granite", PACKED["granite"], tmp_path)
    model = loaded(tmp_path)
    model._hf_config._attn_implementation = "eager"
    with pytest.raises(ModelError, match="0 of 2 layers of GraniteModel used the attention they were given"):
        logits_of(model, documents(LENGTHS))
