"""What is learned from: the loss, advantages, filters and the buffer."""

from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from prime_rl.config.conflict import Conflict
from prime_rl.config.shared import BaseConfig


class _PolicyLossConfig(BaseConfig):
    """What the losses of the policy-gradient stream have in common.

    The ratio of a token is its probability under the weights in training over that under those that sampled it.
    """

    adv_tau: float = Field(default=1.0, ge=0)
    """Factor of the advantages."""

    kl_tau: float = Field(default=0.0, ge=0)
    """Factor of the squared log-ratio, which pulls the policy towards the one that sampled."""

    teacher_tau: float = Field(default=0.0, ge=0)
    """Factor of the teacher's log-ratio in the advantage (on-policy distillation). Above 0, batches must carry the
    teacher's logprobs."""

    token_mask_low: float | None = Field(default=None, ge=0)
    """Tokens with a smaller importance ratio are left out. None: no such bound. IcePop: 0.5, with 5 above."""

    token_mask_high: float | None = Field(default=None, ge=0)
    """Tokens with a larger importance ratio are left out. None: no such bound."""

    geo_mask_low: float | None = Field(default=None, ge=0)
    """Sequences with a smaller geometric mean of ratios are left out. None: no such bound."""

    geo_mask_high: float | None = Field(default=None, ge=0)
    """Sequences with a larger geometric mean of ratios are left out. None: no such bound."""

    sequence_mask_low: float | None = Field(default=None, ge=0)
    """Sequences with any smaller token ratio are left out. None: no such bound."""

    sequence_mask_high: float | None = Field(default=None, ge=0)
    """Sequences with any larger token ratio are left out. None: no such bound."""

    @model_validator(mode="after")
    def _bounds_are_ordered(self) -> Any:
        for name in ("token_mask", "geo_mask", "sequence_mask"):
            low, high = getattr(self, f"{name}_low"), getattr(self, f"{name}_high")
            if low is not None and high is not None and low >= high:
                raise Conflict(f"{name}_low must be below {name}_high", f"{name}_low", f"{name}_high")
        return self


class _WeightedLossConfig(_PolicyLossConfig):
    """A policy gradient weighted by importance ratios."""

    kl_tau: float = Field(default=1e-3, ge=0)
    """Factor of the squared log-ratio, which pulls the policy towards the one that sampled."""

    ratio_type: Literal["token", "sequence"] = "token"
    """Whether a token is weighted by its own ratio, or by its whole sequence's: the product of its tokens' ratios."""

    tis_cap: float | None = Field(default=None, gt=0)
    """Truncated importance sampling: a token of a larger ratio is weighted by this. None: by its ratio."""

    sequence_clip_high: float | None = Field(default=None, ge=0)
    """Upper bound of a sequence's ratio (`ratio_type = "sequence"`). None: no such bound."""

    @model_validator(mode="after")
    def _one_cap(self) -> Any:
        of_sequence = self.ratio_type == "sequence"
        if of_sequence and self.tis_cap is not None:
            raise Conflict("tis_cap bounds a token's ratio; use sequence_clip_high", "tis_cap", "ratio_type")
        if not of_sequence and self.sequence_clip_high is not None:
            raise Conflict(
                "sequence_clip_high bounds a sequence's ratio; use tis_cap, or set ratio_type to sequence",
                "sequence_clip_high",
                "ratio_type",
            )
        return self


class LossConfig(_WeightedLossConfig):
    """Importance-weighted policy gradient in a trust region of probabilities; formula in `trainer.rl.loss_policy`."""

    type: Literal["default"] = "default"

    dppo_mask_low: float = Field(default=0.2, ge=0)
    """Tokens of advantage <= 0 are left out when their probability fell by more than this since they were sampled."""

    dppo_mask_high: float = Field(default=0.2, ge=0)
    """Tokens of advantage > 0 are left out when their probability rose by more than this since they were sampled."""


class IPOLossConfig(_WeightedLossConfig):
    """As the default, with a trust region that leaves a token out whichever way its probability moved."""

    type: Literal["ipo"] = "ipo"

    ipo_threshold: float = Field(default=0.1, ge=0)
    """Tokens whose probability moved by more than this since they were sampled are left out."""


class GRPOLossConfig(_PolicyLossConfig):
    """Policy gradient on the ratio, clipped from above."""

    type: Literal["grpo"] = "grpo"

    clip_ratio: float = Field(default=8.0, gt=0)
    """Largest ratio. A token beyond it has no gradient."""


