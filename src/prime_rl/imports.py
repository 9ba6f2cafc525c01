"""Large libraries in less time."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

OBJECTS: Final = 100_000
"""Objects that are made between two collections meanwhile; otherwise 700."""


@contextmanager
def importing() -> Iterator[None]:
    """Import large libraries inside.

    What they make stays. Python would look for garbage in it hundreds of times, a fifth of the time that the imports
    take; and again in every full collection later, in which everything else waits.
    """
    before = gc.get_threshold()
    gc.set_threshold(OBJECTS, *before[1:])
    try:
        yield
    finally:
        gc.freeze()
        gc.set_threshold(*before)
