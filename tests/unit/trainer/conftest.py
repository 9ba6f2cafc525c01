import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from prime_rl.data.packing import build_batch
from prime_rl.data.samples import NOT_SAMPLED, TrainingBatch, TrainingSample
from prime_rl.models.decoder import Decoder, DecoderConfig
from prime_rl.models.hf import empty_decoder, hf_tensors, initial_tensors, load_hf_tensors, write_safetensors

VOCAB_SIZE = 300
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
HF_CONFIG = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "tie_word_embeddings": True,
    "initializer_range": 0.2,
    "eos_token_id": 257,
}


@pytest.fixture
def decoder() -> Decoder:
    """A small Qwen3 whose logits have a standard deviation near 1."""
    model = empty_decoder(DecoderConfig.from_hf(HF_CONFIG), device="cpu", dtype=torch.float32)
    load_hf_tensors(model, initial_tensors(model.config, seed=0))
    return model


@pytest.fixture
def model_dir(tmp_path: Path, decoder: Decoder) -> Path:
    """`decoder` on disk, with a byte-level tokenizer and a chat template."""
    directory = tmp_path / "model"
    write_safetensors(hf_tensors(decoder), directory)
    (directory / "config.json").write_text(json.dumps(HF_CONFIG))
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    core = Tokenizer(models.BPE(vocab={char: index for index, char in enumerate(alphabet)}, merges=[]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    core.add_special_tokens(["<|im_start|>", "<|im_end|>"])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, eos_token="<|im_end|>", chat_template=CHAT_TEMPLATE)
    tokenizer.save_pretrained(directory)
    return directory


@pytest.fixture
def make_samples() -> Callable[..., list[TrainingSample]]:
    def make(count: int, *, seed: int = 0, longest: int = 20, version: int = 0) -> list[TrainingSample]:
        rng = np.random.default_rng(seed)
        samples = []
        for number in range(count):
            length = int(rng.integers(4, longest + 1))
            sampled = np.arange(length) >= int(rng.integers(1, length))
            samples.append(
                TrainingSample(
                    token_ids=rng.integers(0, VOCAB_SIZE, length).astype(np.int32),
                    loss_mask=sampled,
                    logprobs=np.where(sampled, -3 - 3 * rng.random(length), 0).astype(np.float32),
                    versions=np.where(sampled, version, NOT_SAMPLED).astype(np.int32),
                    temperature=float(0.5 + rng.random()),
                    advantage=float(rng.normal()),
                    reward=0.0,
                    env_name="e",
                    rollout_id=str(number),
                )
            )
        return samples

    return make


@pytest.fixture
def make_batch(make_samples) -> Callable[..., TrainingBatch]:
    def make(step: int = 0, *, count: int = 6, seed: int = 0, seq_len: int = 32) -> TrainingBatch:
        return build_batch(make_samples(count, seed=seed), step=step, seq_len=seq_len)

    return make
