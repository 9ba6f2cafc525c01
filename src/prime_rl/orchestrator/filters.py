"""Filters: which finished rollouts are counted as bad, or left out of training. Pure, but for `vocabulary_size`.

    too_long        it does not fit `seq_len`; always there, and always enforced
    gibberish       a sampled token of a high id, less likely than a uniform choice by e^logprob_offset
    repetition      `window` sampled tokens in a row, each nearly certain
    zero_advantage  the advantage is 0, and nothing else is learned from
    truncated       a length limit ended it

A rollout that is left out keeps its reward, so its group's baseline is what it would have been. That is why one that is
too long is left out and not run again: in its place there would be a shorter one, and the group would be of short ones.
"""

from __future__ import annotations

import importlib
import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

from prime_rl.config.algorithms import (
    FilterConfig,
    GibberishFilterConfig,
    RepetitionFilterConfig,
    TruncatedFilterConfig,
)
from prime_rl.environments.rollouts import Rollout
from prime_rl.environments.trajectories import longest_sample
from prime_rl.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class Filter:
    """One kind of rollout that is looked for."""

    name: str
    enforce: bool
    """Whether it leaves rollouts out; else they are only counted."""
    finds: Callable[[Rollout, float, bool], bool]
    """Of a rollout, its advantage, and whether it learns from a teacher."""


def build_filters(configs: Sequence[FilterConfig], model: str, seq_len: int) -> list[Filter]:
    """That for `too_long`, then those of `configs` in their order.

    Raises: ConfigError where one needs the model's config and there is none.
    """
    too_long = Filter(
        name="too_long",
        enforce=True,
        finds=lambda rollout, advantage, is_taught: longest_sample(rollout) > seq_len,
    )
    configured = [Filter(name=config.type, enforce=config.enforce, finds=_finder(config, model)) for config in configs]
    return [too_long, *configured]


def _finder(config: FilterConfig, model: str) -> Callable[[Rollout, float, bool], bool]:
    if isinstance(config, GibberishFilterConfig):
        least = -math.log(vocabulary_size(model)) - config.logprob_offset
        return lambda rollout, advantage, is_taught: is_gibberish(rollout, config.token_id_threshold, least)
    if isinstance(config, RepetitionFilterConfig):
        most = math.log(config.prob_threshold)
        return lambda rollout, advantage, is_taught: longest_certain_run(rollout, most) >= config.window
    if isinstance(config, TruncatedFilterConfig):
        return lambda rollout, advantage, is_taught: rollout.truncated
    return lambda rollout, advantage, is_taught: advantage == 0 and not is_taught


def is_gibberish(rollout: Rollout, token_id_threshold: int, least_logprob: float) -> bool:
    """Whether a sampled token has an id above the threshold and a logprob below the other."""
    return any(
        token_id > token_id_threshold and logprob < least_logprob
        for turn in rollout.turns
        for token_id, logprob in zip(turn.completion_ids, turn.logprobs, strict=True)
    )


def longest_certain_run(rollout: Rollout, logprob: float) -> int:
    """Most sampled tokens in a row, of one turn, with a logprob above `logprob`."""
    runs = (groupby(turn.logprobs, key=lambda own: own > logprob) for turn in rollout.turns)
    return max((sum(1 for _ in tokens) for run in runs for is_certain, tokens in run if is_certain), default=0)


def vocabulary_size(model: str) -> int:
    """Tokens of a model, a local directory or a hub name. Raises: ConfigError when its config.json has no answer."""
    try:
        config: dict[str, Any] = json.loads(_config_file(model).read_text(encoding="utf-8"))
        return int(config["vocab_size"] if "vocab_size" in config else config["text_config"]["vocab_size"])
    except Exception as error:
        raise ConfigError(
            f"the gibberish filter needs the vocabulary size of {model!r}, and its config.json does not tell: "
            f"{type(error).__name__}: {error}"
        ) from error


def _config_file(model: str) -> Path:
    if Path(model).is_dir():
        return Path(model) / "config.json"
    hub = importlib.import_module("huggingface_hub")  # a third of a second, for this alone
    return Path(hub.hf_hub_download(model, "config.json"))
