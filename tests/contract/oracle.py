"""What a model samples from, computed anew: transformers in float64, and the filters as the OpenAI and vLLM fields say.

    logits -> repetition penalty -> minimum tokens -> temperature -> min-p -> top-k -> top-p -> logprobs

The order is vLLM's.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import AutoModelForCausalLM

Vector = NDArray[np.float64]
Matrix = NDArray[np.float64]


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """The fields of a request that shape the distribution."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    min_tokens: int = 0

    @property
    def fields(self) -> dict[str, float]:
        """Those that are set, as a request has them."""
        neutral = Sampling()
        return {name: value for name, value in vars(self).items() if value != getattr(neutral, name)}


class Oracle:
    """The model of a directory."""

    def __init__(self, directory: Path) -> None:
        self._model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float64, attn_implementation="eager")
        self._eos = self._model.config.eos_token_id

    def logits(self, ids: Sequence[int]) -> Matrix:
        """[T, V]; row t is what follows ids[: t + 1]."""
        with torch.no_grad():
            return self._model(torch.tensor([list(ids)])).logits[0].numpy()

    def prompt_logprobs(self, ids: Sequence[int]) -> Matrix:
        """[T - 1, V]: row t is the distribution of ids[t + 1]."""
        return np.stack([log_softmax(row) for row in self.logits(ids)[:-1]])

    def distributions(
        self, prompt: Sequence[int], completion: Sequence[int], sampling: Sampling, stops: Sequence[int] = ()
    ) -> list[Vector]:
        """The processed distribution from which each token of a completion was drawn, as logprobs [V] each."""
        rows = self.logits([*prompt, *completion])[len(prompt) - 1 : -1]
        return [
            processed(row, [*prompt, *completion[:t]], sampling, [self._eos, *stops] if t < sampling.min_tokens else [])
            for t, row in enumerate(rows)
        ]

    def logprobs(
        self,
        prompt: Sequence[int],
        completion: Sequence[int],
        sampling: Sampling = Sampling(),
        stops: Sequence[int] = (),
    ) -> list[float]:
        """Logprob of each token of a completion under the distribution that it was drawn from."""
        rows = self.distributions(prompt, completion, sampling, stops)
        return [float(row[token]) for row, token in zip(rows, completion, strict=True)]

    def continued(self, older: "Oracle", ids: Sequence[int], num_older: int) -> Matrix:
        """As `logits`, where the keys and values of the first `num_older` tokens are those of another model."""
        if num_older == 0:
            return self.logits(ids)
        with torch.no_grad():
            old = older._model(torch.tensor([list(ids[:num_older])]), use_cache=True)
            rest = torch.tensor([list(ids[num_older:])])
            if rest.numel() == 0:
                return old.logits[0].numpy()
            new = self._model(rest, past_key_values=old.past_key_values)
        return torch.cat([old.logits[0], new.logits[0]]).numpy()


def across_an_update(
    old: Oracle,
    new: Oracle,
    prompt: Sequence[int],
    completion: Sequence[int],
    num_old: int,
    *,
    keeps: bool,
    temperature: float = 1.0,
) -> list[float]:
    """Logprobs of a completion whose first `num_old` tokens were sampled with old weights and the rest with new ones.

    The last token of the old ones was only drawn: its keys and values are computed with the new weights. `keeps`: those
    of the tokens before it stay; otherwise all of them are computed anew.
    """
    ids = [*prompt, *completion]
    num_kept = len(prompt) + num_old - 1 if num_old else 0
    before = old.logits(ids)[len(prompt) - 1 : -1]
    after = new.continued(old, ids, num_kept if keeps else 0)[len(prompt) - 1 : -1]
    rows = np.concatenate([before[:num_old], after[num_old:]])
    return [float(log_softmax(row / temperature)[token]) for row, token in zip(rows, completion, strict=True)]


def processed(logits: Vector, seen: Sequence[int], sampling: Sampling, banned: Sequence[int] = ()) -> Vector:
    """Logprobs [V] after all filters; -inf for what is filtered out. Temperature 0 leaves that of temperature 1."""
    values = logits.copy()
    values[list(banned)] = -np.inf
    tokens = sorted(set(seen))
    penalised = values[tokens]
    factor = sampling.repetition_penalty
    values[tokens] = np.where(penalised > 0, penalised / factor, penalised * factor)
    if sampling.temperature == 0:
        return log_softmax(values)
    values /= sampling.temperature
    if sampling.min_p > 0:
        values[log_softmax(values) < log_softmax(values).max() + np.log(sampling.min_p)] = -np.inf
    if sampling.top_k > 0:
        values[values < np.sort(values)[-sampling.top_k]] = -np.inf
    if sampling.top_p < 1:
        order = np.argsort(-values, kind="stable")
        before = np.cumsum(np.exp(log_softmax(values)[order])) - np.exp(log_softmax(values)[order])
        values[order[before >= sampling.top_p]] = -np.inf
    return log_softmax(values)


def log_softmax(values: Vector) -> Vector:
    shifted = values - values.max()
    with np.errstate(divide="ignore"):
        return np.asarray(shifted - np.log(np.exp(shifted).sum()))
