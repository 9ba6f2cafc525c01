import json
import os
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from prime_rl.errors import ArtifactError, ModelError
from prime_rl.models.attention import PackedAttention
from prime_rl.models.decoder import Decoder, DecoderConfig
from prime_rl.models.hf import empty_decoder, hf_tensors, initial_tensors, load_hf_tensors
from prime_rl.models.lora import AdapterConfig
from prime_rl.transport import weights
from prime_rl.transport.checksum import combined, entries
from prime_rl.transport.manifest import PublishedWeights, complete_steps, read_manifest, verify
from prime_rl.transport.weights import load_weights, publish_adapter, publish_weights

HF_CONFIG = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "vocab_size": 64,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 4,
    "initializer_range": 0.5,
    "torch_dtype": "bfloat16",
}


@pytest.fixture
def assets(tmp_path: Path) -> Path:
    directory = tmp_path / "assets"
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps({**HF_CONFIG, "tie_word_embeddings": True}))
    (directory / "tokenizer.json").write_text("{}")
    (directory / "training_args.bin").write_bytes(b"not wanted")
    return directory


def decoder(*, tie: bool = True, seed: int = 0) -> Decoder:
    config = DecoderConfig.from_hf({**HF_CONFIG, "tie_word_embeddings": tie})
    model = empty_decoder(config, device="cpu", dtype=torch.float32)
    load_hf_tensors(model, initial_tensors(model.config, seed))
    return model


@pytest.mark.parametrize("tie", [True, False])
@pytest.mark.parametrize("max_shard_bytes", [10**9, 2000])
def test_weights_read_back_equal_the_weights_published(tmp_path, assets, tie, max_shard_bytes, monkeypatch):
    monkeypatch.setattr(weights, "MAX_SHARD_BYTES", max_shard_bytes)
    sent, received = decoder(tie=tie), decoder(tie=tie, seed=1)
    directory = publish_weights(hf_tensors(sent), step=4, weights_dir=tmp_path / "weights", assets=assets)
    assert directory == tmp_path / "weights" / "step_4"
    has_shards = (directory / "model.safetensors.index.json").exists()
    assert has_shards == (max_shard_bytes == 2000)
    load_hf_tensors(received, load_weights(directory).tensors.items())
    for (name, expected), (_, found) in zip(hf_tensors(sent), hf_tensors(received), strict=True):
        assert torch.equal(expected, found), name


def test_bfloat16_travels_as_bfloat16_and_the_config_says_so(tmp_path, assets):
    tensors = [(name, tensor.bfloat16()) for name, tensor in hf_tensors(decoder())]
    directory = publish_weights(iter(tensors), step=1, weights_dir=tmp_path, assets=assets)
    read = load_weights(directory).tensors
    assert {tensor.dtype for tensor in read.values()} == {torch.bfloat16}
    assert all(torch.equal(read[name], tensor) for name, tensor in tensors)
    config = json.loads((directory / "config.json").read_text())
    assert (config["dtype"], config["torch_dtype"]) == ("bfloat16", "bfloat16")


