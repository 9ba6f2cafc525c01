"""What `--explain KEY` says: the value, its place, the documentation, and why there is no value."""

from pathlib import Path

import pytest

from prime_rl.config.evals import EvalConfig
from prime_rl.config.explain import explain
from prime_rl.config.inference import InferenceConfig
from prime_rl.config.load import resolve
from prime_rl.config.orchestrator import OrchestratorConfig
from prime_rl.config.roots import RLConfig
from prime_rl.config.trainer import TrainerConfig
from prime_rl.errors import ConfigError

FILE = "max_steps = 5\n\n[optim]\nlr = 2e-3\n"


@pytest.fixture(autouse=True)
def _in_an_empty_directory(tmp_path: Path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "t.toml").write_text(FILE)


def explained(root, key: str, *argv: str, environment=None) -> list[str]:
    return explain(root, resolve(root, argv, environment or {}), key).splitlines()


@pytest.mark.parametrize(
    ("argv", "environment", "value", "place"),
    [
        pytest.param(["@", "t.toml"], {}, "0.002", "t.toml:4", id="file"),
        pytest.param(["--optim.lr", "1"], {}, "1.0", "--optim.lr", id="flag"),
        pytest.param([], {"PRIME_OPTIM__LR": "3"}, "3.0", "variable PRIME_OPTIM__LR", id="variable"),
        pytest.param([], {}, "1e-06", "default", id="default"),
    ],
)
def test_a_key_has_a_value_a_place_a_type_with_its_range_and_a_documentation(argv, environment, value, place):
    assert explained(TrainerConfig, "optim.lr", *argv, environment=environment) == [
        f"optim.lr = {value}",
        f"  from: {place}",
        "  type: FLOAT >= 0, default 1e-06",
        "  Learning rate at its peak.",
    ]


@pytest.mark.parametrize(
    ("root", "key", "shown"),
    [
        (TrainerConfig, "log.file", "log.file = true"),
        (TrainerConfig, "output_dir", 'output_dir = "outputs"'),
        (TrainerConfig, "max_steps", "max_steps = None"),
        (OrchestratorConfig, "buffer.hash_keys", 'buffer.hash_keys = ["task", "prompt"]'),
        (OrchestratorConfig, "env.0.args", "env.0.args = {}"),
    ],
)
def test_values_are_shown_as_a_file_has_them(root, key, shown):
    assert explained(root, key)[0] == shown


def test_a_section_shows_every_key_in_it_with_its_own_place():
    lines = explained(TrainerConfig, "optim", "@", "t.toml")
    assert lines[:2] == ["[optim]", "  AdamW (arXiv 1711.05101) with clipping of the gradient norm."]
    assert "optim.lr = 0.002  (t.toml:4)" in lines
    assert "optim.betas1 = 0.9  (default)" in lines


@pytest.mark.parametrize(
    ("argv", "place"),
    [
        (["--ckpt"], "--ckpt"),
        (["--ckpt.interval", "3"], "--ckpt.interval"),
        (["--trainer.ckpt"], "--trainer.ckpt"),
        (["@", "c.toml"], "c.toml:2"),
    ],
)
def test_a_section_that_is_on_says_where_it_was_switched_on(argv, place):
    Path("c.toml").write_text("\n[ckpt]\n")
    lines = explained(RLConfig, "ckpt", *argv)
    assert lines[:2] == ["[ckpt] is on", f"  from: {place}"]
    assert any(line.startswith("ckpt.interval = ") for line in lines)


@pytest.mark.parametrize(("argv", "place"), [([], "default"), (["--no-ckpt"], "--no-ckpt")])
def test_a_section_that_is_off_says_so_where_from_and_how_to_switch_it_on(argv, place):
    lines = explained(RLConfig, "ckpt", *argv)
    assert lines[:2] == ["ckpt = None (off)", f"  from: {place}"]
    assert "  Checkpoints of trainer and orchestrator, from which a run is resumed." in lines
    assert lines[-1] == "  switch it on with --ckpt, or with [ckpt] in a file; --help ckpt tells its keys"


def test_a_key_of_a_section_that_is_off_has_no_value_and_still_its_documentation():
    lines = explained(TrainerConfig, "model.lora.rank", "--no-model.lora")
    assert lines[0] == "model.lora.rank has no value: model.lora is off (--no-model.lora)"
    assert "--model.lora" in lines[1]
    assert lines[2:4] == ["  type: INT >= 1, default 16", "  Rank of an adapter. vLLM serves ranks up to 512."]


