import subprocess
import sys
from pathlib import Path

import pytest

from prime_rl.config.inference import InferenceConfig
from prime_rl.config.load import load
from prime_rl.config.optim import CosineSchedulerConfig, LinearSchedulerConfig
from prime_rl.config.roots import RLConfig
from prime_rl.config.trainer import SFTConfig, TrainerConfig
from prime_rl.config.writing import to_toml, write_toml
from prime_rl.errors import ConfigError

RL_TOML = """\
max_steps = 20
seq_len = 128

[model]
name = "tiny"

[trainer.optim]
lr = 1e-3

[orchestrator]
batch_size = 32
rollouts_per_example = 8

[[orchestrator.env]]
id = "reverse-text"
args = { max_words = 3 }

[[orchestrator.env]]
id = "other"

[inference]
"""


@pytest.fixture
def rl_toml(tmp_path: Path) -> Path:
    path = tmp_path / "rl.toml"
    path.write_text(RL_TOML)
    return path


def complaint(root, argv, environment=None) -> str:
    with pytest.raises(ConfigError) as caught:
        load(root, argv, environment or {})
    return str(caught.value)


def test_precedence_is_flag_then_last_file_then_first_file_then_variable_then_default(tmp_path):
    for size in ("8B", "14B"):
        (tmp_path / f"{size}.toml").write_text(f'[model]\nname = "Qwen3-{size}"\n')
    first, second = f"@{tmp_path}/8B.toml", f"@{tmp_path}/14B.toml"
    variable = {"PRIME_MODEL__NAME": "Qwen3-4B"}
    ladder = [
        ([first, second, "--model.name", "Qwen3-32B"], variable, "Qwen3-32B"),
        ([first, second], variable, "Qwen3-14B"),
        ([first], variable, "Qwen3-8B"),
        ([], variable, "Qwen3-4B"),
        ([], {}, "Qwen/Qwen3-0.6B"),
    ]
    for argv, environment, expected in ladder:
        assert load(InferenceConfig, argv, environment).model.name == expected


def test_flags_win_over_files_that_stand_behind_them(rl_toml):
    config = load(RLConfig, ["--max-steps", "5", "@", str(rl_toml)], {})
    assert config.max_steps == config.trainer.max_steps == 5


def test_the_root_fills_every_component(rl_toml):
    config = load(RLConfig, ["@", str(rl_toml)], {})
    assert config.inference is not None
    names = {config.model.name, config.trainer.model.name, config.orchestrator.model.name, config.inference.model.name}
    assert names == {"tiny"}
    assert config.trainer.max_steps == config.orchestrator.max_steps == 20
    assert config.trainer.model.seq_len == config.orchestrator.seq_len == 128


def test_a_value_set_on_one_component_is_lifted_to_the_others():
    config = load(RLConfig, ["--trainer.max-async-level", "3"], {})
    assert config.max_async_level == config.orchestrator.max_async_level == config.trainer.max_async_level == 3
    config = load(RLConfig, ["--orchestrator.max-steps", "7"], {})
    assert config.max_steps == config.orchestrator.max_steps == config.trainer.max_steps == 7


def test_two_values_of_one_fact_are_refused_naming_both_places(tmp_path):
    (tmp_path / "t.toml").write_text("max_steps = 3\n")
    (tmp_path / "o.toml").write_text("\nmax_steps = 4\n")
    text = complaint(RLConfig, ["--trainer", f"@{tmp_path}/t.toml", "--orchestrator", f"@{tmp_path}/o.toml"])
    assert f"trainer.max_steps is 3 ({tmp_path}/t.toml:1)" in text
    assert f"orchestrator.max_steps is 4 ({tmp_path}/o.toml:2)" in text
    assert "set max_steps only" in text
    assert "they are one value" in complaint(RLConfig, ["--max-steps", "5", "--trainer.max-steps", "6"])


@pytest.mark.parametrize("flag", ["--max-steps", "--trainer.max-steps", "--orchestrator.max-steps"])
def test_a_flag_changes_a_shared_value_of_files_wherever_it_is_set(tmp_path, flag):
    (tmp_path / "t.toml").write_text("max_steps = 3\n")
    (tmp_path / "o.toml").write_text("max_steps = 3\n")
    files = ["--trainer", f"@{tmp_path}/t.toml", "--orchestrator", f"@{tmp_path}/o.toml"]
    config = load(RLConfig, [*files, flag, "5"], {"PRIME_MAX_STEPS": "9"})
    assert (config.max_steps, config.trainer.max_steps, config.orchestrator.max_steps) == (5, 5, 5)
    assert load(RLConfig, files, {"PRIME_MAX_STEPS": "9"}).max_steps == 3
    assert load(RLConfig, [], {"PRIME_MAX_STEPS": "9"}).trainer.max_steps == 9


