"""Blocks of the key/value cache: who holds which, and which hold a prefix that others can share. Pure bookkeeping.

A block is `block_size` consecutive positions. It is *held* while its reference count is positive and *free* otherwise;
a free block keeps its content until it is taken again, oldest first, so a finished request's prefix can still be found.

Full blocks are found by content. Every distinct content gets an id that is never used twice, and a block's key is
(id of the block before it, its tokens), so equal keys mean equal prefixes: there are no collisions to fear. The first
block's predecessor is the id of the current weights, hence entries of older weights can never be found.
"""

from collections import OrderedDict
from collections.abc import Sequence

Key = tuple[int, tuple[int, ...]]


class BlockCache:
    """Allocates blocks by number, with reference counts and prefix sharing."""

    def __init__(self, num_blocks: int, block_size: int, *, sharing: bool = True) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.sharing = sharing
        self._refs = [0] * num_blocks
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(num_blocks))
        self._next_id = 1
        self.root = 0
        self._block_of: dict[Key, int] = {}
        self._key_of: dict[int, Key] = {}
        self._id_of: dict[int, int] = {}

    @property
    def num_free(self) -> int:
        return len(self._free)

    def blocks_for(self, num_tokens: int) -> int:
        """Blocks that `num_tokens` positions take."""
        return -(-num_tokens // self.block_size)

    def match(self, tokens: Sequence[int], max_blocks: int) -> list[int]:
        """Blocks that hold the longest known prefix of `tokens`, in full blocks, at most `max_blocks`. Takes none."""
        found: list[int] = []
        parent = self.root
        size = self.block_size
        for start in range(0, max_blocks * size if self.sharing else 0, size):
            block = self._block_of.get((parent, tuple(tokens[start : start + size])))
            if block is None:
                break
            found.append(block)
            parent = self._id_of[block]
        return found

    def can_take(self, shared: Sequence[int], num_new: int, reserve: int = 0) -> bool:
        """Whether `shared` blocks can be held, `num_new` taken, and `reserve` remain free."""
        revived = sum(1 for block in shared if self._refs[block] == 0)
        return revived + num_new + reserve <= len(self._free)

    def hold(self, shared: Sequence[int]) -> int:
        """Take one more reference to blocks that `match` returned; returns the content id of the last one."""
        for block in shared:
            if self._refs[block] == 0:
                del self._free[block]
            self._refs[block] += 1
        return self._id_of[shared[-1]] if shared else self.root

    def take(self, count: int) -> list[int]:
        """`count` free blocks for new content, each with one reference."""
        assert count <= len(self._free), (count, len(self._free))
        taken = [self._free.popitem(last=False)[0] for _ in range(count)]
        for block in taken:
            self._forget(block)
            self._refs[block] = 1
        return taken

    def release(self, blocks: Sequence[int]) -> None:
        """Give back one reference to each block of a sequence, given in sequence order.

        The tail becomes free first, so that a shared beginning outlives what follows it.
        """
        for block in reversed(blocks):
            assert self._refs[block] > 0, f"block {block} is released twice"
            self._refs[block] -= 1
            if self._refs[block] == 0:
                self._free[block] = None
                if block not in self._key_of:
                    self._free.move_to_end(block, last=False)

    def register(self, block: int, parent: int, tokens: Sequence[int]) -> int:
        """Make a full block findable after the content with id `parent`; returns the id of its content.

        When another block holds the same content already, that one stays the one to be found.
        """
        key = (parent, tuple(tokens))
        known = self._block_of.get(key)
        if known is not None:
            return self._id_of[known]
        self._next_id += 1
        if self.sharing:
            self._block_of[key] = block
            self._key_of[block] = key
            self._id_of[block] = self._next_id
        return self._next_id

    def renew(self) -> None:
        """Forget every content: the weights have changed. Held blocks stay held."""
        self._next_id += 1
        self.root = self._next_id
        self._block_of.clear()
        self._key_of.clear()
        self._id_of.clear()

    def _forget(self, block: int) -> None:
        key = self._key_of.pop(block, None)
        if key is not None:
            del self._block_of[key]
            del self._id_of[block]
