import gc
import json
import logging
import threading
import time
import weakref
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from prime_rl.errors import ModelError
from prime_rl.models.hf import (
    change_config,
    copy_assets,
    eos_token_ids,
    hf_tensors,
    load_decoder,
    load_hf_tensors,
    read_safetensors,
    resolve_model,
    resolve_tokenizer,
    stored_tensors,
    vocab_size,
    write_safetensors,
)

CONFIG: dict[str, Any] = {
    "model_type": "qwen3",
    "vocab_size": 32,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
}


def model_dir(directory: Path, **change: Any) -> Path:
    directory.mkdir(exist_ok=True)
    (directory / "config.json").write_text(json.dumps(CONFIG | change))
    return directory


def test_a_directory_without_weights_is_initialised_from_the_seed_and_the_log_says_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    directory = str(model_dir(tmp_path))
    with caplog.at_level(logging.WARNING):
        first, again, other = (dict(hf_tensors(load_decoder(directory, seed=seed))) for seed in (1, 1, 2))
    assert "initialised at random from seed 1" in caplog.text
    assert all(torch.equal(first[name], again[name]) for name in first)
    name = "model.layers.0.mlp.up_proj.weight"
    assert not torch.equal(first[name], other[name])
    assert first[name].std().item() == pytest.approx(0.02, rel=0.2)
    assert torch.equal(first["model.norm.weight"], torch.ones(16))


def test_initial_weights_in_bfloat16_are_the_rounded_ones_of_float32(tmp_path: Path) -> None:
    directory = str(model_dir(tmp_path))
    exact = dict(hf_tensors(load_decoder(directory)))
    rounded = dict(hf_tensors(load_decoder(directory, dtype=torch.bfloat16)))
    assert all(torch.equal(exact[name].bfloat16(), rounded[name]) for name in exact)


@pytest.mark.parametrize("max_shard_bytes", [10**9, 3000])
def test_tensors_survive_writing_and_reading(max_shard_bytes: int, tmp_path: Path) -> None:
    decoder = load_decoder(str(model_dir(tmp_path / "in")))
    files = write_safetensors(hf_tensors(decoder), tmp_path / "out", max_shard_bytes)
    assert sorted(path.name for path in (tmp_path / "out").glob("*.safetensors")) == sorted(files)
    assert (len(files) > 1) == (tmp_path / "out" / "model.safetensors.index.json").exists() == (max_shard_bytes == 3000)
    copy_assets(tmp_path / "in", tmp_path / "out")
    reread = dict(hf_tensors(load_decoder(str(tmp_path / "out"), seed=5)))
    for name, tensor in hf_tensors(decoder):
        assert torch.equal(reread[name], tensor), name


@pytest.mark.parametrize("key", ["num_hidden_layers", "n_layer"])
@pytest.mark.parametrize(("kept", "left"), [(2, 2), (5, 3)])
def test_a_config_says_how_many_layers_were_kept_as_its_architecture_calls_it(
    key: str, kept: int, left: int, tmp_path: Path
) -> None:
    file = tmp_path / "config.json"
    file.write_text(json.dumps({key: 3, "layer_types": ["a", "b", "c"], "torch_dtype": "float16"}))
    change_config(file, num_layers=kept)
    kinds = ["a", "b", "c"][:left]
    assert json.loads(file.read_text()) == {key: left, "layer_types": kinds, "torch_dtype": "float16"}


def test_a_saved_copy_of_the_tied_embedding_is_ignored(tmp_path: Path) -> None:
    decoder = load_decoder(str(model_dir(tmp_path, tie_word_embeddings=True)))
    tensors = [*hf_tensors(decoder), ("lm_head.weight", torch.zeros(32, 16))]
    load_hf_tensors(decoder, tensors)


def test_tensors_that_do_not_fit_are_named(tmp_path: Path) -> None:
    decoder = load_decoder(str(model_dir(tmp_path)))
    tensors = dict(hf_tensors(decoder))
    with pytest.raises(ModelError, match="model\\.extra is unexpected"):
        load_hf_tensors(decoder, [*tensors.items(), ("model.extra", torch.zeros(1))])
    with pytest.raises(ModelError, match=r"model.norm.weight has shape \(3,\), config.json asks for \(16,\)"):
        load_hf_tensors(decoder, (tensors | {"model.norm.weight": torch.zeros(3)}).items())
    del tensors["model.norm.weight"]
    with pytest.raises(ModelError, match=r"lack 1 tensors: model\.norm\.weight"):
        load_hf_tensors(decoder, tensors.items())
    load_hf_tensors(decoder, tensors.items(), strict=False)


