"""LoRA adapters: the whole server serves the model it was started with plus the adapter, under the same name."""

import asyncio
import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from prime_rl.models.lora import AdapterConfig
from prime_rl.transport.manifest import read_manifest
from prime_rl.transport.weights import publish_adapter
from tests.contract.load import while_asking
from tests.contract.oracle import Oracle, across_an_update

PROMPT = [(7 * i) % 90 for i in range(60)]
TARGETS = ("q_proj", "v_proj", "o_proj", "gate_proj", "down_proj")
CONFIGS = {
    "lora": AdapterConfig(rank=8, alpha=16.0, target_modules=TARGETS),
    "rslora": AdapterConfig(rank=8, alpha=4.0, target_modules=TARGETS, use_rslora=True),
    "lower-rank": AdapterConfig(rank=4, alpha=4.0, target_modules=TARGETS),
}


def factors_of(model, config: AdapterConfig, seed: int):
    """Random factors, not one of them zero, for every targeted matrix of the model."""
    generator = torch.Generator().manual_seed(seed)
    factors = {}
    for name, tensor in load_file(model / "model.safetensors").items():
        module = name.removesuffix(".weight")
        if module.endswith(TARGETS):
            shapes = (config.rank, tensor.shape[1]), (tensor.shape[0], config.rank)
            factors[module] = tuple(torch.empty(shape).normal_(0, 0.1, generator=generator) for shape in shapes)
    return factors


def merged(model, config: AdapterConfig, factors, directory) -> Oracle:
    """The oracle of base plus adapter, added up here."""
    tensors = load_file(model / "model.safetensors")
    scale = config.alpha / (config.rank**0.5 if config.use_rslora else config.rank)
    for module, (a, b) in factors.items():
        tensors[f"{module}.weight"] = (tensors[f"{module}.weight"].double() + scale * b.double() @ a.double()).float()
    directory.mkdir(parents=True)
    shutil.copy(model / "config.json", directory)
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    return Oracle(directory)


class Adapters:
    """Publishes adapters beside their oracles."""

    def __init__(self, model, root) -> None:
        self._model = model
        self._root = root

    def publish(self, step: int, config: AdapterConfig = CONFIGS["lora"]):
        factors = factors_of(self._model, config, seed=step)
        directory = publish_adapter(
            config, factors, step=step, weights_dir=self._root / "weights", base_model=str(self._model)
        )
        return directory, merged(self._model, config, factors, self._root / f"merged-{step}")


@pytest.fixture
async def adapters(second_publisher, model, tmp_path) -> Adapters:
    return Adapters(model, tmp_path)


async def assert_serves(api, truth: Oracle, version: int) -> None:
    answer = await api.generate(PROMPT, max_tokens=12, ignore_eos=True, logprobs=1, seed=1)
    (choice,) = answer["choices"]
    sampled = [entry["logprob"] for entry in choice["logprobs"]["content"]]
    api.server.kind.adapter_tolerance.assert_near(sampled, truth.logprobs(PROMPT, choice["token_ids"]))
    assert answer["versions"] == [[[version, 12]]]
    assert answer["model"] == api.model


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
async def test_an_adapter_is_added_to_the_model(second_api, adapters, truth, config):
    directory, sum_of_both = adapters.publish(1, config)
    digest = read_manifest(directory).weights.digest
    answer = await second_api.post("/update_weights", weight_dir=str(directory), version=1)
    assert answer == {"version": 1, "digest": digest}
    assert (await second_api.get("/health"))["digest"] == digest
    await assert_serves(second_api, sum_of_both, 1)
    chat = await second_api.chat("hi", max_tokens=2, ignore_eos=True)
    assert (chat["model"], chat["versions"]) == (second_api.model, [[[1, 2]]])
    assert [card["id"] for card in (await second_api.get("/v1/models"))["data"]] == [second_api.model]
    await second_api.post("/reload_weights")
    await assert_serves(second_api, truth, 0)


async def test_an_adapter_replaces_the_one_before_it(second_api, adapters):
    for version in (1, 2, 3):
        directory, sum_of_both = adapters.publish(version)
        await second_api.post("/update_weights", weight_dir=str(directory), version=version)
        await assert_serves(second_api, sum_of_both, version)


