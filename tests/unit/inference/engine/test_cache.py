import pytest

from prime_rl.inference.engine.cache import BlockCache


def fill(cache: BlockCache, tokens: list[int]) -> list[int]:
    """Take blocks for whole blocks of `tokens` and make them findable."""
    blocks = cache.take(len(tokens) // cache.block_size)
    parent = cache.root
    for index, block in enumerate(blocks):
        start = index * cache.block_size
        parent = cache.register(block, parent, tokens[start : start + cache.block_size])
    return blocks


def test_a_prefix_is_found_up_to_the_first_difference() -> None:
    cache = BlockCache(8, 2)
    blocks = fill(cache, [1, 2, 3, 4, 5, 6])
    assert cache.match([1, 2, 3, 4, 5, 6], 3) == blocks
    assert cache.match([1, 2, 3, 4, 9, 9], 3) == blocks[:2]
    assert cache.match([1, 2, 3, 4, 5, 6], 2) == blocks[:2]
    assert cache.match([9, 2, 3, 4, 5, 6], 3) == []


def test_equal_blocks_after_different_prefixes_are_different() -> None:
    cache = BlockCache(8, 2)
    fill(cache, [1, 2, 3, 4])
    other = fill(cache, [5, 6, 3, 4])
    assert cache.match([5, 6, 3, 4], 2) == other
    assert cache.match([3, 4], 1) == []


def test_a_released_prefix_is_found_until_its_blocks_are_taken() -> None:
    cache = BlockCache(3, 2)
    blocks = fill(cache, [1, 2, 3, 4])
    cache.release(blocks)
    assert cache.num_free == 3
    assert cache.match([1, 2, 3, 4], 2) == blocks
    cache.take(1)  # the block that never held anything goes first
    assert cache.match([1, 2, 3, 4], 2) == blocks
    cache.take(1)  # then the tail of the oldest
    assert cache.match([1, 2, 3, 4], 2) == blocks[:1]


def test_held_blocks_are_free_after_the_last_release_only() -> None:
    cache = BlockCache(2, 2)
    blocks = fill(cache, [1, 2])
    cache.hold(blocks)
    cache.release(blocks)
    assert cache.num_free == 1
    cache.release(blocks)
    assert cache.num_free == 2
    with pytest.raises(AssertionError, match="released twice"):
        cache.release(blocks)


def test_reviving_a_free_block_counts_as_taking_one() -> None:
    cache = BlockCache(2, 2)
    blocks = fill(cache, [1, 2])
    cache.release(blocks)
    assert cache.can_take(blocks, 1)
    assert not cache.can_take(blocks, 2)
    assert not cache.can_take(blocks, 1, reserve=1)


def test_nothing_of_older_weights_is_found() -> None:
    cache = BlockCache(4, 2)
    blocks = fill(cache, [1, 2])
    cache.renew()
    assert cache.match([1, 2], 1) == []
    newer = fill(cache, [1, 2])
    assert cache.match([1, 2], 1) == newer
    cache.release(blocks)
    cache.release(newer)
    assert cache.num_free == 4


def test_the_first_of_two_equal_blocks_stays_the_one_to_be_found() -> None:
    cache = BlockCache(4, 2)
    first, second = fill(cache, [1, 2]), fill(cache, [1, 2, 3, 4])
    assert cache.match([1, 2, 3, 4], 2) == [first[0], second[1]]


def test_without_sharing_nothing_is_found() -> None:
    cache = BlockCache(4, 2, sharing=False)
    fill(cache, [1, 2])
    assert cache.match([1, 2], 1) == []


def test_blocks_for_rounds_up() -> None:
    cache = BlockCache(4, 16)
    assert [cache.blocks_for(n) for n in (0, 1, 16, 17)] == [0, 1, 1, 2]
