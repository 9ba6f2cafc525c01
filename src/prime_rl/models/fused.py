"""The decoder for decoding on CPUs: same parameters, fewer and larger steps.

The projections that read the same input lie side by side in one matrix, of which the decoder's parameters become
views: whoever writes the parameters in place writes the matrix. Between the products stand the C kernels. Inference
only; a test holds the result equal to `Decoder`.
"""

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor, nn

from prime_rl.models.attention import Attention
from prime_rl.models.decoder import Decoder, DecoderLayer, RMSNorm
from prime_rl.models.native import Buffers, Kernels


class FusedDecoder:
    """`forward` and `logits` of a float32 (or, where the CPU multiplies it, bfloat16) decoder on the CPU."""

    def __init__(
        self, decoder: Decoder, kernels: Kernels, buffers: Buffers, *, max_positions: int, row_by_row: bool = False
    ) -> None:
        """`row_by_row`: no token's numbers depend on which others are computed with it, to the last bit; float32."""
        self.decoder = decoder
        self.kernels = kernels
        self._row_by_row = row_by_row
        self._buffers = buffers
        config = decoder.config
        self._heads = (config.num_heads, config.num_heads + config.num_kv_heads, config.head_dim)
        self._eps = config.rms_norm_eps
        product = partial(_RowProduct, kernels) if row_by_row else _Product
        self._layers = [_FusedLayer(layer, product) for layer in decoder.model.layers]
        cos_PD, sin_PD = decoder.rotations(torch.arange(max_positions), torch.float32)
        half = config.head_dim // 2
        self._rotations = cos_PD[:, :half].contiguous(), sin_PD[:, :half].contiguous()

    def __call__(self, input_ids_T: Tensor, position_ids_T: Tensor, attention: Attention) -> Tensor:
        """Hidden states after the final norm, float32 [T, hidden_size], valid until the next call."""
        kernels, model, eps, config = self.kernels, self.decoder.model, self._eps, self.decoder.config
        kernels.use_torch_threads()
        num_tokens = len(input_ids_T)
        buffer = partial(self._buffers.take, num_tokens)
        x_TH, normed_TH = buffer("x", config.hidden_size), buffer("normed", config.hidden_size)
        self._embed(input_ids_T, x_TH)
        num_heads, both_heads, head_dim = self._heads
        qkv_TX = buffer("qkv", (2 * both_heads - num_heads) * head_dim)
        qkv_TXD = qkv_TX.view(num_tokens, -1, head_dim)
        q_THD, k_TKD, v_TKD = qkv_TXD.tensor_split((num_heads, both_heads), dim=1)
        wide_TF, act_TF = buffer("wide", 2 * config.intermediate_size), buffer("act", config.intermediate_size)
        delta_TH = buffer("delta", config.hidden_size)
        added = None  # what the last product left to be added to x
        for index, layer in enumerate(self._layers):
            kernels.add_rms_norm(x_TH, added, layer.input_norm, eps, normed_TH)
            layer.qkv(normed_TH, qkv_TX)
            kernels.norm_rotate(qkv_TX, self._heads, layer.qk_norms, self._rotations, position_ids_T)
            mixed_THD = attention(index, q_THD, k_TKD, v_TKD)
            added = layer.o(mixed_THD.view(num_tokens, -1), delta_TH)
            kernels.add_rms_norm(x_TH, added, layer.post_norm, eps, normed_TH)
            kernels.silu_mul(layer.gate_up(normed_TH, wide_TF), act_TF)
            added = layer.down(act_TF, delta_TH)
        kernels.add_rms_norm(x_TH, added, _float(model.norm), eps, normed_TH)
        return normed_TH

    def _embed(self, input_ids_T: Tensor, out_TH: Tensor) -> None:
        weight_VH = self.decoder.model.embed_tokens.weight.detach()
        if weight_VH.dtype == torch.float32:
            torch.index_select(weight_VH, 0, input_ids_T, out=out_TH)
        else:
            out_TH.copy_(weight_VH[input_ids_T])

    def logits(self, hidden_TH: Tensor) -> Tensor:
        """Logits [T, V], float32, valid until the next call."""
        decoder = self.decoder
        head = decoder.model.embed_tokens if decoder.lm_head is None else decoder.lm_head
        out_TV = self._buffers.take(len(hidden_TH), "logits", decoder.config.vocab_size)
        if self._row_by_row:
            self.kernels.multiply(hidden_TH, head.weight.detach(), None, out_TV)
            return out_TV
        if head.weight.dtype == torch.float32:
            return torch.mm(hidden_TH, head.weight.detach().T, out=out_TV)
        return out_TV.copy_(decoder.logits(hidden_TH.to(head.weight.dtype)))


class _FusedLayer:
    """One layer's products and norm weights."""

    def __init__(self, layer: nn.Module, product: "Callable[[list[nn.Linear]], _Product | _RowProduct]") -> None:
        assert isinstance(layer, DecoderLayer)
        attention, mlp = layer.self_attn, layer.mlp
        self.qkv = product([attention.q_proj, attention.k_proj, attention.v_proj])
        self.o = product([attention.o_proj])
        self.gate_up = product([mlp.gate_proj, mlp.up_proj])
        self.down = product([mlp.down_proj])
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
        # Inputs by outputs: the layout that multiplies fastest.
        self._weight_XY = torch.cat([linear.weight.detach() for linear in linears]).T.contiguous()
        make_views([linear.weight for linear in linears], self._weight_XY.T)
        self._bias_Y = _joined_bias(linears)

    def __call__(self, x_TX: Tensor, out_TY: Tensor) -> Tensor:
        """Write the product to `out_TY` and return it."""
        if self._weight_XY.dtype != torch.float32:
            product = torch.mm(x_TX.to(self._weight_XY.dtype), self._weight_XY)
            out_TY.copy_(product if self._bias_Y is None else product + self._bias_Y)
        elif self._bias_Y is None:
            torch.mm(x_TX, self._weight_XY, out=out_TY)
        else:
            torch.addmm(self._bias_Y, x_TX, self._weight_XY, out=out_TY)
        return out_TY


class _RowProduct:
    """The same, of which no row depends on the others; the matrix stays outputs by inputs."""

    def __init__(self, kernels: Kernels, linears: list[nn.Linear]) -> None:
        self._kernels = kernels
        self._weight_YX = torch.cat([linear.weight.detach() for linear in linears])
        make_views([linear.weight for linear in linears], self._weight_YX)
        self._bias_Y = _joined_bias(linears)

    def __call__(self, x_TX: Tensor, out_TY: Tensor) -> Tensor:
        """Write the product to `out_TY` and return it."""
        self._kernels.multiply(x_TX, self._weight_YX, self._bias_Y, out_TY)
        return out_TY


def _joined_bias(linears: list[nn.Linear]) -> Tensor | None:
    """The biases one after the other, of which the parameters become views; None where there are none."""
    biases = [linear.bias for linear in linears if linear.bias is not None]
    if not biases:
        return None
    joined = torch.cat([bias.detach() for bias in biases])
    make_views(biases, joined)
    return joined


def make_views(parameters: Sequence[Tensor], joined: Tensor) -> None:
    """Let each parameter be its part of `joined`, which holds them one after the other."""
    for parameter, part in zip(parameters, joined.split([len(p) for p in parameters]), strict=True):
        parameter.data = part


def _float(norm: RMSNorm) -> Tensor:
    """The weight of a norm as the kernels read it."""
    return norm.weight.detach().float()
