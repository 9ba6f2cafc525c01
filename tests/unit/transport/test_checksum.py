import os
import subprocess
import sys
from contextlib import nullcontext
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import prime_rl.transport
from prime_rl.transport import checksum as module
from prime_rl.transport.checksum import OFFSET, Tally, checksum, combined, entries

WORDS = st.lists(st.integers(-(2**31), 2**31 - 1), min_size=1, max_size=40)


def words(values):
    return torch.tensor(values, dtype=torch.int32)


@settings(deadline=None)
@given(WORDS)
def test_it_is_the_sum_of_its_definition(values):
    expected = sum((word + OFFSET) * (2 * i + 1) for i, word in enumerate(values)) % 2**64
    assert checksum(words(values)) == f"{expected:016x}"


@settings(deadline=None)
@given(WORDS, st.data())
def test_any_change_of_one_word_changes_it(values, data):
    position = data.draw(st.integers(0, len(values) - 1))
    changed = data.draw(st.integers(-(2**31), 2**31 - 1).filter(lambda word: word != values[position]))
    assert checksum(words(values)) != checksum(words([*values[:position], changed, *values[position + 1 :]]))


@settings(deadline=None)
@given(WORDS.filter(lambda values: len(set(values)) > 1), st.data())
def test_any_exchange_of_two_different_words_changes_it(values, data):
    first = data.draw(st.integers(0, len(values) - 1))
    second = data.draw(st.integers(0, len(values) - 1).filter(lambda i: values[i] != values[first]))
    swapped = list(values)
    swapped[first], swapped[second] = swapped[second], swapped[first]
    assert checksum(words(values)) != checksum(words(swapped))


@settings(deadline=None)
@given(WORDS)
def test_zeros_at_the_end_change_it(values):
    assert checksum(words(values)) != checksum(words([*values, 0]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.uint8, torch.bool])
@pytest.mark.parametrize("shape", [(), (0,), (1,), (3,), (4, 5), (7, 3, 1)])
def test_every_dtype_and_size_has_one_that_follows_its_bytes(dtype, shape):
    tensor = torch.arange(1, 1 + max(1, torch.Size(shape).numel())).to(dtype)[: torch.Size(shape).numel()].view(shape)
    assert checksum(tensor) == checksum(tensor.clone())
    if tensor.numel():
        other = tensor.clone()
        other.view(-1)[-1] = 0
        assert checksum(tensor) != checksum(other)


@pytest.mark.parametrize("chunk", [64, 2**20])
@pytest.mark.parametrize("numel", [0, 1, 1000, 1024])
def test_cpu_and_gpu_compute_the_same_however_tensors_are_cut(monkeypatch, chunk, numel):
    """The GPU's way runs on the CPU as well; tests/gpu has the same on a GPU."""
    words = torch.randint(-(2**31), 2**31, (numel,), generator=torch.Generator().manual_seed(0)).to(torch.int32)
    expected = sum((word + OFFSET) * (2 * i + 1) for i, word in enumerate(words.tolist())) % 2**64
    for name in ("_CPU_CHUNK", "_GPU_CHUNK"):
        monkeypatch.setattr(module, name, chunk)
    assert module._on_cpu(words) % 2**64 == int(module._on_gpu(words)) % 2**64 == expected


def test_a_view_counts_as_the_tensor_that_it_shows():
    tensor = torch.arange(12.0).view(3, 4)
    assert checksum(tensor.T) == checksum(tensor.T.contiguous()) != checksum(tensor)


def test_a_tensor_may_begin_anywhere_in_its_buffer():
    buffer = torch.arange(1, 12, dtype=torch.uint8)
    assert checksum(buffer[2:10]) == checksum(buffer[2:10].clone())


def test_a_tally_notes_tensors_as_they_were_and_in_order():
    tensor, tally = torch.ones(3), Tally()
    tally.add("b", tensor)
    tensor.zero_()
    tally.add("a", tensor)
    found = tally.entries()
    assert list(found) == ["b", "a"]
    assert found["b"] == entries({"b": torch.ones(3)})["b"] != found["a"]
    assert (found["b"].dtype, found["b"].shape) == ("float32", [3])


