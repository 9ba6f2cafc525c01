"""One dense decoder for Llama, Qwen2 and Qwen3, shared by the trainer and the embedded engine.

Rows are tokens: there is no batch dimension. Which tokens see which is the business of the `Attention` passed to
`Decoder.forward`. Parameter names are Hugging Face's names.

Shape suffixes: T tokens, H query heads (hidden size where it stands alone after T), K key/value heads, D head size,
V vocabulary.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from prime_rl.errors import ModelError
from prime_rl.models.attention import Attention
from prime_rl.models.language_model import LanguageModel

MODEL_TYPES = ("llama", "qwen2", "qwen3")


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeConfig:
    """Rotary position embedding. `factor` and what follows it are read by the scaled kinds only."""

    kind: Literal["default", "linear", "llama3"] = "default"
    theta: float = 10000.0
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_positions: int = 8192

    @classmethod
    def from_hf(cls, config: Mapping[str, Any]) -> Self:
        """Read `rope_parameters` (transformers 5) or `rope_theta` and `rope_scaling` (before it)."""
        rope: dict[str, Any] = {"rope_theta": config.get("rope_theta", 10000.0)}
        rope |= config.get("rope_scaling") or {}
        rope |= config.get("rope_parameters") or {}
        kind = rope.get("rope_type", rope.get("type", "default"))
        if kind not in ("default", "linear", "llama3"):
            raise ModelError(f"config.json: rope type {kind!r} is not supported; supported: default, linear, llama3")
        partial = rope.get("partial_rotary_factor", config.get("partial_rotary_factor", 1.0))
        if partial != 1.0:
            raise ModelError(f"config.json: partial_rotary_factor {partial} is not supported; only 1.0 is")
        needed = {"default": (), "linear": ("factor",), "llama3": ("factor", "low_freq_factor", "high_freq_factor")}
        missing = [key for key in needed[kind] if key not in rope]
        if missing:
            raise ModelError(f"config.json: rope type {kind!r} needs {', '.join(missing)}")
        return cls(
            kind=kind,
            theta=float(rope["rope_theta"]),
            factor=float(rope.get("factor", 1.0)),
            low_freq_factor=float(rope.get("low_freq_factor", 1.0)),
            high_freq_factor=float(rope.get("high_freq_factor", 4.0)),
            original_max_positions=int(
                rope.get("original_max_position_embeddings", config.get("max_position_embeddings", 8192))
            ),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderConfig:
    """The shape of a decoder, as far as this package implements it.

    Example: DecoderConfig(model_type="qwen3", vocab_size=512, hidden_size=256, intermediate_size=768, num_layers=4,
    num_heads=4, num_kv_heads=2, head_dim=64, qk_norm=True)
    """

    model_type: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float = 1e-6
    rope: RopeConfig = RopeConfig()
    max_positions: int = 32768
    tie_embeddings: bool = False
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    init_std: float = 0.02

    @classmethod
    def from_hf(cls, config: Mapping[str, Any]) -> Self:
        """Read the mapping of a `config.json`. ModelError for what would need code that is not here."""
        _refuse_unsupported(config)
        model_type = config["model_type"]
        missing = [key for key in _REQUIRED if config.get(key) is None]
        if missing:
            raise ModelError(f"config.json of a {model_type} model lacks {', '.join(missing)}")
        hidden, heads = int(config["hidden_size"]), int(config["num_attention_heads"])
        kv_heads = int(config.get("num_key_value_heads") or heads)
        # Qwen3Config of transformers defaults to 128 whatever the hidden size; the others derive it.
        head_dim = int(config.get("head_dim") or (128 if model_type == "qwen3" else hidden // heads))
        if heads % kv_heads or head_dim % 2:
            raise ModelError(
                f"config.json: num_attention_heads {heads} must be a multiple of num_key_value_heads {kv_heads}, "
                f"and head_dim {head_dim} even"
            )
        bias = bool(config.get("attention_bias", False)) and model_type != "qwen2"
        return cls(
            model_type=model_type,
            vocab_size=int(config["vocab_size"]),
            hidden_size=hidden,
            intermediate_size=int(config["intermediate_size"]),
            num_layers=int(config["num_hidden_layers"]),
            num_heads=heads,
            num_kv_heads=kv_heads,
            head_dim=head_dim,
            rms_norm_eps=float(config.get("rms_norm_eps", 1e-6)),
            rope=RopeConfig.from_hf(config),
            max_positions=int(config.get("max_position_embeddings", 2048 if model_type == "llama" else 32768)),
            tie_embeddings=bool(config.get("tie_word_embeddings", False)),
            qkv_bias=bias or model_type == "qwen2",
            o_bias=bias,
            mlp_bias=bool(config.get("mlp_bias", False)) and model_type == "llama",
            qk_norm=model_type == "qwen3",
            init_std=float(config.get("initializer_range", 0.02)),
        )


_REQUIRED = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")


def _refuse_unsupported(config: Mapping[str, Any]) -> None:
    """Raise ModelError for a model that this decoder would load and compute wrongly."""
    model_type = config.get("model_type")
    if model_type not in MODEL_TYPES:
        raise ModelError(
            f"config.json: model_type {model_type!r} is not supported by the built-in decoder; "
            f"supported: {', '.join(MODEL_TYPES)} (dense only)"
        )
    problems = []
    if config.get("hidden_act", "silu") != "silu":
        problems.append(f"hidden_act {config['hidden_act']!r} (only 'silu' is)")
    if config.get("quantization_config"):
        problems.append("quantization_config")
    if config.get("attention_dropout"):
        problems.append(f"attention_dropout {config['attention_dropout']} (only 0 is)")
    if _uses_sliding_window(config):
        problems.append("sliding window attention")
    if problems:
        raise ModelError(f"config.json: not supported by the built-in decoder: {'; '.join(problems)}")


def _uses_sliding_window(config: Mapping[str, Any]) -> bool:
    """Whether any layer attends to a window. `layer_types` decides where it is given."""
    if config.get("layer_types"):
        return any(kind != "full_attention" for kind in config["layer_types"])
    if config["model_type"] == "llama" or config.get("sliding_window") is None:
        return False
    first_windowed = config.get("max_window_layers", 28)
    return bool(config.get("use_sliding_window", False)) and first_windowed < config.get("num_hidden_layers", 0)


@lru_cache(maxsize=16)
def inverse_frequencies(rope: RopeConfig, head_dim: int, device: torch.device) -> Tensor:
    """Rotation per position of each pair of dimensions, in radians: float32 [D/2]."""
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32, device=device) / head_dim
    freqs = 1.0 / (rope.theta**exponents)
    if rope.kind == "linear":
        return freqs / rope.factor
    if rope.kind == "llama3":
        # Long wavelengths are stretched by `factor`, short ones kept, those between blended (Llama 3.1).
        wavelengths = 2 * math.pi / freqs
        blend = (rope.original_max_positions / wavelengths - rope.low_freq_factor) / (
            rope.high_freq_factor - rope.low_freq_factor
        )
        blend = blend.clamp(0.0, 1.0)
        return (1 - blend) * freqs / rope.factor + blend * freqs
    return freqs


def rotate(x_TXD: Tensor, cos_TD: Tensor, sin_TD: Tensor) -> Tensor:
    """Turn each pair (d, d + D/2) of every head by its token's angle."""
    first, second = x_TXD.chunk(2, dim=-1)
    turned = torch.cat((-second, first), dim=-1)
    return x_TXD * cos_TD[:, None] + turned * sin_TD[:, None]


