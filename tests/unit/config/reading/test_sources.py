import pytest

from prime_rl.config.evals import EvalConfig
from prime_rl.config.inference import InferenceConfig
from prime_rl.config.load import load, resolve
from prime_rl.config.orchestrator import OrchestratorConfig
from prime_rl.config.reading.sources import Setting, env_settings, merge
from prime_rl.config.roots import RLConfig
from prime_rl.config.trainer import SFTConfig, TrainerConfig
from prime_rl.errors import ConfigError


def complaint(root, argv, environment=None) -> str:
    with pytest.raises(ConfigError) as caught:
        load(root, argv, environment or {})
    return str(caught.value)


def test_later_layers_win_and_tables_merge():
    files = [Setting(("optim",), {"lr": 1.0, "max-norm": 2.0}, "a.toml:1"), Setting(("optim", "lr"), 3.0, "b.toml:1")]
    values = merge(TrainerConfig, files, [Setting(("optim",), {"lr": 4.0}, "--optim")])
    assert values.tree == {"optim": {"lr": 4.0, "max_norm": 2.0}}
    assert values.origin(("optim", "lr")) == "--optim"
    assert values.origin(("optim", "max_norm")) == "a.toml:1"


def test_a_list_of_tables_is_replaced_whole_with_its_places(tmp_path):
    (tmp_path / "a.toml").write_text("[[env]]\nid = 'a'\n[[env]]\nid = 'b'\n[[env]]\nid = 'c'\n")
    (tmp_path / "b.toml").write_text("\n\n[[env]]\nid = 'd'\n")
    resolved = resolve(OrchestratorConfig, [f"@{tmp_path}/a.toml", f"@{tmp_path}/b.toml"], {})
    assert [env.id for env in resolved.config.env] == ["d"]
    assert resolved.values.origin(("env", 0, "id")) == f"{tmp_path}/b.toml:4"
    assert resolved.values.origin(("env", 2, "id")) == f"{tmp_path}/b.toml:3"


def test_a_flag_changes_or_adds_one_entry_of_a_list_of_tables(tmp_path):
    (tmp_path / "a.toml").write_text("[[env]]\nid = 'a'\n")
    argv = [f"@{tmp_path}/a.toml", "--env.0.name", "n", "--env.1.id", "b", "--env.args", '{"k": 1}']
    first, second = load(OrchestratorConfig, argv, {}).env
    assert (first.id, first.name, first.args, second.id) == ("a", "n", {"k": 1}, "b")
    config = load(OrchestratorConfig, [f"@{tmp_path}/a.toml", "--env", '[{"id": "x"}, {"id": "y"}]'], {})
    assert [env.id for env in config.env] == ["x", "y"]


def test_a_single_table_stands_for_a_list_of_one(tmp_path):
    (tmp_path / "a.toml").write_text("[env]\nid = 'a'\n[env.args]\nn = 1\n")
    config = load(OrchestratorConfig, [f"@{tmp_path}/a.toml"], {})
    assert [(env.id, env.args) for env in config.env] == [("a", {"n": 1})]


def test_a_table_where_a_list_of_numbers_belongs_is_complained_of_where_it_stands(tmp_path):
    (tmp_path / "a.toml").write_text("inference_gpu_ids = [0]\n")
    (tmp_path / "b.toml").write_text("\n[inference_gpu_ids]\na = 1\n")
    text = complaint(RLConfig, [f"@{tmp_path}/a.toml", f"@{tmp_path}/b.toml"])
    assert "got a table" in text
    assert f"({tmp_path}/b.toml:2)" in text


def test_keys_in_files_and_variables_may_be_written_with_dashes(tmp_path):
    (tmp_path / "a.toml").write_text("max-async-level = 2\n[optim]\nweight-decay = 0.5\n")
    config = load(TrainerConfig, [f"@{tmp_path}/a.toml"], {"PRIME_OPTIM__BETAS1": "0.5", "PRIME_MODEL__SEQ-LEN": "64"})
    assert (config.max_async_level, config.optim.weight_decay, config.optim.betas1, config.model.seq_len) == (
        *(2, 0.5, 0.5, 64),
    )


def test_an_empty_table_switches_a_section_on_and_the_word_none_off(tmp_path):
    (tmp_path / "a.toml").write_text("[ckpt]\n")
    (tmp_path / "b.toml").write_text('ckpt = "None"\n')
    a, b = f"@{tmp_path}/a.toml", f"@{tmp_path}/b.toml"
    assert load(TrainerConfig, [a], {}).ckpt is not None
    assert load(TrainerConfig, [a, b], {}).ckpt is None
    assert load(TrainerConfig, [b, a], {}).ckpt is not None
    assert load(TrainerConfig, [b], {"PRIME_CKPT__INTERVAL": "3"}).ckpt is None
    assert load(TrainerConfig, [], {"PRIME_CKPT": "{}"}).ckpt is not None