def test_the_combined_digest_is_of_names_types_shapes_and_values_but_not_of_their_order():
    one, two = torch.ones(2, 3), torch.zeros(4)
    digest = combined(entries({"one": one, "two": two}))
    assert digest == combined(entries({"two": two, "one": one}))
    others = [
        {"one": one},
        {"one": two, "two": one},
        {"one": one.view(3, 2), "two": two},
        {"one": one, "two": two.to(torch.int32)},
        {"one": one, "two": two + 1},
    ]
    assert digest not in [combined(entries(other)) for other in others]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.uint8])
def test_parts_add_up_to_the_checksum_of_the_whole(dtype):
    whole = torch.randint(0, 200, (11, 4), generator=torch.Generator().manual_seed(1)).to(dtype)
    row_bytes = 4 * whole.element_size()
    parts = [whole[start : start + 3] for start in range(0, 12, 3)]
    found = [
        int(module.part_on_device(part, whole_bytes=whole.nbytes, first_byte=3 * number * row_bytes))
        for number, part in enumerate(parts)
    ]
    assert f"{sum(found) % 2**64:016x}" == checksum(whole)


@pytest.mark.skipif(find_spec("triton") is None, reason="there is no Triton, which comes with PyTorch's CUDA builds")
def test_the_kernel_computes_the_same_word_by_word():
    """In a process of its own, where Triton interprets kernels on the CPU; tests/gpu has them compiled."""
    command = [sys.executable, "-W", "error", str(Path(__file__).with_name("interpreted_checksum.py"))]
    subprocess.run(command, env=os.environ | {"TRITON_INTERPRET": "1"}, check=True, timeout=120)


def test_a_process_that_computes_them_on_a_cpu_loads_no_triton():
    code = (
        "import sys, torch; from prime_rl.transport.checksum import checksum; checksum(torch.ones(5));"
        "sys.exit('triton' in sys.modules or 'prime_rl.transport.gpu_checksum' in sys.modules)"
    )
    subprocess.run([sys.executable, "-W", "error", "-c", code], check=True, timeout=120)


def adding(difference: int, error: str = ""):
    """A kernel that is wrong by so much, or cannot be compiled."""

    def add_checksum(words, totals, at, *, first, offset):
        if error:
            raise RuntimeError(error)
        totals[at] += module._on_cpu(words, first) + difference

    return add_checksum


@pytest.mark.parametrize(
    ("kernel", "said"),
    [
        (adding(0), None),
        (adding(1), "its result is"),
        (adding(0, "Failed to find C compiler.\nPlease specify"), "Triton fails (Failed to find C compiler.)"),
    ],
    ids=["right", "wrong", "no compiler"],
)
def test_kernels_are_used_only_once_a_launch_has_shown_that_they_are_right(monkeypatch, caplog, kernel, said):
    loaded = ModuleType("prime_rl.transport.gpu_checksum")
    loaded.add_checksum = kernel
    monkeypatch.setitem(sys.modules, loaded.__name__, loaded)
    monkeypatch.setattr(prime_rl.transport, "gpu_checksum", loaded, raising=False)
    monkeypatch.setattr(torch.cuda, "device", nullcontext)
    module._kernels.cache_clear()
    found = [module._kernels(torch.device("cpu")) for _ in range(2)]
    module._kernels.cache_clear()
    assert found == ([loaded] * 2 if said is None else [None] * 2)
    assert [said in message for message in caplog.messages] == ([] if said is None else [True])


def test_tensors_of_several_devices_are_summed_where_they_are(monkeypatch):
    """`meta` stands for the second device; tests/gpu has real ones."""
    asked = []

    def sums(tensors):
        asked.append([tensor.device.type for tensor in tensors])
        return torch.tensor([tensor.numel() for tensor in tensors])

    monkeypatch.setattr(module, "checksums_on_device", sums)
    tensors = {str(size): torch.empty(size, device="cpu" if size % 2 else "meta") for size in range(1, 6)}
    assert {name: entry.checksum for name, entry in entries(tensors).items()} == {
        str(n): f"{n:016x}" for n in range(1, 6)
    }
    assert asked == [["cpu"] * 3, ["meta"] * 2]


def test_checksums_that_are_asked_for_at_once_are_of_one_device():
    with pytest.raises(AssertionError, match="on several devices"):
        module.checksums_on_device([torch.ones(1), torch.ones(1, device="meta")])
