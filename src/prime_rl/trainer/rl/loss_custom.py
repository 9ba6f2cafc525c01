"""A policy-gradient loss of the user's: found by its import path, called with what docs/losses.md promises."""

from collections.abc import Callable, Mapping
from typing import Any, Final

import torch
from torch import Tensor

from prime_rl.config.algorithms import CustomLossConfig
from prime_rl.config.functions import load_function, reason
from prime_rl.errors import PrimeRLError
from prime_rl.trainer.streams import LossFunction, LossOutput, TokenStreams

TAKEN_METRICS: Final = frozenset({"entropy", "loss", "mismatch_kl", "nll", "ref_kl", "ref_kl_is_masked"})
"""Names that the trainer logs itself, whatever the loss."""

_RETURNS = "a custom loss returns (loss_N, metrics): a tensor [N] and a dict of name -> tensor [N]; see docs/losses.md"


def load_custom_loss(config: CustomLossConfig) -> LossFunction:
    """The user's function as a loss of the `rl` stream.

    It is called with the tokens of that stream alone, and its losses are weighted (`rl_weights`) and summed here.
    Raises: ConfigError for a path that leads to no function, or a function that does not take the configured kwargs.
    The loss raises PrimeRLError where the function fails or returns something else than it should.
    """
    function = load_function(config.import_path, key="loss", takes="streams", kwargs=config.kwargs)

    def loss(streams: TokenStreams) -> LossOutput:
        in_stream_N = streams.rl_weights_N != 0
        index = in_stream_N.nonzero().squeeze(-1)
        if not len(index):  # a sum of nothing, whose backward still reaches the parameters
            return LossOutput(sums={"rl": streams.logprobs_N.index_select(0, index).sum()}, metrics_N={})
        selected = _selected(streams, index)
        loss_N, metrics_N = _called(function, config, selected)
        total = (selected.rl_weights_N * loss_N).sum()
        whole = {name: torch.zeros_like(in_stream_N, dtype=torch.float32) for name in metrics_N}
        return LossOutput(
            sums={"rl": total},
            metrics_N={name: whole[name].index_put((index,), values.float()) for name, values in metrics_N.items()},
            counted_N=dict.fromkeys(metrics_N, in_stream_N),
        )

    return loss


def _selected(streams: TokenStreams, index: Tensor) -> TokenStreams:
    """The tokens at `index` alone."""

    def of(values_N: Tensor) -> Tensor:
        return values_N.index_select(0, index)

    return TokenStreams(
        logprobs_N=of(streams.logprobs_N),
        entropies_N=of(streams.entropies_N),
        inference_logprobs_N=of(streams.inference_logprobs_N),
        advantages_N=of(streams.advantages_N),
        ref_logprobs_N=None if streams.ref_logprobs_N is None else of(streams.ref_logprobs_N),
        rl_weights_N=of(streams.rl_weights_N),
        ce_weights_N=of(streams.ce_weights_N),
        ref_kl_weights_N=of(streams.ref_kl_weights_N),
        sequence_N=of(streams.sequence_N),
        num_sequences=streams.num_sequences,
    )


def _called(
    function: Callable[..., Any], config: CustomLossConfig, streams: TokenStreams
) -> tuple[Tensor, Mapping[str, Tensor]]:
    """What the function returns, checked. Raises: PrimeRLError naming the function."""
    try:
        returned = function(streams, **config.kwargs)
    except PrimeRLError:
        raise
    except Exception as error:
        raise PrimeRLError(f"the loss {config.import_path} failed: {reason(error)}") from error
    if not (isinstance(returned, tuple) and len(returned) == 2 and isinstance(returned[1], Mapping)):
        raise PrimeRLError(f"the loss {config.import_path} returned a {type(returned).__name__}; {_RETURNS}")
    loss_N, metrics_N = returned
    if taken := sorted(TAKEN_METRICS & metrics_N.keys()):
        names = ", ".join(map(repr, taken))
        raise PrimeRLError(
            f"the loss {config.import_path} returned metrics {names}, which the trainer has itself; rename them"
        )
    for name, values in {
        "loss_N": loss_N,
        **{f"metric {name!r}": values for name, values in metrics_N.items()},
    }.items():
        if not isinstance(values, Tensor) or values.shape != streams.logprobs_N.shape:
            found = f"shape {list(values.shape)}" if isinstance(values, Tensor) else f"a {type(values).__name__}"
            expected = list(streams.logprobs_N.shape)
            raise PrimeRLError(
                f"the loss {config.import_path} returned {found} for {name}, where [N] is {expected}; {_RETURNS}"
            )
    if streams.logprobs_N.requires_grad and not loss_N.requires_grad:
        raise PrimeRLError(
            f"the loss {config.import_path} returned values without gradients, so nothing would be learned: compute "
            "them from streams.logprobs_N, without detach() or no_grad() around the whole"
        )
    return loss_N, {name: values.detach() for name, values in metrics_N.items()}
