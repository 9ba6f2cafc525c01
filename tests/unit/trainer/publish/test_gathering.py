import threading
from contextlib import closing
from functools import cache
from itertools import pairwise

import pytest
import torch
from tests.doubles.ranks import on_ranks
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from prime_rl.errors import InferenceError
from prime_rl.trainer.publish import gathering
from prime_rl.trainer.publish.gathering import StoredTensors
from prime_rl.trainer.ranks import ALONE
from prime_rl.transport.checksum import entries

DTYPES = (torch.float32, torch.bfloat16)
SHAPES = {"rows": (7, 4), "few rows": (1, 6), "vector": (10,), "odd vector": (5,), "odd rows": (6, 3), "wide": (4, 64)}


def whole_tensors():
    generator = torch.Generator().manual_seed(0)
    return {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}


def in_slices(ranks, replicas):
    """Every tensor cut over the ranks as FSDP2 does, and one that is whole on each."""
    if replicas == 1:
        mesh, placements = init_device_mesh("cpu", (ranks.size,)), [Shard(0)]
    else:
        mesh = init_device_mesh("cpu", (replicas, ranks.size // replicas), mesh_dim_names=("replicate", "shard"))
        placements = [Replicate(), Shard(0)]
    parts = {name: distribute_tensor(tensor, mesh, placements) for name, tensor in whole_tensors().items()}
    return parts | {"whole": torch.arange(9.0)}


def expected(dtype):
    return {name: tensor.to(dtype) for name, tensor in (whole_tensors() | {"whole": torch.arange(9.0)}).items()}


def look_at_everything(ranks, dtype, replicas):
    """What rank 0 finds: checksums, all tensors, some, and how far apart the words were."""
    gathering.CHUNK_BYTES = 100
    tensors = in_slices(ranks, replicas)
    stored = StoredTensors(lambda: tensors, dtype, ranks)
    if not ranks.is_leader:
        stored.follow()
        return None
    found = stored.checksums(), dict(stored.gathering()), dict(stored.gathering({"wide", "rows"}))
    with closing(stored.gathering()) as unfinished:
        next(unfinished)
    failed = []
    thread = threading.Thread(target=lambda: failed.append(refused(unfinished)))
    thread.start()
    thread.join()
    again = dict(stored.gathering())
    stored.end()
    return *found, failed, again


def refused(tensors):
    try:
        return len(list(tensors))
    except InferenceError as error:
        return str(error)


def look_in_both_dtypes(ranks, replicas):
    return [look_at_everything(ranks, dtype, replicas) for dtype in DTYPES]


@pytest.fixture(scope="module")
def seen():
    """What rank 0 of so many ranks, in so many replicas, has seen; for every dtype."""

    @cache
    def look(size, replicas):
        return dict(zip(DTYPES, on_ranks(size, look_in_both_dtypes, replicas)[0], strict=True))

    return look


@pytest.mark.parametrize(("size", "replicas"), [(2, 1), pytest.param(4, 2, marks=pytest.mark.slow)])
@pytest.mark.parametrize("dtype", DTYPES)
class TestRanks:
    def test_every_tensor_is_gathered_whole_and_in_order(self, seen, size, replicas, dtype):
        _, everything, some, _, again = seen(size, replicas)[dtype]
        assert list(everything) == list(expected(dtype))
        assert all(torch.equal(everything[name], tensor) for name, tensor in expected(dtype).items())
        assert list(some) == ["rows", "wide"]
        assert torch.equal(some["wide"], expected(dtype)["wide"])
        assert all(torch.equal(again[name], tensor) for name, tensor in expected(dtype).items())

    def test_checksums_of_parts_are_those_of_the_whole(self, seen, size, replicas, dtype):
        assert seen(size, replicas)[dtype][0] == entries(expected(dtype))

    def test_what_was_given_up_in_the_middle_gathers_no_more(self, seen, size, replicas, dtype):
        assert seen(size, replicas)[dtype][3] == ["nobody waits for these tensors any more"]


def test_a_process_alone_has_everything_at_hand():
    stored = StoredTensors(whole_tensors, torch.bfloat16, ALONE)
    assert stored.checksums() == entries({name: tensor.bfloat16() for name, tensor in whole_tensors().items()})
    found = dict(stored.gathering())
    assert list(found) == list(SHAPES)
    assert all(torch.equal(found[name], tensor.bfloat16()) for name, tensor in whole_tensors().items())
    stored.end()


def alone_in_slices(ranks):
    tensors = in_slices(ranks, 1)
    return changed_after_gathering(StoredTensors(lambda: tensors, torch.float32, ranks), tensors)


def changed_after_gathering(stored, tensors):
    found = dict(stored.gathering())
    stored.end()
    with torch.no_grad():
        for tensor in tensors.values():
            tensor.zero_()
    return found


def test_on_a_cpu_what_was_gathered_stays_as_it_was_when_training_goes_on():
    tensors = whole_tensors()
    of_one = changed_after_gathering(StoredTensors(lambda: tensors, torch.float32, ALONE), tensors)
    of_slices = on_ranks(1, alone_in_slices)[0]
    assert all(torch.equal(of_one[name], tensor) for name, tensor in whole_tensors().items())
    assert all(torch.equal(of_slices[name], tensor) for name, tensor in expected(torch.float32).items())


def test_tensors_are_gathered_in_groups_of_few_bytes(monkeypatch):
    monkeypatch.setattr(gathering, "CHUNK_BYTES", 120)
    stored = StoredTensors(whole_tensors, torch.float32, ALONE)
    chunks = list(stored.chunks(list(range(len(SHAPES)))))
    assert [index for chunk in chunks for index in chunk] == list(range(len(SHAPES)))
    sizes = [[4 * torch.Size(list(SHAPES.values())[index]).numel() for index in chunk] for chunk in chunks]
    assert all(sum(chunk) <= 120 or len(chunk) == 1 for chunk in sizes)
    assert all(sum(chunk) + after[0] > 120 for chunk, after in pairwise(sizes))
