"""The SFT loss, and the cross-entropy stream of RL: a pure function of per-token streams."""

from prime_rl.trainer.streams import LossOutput, TokenStreams


def sft_loss(streams: TokenStreams) -> LossOutput:
    """Negative log-likelihood, weighted: the sum over tokens of -ce_weight * log pi.

    Metrics: `entropy` of all tokens, `nll` = -log pi of those in the stream.
    """
    nll_N = -streams.logprobs_N
    return LossOutput(
        sums={"ce": (streams.ce_weights_N * nll_N).sum()},
        metrics_N={"entropy": streams.entropies_N.detach(), "nll": nll_N.detach()},
        counted_N={"nll": streams.ce_weights_N != 0},
    )