async def test_full_weights_and_adapters_may_follow_each_other(second_api, adapters, second_publisher, oracle):
    directory, first = adapters.publish(1)
    await second_api.post("/update_weights", weight_dir=str(directory), version=1)
    full = second_publisher.other(2)
    await second_api.post("/update_weights", weight_dir=str(full), version=2)
    await assert_serves(second_api, oracle(full), 2)
    await second_api.post("/reload_weights")
    await second_api.post("/update_weights", weight_dir=str(directory), version=3)
    await assert_serves(second_api, first, 3)


async def test_an_adapter_comes_in_the_middle_of_requests(second_api, adapters, truth, differs, kind):
    directory, sum_of_both = adapters.publish(1)
    came = asyncio.Event()

    async def change():
        await second_api.await_tokens(80)
        await second_api.post("/update_weights", weight_dir=str(directory), version=1)
        came.set()
        late = await second_api.generate([9], max_tokens=4, ignore_eos=True)
        assert late["versions"] == [[[1, 4]]]

    async def sample(seed):
        fields = {"max_tokens": 300 - 10 * seed, "ignore_eos": True, "logprobs": 1}
        return seed, await second_api.generate([seed, 5, 9], seed=seed, **fields), came.is_set()

    across, most_runs = 0, 0
    for seed, answer, is_after in await while_asking(change(), sample, 8):
        (choice,), (runs,) = answer["choices"], answer["versions"]
        across += is_after and runs[0][0] == 0
        most_runs = max(most_runs, len(runs))
        assert [version for version, _ in runs] in ([0], [1], [0, 1])
        assert sum(count for _, count in runs) == 300 - 10 * seed
        tokens, num_old = choice["token_ids"], dict(runs).get(0, 0)
        expected = across_an_update(truth, sum_of_both, [seed, 5, 9], tokens, num_old, keeps=False)
        logprobs = [entry["logprob"] for entry in choice["logprobs"]["content"]]
        kind.adapter_tolerance.assert_near(logprobs, expected)
    assert across > 0, "some had begun before it came, and were answered after"
    assert most_runs == differs("runs of a request that an adapter comes across")


async def test_full_weights_come_in_the_middle_of_requests_with_an_adapter(
    second_api, adapters, second_publisher, oracle, differs
):
    """What an adapter samples changes with the weights below it: no answer says otherwise, and none hangs."""
    directory, _ = adapters.publish(1)
    await second_api.post("/update_weights", weight_dir=str(directory), version=1)
    full = second_publisher.other(2)

    async def change():
        await second_api.await_tokens(160)
        await second_api.post("/update_weights", weight_dir=str(full), version=2)

    async def ask(seed):
        sampling = {"max_tokens": 300 - 10 * seed, "ignore_eos": True, "n": 2}
        body = {"model": second_api.model, "sampling_params": sampling, "token_ids": [seed, 5]}
        return seed, await second_api.http.post("/inference/v1/generate", json=body)

    async with asyncio.timeout(60):
        answers = await while_asking(change(), ask, 8)
    status = differs("status of a request with an adapter that full weights come across")
    is_across = False
    for seed, answer in answers:
        if answer.status_code == 503:
            assert status == 503
            assert "ask again" in answer.json()["error"]["message"]
            is_across = True
            continue
        for runs in answer.json()["versions"]:
            assert sum(count for _, count in runs) == 300 - 10 * seed
            versions = [version for version, _ in runs]
            assert versions in ([1], [2]) or (versions == [1, 2] and status == 200)
            is_across = is_across or versions == [1, 2]
    assert is_across
    await assert_serves(second_api, oracle(full), 2)


def _edit(directory, **keys) -> None:
    """Change the adapter's configuration, and forget the marker, which would tell."""
    path = directory / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | keys))


@pytest.mark.parametrize(
    ("keys", "words"),
    [({"use_dora": True}, "use_dora"), ({"r": 5}, "rank"), ({"r": 64}, "rank"), ({"lora_alpha": "x"}, "lora_alpha")],
    ids=["dora", "another-rank", "rank-too-high", "alpha"],
)
async def test_an_adapter_that_cannot_be_served_is_refused(second_api, adapters, truth, tmp_path, keys, words):
    directory, _ = adapters.publish(1)
    plain = tmp_path / "plain"
    shutil.copytree(directory, plain, ignore=shutil.ignore_patterns("STABLE"))
    _edit(plain, **keys)
    answer = await second_api.http.post("/update_weights", json={"weight_dir": str(plain), "version": 1})
    assert answer.status_code == 400, answer.text
    assert words in answer.json()["error"]["message"]
    assert (await second_api.get("/health"))["version"] == 0
    await assert_serves(second_api, truth, 0)
