"""The SFT loss: a pure function of per-token streams."""

from prime_rl.trainer.streams import LossOutput, TokenStreams


def sft_loss(streams: TokenStreams) -> LossOutput:
    """Negative log-likelihood, weighted and summed over tokens; metric `entropy`."""
    nll = -(streams.ce_weights_N * streams.logprobs_N).sum()
    return LossOutput(sums={"ce": nll}, metrics_N={"entropy": streams.entropies_N})
