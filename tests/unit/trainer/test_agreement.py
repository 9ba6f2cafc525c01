import dataclasses

import msgspec
import numpy as np
import pytest
from tests.doubles.ranks import on_ranks

from prime_rl.data.samples import MicroBatch, TrainingBatch
from prime_rl.errors import DataError
from prime_rl.trainer.agreement import SeenBatch, check_same_batch, of_different_batches
from prime_rl.trainer.ranks import ALONE, Ranks


def batch(*rows: list[int]) -> TrainingBatch:
    """A row of one sequence for each list of tokens; the last of each row is in the loss."""
    micro_batches = [
        MicroBatch(
            input_ids=np.array(tokens, np.int32),
            loss_mask=np.arange(len(tokens)) == len(tokens) - 1,
            advantages=np.zeros(len(tokens), np.float32),
            inference_logprobs=np.zeros(len(tokens), np.float32),
            temperatures=np.ones(len(tokens), np.float32),
            seq_lens=np.array([len(tokens)], np.int32),
        )
        for tokens in rows
    ]
    return TrainingBatch(step=3, micro_batches=micro_batches, num_loss_tokens=len(rows), min_version=0, max_version=0)


def elsewhere_masked(found: TrainingBatch) -> TrainingBatch:
    rows = [msgspec.structs.replace(row, loss_mask=np.arange(row.num_tokens) == 1) for row in found.micro_batches]
    return msgspec.structs.replace(found, micro_batches=rows)


def words(*batches: TrainingBatch) -> str | None:
    seen = [SeenBatch.of(one) for one in batches]
    return of_different_batches(3, [dataclasses.replace(one, host=f"node{i}") for i, one in enumerate(seen)])


def test_ranks_that_have_the_same_batch_agree():
    assert words(batch([1, 2, 3], [4, 5]), batch([1, 2, 3], [4, 5])) is None
    check_same_batch(batch([1, 2]), ALONE)


def test_another_size_is_told_in_numbers():
    said = words(batch([1, 2, 3], [4, 5]), batch([1, 2, 3], [4, 5]), batch([1, 2, 3]))
    assert said is not None
    assert "step 3: ranks do not have the same batch" in said
    assert "rank 0 (node0) has 2 sequences of 5 tokens, 2 of them in the loss" in said
    assert "rank 2 (node2) has 1 sequences of 3 tokens, 1 of them in the loss" in said
    assert "data.name" in said
    assert "a disk that all nodes share" in said


@pytest.mark.parametrize(
    "other",
    [
        batch([1, 2, 7], [4, 5]),
        batch([4, 5], [1, 2, 3]),
        elsewhere_masked(batch([1, 2, 3], [4, 5])),
        batch([1, 2], [3, 4, 5]),
    ],
    ids=["a token", "the order", "the mask", "the lengths"],
)
def test_as_many_tokens_that_are_others_are_noticed(other):
    said = words(batch([1, 2, 3], [4, 5]), other, other)
    assert said is not None
    assert "as many, but not the same" in said
    assert "2 of 3 ranks differ from rank 0" in said


def compare(ranks: Ranks) -> str:
    check_same_batch(batch([1, 2]), ranks)
    try:
        check_same_batch(batch([1, 2 + ranks.rank]), ranks)
    except DataError as error:
        return str(error)
    return ""


def test_every_rank_ends_with_the_same_words():
    one, two = on_ranks(2, compare)
    assert one == two
    assert one.startswith("step 3: ranks do not have the same batch")
