"""Which tokens of which requests the next step computes. Pure Python: no tensors, clock or threads.

Every request is a list of tokens of which the first `num_computed` have keys and values in the cache. A step computes
the next tokens of each running request: one in decoding, a chunk in prefill. When all are computed, one more is
sampled. So prefill, decoding, chunking and recomputing after preemption are one rule.

A step may be scheduled while the one before it is still computed: the token that it draws is then *in flight*. Its
place in the sequence is known, its id is not.

Requests run in order of arrival and are preempted in the opposite order: the oldest always advances, hence all end.
A preempted request keeps its tokens and loses only its blocks.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from prime_rl.inference.backend import FinishReason, SamplingParams
from prime_rl.inference.engine.cache import BlockCache

if TYPE_CHECKING:
    from prime_rl.inference.engine.prompt_logprobs import PromptScorer


@dataclass(slots=True, kw_only=True, eq=False)
class Sequence:
    """One request on its way. Mutable: the scheduler alone changes it."""

    request_id: str
    tokens: list[int]
    """Prompt, then what was sampled."""
    prompt_len: int
    sampling: SamplingParams
    stop_ids: frozenset[int]
    seed: int
    num_computed: int = 0
    in_flight: int = 0
    """Tokens that scheduled steps draw and that are not appended yet."""
    ended: bool = False
    """Taken out: what is still in flight for it is dropped."""
    blocks: list[int] = field(default_factory=list)
    row: int = -1
    """Row of the block table while running."""
    num_blocks_in_table: int = 0
    """How many of `blocks` the runner has copied to the table."""
    content_id: int | None = None
    """Id of the content of the last findable block; None when the cache holds older weights' values for it."""
    num_findable: int = 0
    reads_history: bool = False
    """As its sampling says; asked in every step."""
    scorer: PromptScorer | None = None
    """Gathers the prompt's logprobs where they were asked for."""

    @property
    def num_generated(self) -> int:
        return len(self.tokens) - self.prompt_len

    @property
    def next_index(self) -> int:
        """Which token of the completion the step that is being launched draws, from 0."""
        return self.num_generated + max(self.in_flight - 1, 0)


@dataclass(slots=True)
class Chunk:
    """Tokens `start` to `start + length` of a sequence, computed in one step."""

    sequence: Sequence
    start: int
    length: int
    samples: bool = True
    """Whether these are the last ones, so that a token is drawn after them."""

    @property
    def index(self) -> int:
        """Which token of the completion is drawn after this chunk, from 0."""
        return self.start + self.length - self.sequence.prompt_len