def test_one_value_may_be_written_in_two_ways(tmp_path):
    (tmp_path / "t.toml").write_text("[trainer]\noutput_dir = 'out/'\n[trainer.log]\nlevel = 'warn'\n")
    (tmp_path / "r.toml").write_text("output_dir = 'out'\n[log]\nlevel = 'warning'\n")
    config = load(RLConfig, [f"@{tmp_path}/t.toml", f"@{tmp_path}/r.toml"], {})
    assert (config.log.level, config.trainer.log.level) == ("warning", "warning")


def test_a_launched_process_reads_its_file_and_no_variables(monkeypatch):
    monkeypatch.setenv("PRIME_MAX_STEPS", "9")
    assert load(TrainerConfig, []).max_steps == 9
    monkeypatch.setenv("PRIME_RL_LAUNCHER", "1:2")
    assert load(TrainerConfig, []).max_steps is None


def test_a_component_that_is_off_stays_off():
    config = load(RLConfig, ["--model.name", "tiny"], {})
    assert config.inference is None


def test_the_defaults_of_shared_keys_agree_between_root_and_components():
    config = load(
        RLConfig,
        ["--inference", "--ckpt", "--wandb", "--teacher-inference", "--orchestrator.teacher-model.kl-weight", "1"],
        {},
    )
    for root_key, component_keys in RLConfig.shared.items():
        values = set()
        for key in (root_key, *component_keys):
            node = config
            for part in key.split("."):
                node = getattr(node, part)
            values.add(str(node))
        assert len(values) == 1, root_key


def test_the_orchestrator_talks_to_the_server_that_is_started():
    config = load(RLConfig, ["--inference.server.port", "8123"], {})
    assert config.orchestrator.client.base_url == ("http://localhost:8123/v1",)
    text = complaint(RLConfig, ["--inference", "--orchestrator.client.base-url", "http://localhost:9/v1"])
    assert "listens on port 8000" in text


def test_a_resolved_configuration_loads_back_to_itself(rl_toml, tmp_path):
    config = load(RLConfig, ["@", str(rl_toml), "--trainer.scheduler.type", "cosine"], {})
    write_toml(config, tmp_path / "resolved.toml")
    assert load(RLConfig, ["@", str(tmp_path / "resolved.toml")], {"PRIME_MAX_STEPS": "7"}) == config
    for name in ("trainer", "orchestrator", "inference"):
        part = getattr(config, name)
        (tmp_path / f"{name}.toml").write_text(to_toml(part))
        assert load(type(part), ["@", str(tmp_path / f"{name}.toml")], {}) == part


def test_a_written_configuration_is_for_its_owner_s_eyes_only(tmp_path):
    write_toml(load(InferenceConfig, ["--api-key", "secret"], {}), tmp_path / "inference.toml")
    assert (tmp_path / "inference.toml").stat().st_mode & 0o777 == 0o600


def test_what_a_writer_that_was_killed_has_left_goes_with_the_next(tmp_path):
    config = load(InferenceConfig, [], {})
    is_cut_off = "import os, pathlib; pathlib.Path.replace = lambda *_: os.kill(os.getpid(), 9)"
    write = "from prime_rl.config.writing import write_toml; from prime_rl.config.inference import InferenceConfig"
    writer = f"{is_cut_off}; {write}; write_toml(InferenceConfig(), pathlib.Path({str(tmp_path)!r}) / 'a.toml')"
    assert subprocess.run([sys.executable, "-c", writer], check=False).returncode == -9
    assert len(list(tmp_path.iterdir())) == 1, "half a file"
    write_toml(config, tmp_path / "a.toml")
    assert [file.name for file in tmp_path.iterdir()] == ["a.toml"]
    assert (tmp_path / "a.toml").stat().st_mode & 0o777 == 0o600


