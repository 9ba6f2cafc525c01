"""What running requests compute after an update, against the decoder on the whole sequence with the new weights."""

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import torch

from prime_rl.config.inference import InferenceConfig
from prime_rl.inference.backend import EngineFailed, GenerationRequest, SamplingParams, TokenOutput
from prime_rl.inference.engine.build import build_engine
from prime_rl.inference.engine.engine import Engine
from prime_rl.models.attention import PackedAttention
from prime_rl.models.decoder import Decoder
from prime_rl.models.hf import empty_decoder

VOCAB = 61
CONFIG = {
    "model_type": "qwen3",
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "eos_token_id": 0,
}
PROMPT = [7, 3, 9, 12, 5, 44, 31, 8, 2, 19]


def draw(decoder: Decoder, seed: int) -> Decoder:
    """Weights large enough that each version has a distribution of its own."""
    generator = torch.Generator().manual_seed(seed)
    for parameter in decoder.parameters():
        parameter.data.copy_(torch.empty(parameter.shape).normal_(0.0, 0.3, generator=generator))
    return decoder


@pytest.fixture
async def engine(tmp_path: Path) -> AsyncIterator[Engine]:
    """Blocks of 4 tokens, so that a sequence has many; weights of seed 0."""
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    config = {"model": {"name": str(tmp_path)}, "device": "cpu", "max_num_seqs": 4, "block_size": 4}
    engine = build_engine(InferenceConfig.model_validate(config))
    draw(engine.runner.decoder, 0)
    yield engine
    await engine.close()


def request(prompt: list[int], max_tokens: int, name: str = "a", **fields: Any) -> GenerationRequest:
    sampling = SamplingParams(max_tokens=max_tokens, ignore_eos=True, seed=1, **fields)
    return GenerationRequest(request_id=name, prompt_ids=prompt, sampling=sampling)


async def complete(engine: Engine, asked: GenerationRequest) -> list[TokenOutput]:
    return [output async for outputs in engine.generate(asked) for output in outputs]


async def updated(engine: Engine, asked: GenerationRequest, *, recompute: bool) -> list[TokenOutput]:
    """The tokens of a request under which the weights of seed 1 are swapped in after a few."""
    outputs: list[TokenOutput] = []
    async for piece in engine.generate(asked):
        outputs += piece
        if len(outputs) >= 10 and engine.version == 0:
            await engine.update_weights(lambda: (draw(engine.runner.decoder, 1), None)[1], 1, recompute=recompute)
    return outputs


def truth(engine: Engine, seed: int, prompt: list[int], outputs: list[TokenOutput]) -> list[float]:
    """Logprob of every sampled token where all of the sequence is computed with the weights of one seed."""
    decoder = draw(empty_decoder(engine.runner.decoder.config, device="cpu", dtype=torch.float32), seed)
    ids = torch.tensor(prompt + [output.token_id for output in outputs])
    with torch.no_grad():
        hidden = decoder(ids, torch.arange(len(ids)), PackedAttention([len(ids)]))
        logprobs = decoder.logits(hidden).log_softmax(-1)
    index = torch.arange(len(prompt), len(ids))
    return logprobs[index - 1, ids[index]].tolist()


def switch_of(outputs: list[TokenOutput]) -> int:
    versions = [output.version for output in outputs]
    switch = versions.index(1)
    assert versions == [0] * switch + [1] * (len(versions) - switch)
    assert 10 <= switch < len(versions) - 10
    return switch


async def test_recomputed_sequences_go_on_as_if_the_new_weights_had_always_been_there(engine: Engine) -> None:
    outputs = await updated(engine, request(PROMPT, 300), recompute=True)
    switch = switch_of(outputs)
    logprobs = [output.logprob for output in outputs]
    assert logprobs[:switch] == pytest.approx(truth(engine, 0, PROMPT, outputs)[:switch], abs=1e-5)
    assert logprobs[switch:] == pytest.approx(truth(engine, 1, PROMPT, outputs)[switch:], abs=1e-5)


async def test_kept_values_are_used_up_and_shared_with_nobody(engine: Engine) -> None:
    outputs = await updated(engine, request(PROMPT, 300), recompute=False)
    switch = switch_of(outputs)
    logprobs = [output.logprob for output in outputs]
    new = truth(engine, 1, PROMPT, outputs)
    assert max(abs(a - b) for a, b in zip(logprobs[switch:], new[switch:], strict=True)) > 1e-2
    # Someone asks for what the first request computed with values of both weights: none of it is found.
    hits = engine.stats().prefix_hit_tokens_total
    prompt = PROMPT + [output.token_id for output in outputs[:200]]
    fresh = await complete(engine, request(prompt, 20))
    assert engine.stats().prefix_hit_tokens_total == hits
    assert [output.logprob for output in fresh] == pytest.approx(truth(engine, 1, prompt, fresh), abs=1e-5)


async def test_recomputed_values_are_shared_again(engine: Engine) -> None:
    outputs = await updated(engine, request(PROMPT, 300), recompute=True)
    hits = engine.stats().prefix_hit_tokens_total
    prompt = PROMPT + [output.token_id for output in outputs[:200]]
    fresh = await complete(engine, request(prompt, 20))
    assert engine.stats().prefix_hit_tokens_total == hits + 208  # 210 tokens in whole blocks of 4
    assert [output.logprob for output in fresh] == pytest.approx(truth(engine, 1, prompt, fresh), abs=1e-5)


@pytest.mark.parametrize("recompute", [False, True])
async def test_prefixes_of_older_weights_are_not_found(engine: Engine, recompute: bool) -> None:
    await complete(engine, request(PROMPT, 4))
    await engine.update_weights(lambda: (draw(engine.runner.decoder, 1), None)[1], 1, recompute=recompute)
    fresh = await complete(engine, request(PROMPT, 4))
    assert engine.stats().prefix_hit_tokens_total == 0
    assert [output.logprob for output in fresh] == pytest.approx(truth(engine, 1, PROMPT, fresh), abs=1e-5)


async def test_weights_written_halfway_end_the_engine(engine: Engine, caplog: pytest.LogCaptureFixture) -> None:
    def swap() -> None:
        next(iter(engine.runner.decoder.parameters())).data.zero_()
        raise RuntimeError("a tensor does not fit")

    running = asyncio.create_task(complete(engine, request(PROMPT, 400)))
    await asyncio.sleep(0)
    with pytest.raises(EngineFailed, match="a tensor does not fit"):
        await engine.update_weights(swap, 1)
    assert "a tensor does not fit" in (engine.stats().error or "")
    assert engine.version == 0
    with pytest.raises(EngineFailed, match="a tensor does not fit"):
        await running
    assert "the inference engine failed" in caplog.text
