"""The engine computes what the trainer and transformers compute, however it schedules the work."""

import asyncio
import json
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen2Config, Qwen3Config

from prime_rl.config.inference import InferenceConfig
from prime_rl.inference.backend import GenerationRequest, SamplingParams, TokenOutput
from prime_rl.inference.engine.build import build_engine
from prime_rl.inference.engine.engine import Engine
from prime_rl.models.attention import PackedAttention
from prime_rl.models.hf import load_decoder

VOCAB = 101
SHAPE = {
    "vocab_size": VOCAB,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "eos_token_id": 0,
}
CONFIGS = {
    "llama": LlamaConfig(**SHAPE, head_dim=16),
    "qwen2": Qwen2Config(**(SHAPE | {"hidden_size": 64}), tie_word_embeddings=True),
    "qwen3": Qwen3Config(**SHAPE, head_dim=16),
}


def save_model(directory: Path, name: str = "qwen3", seed: int = 0) -> Path:
    """A model whose logits have a standard deviation of at least 1, and whose end-of-sequence token is unlikely."""
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(CONFIGS[name], dtype=torch.float32)
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            if "norm" in key:
                parameter.uniform_(0.5, 1.5)
            else:
                parameter.normal_(0.0, 0.25)
    model.save_pretrained(directory)
    return directory


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    block_size: int = 16
    max_num_seqs: int = 16
    max_num_batched_tokens: int = 256
    num_blocks: int | None = None
    sharing: bool = True
    dtype: str = "float32"
    device: str = "cpu"
    deterministic: bool = False


@asynccontextmanager
async def running(directory: Path, limits: Limits | None = None) -> AsyncIterator[Engine]:
    limits = limits or Limits()
    shape = json.loads((directory / "config.json").read_text())
    head_dim = shape.get("head_dim") or shape["hidden_size"] // shape["num_attention_heads"]
    block_bytes = 2 * 4 * shape["num_hidden_layers"] * shape["num_key_value_heads"] * head_dim * limits.block_size
    config = InferenceConfig.model_validate(
        {
            "model": {"name": str(directory), "dtype": limits.dtype},
            "device": limits.device,
            "block_size": limits.block_size,
            "max_num_seqs": limits.max_num_seqs,
            "max_num_batched_tokens": limits.max_num_batched_tokens,
            "enable_prefix_caching": limits.sharing,
            "deterministic": limits.deterministic,
            "kv_cache_memory_gb": (limits.num_blocks * block_bytes + 1) / 1024**3 if limits.num_blocks else None,
        }
    )
    engine = build_engine(config)
    try:
        yield engine
    finally:
        await engine.close()


async def complete(engine: Engine, request: GenerationRequest) -> list[TokenOutput]:
    return [output async for outputs in engine.generate(request) for output in outputs]


async def complete_all(engine: Engine, requests: list[GenerationRequest]) -> list[list[TokenOutput]]:
    return await asyncio.gather(*(complete(engine, request) for request in requests))


def requests_of(prompts: list[list[int]], **sampling: object) -> list[GenerationRequest]:
    defaults = {"max_tokens": 24, "ignore_eos": True}
    return [
        GenerationRequest(
            request_id=f"r{index}",
            prompt_ids=prompt,
            sampling=SamplingParams(**(defaults | {"seed": index} | sampling)),  # type: ignore[arg-type]
        )
        for index, prompt in enumerate(prompts)
    ]


def prompts_of(lengths: list[int], seed: int = 0) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(1, VOCAB) for _ in range(length)] for length in lengths]


def packed_logprobs(
    directory: Path, prompts: list[list[int]], results: list[list[TokenOutput]], temperature: float
) -> list[torch.Tensor]:
    """The trainer's logprobs of every sampled token, at the sampling temperature."""
    decoder = load_decoder(str(directory))
    rows = [prompt + [o.token_id for o in outputs] for prompt, outputs in zip(prompts, results, strict=True)]
    ids = torch.tensor([token for row in rows for token in row])
    positions = torch.cat([torch.arange(len(row)) for row in rows])
    with torch.no_grad():
        hidden = decoder(ids, positions, PackedAttention([len(row) for row in rows]))
        logprobs = (decoder.logits(hidden) / temperature).log_softmax(-1)
    found = []
    offset = 0
    for prompt, row in zip(prompts, rows, strict=True):
        index = torch.arange(len(prompt), len(row))
        found.append(logprobs[offset + index - 1, torch.tensor(row)[index]])
        offset += len(row)
    return found


def tokens(results: list[list[TokenOutput]]) -> list[list[int]]:
    return [[output.token_id for output in outputs] for outputs in results]


def assert_same_tokens(actual: list[list[TokenOutput]], expected: list[list[TokenOutput]]) -> None:
    """Equal, but for one row that may part: a draw within float noise of a boundary picks the neighbour."""
    pairs = list(zip(tokens(actual), tokens(expected), strict=True))
    assert sum(left != right for left, right in pairs) <= 1, pairs


