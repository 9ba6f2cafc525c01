"""The weights that forward and backward run on: the float32 masters, or a copy of them in a smaller dtype."""

import torch

from prime_rl.models.decoder import Decoder
from prime_rl.models.hf import empty_decoder


class ComputeModel:
    """A decoder in `dtype` beside float32 master weights, which collect its gradients in float32.

    Everything is computed in `dtype`, as the engine does with the weights it is sent; autocast would keep the
    residual stream in float32 and drift from it. With float32 the masters themselves are used.
    """

    def __init__(self, master: Decoder, dtype: torch.dtype) -> None:
        self._master = master
        self._is_copy = dtype != torch.float32
        device = next(master.parameters()).device
        self.model = empty_decoder(master.config, device=device, dtype=dtype) if self._is_copy else master
        self._pairs = list(zip(master.parameters(), self.model.parameters(), strict=True))

    @torch.no_grad()
    def refresh(self) -> None:
        """Take over the masters' values; called once a step."""
        if self._is_copy:
            for master, copy in self._pairs:
                copy.copy_(master)

    def collect(self) -> None:
        """Add the copy's gradients to the masters' and clear them; called after every micro-batch."""
        if not self._is_copy:
            return
        for master, copy in self._pairs:
            assert copy.grad is not None
            if master.grad is None:
                master.grad = copy.grad.float()
            else:
                master.grad += copy.grad
            copy.grad = None
