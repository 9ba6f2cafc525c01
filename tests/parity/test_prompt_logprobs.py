"""Logprobs of a prompt's tokens are those of transformers, in whatever pieces the engine computes the prompt."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel, Qwen3Config

from prime_rl.config.inference import InferenceConfig
from prime_rl.inference.backend import GenerationRequest, PromptLogprobs, SamplingParams
from prime_rl.inference.engine.build import build_engine
from prime_rl.inference.engine.engine import Engine

VOCAB = 67
CONFIG = Qwen3Config(
    vocab_size=VOCAB,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=16,
    max_position_embeddings=512,
    initializer_range=0.3,
    eos_token_id=0,
)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> PreTrainedModel:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(CONFIG, dtype=torch.float32)
    model.save_pretrained(tmp_path_factory.mktemp("model"))
    return model.eval()


@pytest.fixture
async def engine(model: PreTrainedModel, tmp_path: Path) -> AsyncIterator[Engine]:
    """32 tokens a step, so that prompts are computed in pieces; room for 40 blocks of 8."""
    model.save_pretrained(tmp_path)
    block_bytes = 2 * 4 * 2 * 2 * 16 * 8
    config = {
        "model": {"name": str(tmp_path), "max_model_len": 200},
        "device": "cpu",
        "block_size": 8,
        "max_num_seqs": 4,
        "max_num_batched_tokens": 32,
        "kv_cache_memory_gb": (40 * block_bytes + 1) / 1024**3,
    }
    engine = build_engine(InferenceConfig.model_validate(config))
    yield engine
    await engine.close()


def prompt_of(length: int, seed: int = 0) -> list[int]:
    return torch.randint(1, VOCAB, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


async def scores(
    engine: Engine, prompt: list[int], num_top: int, name: str = "a", max_tokens: int = 3
) -> PromptLogprobs:
    sampling = SamplingParams(max_tokens=max_tokens, num_prompt_logprobs=num_top, ignore_eos=True, temperature=0.5)
    request = GenerationRequest(request_id=name, prompt_ids=prompt, sampling=sampling)
    outputs = [output async for piece in engine.generate(request) for output in piece]
    assert len(outputs) == max_tokens
    assert [output.prompt_logprobs for output in outputs[1:]] == [None] * (max_tokens - 1)
    assert outputs[0].prompt_logprobs is not None
    return outputs[0].prompt_logprobs


def assert_transformers_agrees(model: PreTrainedModel, prompt: list[int], found: PromptLogprobs, num_top: int) -> None:
    with torch.no_grad():
        logprobs = model(torch.tensor([prompt])).logits[0].log_softmax(-1)
    assert found[0] is None
    assert len(found) == len(prompt)
    for position, entry in enumerate(found[1:]):
        assert entry is not None
        row = logprobs[position]
        assert entry[0][0] == prompt[position + 1]
        assert [logprob for _, logprob, _ in entry] == pytest.approx(
            [row[token].item() for token, _, _ in entry], abs=1e-5
        )
        assert [logprob for _, logprob, _ in entry[1:]] == pytest.approx(row.topk(num_top).values.tolist(), abs=1e-5)
        assert [rank for _, _, rank in entry[1:]] == list(range(1, num_top + 1))
        assert entry[0][2] in (better := int((row > row[entry[0][0]]).sum()) + 1, better + 1, better - 1)


@pytest.mark.parametrize("length", [1, 2, 31, 33, 150])
async def test_long_and_short_prompts_agree_with_transformers(
    engine: Engine, model: PreTrainedModel, length: int
) -> None:
    prompt = prompt_of(length)
    assert_transformers_agrees(model, prompt, await scores(engine, prompt, 3), 3)


async def test_a_prompt_that_is_cached_is_scored_all_the_same(engine: Engine, model: PreTrainedModel) -> None:
    prompt = prompt_of(70)
    first = await scores(engine, prompt, 0)
    again = await scores(engine, prompt, 2)
    assert engine.stats().prefix_hit_tokens_total == 0
    assert [entry and entry[0][0] for entry in first] == [entry and entry[0][0] for entry in again]
    assert_transformers_agrees(model, prompt, again, 2)


async def test_scored_prompts_beside_others_and_preempted_ones_agree(engine: Engine, model: PreTrainedModel) -> None:
    prompts = [prompt_of(60 + index, seed=index) for index in range(6)]
    found = await asyncio.gather(
        *(scores(engine, prompt, index % 3, f"r{index}", max_tokens=40) for index, prompt in enumerate(prompts))
    )
    assert engine.stats().num_preemptions > 0
    for index, (prompt, entries) in enumerate(zip(prompts, found, strict=True)):
        assert_transformers_agrees(model, prompt, entries, index % 3)
