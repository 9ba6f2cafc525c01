"""The losses of the policy-gradient stream, one function each: `loss.type` is its name.

Notation of the formulas, for a token of the stream:

    pi, mu    its probability under the weights in training, and under those that sampled it
    r         pi / mu, the importance ratio
    A         adv_tau * advantage, plus teacher_tau * sg(log q - log pi) with the probability q of a teacher
    w         its weight in the stream (`rl_weights`), 1 unless a batch says otherwise
    sg(x)     x, without its gradient

There is one optimizer step a batch, so the weights in training are those of the step's start: the "old policy" of PPO
and its kin is mu, the policy that sampled, whose logprobs the engine has recorded. So r corrects at once for
asynchrony and for what trainer and engine compute differently.

Every type has `kl_tau` and the masks of `loss_ratios`. With m = 1 for a token that such a mask leaves out, each loss
below, called l, becomes

    L = sum over the stream's tokens of  w * (1 - m) * (l + kl_tau * (log r)^2)

The squared log-ratio is that of Kimi K2.5 (arXiv 2602.02276). The trainer divides L by the stream's tokens in the whole
batch, those left out included: a mask takes a token's gradient away and leaves that of the others as it is.

Shape suffix: N tokens in the loss, of any stream.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from prime_rl.config.algorithms import (
    CISPOLossConfig,
    GRPOLossConfig,
    GSPOLossConfig,
    IPOLossConfig,
    LossConfig,
    PolicyLossConfig,
    PPOClipLossConfig,
)
from prime_rl.errors import DataError
from prime_rl.trainer.rl.loss_ratios import clamped, geometric_log_ratios, ratio_masks, sequence_log_ratios
from prime_rl.trainer.streams import LossOutput, TokenStreams


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyTerms:
    """What the losses are made of, [N]. Tokens outside the stream have log-ratio and advantage 0."""

    logprobs_N: Tensor
    """log pi; carries gradients."""
    log_ratio_N: Tensor
    """log r; carries gradients."""
    advantages_N: Tensor
    """A."""
    change_N: Tensor
    """pi - mu."""
    in_stream_N: Tensor
    """bool."""
    sequence_N: Tensor
    num_sequences: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyPart:
    """l of every token; bool [N], for metrics: where it was dropped from l, and where its ratio was clipped."""

    loss_N: Tensor
    dropped_N: Tensor | None = None
    clipped_N: Tensor | None = None


def policy_loss(streams: TokenStreams, config: PolicyLossConfig) -> LossOutput:
    """The policy-gradient stream under a loss of any type.

    Metrics, over the stream's tokens: `importance_ratio`; `is_masked`, 1 where a trust region or a mask took the
    token's policy gradient away; `is_clipped`, 1 where the ratio was clipped; `token_masked`, `geo_masked`,
    `sequence_masked`, 1 where that mask left the token out, for masks that are on; `teacher_kl` = log pi - log q with a
    teacher. Raises: DataError for a batch without the teacher's logprobs where `teacher_tau` needs them.
    """
    terms = _terms(streams, config)
    masks = ratio_masks(terms.log_ratio_N.detach(), terms.in_stream_N, terms.sequence_N, terms.num_sequences, config)
    part = _LOSSES[type(config)](terms, config)
    loss_N = part.loss_N + config.kl_tau * terms.log_ratio_N.square()
    left_out_N = torch.zeros_like(terms.in_stream_N)
    for mask_N in masks.values():
        left_out_N = left_out_N | mask_N
    total = (streams.rl_weights_N * torch.where(left_out_N, 0.0, loss_N)).sum()
    flags = {**masks, "is_masked": left_out_N if part.dropped_N is None else left_out_N | part.dropped_N}
    if part.clipped_N is not None:
        flags["is_clipped"] = part.clipped_N
    metrics = {name: flag_N.to(loss_N.dtype) for name, flag_N in flags.items()}
    metrics["importance_ratio"] = clamped(terms.log_ratio_N.detach()).exp()
    if config.teacher_tau and streams.ref_logprobs_N is not None:
        metrics["teacher_kl"] = streams.logprobs_N.detach() - streams.ref_logprobs_N
    return LossOutput(sums={"rl": total}, metrics_N=metrics, counted_N=dict.fromkeys(metrics, terms.in_stream_N))


def _terms(streams: TokenStreams, config: PolicyLossConfig) -> PolicyTerms:
    in_stream_N = streams.rl_weights_N != 0
    logprobs_N = streams.logprobs_N.detach()
    advantages_N = config.adv_tau * streams.advantages_N
    if config.teacher_tau and streams.ref_logprobs_N is not None:
        advantages_N = advantages_N + config.teacher_tau * (streams.ref_logprobs_N - logprobs_N)
    elif config.teacher_tau and bool(in_stream_N.any()):
        raise DataError(
            f"loss.teacher_tau is {config.teacher_tau}, but a micro-batch has no logprobs of a teacher "
            "(ref_logprobs); set loss.teacher_tau to 0, or have the orchestrator ask a teacher"
        )
    return PolicyTerms(
        logprobs_N=streams.logprobs_N,
        log_ratio_N=torch.where(in_stream_N, streams.logprobs_N - streams.inference_logprobs_N, 0.0),
        advantages_N=torch.where(in_stream_N, advantages_N, 0.0),
        change_N=logprobs_N.exp() - streams.inference_logprobs_N.exp(),
        in_stream_N=in_stream_N,
        sequence_N=streams.sequence_N,
        num_sequences=streams.num_sequences,
    )


def default_loss(terms: PolicyTerms, config: LossConfig) -> PolicyPart:
    """Importance-weighted policy gradient in a trust region of probabilities.

        keep = not (A > 0 and pi - mu > dppo_mask_high) and not (A <= 0 and pi - mu < -dppo_mask_low)
        l    = -keep * A * r

    A token is dropped only where its probability has already moved, by an absolute amount, the way its advantage pushes
    it: DPPO, binary total-variation form (arXiv 2602.04879). Other weights than r: `weighted`.
    """
    dropped_N = torch.where(
        terms.advantages_N > 0, terms.change_N > config.dppo_mask_high, terms.change_N < -config.dppo_mask_low
    )
    return weighted(terms, config, dropped_N)


def ipo_loss(terms: PolicyTerms, config: IPOLossConfig) -> PolicyPart:
    """As the default, with a trust region that does not look at the advantage.

    keep = |pi - mu| <= ipo_threshold
    l    = -keep * A * r
    """
    return weighted(terms, config, terms.change_N.abs() > config.ipo_threshold)


def weighted(terms: PolicyTerms, config: LossConfig | IPOLossConfig, dropped_N: Tensor) -> PolicyPart:
    """-A * r of the tokens that are not dropped, or a bounded or sequence-wide weight v in place of r.

        v = min(r, tis_cap)                                with tis_cap: truncated importance sampling
        v = min(product of r over the sequence, sequence_clip_high)     with ratio_type = "sequence"
        l = -A * sg(v) * pi / sg(pi)

    The value is -A * v, the gradient -A * v * grad(log pi), also where v is at its bound: a bounded weight trades bias
    for variance and silences no token. Ionides, "Truncated importance sampling" (2008); Yao et al., "Your efficient RL
    framework secretly brings you off-policy RL training" (2025). Without bounds the product over a sequence is the
    unbiased weight of an episode, and pi / sg(pi) is 1.
    """
    if config.ratio_type == "sequence":
        log_S = sequence_log_ratios(
            terms.log_ratio_N.detach(), terms.in_stream_N, terms.sequence_N, terms.num_sequences
        )
        ratio_N, cap = clamped(log_S)[terms.sequence_N].exp(), config.sequence_clip_high
    else:
        ratio_N, cap = clamped(terms.log_ratio_N).exp(), config.tis_cap
    if config.ratio_type == "sequence" or cap is not None:
        ratio_N = ratio_N.detach()
        clipped_N = None if cap is None else ratio_N > cap
        weight_N = (ratio_N if cap is None else ratio_N.clamp(max=cap)) * _one(terms)
    else:
        clipped_N, weight_N = None, ratio_N
    loss_N = torch.where(dropped_N, 0.0, -terms.advantages_N * weight_N)
    return PolicyPart(loss_N=loss_N, dropped_N=dropped_N, clipped_N=clipped_N)


def grpo_loss(terms: PolicyTerms, config: GRPOLossConfig) -> PolicyPart:
    """Policy gradient on the ratio, clipped from above.

        l = -A * min(r, clip_ratio)

    A clipped token has no gradient. The clip is that of AIPO, from above only (LlamaRL, arXiv 2505.24034); advantages
    of a group are GRPO's (DeepSeekMath, arXiv 2402.03300) and come with the batch.
    """
    ratio_N = clamped(terms.log_ratio_N).exp()
    bounded_N = ratio_N.clamp(max=config.clip_ratio)
    return PolicyPart(loss_N=-terms.advantages_N * bounded_N, clipped_N=ratio_N.detach() > config.clip_ratio)


def ppo_clip_loss(terms: PolicyTerms, config: PPOClipLossConfig) -> PolicyPart:
    """PPO's clipped surrogate with bounds of its own on either side, and a second clip for negative advantages.

        A >= 0:  l = -A * min(r, 1 + clip_high)
        A <  0:  l = -A * min(max(r, 1 - clip_low), clip_ratio)

    The same as -min(r * A, clip(r, 1 - clip_low, 1 + clip_high) * A) of PPO (arXiv 1707.06347, eq. 7), written out by
    the sign of A; two bounds: DAPO (arXiv 2503.14476); clip_ratio: dual-clip PPO (arXiv 1912.09729). A clipped token
    has no gradient.
    """
    return _surrogate(terms, clamped(terms.log_ratio_N).exp(), config)


def gspo_loss(terms: PolicyTerms, config: GSPOLossConfig) -> PolicyPart:
    """PPO's clipped surrogate on the geometric mean of a sequence's ratios.

        s   = exp(mean of log r over the sequence's tokens in the stream)
        s_t = sg(s) * pi / sg(pi)
        l   = ppo_clip's, with s_t in place of r

    GSPO-token (arXiv 2507.18071, s in eq. 7, the surrogate in eq. 13, s_t in eq. 14), which has GSPO's gradient where
    all tokens of a sequence share an advantage. The paper averages over a sequence's tokens first, and then over
    sequences; here all tokens of the batch weigh the same.
    """
    log_S = geometric_log_ratios(terms.log_ratio_N.detach(), terms.in_stream_N, terms.sequence_N, terms.num_sequences)
    return _surrogate(terms, clamped(log_S)[terms.sequence_N].exp() * _one(terms), config)


def cispo_loss(terms: PolicyTerms, config: CISPOLossConfig) -> PolicyPart:
    """Log-likelihood weighted by advantage and clipped ratio.

        l = -A * sg(clip(r, 1 - clip_low, 1 + clip_high)) * log pi

    The weight is clipped, not the token, which always keeps a gradient: CISPO (MiniMax-M1, arXiv 2506.13585, eq. 4 and
    5; no lower bound there, as here by default). Upper bound by default: ScaleRL (arXiv 2510.13786).
    """
    ratio_N = clamped(terms.log_ratio_N.detach()).exp()
    low, high = 1 - config.clip_low, 1 + config.clip_high
    weight_N = ratio_N.clamp(low, high)
    return PolicyPart(loss_N=-terms.advantages_N * weight_N * terms.logprobs_N, clipped_N=weight_N != ratio_N)


def _surrogate(terms: PolicyTerms, ratio_N: Tensor, config: PPOClipLossConfig | GSPOLossConfig) -> PolicyPart:
    """The clipped surrogate of `ppo_clip_loss` on any ratio."""
    when_pushed_up_N = ratio_N.clamp(max=1 + config.clip_high)
    when_pushed_down_N = ratio_N.clamp(min=1 - config.clip_low, max=config.clip_ratio)
    bounded_N = torch.where(terms.advantages_N >= 0, when_pushed_up_N, when_pushed_down_N)
    return PolicyPart(loss_N=-terms.advantages_N * bounded_N, clipped_N=bounded_N.detach() != ratio_N)


def _one(terms: PolicyTerms) -> Tensor:
    """pi / sg(pi): 1, with the gradient of log pi."""
    return (terms.logprobs_N - terms.logprobs_N.detach()).exp()


_LOSSES: dict[type, Callable[..., PolicyPart]] = {
    LossConfig: default_loss,
    IPOLossConfig: ipo_loss,
    GRPOLossConfig: grpo_loss,
    PPOClipLossConfig: ppo_clip_loss,
    GSPOLossConfig: gspo_loss,
    CISPOLossConfig: cispo_loss,
}