class Scheduler:
    """Admits, grows, preempts and ends sequences within the blocks of a `BlockCache`."""

    def __init__(
        self, cache: BlockCache, *, max_num_seqs: int, max_num_batched_tokens: int, max_model_len: int
    ) -> None:
        assert cache.blocks_for(max_model_len) <= cache.num_blocks, "one request of full length must fit"
        self.cache = cache
        self.max_num_seqs = max_num_seqs
        # Every running request must be able to decode in every step.
        self.max_num_batched_tokens = max(max_num_batched_tokens, max_num_seqs)
        self.max_model_len = max_model_len
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []
        self._free_rows = list(range(max_num_seqs - 1, -1, -1))
        self.num_preemptions = 0
        self.prefix_query_tokens = 0
        self.prefix_hit_tokens = 0

    @property
    def has_work(self) -> bool:
        return bool(self.running or self.waiting)

    def add(self, sequence: Sequence) -> None:
        assert 0 < len(sequence.tokens) < self.max_model_len
        self.waiting.append(sequence)

    def schedule(self) -> list[Chunk]:
        """Choose and account for the next step; its chunks must be computed before those of any later one.

        Empty when there is no work, or when every running sequence has its last token in flight. Blocks that this step
        fills with known tokens are findable at once, also by later chunks of this step: a step writes all keys and
        values of a layer before any of its tokens attends there.
        """
        budget = self.max_num_batched_tokens
        chunks: list[Chunk] = []
        preemptions = self.num_preemptions
        index = 0
        while index < len(self.running) and budget > 0:
            sequence = self.running[index]
            if sequence.in_flight and self._is_full(sequence, sequence.in_flight):
                index += 1
                continue
            length = min(len(sequence.tokens) + sequence.in_flight - sequence.num_computed, budget)
            if not self._grow(sequence, sequence.num_computed + length):
                break
            chunks.append(self._advance(sequence, length))
            budget -= length
            index += 1
        while self.waiting and budget > 0 and len(self.running) < self.max_num_seqs:
            if self.num_preemptions > preemptions or not self._admit(self.waiting[0]):
                break
            sequence = self.waiting.popleft()
            length = min(len(sequence.tokens) - sequence.num_computed, budget)
            chunks.append(self._advance(sequence, length))
            budget -= length
        return chunks

    def append(self, sequence: Sequence, token: int) -> FinishReason | None:
        """Add a token that was in flight; ends the sequence when this is its last."""
        sequence.tokens.append(token)
        sequence.in_flight -= 1
        reason = None
        if token in sequence.stop_ids:
            reason = FinishReason.STOP
        elif self._is_full(sequence):
            reason = FinishReason.LENGTH
        if reason is not None:
            self.remove(sequence)
        return reason

    def remove(self, sequence: Sequence) -> None:
        """Take a sequence out, running or waiting, and give back what it holds.

        A step in flight may still write to its blocks. Whoever takes them next writes after that.
        """
        sequence.ended = True
        if sequence.row >= 0:
            self.running.remove(sequence)
            self._give_back(sequence)
        else:
            self.waiting.remove(sequence)

    def weights_changed(self, *, recompute: bool = False) -> None:
        """Values in the cache are now those of older weights: share them no more, and use them up or `recompute` them.

        Recomputing is preemption of all that run, without its cause: they keep their tokens and their turn.
        """
        self.cache.renew()
        for sequence in reversed(self.running):
            sequence.content_id = None
            if recompute:
                self._give_back(sequence)
                self.waiting.appendleft(sequence)
        if recompute:
            self.running.clear()

    def _is_full(self, sequence: Sequence, more: int = 0) -> bool:
        """Whether a sequence with `more` tokens would have all that it may have."""
        return (
            sequence.num_generated + more >= sequence.sampling.max_tokens
            or len(sequence.tokens) + more >= self.max_model_len
        )

    def _admit(self, sequence: Sequence) -> bool:
        """Move a waiting sequence to the running ones when blocks for all its tokens are free."""
        cache = self.cache
        # The last token is always computed: its hidden state gives the first logits.
        shared = cache.match(sequence.tokens, (len(sequence.tokens) - 1) // cache.block_size)
        if sequence.scorer is not None and not sequence.scorer.is_complete:
            shared = []  # hidden states of all of the prompt are needed
        num_new = cache.blocks_for(len(sequence.tokens)) - len(shared)
        # Half a block of room per running sequence, or the newcomer would be preempted before it is through prefill.
        if not cache.can_take(shared, num_new, reserve=len(self.running) // 2):
            return False
        sequence.content_id = cache.hold(shared)
        sequence.num_findable = len(shared)
        sequence.blocks = shared + cache.take(num_new)
        sequence.num_computed = len(shared) * cache.block_size
        sequence.num_blocks_in_table = 0
        sequence.row = self._free_rows.pop()
        self.running.append(sequence)
        self.prefix_query_tokens += len(sequence.tokens)
        self.prefix_hit_tokens += sequence.num_computed
        return True

    def _grow(self, sequence: Sequence, num_tokens: int) -> bool:
        """Make room for `num_tokens` positions, preempting the newest. False when that was `sequence` itself."""
        needed = self.cache.blocks_for(num_tokens) - len(sequence.blocks)
        if needed <= 0:
            return True
        while needed > self.cache.num_free:
            victim = self.running.pop()
            self._give_back(victim)
            self.waiting.appendleft(victim)
            self.num_preemptions += 1
            if victim is sequence:
                return False
        sequence.blocks += self.cache.take(needed)
        return True

    def _advance(self, sequence: Sequence, length: int) -> Chunk:
        """Count `length` tokens as computed and make the blocks that they fill findable."""
        start = sequence.num_computed
        sequence.num_computed += length
        chunk = Chunk(sequence, start, length, sequence.num_computed == len(sequence.tokens) + sequence.in_flight)
        sequence.in_flight += chunk.samples
        size = self.cache.block_size
        known = min(sequence.num_computed, len(sequence.tokens))
        while sequence.content_id is not None and (sequence.num_findable + 1) * size <= known:
            start = sequence.num_findable * size
            sequence.content_id = self.cache.register(
                sequence.blocks[sequence.num_findable], sequence.content_id, sequence.tokens[start : start + size]
            )
            sequence.num_findable += 1
        return chunk

    def _give_back(self, sequence: Sequence) -> None:
        self.cache.release(sequence.blocks)
        sequence.blocks = []
        sequence.num_computed = 0
        self._free_rows.append(sequence.row)
        sequence.row = -1
