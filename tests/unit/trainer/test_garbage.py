import gc
import weakref

import pytest

from prime_rl.trainer.garbage import FULL_EVERY, controlled_garbage


class Node:
    def __init__(self) -> None:
        self.itself = self


def test_garbage_is_collected_after_a_step_and_not_before():
    assert gc.isenabled()
    with controlled_garbage() as after_step:
        left = weakref.ref(Node())
        _ = [[] for _ in range(100_000)]  # would start a collection if any were automatic
        assert left() is not None
        after_step(0)
        assert left() is None
    assert gc.isenabled()
    assert gc.get_freeze_count() == 0


def test_garbage_that_has_survived_collections_is_collected_now_and_then():
    with controlled_garbage() as after_step:
        old, old_ref = Node(), None
        for step in range(3):
            after_step(step)
        old_ref = weakref.ref(old)
        del old
        after_step(3)
        assert old_ref() is not None
        after_step(FULL_EVERY - 1)
        assert old_ref() is None


def test_automatic_collection_comes_back_after_an_error():
    with pytest.raises(RuntimeError), controlled_garbage():
        raise RuntimeError
    assert gc.isenabled()
