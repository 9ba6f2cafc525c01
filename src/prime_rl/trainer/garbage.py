"""Python's garbage collection between steps, not during them.

Left alone it stops a rank for tens of milliseconds at moments of its own, and all others wait in their next collective.
"""

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final

FULL_EVERY: Final = 50
"""Steps between collections of everything that was made since training began."""


@contextmanager
def controlled_garbage() -> Iterator[Callable[[int], None]]:
    """No automatic collection inside. What it yields is called with each finished step, and collects what that left.

    Objects that are there at the start (modules, the model, configuration) are not looked at until the end.
    """
    was_enabled = gc.isenabled()
    gc.collect()
    gc.freeze()
    gc.disable()
    try:
        yield _collect
    finally:
        gc.unfreeze()
        if was_enabled:
            gc.enable()


def _collect(step: int) -> None:
    gc.collect(2 if (step + 1) % FULL_EVERY == 0 else 1)