def test_the_directory_opens_in_transformers_and_gives_our_logits(tmp_path, assets):
    model = decoder()
    directory = publish_weights(hf_tensors(model), step=1, weights_dir=tmp_path, assets=assets)
    theirs = AutoModelForCausalLM.from_pretrained(directory)
    assert theirs.dtype == torch.float32
    ids = torch.randint(0, 64, (12,), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        ours = model.logits(model(ids, torch.arange(12), PackedAttention([12])))
        expected = theirs(ids[None]).logits[0]
    assert expected.std() > 1
    assert (ours - expected).abs().max() <= 1e-4 * expected.abs().max()


def test_only_what_a_reader_needs_is_published(tmp_path, assets):
    directory = publish_weights(hf_tensors(decoder()), step=1, weights_dir=tmp_path, assets=assets)
    assert sorted(os.listdir(directory)) == ["STABLE", "config.json", "model.safetensors", "tokenizer.json"]


def test_equal_weights_have_equal_digests(tmp_path, assets):
    one = publish_weights(hf_tensors(decoder()), step=1, weights_dir=tmp_path, assets=assets)
    two = publish_weights(hf_tensors(decoder()), step=2, weights_dir=tmp_path, assets=assets)
    other = publish_weights(hf_tensors(decoder(seed=1)), step=3, weights_dir=tmp_path, assets=assets)
    digests = [read_manifest(directory).weights.digest for directory in (one, two, other)]
    assert digests[0] == digests[1] != digests[2]


def test_a_damaged_tensor_file_is_refused_before_any_tensor_is_read(tmp_path, assets):
    directory = publish_weights(hf_tensors(decoder()), step=1, weights_dir=tmp_path, assets=assets)
    path = directory / "model.safetensors"
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    with pytest.raises(ArtifactError, match=r"step_1/model\.safetensors is damaged"):
        load_weights(directory)


def test_a_source_that_fails_half_way_publishes_nothing(tmp_path, assets):
    def tensors():
        yield "model.embed_tokens.weight", torch.zeros(64, 16)
        raise RuntimeError("out of memory")

    with pytest.raises(RuntimeError, match="out of memory"):
        publish_weights(tensors(), step=1, weights_dir=tmp_path / "weights", assets=assets)
    assert complete_steps(tmp_path / "weights") == []
    assert os.listdir(tmp_path / "weights") == []


def test_the_marker_names_every_tensor_with_its_checksum(tmp_path, assets):
    model = decoder()
    directory = publish_weights(hf_tensors(model), step=1, weights_dir=tmp_path, assets=assets)
    announced = read_manifest(directory).weights
    assert announced == PublishedWeights(
        kind="model",
        digest=combined(entries(dict(hf_tensors(model)))),
        tensors=entries(dict(hf_tensors(model))),
    )
    assert list(announced.tensors) == [name for name, _ in hf_tensors(model)]


@pytest.mark.parametrize("max_shard_bytes", [10**9, 2000])
def test_loading_gives_the_tensors_and_what_the_marker_says_of_them(tmp_path, assets, max_shard_bytes, monkeypatch):
    monkeypatch.setattr(weights, "MAX_SHARD_BYTES", max_shard_bytes)
    model = decoder()
    directory = publish_weights(hf_tensors(model), step=1, weights_dir=tmp_path, assets=assets)
    loaded = load_weights(directory)
    assert loaded.published == read_manifest(directory).weights
    assert entries(loaded.tensors).items() == loaded.published.tensors.items()
    assert all(torch.equal(loaded.tensors[name], tensor) for name, tensor in hf_tensors(model))


def rewrite_marker(directory, edit):
    marker = json.loads((directory / "STABLE").read_text())
    edit(marker)
    (directory / "STABLE").write_text(json.dumps(marker))


def test_weights_of_an_older_version_have_their_digest_computed(tmp_path, assets):
    directory = publish_weights(hf_tensors(decoder()), step=1, weights_dir=tmp_path, assets=assets)
    announced = read_manifest(directory).weights
    rewrite_marker(directory, lambda marker: marker.pop("weights"))
    assert load_weights(directory).published.digest == announced.digest


def test_a_model_directory_of_others_needs_no_marker_but_a_step_does(tmp_path, assets):
    directory = publish_weights(hf_tensors(decoder()), step=1, weights_dir=tmp_path, assets=assets)
    announced = read_manifest(directory).weights
    (directory / "STABLE").unlink()
    with pytest.raises(ArtifactError, match="has no marker, so it was not written completely"):
        load_weights(directory)
    assert load_weights(directory.rename(tmp_path / "downloaded")).published.digest == announced.digest
    with pytest.raises(ArtifactError, match="nowhere does not exist"):
        load_weights(tmp_path / "nowhere")
    (assets / "training_args.bin").unlink()
    with pytest.raises(ModelError, match="assets holds no tensors"):
        load_weights(assets)


@pytest.mark.parametrize("pattern", ["model-00002-of-*", "config.json"])
def test_any_damaged_file_is_refused(tmp_path, assets, pattern, monkeypatch):
    monkeypatch.setattr(weights, "MAX_SHARD_BYTES", 4000)
    directory = publish_weights(hf_tensors(decoder()), step=1, weights_dir=tmp_path, assets=assets)
    (path,) = directory.glob(pattern)
    content = bytearray(path.read_bytes())
    content[-2] ^= 1
    path.write_bytes(content)
    with pytest.raises(ArtifactError, match=f"{path.name} is damaged"):
        load_weights(directory)


@pytest.mark.parametrize(
    "edit",
    [
        lambda tensors: tensors.pop("model.norm.weight"),
        lambda tensors: tensors["model.norm.weight"].update(checksum="0" * 16),
        lambda tensors: tensors["model.norm.weight"].update(dtype="bfloat16"),
        lambda tensors: tensors["model.norm.weight"].update(shape=[4, 4]),
    ],
)
def test_a_marker_of_other_tensors_is_refused(tmp_path, assets, edit):
    directory = publish_weights(hf_tensors(decoder()), step=1, weights_dir=tmp_path, assets=assets)
    rewrite_marker(directory, lambda marker: edit(marker["weights"]["tensors"]))
    with pytest.raises(ArtifactError, match=r"disagree on the tensor model\.norm\.weight"):
        load_weights(directory)


def test_an_adapter_is_published_as_peft_files_with_the_digest_of_its_tensors(tmp_path):
    config = AdapterConfig(rank=1, alpha=2.0, target_modules=("q_proj",))
    factors = {"model.layers.0.self_attn.q_proj": (torch.ones(1, 16), torch.ones(16, 1))}
    directory = publish_adapter(config, factors, step=1, weights_dir=tmp_path, base_model="base")
    assert sorted(os.listdir(directory)) == ["STABLE", "adapter_config.json", "adapter_model.safetensors"]
    loaded = load_weights(directory)
    assert loaded.published == read_manifest(directory).weights
    assert (loaded.published.kind, loaded.published.digest) == ("adapter", combined(entries(loaded.tensors)))
    assert json.loads((directory / "adapter_config.json").read_text())["base_model_name_or_path"] == "base"


def test_what_is_not_durable_reads_the_same(tmp_path, assets):
    one = publish_weights(hf_tensors(decoder()), step=1, weights_dir=tmp_path, assets=assets, durable=False)
    two = publish_weights(hf_tensors(decoder()), step=2, weights_dir=tmp_path, assets=assets)
    assert verify(one).files == verify(two).files
