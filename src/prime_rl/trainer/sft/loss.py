"""The SFT loss: a pure function of per-token streams."""

from prime_rl.trainer.streams import LossOutput, TokenStreams


def sft_loss(streams: TokenStreams) -> LossOutput:
    """Negative log-likelihood summed over tokens; metric `entropy`."""
    return LossOutput(loss_sum=-streams.logprobs_N.sum(), metrics_N={"entropy": streams.entropies_N})
