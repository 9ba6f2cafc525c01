"""Host time of a decoder's layers in training: what must stay below the GPU's time for the GPU never to wait.

Layers so small that arithmetic is next to nothing, on the CPU; seconds are this thread's own, so other work on the
machine matters little. Compare settings or versions of the code with each other: launching kernels costs more.

    python benchmarks/host_time.py '{"compile": {}}' '{"compile": {}, "ac": {"keep_attention": false}}'

Arguments are tables `[model]` of a trainer as JSON; they are measured in turn.
"""

import sys
import time
from statistics import median

import torch

from prime_rl.config.trainer import TrainerModelConfig
from prime_rl.models.attention import PackedAttention
from prime_rl.models.decoder import Decoder, DecoderConfig
from prime_rl.models.hf import empty_decoder, initial_tensors, load_hf_tensors
from prime_rl.trainer.model import memory

CPU = torch.device("cpu")
LAYERS, TOKENS, ROUNDS, PASSES = 28, 32, 5, 8
SHAPE = DecoderConfig(
    model_type="qwen3", vocab_size=64, hidden_size=64, intermediate_size=64, num_layers=LAYERS, num_heads=2,
    num_kv_heads=1, head_dim=16, qk_norm=True, tie_embeddings=True,
)  # fmt: skip


def prepare(keys: str) -> Decoder:
    """A decoder set up as `keys` say, after the passes that compile it."""
    decoder = empty_decoder(SHAPE, device=CPU, dtype=torch.float32)
    load_hf_tensors(decoder, initial_tensors(SHAPE, seed=0))
    memory.apply(decoder, TrainerModelConfig.model_validate_json(keys), CPU)
    for _ in range(3):
        passes(decoder)
    return decoder


def passes(decoder: Decoder) -> tuple[float, float]:
    """Microseconds a layer of one forward and one backward."""
    ids = torch.arange(TOKENS)
    start = time.thread_time()
    hidden = decoder(ids, ids, PackedAttention([TOKENS]))
    middle = time.thread_time()
    hidden.sum().backward()
    return (middle - start) / LAYERS * 1e6, (time.thread_time() - middle) / LAYERS * 1e6


def main() -> None:
    torch.set_num_threads(1)
    decoders = [(keys, prepare(keys)) for keys in sys.argv[1:] or ["{}"]]
    taken: dict[str, list[tuple[float, float]]] = {keys: [] for keys, _ in decoders}
    for _ in range(ROUNDS):
        for keys, decoder in decoders:
            taken[keys] += [passes(decoder) for _ in range(PASSES)]
    print("microseconds a layer: median (least)")
    for keys, times in taken.items():
        forward, backward = zip(*times, strict=True)
        print(
            f"forward {median(forward):6.0f} ({min(forward):6.0f})   backward {median(backward):6.0f} "
            f"({min(backward):6.0f})   {keys}"
        )


if __name__ == "__main__":
    main()
