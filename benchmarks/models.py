"""Models of the benchmarks: Qwen3 shapes with random weights and a tokenizer that has a word for every token.

    python benchmarks/models.py 0.6b DIRECTORY [--dtype bfloat16]

A directory is written by a process of its own: one that has already computed with torch on the CPU cannot start vLLM's
engine reliably.
"""

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple


class Shape(NamedTuple):
    """A dense Qwen3."""

    vocab: int
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head: int
    mlp: int
    tied: bool


SHAPES = {
    "3.3m": Shape(512, 256, 4, 4, 2, 64, 768, tied=False),
    "30m": Shape(8192, 512, 8, 8, 4, 64, 1536, tied=True),
    "150m": Shape(32768, 768, 18, 12, 4, 64, 2304, tied=True),
    "0.6b": Shape(151936, 1024, 28, 16, 8, 128, 3072, tied=True),
    "4b": Shape(151936, 2560, 36, 32, 8, 128, 9728, tied=True),
}
MAX_POSITIONS = 4096
DTYPES = ("float32", "bfloat16")


def config_of(name: str, dtype: str) -> dict[str, Any]:
    """`config.json` of a preset."""
    shape = SHAPES[name]
    return {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "vocab_size": shape.vocab,
        "hidden_size": shape.hidden,
        "intermediate_size": shape.mlp,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "initializer_range": 0.02,
        "max_position_embeddings": MAX_POSITIONS,
        "rope_theta": 10000.0,
        "tie_word_embeddings": shape.tied,
        "attention_bias": False,
        "bos_token_id": 0,
        "eos_token_id": 0,
        "dtype": dtype,
    }


def make_model(name: str, directory: Path, dtype: str) -> None:
    """Write the preset into `directory`, by a process of its own."""
    script = str(Path(__file__).resolve())
    subprocess.run([sys.executable, script, name, str(directory), "--dtype", dtype], check=True, timeout=300)


def write_model(name: str, directory: Path, dtype: str) -> None:
    """Configuration, tokenizer and weights; the same weights every time."""
    import torch  # noqa: PLC0415 (what only reads the presets needs none)

    from prime_rl.models.hf import hf_tensors, load_decoder, write_safetensors  # noqa: PLC0415

    directory.mkdir(parents=True, exist_ok=True)
    config = config_of(name, dtype)
    (directory / "config.json").write_text(json.dumps(config), encoding="utf-8")
    write_tokenizer(config["vocab_size"], directory)
    decoder = load_decoder(str(directory), dtype=torch.float32, seed=0)
    kind = getattr(torch, dtype)
    write_safetensors(((name, tensor.to(kind)) for name, tensor in hf_tensors(decoder)), directory)


def write_tokenizer(vocab_size: int, directory: Path) -> None:
    """A word for every token: `t0 t1 t2`."""
    model = {"type": "WordLevel", "vocab": {f"t{i}": i for i in range(vocab_size)}, "unk_token": "t0"}
    tokenizer = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [],
        "normalizer": None,
        "pre_tokenizer": {"type": "WhitespaceSplit"},
        "post_processor": None,
        "decoder": None,
        "model": model,
    }
    (directory / "tokenizer.json").write_text(json.dumps(tokenizer), encoding="utf-8")
    about = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "t0", "unk_token": "t0"}
    (directory / "tokenizer_config.json").write_text(json.dumps(about), encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name", choices=SHAPES)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--dtype", choices=DTYPES, default="bfloat16")
    args = parser.parse_args()
    write_model(args.name, args.directory, args.dtype)


if __name__ == "__main__":
    main()
