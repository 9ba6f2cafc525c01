"""Weights published from a GPU while it goes on: what is written is of the moment, and pinned memory is used again."""

import pytest
import torch
from transformers import PretrainedConfig

from prime_rl.trainer.publish import staging
from prime_rl.trainer.publish.background import BackgroundWriter, Snapshot
from prime_rl.trainer.publish.gathering import StoredTensors
from prime_rl.trainer.publish.publishers import WeightPublisher
from prime_rl.trainer.publish.retention import Retention
from prime_rl.trainer.ranks import ALONE
from prime_rl.transport.checksum import entries
from prime_rl.transport.weights import load_weights

pytestmark = pytest.mark.gpu

CYCLES = 1_000_000_000
"""Of the GPU's clock: half a second in which it has not yet begun what comes after."""


@pytest.fixture
def tensors() -> dict[str, torch.Tensor]:
    generator = torch.Generator("cuda").manual_seed(0)
    shapes = [(4096, 1024 + 64 * index) for index in range(6)] + [(1024,), (7,)]
    return {
        f"layers.{index}.weight": torch.randn(shape, device="cuda", generator=generator)
        for index, shape in enumerate(shapes)
    }


@pytest.fixture
def assets(tmp_path):
    PretrainedConfig().save_pretrained(tmp_path / "assets")
    return tmp_path / "assets"


@pytest.mark.parametrize(
    ("group_bytes", "staged_bytes"),
    [(staging.GROUP_BYTES, staging.STAGED_BYTES), (2**25, 2**26), (2**20, 1)],
    ids=["one group", "groups that wait for room", "one tensor at a time"],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_kernels_that_are_queued_behind_a_publication_change_nothing_in_it(
    tmp_path, assets, tensors, dtype, group_bytes, staged_bytes, monkeypatch
):
    monkeypatch.setattr(staging, "GROUP_BYTES", group_bytes)
    monkeypatch.setattr(staging, "STAGED_BYTES", staged_bytes)
    expected = {name: tensor.to(dtype, copy=True).cpu() for name, tensor in tensors.items()}
    stored = StoredTensors(lambda: tensors, dtype, ALONE)
    retention = Retention(root=tmp_path / "weights", max_steps=2, interval=None, keep_last=9)
    writer = BackgroundWriter()
    files = WeightPublisher(
        tensors=stored.gathering, writer=writer, retention=retention, assets=assets, tokenizer=assets
    )
    for step in (1, 2):  # the second time all pinned memory is there already
        torch.cuda._sleep(CYCLES)
        busy = torch.cuda.Event()
        busy.record()
        files.publish(step)
        is_ahead = not busy.query()
        for tensor in tensors.values():
            tensor.add_(1)
        files.finish()
        written = load_weights(tmp_path / "weights" / f"step_{step}")
        assert written.published.tensors == entries(expected)
        assert all(torch.equal(written.tensors[name], tensor) for name, tensor in expected.items())
        expected = {name: tensor.to(dtype, copy=True).cpu() for name, tensor in tensors.items()}
    assert is_ahead, "publish has waited for the GPU"
    writer.close()


def test_pinned_memory_is_used_again_by_later_publications(tensors):
    def write(snapshot: Snapshot) -> None:
        at_once = dict(snapshot)
        assert all(tensor.is_pinned() for tensor in at_once.values())

    held = []
    writer = BackgroundWriter()
    for step in range(1, 6):
        writer.start(f"step_{step}", tensors.items(), write)
        writer.finish()
        torch.cuda.synchronize()
        held.append(torch.cuda.host_memory_stats()["allocated_bytes.current"])
    writer.close()
    assert held[0] > sum(tensor.nbytes for tensor in tensors.values())
    assert held[-1] < held[0] + 4096, held  # checksums, which may still be held by the thread


def test_the_gpu_computes_on_while_it_copies(tensors):
    """Behind the copies of a gigabyte, which take 20 ms, a kernel that is enqueued after them is soon over."""
    large = {f"{name} {index}": tensor for name, tensor in tensors.items() for index in range(8)}
    writer = BackgroundWriter()
    begun, ended = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    for _ in range(3):  # first there is memory to be allocated, and a kernel to be compiled
        torch.cuda._sleep(CYCLES)  # the host has everything enqueued before anything of it begins
        begun.record()
        writer.start("weights", large.items(), dict)
        ended.record()
        writer.finish()
        torch.cuda.synchronize()
    writer.close()
    num_bytes = sum(tensor.nbytes for tensor in large.values())
    assert num_bytes > 2**29
    at_most_ms = num_bytes / 2**30 * 8  # no PCIe bus moves 128 GiB in a second
    assert begun.elapsed_time(ended) < at_most_ms


def test_where_the_gpu_is_nearly_full_little_of_it_is_taken(tensors, monkeypatch):
    monkeypatch.setattr(staging, "GROUP_BYTES", 2**25)
    writer, num_bytes = BackgroundWriter(), sum(tensor.nbytes for tensor in tensors.values())
    torch.cuda.empty_cache()
    free, _ = torch.cuda.mem_get_info()
    full = torch.empty(free - num_bytes - 2**28, dtype=torch.uint8, device="cuda")
    try:
        free, _ = torch.cuda.mem_get_info()
        before = torch.cuda.memory_allocated()
        most = (free + torch.cuda.memory_reserved() - before) // staging.STAGED_SHARE
        torch.cuda.reset_peak_memory_stats()
        writer.start("weights", tensors.items(), dict)
        writer.finish()
        writer.close()
        taken = torch.cuda.max_memory_allocated() - before
    finally:
        del full
        torch.cuda.empty_cache()  # later tests need it
    assert most + 2**22 < num_bytes
    assert taken < most + 2**22  # beside the groups: their checksums


def test_without_page_locked_memory_weights_arrive_all_the_same(tensors, monkeypatch, caplog):
    empty = torch.empty

    def refusing(*args, pin_memory=False, **options):
        if pin_memory:
            raise RuntimeError("CUDA error: out of memory")
        return empty(*args, **options)

    monkeypatch.setattr(torch, "empty", refusing)
    found = {}
    writer = BackgroundWriter()
    torch.cuda._sleep(CYCLES)
    expected = {name: tensor.clone() for name, tensor in tensors.items()}
    writer.start("weights", tensors.items(), lambda snapshot: found.update(snapshot))
    for tensor in tensors.values():
        tensor.add_(1)
    writer.finish()
    writer.close()
    assert all(torch.equal(found[name], tensor.cpu()) for name, tensor in expected.items())
    assert any("No page-locked memory" in message for message in caplog.messages)
