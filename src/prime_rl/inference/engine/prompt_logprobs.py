"""Logprobs of a prompt's own tokens, gathered while the prompt is computed.

Shape suffixes: T tokens of the prompt, H hidden size, V vocabulary.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from prime_rl.inference.backend import PromptLogprobs

MAX_LOGITS = 1 << 22
"""Most logits that are made at once: 16 MiB in float32."""


class PromptScorer:
    """The logprobs of one prompt under the model's own distribution, from the hidden states of its pieces.

    The pieces come in order and without gaps, so a prompt that is scored takes nothing from the prefix cache. One that
    begins anew (after a preemption, or with new weights) is scored anew, unless it was complete.
    """

    def __init__(self, prompt_ids: Sequence[int], num_top: int, vocab_size: int) -> None:
        self._prompt_ids = prompt_ids
        self._num_top = min(num_top, vocab_size)
        self._num_rows = max(1, MAX_LOGITS // vocab_size)
        self.result: PromptLogprobs = [None]

    @property
    def is_complete(self) -> bool:
        return len(self.result) == len(self._prompt_ids)

    def take(
        self, start: int, hidden_TH: Tensor, logits: Callable[[Tensor], Tensor], max_rows: int | None = None
    ) -> None:
        """Score the tokens after positions `start`, `start + 1`, ..., whose final hidden states these are.

        `logits` is called with at most `max_rows` rows at a time.
        """
        if self.is_complete:
            return
        if start == 0:
            self.result = [None]
        assert start == len(self.result) - 1, (start, len(self.result))
        targets = self._prompt_ids[start + 1 : start + 1 + len(hidden_TH)]
        num_rows = min(self._num_rows, max_rows or self._num_rows)
        for first in range(0, len(targets), num_rows):
            rows = targets[first : first + num_rows]
            self._score(logits(hidden_TH[first : first + len(rows)]), rows)

    def _score(self, logits_TV: Tensor, targets: Sequence[int]) -> None:
        logprobs_TV = logits_TV.float().log_softmax(-1)
        ids_T1 = torch.tensor(targets, device=logprobs_TV.device)[:, None]
        own_T1 = logprobs_TV.gather(-1, ids_T1)
        ranks_T = (logprobs_TV > own_T1).sum(-1) + 1
        tops = logprobs_TV.topk(self._num_top, dim=-1)
        columns = (targets, own_T1[:, 0].tolist(), ranks_T.tolist(), tops.indices.tolist(), tops.values.tolist())
        for token, logprob, rank, top_ids, top_logprobs in zip(*columns, strict=True):
            ranked = zip(top_ids, top_logprobs, range(1, len(top_ids) + 1), strict=True)
            self.result.append([(token, logprob, rank), *ranked])
