"""`impl = "hf"` on a GPU: packed, compiled and in bfloat16, it stays near the library document by document."""

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, Phi3Config

from prime_rl.config.trainer import ActivationCheckpointConfig, CompileConfig, TrainerModelConfig
from prime_rl.models.attention import PackedAttention
from prime_rl.models.hf import load_hf_tensors
from prime_rl.models.transformers_model import empty_transformers_model
from prime_rl.trainer.model import memory

pytestmark = pytest.mark.gpu

LENGTHS = [300, 17, 128]


@pytest.mark.parametrize("compiled", [False, True])
def test_packed_documents_equal_the_library_one_by_one(compiled: bool, tmp_path: Path) -> None:
    config = Phi3Config(
        **{"vocab_size": 512, "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2, "pad_token_id": 0},
        **{"num_attention_heads": 4, "num_key_value_heads": 2, "bos_token_id": 1, "eos_token_id": 2},
    )
    config.save_pretrained(tmp_path)
    torch.manual_seed(0)
    device = torch.device("cuda")
    reference = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).to(device).eval()
    model = empty_transformers_model(tmp_path, dtype=torch.bfloat16)
    how = TrainerModelConfig(ac=ActivationCheckpointConfig(), compile=CompileConfig() if compiled else None)
    memory.apply(model, how, device)
    model.to_empty(device=device)
    load_hf_tensors(model, ((name, parameter.detach()) for name, parameter in reference.named_parameters()))

    rows = [torch.randint(3, 512, (length,), device=device) for length in LENGTHS]
    positions = torch.cat([torch.arange(length, device=device) for length in LENGTHS])
    attention = PackedAttention(LENGTHS, device, model.kernel)
    found = model(torch.cat(rows), positions, attention) @ model.head_weight.T
    expected = torch.cat([reference(input_ids=row[None], use_cache=False).logits[0] for row in rows])
    torch.testing.assert_close(found, expected, rtol=0.05, atol=0.02)
    found.float().square().mean().backward()
    assert all(parameter.grad is not None and parameter.grad.isfinite().all() for parameter in model.parameters())
