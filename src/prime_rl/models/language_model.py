"""What the trainer needs of a language model, ours or another library's."""

from abc import ABC, abstractmethod
from collections.abc import Sequence

from torch import Tensor, nn

from prime_rl.models.attention import Attention
from prime_rl.models.packed_kernels import Kernel


class LanguageModel(nn.Module, ABC):
    """Rows are tokens: there is no batch dimension, and `attention` knows which tokens see which.

    `named_parameters` are Hugging Face's names. Shape suffixes: T tokens, H hidden, V vocabulary.
    """

    kernel: Kernel = Kernel.SDPA
    """What the `PackedAttention` of a training step is to use."""

    logit_softcap: float | None = None
    """Logits are `cap * tanh(logits / cap)` of the product with the head, before the temperature. None: are it."""

    @property
    @abstractmethod
    def vocab_size(self) -> int:
        """V"""

    @property
    @abstractmethod
    def blocks(self) -> Sequence[nn.Module]:
        """The layers in their order: what is sharded, compiled and computed again one by one."""

    @property
    @abstractmethod
    def head_weight(self) -> Tensor:
        """[V, H]: logits are hidden states times this, transposed. The embedding where the two are tied."""

    @abstractmethod
    def forward(self, input_ids_T: Tensor, position_ids_T: Tensor, attention: Attention) -> Tensor:
        """Hidden states after the final norm, [T, H]. Positions count from 0 within each sequence."""