def test_a_key_of_another_type_of_its_section_names_that_type():
    lines = explained(TrainerConfig, "optim.mu", "--optim.type", "adamw")
    assert lines[:2] == [
        "optim.mu has no value: optim.type is adamw (--optim.type)",
        "  it is a key of optim.type muon: choose that with --optim.type ...",
    ]
    assert "  Momentum of the matrices' updates." in lines
    assert "sgd or muon" not in "".join(lines)


def test_a_list_of_tables_shows_the_keys_of_each_entry_with_their_own_places():
    Path("e.toml").write_text("[[env]]\nid = 'a'\nargs = {n = 1, l = ['x', true]}\n[[env]]\nid = 'b'\n")
    lines = explained(OrchestratorConfig, "env", "@", "e.toml", "--env.1.args.m", "2")
    assert lines[:2] == ["env: 2 entries", "  from: e.toml:1"]
    assert {
        'env.0.id = "a"  (e.toml:2)',
        "env.0.args.n = 1  (e.toml:3)",
        'env.0.args.l = ["x", true]  (e.toml:3)',
        'env.1.id = "b"  (e.toml:5)',
        "env.1.args.m = 2  (--env.1.args.m)",
        "env.1.name = None  (default)",
    } <= set(lines)
    assert explained(OrchestratorConfig, "filters")[0] == "filters = []"


def test_one_entry_of_a_list_of_tables_and_the_first_where_none_is_named():
    argv = ["--env.0.id", "a", "--env.1.id", "b"]
    assert explained(OrchestratorConfig, "env.1.id", *argv)[:2] == ['env.1.id = "b"', "  from: --env.1.id"]
    assert explained(OrchestratorConfig, "env.1", *argv)[2] == 'env.1.id = "b"  (--env.1.id)'
    assert explained(OrchestratorConfig, "env.id", *argv)[0] == 'env.0.id = "a"'


def test_an_entry_that_is_not_there_is_refused_with_how_many_there_are():
    with pytest.raises(ConfigError, match=r"^env has no entry 5: there is 1 \(--env\.0\.id\)$"):
        explained(OrchestratorConfig, "env.5", "--env.0.id", "a")
    with pytest.raises(ConfigError, match="env has no entry 2: there are 2"):
        explained(OrchestratorConfig, "env.2.id", "--env.0.id", "a", "--env.1.id", "b")


def test_a_key_of_a_free_table():
    argv = ["--vllm.quantization", "fp8"]
    assert explained(InferenceConfig, "vllm.quantization", *argv)[:2] == [
        'vllm.quantization = "fp8"',
        "  from: --vllm.quantization",
    ]
    lines = explained(InferenceConfig, "vllm.other", *argv)
    assert lines[0] == "vllm.other is not set: vllm is a free table (--vllm.quantization)"


@pytest.mark.parametrize(
    ("root", "key", "argv", "note"),
    [
        (TrainerConfig, "model.ep", [], "other values come with mixtures of experts and context parallelism"),
        (TrainerConfig, "heartbeat", [], "comes with monitors"),
        (TrainerConfig, "wandb.project", ["--wandb"], "comes with monitors"),
    ],
)
def test_a_key_that_waits_for_something_says_so(root, key, argv, note):
    assert any(line.startswith(f"  Later: {note}") for line in explained(root, key, *argv))


@pytest.mark.parametrize("key", ["optim", "optim.lr", "model.seq_len"])
def test_a_key_that_is_built_waits_for_nothing(key):
    assert not any("Later" in line for line in explained(TrainerConfig, key))


def test_older_spellings_lead_to_the_key_that_they_are_now():
    argv = ["--environment.id", "a"]
    assert explained(OrchestratorConfig, "environment.id", *argv)[:2] == ['env.0.id = "a"', "  from: --environment.id"]
    (line,) = explained(RLConfig, "exp_id", "--exp-id", "x")
    assert line.startswith("exp_id is an older key, which sets others")


@pytest.mark.parametrize(
    ("root", "key", "expected"),
    [
        (TrainerConfig, "optim.lrr", "did you mean optim.lr?"),
        (OrchestratorConfig, "env.\u00b2.id", "no such key"),
        (EvalConfig, "sampling.temprature", "did you mean sampling.temperature?"),
    ],
)
def test_an_unknown_key_is_refused_with_the_nearest(root, key, expected):
    with pytest.raises(ConfigError) as caught:
        explained(root, key)
    assert expected in str(caught.value)
