import random
from collections import Counter
from dataclasses import dataclass, field

import pytest

from prime_rl.inference.backend import FinishReason, SamplingParams
from prime_rl.inference.engine.cache import BlockCache
from prime_rl.inference.engine.scheduler import Chunk, Scheduler, Sequence


def make(num_blocks: int = 16, block_size: int = 4, **limits: int) -> Scheduler:
    cache = BlockCache(num_blocks, block_size)
    defaults = {"max_num_seqs": 8, "max_num_batched_tokens": 64, "max_model_len": num_blocks * block_size}
    return Scheduler(cache, **(defaults | limits))


def sequence(name: str, prompt: list[int], max_tokens: int = 4, stop_ids: frozenset[int] = frozenset()) -> Sequence:
    return Sequence(
        request_id=name,
        tokens=list(prompt),
        prompt_len=len(prompt),
        sampling=SamplingParams(max_tokens=max_tokens),
        stop_ids=stop_ids,
        seed=0,
    )


def shape(chunks: list[Chunk]) -> list[tuple[str, int, int]]:
    return [(chunk.sequence.request_id, chunk.start, chunk.length) for chunk in chunks]


def advance(scheduler: Scheduler, token: int = 99) -> dict[str, FinishReason | None]:
    """One step in which every complete sequence samples `token`."""
    done = [c.sequence for c in scheduler.schedule() if c.sequence.num_computed == len(c.sequence.tokens)]
    return {s.request_id: scheduler.append(s, token) for s in done}


def test_a_prompt_is_computed_whole_then_a_token_a_step() -> None:
    scheduler = make()
    scheduler.add(sequence("a", [1, 2, 3, 4, 5]))
    chunks = scheduler.schedule()
    assert shape(chunks) == [("a", 0, 5)]
    scheduler.append(chunks[0].sequence, 9)
    assert shape(scheduler.schedule()) == [("a", 5, 1)]


def test_long_prompts_are_computed_in_pieces_beside_decoding_ones() -> None:
    scheduler = make(max_num_batched_tokens=8)
    scheduler.add(sequence("a", [1, 2]))
    advance(scheduler)
    scheduler.add(sequence("b", list(range(20))))
    assert shape(scheduler.schedule()) == [("a", 2, 1), ("b", 0, 7)]
    assert shape(scheduler.schedule()) == [("a", 3, 1), ("b", 7, 7)]


def test_the_step_budget_never_starves_decoding() -> None:
    scheduler = make(max_num_batched_tokens=1, max_num_seqs=4)
    for name in "abcd":
        scheduler.add(sequence(name, [ord(name)]))
    assert len(scheduler.schedule()) == 4


def test_equal_prompts_of_one_step_share_their_blocks_at_once() -> None:
    scheduler = make()
    prompt = list(range(10))
    for name in "abc":
        scheduler.add(sequence(name, prompt))
    chunks = scheduler.schedule()
    assert shape(chunks) == [("a", 0, 10), ("b", 8, 2), ("c", 8, 2)]
    assert chunks[1].sequence.blocks[:2] == chunks[0].sequence.blocks[:2]
    assert chunks[1].sequence.blocks[2] != chunks[0].sequence.blocks[2]
    assert (scheduler.prefix_query_tokens, scheduler.prefix_hit_tokens) == (30, 16)


def test_the_last_prompt_token_is_computed_even_when_all_blocks_are_known() -> None:
    scheduler = make()
    for name in "ab":
        scheduler.add(sequence(name, list(range(8))))
    assert shape(scheduler.schedule()) == [("a", 0, 8), ("b", 4, 4)]


def test_only_what_fits_is_admitted_and_the_rest_waits_in_order() -> None:
    scheduler = make(num_blocks=4)
    for name in "abc":
        scheduler.add(sequence(name, [ord(name)] * 7))
    assert [name for name, _, _ in shape(scheduler.schedule())] == ["a", "b"]
    assert [s.request_id for s in scheduler.waiting] == ["c"]


def test_the_newest_is_preempted_and_keeps_its_tokens() -> None:
    scheduler = make(num_blocks=4, max_model_len=16)
    for name in "ab":
        scheduler.add(sequence(name, [ord(name)] * 7, max_tokens=9))
    advance(scheduler, 50)
    advance(scheduler, 51)
    assert scheduler.num_preemptions == 0
    assert shape(scheduler.schedule()) == [("a", 8, 1)]
    assert scheduler.num_preemptions == 1
    (victim,) = scheduler.waiting
    assert victim.tokens == [ord("b")] * 7 + [50, 51]
    assert (victim.blocks, victim.num_computed, victim.row) == ([], 0, -1)


