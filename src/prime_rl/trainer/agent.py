"""`torchrun` as `rl` starts it: starts the ranks of one machine and ends all of them when one has ended.

Where torchrun reports a failed rank with a traceback of its own and a table, this is silent, since the rank has said
why; of one that could not, because a signal ended it, this says so. Takes torchrun's arguments. Where torchrun gives
ranks 30 s to end, rank 0, which ends by itself, has the time to write weights.
"""

import logging
import signal
import sys
from collections.abc import Sequence
from functools import cache

from torch.distributed.elastic.multiprocessing.api import PContext, SignalException, SubprocessContext
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.run import parse_args, run

from prime_rl import lifeline
from prime_rl.errors import FINAL

LOST_MEMORY = "; if nobody did that, the machine ran out of memory (see dmesg): lower model.seq_len, or use fewer ranks"


def main(argv: Sequence[str]) -> int:
    """Run torchrun with `argv`; the exit code: 0 where every rank has ended well, FINAL where one ended with that."""
    logging.disable(logging.ERROR)  # torchrun's modules set the levels of their own loggers
    lifeline.watch_launcher()
    SubprocessContext.close = _close  # type: ignore[method-assign, assignment]
    try:
        run(parse_args(list(argv)))
    except ChildFailedError as error:
        return FINAL if any(failure.exitcode == FINAL for failure in error.failures.values()) else 1
    except SignalException as error:
        return 128 + int(error.sigval)
    return 0


def _close(ranks: SubprocessContext, death_sig: signal.Signals | None = None, timeout: int = 30) -> None:
    """End all ranks, as torchrun does when one has failed or it is told to; but say first what that one could not."""
    _tell(ranks)
    PContext.close(ranks, death_sig, int(lifeline.WRITING_S))


@cache
def _tell(ranks: SubprocessContext) -> None:
    codes = {rank: handler.proc.poll() for rank, handler in ranks.subprocess_handlers.items()}
    failed = {rank: code for rank, code in codes.items() if code}
    if failed and (reason := unsaid(failed)):
        print(f"trainer: {reason}", file=sys.stderr, flush=True)


def unsaid(codes: dict[int, int]) -> str | None:
    """What the ranks could not say themselves, from the exit code of each; None where one of them has.

    SIGTERM is how torchrun ends the others, so it is the reason only where there is no other.
    """
    if any(code > 0 for code in codes.values()):
        return None
    killed = {rank: -code for rank, code in codes.items()}
    first = {rank: number for rank, number in killed.items() if number != signal.SIGTERM}
    rank, number = min((first or killed).items())
    hint = LOST_MEMORY if number == signal.SIGKILL else ""
    return f"rank {rank} was killed by {signal.Signals(number).name}{hint}"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