LENGTHS = [1, 5, 8, 16, 17, 40, 33, 3]


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("temperature", [1.0, 0.7])
async def test_engine_logprobs_equal_the_trainers(name: str, temperature: float, tmp_path: Path) -> None:
    directory = save_model(tmp_path, name)
    prompts = prompts_of(LENGTHS)
    async with running(directory) as engine:
        results = await complete_all(engine, requests_of(prompts, temperature=temperature))

    for outputs, expected in zip(results, packed_logprobs(directory, prompts, results, temperature), strict=True):
        actual = torch.tensor([output.logprob for output in outputs])
        assert len(outputs) == 24
        torch.testing.assert_close(actual, expected, rtol=0, atol=5e-5)


@pytest.mark.parametrize("name", CONFIGS)
async def test_greedy_equals_generate_of_transformers(name: str, tmp_path: Path) -> None:
    directory = save_model(tmp_path, name)
    prompts = prompts_of(LENGTHS)
    async with running(directory) as engine:
        results = await complete_all(engine, requests_of(prompts, temperature=0.0))

    reference = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    for prompt, row in zip(prompts, tokens(results), strict=True):
        ids = torch.tensor([prompt])
        expected = reference.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=24,
            min_new_tokens=24,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
        )
        assert row == expected[0, len(prompt) :].tolist()


VARIANTS: dict[str, Limits] = {
    "chunked prefill": Limits(max_num_batched_tokens=16),
    "two at a time": Limits(max_num_seqs=2),
    "few blocks, so that requests are preempted": Limits(num_blocks=16),
    "nothing shared": Limits(sharing=False),
    "large blocks": Limits(block_size=64),
    "blocks that the C kernels do not take": Limits(block_size=5),
}


@pytest.mark.parametrize("variant", VARIANTS)
async def test_results_do_not_depend_on_how_the_work_is_scheduled(variant: str, tmp_path: Path) -> None:
    directory = save_model(tmp_path)
    shared = prompts_of([30], seed=5)[0]
    prompts = [*prompts_of(LENGTHS), shared, shared, [*shared[:16], 7], shared]
    async with running(directory) as engine:
        expected = await complete_all(engine, requests_of(prompts, max_tokens=40))
    async with running(directory, VARIANTS[variant]) as engine:
        actual = await complete_all(engine, requests_of(prompts, max_tokens=40))
        stats = engine.stats()

    assert_same_tokens(actual, expected)
    for outputs, logprobs in zip(actual, packed_logprobs(directory, prompts, actual, 1.0), strict=True):
        found = torch.tensor([output.logprob for output in outputs])
        torch.testing.assert_close(found, logprobs, rtol=0, atol=5e-5)
    assert stats.kv_blocks_used == 0
    assert (stats.num_preemptions > 0) == (variant == "few blocks, so that requests are preempted")
    assert (stats.prefix_hit_tokens_total > 0) == (variant not in ("nothing shared", "large blocks"))


@pytest.mark.gpu
@pytest.mark.parametrize("name", CONFIGS)
async def test_on_a_gpu_the_engine_gives_what_it_gives_on_the_cpu(name: str, tmp_path: Path) -> None:
    directory = save_model(tmp_path, name)
    prompts = prompts_of(LENGTHS)
    async with running(directory) as engine:
        expected = await complete_all(engine, requests_of(prompts))
    async with running(directory, Limits(device="cuda", max_num_batched_tokens=32)) as engine:
        actual = await complete_all(engine, requests_of(prompts))
    assert_same_tokens(actual, expected)
    for outputs, logprobs in zip(actual, packed_logprobs(directory, prompts, actual, 1.0), strict=True):
        found = torch.tensor([output.logprob for output in outputs])
        torch.testing.assert_close(found, logprobs, rtol=0, atol=1e-4)


async def test_bfloat16_stays_near_float32(tmp_path: Path) -> None:
    directory = save_model(tmp_path)
    prompts = prompts_of(LENGTHS)
    async with running(directory, Limits(dtype="bfloat16")) as engine:
        results = await complete_all(engine, requests_of(prompts))
    for outputs, expected in zip(results, packed_logprobs(directory, prompts, results, 1.0), strict=True):
        actual = torch.tensor([output.logprob for output in outputs])
        assert (actual - expected).abs().mean() < 0.05


async def test_a_request_alone_gives_what_it_gives_beside_others(tmp_path: Path) -> None:
    directory = save_model(tmp_path)
    requests = requests_of(prompts_of(LENGTHS))
    async with running(directory) as engine:
        together = await complete_all(engine, requests)
        alone = [await complete(engine, replace(request, request_id="alone")) for request in requests]
    assert_same_tokens(together, alone)


async def test_a_groups_prompt_is_computed_once_also_when_all_arrive_at_once(tmp_path: Path) -> None:
    directory = save_model(tmp_path)
    prompt = prompts_of([33])[0]
    async with running(directory) as engine:
        await complete_all(engine, requests_of([prompt] * 8, max_tokens=4))
        stats = engine.stats()
    assert stats.prompt_tokens_total == 8 * 33
    assert stats.prefix_hit_tokens_total == 7 * 32
