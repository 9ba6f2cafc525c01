import json

import pytest

from prime_rl.config.compat.vllm_flags import ALL
from prime_rl.config.inference import InferenceConfig
from prime_rl.errors import ConfigError
from prime_rl.inference.vllm.arguments import (
    ELSEWHERE,
    FORCED,
    GIB,
    Facts,
    arguments,
    check_known,
    command_line,
)

GPU = Facts(model_dir="/models/m", on_cpu=False)
CPU = Facts(model_dir="/models/m", on_cpu=True)


def found(facts=GPU, **fields):
    return arguments(InferenceConfig.model_validate({"model": {"name": "org/m"}, **fields}), facts)


def test_the_model_is_served_under_the_name_that_the_configuration_gives_it():
    assert found()["model"] == "/models/m"
    assert found()["served_model_name"] == ["org/m"]


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"model": {"max_model_len": 512}}, {"max_model_len": 512}),
        ({"model": {"dtype": "float16"}}, {"dtype": "float16"}),
        ({"model": {"enforce_eager": True}}, {"enforce_eager": True}),
        ({"model": {"trust_remote_code": True}}, {"trust_remote_code": True}),
        (
            {"model": {"enable_auto_tool_choice": True, "tool_call_parser": "qwen3_xml"}},
            {"enable_auto_tool_choice": True, "tool_call_parser": "qwen3_xml"},
        ),
        ({"model": {"reasoning_parser": "qwen3"}}, {"reasoning_parser": "qwen3"}),
        ({"parallel": {"tp": 2, "dp": 3}}, {"tensor_parallel_size": 2, "data_parallel_size": 3}),
        (
            {"enable_expert_parallel": True, "all2all_backend": "deepep_low_latency", "enable_eplb": True},
            {"enable_expert_parallel": True, "all2all_backend": "deepep_low_latency", "enable_eplb": True},
        ),
        ({"gpu_memory_utilization": 0.5}, {"gpu_memory_utilization": 0.5}),
        ({"kv_cache_memory_gb": 1.5}, {"kv_cache_memory_bytes": 3 * GIB // 2}),
        ({"kv_cache_offload": {"cpu": {"num_bytes": 2 * GIB}}}, {"kv_offloading_size": 2.0}),
        ({"enable_prefix_caching": False}, {"enable_prefix_caching": False}),
        ({"block_size": 32}, {"block_size": 32}),
        ({"max_num_seqs": 7, "max_num_batched_tokens": 99}, {"max_num_seqs": 7, "max_num_batched_tokens": 99}),
        ({"seed": 5}, {"seed": 5}),
        ({"enable_return_routed_experts": True}, {"enable_return_routed_experts": True}),
        (
            {"enable_lora": True, "max_loras": 3, "max_cpu_loras": 2, "max_lora_rank": 64},
            {"enable_lora": True, "max_loras": 3, "max_cpu_loras": 3, "max_lora_rank": 64},
        ),
        ({"vllm": {"quantization": "fp8", "max_logprobs": 50}}, {"quantization": "fp8", "max_logprobs": 50}),
    ],
)
def test_every_key_has_its_argument(fields, expected):
    result = found(**fields)
    assert {name: result.get(name) for name in expected} == expected


def test_what_is_left_alone_is_left_to_vllm():
    silent = ("block_size", "max_num_seqs", "max_num_batched_tokens", "kv_cache_memory_bytes", "data_parallel_size")
    assert not {*silent, "tool_call_parser", "all2all_backend", "max_loras", "hf_overrides"} & set(found())


def test_the_type_is_that_of_the_trainer_unless_it_is_given():
    assert found()["dtype"] == "bfloat16"
    assert found(CPU)["dtype"] == "float32"
    assert found(CPU, model={"dtype": "bfloat16"})["dtype"] == "bfloat16"


def test_the_cpu_gets_a_small_cache_unless_somebody_says_otherwise():
    assert found(CPU)["kv_cache_memory_bytes"] == GIB
    assert found(CPU, kv_cache_memory_gb=0.25)["kv_cache_memory_bytes"] == GIB // 4
    of_user = Facts(model_dir="/models/m", on_cpu=True, has_cpu_kv_space=True)
    assert "kv_cache_memory_bytes" not in found(of_user)
    assert "gpu_memory_utilization" not in found(CPU)


def test_rope_scaling_keeps_the_rest_of_the_models_own():
    facts = Facts(model_dir="/models/m", on_cpu=False, rope_parameters={"rope_theta": 1e6, "rope_type": "default"})
    wanted = {"rope_parameters": {"rope_theta": 1e6, "rope_type": "yarn", "factor": 4.0}}
    assert found(facts, model={"rope_scaling": {"type": "yarn", "factor": 4.0}})["hf_overrides"] == wanted
    text = json.dumps({"rope_type": "yarn", "factor": 4.0})
    assert found(facts, model={"rope_scaling": text})["hf_overrides"] == wanted
    with pytest.raises(ConfigError, match=r"model\.rope_scaling must be a table"):
        found(facts, model={"rope_scaling": "yarn"})