def test_a_name_that_is_nowhere_ends_in_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    for resolve, what in ((resolve_model, "model"), (resolve_tokenizer, "tokenizer")):
        with pytest.raises(ModelError, match=f"^{what} .* is neither a local directory nor a hub model") as caught:
            resolve("/no/such/directory")
        assert "\n" not in str(caught.value)


def test_damaged_directories_are_named(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"config.json is missing"):
        load_decoder(str(tmp_path))
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ModelError, match=r"not valid JSON"):
        load_decoder(str(tmp_path))
    model_dir(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"short")
    with pytest.raises(ModelError, match=r"model.safetensors is not a readable safetensors file"):
        load_decoder(str(tmp_path))
    (tmp_path / "model.safetensors").rename(tmp_path / "pytorch_model.bin")
    with pytest.raises(ModelError, match=r"pytorch_model.bin but neither"):
        load_decoder(str(tmp_path))
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": "gone.safetensors"}}))
    with pytest.raises(ModelError, match=r"missing: gone.safetensors"):
        list(read_safetensors(tmp_path))


def test_end_tokens_come_from_the_generation_config_first(tmp_path: Path) -> None:
    assert eos_token_ids(model_dir(tmp_path)) == frozenset()
    assert eos_token_ids(model_dir(tmp_path, eos_token_id=3)) == {3}
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [4, 5]}))
    assert eos_token_ids(tmp_path) == {4, 5}


@pytest.mark.parametrize("name", ["outputs/reverse_text_cpu/sft/weights/step_100", "/nowhere/weights/step_3"])
def test_weights_that_no_run_has_made_yet_are_not_looked_for_on_the_hub(name):
    with pytest.raises(
        ModelError, match=rf"'{name}' does not exist.*run the sft command of its README first"
    ) as caught:
        resolve_model(name)
    assert "hub" not in str(caught.value)


def test_the_vocabulary_of_a_model_is_known_whatever_its_architecture(tmp_path: Path) -> None:
    for content, expected in (({"vocab_size": 7}, 7), ({"text_config": {"vocab_size": 9}}, 9)):
        (tmp_path / "config.json").write_text(json.dumps(content | {"model_type": "other"}))
        assert vocab_size(tmp_path) == expected
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ModelError, match="has no vocab_size"):
        vocab_size(tmp_path)


def test_only_the_rows_that_are_asked_for_are_read(tmp_path: Path) -> None:
    tensors = {"matrix": torch.arange(12.0).view(4, 3), "vector": torch.arange(5.0), "scalar": torch.tensor(3.0)}
    write_safetensors(tensors.items(), tmp_path)
    for name, stored in stored_tensors(tmp_path):
        whole = tensors[name]
        assert stored.shape == whole.shape
        assert torch.equal(stored.rows(0, stored.num_rows), whole)
        if whole.ndim:
            assert torch.equal(stored.rows(1, 3), whole[1:3])
            assert stored.rows(len(whole), len(whole)).numel() == 0


def test_an_adapter_is_no_model_and_says_what_to_give_instead(tmp_path):
    (tmp_path / "adapter_config.json").write_text("{}")
    with pytest.raises(ModelError, match=r"is an adapter, without the model.*merged/step_N"):
        resolve_model(str(tmp_path))


def test_no_thread_outlives_the_writing_of_its_shard(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that still frees tensors when the interpreter ends aborts the process (seen on a GPU machine, 1.2 GB)."""
    set_result = Future.set_result

    def and_go_on_for_a_while(digest: Future[Any], result: Any) -> None:
        set_result(digest, result)
        time.sleep(0.2)

    monkeypatch.setattr(Future, "set_result", and_go_on_for_a_while)
    write_safetensors({"a": torch.zeros(3), "b": torch.zeros(3)}.items(), tmp_path, max_shard_bytes=8)
    assert [thread for thread in threading.enumerate() if thread.name == "shard"] == []


def test_tensors_that_could_not_be_written_are_let_go_of_at_once(tmp_path: Path) -> None:
    """A shard is gigabytes, which no garbage collector would be in a hurry to look for."""
    for number in (0, 1):  # nobody asks the second one what was wrong with it
        (tmp_path / f"shard-{number}.safetensors").mkdir()

    def write() -> list[weakref.ref[np.ndarray]]:
        arrays = [np.zeros(2, np.float32) for _ in range(2)]
        tensors = {str(number): torch.from_numpy(array) for number, array in enumerate(arrays)}
        try:
            write_safetensors(tensors.items(), tmp_path, max_shard_bytes=8)
        except IsADirectoryError:
            return [weakref.ref(array) for array in arrays]
        raise AssertionError("both were written")

    gc.disable()
    try:
        assert [held() for held in write()] == [None, None]
    finally:
        gc.enable()
