import shutil

import pytest
import torch
from safetensors.torch import save_file

from prime_rl.errors import ModelError
from prime_rl.inference.vllm.files import Shards
from prime_rl.models.hf import write_safetensors

TENSORS = {f"layer.{index}": torch.arange(100_000.0) + index for index in range(5)}


def test_open_files_can_be_read_after_their_directory_is_gone(tmp_path):
    directory = tmp_path / "step_1"
    write_safetensors(TENSORS.items(), directory, max_shard_bytes=10**6)
    assert len(list(directory.glob("*.safetensors"))) > 1
    shards = Shards(directory)
    shutil.rmtree(directory)
    read = dict(shards.tensors())
    assert read.keys() == TENSORS.keys()
    assert all(torch.equal(read[name], tensor) for name, tensor in TENSORS.items())


def test_a_directory_that_is_gone_says_so(tmp_path):
    with pytest.raises(ModelError, match="step_1 holds no weights"):
        Shards(tmp_path / "step_1")


def test_a_file_that_is_no_safetensors_says_so(tmp_path):
    save_file(TENSORS, tmp_path / "model.safetensors")
    (tmp_path / "model.safetensors").write_bytes(b"1234567890")
    with pytest.raises(ModelError, match=r"model\.safetensors is not a readable safetensors file"):
        Shards(tmp_path)
