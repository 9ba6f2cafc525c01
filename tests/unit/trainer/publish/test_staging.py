import pytest
import torch

from prime_rl.trainer.publish import staging
from prime_rl.trainer.publish.staging import on_host, padded_bytes, pieces


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.uint8, torch.complex128])
def test_tensors_lie_in_one_buffer_one_after_the_other_each_at_an_even_place(dtype):
    tensors = [torch.arange(count).to(dtype) + 1 for count in (3, 0, 16, 7, 1)]
    tensors.append(torch.tensor(5).to(dtype))
    sizes = [padded_bytes(tensor) // dtype.itemsize for tensor in tensors]
    buffer = torch.zeros(sum(sizes), dtype=dtype)
    views = pieces(buffer, sizes, tensors)
    torch._foreach_copy_(views, tensors)
    assert all(torch.equal(view, tensor) for view, tensor in zip(views, tensors, strict=True))
    assert all(view.storage_offset() * dtype.itemsize % 16 == 0 for view in views)
    assert buffer.count_nonzero() == sum(tensor.numel() for tensor in tensors)
    assert buffer.nbytes < sum(tensor.nbytes for tensor in tensors) + 16 * len(tensors)


def test_where_no_memory_can_be_page_locked_it_is_copied_into_other_memory_and_that_is_told_once(monkeypatch, caplog):
    empty = torch.empty

    def refusing(*args, pin_memory=False, **options):
        if pin_memory:
            raise RuntimeError("CUDA error: out of memory\nCompile with ...")
        return empty(*args, **options)

    monkeypatch.setattr(torch, "empty", refusing)
    staging._tell_of_pinning.cache_clear()
    tensor = torch.arange(6.0).view(2, 3)
    copies = [on_host(tensor), on_host(tensor)]
    tensor.zero_()
    assert all(torch.equal(copy, torch.arange(6.0).view(2, 3)) for copy in copies)
    (message,) = caplog.messages
    assert message.startswith("No page-locked memory is to be had for weights (CUDA error: out of memory)")