def test_stop_tokens_and_lengths_end_a_sequence() -> None:
    scheduler = make(max_model_len=10)
    scheduler.add(sequence("stop", [1], max_tokens=50, stop_ids=frozenset({7})))
    scheduler.add(sequence("tokens", [2], max_tokens=1))
    scheduler.add(sequence("model", list(range(9)), max_tokens=50))
    assert advance(scheduler, 7) == {
        "stop": FinishReason.STOP,
        "tokens": FinishReason.LENGTH,
        "model": FinishReason.LENGTH,
    }
    assert not scheduler.has_work
    assert scheduler.cache.num_free == scheduler.cache.num_blocks


def test_after_new_weights_a_running_sequence_shares_nothing_more() -> None:
    scheduler = make()
    scheduler.add(sequence("a", list(range(6)), max_tokens=20))
    advance(scheduler)
    scheduler.weights_changed()
    for _ in range(8):
        advance(scheduler)
    tokens = scheduler.running[0].tokens
    scheduler.add(sequence("b", tokens))
    assert shape(scheduler.schedule())[-1] == ("b", 0, len(tokens))


@pytest.mark.parametrize("state", ["waiting", "running"])
def test_removing_gives_everything_back(state: str) -> None:
    scheduler = make()
    removed = sequence("a", list(range(9)))
    scheduler.add(removed)
    if state == "running":
        scheduler.schedule()
    scheduler.remove(removed)
    assert not scheduler.has_work
    assert scheduler.cache.num_free == scheduler.cache.num_blocks


