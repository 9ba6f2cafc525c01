"""The embedded engine's weights: what was published is what is served, tensor for tensor."""

import json
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import torch

from prime_rl.config.inference import InferenceConfig
from prime_rl.errors import ArtifactError, ModelError
from prime_rl.inference.backend import EngineFailed, GenerationRequest, SamplingParams
from prime_rl.inference.embedded import EmbeddedAdministration
from prime_rl.inference.engine.build import build_engine
from prime_rl.inference.fake import FakeBackend
from prime_rl.models.hf import model_tensors
from prime_rl.models.lora import AdapterConfig, merge
from prime_rl.transport.api import ServedWeights
from prime_rl.transport.checksum import checksum
from prime_rl.transport.manifest import read_manifest
from prime_rl.transport.weights import publish_adapter, publish_weights

CONFIG = {
    "model_type": "qwen3",
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 64,
    "eos_token_id": 0,
}
ADAPTER = AdapterConfig(rank=2, alpha=3.0, target_modules=("q_proj", "down_proj"))


@pytest.fixture
def model(tmp_path: Path) -> Path:
    directory = tmp_path / "model"
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(CONFIG))
    return directory


@pytest.fixture
async def served(model: Path) -> AsyncIterator[EmbeddedAdministration]:
    """A small model of random weights, computed in float32."""
    config = {"model": {"name": str(model)}, "device": "cpu", "seed": 0, "max_num_seqs": 4, "block_size": 4}
    engine = build_engine(InferenceConfig.model_validate(config))
    yield EmbeddedAdministration(engine, first=lambda: first(model).items())
    await engine.close()


def first(model):
    return dict(model_tensors(model, 0))


def changed(model, *, step=1, dtype=torch.float32):
    """Every parameter of the first model changed by its own amount."""
    return {
        name: (tensor + (step + number) / 64).to(dtype) for number, (name, tensor) in enumerate(first(model).items())
    }


def publish(model, tensors, step):
    return publish_weights(tensors.items(), step=step, weights_dir=model.parent / "weights", assets=model)


def factors(seed):
    generator = torch.Generator().manual_seed(seed)
    shapes = {"self_attn.q_proj": (64, 32), "mlp.down_proj": (32, 48)}
    return {
        f"model.layers.{layer}.{name}": (
            torch.randn(2, width, generator=generator),
            torch.randn(height, 2, generator=generator),
        )
        for layer in range(2)
        for name, (height, width) in shapes.items()
    }


def checksums(tensors):
    return {name: checksum(tensor.float()) for name, tensor in tensors.items()}


def is_serving(administration, tensors):
    """Whether the engine computes with exactly these tensors."""
    found = administration._backend.weights()
    return found.keys() == tensors.keys() and all(
        torch.equal(found[name], tensor.float()) for name, tensor in tensors.items()
    )


async def sampled(administration) -> list[float]:
    sampling = SamplingParams(max_tokens=4, ignore_eos=True, seed=1)
    asked = GenerationRequest(request_id="a", prompt_ids=[3, 1, 4, 1, 5, 9], sampling=sampling)
    return [out.logprob async for outputs in administration._backend.generate(asked) for out in outputs]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
async def test_every_parameter_changed_by_its_own_amount_arrives(served, model, dtype):
    before = await sampled(served)
    tensors = changed(model, dtype=dtype)
    directory = publish(model, tensors, 1)
    announced = read_manifest(directory).weights
    assert await served.update(directory, 1) == ServedWeights(version=1, digest=announced.digest) == served.served()
    assert is_serving(served, tensors)
    assert await served.tensors() == {name: entry.checksum for name, entry in announced.tensors.items()}
    assert await sampled(served) != before
    assert len(announced.tensors) == 3 + 2 * 11


async def test_reloading_brings_back_every_parameter_of_the_first_model(served, model):
    before = await sampled(served)
    original = await served.tensors()
    await served.update(publish(model, changed(model, dtype=torch.bfloat16), 1), 1)
    assert set((await served.tensors()).values()).isdisjoint(original.values())
    assert await served.reload() == ServedWeights(version=0, digest=None) == served.served()
    assert is_serving(served, first(model))
    assert await served.tensors() == original == checksums(first(model))
    assert await sampled(served) == before


