from prime_rl.config.compat import vllm_flags
from prime_rl.config.inference import InferenceConfig
from prime_rl.config.schema import find


def test_every_name_is_listed_once():
    kinds = (vllm_flags.SWITCHES, vllm_flags.LISTS, vllm_flags.SINGLE)
    assert sum(map(len, kinds)) == len(vllm_flags.ALL) > 250


def test_an_argument_that_is_a_key_of_ours_leads_there():
    for name, key in vllm_flags.OURS.items():
        assert name in vllm_flags.ALL
        assert find(InferenceConfig, tuple(key.split("."))), key
    same = vllm_flags.ALL & set(InferenceConfig.model_fields) - {"model"}
    assert {name for name, key in vllm_flags.OURS.items() if name == key} == same
