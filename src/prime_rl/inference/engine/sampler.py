"""From logits to tokens: penalties, filters, one draw per row, and the logprob of what was drawn.

A draw is the inverse of the cumulative distribution at a number in [0, 1) that is a function of the request's seed and
the token's index alone, so it depends on nothing that runs beside it.

Shape suffixes: S rows (sequences), V vocabulary.
"""

from collections.abc import Sequence as Seq
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from prime_rl.inference.engine.logits import edit, edits
from prime_rl.inference.engine.scheduler import Sequence
from prime_rl.models.native import Kernels


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampled:
    """One token a row: ids, logprobs and, for rows that asked, the most likely (id, logprob) pairs."""

    token_ids: list[int]
    logprobs: list[float]
    top_logprobs: dict[int, tuple[tuple[int, float], ...]]
    undrawn: frozenset[int] = frozenset()
    """Rows whose own parameters leave no finite distribution: their token and logprob mean nothing."""


def uniform(seeds: npt.NDArray[np.uint64], indices: npt.NDArray[np.uint64]) -> npt.NDArray[np.float32]:
    """Numbers in [0, 1 - 2**-23], one per (seed, index): two rounds of splitmix64's finaliser over a counter."""
    mixed = _mix(seeds ^ _mix(indices * np.uint64(0x9E3779B97F4A7C15) + np.uint64(0x632BE59BD9B4E019)))
    return ((mixed >> np.uint64(41)) * np.float64(2.0**-23)).astype(np.float32)


