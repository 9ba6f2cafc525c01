"""KL to a reference policy (on-policy distillation): a pure function of per-token streams."""

import torch

from prime_rl.config.algorithms import RefKLConfig
from prime_rl.trainer.rl.loss_ratios import clamped
from prime_rl.trainer.streams import LossOutput, TokenStreams


def reference_loss(streams: TokenStreams, config: RefKLConfig) -> LossOutput:
    """Policy gradient of -KL(pi || reference), with the trust region of the default RL loss.

    With pi, mu and q the probability of a token under the weights in training, those that sampled it and the
    reference, r = pi / mu, sg the value without its gradient, and w the token's weight in the stream:

        s    = sg(log q - log pi)
        keep = not (s > 0 and pi - mu > mask_high) and not (s <= 0 and pi - mu < -mask_low)
        L    = sum over tokens of  w * (-keep * s * r + kl_tau * (log r)^2)

    -s is the sampled token's term of KL(pi || q), so s takes the place of the advantage: Lu, "On-policy distillation"
    (Thinking Machines, 2025), Gu et al., MiniLLM (arXiv 2306.08543, eq. 2). Trust region: DPPO (arXiv 2602.04879),
    with s as the advantage. `ref_logprobs_N` must be there.

    Metrics, over the stream's tokens: `ref_kl` = log pi - log q, whose mean under the policy is the KL; and
    `ref_kl_is_masked`, 1 where keep is 0.
    """
    assert streams.ref_logprobs_N is not None
    in_stream_N = streams.ref_kl_weights_N != 0
    log_ratio_N = torch.where(in_stream_N, streams.logprobs_N - streams.inference_logprobs_N, 0.0)
    with torch.no_grad():
        signal_N = torch.where(in_stream_N, streams.ref_logprobs_N - streams.logprobs_N, 0.0)
        change_N = streams.logprobs_N.exp() - streams.inference_logprobs_N.exp()
        dropped_N = torch.where(signal_N > 0, change_N > config.mask_high, change_N < -config.mask_low)
    gradient_N = torch.where(dropped_N, 0.0, -signal_N * clamped(log_ratio_N).exp())
    loss_N = gradient_N + config.kl_tau * log_ratio_N.square()
    metrics = {"ref_kl": -signal_N, "ref_kl_is_masked": dropped_N.to(signal_N.dtype)}
    return LossOutput(
        sums={"ref_kl": (streams.ref_kl_weights_N * loss_N).sum()},
        metrics_N=metrics,
        counted_N=dict.fromkeys(metrics, in_stream_N),
    )
