"""What a request may do to its logits before temperature and filters, a row at a time; most requests do nothing.

In vLLM's order: tokens that are not allowed, bad words, stop tokens before the minimum, biases, penalties.
"""

from collections import Counter

import torch
from torch import Tensor

from prime_rl.inference.backend import SamplingParams
from prime_rl.inference.engine.scheduler import Sequence


def edits(sampling: SamplingParams) -> bool:
    """Whether `edit` may do something."""
    return (
        sampling.min_tokens > 0
        or sampling.has_penalties
        or bool(sampling.logit_bias or sampling.bad_words or sampling.allowed_token_ids)
    )


def edit(logits_V: Tensor, sequence: Sequence) -> None:
    """Change the logits of the next token of `sequence` in place."""
    sampling = sequence.sampling
    if sampling.allowed_token_ids:
        allowed = list(sampling.allowed_token_ids)
        kept = logits_V[allowed]
        logits_V.fill_(-torch.inf)
        logits_V[allowed] = kept
    banned = [token for token in _banned(sequence) if token < len(logits_V)]
    if banned:
        logits_V[banned] = -torch.inf
    if sampling.logit_bias:
        ids, values = zip(*sampling.logit_bias, strict=True)
        logits_V[list(ids)] += torch.tensor(values, device=logits_V.device)
    if sampling.has_penalties:
        _penalize(logits_V, sequence)


def _banned(sequence: Sequence) -> list[int]:
    """The last tokens of bad words of which the rest is there, and, before the minimum of tokens, what would end it."""
    sampling = sequence.sampling
    generated = sequence.tokens[sequence.prompt_len :] if sampling.bad_words else []
    banned = [
        word[-1]
        for word in sampling.bad_words
        if len(word) <= len(generated) + 1 and tuple(generated[len(generated) - len(word) + 1 :]) == word[:-1]
    ]
    if sequence.next_index < sampling.min_tokens:
        banned += sequence.stop_ids
    return banned


def _penalize(logits_V: Tensor, sequence: Sequence) -> None:
    """Repetition counts prompt and completion; frequency and presence count the completion alone."""
    sampling = sequence.sampling
    if sampling.repetition_penalty != 1.0:
        seen = torch.tensor(sorted(set(sequence.tokens)), device=logits_V.device)
        values = logits_V[seen]
        penalty = sampling.repetition_penalty
        logits_V[seen] = torch.where(values > 0, values / penalty, values * penalty)
    counts = Counter(sequence.tokens[sequence.prompt_len :])
    if counts and (sampling.frequency_penalty or sampling.presence_penalty):
        amounts = [sampling.frequency_penalty * count + sampling.presence_penalty for count in counts.values()]
        logits_V[list(counts)] -= torch.tensor(amounts, device=logits_V.device)
