import json
import math

import pytest
import torch

from prime_rl.errors import ModelError
from prime_rl.models.lora import (
    AdapterConfig,
    adapter_tensors,
    factors_of,
    is_adapter,
    merge,
    read_config,
    write_config,
)

WRITTEN_BY_PEFT = {
    "alpha_pattern": {},
    "auto_mapping": None,
    "base_model_name_or_path": "base",
    "bias": "none",
    "corda_config": None,
    "eva_config": None,
    "exclude_modules": None,
    "fan_in_fan_out": False,
    "inference_mode": True,
    "init_lora_weights": True,
    "layer_replication": None,
    "layers_pattern": None,
    "layers_to_transform": None,
    "loftq_config": {},
    "lora_alpha": 12,
    "lora_bias": False,
    "lora_dropout": 0.0,
    "megatron_config": None,
    "modules_to_save": None,
    "peft_type": "LORA",
    "r": 4,
    "rank_pattern": {},
    "revision": None,
    "target_modules": ["v_proj", "q_proj"],
    "task_type": "CAUSAL_LM",
    "trainable_token_indices": None,
    "use_dora": False,
    "use_rslora": False,
}
CONFIG = AdapterConfig(rank=4, alpha=12.0, target_modules=("v_proj", "q_proj"))
MODULE = "model.layers.0.self_attn.q_proj"


def config_dir(tmp_path, **changes):
    (tmp_path / "adapter_config.json").write_text(json.dumps(WRITTEN_BY_PEFT | changes))
    return tmp_path


def draw(*shape, seed=0, dtype=torch.float32):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def factors(dtype=torch.float32):
    return {
        MODULE: (draw(4, 6, seed=1, dtype=dtype), draw(8, 4, seed=2, dtype=dtype)),
        "model.layers.0.self_attn.v_proj": (draw(4, 6, seed=3, dtype=dtype), draw(5, 4, seed=4, dtype=dtype)),
    }


def base(dtype=torch.float32):
    return {
        f"{MODULE}.weight": draw(8, 6, seed=5, dtype=dtype),
        "model.layers.0.self_attn.v_proj.weight": draw(5, 6, seed=6, dtype=dtype),
        "model.layers.0.self_attn.v_proj.bias": draw(5, seed=7, dtype=dtype),
        "model.norm.weight": draw(6, seed=8, dtype=dtype),
    }


def test_a_config_that_peft_wrote_is_read(tmp_path):
    assert read_config(config_dir(tmp_path)) == CONFIG


def test_a_config_that_we_write_says_the_same_when_read(tmp_path):
    for config in (CONFIG, AdapterConfig(rank=2, alpha=3.5, target_modules="all-linear", use_rslora=True)):
        write_config(config, tmp_path, base_model="base")
        assert read_config(tmp_path) == config


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"r": 0}, "r must be a whole number"),
        ({"r": True}, "r must be a whole number"),
        ({"lora_alpha": None}, "lora_alpha must be a number"),
        ({"target_modules": []}, "target_modules must be a list"),
        ({"target_modules": "("}, "no regular expression"),
        ({"peft_type": "IA3"}, "peft_type = 'IA3' is not supported"),
        ({"use_dora": True}, "use_dora = True is not supported"),
        ({"modules_to_save": ["lm_head"]}, r"modules_to_save = \['lm_head'\] is not supported"),
        ({"rank_pattern": {"q_proj": 8}}, "rank_pattern"),
        ({"alpha_pattern": {"q_proj": 8}}, "alpha_pattern"),
        ({"bias": "all"}, "bias = 'all'"),
        ({"init_lora_weights": "pissa_niter_16"}, "changes the base model"),
    ],
)
def test_what_would_change_the_result_and_is_not_built_is_refused_by_key(tmp_path, changes, says):
    with pytest.raises(ModelError, match=f"adapter_config.json.*{says}"):
        read_config(config_dir(tmp_path, **changes))


def test_a_config_that_is_no_json_or_not_there_is_named(tmp_path):
    with pytest.raises(ModelError, match="cannot be read"):
        read_config(tmp_path)
    (tmp_path / "adapter_config.json").write_text("{")
    with pytest.raises(ModelError, match="not valid JSON"):
        read_config(tmp_path)
    (tmp_path / "adapter_config.json").write_text("[]")
    with pytest.raises(ModelError, match="must hold a JSON object"):
        read_config(tmp_path)
    assert not is_adapter(tmp_path)


