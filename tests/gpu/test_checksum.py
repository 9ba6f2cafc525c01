"""Checksums on a GPU, by Triton's kernel and by PyTorch's own operations, are those on a CPU."""

import pytest
import torch

from prime_rl.transport import checksum as module
from prime_rl.transport.checksum import checksum, checksums_on_device, entries, part_on_device

pytestmark = pytest.mark.gpu

DTYPES = [torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.uint8, torch.int64, torch.bool]
SIZES = (0, 1, 2, 3, 5, 4096, 4097, 2**20 + 3)


@pytest.fixture(params=["triton", "torch"], autouse=True)
def way(request, monkeypatch):
    if request.param == "torch":
        monkeypatch.setattr(module, "_kernels", lambda device: None)
    else:
        assert module._kernels(torch.device("cuda", 0)) is not None, "PyTorch's CUDA builds come with Triton"
    return request.param


def random(size: int, dtype: torch.dtype) -> torch.Tensor:
    generator = torch.Generator().manual_seed(size)
    if dtype == torch.bool:
        return torch.randint(0, 2, (size,), generator=generator).bool()
    return torch.randint(0, 256, (size * dtype.itemsize,), generator=generator, dtype=torch.uint8).view(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_dtype_and_size_has_the_checksum_of_the_cpu(dtype):
    tensors = {str(size): random(size, dtype) for size in SIZES}
    assert entries({name: tensor.cuda() for name, tensor in tensors.items()}) == entries(tensors)


def test_a_tensor_may_begin_anywhere_and_lie_in_any_order():
    buffer = random(1027, torch.uint8)
    for view in (buffer[1:1025], buffer[3:], buffer[2:1026].view(32, 32).T, buffer[:1024:2]):
        assert checksum(view) == checksum(view.cuda())
    on_gpu = buffer.cuda()
    assert checksum(on_gpu[1:1025]) == checksum(buffer[1:1025])
    assert checksum(on_gpu[3:]) == checksum(buffer[3:])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.uint8])
def test_parts_add_up_to_the_checksum_of_the_whole(dtype):
    whole = random(11 * 5000, dtype).view(11, 5000)
    row_bytes = whole.nbytes // len(whole)
    found = [
        int(part_on_device(whole[start : start + 3].cuda(), whole_bytes=whole.nbytes, first_byte=start * row_bytes))
        for start in range(0, 12, 3)
    ]
    assert f"{sum(found) % 2**64:016x}" == checksum(whole)


def test_words_beyond_32_bits_are_counted(way):
    large = torch.ones(2**31 + 5, dtype=torch.uint8, device="cuda")
    count = len(large)
    assert checksum(large) == f"{(1 + module.OFFSET) * count**2 % 2**64:016x}"


def test_it_is_computed_on_the_current_stream():
    tensor = torch.zeros(2**20, device="cuda")
    checksums_on_device([tensor, tensor[:7]])  # compiled, which takes its time
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        torch.cuda._sleep(200_000_000)
        tensor.fill_(1.0)
        totals = checksums_on_device([tensor, tensor[:7]])
        assert not stream.query(), "it has waited for the GPU"
    stream.synchronize()
    expected = [int(checksum(one), 16) for one in (torch.ones(2**20), torch.ones(7))]
    assert [total % 2**64 for total in totals.tolist()] == expected


def test_a_kernel_is_compiled_once_for_words_of_a_size_and_not_for_every_number_of_them(way):
    if way == "torch":
        return
    kernels = module._kernels(torch.device("cuda", 0))
    assert kernels is not None
    whole = torch.ones(2**16, dtype=torch.int32, device="cuda")
    checksums_on_device([whole])
    before = num_compiled(kernels)
    checksums_on_device([whole[:size] for size in (1, 2, 15, 16, 17, 4096, 5000)])
    assert num_compiled(kernels) == before


def num_compiled(kernels) -> int:
    caches = kernels._add.device_caches  # of each device: (kernels by their key, ...)
    return sum(len(cache[0]) for cache in caches.values())


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_tensors_may_lie_on_several_devices():
    tensors = {str(size): random(size, torch.float32) for size in SIZES}
    places = ["cpu", "cuda:0", "cuda:1"]
    spread = {name: tensor.to(places[at % 3]) for at, (name, tensor) in enumerate(tensors.items())}
    assert entries(spread) == entries(tensors)
