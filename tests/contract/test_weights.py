"""New weights: every tensor arrives and is proven to have, requests go on, and what is not good is refused."""

import asyncio
import shutil
from dataclasses import dataclass

import httpx
import numpy as np
import pytest
import torch

from prime_rl.transport.manifest import read_manifest
from tests.contract.conftest import Api
from tests.contract.load import while_asking
from tests.contract.model import make_tokenizer, weights
from tests.contract.oracle import across_an_update
from tests.contract.servers import TOLERANCE, Tolerance
from tests.contract.weights import Publisher, checksums

PROMPT = [(7 * i) % 90 for i in range(200)]


async def update(api, directory, version: int):
    return await api.post("/update_weights", weight_dir=str(directory), version=version)


async def assert_serves(api, truth, version: int) -> None:
    """Assert that prompt and completion are computed with the oracle's model and counted as this version's."""
    answer = await api.generate(PROMPT, max_tokens=8, ignore_eos=True, logprobs=1, prompt_logprobs=0, seed=1)
    (choice,) = answer["choices"]
    rows = truth.prompt_logprobs(PROMPT)
    expected = [float(row[token]) for row, token in zip(rows, PROMPT[1:], strict=True)]
    found = [
        entries[str(token)]["logprob"] for token, entries in zip(PROMPT[1:], answer["prompt_logprobs"][1:], strict=True)
    ]
    assert found == pytest.approx(expected, abs=TOLERANCE)
    sampled = [entry["logprob"] for entry in choice["logprobs"]["content"]]
    assert sampled == pytest.approx(truth.logprobs(PROMPT, choice["token_ids"]), abs=TOLERANCE)
    assert answer["versions"] == [[[version, 8]]]


async def test_at_the_start_the_model_of_the_configuration_is_served(api, model, truth):
    served = await api.get("/weights")
    assert (served["version"], served["digest"]) == (0, None)
    assert served["tensors"] == checksums(model)
    await assert_serves(api, truth, 0)


async def test_every_parameter_changed_by_its_own_amount_arrives(api, publisher, oracle, model):
    directory = publisher.nudged(3)
    expected = checksums(directory)
    assert len(set(expected.values()) & set(checksums(model).values())) == 0, "every one is another"
    answer = await update(api, directory, 3)
    digest = read_manifest(directory).weights.digest
    assert answer == {"version": 3, "digest": digest}
    assert await api.get("/weights") == {"version": 3, "digest": digest, "tensors": expected}
    health = await api.get("/health")
    assert (health["version"], health["digest"]) == (3, digest)
    assert await api.metric("prime_rl:weights_version") == 3
    await assert_serves(api, oracle(directory), 3)


async def test_weights_can_be_replaced_again_and_the_first_ones_come_back(api, publisher, oracle, model, truth):
    for version in (1, 2):
        directory = publisher.other(version)
        await update(api, directory, version)
        assert (await api.get("/weights"))["tensors"] == checksums(directory)
    await assert_serves(api, oracle(directory), 2)
    await update(api, directory, 7)
    assert (await api.get("/health"))["version"] == 7
    assert await api.post("/reload_weights") == {"version": 0, "digest": None}
    assert (await api.get("/weights"))["tensors"] == checksums(model)
    await assert_serves(api, truth, 0)


async def test_an_older_version_may_come_after_a_newer_one(api, publisher, oracle):
    directory = publisher.other(9)
    await update(api, directory, 9)
    older = publisher.other(2)
    await update(api, older, 2)
    await assert_serves(api, oracle(older), 2)


@dataclass(frozen=True)
class Updated:
    """A server of which weights are updated under load."""

    api: Api
    publisher: Publisher
    keeps: bool
    """Whether running requests keep their keys and values."""
    tolerance: Tolerance


@pytest.fixture(params=["keep", "recompute"])
def updated(request, kind) -> Updated:
    """The one server alone: where the other does not come up, that is no reason to know nothing of this."""
    if request.param == "keep":
        api, publisher = (request.getfixturevalue(name) for name in ("api", "publisher"))
        return Updated(api, publisher, keeps=True, tolerance=Tolerance(TOLERANCE, TOLERANCE))
    api, publisher = (request.getfixturevalue(name) for name in ("second_api", "second_publisher"))
    return Updated(api, publisher, keeps=False, tolerance=kind.adapter_tolerance)