def test_section_files_nest_and_mix_with_dotted_flags(tmp_path):
    (tmp_path / "t.toml").write_text("[optim]\nlr = 2e-3\n")
    (tmp_path / "o.toml").write_text("batch_size = 64\n[[env]]\nid = 'a'\n")
    (tmp_path / "i.toml").write_text("")
    argv = ["--trainer", "@", f"{tmp_path}/t.toml", "--orchestrator", f"@{tmp_path}/o.toml"]
    argv += ["--inference", "@", f"{tmp_path}/i.toml", "--orchestrator.env.0.name", "b"]
    config = load(RLConfig, argv, {})
    assert config.trainer.optim.lr == 2e-3
    assert config.orchestrator.batch_size == 64
    assert config.orchestrator.env[0].id == "a"
    assert config.orchestrator.env[0].label == "b"
    assert config.inference is not None
    assert config.inference.server == InferenceConfig().server


def test_a_file_inherits_and_overrides_and_lists_are_replaced(tmp_path):
    (tmp_path / "base.toml").write_text(
        "[orchestrator]\nbatch_size = 64\n[[orchestrator.env]]\nid='a'\n[[orchestrator.env]]\nid='b'\n"
    )
    (tmp_path / "child.toml").write_text("toml_files = ['base.toml']\n[[orchestrator.env]]\nid='c'\n")
    config = load(RLConfig, [f"@{tmp_path}/child.toml"], {})
    assert config.orchestrator.batch_size == 64
    assert [env.id for env in config.orchestrator.env] == ["c"]


def test_files_that_inherit_in_a_circle_are_refused(tmp_path):
    (tmp_path / "a.toml").write_text("toml_files = ['b.toml']\n")
    (tmp_path / "b.toml").write_text("toml_files = ['a.toml']\n")
    assert "leads back to this file" in complaint(RLConfig, [f"@{tmp_path}/a.toml"])


@pytest.mark.parametrize(
    ("argv", "expected"),
    [
        pytest.param(["--trainer.optm.lr", "3"], "did you mean trainer.optim.lr?", id="misspelt section"),
        pytest.param(["--max-stps", "3"], "did you mean max_steps?", id="misspelt key"),
        pytest.param(["--orchestrator.env.0.idd", "x"], "did you mean orchestrator.env.0.id?", id="inside a list"),
        pytest.param(["--max-steps", "soon"], "got 'soon' (--max-steps)", id="wrong type"),
        pytest.param(["--max-steps"], "--max-steps: needs a value", id="no value"),
        pytest.param(["--trainer.scheduler", "cosine"], "is a table with the keys", id="a string for a table"),
        pytest.param(["--orchestrator.env.0.args", "{x}"], "neither JSON", id="bad JSON"),
        pytest.param(["@missing.toml"], "missing.toml: no such file", id="missing file"),
        pytest.param(["@"], "'@': must be followed by a TOML file", id="no file name"),
        pytest.param(["max_steps=3"], "expected --key value or @ file.toml", id="no dashes"),
        pytest.param(
            ["--orchestrator.batch-size", "33", "--orchestrator.rollouts-per-example", "8"],
            "try batch_size 32",
            id="groups",
        ),
        pytest.param(["--trainer.scheduler.type", "cosine"], "needs max_steps", id="schedule without end"),
        pytest.param(["--orchestrator.sampling.temperature", "0"], "greedy", id="greedy training"),
        pytest.param(
            ["--orchestrator.sampling.extra-body", '{"top_p": 0.9}'], "importance ratio", id="truncated sampling"
        ),
        *(
            pytest.param(["--orchestrator.sampling.extra-body", field], "importance ratio", id=f"bent sampling {field}")
            for field in (
                *('{"top_k": 20}', '{"min_p": 0.1}', '{"presence_penalty": 1}', '{"logit_bias": {"5": 3}}'),
                *('{"allowed_token_ids": [5]}', '{"structured_outputs": {"json": {}}}', '{"guided_choice": ["a"]}'),
                *('{"response_format": {"type": "json_object"}}', '{"thinking_token_budget": 9}'),
                *('{"vllm_xargs": {"x": 1}}', '{"use_beam_search": true}'),
            )
        ),
        pytest.param(["--orchestrator.sampling.min-tokens", "2"], "importance ratio", id="masked stop token"),
        pytest.param(["--inference", "--inference.server.port", "0"], "name the port", id="port 0 under rl"),
        pytest.param(["--orchestrator.env.9999999.id", "x"], "a new one would be 0", id="far list entry"),
        pytest.param(["--orchestrator.client.base-url", "http://h:x/v1"], "no valid port", id="bad port"),
        pytest.param(["--trainer-gpu-ids", "0,0"], "different indices", id="a GPU twice"),
    ],
)
def test_a_mistake_is_answered_with_the_key_and_the_fix(argv, expected):
    assert expected in complaint(RLConfig, argv)