async def test_an_adapter_is_merged_into_the_first_model_whatever_is_served(served, model):
    """Never into the adapter before it, nor into other full weights."""
    for step, seed in ((1, 5), (2, 6), (4, 7)):
        if step == 4:
            await served.update(publish(model, changed(model), 3), 3)
        directory = publish_adapter(
            ADAPTER, factors(seed), step=step, weights_dir=model.parent / "weights", base_model=str(model)
        )
        announced = read_manifest(directory).weights
        assert announced.kind == "adapter"
        assert await served.update(directory, step) == ServedWeights(version=step, digest=announced.digest)
        expected = dict(merge(first(model).items(), ADAPTER, factors(seed)))
        assert is_serving(served, expected)
        assert await served.tensors() == checksums(expected)


async def test_a_directory_of_before_checksums_is_loaded_and_its_digest_computed(served, model, tmp_path):
    directory = publish(model, changed(model), 1)
    announced = read_manifest(directory).weights
    plain = tmp_path / "plain"
    plain.mkdir()
    (directory / "model.safetensors").rename(plain / "model.safetensors")
    assert await served.update(plain, 7) == ServedWeights(version=7, digest=announced.digest)
    assert is_serving(served, changed(model))


@pytest.mark.parametrize(
    ("edit", "says"),
    [
        (lambda tensors: tensors.pop("model.norm.weight"), r"lack 1 tensors: model\.norm\.weight"),
        (lambda tensors: tensors.update(extra=torch.zeros(1)), "tensor extra is unexpected"),
        (lambda tensors: tensors.update({"model.norm.weight": torch.zeros(3)}), r"norm\.weight has shape \(3,\)"),
    ],
)
async def test_weights_of_another_model_are_refused_and_nothing_changes(served, model, edit, says):
    tensors = changed(model)
    edit(tensors)
    with pytest.raises(ModelError, match=says):
        await served.update(publish(model, tensors, 1), 1)
    assert is_serving(served, first(model))
    assert (served.served(), served.failure()) == (ServedWeights(version=0, digest=None), None)


@pytest.mark.parametrize("what", ["a bit", "the end", "all"])
async def test_damaged_weights_are_refused_and_nothing_changes(served, model, what):
    directory = publish(model, changed(model), 1)
    path = directory / "model.safetensors"
    content = bytearray(path.read_bytes())
    content[-5] ^= 4
    path.write_bytes(content if what == "a bit" else content[:-8])
    if what == "all":
        path.unlink()
    with pytest.raises(ArtifactError, match=r"step_1/model\.safetensors"):
        await served.update(directory, 1)
    assert is_serving(served, first(model))
    assert served.failure() is None


async def test_an_adapter_of_another_shape_is_refused_and_nothing_changes(served, model):
    config = AdapterConfig(rank=2, alpha=3.0, target_modules=("q_proj",))
    wrong = {"model.layers.0.self_attn.q_proj": (torch.zeros(2, 16), torch.zeros(64, 2))}
    directory = publish_adapter(config, wrong, step=1, weights_dir=model.parent / "w", base_model="x")
    with pytest.raises(ModelError, match=r"q_proj\.weight make a matrix of \(64, 16\), the model's is \(64, 32\)"):
        await served.update(directory, 1)
    assert is_serving(served, first(model))


async def test_a_tensor_that_differs_after_the_swap_ends_the_engine(tmp_path):
    """Two parameters in one place in memory: what is copied second overwrites what was copied first."""
    backend = FakeBackend()
    shared = torch.zeros(4)
    backend.tensors = {"one": shared, "two": shared}
    (tmp_path / "config.json").write_text("{}")
    tensors = {"one": torch.ones(4), "two": torch.full((4,), 2.0)}
    directory = publish_weights(tensors.items(), step=1, weights_dir=tmp_path / "weights", assets=tmp_path)
    administration = EmbeddedAdministration(backend, first=tensors.items)
    with pytest.raises(EngineFailed, match=r"1 of 2 tensors differ from what was published .* first one"):
        await administration.update(directory, 1)
    assert "differ from what was published" in administration.failure()
    assert administration.served() == ServedWeights(version=0, digest=None)


async def test_running_requests_are_recomputed_where_that_is_asked_for(tmp_path):
    backend = FakeBackend()
    tensors = {name: tensor + 1 for name, tensor in backend.weights().items()}
    (tmp_path / "config.json").write_text("{}")
    directory = publish_weights(tensors.items(), step=1, weights_dir=tmp_path / "weights", assets=tmp_path)
    await EmbeddedAdministration(backend, first=tensors.items, recompute=True).update(directory, 1)
    assert backend.updates == [(1, True)]
