"""The slow path of sampling on a GPU: rows that ask for more than a temperature, outside of the CUDA graph.

The graph has drawn for these rows too; what is drawn here from the same logits takes the place of that, before the next
step reads it. So a request with a penalty or a filter costs time and changes nothing for the rows beside it.
"""

from collections.abc import Sequence as Seq
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from prime_rl.inference.engine.logits import edits
from prime_rl.inference.engine.sampler import Plan, uniform
from prime_rl.inference.engine.scheduler import Chunk, Sequence

MAX_LOGITS = 1 << 22
"""Most logits that are edited at once: sorting them takes about ten times their 16 MiB."""

Pairs = tuple[tuple[int, float], ...]


@dataclass(frozen=True, slots=True)
class Tops:
    """Most likely tokens of some rows of a step, on their way to the host."""

    rows: list[int]
    """Row of the step of each row of the plan."""
    plan: Plan
    values: Tensor
    ids: Tensor

    def arrived(self) -> dict[int, Pairs]:
        """By row of the step; call it after the copy is complete."""
        tops = self.plan.top_logprobs(self.values, self.ids)
        return {self.rows[row]: pairs for row, pairs in tops.items()}


def is_plain(sequence: Sequence) -> bool:
    """Whether a temperature, or taking the most likely token, is all that a request asks of sampling."""
    sampling = sequence.sampling
    filters = sampling.temperature > 0 and (sampling.top_p < 1.0 or sampling.top_k > 0 or sampling.min_p > 0.0)
    return not (filters or sampling.num_top_logprobs or edits(sampling))


def redraw(chunks: Seq[Chunk], logits_SV: Tensor, last_tokens: Tensor, out_S2: Tensor, first_row: int) -> list[Tops]:
    """Draw again for the chunks that are not plain, into `out_S2` and `last_tokens`.

    A logprob of infinity says that the row's own parameters leave nothing to draw; NaN, that its logits are not finite.
    `first_row`: which row of the step the first chunk is.
    """
    rows = [row for row, chunk in enumerate(chunks) if not is_plain(chunk.sequence)]
    most = max(1, MAX_LOGITS // logits_SV.shape[1])
    groups = [rows[first : first + most] for first in range(0, len(rows), most)]
    tops = [_redraw(group, [chunks[row].sequence for row in group], logits_SV, last_tokens, out_S2) for group in groups]
    return [
        Tops([first_row + row for row in top.rows], top.plan, top.values, top.ids) for top in tops if top is not None
    ]


def _redraw(
    rows: list[int], sequences: list[Sequence], logits_SV: Tensor, last_tokens: Tensor, out_S2: Tensor
) -> Tops | None:
    device = logits_SV.device
    plan = Plan(sequences, device)
    at = torch.tensor(rows, device=device)
    chosen_logits_SV = logits_SV[at].float()
    indices = np.array([sequence.next_index for sequence in sequences], dtype=np.uint64)
    draws_S = torch.from_numpy(uniform(plan.seeds, indices)).to(device)
    logprobs_SV = plan.logprobs(chosen_logits_SV)
    ids_S, drawn_S = plan.draw(logprobs_SV, draws_S)
    are_finite_S = torch.isfinite(chosen_logits_SV).all(-1)
    marks_S = torch.where(are_finite_S, torch.inf, torch.nan)
    drawn_S = torch.where(torch.isfinite(drawn_S), drawn_S, marks_S)
    out_S2[at] = torch.stack([ids_S.int(), drawn_S.view(torch.int32)], dim=1)
    last_tokens[torch.tensor([sequence.row for sequence in sequences], device=device)] = ids_S.int()
    if not plan.wants_top:
        return None
    values, ids = (_to_host(found) for found in plan.top_tokens(logprobs_SV))
    return Tops(rows, plan, values, ids)


def _to_host(found: Tensor) -> Tensor:
    """A copy that is complete when the step is."""
    return torch.empty(found.shape, dtype=found.dtype, pin_memory=True).copy_(found, non_blocking=True)
