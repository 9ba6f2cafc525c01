import json
from pathlib import Path
from typing import Any

import pytest
import torch

from prime_rl.config.inference import InferenceConfig
from prime_rl.errors import ConfigError, ModelError
from prime_rl.inference.engine.build import _cache_size, build_engine
from prime_rl.models.decoder import DecoderConfig

CONFIG = {
    "model_type": "llama",
    "vocab_size": 40,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 64,
    "eos_token_id": [1, 2],
}


def config(directory: Path, **fields: Any) -> InferenceConfig:
    (directory / "config.json").write_text(json.dumps(CONFIG))
    model = {"name": str(directory)} | fields.pop("model", {})
    return InferenceConfig.model_validate({"model": model, "device": "cpu", "max_num_seqs": 2} | fields)


async def test_the_cache_is_no_larger_than_all_requests_can_use(tmp_path: Path) -> None:
    engine = build_engine(config(tmp_path))
    assert engine.stats().kv_blocks_total == 2 * 4
    assert (engine.max_model_len, engine.vocab_size, engine.eos_token_ids) == (64, 40, frozenset({1, 2}))
    await engine.close()


async def test_a_small_cache_limits_requests(tmp_path: Path) -> None:
    block_bytes = 2 * 2 * 8 * 16 * 4
    engine = build_engine(config(tmp_path, kv_cache_memory_gb=3.5 * block_bytes / 1024**3))
    assert (engine.stats().kv_blocks_total, engine.max_model_len) == (3, 48)
    await engine.close()


async def test_more_than_the_model_has_positions_is_taken_as_these_and_said_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """`rl` fills max_model_len from seq_len, whatever the model."""
    engine = build_engine(config(tmp_path, model={"max_model_len": 2048}))
    assert (engine.stats().kv_blocks_total, engine.max_model_len) == (2 * 4, 64)
    await engine.close()
    warnings = [record.message for record in caplog.records if "max_model_len" in record.message]
    assert warnings == [f"max_model_len is 2048, but {tmp_path} has 64 positions; requests are limited to these"]


async def test_a_small_cache_limits_requests_whose_length_nobody_chose(tmp_path: Path) -> None:
    block_bytes = 2 * 2 * 8 * 16 * 4
    fields = {"kv_cache_memory_gb": 3.5 * block_bytes / 1024**3}
    engine = build_engine(config(tmp_path, model={"max_model_len": 2048}, **fields))
    assert engine.max_model_len == 48
    await engine.close()
    with pytest.raises(ConfigError, match="max_model_len is 50, but the KV cache holds 48 tokens"):
        build_engine(config(tmp_path, model={"max_model_len": 50}, **fields))


def test_a_cache_takes_what_is_left_for_it() -> None:
    block_bytes = 2 * 2 * 8 * 16 * 4
    shape = DecoderConfig.from_hf(CONFIG)
    found = [
        _cache_size(InferenceConfig(), shape, torch.float32, share * 100 * block_bytes, max_model_len=64)
        for share in (0.5, 0.25)
    ]
    assert found == [(50, 64), (25, 64)]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"kv_cache_memory_gb": 1e-9}, "no room for a block"),
        ({"model": {"max_model_len": 64}, "kv_cache_memory_gb": 4e-6}, "the KV cache holds"),
    ],
)
def test_settings_that_do_not_fit_are_named(fields: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=message):
        build_engine(config(tmp_path, **fields))


def test_deterministic_is_refused_on_a_gpu_that_nobody_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    with pytest.raises(ConfigError, match=r"held on the CPU alone.*set inference\.device to 'cpu'"):
        build_engine(config(tmp_path, device="auto", deterministic=True))
    with pytest.raises(ValueError, match="set device to 'cpu', or leave deterministic out"):
        config(tmp_path, device="cuda", deterministic=True)


def test_a_model_that_is_nowhere_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(ModelError, match="no/such-model"):
        build_engine(config(tmp_path, model={"name": "no/such-model"}))