class RMSNorm(nn.Module):
    """Scale to unit root mean square over the last dimension, then by a learned weight."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, self.weight.shape, self.weight, self.eps)


class SelfAttention(nn.Module):
    """Projections, query/key norms and rotation before the attention call; `o_proj` comes after it."""

    def __init__(self, config: DecoderConfig, layer: int) -> None:
        super().__init__()
        self.layer = layer
        self.head_dim = config.head_dim
        q_size, kv_size = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        self.q_proj = nn.Linear(config.hidden_size, q_size, bias=config.qkv_bias)
        self.k_proj = nn.Linear(config.hidden_size, kv_size, bias=config.qkv_bias)
        self.v_proj = nn.Linear(config.hidden_size, kv_size, bias=config.qkv_bias)
        self.o_proj = nn.Linear(q_size, config.hidden_size, bias=config.o_bias)
        self.q_norm: nn.Module = nn.Identity()
        self.k_norm: nn.Module = nn.Identity()
        if config.qk_norm:
            self.q_norm = RMSNorm(config.head_dim, config.rms_norm_eps)
            self.k_norm = RMSNorm(config.head_dim, config.rms_norm_eps)

    def forward(self, x_TH: Tensor, cos_TD: Tensor, sin_TD: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Rotated queries [T, H, D] and keys [T, K, D], and values [T, K, D]."""
        heads = (x_TH.shape[0], -1, self.head_dim)
        q_THD = rotate(self.q_norm(self.q_proj(x_TH).view(heads)), cos_TD, sin_TD)
        k_TKD = rotate(self.k_norm(self.k_proj(x_TH).view(heads)), cos_TD, sin_TD)
        return q_THD, k_TKD, self.v_proj(x_TH).view(heads)


