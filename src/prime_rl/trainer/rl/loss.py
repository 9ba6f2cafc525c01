"""The RL loss: three streams, each a sum over its tokens, which the trainer divides by the stream's tokens.

    stream    tokens                         loss                                   in
    rl        rl_weights != 0, sampled       policy gradient: `loss.type`           trainer.rl.loss_policy
    ce        ce_weights != 0                negative log-likelihood                trainer.sft.loss
    ref_kl    ref_kl_weights != 0, sampled   KL to a reference policy               trainer.rl.loss_reference

    total = rl / N_rl + ce / N_ce + ref_kl / N_ref_kl,   N over all micro-batches and ranks of the step

Every function is pure. docs/losses.md is for readers who choose among them.
"""

from prime_rl.config.algorithms import CustomLossConfig, PolicyLossConfig, RefKLConfig
from prime_rl.trainer.rl.loss_custom import load_custom_loss
from prime_rl.trainer.rl.loss_policy import policy_loss
from prime_rl.trainer.rl.loss_ratios import clamped
from prime_rl.trainer.rl.loss_reference import reference_loss
from prime_rl.trainer.sft.loss import sft_loss
from prime_rl.trainer.streams import LossFunction, LossOutput, TokenStreams


def build_loss(config: PolicyLossConfig | CustomLossConfig, ref_kl: RefKLConfig | None = None) -> LossFunction:
    """The loss that a configuration describes. `ref_kl` None: its defaults.

    Raises: ConfigError for a custom loss that cannot be loaded. The loss raises DataError for a batch that lacks what
    it needs, and PrimeRLError where a custom loss fails.
    """
    if isinstance(config, CustomLossConfig):
        policy = load_custom_loss(config)
    else:

        def policy(streams: TokenStreams) -> LossOutput:
            return policy_loss(streams, config)

    reference_config = ref_kl or RefKLConfig()

    def loss(streams: TokenStreams) -> LossOutput:
        parts = [policy(streams), sft_loss(streams), _mismatch(streams)]
        if streams.ref_logprobs_N is not None:
            parts.append(reference_loss(streams, reference_config))
        return LossOutput(
            sums={stream: total for part in parts for stream, total in part.sums.items()},
            metrics_N={name: values for part in parts for name, values in part.metrics_N.items()},
            counted_N={name: mask for part in parts for name, mask in part.counted_N.items()},
        )

    return loss


def _mismatch(streams: TokenStreams) -> LossOutput:
    """Metric `mismatch_kl` of the tokens that were sampled: r - log r - 1 of the ratio r of their probabilities.

    It is the non-negative estimate of KL(sampler || policy) whose mean is 0 when trainer and engine agree (Schulman,
    "Approximating KL divergence", 2020, estimator k3).
    """
    sampled_N = (streams.rl_weights_N != 0) | (streams.ref_kl_weights_N != 0)
    log_ratio_N = clamped(streams.logprobs_N.detach() - streams.inference_logprobs_N)
    values_N = log_ratio_N.expm1() - log_ratio_N
    return LossOutput(sums={}, metrics_N={"mismatch_kl": values_N}, counted_N={"mismatch_kl": sampled_N})
