"""Whether all ranks train on the same batch. Each has read it itself, perhaps from the disk of another machine."""

import socket
import zlib
from collections.abc import Sequence
from dataclasses import dataclass

from prime_rl.data.samples import TrainingBatch
from prime_rl.errors import DataError
from prime_rl.trainer.ranks import Ranks


@dataclass(frozen=True, slots=True, kw_only=True)
class SeenBatch:
    """What a rank has read, in short."""

    host: str
    num_sequences: int
    num_tokens: int
    num_loss_tokens: int
    checksum: int
    """CRC-32 of all tokens, of their loss mask and of the sequences' lengths."""

    @classmethod
    def of(cls, batch: TrainingBatch) -> "SeenBatch":
        """About a millisecond per million tokens."""
        checksum = 0
        for row in batch.micro_batches:
            for array in (row.seq_lens, row.input_ids, row.loss_mask):
                checksum = zlib.crc32(array.tobytes(), checksum)
        return cls(
            host=socket.gethostname(),
            num_sequences=batch.num_sequences,
            num_tokens=batch.num_tokens,
            num_loss_tokens=batch.num_loss_tokens,
            checksum=checksum,
        )

    @property
    def size(self) -> str:
        return f"{self.num_sequences} sequences of {self.num_tokens} tokens, {self.num_loss_tokens} of them in the loss"


def check_same_batch(batch: TrainingBatch, ranks: Ranks) -> None:
    """Called by all ranks, before they wait for each other over rows that not all of them may have.

    Raises: DataError, the same on every rank, when any has another batch than rank 0.
    """
    if ranks.size == 1:
        return
    if (difference := of_different_batches(batch.step, ranks.gathered(SeenBatch.of(batch)))) is not None:
        raise DataError(difference)


def of_different_batches(step: int, seen: Sequence[SeenBatch]) -> str | None:
    """What to say of batches, by rank, that are not all the same; None when they are."""
    first = seen[0]
    others = [
        rank for rank, of_rank in enumerate(seen) if (of_rank.checksum, of_rank.size) != (first.checksum, first.size)
    ]
    if not others:
        return None
    other = seen[others[0]]
    found = other.size if other.size != first.size else "as many, but not the same"
    return (
        f"step {step}: ranks do not have the same batch: rank 0 ({first.host}) has {first.size}; rank {others[0]} "
        f"({other.host}) has {found}; {len(others)} of {len(seen)} ranks differ from rank 0. Every rank reads the data "
        "itself: start all with the same configuration, and give all the same files (data.name of sft; output_dir on "
        "a disk that all nodes share)"
    )
