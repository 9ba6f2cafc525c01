import numpy as np
import pytest
import torch

from prime_rl.models.attention import (
    PackedAttention,
    PagedAttention,
    PagedCache,
    PagedStep,
    group_by_length,
    group_step,
)

HEADS, KV_HEADS, DIM = 4, 2, 16


def plain(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, seq_lens: list[int]) -> torch.Tensor:
    """Softmax attention written out, one sequence and head at a time."""
    outs = []
    for q_s, k_s, v_s in zip(q.split(seq_lens), k.split(seq_lens), v.split(seq_lens), strict=True):
        heads = []
        for head in range(q.shape[1]):
            kv = head * k.shape[1] // q.shape[1]
            scores = q_s[:, head] @ k_s[:, kv].T / q.shape[-1] ** 0.5
            hidden = torch.ones_like(scores, dtype=torch.bool).triu(1)
            heads.append(scores.masked_fill(hidden, -torch.inf).softmax(-1) @ v_s[:, kv])
        outs.append(torch.stack(heads, 1))
    return torch.cat(outs)


def qkv(count: int, dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(count)
    return tuple(  # type: ignore[return-value]
        torch.randn(count, heads, DIM, generator=generator).to(dtype) for heads in (HEADS, KV_HEADS, KV_HEADS)
    )


@pytest.mark.parametrize("seq_lens", [[1], [9], [5, 5, 5], [1, 2, 30, 3, 29, 17, 1]])
def test_packed_attention_and_its_gradients_equal_attention_written_out(seq_lens: list[int]) -> None:
    inputs = [x.requires_grad_() for x in qkv(sum(seq_lens))]
    actual = PackedAttention(seq_lens)(0, *inputs)
    expected = plain(*inputs, seq_lens)
    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-5)
    weights = torch.randn(actual.shape)
    for found, wanted in zip(
        torch.autograd.grad((actual * weights).sum(), inputs),
        torch.autograd.grad((expected * weights).sum(), inputs),
        strict=True,
    ):
        torch.testing.assert_close(found, wanted, rtol=0, atol=1e-5)


def test_groups_hold_every_sequence_once_and_waste_less_than_a_third() -> None:
    lengths = [1, 1000, 2, 900, 300, 299, 298, 1]
    groups = group_by_length(lengths)
    assert sorted(index for group in groups for index in group) == list(range(len(lengths)))
    for group in groups:
        longest = max(lengths[i] for i in group)
        assert all(lengths[i] >= 0.7 * longest for i in group)


def test_decodes_are_not_padded_to_the_length_of_a_prefill() -> None:
    lengths, contexts = [1] * 100 + [1024] + [1] * 155, [1100] * 100 + [1024] + [1100] * 155
    assert sorted(shapes(lengths, contexts)) == [(1, 1024, 1024), (255, 1, 1100)]


def test_sequences_of_a_step_share_a_group_when_length_and_context_are_alike() -> None:
    lengths, contexts = [1, 1, 1, 20, 500, 480], [1000, 900, 30, 1000, 1000, 980]
    assert sorted(shapes(lengths, contexts)) == [(1, 1, 30), (1, 20, 1000), (2, 1, 1000), (2, 500, 1000)]


def shapes(lengths: list[int], contexts: list[int]) -> list[tuple[int, int, int]]:
    """Sequences, padded queries and padded context of each group; every sequence is in one of them."""
    groups = group_step(lengths, contexts)
    assert sorted(index for group in groups for index in group) == list(range(len(lengths)))
    return [(len(group), max(lengths[i] for i in group), max(contexts[i] for i in group)) for group in groups]


@pytest.mark.parametrize("block_size", [1, 4, 16, 20])
@pytest.mark.parametrize("plan", [[[7], [20], [1]], [[3, 4], [1, 1, 1, 18], [40, 1]], [[16, 16], [15, 1, 1], [2]]])
def test_paged_attention_in_pieces_equals_packed_attention_of_the_whole(plan: list[list[int]], block_size: int) -> None:
    """`plan` gives each sequence's piece lengths; pieces of a step run together."""
    seq_lens = [sum(pieces) for pieces in plan]
    q, k, v = qkv(sum(seq_lens))
    expected = PackedAttention(seq_lens)(0, q, k, v)
    starts = np.cumsum([0, *seq_lens])
    max_blocks = -(-max(seq_lens) // block_size)
    num_blocks = max_blocks * len(plan)
    cache = PagedCache.allocate((2, num_blocks, KV_HEADS, DIM), block_size, torch.float32)
    order = np.random.default_rng(0).permutation(num_blocks).astype(np.int32).reshape(len(plan), max_blocks)
    done = [0] * len(plan)
    for number in range(max(len(pieces) for pieces in plan)):
        active = [i for i, pieces in enumerate(plan) if number < len(pieces)]
        lengths = [plan[i][number] for i in active]
        spans = [(done[i], done[i] + length) for i, length in zip(active, lengths, strict=True)]
        rows = torch.tensor([starts[i] + p for i, span in zip(active, spans, strict=True) for p in range(*span)])
        step = PagedStep(
            lengths=np.array(lengths, dtype=np.int32),
            contexts=np.array([end for _, end in spans], dtype=np.int32),
            positions=np.array([p for span in spans for p in range(*span)], dtype=np.int32),
            tables=order[active],
        )
        actual = PagedAttention(cache, step)(1, q[rows], k[rows], v[rows])
        torch.testing.assert_close(actual, expected[rows], rtol=0, atol=1e-5)
        for i, (_, end) in zip(active, spans, strict=True):
            done[i] = end
    assert not cache.keys[0].any()  # the other layer's cache is not touched
