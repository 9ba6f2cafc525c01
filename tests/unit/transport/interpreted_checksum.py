"""The kernel of checksums against the CPU's way, on the CPU: to be run with TRITON_INTERPRET=1."""

import torch

from prime_rl.transport.checksum import _WORDS, OFFSET, _on_cpu
from prime_rl.transport.gpu_checksum import BLOCK, add_checksum

COUNTS = (0, 1, 2, 3, 16, BLOCK, BLOCK + 1, 5 * BLOCK - 7)
FIRSTS = (0, 1, 2**31 - 1, 2**40)


def main() -> None:
    generator = torch.Generator().manual_seed(0)
    for dtype in _WORDS.values():
        limits = torch.iinfo(dtype)
        for count in COUNTS:
            words = torch.randint(limits.min, limits.max + 1, (count,), generator=generator, dtype=dtype)
            for first in FIRSTS:
                totals = torch.tensor([5, 7, 9])
                add_checksum(words, totals, 1, first=first, offset=OFFSET)
                expected = (_on_cpu(words, first) + 7 + 2**63) % 2**64 - 2**63
                assert totals.tolist() == [5, expected, 9], (dtype, count, first)


if __name__ == "__main__":
    main()
