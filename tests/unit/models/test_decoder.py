import math
from typing import Any

import pytest
import torch

from prime_rl.errors import ModelError
from prime_rl.models.attention import PackedAttention
from prime_rl.models.decoder import Decoder, DecoderConfig, RopeConfig, inverse_frequencies, rotate

BASE: dict[str, Any] = {
    "model_type": "qwen3",
    "vocab_size": 32,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
}


def test_features_follow_the_model_type() -> None:
    llama = DecoderConfig.from_hf(BASE | {"model_type": "llama"})
    qwen2 = DecoderConfig.from_hf(BASE | {"model_type": "qwen2"})
    qwen3 = DecoderConfig.from_hf(BASE | {"attention_bias": True})
    assert (llama.qk_norm, llama.qkv_bias, llama.o_bias) == (False, False, False)
    assert (qwen2.qk_norm, qwen2.qkv_bias, qwen2.o_bias) == (False, True, False)
    assert (qwen3.qk_norm, qwen3.qkv_bias, qwen3.o_bias) == (True, True, True)


def test_missing_sizes_take_the_defaults_of_transformers() -> None:
    without = {key: value for key, value in BASE.items() if key not in ("head_dim", "num_key_value_heads")}
    assert DecoderConfig.from_hf(without).head_dim == 128
    assert DecoderConfig.from_hf(without | {"model_type": "llama"}).head_dim == 4
    assert DecoderConfig.from_hf(without).num_kv_heads == 4


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model_type": "qwen3_moe"}, "'qwen3_moe' is not supported"),
        ({"model_type": None}, "None is not supported"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu'"),
        ({"quantization_config": {"bits": 4}}, "quantization_config"),
        ({"attention_dropout": 0.1}, "attention_dropout 0.1"),
        ({"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1}, "sliding window"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "sliding window"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "rope type 'yarn'"),
        ({"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4}}, "rope type 'dynamic'"),
        ({"rope_scaling": {"type": "linear"}}, "needs factor"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor 0.5"),
        ({"num_key_value_heads": 3}, "multiple of num_key_value_heads 3"),
        ({"hidden_size": None}, "lacks hidden_size"),
    ],
)
def test_what_is_not_implemented_is_refused_by_name(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        DecoderConfig.from_hf(BASE | change)


def test_a_sliding_window_that_no_layer_uses_is_accepted() -> None:
    DecoderConfig.from_hf(BASE | {"use_sliding_window": False, "sliding_window": 8, "max_window_layers": 0})
    DecoderConfig.from_hf(BASE | {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 2})


def test_both_spellings_of_rope_are_read() -> None:
    old = RopeConfig.from_hf({"rope_theta": 5e5, "rope_scaling": {"type": "linear", "factor": 2.0}})
    new = RopeConfig.from_hf({"rope_parameters": {"rope_type": "linear", "rope_theta": 5e5, "factor": 2.0}})
    assert (old.kind, old.theta, old.factor) == (new.kind, new.theta, new.factor) == ("linear", 5e5, 2.0)


def test_llama3_scaling_keeps_short_wavelengths_and_stretches_long_ones() -> None:
    rope = RopeConfig(
        kind="llama3", theta=1e6, factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_positions=64
    )
    cpu = torch.device("cpu")
    plain, scaled = (inverse_frequencies(r, 32, cpu) for r in (RopeConfig(theta=1e6), rope))
    wavelengths = 2 * math.pi / plain
    assert torch.equal(scaled[wavelengths < 16], plain[wavelengths < 16])
    torch.testing.assert_close(scaled[wavelengths > 64], plain[wavelengths > 64] / 8)
    between = (wavelengths > 16) & (wavelengths < 64)
    assert between.any()
    assert ((scaled < plain) & (scaled > plain / 8))[between].all()


def test_rotation_preserves_length_and_makes_products_depend_on_distance() -> None:
    torch.manual_seed(0)
    decoder = Decoder(DecoderConfig.from_hf(BASE))
    q, k = torch.randn(1, 1, 8), torch.randn(1, 1, 8)

    def turned(x: torch.Tensor, position: int) -> torch.Tensor:
        return rotate(x, *decoder.rotations(torch.tensor([position]), torch.float32))

    torch.testing.assert_close(turned(q, 9).norm(), q.norm())
    torch.testing.assert_close((turned(q, 9) * turned(k, 4)).sum(), (turned(q, 105) * turned(k, 100)).sum())


@pytest.mark.parametrize("tied", [True, False])
def test_logits_have_one_row_a_token_and_tied_models_have_no_head(tied: bool) -> None:
    decoder = Decoder(DecoderConfig.from_hf(BASE | {"tie_word_embeddings": tied}))
    hidden = decoder(torch.tensor([1, 2, 3]), torch.arange(3), PackedAttention([3]))
    assert hidden.shape == (3, 16)
    assert decoder.logits(hidden).shape == (3, 32)
    assert ("lm_head.weight" in dict(decoder.named_parameters())) == (not tied)