def test_variables_are_read_by_what_their_key_expects():
    variables = {
        "PRIME_ORCHESTRATOR__ENV__0__ID": "a",
        "PRIME_ORCHESTRATOR__ENV__0__ARGS__N": "3",
        "PRIME_ORCHESTRATOR__BUFFER__HASH_KEYS": "task,answer",
        "PRIME_INFERENCE__HEADLESS": "true",
        "PRIME_INFERENCE__DATA_PARALLEL_SIZE": "2",
        "PRIME_CLEAN": "true",
        "PRIME_MAX_STEPS": "None",
        "PRIME_TRAINER__MODEL__LORA": "{'rank': 8}",
    }
    resolved = resolve(RLConfig, [], variables)
    config = resolved.config
    assert (config.orchestrator.env[0].id, config.orchestrator.env[0].args) == ("a", {"n": 3})
    assert config.orchestrator.buffer.hash_keys == ("task", "answer")
    assert config.inference is not None
    assert (config.inference.vllm, config.inference.parallel.dp) == ({"headless": True}, 2)
    assert (config.clean, config.max_steps) == (True, None)
    assert config.trainer.model.lora is not None
    assert config.trainer.model.lora.rank == 8
    assert resolved.values.origin(("clean",)) == "variable PRIME_CLEAN"


def test_variables_of_other_programs_are_left_alone():
    foreign = {
        **dict.fromkeys(
            ["PRIME_API_KEY", "PRIME_TEAM_ID", "PRIME_USER_ID", "PRIME_CONTEXT", "PRIME_SSH_KEY_PATH"], "x"
        ),
        **dict.fromkeys(["PRIME_BASE_URL", "PRIME_API_BASE_URL", "PRIME_FRONTEND_URL", "PRIME_INFERENCE_URL"], "x"),
        **dict.fromkeys(["PRIME_DISABLE_VERSION_CHECK", "PRIME_INFERENCE_HOST"], "1"),
        "PRIME_CONVRT": "x",  # nearly an argument of vLLM's
        "PRIME_GPU_MEMORY_UTILISATION_": "x",
        "PRIME_ASINC_LEVEL": "1",  # nearly an older key
        "PRIME_LOGS": "x",  # one edit, but short
        "PRIME_MDLE": "x",  # two edits
        "PRIME_HOST": "x",
        "PRIME_LOG_LEVEL": "debug",
        "PRIME_RL_LAUNCHER": "1:2",
        "PRIME_ZZZZ__QQQQ": "1",
        "PRIME_": "1",
        "PRIME___X": "1",
        "PRIMEX_MAX_STEPS": "1",
        "MAX_STEPS": "1",
    }
    for root in (RLConfig, InferenceConfig, OrchestratorConfig, TrainerConfig, SFTConfig, EvalConfig):
        assert list(env_settings(root, foreign)) == []


@pytest.mark.parametrize(
    ("variable", "nearest"),
    [
        ("PRIME_MAX_STPES", "max_steps"),
        ("PRIME_CLAEN", "clean"),
        ("PRIME_TRAINER__OPTM__LR", "trainer.optim.lr"),
        ("PRIME_TRIANER__OPTIM__LR", "trainer.optim.lr"),
        ("PRIME_MODEL__NAM", "model.name"),
        ("PRIME_TRAINER__LR", "trainer.optim.lr"),
    ],
)
def test_a_misspelt_variable_is_answered_with_the_key(variable, nearest):
    assert f"(variable {variable}); did you mean {nearest}" in complaint(RLConfig, [], {variable: "1"})


def test_notices_are_said_once_in_the_order_of_the_sources(tmp_path):
    (tmp_path / "a.toml").write_text("async_level = 1\n")
    (tmp_path / "b.toml").write_text("async_level = 2\n")
    values = resolve(TrainerConfig, [f"@{tmp_path}/a.toml", f"@{tmp_path}/b.toml", "--async-level", "3"], {}).values
    assert values.notices == [
        f"{tmp_path}/a.toml:1: async_level is now max_async_level",
        "--async-level is now --max-async-level",
    ]


@pytest.mark.parametrize(
    "argv",
    [
        ["--orchestrator.env.args", '{"a":' * 60 + "1" + "}" * 60],
        ["--orchestrator.env.args.x", "[" * 60 + "]" * 60],
        ["--orchestrator.env.args." + ".".join("a" * 60), "1"],
    ],
)
def test_what_is_nested_beyond_measure_is_refused(argv):
    assert f"{argv[0]}: nested more than" in complaint(RLConfig, argv)