def _mix(x: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    mixed: npt.NDArray[np.uint64] = x ^ (x >> np.uint64(31))
    return mixed


class Sampler:
    """Samples for a changing set of sequences; what depends on the set alone is kept while it stays the same."""

    def __init__(self, device: torch.device, kernels: Kernels | None = None, *, row_by_row: bool = False) -> None:
        """`kernels`: for logits on the CPU; they draw in one pass where no row asks for more than a temperature.
        `row_by_row`: what is drawn for a row does not depend on the others, to the last bit."""
        self.device = device
        self.kernels = kernels
        self._row_by_row = row_by_row
        self._plan = Plan([], device)

    def sample(self, logits_SV: Tensor, sequences: Seq[Sequence]) -> Sampled:
        """One token for each sequence; `logits_SV` may be overwritten. FloatingPointError when they are not finite."""
        if self._plan.sequences != sequences:
            self._plan = Plan(list(sequences), self.device)
        plan = self._plan
        by_kernel = self.kernels is not None and plan.plain  # which sees one row at a time
        if self._row_by_row and not by_kernel and len(sequences) > 1:
            rows = [self.sample(logits_SV[row : row + 1], [sequence]) for row, sequence in enumerate(sequences)]
            return _together(rows)
        indices = np.fromiter((s.num_generated for s in sequences), np.uint64, len(sequences))
        draws_S = torch.from_numpy(uniform(plan.seeds, indices)).to(self.device)
        logits_SV = logits_SV.float()
        top_logprobs: dict[int, tuple[tuple[int, float], ...]] = {}
        if self.kernels is not None and plan.plain:
            ids_S, chosen_S = torch.empty(len(sequences), dtype=torch.int64), torch.empty(len(sequences))
            self.kernels.sample(logits_SV, plan.inverse_temperatures_S, draws_S, ids_S, chosen_S)
        else:
            logprobs_SV = plan.logprobs(logits_SV)
            ids_S, chosen_S = plan.draw(logprobs_SV, draws_S)
            if plan.wants_top:
                top_logprobs = plan.top_logprobs(*plan.top_tokens(logprobs_SV))
        return Sampled(
            token_ids=ids_S.tolist(),
            logprobs=chosen_S.tolist(),
            top_logprobs=top_logprobs,
            undrawn=_undrawn(chosen_S, logits_SV),
        )


def _together(rows: Seq[Sampled]) -> Sampled:
    """What was sampled for one row each."""
    return Sampled(
        token_ids=[row.token_ids[0] for row in rows],
        logprobs=[row.logprobs[0] for row in rows],
        top_logprobs={number: row.top_logprobs[0] for number, row in enumerate(rows) if row.top_logprobs},
        undrawn=frozenset(number for number, row in enumerate(rows) if row.undrawn),
    )


def _undrawn(chosen_S: Tensor, logits_SV: Tensor) -> frozenset[int]:
    """Rows without a finite logprob though the model gave finite logits; FloatingPointError when it did not.

    Where the kernel drew, `logits_SV` holds its weights, which are finite when the logits were.
    """
    failed_S = ~torch.isfinite(chosen_S)
    if not bool(failed_S.any()):
        return frozenset()
    if not bool(torch.isfinite(logits_SV[failed_S]).all()):
        raise FloatingPointError("the model's logits are not finite; its weights hold NaN or infinite values")
    return frozenset(failed_S.nonzero()[:, 0].tolist())


def draw(logprobs_SV: Tensor, draws_S: Tensor) -> Tensor:
    """The first token of each row whose cumulative probability exceeds the row's draw times the total."""
    cumulative_SV = logprobs_SV.exp().cumsum(-1)
    # draws end at 1 - 2**-23, so the target stays below the total and lands on a token of positive probability.
    targets_S1 = draws_S[:, None] * cumulative_SV[:, -1:]
    return torch.searchsorted(cumulative_SV, targets_S1, right=True)[:, 0].clamp_(max=logprobs_SV.shape[-1] - 1)


class Plan:
    """Sampling parameters of a set of sequences as tensors; None where no sequence uses them."""

    def __init__(self, sequences: list[Sequence], device: torch.device) -> None:
        self.sequences = sequences
        params = [s.sampling for s in sequences]
        self.seeds = np.array([s.seed for s in sequences], dtype=np.uint64)
        # Greedy rows report the distribution at temperature 1.
        temperatures = [p.temperature or 1.0 for p in params]
        column = torch.tensor(temperatures, dtype=torch.float32, device=device)[:, None]
        self.temperatures_S1 = column if any(t != 1.0 for t in temperatures) else None
        greedy = [p.temperature == 0.0 for p in params]
        self.greedy_S = torch.tensor(greedy, device=device) if any(greedy) else None
        self.edited = [(row, s) for row, s in enumerate(sequences) if edits(s.sampling)]
        self.filtered = [
            row for row, p in enumerate(params) if p.temperature > 0 and (p.top_p < 1.0 or p.top_k > 0 or p.min_p > 0.0)
        ]
        self.filters = [
            torch.tensor([[float(value)] for value in column], device=device)
            for column in zip(*((p.top_k, p.top_p, p.min_p) for p in (params[r] for r in self.filtered)), strict=True)
        ]
        self.wants_top = [(row, p.num_top_logprobs) for row, p in enumerate(params) if p.num_top_logprobs]
        self.inverse_temperatures_S = torch.tensor([1.0 / t for t in temperatures], dtype=torch.float32)
        self.changes = bool(self.edited or self.filtered)
        # The kernel takes finite scales only, so that weights which are not finite tell of logits which are not.
        are_finite = bool(torch.isfinite(self.inverse_temperatures_S).all())
        self.plain = are_finite and not (any(greedy) or self.changes or self.wants_top)

    def logprobs(self, logits_SV: Tensor) -> Tensor:
        """Log of the distribution that each row is sampled from; the logits stay as they are."""
        if self.changes:
            logits_SV = logits_SV.clone()
        for row, sequence in self.edited:
            edit(logits_SV[row], sequence)
        if self.temperatures_S1 is not None:
            logits_SV = logits_SV / self.temperatures_S1
        if self.filtered:
            logits_SV[self.filtered] = _filter(logits_SV[self.filtered], *self.filters)
        return logits_SV.log_softmax(-1)

    def draw(self, logprobs_SV: Tensor, draws_S: Tensor) -> tuple[Tensor, Tensor]:
        """A token of each row, int64, and its logprob; the likeliest one where the row is greedy."""
        ids_S = draw(logprobs_SV, draws_S)
        if self.greedy_S is not None:
            ids_S = torch.where(self.greedy_S, logprobs_SV.argmax(-1), ids_S)
        return ids_S, logprobs_SV.gather(-1, ids_S[:, None])[:, 0]

    def top_tokens(self, logprobs_SV: Tensor) -> tuple[Tensor, Tensor]:
        """Logprobs and ids of the most likely tokens of the rows that asked, as many as any of them wants."""
        most = min(max(count for _, count in self.wants_top), logprobs_SV.shape[-1])
        values, ids = logprobs_SV[[row for row, _ in self.wants_top]].topk(most, dim=-1)
        return values, ids

    def top_logprobs(self, values: Tensor, ids: Tensor) -> dict[int, tuple[tuple[int, float], ...]]:
        """What `top_tokens` returned, by row: most likely first, without impossible ones."""
        tops = {}
        for (row, count), row_ids, row_values in zip(self.wants_top, ids.tolist(), values.tolist(), strict=True):
            pairs = zip(row_ids[:count], row_values[:count], strict=True)
            tops[row] = tuple((token, value) for token, value in pairs if value > float("-inf"))
        return tops


def _filter(logits_SV: Tensor, top_k_S1: Tensor, top_p_S1: Tensor, min_p_S1: Tensor) -> Tensor:
    """Logits with -inf where top-k and min-p, then top-p of the rest, exclude a token (vLLM's order)."""
    ordered_SV, order_SV = logits_SV.sort(dim=-1, descending=True)
    rank_V = torch.arange(logits_SV.shape[-1], device=logits_SV.device)
    ordered_SV = ordered_SV.masked_fill((top_k_S1 > 0) & (rank_V >= top_k_S1), -torch.inf)
    ratios_SV = (ordered_SV - ordered_SV[:, :1]).exp()
    ordered_SV = ordered_SV.masked_fill(ratios_SV < min_p_S1, -torch.inf)
    probs_SV = ordered_SV.softmax(-1)
    before_SV = probs_SV.cumsum(-1) - probs_SV
    excluded = (before_SV >= top_p_S1) & (top_p_S1 < 1.0)
    excluded[:, 0] = False
    ordered_SV = ordered_SV.masked_fill(excluded, -torch.inf)
    return torch.empty_like(logits_SV).scatter_(-1, order_SV, ordered_SV)
