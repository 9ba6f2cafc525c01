"""The front of a training process: `trainer` and `sft` as commands, and their train files as scripts under `torchrun`.

No torch in here: a dry run needs none.
"""

import os
import re
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import TypeGuard, TypeVar

from prime_rl import lifeline
from prime_rl.config.bench import measured
from prime_rl.config.command import (
    FIRST_RANK_S,
    Files,
    begin,
    exit_code,
    is_first_rank,
    run_command,
    tell_torchrun,
    this_rank,
)
from prime_rl.config.trainer import SFTConfig, TrainerConfig
from prime_rl.errors import PrimeRLError
from prime_rl.logs import get_logger
from prime_rl.paths import check_run_dir, claim_run_dir
from prime_rl.trainer import bench
from prime_rl.trainer.memory import full_memory_in_words

Config = TypeVar("Config", bound=TrainerConfig | SFTConfig)

ECHO_S = 3 * FIRST_RANK_S
"""How long a rank that lost another one waits for that one's own words; they take FIRST_RANK_S at most."""

_logger = get_logger(__name__)


def main(name: str, root: type[Config], run: Callable[[Config], None], argv: Sequence[str] | None = None) -> None:
    """What the command `name` does with a command line, by default this process's; at last `run`.

    Of the processes that `torchrun` starts with one command line, the first one speaks and writes.
    """

    def work(config: Config) -> None:
        if config.bench is not None:
            config = measured(config)
        if is_first_rank() and config.bench is not None:
            bench.clear(config)
        elif is_first_rank() and _owns_directory(config):
            claim_run_dir(config.output_dir, clean=config.clean)
        begin(name, config)
        is_debug = config.log.level == "debug"
        is_restarted = isinstance(config, TrainerConfig) and config.recover
        in_words = full_memory_in_words(is_final=not is_restarted)
        with _ended_in_order(), _one_rank_tells(name, is_debug=is_debug), in_words:
            run(config)
            if config.bench is not None and is_first_rank():
                print(f"\n{bench.report(name, config)}", flush=True)

    def files(config: Config) -> Files:
        if config.bench is None and _owns_directory(config):
            check_run_dir(config.output_dir, clean=config.clean)
        return {name: config}

    run_command(name, root, work, argv=argv, files=files)


def _owns_directory(config: TrainerConfig | SFTConfig) -> TypeGuard[SFTConfig]:
    """Whether the run directory must be a new one. `trainer` shares it with an orchestrator, a resumed run goes on."""
    is_resumed = config.ckpt is not None and config.ckpt.resume_step is not None and not getattr(config, "clean", False)
    return isinstance(config, SFTConfig) and not is_resumed


class _Terminated(KeyboardInterrupt):
    """SIGTERM came."""


@contextmanager
def _ended_in_order() -> Iterator[None]:
    """SIGTERM unwinds this process as Ctrl-C does: weights that were copied whole are written, others leave nothing.

    A Ctrl-C after that ends it at once, wherever it is; SIGTERM may come from several who mean the same. Ranks behind
    the first write nothing, and end at the first signal.

    No exception comes where Python runs nothing (in NCCL), and one that comes in a callback, as modules that are
    imported and objects that are freed have them, is lost. So a thread ends the process where it does not do so itself.
    """
    is_ours = is_first_rank() and threading.current_thread() is threading.main_thread()
    if not is_ours or signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
        yield
        return
    before = signal.getsignal(signal.SIGINT)

    def end(came: int, frame: FrameType | None) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        raise _Terminated if came == signal.SIGTERM else KeyboardInterrupt

    signal.signal(signal.SIGTERM, end)
    if before is signal.default_int_handler:
        signal.signal(signal.SIGINT, end)
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    noted = signal.set_wakeup_fd(writing)
    threading.Thread(target=_see_it_end, args=(reading,), name="signals", daemon=True).start()
    try:
        yield
    except _Terminated:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGTERM)  # and ends as whoever sent it expects
        raise
    finally:
        signal.set_wakeup_fd(noted)
        os.close(writing)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        signal.signal(signal.SIGINT, before)


def _see_it_end(signals: int) -> None:
    """`signals`: a pipe, with the number of each signal as a byte; closed where nothing is to be ended any more."""
    came: int | None = None
    while number := os.read(signals, 1):
        if number[0] not in (signal.SIGTERM, signal.SIGINT):
            continue
        if came is None:
            came = number[0]
            ending = threading.Thread(target=lifeline.end_after_grace, args=(128 + came,), name="ending", daemon=True)
            ending.start()
        elif number[0] == signal.SIGINT:
            os._exit(128 + signal.SIGINT)
    os.close(signals)


@contextmanager
def _one_rank_tells(name: str, *, is_debug: bool) -> Iterator[None]:
    """Where several ranks fail, the reason is told once, and by the rank that has it.

    Ranks behind the first may all have failed like the first, and a rank whose collective broke has lost another one,
    which knows why. Both hold back, and torchrun ends them as soon as that other one has ended. What nobody else
    tells, they tell. Then the process ends at once, without the clean-up in which it would wait for its peers.
    """
    if os.environ.get("WORLD_SIZE", "1") == "1":
        yield
        return
    try:
        yield
    except Exception as error:
        lost = _lost_others(error)
        reason = lost or (str(error) if isinstance(error, PrimeRLError) else f"{type(error).__name__}: {error}")
        if not is_first_rank():
            _logger.error("%s", reason, exc_info=not isinstance(error, PrimeRLError))
        time.sleep(ECHO_S if lost else 0.0 if is_first_rank() else FIRST_RANK_S)
        if is_debug or not (lost or isinstance(error, PrimeRLError)):
            traceback.print_exc()
        rank = "" if is_first_rank() else f" (rank {this_rank()})"
        print(f"{name}{rank}: {reason}", file=sys.stderr, flush=True)
        tell_torchrun(reason)
        os._exit(exit_code(error))


def _lost_others(error: Exception) -> str | None:
    """What to say where a collective has failed, which it does when another rank is gone; None for other errors."""
    torch = sys.modules.get("torch")
    is_of_nccl = torch is not None and isinstance(error, torch.distributed.DistError)
    is_of_gloo = isinstance(error, RuntimeError) and "gloo" in str(error)
    if not (is_of_nccl or is_of_gloo):
        return None
    said = re.sub(r"^\[[^]]*\] ", "", str(error)).splitlines()[0].partition(". ")[0]
    return (
        "lost the other ranks: one of them has ended, or did not come within dist_timeout_seconds; look at the logs of "
        f"the ranks, and at what was printed on other machines ({said})"
    )
