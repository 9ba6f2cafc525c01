"""What is learned from: the loss, advantages, filters and the buffer."""

from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from prime_rl.config.conflict import Conflict
from prime_rl.config.shared import BaseConfig


class LossConfig(BaseConfig):
    """Importance-weighted policy gradient with masked tokens; formula and sources in `trainer.rl.loss`."""

    type: Literal["default"] = "default"

    dppo_mask_low: float = Field(default=0.2, ge=0)
    """Tokens of advantage <= 0 are left out when their probability fell by more than this since they were sampled."""

    dppo_mask_high: float = Field(default=0.2, ge=0)
    """Tokens of advantage > 0 are left out when their probability rose by more than this since they were sampled."""

    adv_tau: float = Field(default=1.0, ge=0)
    """Factor of the policy-gradient term."""

    kl_tau: float = Field(default=1e-3, ge=0)
    """Factor of the squared log-ratio, which pulls the policy towards the one that sampled."""

    teacher_tau: float = Field(default=0.0, ge=0)
    """Factor of the teacher's log-ratio in the advantage (on-policy distillation)."""

    ratio_type: Literal["token", "sequence"] = "token"
    """Whether the importance ratio is a token's own or its whole sequence's."""

    token_mask_low: float | None = Field(default=None, ge=0)
    """Tokens with a smaller importance ratio are left out. None: no such bound."""

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

    sequence_clip_high: float | None = Field(default=None, ge=0)
    """Upper bound of a sequence's ratio (`ratio_type = "sequence"`). None: no such bound."""

    @model_validator(mode="after")
    def _bounds_are_ordered(self) -> Any:
        for name in ("token_mask", "geo_mask", "sequence_mask"):
            low, high = getattr(self, f"{name}_low"), getattr(self, f"{name}_high")
            if low is not None and high is not None and low >= high:
                raise Conflict(f"{name}_low must be below {name}_high", f"{name}_low", f"{name}_high")
        return self


class _CustomFunctionConfig(BaseConfig):
    """A function of the user's."""

    import_path: str
    """The function, as `package.module.function` or `package.module:function`."""

    kwargs: dict[str, Any] = {}
    """Further arguments of the function."""


class CustomLossConfig(_CustomFunctionConfig):
    """A loss of your own."""

    type: Literal["custom"] = "custom"


RLLossConfig = Annotated[LossConfig | CustomLossConfig, Field(discriminator="type")]


class AdvantageConfig(BaseConfig):
    """A rollout's reward minus the mean of its group."""

    type: Literal["default"] = "default"

    length_weighted_mean: bool = False
    """Whether the mean is weighted by completion length, which makes it the mean reward of a token."""

    std_norm: Literal["local", "global"] | None = None
    """Divide by the standard deviation of the group (local) or of the batch (global). None: do not."""

    leave_one_out: bool = False
    """Whether a rollout's own reward is left out of its baseline."""

    neg_clipped: bool = False
    """Whether negative advantages become 0."""


class CustomAdvantageConfig(_CustomFunctionConfig):
    """Advantages of your own."""

    type: Literal["custom"] = "custom"


AnyAdvantageConfig = Annotated[AdvantageConfig | CustomAdvantageConfig, Field(discriminator="type")]


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
    """Rollouts whose advantage is 0, which teach nothing."""

    type: Literal["zero_advantage"] = "zero_advantage"

    enforce: bool = True
    """Whether such rollouts are left out of training; else they are only counted."""


FilterConfig = Annotated[
    GibberishFilterConfig | RepetitionFilterConfig | ZeroAdvantageFilterConfig, Field(discriminator="type")
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