async def test_an_update_in_the_middle_of_many_requests(updated, oracle, truth):
    directory = updated.publisher.other(1)
    prompts = [[(seed + 11 * i) % 90 for i in range(10 + seed)] for seed in range(12)]

    async def change():
        await updated.api.await_tokens(12 * 20)
        await update(updated.api, directory, 1)

    async def sample(seed: int):
        fields = {"max_tokens": 200 - 5 * seed, "ignore_eos": True, "seed": seed, "logprobs": 1}
        return seed, await updated.api.generate(prompts[seed], **fields)

    crossed = 0
    for seed, answer in await while_asking(change(), sample, len(prompts)):
        (choice,), (runs,) = answer["choices"], answer["versions"]
        tokens = choice["token_ids"]
        assert len(tokens) == 200 - 5 * seed, "no request is cut short"
        assert sum(count for _, count in runs) == len(tokens)
        assert [version for version, _ in runs] == sorted({version for version, _ in runs})
        num_old = dict(runs).get(0, 0)
        crossed += 0 < num_old < len(tokens)
        expected = across_an_update(truth, oracle(directory), prompts[seed], tokens, num_old, keeps=updated.keeps)
        logprobs = [entry["logprob"] for entry in choice["logprobs"]["content"]]
        updated.tolerance.assert_near(logprobs, expected)
    assert crossed >= 6, "most clients had a request running when the weights changed"


async def test_every_choice_of_every_prompt_tells_its_own_versions(api, publisher, oracle, truth):
    directory = publisher.other(1)
    prompts = [[5, 6, 7], [8, 9, 10, 11], [12] * 30]

    async def change():
        await api.await_tokens(9 * 10)
        await update(api, directory, 1)

    async def complete(number: int):
        fields = {"max_tokens": 200 - 20 * number, "n": 3, "seed": number, "logprobs": 0, "temperature": 0.8}
        return await api.complete(prompts, return_token_ids=True, **fields)

    is_across = False
    for answer in await while_asking(change(), complete, 2):
        assert len(answer["versions"]) == len(answer["choices"]) == 9
        for choice, runs in zip(answer["choices"], answer["versions"], strict=True):
            tokens = choice["token_ids"]
            assert sum(count for _, count in runs) == len(tokens)
            num_old = dict(runs).get(0, 0)
            prompt = prompts[choice["index"] // 3]
            expected = across_an_update(truth, oracle(directory), prompt, tokens, num_old, keeps=True, temperature=0.8)
            assert choice["logprobs"]["token_logprobs"] == pytest.approx(expected, abs=TOLERANCE)
            is_across = is_across or len(runs) == 2
    assert is_across


async def test_what_older_weights_computed_is_never_found_in_the_cache(updated, oracle, truth):
    """Neither what was cached before an update, nor what a request that ran through it computed before or after."""
    api = updated.api
    prompt = [(13 * i) % 90 for i in range(400)]
    await api.generate(prompt, max_tokens=1)
    hits = await api.metric("vllm:prefix_cache_hits_total")
    await api.generate(prompt, max_tokens=1)
    assert await api.metric("vllm:prefix_cache_hits_total") > hits, "without an update, it is found"

    directory = updated.publisher.other(1)
    new = oracle(directory)

    async def assert_all_new(ids: list[int]) -> None:
        answer = await api.generate(ids, max_tokens=4, ignore_eos=True, logprobs=1, seed=5)
        (choice,) = answer["choices"]
        logprobs = [entry["logprob"] for entry in choice["logprobs"]["content"]]
        updated.tolerance.assert_near(logprobs, new.logprobs(ids, choice["token_ids"]))

    async def change():
        await api.await_tokens(20)
        await update(api, directory, 1)
        await assert_all_new(prompt)

    async def sample(number: int):
        fields = {"max_tokens": 200 - 20 * number, "ignore_eos": True, "seed": 3 + number}
        return await api.generate(prompt, **fields)

    answers = await while_asking(change(), sample, 3)
    across = [answer for answer in answers if len(answer["versions"][0]) == 2]
    assert across
    tokens, runs = across[0]["choices"][0]["token_ids"], across[0]["versions"][0]
    assert [version for version, _ in runs] == [0, 1]
    for length in (0, runs[0][1], 100, len(tokens)):
        await assert_all_new([*prompt, *tokens[:length]])
    hits = await api.metric("vllm:prefix_cache_hits_total")
    await assert_all_new(prompt)
    assert await api.metric("vllm:prefix_cache_hits_total") > hits, "what the new weights computed is found again"


async def test_an_update_is_finished_although_its_client_goes_away(api, publisher):
    directory = publisher.other(4)
    body = {"weight_dir": str(directory), "version": 4}
    with pytest.raises(httpx.ReadTimeout):
        await api.http.post("/update_weights", json=body, timeout=httpx.Timeout(10, read=0.001))
    async with asyncio.timeout(30):
        while (await api.get("/health"))["version"] != 4:  # noqa: ASYNC110 (another process updates)
            await asyncio.sleep(0.05)
    assert (await api.get("/weights"))["tensors"] == checksums(directory)


async def test_updates_come_one_at_a_time(api, publisher):
    directories = {version: publisher.other(version) for version in (1, 2, 3)}
    answers = await asyncio.gather(*(update(api, directory, version) for version, directory in directories.items()))
    for version, answer in zip(directories, answers, strict=True):
        assert answer == {"version": version, "digest": read_manifest(directories[version]).weights.digest}
    served = await api.get("/weights")
    assert served["tensors"] == checksums(directories[served["version"]])


def _flip(directory):
    path = directory / "model.safetensors"
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


def _cut(directory):
    path = directory / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])


