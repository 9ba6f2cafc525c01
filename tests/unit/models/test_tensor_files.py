from pathlib import Path

import pytest
import torch
import xxhash
from safetensors.torch import load_file, save_file

from prime_rl.errors import ModelError
from prime_rl.models.tensor_files import parse_file, read_file, write_file

TENSORS = {
    "wide": torch.arange(3, dtype=torch.int64),
    "norm": torch.randn(5, generator=torch.Generator().manual_seed(0)).bfloat16(),
    "matrix": torch.randn(4, 3, generator=torch.Generator().manual_seed(1)),
    "scalar": torch.tensor(2.5),
    "none": torch.zeros(0, 7),
    "flags": torch.tensor([True, False, True]),
}


def read(path):
    return parse_file(path, read_file(path)[0])


def same(one, two):
    assert one.keys() == two.keys()
    for name, tensor in one.items():
        assert two[name].dtype == tensor.dtype, name
        assert torch.equal(two[name], tensor), name


def test_what_is_written_is_read_back_by_us_and_by_the_library(tmp_path):
    path = tmp_path / "x.safetensors"
    written = write_file(path, TENSORS)
    content = path.read_bytes()
    assert (written.num_bytes, written.xxh3) == (len(content), xxhash.xxh3_128_hexdigest(content))
    assert read_file(path)[1] == written
    same(TENSORS, read(path))
    same(TENSORS, load_file(path))


def test_what_the_library_writes_is_read(tmp_path):
    path = tmp_path / "x.safetensors"
    save_file(TENSORS, path, metadata={"by": "the library"})
    same(TENSORS, read(path))


def test_views_and_transposes_are_written_as_what_they_show(tmp_path):
    tensor = torch.arange(12.0).view(3, 4)
    write_file(tmp_path / "x", {"t": tensor.T, "part": tensor[1:, ::2]})
    same({"t": tensor.T, "part": tensor[1:, ::2]}, read(tmp_path / "x"))


def test_tensors_of_one_type_keep_their_order(tmp_path):
    write_file(tmp_path / "x", {"z": torch.zeros(1), "a": torch.zeros(1), "m": torch.zeros(1)})
    assert list(read(tmp_path / "x")) == ["z", "a", "m"]


def test_tensors_that_are_not_aligned_are_read(tmp_path):
    header = (
        b'{"b":{"dtype":"U8","shape":[1],"data_offsets":[0,1]},"f":{"dtype":"F32","shape":[1],"data_offsets":[1,5]}}'
    )
    header += b" " * (-len(header) % 8)
    path = tmp_path / "x"
    path.write_bytes(len(header).to_bytes(8, "little") + header + b"\x07" + bytes.fromhex("0000803f"))
    same({"b": torch.tensor([7], dtype=torch.uint8), "f": torch.ones(1)}, read(path))


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"short",
        (1000).to_bytes(8, "little") + b"{}",
        (2).to_bytes(8, "little") + b"[]",
        (8).to_bytes(8, "little") + b"no json!",
        (16).to_bytes(8, "little") + b'{"a": {"x": 1}} ',
    ],
)
def test_anything_else_is_refused_by_name(tmp_path: Path, content):
    path = tmp_path / "model.safetensors"
    path.write_bytes(content)
    with pytest.raises(ModelError, match=r"model\.safetensors is not a readable safetensors file"):
        read(path)


def test_a_tensor_outside_the_file_is_refused_by_name(tmp_path):
    path = tmp_path / "x"
    write_file(path, {"first": torch.zeros(4), "second": torch.zeros(4)})
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(ModelError, match="tensor second of shape"):
        read(path)
