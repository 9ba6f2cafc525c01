"""The engine on a GPU: graphs change nothing, the slow path of sampling, weights in place, memory limits that hold."""

import asyncio
import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from prime_rl.config.inference import InferenceConfig
from prime_rl.errors import ConfigError
from prime_rl.inference.backend import GenerationRequest, RequestError, SamplingParams, TokenOutput
from prime_rl.inference.engine.build import build_engine
from prime_rl.inference.engine.engine import Engine
from prime_rl.inference.engine.sampler import uniform
from prime_rl.models.attention import PackedAttention
from prime_rl.models.decoder import Decoder
from prime_rl.models.hf import hf_tensors, load_decoder
from tests.gpu.partings import may_part

pytestmark = pytest.mark.gpu

SHAPE = {
    "model_type": "qwen3",
    "vocab_size": 9000,
    "hidden_size": 128,
    "intermediate_size": 192,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 1024,
    "eos_token_id": 0,
    "initializer_range": 0.15,
    "tie_word_embeddings": True,
}


@pytest.fixture
def model(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text(json.dumps(SHAPE))
    return tmp_path


def build(model: Path, *, dtype: str = "float32", eager: bool = False, device: str = "cuda", **fields: Any) -> Engine:
    asked = {"name": str(model), "dtype": dtype, "enforce_eager": eager}
    limits = {"max_num_seqs": 24, "gpu_memory_utilization": 0.3, "max_num_batched_tokens": 128}
    return build_engine(InferenceConfig.model_validate({"model": asked, "device": device} | limits | fields))


def asked(**sampling: Any) -> list[GenerationRequest]:
    """Prompts of many lengths, four of them with a common beginning."""
    generator = torch.Generator().manual_seed(0)
    common = torch.randint(1, 9000, (40,), generator=generator).tolist()
    prompts = [torch.randint(1, 9000, (1 + 13 * row,), generator=generator).tolist() for row in range(10)]
    prompts += [common + [row + 1] * (row + 1) for row in range(4)]
    defaults = {"max_tokens": 40, "ignore_eos": True}
    return [
        GenerationRequest(
            request_id=f"r{row}",
            prompt_ids=prompt,
            sampling=SamplingParams(**(defaults | {"seed": row} | sampling)),
            stream=row % 2 == 0,
        )
        for row, prompt in enumerate(prompts)
    ]


async def complete(engine: Engine, requests: list[GenerationRequest]) -> list[list[TokenOutput]]:
    async def one(request: GenerationRequest) -> list[TokenOutput]:
        return [output async for piece in engine.generate(request) for output in piece]

    return await asyncio.gather(*map(one, requests))


def generate(engine: Engine, requests: list[GenerationRequest]) -> list[list[TokenOutput]]:
    async def run() -> list[list[TokenOutput]]:
        try:
            return await complete(engine, requests)
        finally:
            await engine.close()

    return asyncio.run(run())


def ids(results: list[list[TokenOutput]]) -> list[list[int]]:
    return [[output.token_id for output in outputs] for outputs in results]


def assert_same_draws(
    model: Path,
    requests: list[GenerationRequest],
    actual: list[list[TokenOutput]],
    expected: list[list[TokenOutput]],
    *,
    partings: int,
) -> None:
    """Equal tokens and logprobs, but for a few rows that may part where a draw falls within float noise of a boundary.

    (On the CPU, the C kernel and PyTorch part as often: one row of 14 at temperature 0.6.)
    """
    decoder = load_decoder(str(model), device="cpu", dtype=torch.float32, seed=InferenceConfig().seed).double()
    parted = 0
    for request, ours, theirs in zip(requests, actual, expected, strict=True):
        pairs = list(zip(ours, theirs, strict=True))
        same = next((i for i, (o, p) in enumerate(pairs) if o.token_id != p.token_id), len(pairs))
        assert [o.logprob for o, _ in pairs[:same]] == pytest.approx([p.logprob for _, p in pairs[:same]], abs=1e-3)
        if same < len(pairs):
            parted += 1
            sampling, tokens = request.sampling, (ours[same].token_id, theirs[same].token_id)
            logits_V = next_logits(decoder, request.prompt_ids + [output.token_id for output in ours[:same]])
            drawn = float(uniform(np.array([sampling.seed], np.uint64), np.array([same], np.uint64))[0])
            where = (request.request_id, same, tokens)
            assert may_part(logits_V, draw=drawn, temperature=sampling.temperature, tokens=tokens), where
    assert parted <= partings


def next_logits(decoder: Decoder, row: list[int]) -> torch.Tensor:
    """Of the token behind `row`, in the decoder's own precision."""
    with torch.no_grad():
        hidden = decoder(torch.tensor(row), torch.arange(len(row)), PackedAttention([len(row)], "cpu"))
        return decoder.logits(hidden[-1:])[0]


def num_equal(actual: list[list[TokenOutput]], expected: list[list[TokenOutput]]) -> int:
    return sum(a == b for a, b in zip(ids(actual), ids(expected), strict=True))


def logprobs(results: list[list[TokenOutput]]) -> torch.Tensor:
    return torch.tensor([output.logprob for outputs in results for output in outputs])


def of_trainer(model: Path, results: list[list[TokenOutput]], dtype: torch.dtype) -> torch.Tensor:
    decoder = load_decoder(str(model), device="cuda", dtype=dtype, seed=InferenceConfig().seed)
    found = []
    for request, outputs in zip(asked(), results, strict=True):
        row = torch.tensor(request.prompt_ids + [output.token_id for output in outputs], device="cuda")
        with torch.no_grad():
            hidden = decoder(row, torch.arange(len(row), device="cuda"), PackedAttention([len(row)], "cuda"))
            every = decoder.logits(hidden).float().log_softmax(-1)[:-1].gather(-1, row[1:, None])[:, 0]
        found.append(every[len(request.prompt_ids) - 1 :])
    return torch.cat(found).cpu()


@pytest.mark.parametrize("temperature", [0.0, 0.6, 1.0])
def test_graphs_eager_and_the_cpu_give_the_same_tokens(model: Path, temperature: float) -> None:
    requests = asked(temperature=temperature)
    graphs = generate(build(model), requests)
    eager = generate(build(model, eager=True), requests)
    cpu = generate(build(model, device="cpu"), requests)
    assert_same_draws(model, requests, graphs, eager, partings=1)
    assert_same_draws(model, requests, graphs, cpu, partings=2)
    assert (logprobs(graphs) - logprobs(cpu)).abs().median() < 1e-5


@pytest.mark.parametrize(("dtype", "limit"), [(torch.float32, 1e-5), (torch.bfloat16, 0.03)])
def test_logprobs_are_the_trainers(model: Path, dtype: torch.dtype, limit: float) -> None:
    results = generate(build(model, dtype=str(dtype).removeprefix("torch.")), asked())
    difference = of_trainer(model, results, dtype) - logprobs(results)
    assert difference.abs().mean() < limit
    assert (difference.exp() - 1 - difference).mean() < limit**2


@pytest.mark.parametrize(
    "sampling",
    [
        {"top_p": 0.7},
        {"top_k": 20, "num_top_logprobs": 3},
        {"min_p": 0.05, "temperature": 1.3},
        {"repetition_penalty": 1.4},
        {"min_tokens": 10, "stop_token_ids": tuple(range(4000))},
        {"num_top_logprobs": 5, "temperature": 0.0},
    ],
)
def test_every_way_of_sampling_is_that_of_the_cpu(model: Path, sampling: dict[str, Any]) -> None:
    requests = asked(**sampling)
    gpu, cpu = generate(build(model), requests), generate(build(model, device="cpu"), requests)
    assert num_equal(gpu, cpu) >= len(requests) - 1
    for ours, theirs in zip(gpu, cpu, strict=True):
        if [o.token_id for o in ours] == [o.token_id for o in theirs]:
            assert [o.logprob for o in ours] == pytest.approx([o.logprob for o in theirs], abs=1e-3)
            tops = [
                ([t for t, _ in o.top_logprobs], [t for t, _ in p.top_logprobs])
                for o, p in zip(ours, theirs, strict=True)
            ]
            assert sum(a != b for a, b in tops) <= 1


def test_few_blocks_preempt_and_change_no_token(model: Path) -> None:
    block_gib = 2 * 3 * 2 * 32 * 16 * 4 / 1024**3
    requests = asked()
    roomy = generate(build(model), requests)
    engine = build(model, kv_cache_memory_gb=24.5 * block_gib)
    tight = generate(engine, requests)
    assert engine.stats().num_preemptions > 0
    assert engine.stats().kv_blocks_used == 0
    assert num_equal(tight, roomy) >= len(requests) - 1


def test_a_row_that_leaves_nothing_to_draw_ends_alone(model: Path) -> None:
    engine = build(model)

    async def run() -> list[list[TokenOutput]]:
        nothing = GenerationRequest(
            request_id="bad",
            prompt_ids=[5],
            sampling=SamplingParams(max_tokens=9, temperature=1e-40, top_k=7, repetition_penalty=0.01),
        )
        good = asyncio.create_task(complete(engine, asked()[:3]))
        with pytest.raises(RequestError, match="no finite distribution"):
            await complete(engine, [nothing])
        try:
            return await good
        finally:
            await engine.close()

    assert num_equal(asyncio.run(run()), generate(build(model), asked()[:3])) >= 2


def test_weights_that_are_not_finite_end_the_engine_with_a_sentence(model: Path) -> None:
    engine = build(model)
    for parameter in engine.weights().values():
        parameter.fill_(torch.nan)
    with pytest.raises(Exception, match="logits are not finite"):
        generate(engine, asked()[:2])


@pytest.mark.parametrize("recompute", [False, True])
def test_weights_change_in_place_under_captured_graphs(model: Path, recompute: bool) -> None:
    """Every tensor arrives, what is drawn afterwards is drawn from them, and the old ones come back bit for bit."""
    engine = build(model)
    decoder = load_decoder(str(model), device="cuda", seed=7)
    new = {name: tensor.clone() + 0.01 for name, tensor in hf_tensors(decoder)}
    old = {name: tensor.clone() for name, tensor in engine.weights().items()}

    def write(tensors: dict[str, torch.Tensor]) -> Callable[[], None]:
        def swap() -> None:
            for name, parameter in engine.weights().items():
                parameter.copy_(tensors[name])

        return swap

    async def run() -> list[list[list[TokenOutput]]]:
        probe = [replace(asked(temperature=0.0)[5], request_id="probe")]
        first = await complete(engine, probe)
        running = asyncio.create_task(complete(engine, asked(max_tokens=400)))
        await asyncio.sleep(0.05)
        await engine.update_weights(write(new), 1, recompute=recompute)
        assert all(torch.equal(tensor, new[name]) for name, tensor in engine.weights().items())
        second = await complete(engine, probe)
        mixed = await running
        await engine.update_weights(write(old), 2)
        third = await complete(engine, probe)
        await engine.close()
        return [first, second, third, mixed]

    first, second, third, mixed = asyncio.run(run())
    versions = [[output.version for output in outputs] for outputs in mixed]
    assert all(row == sorted(row) and len(row) == 400 for row in versions)
    assert any(row[0] == 0 and row[-1] == 1 for row in versions)
    assert ids(first) == ids(third)
    assert ids(first) != ids(second)
    fresh = build(model)
    for name, parameter in fresh.weights().items():
        parameter.copy_(new[name])
    assert ids(generate(fresh, asked(temperature=0.0)[5:6])) == ids(second)


USE = """
import sys
from pathlib import Path
from tests.gpu.test_engine import asked, build, generate

limits = {"max_num_seqs": 256, "max_num_batched_tokens": 4096, "gpu_memory_utilization": 0.2}
engine = build(Path(sys.argv[1]), dtype="bfloat16", **limits)
generate(engine, asked())
print("ready", flush=True)
sys.stdin.readline()
"""


def test_the_whole_process_stays_within_its_share(model: Path) -> None:
    """A cache that wants far more than the share: what the process takes of the GPU is the share and no more."""
    large = {"max_position_embeddings": 131072, "num_hidden_layers": 24}
    (model / "config.json").write_text(json.dumps(SHAPE | large))
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info()
    with subprocess.Popen(
        [sys.executable, "-c", USE, str(model)],
        cwd=Path(__file__).parents[2], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    ) as process:  # fmt: skip
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        used = free - torch.cuda.mem_get_info()[0]
        process.stdin.write("\n")
    assert 0.18 < used / total <= 0.2


def test_what_does_not_fit_is_said_with_its_key(model: Path) -> None:
    total = torch.cuda.get_device_properties(0).total_memory / 1024**3
    with pytest.raises(ConfigError, match=r"gpu_memory_utilization = 0.001 leaves .* raise it"):
        build(model, gpu_memory_utilization=0.001)
    with pytest.raises(ConfigError, match=r"ran out while allocating the KV cache .*kv_cache_memory_gb"):
        build(model, kv_cache_memory_gb=6.0, max_num_seqs=4096, gpu_memory_utilization=2.5 / total)
    torch.cuda.set_per_process_memory_fraction(1.0)
    taken = torch.empty(int(0.5 * total * 1024**3), dtype=torch.uint8, device="cuda")
    with pytest.raises(ConfigError, match=r"gpu_memory_utilization = 0.9 .* are free; lower it"):
        _in_another_process(model)
    del taken


def _in_another_process(model: Path) -> None:
    code = "import sys; from pathlib import Path; from tests.gpu.test_engine import build; build(Path(sys.argv[1]), "
    done = subprocess.run(
        [sys.executable, "-c", code + "gpu_memory_utilization=0.9)", str(model)],
        cwd=Path(__file__).parents[2], capture_output=True, text=True, check=False, timeout=120,
    )  # fmt: skip
    assert done.returncode != 0
    raise ConfigError(done.stderr.splitlines()[-1])