def test_what_leaves_the_distribution_as_it_is_may_be_said():
    body = (
        '{"top_p": 1.0, "top_k": -1, "min_p": 0, "logit_bias": {}, "bad_words": [], "response_format": '
        '{"type": "text"}, "structured_outputs": null, "ignore_eos": true, "stop": ["."]}'
    )
    sampling = load(RLConfig, ["--orchestrator.sampling.extra-body", body], {}).orchestrator.sampling
    assert sampling.extra_body["ignore_eos"] is True


def test_a_shared_mistake_is_said_once():
    assert len(complaint(RLConfig, ["--max-steps", "soon"]).splitlines()) == 1


def test_a_complaint_about_a_file_names_the_line(tmp_path):
    path = tmp_path / "bad.toml"
    path.write_text('[trainer]\nmax_stepz = 3\n\n[[orchestrator.env]]\nid = "a"\n[[orchestrator.env]]\nid = 7\n')
    text = complaint(RLConfig, [f"@{path}"])
    assert f"trainer.max_stepz: no such key ({path}:2); did you mean trainer.max_steps?" in text
    assert f"orchestrator.env.1.id: must be text, got 7 ({path}:7)" in text


def test_invalid_toml_names_the_file(tmp_path):
    (tmp_path / "bad.toml").write_text("a = = 1\n")
    assert "not valid TOML" in complaint(RLConfig, [f"@{tmp_path}/bad.toml"])


def test_variables_of_other_programs_are_ignored_and_misspelt_ones_are_not():
    foreign = {"PRIME_API_KEY": "x", "PRIME_RL_LAUNCHER": "1:2", "PRIME_ZZZZ__QQQQ": "1"}
    assert load(RLConfig, [], foreign).max_steps is None
    assert load(InferenceConfig, [], foreign).api_key is None
    assert "did you mean model" in complaint(RLConfig, [], {"PRIME_MODLE__NAME": "x"})


def test_flags_read_booleans_lists_tables_and_nulls():
    config = load(
        RLConfig, ["--clean", "--max-steps", "None", "--inference", "--no-inference.enable-prefix-caching"], {}
    )
    assert config.clean
    assert config.max_steps is None
    assert config.inference is not None
    assert not config.inference.enable_prefix_caching
    assert not load(RLConfig, ["--clean", "--no-clean"], {}).clean
    assert load(RLConfig, ["--inference", "--no-inference"], {}).inference is None
    assert load(RLConfig, ["--inference-gpu-ids", "3"], {}).inference_gpu_ids == (3,)
    json, literal = '{"a": [1]}', "{'a': [1]}"
    for text in (json, literal):
        assert load(RLConfig, ["--orchestrator.env.args", text], {}).orchestrator.env[0].args == {"a": [1]}
    assert load(SFTConfig, ["--data.splits", "a", "b", "--seed", "3"], {}).data.splits == ("a", "b")
    assert load(SFTConfig, ["--data.splits=a,b"], {}).data.splits == ("a", "b")


def test_values_inside_a_free_table_are_what_they_look_like():
    argv = ["--orchestrator.env.0.args.max_chars", "16", "--orchestrator.env.0.args.split", "train"]
    assert load(RLConfig, argv, {}).orchestrator.env[0].args == {"max_chars": 16, "split": "train"}


def test_the_orchestrator_finds_a_server_that_is_bound_to_an_address():
    config = load(RLConfig, ["--inference.server.host", "10.0.0.5", "--inference.api-key", "k"], {})
    assert config.orchestrator.client.base_url == ("http://10.0.0.5:8000/v1",)


def test_kebab_and_snake_case_and_equals_are_one():
    for argv in (["--max-async-level", "2"], ["--max_async_level", "2"], ["--max-async-level=2"]):
        assert load(TrainerConfig, argv, {}).max_async_level == 2


def test_the_scheduler_is_chosen_by_its_type():
    config = load(
        TrainerConfig, ["--scheduler.type", "linear", "--scheduler.warmup-steps", "2", "--max-steps", "50"], {}
    )
    assert config.scheduler == LinearSchedulerConfig(warmup_steps=2)
    config = load(TrainerConfig, ["--scheduler.type", "cosine", "--max-steps", "50"], {})
    assert config.scheduler == CosineSchedulerConfig()


def test_infinities_in_a_free_table_survive_being_written(tmp_path):
    config = load(RLConfig, ["--orchestrator.env.args", '{"limit": Infinity}'], {})
    write_toml(config, tmp_path / "rl.toml")
    assert load(RLConfig, ["@", str(tmp_path / "rl.toml")], {}) == config
