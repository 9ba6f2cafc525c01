"""The decoder for decoding on CPUs: same parameters, fewer and larger steps.

The projections that read the same input lie side by side in one matrix, of which the decoder's parameters become
views: whoever writes the parameters in place writes the matrix. Between the products stand the C kernels. Inference
only; a test holds the result equal to `Decoder`.
"""

import torch
from torch import Tensor, nn

from prime_rl.models.attention import Attention
from prime_rl.models.decoder import Decoder, DecoderLayer, RMSNorm
from prime_rl.models.native import Kernels


class FusedDecoder:
    """`forward` and `logits` of a float32 (or, where the CPU multiplies it, bfloat16) decoder on the CPU."""

    def __init__(self, decoder: Decoder, kernels: Kernels, *, max_positions: int) -> None:
        self.decoder = decoder
        self.kernels = kernels
        config = decoder.config
        self._heads = (config.num_heads, config.num_heads + config.num_kv_heads, config.head_dim)
        self._eps = config.rms_norm_eps
        self._layers = [_FusedLayer(layer) for layer in decoder.model.layers]
        cos_PD, sin_PD = decoder.rotations(torch.arange(max_positions), torch.float32)
        half = config.head_dim // 2
        self._rotations = cos_PD[:, :half].contiguous(), sin_PD[:, :half].contiguous()

    def __call__(self, input_ids_T: Tensor, position_ids_T: Tensor, attention: Attention) -> Tensor:
        """Hidden states after the final norm, float32 [T, hidden_size]."""
        kernels, model, eps = self.kernels, self.decoder.model, self._eps
        kernels.use_torch_threads()
        x_TH = model.embed_tokens(input_ids_T).float()
        normed_TH = torch.empty_like(x_TH)
        act_TF = x_TH.new_empty(len(x_TH), self.decoder.config.intermediate_size)
        num_heads, both_heads, head_dim = self._heads
        delta_TH = None
        for index, layer in enumerate(self._layers):
            kernels.add_rms_norm(x_TH, delta_TH, layer.input_norm, eps, normed_TH)
            qkv_TX = layer.qkv(normed_TH)
            kernels.norm_rotate(qkv_TX, self._heads, layer.qk_norms, self._rotations, position_ids_T)
            qkv_TXD = qkv_TX.view(len(x_TH), -1, head_dim)
            mixed_THD = attention(
                index, qkv_TXD[:, :num_heads], qkv_TXD[:, num_heads:both_heads], qkv_TXD[:, both_heads:]
            )
            delta_TH = layer.o(mixed_THD.view(len(x_TH), -1))
            kernels.add_rms_norm(x_TH, delta_TH, layer.post_norm, eps, normed_TH)
            kernels.silu_mul(layer.gate_up(normed_TH), act_TF)
            delta_TH = layer.down(act_TF)
        kernels.add_rms_norm(x_TH, delta_TH, _float(model.norm), eps, normed_TH)
        return normed_TH

    def logits(self, hidden_TH: Tensor) -> Tensor:
        """Logits [T, V], float32."""
        return self.decoder.logits(hidden_TH.to(self.decoder.model.norm.weight.dtype)).float()


class _FusedLayer:
    """One layer's products and norm weights."""

    def __init__(self, layer: nn.Module) -> None:
        assert isinstance(layer, DecoderLayer)
        attention, mlp = layer.self_attn, layer.mlp
        self.qkv = _Product([attention.q_proj, attention.k_proj, attention.v_proj])
        self.o = _Product([attention.o_proj])
        self.gate_up = _Product([mlp.gate_proj, mlp.up_proj])
        self.down = _Product([mlp.down_proj])
        self._layer = layer

    @property
    def input_norm(self) -> Tensor:
        return _float(self._layer.input_layernorm)

    @property
    def post_norm(self) -> Tensor:
        return _float(self._layer.post_attention_layernorm)

    @property
    def qk_norms(self) -> tuple[Tensor, Tensor, float] | None:
        q_norm, k_norm = self._layer.self_attn.q_norm, self._layer.self_attn.k_norm
        if not isinstance(q_norm, RMSNorm) or not isinstance(k_norm, RMSNorm):
            return None
        return _float(q_norm), _float(k_norm), q_norm.eps


class _Product:
    """Linear layers of one input as one product; their parameters become views of its matrix."""

    def __init__(self, linears: list[nn.Linear]) -> None:
        weights: list[Tensor] = [linear.weight for linear in linears]
        self._weight = _side_by_side(weights)
        biases: list[Tensor] = [linear.bias for linear in linears if linear.bias is not None]
        self._bias = _side_by_side(biases) if biases else None

    def __call__(self, x_TX: Tensor) -> Tensor:
        return nn.functional.linear(x_TX.to(self._weight.dtype), self._weight, self._bias).float()


def _side_by_side(parameters: list[Tensor]) -> Tensor:
    """Parameters concatenated along their first dimension; each then is a view of its part."""
    joined = torch.cat([parameter.detach() for parameter in parameters])
    for parameter, part in zip(parameters, joined.split([len(p) for p in parameters]), strict=True):
        parameter.data = part
    return joined


def _float(norm: RMSNorm) -> Tensor:
    """The weight of a norm as the kernels read it."""
    return norm.weight.detach().float()