class _ClippedLossConfig(_PolicyLossConfig):
    """PPO's clipped surrogate."""

    clip_low: float = Field(default=0.2, ge=0, le=1)
    """A token of negative advantage has no gradient once its ratio is below 1 minus this."""

    clip_high: float = Field(default=0.2, ge=0)
    """A token of positive advantage has no gradient once its ratio is above 1 plus this."""

    clip_ratio: float | None = Field(default=4.0, gt=1)
    """A token of negative advantage has no gradient once its ratio is above this. None: no such bound."""

    @model_validator(mode="after")
    def _dual_clip_is_outside(self) -> Any:
        if self.clip_ratio is not None and self.clip_ratio < 1 + self.clip_high:
            raise Conflict(
                f"clip_ratio must be {1 + self.clip_high:g} or more: 1 + clip_high", "clip_ratio", "clip_high"
            )
        return self


class PPOClipLossConfig(_ClippedLossConfig):
    """PPO's clipped surrogate, clipped once more where the advantage is negative (dual clip)."""

    type: Literal["ppo_clip"] = "ppo_clip"


class GSPOLossConfig(_ClippedLossConfig):
    """PPO's clipped surrogate on the geometric mean of a sequence's ratios."""

    type: Literal["gspo"] = "gspo"

    clip_low: float = Field(default=3e-4, ge=0, le=1)
    """A sequence of negative advantage has no gradient once its ratio is below 1 minus this."""

    clip_high: float = Field(default=4e-4, ge=0)
    """A sequence of positive advantage has no gradient once its ratio is above 1 plus this."""

    clip_ratio: float | None = Field(default=None, gt=1)
    """A sequence of negative advantage has no gradient once its ratio is above this. None: no such bound."""


class CISPOLossConfig(_PolicyLossConfig):
    """Log-likelihood weighted by advantage and clipped ratio: every token keeps its gradient."""

    type: Literal["cispo"] = "cispo"

    clip_low: float = Field(default=1.0, ge=0, le=1)
    """The least weight of a token is 1 minus this."""

    clip_high: float = Field(default=4.0, ge=0)
    """The largest weight of a token is 1 plus this."""


class RefKLConfig(BaseConfig):
    """KL to a reference policy, for the tokens of a batch that carry its logprobs and a weight in this stream."""

    mask_low: float = Field(default=0.2, ge=0)
    """Tokens that the reference finds less likely are left out when their probability fell by more than this since they
    were sampled."""

    mask_high: float = Field(default=0.2, ge=0)
    """Tokens that the reference finds more likely are left out when their probability rose by more than this since they
    were sampled."""

    kl_tau: float = Field(default=1e-3, ge=0)
    """Factor of the squared log-ratio, which pulls the policy towards the one that sampled."""


class _CustomFunctionConfig(BaseConfig):
    """A function of the user's."""

    import_path: str
    """The function, as `package.module.function` or `package.module:function`."""

    kwargs: dict[str, Any] = {}
    """Further arguments of the function."""


class CustomLossConfig(_CustomFunctionConfig):
    """A loss of your own in place of the policy gradient; docs/losses.md says what it is given and what it returns."""

    type: Literal["custom"] = "custom"


PolicyLossConfig = LossConfig | IPOLossConfig | GRPOLossConfig | PPOClipLossConfig | GSPOLossConfig | CISPOLossConfig

RLLossConfig = Annotated[PolicyLossConfig | CustomLossConfig, Field(discriminator="type")]


class LengthPenaltyConfig(BaseConfig):
    """Rewards fall with what a rollout costs, relative to the costliest of its group.

    A rollout loses the group's mean reward times the sum of the three weights, each times its own share of the group's
    most.
    """

    output_weight: float = Field(default=0.25, ge=0)
    """Weight of sampled tokens."""

    input_weight: float = Field(default=0.1, ge=0)
    """Weight of tokens that the model was sent, over all turns."""

    turns_weight: float = Field(default=0.1, ge=0)
    """Weight of turns."""


class AdvantageConfig(BaseConfig):
    """A rollout's reward minus the mean of its group."""

    type: Literal["default"] = "default"

    length_weighted_mean: bool = False
    """Whether the mean is weighted by completion length, which makes it the mean reward of a token."""

    std_norm: Literal["local", "global"] | None = None
    """Divide by the standard deviation of the group's rewards (local) or of the batch's advantages (global). None: do
    not."""

    leave_one_out: bool = False
    """Whether a rollout's own reward is left out of its baseline."""

    neg_clipped: bool = False
    """Whether negative advantages become 0."""

    zero_truncated: bool = False
    """Whether the reward of a rollout that a length limit ended counts as 0."""

    length_shaping_alpha: float | None = Field(default=None, ge=0)
    """Divide rewards by 1 + this times the rollout's length over the mean length of its group. None: do not."""

    length_penalty: LengthPenaltyConfig | None = None

    @model_validator(mode="after")
    def _one_penalty(self) -> Any:
        if self.length_shaping_alpha is not None and self.length_penalty is not None:
            raise Conflict(
                "set either length_shaping_alpha or length_penalty: both make long rollouts worth less",
                "length_shaping_alpha",
                "length_penalty",
            )
        return self


