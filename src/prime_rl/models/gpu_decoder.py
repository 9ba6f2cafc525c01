"""The decoder for inference on a GPU: same parameters, fewer kernels, fixed buffers that a CUDA graph can replay.

The projections that read the same input lie below one another in one matrix, of which the decoder's parameters become
views: whoever writes the parameters in place writes the matrix.
"""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from prime_rl.models.decoder import Decoder, DecoderLayer, RMSNorm
from prime_rl.models.fused import make_views
from prime_rl.models.gpu_attention import GpuCache
from prime_rl.models.gpu_kernels import add_rms_norm, norm_rotate_store, silu_mul

Attend = Callable[[Tensor, Tensor, Tensor, Tensor], None]
"""Called with the rotated queries within qkv [T, X], a layer's keys and values, and where the mixed values go."""


class Workspace:
    """Every tensor that is written on the way through the decoder, for up to `max_tokens` tokens at a time."""

    def __init__(self, decoder: Decoder, *, max_tokens: int, max_logits: int) -> None:
        config = decoder.config
        weight = decoder.model.embed_tokens.weight

        def buffer(rows: int, width: int, dtype: torch.dtype = weight.dtype) -> Tensor:
            return torch.empty(rows, width, dtype=dtype, device=weight.device)

        q_size, kv_size = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        self.x = buffer(max_tokens, config.hidden_size)
        self.normed = buffer(max_tokens, config.hidden_size)
        self.added = buffer(max_tokens, config.hidden_size)
        self.qkv = buffer(max_tokens, q_size + 2 * kv_size)
        self.mixed = buffer(max_tokens, q_size)
        self.wide = buffer(max_tokens, 2 * config.intermediate_size)
        self.act = buffer(max_tokens, config.intermediate_size)
        self.logits = buffer(max_logits, config.vocab_size)
        self.positions = torch.zeros(max_tokens, dtype=torch.int32, device=weight.device)
        self.places = torch.zeros(max_tokens, dtype=torch.int32, device=weight.device)


class GpuDecoder:
    """Layers and logits of a decoder on a GPU, in the dtype of its weights."""

    def __init__(self, decoder: Decoder, workspace: Workspace, *, max_positions: int) -> None:
        self.decoder = decoder
        self.workspace = workspace
        config = decoder.config
        self.heads = (config.num_heads, config.num_kv_heads, config.head_dim)
        self._eps = config.rms_norm_eps
        self._layers = [_Layer(layer) for layer in decoder.model.layers]
        weight = decoder.model.embed_tokens.weight
        cos_PD, sin_PD = decoder.rotations(torch.arange(max_positions, device=weight.device), weight.dtype)
        half = config.head_dim // 2
        self._rotations = cos_PD[:, :half].contiguous(), sin_PD[:, :half].contiguous()

    def __call__(self, positions_T: Tensor, places_T: Tensor, cache: GpuCache, attend: Attend) -> Tensor:
        """Hidden states after the final norm of the tokens whose embeddings are in `workspace.x`.

        `places_T`: where keys and values go, block * block size + position within it. The result [T, hidden size] is
        valid until the next call.
        """
        work, eps, num_tokens = self.workspace, self._eps, len(positions_T)
        x, normed, added = work.x[:num_tokens], work.normed[:num_tokens], work.added[:num_tokens]
        qkv, mixed = work.qkv[:num_tokens], work.mixed[:num_tokens]
        wide, act = work.wide[:num_tokens], work.act[:num_tokens]
        for index, layer in enumerate(self._layers):
            keys, values = cache.keys[index], cache.values[index]
            add_rms_norm(x, None if index == 0 else added, layer.input_norm, eps, normed)
            layer.qkv(normed, qkv)
            norm_rotate_store(
                qkv, self.heads, layer.qk_norms, self._rotations, positions_T, places_T, keys, values
            )  # fmt: skip
            attend(qkv, keys, values, mixed)
            layer.o(mixed, added)
            add_rms_norm(x, added, layer.post_norm, eps, normed)
            silu_mul(layer.gate_up(normed, wide), act)
            layer.down(act, added)
        add_rms_norm(x, added, self.decoder.model.norm.weight, eps, normed)
        return normed

    def logits(self, hidden_SH: Tensor) -> Tensor:
        """Logits [S, V] in the weights' dtype, valid until the next call."""
        decoder = self.decoder
        head = decoder.model.embed_tokens if decoder.lm_head is None else decoder.lm_head
        return torch.mm(hidden_SH, head.weight.T, out=self.workspace.logits[: len(hidden_SH)])


class _Layer:
    """One layer's products and norm weights."""

    def __init__(self, layer: nn.Module) -> None:
        assert isinstance(layer, DecoderLayer)
        attention, mlp = layer.self_attn, layer.mlp
        self.qkv = _Product([attention.q_proj, attention.k_proj, attention.v_proj])
        self.o = _Product([attention.o_proj])
        self.gate_up = _Product([mlp.gate_proj, mlp.up_proj])
        self.down = _Product([mlp.down_proj])
        self.input_norm = layer.input_layernorm.weight.detach()
        self.post_norm = layer.post_attention_layernorm.weight.detach()
        self.qk_norms: tuple[Tensor, Tensor, float] | None = None
        q_norm, k_norm = attention.q_norm, attention.k_norm
        if isinstance(q_norm, RMSNorm) and isinstance(k_norm, RMSNorm):
            self.qk_norms = q_norm.weight.detach(), k_norm.weight.detach(), q_norm.eps


class _Product:
    """Linear layers of one input as one product; their parameters become views of its matrix."""

    def __init__(self, linears: list[nn.Linear]) -> None:
        self._weight_YX = torch.cat([linear.weight.detach() for linear in linears])
        make_views([linear.weight for linear in linears], self._weight_YX)
        self._bias_Y: Tensor | None = None
        biases = [linear.bias for linear in linears if linear.bias is not None]
        if biases:
            self._bias_Y = torch.cat([bias.detach() for bias in biases])
            make_views(biases, self._bias_Y)

    def __call__(self, x_TX: Tensor, out_TY: Tensor) -> Tensor:
        """Write the product to `out_TY` and return it."""
        if self._bias_Y is None:
            return torch.mm(x_TX, self._weight_YX.T, out=out_TY)
        return torch.addmm(self._bias_Y, x_TX, self._weight_YX.T, out=out_TY)