def test_what_the_server_cannot_do_without_is_always_there():
    result = found()
    assert result["logprobs_mode"] == "processed_logprobs"
    assert result["generation_config"] == "vllm"
    assert result["api_server_count"] == 1
    assert result["max_logprobs"] >= 20


@pytest.mark.parametrize("name", sorted(FORCED))
def test_forced_arguments_are_refused_with_the_reason(name):
    value, why = FORCED[name]
    assert found(vllm={name: value}).get(name, value) == value
    with pytest.raises(ConfigError) as caught:
        found(vllm={name: "other"})
    assert f"inference.vllm.{name}" in str(caught.value)
    assert why in str(caught.value)


@pytest.mark.parametrize("name", sorted(ELSEWHERE))
def test_what_has_a_key_of_ours_is_said_there(name):
    with pytest.raises(ConfigError, match=f"say it as inference.{ELSEWHERE[name]}"):
        found(vllm={name: "x"})


def test_an_unknown_name_gets_the_nearest_one():
    check_known({"max_num_seqs"}, ALL, "0.29.0")
    with pytest.raises(ConfigError) as caught:
        check_known({"quantisation", "seed"}, ALL, "0.29.0")
    said = "inference.vllm.quantisation: vLLM 0.29.0 has no such argument; did you mean quantization?"
    assert str(caught.value) == said
    with pytest.raises(ConfigError, match="see `vllm serve --help=all`"):
        check_known({"zzzzzzzz"}, ALL, "0.29.0")


def test_arguments_are_written_as_vllms_parser_reads_them():
    words = command_line(
        {
            "model": "/m",
            "enforce_eager": True,
            "enable_prefix_caching": False,
            "served_model_name": ["a", "b"],
            "hf_overrides": {"x": [1]},
            "seed": 3,
        }
    )
    assert words == [
        "--model=/m",
        "--enforce-eager",
        "--no-enable-prefix-caching",
        *("--served-model-name", "a", "b"),
        '--hf-overrides={"x": [1]}',
        "--seed=3",
    ]


def test_every_argument_that_we_name_is_one_of_vllms():
    everything = found(
        CPU,
        model={"max_model_len": 9, "enforce_eager": True, "trust_remote_code": True, "enable_auto_tool_choice": True},
        parallel={"dp": 2},
        enable_expert_parallel=True,
        enable_eplb=True,
        enable_lora=True,
        kv_cache_offload={},
        enable_return_routed_experts=True,
        block_size=32,
        max_num_seqs=1,
        max_num_batched_tokens=9,
    )
    assert set(everything) <= ALL
    assert set(FORCED) | set(ELSEWHERE) <= ALL


@pytest.mark.parametrize(
    "fields",
    [
        {"enable_lora": True, "model": {"name": "org/m", "dtype": "float32"}},
        {"vllm": {"enable_lora": True, "dtype": "float"}},
        {"enable_lora": True, "vllm": {"dtype": "float32"}},
    ],
)
def test_adapters_in_float32_are_refused_where_vllm_has_no_kernels_for_them(fields):
    with pytest.raises(ConfigError, match=r"enable_lora.*inference\.model\.dtype = 'bfloat16'"):
        found(**fields)
    assert found(CPU, **fields)["enable_lora"] is True
    assert found(**{**fields, "vllm": {"enable_lora": True, "dtype": "float16"}})["dtype"] == "float16"


@pytest.mark.parametrize(
    ("dtype", "lora_dtype", "is_refused"),
    [
        ("bfloat16", "float32", True),
        ("bfloat16", "float16", True),
        ("auto", "float16", True),
        ("bfloat16", "bfloat16", False),
        ("bfloat16", "auto", False),
        ("float16", "half", False),
    ],
)
def test_adapters_in_another_type_than_the_model_are_refused_where_vllm_has_no_kernels_for_them(
    dtype, lora_dtype, is_refused
):
    fields = {"model": {"name": "org/m", "dtype": dtype}, "enable_lora": True, "vllm": {"lora_dtype": lora_dtype}}
    assert found(CPU, **fields)["lora_dtype"] == lora_dtype
    if is_refused:
        with pytest.raises(ConfigError, match=rf"inference\.vllm\.lora_dtype is {lora_dtype}: on a GPU"):
            found(**fields)
    else:
        assert found(**fields)["lora_dtype"] == lora_dtype