class RewardAdvantageConfig(BaseConfig):
    """The reward itself, without a baseline."""

    type: Literal["reward"] = "reward"


class DistillationConfig(BaseConfig):
    """No policy gradient: sampled tokens learn from the teacher alone (`kl_weight`), whatever their reward."""

    type: Literal["distillation"] = "distillation"


class CustomAdvantageConfig(_CustomFunctionConfig):
    """Advantages of your own; docs/algorithms.md says what the function is given and what it returns."""

    type: Literal["custom"] = "custom"


AnyAdvantageConfig = Annotated[
    AdvantageConfig | RewardAdvantageConfig | DistillationConfig | CustomAdvantageConfig, Field(discriminator="type")
]


class GibberishFilterConfig(BaseConfig):
    """Rollouts with a rare token that was itself improbable."""

    type: Literal["gibberish"] = "gibberish"

    enforce: bool = False
    """Whether such rollouts are left out of training; else they are only counted."""

    token_id_threshold: int = Field(default=100_000, ge=0)
    """Token ids above this are rare."""

    logprob_offset: float = 2.0
    """Improbable: a log-probability below that of a uniform choice by more than this."""


class RepetitionFilterConfig(BaseConfig):
    """Rollouts that repeat themselves: a long stretch of tokens that were nearly certain."""

    type: Literal["repetition"] = "repetition"

    enforce: bool = False
    """Whether such rollouts are left out of training; else they are only counted."""

    window: int = Field(default=3000, ge=1)
    """Tokens of such a stretch."""

    prob_threshold: float = Field(default=0.99, gt=0, le=1)
    """Nearly certain: a probability above this."""


class ZeroAdvantageFilterConfig(BaseConfig):
    """Rollouts whose advantage is 0, which teach nothing; those that learn from a teacher are left alone."""

    type: Literal["zero_advantage"] = "zero_advantage"

    enforce: bool = True
    """Whether such rollouts are left out of training; else they are only counted."""


class TruncatedFilterConfig(BaseConfig):
    """Rollouts that a length limit ended."""

    type: Literal["truncated"] = "truncated"

    enforce: bool = True
    """Whether such rollouts are left out of training; else they are only counted."""


FilterConfig = Annotated[
    GibberishFilterConfig | RepetitionFilterConfig | ZeroAdvantageFilterConfig | TruncatedFilterConfig,
    Field(discriminator="type"),
]


class BufferConfig(BaseConfig):
    """Which examples are drawn, and which groups are worth training on."""

    seed: int | None = None
    """Seeds the draws. None: the orchestrator's seed."""

    env_ratios: tuple[float, ...] | None = None
    """How often each environment is drawn, in their order; they need not add up to 1. None: by number of examples."""

    easy_threshold: float | None = None
    """Examples with a mean reward of at least this are put aside as easy. None: none are."""

    hard_threshold: float | None = None
    """Examples with a mean reward of at most this are put aside as hard. None: none are."""

    easy_fraction: float = Field(default=0.0, ge=0, le=1)
    """Share of the easy examples that come back when a run is resumed."""

    hard_fraction: float = Field(default=0.0, ge=0, le=1)
    """Share of the hard examples that come back when a run is resumed."""

    online_difficulty_filtering: bool = False
    """Whether groups with a mean reward of exactly 0 or 1 are replaced by others before training."""

    hash_keys: tuple[str, ...] = Field(default=("task", "prompt"), min_length=1)
    """Columns by which an example is recognised when a run is resumed."""

    skip_verification: bool = False
    """Whether completions are not scored (distillation without rewards)."""

    @model_validator(mode="after")
    def _thresholds(self) -> Any:
        easy, hard = self.easy_threshold, self.hard_threshold
        if easy is not None and hard is not None and easy <= hard:
            raise Conflict("easy_threshold must be above hard_threshold", "easy_threshold", "hard_threshold")
        if self.env_ratios is not None and any(ratio <= 0 for ratio in self.env_ratios):
            raise Conflict("env_ratios must be above 0", "env_ratios")
        thresholds = {"easy_threshold": easy, "hard_threshold": hard}
        filtering = [key for key, value in thresholds.items() if value is not None]
        filtering += ["online_difficulty_filtering"] if self.online_difficulty_filtering else []
        if self.skip_verification and filtering:
            raise Conflict(
                f"skip_verification leaves no rewards to filter by; drop {' and '.join(filtering)}",
                "skip_verification",
                *filtering,
            )
        return self
