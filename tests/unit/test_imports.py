import gc

import pytest

from prime_rl.imports import OBJECTS, importing


def fail_to_import() -> None:
    with importing():
        assert gc.get_threshold()[0] == OBJECTS
        raise ImportError


def test_garbage_is_looked_for_seldom_inside_and_as_before_afterwards():
    before, frozen = gc.get_threshold(), gc.get_freeze_count()
    try:
        with pytest.raises(ImportError):
            fail_to_import()
        assert gc.get_threshold() == before
        assert gc.get_freeze_count() > frozen
    finally:
        gc.unfreeze()
