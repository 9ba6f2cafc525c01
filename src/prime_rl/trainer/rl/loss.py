"""The RL loss: a pure function of per-token streams."""

import torch

from prime_rl.config.algorithms import CustomLossConfig, LossConfig
from prime_rl.trainer.streams import LossFunction, LossOutput, TokenStreams


def default_loss(streams: TokenStreams, config: LossConfig) -> LossOutput:
    """Importance-weighted policy gradient with a trust region by masking and a quadratic pull to the sampler.

    With pi the probability of a token under the weights in training, mu under those that sampled it, r = pi
    / mu, A its advantage and delta = pi - mu:

        keep = not (A > 0 and delta > dppo_mask_high) and not (A <= 0 and delta < -dppo_mask_low)
        L    = sum over tokens of  -keep * adv_tau * A * r  +  kl_tau * (log r)^2

    A token is dropped from the first term only where its probability has already moved, by an absolute
    amount, the way its advantage pushes it: the total-variation form of DPPO (arXiv 2602.04879). The second
    term is the squared log-ratio of Kimi K2.5 (arXiv 2602.02276) and covers dropped tokens too. The trainer
    divides by the loss tokens of the whole batch.

    Metrics: `entropy`; `mismatch_kl` = r - log r - 1, the non-negative estimate of KL(mu || pi) whose mean
    is 0 when trainer and engine agree (Schulman, "Approximating KL divergence"); `is_masked`, 1 where a
    token was dropped.
    """
    log_ratio = streams.logprobs_N - streams.inference_logprobs_N
    with torch.no_grad():
        delta = streams.logprobs_N.exp() - streams.inference_logprobs_N.exp()
        pushed_up = streams.advantages_N > 0
        dropped = torch.where(pushed_up, delta > config.dppo_mask_high, delta < -config.dppo_mask_low)
        mismatch_kl = log_ratio.expm1() - log_ratio
    # A dropped token's ratio may overflow, and 0 * inf is not 0; so it is dropped before the exponential.
    ratio = log_ratio.masked_fill(dropped, 0.0).exp()
    policy_gradient = -config.adv_tau * streams.advantages_N * ratio * ~dropped
    loss = policy_gradient + config.kl_tau * log_ratio.square()
    metrics = {"entropy": streams.entropies_N, "mismatch_kl": mismatch_kl, "is_masked": dropped.float()}
    return LossOutput(sums={"rl": (streams.rl_weights_N * loss).sum()}, metrics_N=metrics)


def build_loss(config: LossConfig | CustomLossConfig) -> LossFunction:
    """The loss that a configuration describes."""
    assert isinstance(config, LossConfig), "a custom loss is refused at the start (config.pending)"
    return lambda streams: default_loss(streams, config)
