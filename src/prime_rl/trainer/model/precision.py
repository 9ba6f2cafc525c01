"""The model of a process that trains alone: weights in the data type of forward and backward, and float32 masters."""

import torch
from torch import Tensor, nn

from prime_rl.trainer.model.scoring import Scorer
from prime_rl.trainer.streams import DeviceBatch

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


class ComputeModel:
    """A model in `dtype` beside float32 masters of its trained parameters, which collect their gradients in float32.

    Everything is computed in `dtype`, as the engine does with the weights it is sent; autocast would keep the
    residual stream in float32 and drift from it. With float32 the model's parameters are the masters themselves.
    Frozen parameters exist once.
    """

    def __init__(self, scorer: Scorer, dtype: torch.dtype) -> None:
        """Takes over the values of the model's parameters, float32 where they are trained, and converts it."""
        self.model = scorer.model
        self._scorer = scorer
        named = {name: parameter for name, parameter in self.model.named_parameters() if parameter.requires_grad}
        self._copies: dict[str, nn.Parameter] = {}
        self.parameters = named
        if dtype != torch.float32:
            self._copies = named
            self.parameters = {name: nn.Parameter(copy.detach()) for name, copy in named.items()}
            for parameter in self.model.parameters():  # not the buffers: rotation frequencies stay exact
                parameter.data = parameter.data.to(dtype)

    @property
    def device(self) -> torch.device:
        """Where the model computes."""
        return next(self.model.parameters()).device

    def score(self, batch: DeviceBatch) -> tuple[Tensor, Tensor]:
        """Logprobs, which carry gradients, and entropies of the tokens in the loss."""
        out: tuple[Tensor, Tensor] = self._scorer(batch)
        return out

    @torch.no_grad()
    def refresh(self, num_micro_batches: int = 1) -> None:
        """Take over the masters' values; called once a step, however many micro-batches it has."""
        if self._copies:
            torch._foreach_copy_(list(self._copies.values()), [self.parameters[name] for name in self._copies])

    @torch.no_grad()
    def collect(self) -> None:
        """Add the copies' gradients to the masters' and clear them; called after every micro-batch."""
        sums, grads = [], []
        for name, copy in self._copies.items():
            master, grad = self.parameters[name], copy.grad
            if grad is None:  # a parameter that this input did not use
                continue
            copy.grad = None
            if master.grad is None:
                master.grad = grad.float()
            else:
                sums.append(master.grad)
                grads.append(grad)
        if sums:
            torch._foreach_add_(sums, grads)

    def stored(self) -> dict[str, Tensor]:
        """Every parameter under its Hugging Face name, detached: the master where it is trained."""
        return {
            name: self.parameters.get(name, parameter).detach() for name, parameter in self.model.named_parameters()
        }