class MLP(nn.Module):
    """SwiGLU."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=config.mlp_bias)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=config.mlp_bias)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=config.mlp_bias)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
        return out


class DecoderLayer(nn.Module):
    """Attention and MLP, each behind a norm and added to the residual stream."""

    def __init__(self, config: DecoderConfig, layer: int) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = SelfAttention(config, layer)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = MLP(config)

    def forward(self, x_TH: Tensor, cos_TD: Tensor, sin_TD: Tensor, attention: Attention) -> Tensor:
        q_THD, k_TKD, v_TKD = self.before(x_TH, cos_TD, sin_TD)
        return self.after(x_TH, attention(self.self_attn.layer, q_THD, k_TKD, v_TKD))

    def before(self, x_TH: Tensor, cos_TD: Tensor, sin_TD: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values for the attention call, which alone sees more than one token."""
        out: tuple[Tensor, Tensor, Tensor] = self.self_attn(self.input_layernorm(x_TH), cos_TD, sin_TD)
        return out

    def after(self, x_TH: Tensor, mixed_THD: Tensor) -> Tensor:
        """The layer's output from its input and the mixed values."""
        x_TH = x_TH + self.self_attn.o_proj(mixed_THD.reshape(x_TH.shape[0], -1))
        out: Tensor = x_TH + self.mlp(self.post_attention_layernorm(x_TH))
        return out


class Embedding(nn.Embedding):
    """nn.Embedding, which draws nothing on the meta device: torch imports its compiler for that, a second's work."""

    def reset_parameters(self) -> None:
        if not self.weight.is_meta:
            super().reset_parameters()


class DecoderStack(nn.Module):
    """Embedding, layers and final norm: what Hugging Face calls `model`."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.embed_tokens = Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(DecoderLayer(config, layer) for layer in range(config.num_layers))
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)


class Decoder(LanguageModel):
    """The whole language model. With tied embeddings there is no `lm_head` parameter."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.config = config
        self.model = DecoderStack(config)
        self.lm_head = None if config.tie_embeddings else nn.Linear(config.hidden_size, config.vocab_size, bias=False)

    def forward(self, input_ids_T: Tensor, position_ids_T: Tensor, attention: Attention) -> Tensor:
        """Hidden states after the final norm, [T, hidden_size]. Positions count from 0 within each sequence."""
        x_TH: Tensor = self.model.embed_tokens(input_ids_T)
        cos_TD, sin_TD = self.rotations(position_ids_T, x_TH.dtype)
        for layer in self.model.layers:
            x_TH = layer(x_TH, cos_TD, sin_TD, attention)
        out: Tensor = self.model.norm(x_TH)
        return out

    @property
    def vocab_size(self) -> int:
        return self.config.vocab_size

    @property
    def blocks(self) -> Sequence[nn.Module]:
        return list(self.model.layers)

    @property
    def head_weight(self) -> Tensor:
        return self.model.embed_tokens.weight if self.lm_head is None else self.lm_head.weight

    def rotations(self, position_ids_T: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Cosine and sine of every token's angles, each [T, D]; the angles are computed in float32."""
        freqs = inverse_frequencies(self.config.rope, self.config.head_dim, position_ids_T.device)
        angles = position_ids_T[:, None].float() * freqs
        angles = torch.cat((angles, angles), dim=-1)
        return angles.cos().to(dtype), angles.sin().to(dtype)

    def logits(self, hidden_TH: Tensor) -> Tensor:
        """Logits [T, V] of the hidden states that `forward` returned, in the weights' dtype."""
        return F.linear(hidden_TH, self.head_weight)