@pytest.mark.parametrize(("rslora", "scale"), [(False, 3.0), (True, 6.0)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_merging_adds_the_scaled_product_in_float32(rslora, scale, dtype):
    config = AdapterConfig(rank=4, alpha=12.0, target_modules=("v_proj", "q_proj"), use_rslora=rslora)
    merged = dict(merge(base(dtype).items(), config, factors(dtype)))
    assert math.isclose(config.scale, scale)
    for module, (down, up) in factors(dtype).items():
        expected = base(dtype)[f"{module}.weight"].double() + scale * up.double() @ down.double()
        assert merged[f"{module}.weight"].dtype == torch.float32
        torch.testing.assert_close(merged[f"{module}.weight"].double(), expected, rtol=0, atol=1e-5)


def test_merging_passes_the_rest_on_and_leaves_the_base_as_it_was():
    kept = base()
    merged = dict(merge(kept.items(), CONFIG, factors()))
    assert list(merged) == list(kept)
    for name in ("model.layers.0.self_attn.v_proj.bias", "model.norm.weight"):
        assert merged[name] is kept[name]
    assert all(torch.equal(kept[name], tensor) for name, tensor in base().items())


def test_an_adapter_of_zeros_changes_nothing():
    zeros = {module: (down, torch.zeros_like(up)) for module, (down, up) in factors().items()}
    merged = dict(merge(base().items(), CONFIG, zeros))
    assert all(torch.equal(merged[name], tensor) for name, tensor in base().items())


def test_factors_travel_under_pefts_names():
    tensors = adapter_tensors(factors())
    assert f"base_model.model.{MODULE}.lora_A.weight" in tensors
    found = factors_of(CONFIG, tensors)
    assert found.keys() == factors().keys()
    for module, (down, up) in factors().items():
        assert torch.equal(found[module][0], down)
        assert torch.equal(found[module][1], up)


@pytest.mark.parametrize(
    ("tensors", "says"),
    [
        ({}, "holds no tensors"),
        ({"base_model.model.lm_head.weight": draw(4, 4)}, "lm_head.weight is none of a LoRA"),
        ({"model.layers.0.self_attn.q_proj.lora_A.weight": draw(4, 4)}, "is none of a LoRA"),
        ({"base_model.model.embed_tokens.lora_embedding_A": draw(4, 4)}, "is none of a LoRA"),
        ({f"base_model.model.{MODULE}.lora_A.weight": draw(4, 6)}, "only one of lora_A and lora_B for model.layers.0"),
        ({f"base_model.model.{MODULE}.lora_A.weight": draw(3, 6)}, r"shape \(3, 6\), which is not of rank r = 4"),
        ({f"base_model.model.{MODULE}.lora_B.weight": draw(8, 3)}, r"shape \(8, 3\), which is not of rank r = 4"),
        ({"base_model.model.model.mlp.up_proj.lora_A.weight": draw(4, 6)}, "is of no module in target_modules"),
    ],
)
def test_tensors_that_are_none_of_the_adapter_are_named(tensors, says):
    with pytest.raises(ModelError, match=says):
        factors_of(CONFIG, tensors)


def test_an_adapter_of_another_model_is_refused():
    with pytest.raises(ModelError, match=r"q_proj\.weight make a matrix of \(8, 6\), the model's is \(9, 6\)"):
        list(merge((base() | {f"{MODULE}.weight": draw(9, 6)}).items(), CONFIG, factors()))
    without = {name: tensor for name, tensor in base().items() if name != f"{MODULE}.weight"}
    with pytest.raises(ModelError, match=rf"modules that the model has not: {MODULE}"):
        list(merge(without.items(), CONFIG, factors()))


@pytest.mark.parametrize(
    ("targets", "adapted"),
    [
        (("q_proj",), True),
        (("self_attn.q_proj",), True),
        (("_proj",), False),
        ("all-linear", True),
        (r".*\.(q|v)_proj", True),
        ("q_proj", False),  # a string is a pattern of the whole name
    ],
)
def test_target_modules_are_read_as_peft_reads_them(targets, adapted):
    assert AdapterConfig(rank=1, alpha=1.0, target_modules=targets).adapts(MODULE) == adapted
