from collections.abc import Callable

import pytest
import torch

from prime_rl.trainer.streams import TokenStreams


@pytest.fixture
def make_streams() -> Callable[..., TokenStreams]:
    """Streams from probabilities; by default all tokens are one sequence of the rl stream, with weight 1."""

    def make(probs, old_probs=None, advantages=None, dtype=torch.float32, **other) -> TokenStreams:
        count = len(probs)

        def tensor(name, default):
            return torch.tensor(other.get(name, default), dtype=dtype)

        ref_probs = other.get("ref_probs")
        sequence_N = torch.tensor(other.get("sequence", [0] * count), dtype=torch.int64)
        return TokenStreams(
            logprobs_N=torch.tensor(probs, dtype=dtype).log().requires_grad_(),
            entropies_N=torch.full((count,), 0.5, dtype=dtype),
            inference_logprobs_N=torch.tensor(probs if old_probs is None else old_probs, dtype=dtype).log(),
            advantages_N=torch.tensor([0.0] * count if advantages is None else advantages, dtype=dtype),
            ref_logprobs_N=None if ref_probs is None else torch.tensor(ref_probs, dtype=dtype).log(),
            rl_weights_N=tensor("rl_weights", [1.0] * count),
            ce_weights_N=tensor("ce_weights", [0.0] * count),
            ref_kl_weights_N=tensor("ref_kl_weights", [0.0] * count),
            sequence_N=sequence_N,
            num_sequences=int(sequence_N.max()) + 2 if count else 1,
        )

    return make