DAMAGES = {
    "flipped": (_flip, "model.safetensors"),
    "cut": (_cut, "model.safetensors"),
    "no-weights": (lambda directory: (directory / "model.safetensors").unlink(), "model.safetensors"),
    "no-marker": (lambda directory: (directory / "STABLE").unlink(), "STABLE"),
    "gone": (shutil.rmtree, "does not exist"),
}


def _without(name):
    return lambda tensors: tensors.pop(name)


def _shape(tensors):
    tensors["lm_head.weight"] = tensors["lm_head.weight"][:-1].clone()


def _one_more(tensors):
    tensors["model.layers.7.mlp.up_proj.weight"] = torch.zeros(96, 64)


MISFITS = {
    "missing": (_without("model.layers.0.self_attn.k_proj.weight"), "model.layers.0.self_attn.k_proj"),
    "missing-norm": (_without("model.norm.weight"), "model.norm"),
    "shape": (_shape, "lm_head"),
    "one-more": (_one_more, "model.layers.7"),
}


async def assert_refused(api, truth, directory, words: str) -> None:
    before = await api.get("/weights")
    health = await api.get("/health")
    answer = await api.http.post("/update_weights", json={"weight_dir": str(directory), "version": 8})
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert (error["code"], error["param"]) == (400, "weight_dir")
    assert words in error["message"]
    assert await api.get("/weights") == before
    assert await api.get("/health") == health
    await assert_serves(api, truth, before["version"])


@pytest.mark.parametrize(("damage", "words"), DAMAGES.values(), ids=DAMAGES)
async def test_damaged_weights_are_refused_and_the_old_ones_serve_on(api, publisher, truth, damage, words):
    directory = publisher.other(8)
    damage(directory)
    await assert_refused(api, truth, directory, words)


@pytest.mark.parametrize(("change", "words"), MISFITS.values(), ids=MISFITS)
async def test_weights_of_another_model_are_refused_and_the_old_ones_serve_on(api, publisher, truth, change, words):
    tensors = weights(make_tokenizer(), seed=5)
    change(tensors)
    await assert_refused(api, truth, publisher.publish(8, tensors), words)


@pytest.mark.parametrize(
    "body",
    [
        {},
        {"weight_dir": ""},
        {"weight_dir": "/tmp", "version": -1},
        {"weight_dir": "/tmp", "version": 2**53 + 1},
        {"weight_dir": "/tmp", "version": 10**400},
        {"weight_dir": 5, "version": 1},
        {"version": 1},
    ],
    ids=["nothing", "no-directory", "negative", "too-large", "endless", "number", "no-key"],
)
async def test_a_request_for_no_weights_is_refused(api, body):
    answer = await api.http.post("/update_weights", json=body)
    assert answer.status_code == 400
    assert answer.json()["error"]["code"] == 400
    assert (await api.get("/health"))["version"] == 0


async def test_a_directory_without_a_marker_serves_too(api, publisher, oracle, tmp_path):
    """A model as others write it; only `step_N` promises a marker."""
    directory = publisher.other(6)
    plain = tmp_path / "plain"
    shutil.copytree(directory, plain)
    (plain / "STABLE").unlink()
    answer = await update(api, plain, 6)
    assert answer == {"version": 6, "digest": read_manifest(directory).weights.digest}
    await assert_serves(api, oracle(plain), 6)


async def test_updates_forget_no_memory(api, publisher):
    """Twenty updates under load leave the server as it was."""
    directories = [publisher.other(version) for version in (1, 2)]

    async def sample(seed: int):
        return await api.generate([seed % 90, 3], max_tokens=100, ignore_eos=True, seed=seed)

    samples = [asyncio.create_task(sample(seed)) for seed in range(24)]
    for version in range(1, 21):
        await update(api, directories[version % 2], version)
    for answer in await asyncio.gather(*samples):
        (runs,) = answer["versions"]
        assert np.diff([version for version, _ in runs]).min(initial=1) > 0
        assert sum(count for _, count in runs) == 100
    await api.await_metric("vllm:num_requests_running", lambda value: value == 0)
    assert await api.metric("vllm:kv_cache_usage_perc") < 0.01