@dataclass
class Model:
    """What a cache of real values would hold, to prove that every token attends to its own past and nothing else."""

    scheduler: Scheduler
    weights: int = 0
    content: dict[tuple[int, int], tuple[tuple[int, ...], int]] = field(default_factory=dict)

    def write(self, chunks: list[Chunk]) -> None:
        """Write each position's prefix and weights to its place; no place is written for two contents in a step."""
        size = self.scheduler.cache.block_size
        written: dict[tuple[int, int], tuple[int, ...]] = {}
        for chunk in chunks:
            for position in range(chunk.start, chunk.start + chunk.length):
                place = (chunk.sequence.blocks[position // size], position % size)
                prefix = tuple(chunk.sequence.tokens[: position + 1])
                assert place not in written, "two tokens write one place"
                written[place] = prefix
                self.content[place] = (prefix, self.weights)

    def check(self, chunks: list[Chunk], admitted_under: dict[str, int]) -> None:
        """Every computed position of a scheduled sequence is read back as its own, of weights no older than it."""
        size = self.scheduler.cache.block_size
        for chunk in chunks:
            sequence = chunk.sequence
            for position in range(sequence.num_computed):
                prefix, weights = self.content[(sequence.blocks[position // size], position % size)]
                assert prefix == tuple(sequence.tokens[: position + 1])
                assert weights >= admitted_under[sequence.request_id]


def check_books(scheduler: Scheduler) -> None:
    """Reference counts equal holders, rows are distinct, limits hold, no block is lost."""
    cache = scheduler.cache
    held = Counter(block for s in scheduler.running for block in s.blocks)
    assert all(cache._refs[block] == held[block] for block in range(cache.num_blocks))
    assert cache.num_free == cache.num_blocks - len(held)
    assert set(cache._free).isdisjoint(held)
    rows = [s.row for s in scheduler.running]
    assert len(set(rows)) == len(rows) <= scheduler.max_num_seqs
    assert all(s.blocks == [] and s.row == -1 for s in scheduler.waiting)
    assert cache._block_of.keys() == set(cache._key_of.values())


@pytest.mark.parametrize("seed", range(40))
def test_random_work_loses_no_block_mixes_no_content_and_ends(seed: int) -> None:
    rng = random.Random(seed)
    block_size = rng.choice([1, 2, 3, 8])
    max_len = rng.randrange(12, 40)
    num_blocks = -(-max_len // block_size) + rng.randrange(0, 12)
    scheduler = make(
        num_blocks,
        block_size,
        max_num_seqs=rng.randrange(1, 6),
        max_num_batched_tokens=rng.randrange(1, 40),
        max_model_len=max_len,
    )
    model = Model(scheduler)
    prefixes = [[rng.randrange(3) for _ in range(max_len - 1)] for _ in range(2)]
    arrivals = 30
    alive: dict[str, Sequence] = {}
    admitted_under: dict[str, int] = {}
    generated: dict[str, int] = {}
    for step in range(5000):
        if arrivals and rng.random() < 0.5:
            arrivals -= 1
            prompt = rng.choice(prefixes)[: rng.randrange(1, max_len)]
            alive[str(arrivals)] = sequence(str(arrivals), prompt, rng.randrange(1, 20), frozenset({2}))
            scheduler.add(alive[str(arrivals)])
        if alive and rng.random() < 0.03:
            scheduler.remove(alive.pop(rng.choice(sorted(alive))))
        if rng.random() < 0.05:
            model.weights += 1
            scheduler.weights_changed()
        if not scheduler.has_work:
            if not arrivals:
                break
            continue
        before = {s.request_id for s in scheduler.running}
        chunks = scheduler.schedule()
        assert chunks, f"step {step} computes nothing though there is work"
        assert sum(chunk.length for chunk in chunks) <= scheduler.max_num_batched_tokens
        admitted_under |= {c.sequence.request_id: model.weights for c in chunks if c.sequence.request_id not in before}
        model.write(chunks)
        model.check(chunks, admitted_under)
        check_books(scheduler)
        for chunk in chunks:
            done = chunk.sequence
            if done.num_computed == len(done.tokens):
                if scheduler.append(done, rng.randrange(3)) is not None:
                    del alive[done.request_id]
                assert done.num_generated == generated.get(done.request_id, 0) + 1  # nothing lost on the way
                generated[done.request_id] = done.num_generated
        check_books(scheduler)
    assert not scheduler.has_work
    assert not alive
    assert not arrivals
    assert scheduler.cache.num_free == scheduler.cache.num_blocks


def test_a_step_is_scheduled_while_the_token_before_it_is_in_flight() -> None:
    scheduler = make()
    scheduler.add(sequence("a", [1, 2], max_tokens=3))
    first, second, third = (scheduler.schedule()[0] for _ in range(3))
    assert [(chunk.start, chunk.length, chunk.samples, chunk.index) for chunk in (first, second, third)] == [
        (0, 2, True, 0), (2, 1, True, 1), (3, 1, True, 2),
    ]  # fmt: skip
    assert scheduler.schedule() == []  # its last token is in flight
    assert [scheduler.append(first.sequence, token) for token in (7, 8, 9)] == [None, None, FinishReason.LENGTH]
    assert (first.sequence.tokens, first.sequence.in_flight) == ([1, 2, 7, 8, 9], 0)
    assert (first.sequence.ended, scheduler.has_work) == (True, False)


def test_a_chunk_that_leaves_tokens_of_the_prompt_draws_none() -> None:
    scheduler = make(max_num_batched_tokens=8)
    scheduler.add(sequence("a", list(range(12))))
    assert [scheduler.schedule()[0].samples for _ in range(3)] == [False, True, True]


def test_a_block_is_findable_only_when_all_its_tokens_are_known() -> None:
    scheduler = make()
    scheduler.add(sequence("a", [1, 2, 3], max_tokens=9))
    for _ in range(2):
        scheduler.schedule()  # the block is full; its last token is in flight
    (running,) = scheduler.running
    assert (running.num_computed, running.num_findable) == (4, 0)
    scheduler.append(running, 4)
    scheduler.schedule()
    assert running.num_findable == 1
    assert len(scheduler.cache.match([1, 2, 3, 4, 5], 1)) == 1


def test_a_preempted_sequence_keeps_the_token_that_was_in_flight() -> None:
    scheduler = make(num_blocks=4)
    for name, prompt in (("a", [1] * 7), ("b", [2] * 7)):
        scheduler.add(sequence(name, prompt))
    scheduler.schedule()
    scheduler.schedule()
    a, b = scheduler.running
    scheduler.append(a, 5)
    scheduler.append(b, 6)
    assert shape(scheduler.schedule()) == [("a", 8, 1)]  # a needs a third block
    assert (scheduler.num_preemptions, list(scheduler.waiting), b.in_flight) == (1, [b], 1)
    scheduler.append(b, 7)
    assert (b.tokens[-2:], b.in_flight, b.num_computed) == ([6, 7], 0, 0)
