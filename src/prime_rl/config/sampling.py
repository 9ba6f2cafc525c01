"""How training samples: from the policy itself, so that the trainer can reproduce the probability of every token."""

from typing import Any, Literal

from pydantic import Field, model_validator

from prime_rl.config.conflict import Conflict
from prime_rl.config.shared import BaseConfig, SamplingConfig

_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "top_p": (1,),
    "top_k": (-1, 0),
    "min_p": (0,),
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "logit_bias": (),
    "logits_processors": (),
    "bad_words": (),
    "allowed_token_ids": (),
    "structured_outputs": (),
    "guided_json": (),
    "guided_regex": (),
    "guided_choice": (),
    "guided_grammar": (),
    "response_format": ({"type": "text"},),
    "thinking_token_budget": (),
    "use_beam_search": (False,),
    "best_of": (1,),
    "vllm_xargs": (),
    "extra_args": (),
}
"""Request fields that are no keys here, and the values under which the engine samples from softmax(logits / T)."""

_BENDS = (
    "the trainer cannot reproduce any other distribution than the policy's own: the importance ratio would be biased"
)


class TemperatureScheduleConfig(BaseConfig):
    """A sampling temperature that changes over the run."""

    type: Literal["linear", "cosine"] = "linear"
    """Shape of the way from the first temperature to the last."""

    start_temperature: float = Field(gt=0, le=2)
    """Temperature of the first step."""

    end_temperature: float = Field(gt=0, le=2)
    """Temperature of the last step."""

    total_steps: int | None = Field(default=None, ge=1)
    """Steps from the first to the last temperature. None: `max_steps`."""


class TrainSamplingConfig(SamplingConfig):
    """How completions are sampled: from the policy itself, unfiltered."""

    temperature: float = Field(default=1.0, ge=0, le=2)
    """Divides the logits before the softmax; the trainer divides by the same value. Above 0: 0 is greedy."""

    repetition_penalty: float = Field(default=1.0, gt=0)
    """Divides the probability of tokens that are already there. Training needs 1: none."""

    min_tokens: int = Field(default=0, ge=0)
    """No stop token before this many tokens. Training needs 0."""

    temp_scheduler: TemperatureScheduleConfig | None = None

    @model_validator(mode="before")
    @classmethod
    def _older_keys_are_neutral(cls, value: Any) -> Any:
        """The older spellings that are left here have a value that training cannot do with."""
        given = [key for key in ("top_p", "top_k", "min_p") if isinstance(value, dict) and key in value]
        extra_body = value.get("extra_body") if given else None
        for key in given:
            if isinstance(extra_body, dict) and key in extra_body:
                raise Conflict(
                    f"{key} stands twice, here and in extra_body; remove both: {_BENDS}",
                    key,
                    f"extra_body.{key}",
                )
            raise Conflict(f"{_BENDS}; remove {key}", key)
        return value

    @model_validator(mode="after")
    def _one_temperature(self) -> Any:
        if self.temp_scheduler is not None and self.temperature != 1.0:
            raise Conflict(
                "set either temperature or temp_scheduler: both say how hot to sample", "temperature", "temp_scheduler"
            )
        return self


def check_is_policy(sampling: TrainSamplingConfig) -> None:
    """Raises: Conflict for what samples from another distribution than softmax(logits / T) with T above 0."""
    if sampling.temperature == 0:
        raise Conflict(
            "temperature 0 is greedy: every rollout of a group would be the same; set it above 0", "temperature"
        )
    bent = [f"extra_body.{key}" for key, field in sorted(sampling.extra_body.items()) if _bends_sampling(key, field)]
    bent += ["min_tokens"] if sampling.min_tokens else []
    bent += ["repetition_penalty"] if sampling.repetition_penalty != 1 else []
    if bent:
        raise Conflict(f"{_BENDS}; remove {' and '.join(bent)}", *bent)


def _bends_sampling(name: str, value: Any) -> bool:
    return name in _NEUTRAL and value not in (None, [], {}, *_NEUTRAL[name])
