"""What follows from what in the `rl` configuration, and what does not go together."""

from pathlib import Path

import pytest

from prime_rl.config.load import load, resolve
from prime_rl.config.roots import RLConfig
from prime_rl.config.writing import to_toml
from prime_rl.errors import ConfigError


def rl(*argv: str) -> RLConfig:
    return load(RLConfig, argv, {})


def complaint(root, *argv: str) -> str:
    with pytest.raises(ConfigError) as caught:
        load(root, argv, {})
    return str(caught.value)


def notices(*argv: str) -> list[str]:
    return resolve(RLConfig, argv, {}).notices


def test_checkpoints_are_switched_on_for_the_whole_run():
    assert rl().trainer.ckpt is None
    config = rl("--ckpt")
    assert (config.ckpt.interval, config.trainer.ckpt.interval, config.orchestrator.ckpt.interval) == (50, 50, 50)
    config = rl("--trainer.ckpt.resume-step", "7")
    assert (config.ckpt.resume_step, config.orchestrator.ckpt.resume_step) == (7, 7)


def test_which_checkpoints_there_are_is_said_to_either_process_and_holds_for_the_trainer_who_writes_them():
    said = {"interval": "7", "keep-last": "2", "keep-interval": "3", "save-async": "true"}
    config = rl(*(word for key, value in said.items() for word in (f"--orchestrator.ckpt.{key}", value)))
    ckpt = config.trainer.ckpt
    assert (ckpt.interval, ckpt.keep_last, ckpt.keep_interval, ckpt.save_async) == (7, 2, 3, True)


@pytest.mark.parametrize("where", ["ckpt", "trainer.ckpt", "orchestrator.ckpt"])
def test_steps_are_counted_anew_by_both_or_by_neither(where):
    config = rl("--ckpt.resume-step", "4", f"--{where}.skip-progress")
    assert config.ckpt.skip_progress
    assert config.trainer.ckpt.skip_progress
    assert config.orchestrator.ckpt.skip_progress
    text = complaint(RLConfig, "--trainer.ckpt.skip-progress", "--no-orchestrator.ckpt.skip-progress")
    assert "they are one value: set ckpt.skip_progress only" in text


def test_no_ckpt_switches_them_off_again(tmp_path: Path):
    (tmp_path / "rl.toml").write_text("[ckpt]\ninterval = 5\n")
    config = rl("@", str(tmp_path / "rl.toml"), "--no-ckpt")
    assert (config.ckpt, config.trainer.ckpt, config.orchestrator.ckpt) == (None, None, None)


def test_a_section_that_is_on_here_and_off_there_is_refused():
    text = complaint(RLConfig, "--ckpt", "--no-trainer.ckpt")
    assert "ckpt is on (--ckpt) but trainer.ckpt is off (--no-trainer.ckpt)" in text


def test_a_flag_switches_a_section_of_files_off_and_on(tmp_path: Path):
    (tmp_path / "t.toml").write_text("[trainer.ckpt]\ninterval = 5\n[orchestrator.ckpt]\ninterval = 5\n")
    config = rl("@", str(tmp_path / "t.toml"), "--no-ckpt")
    assert (config.trainer.ckpt, config.orchestrator.ckpt) == (None, None)
    config = rl("@", str(tmp_path / "t.toml"), "--trainer.ckpt.resume-step", "50")
    assert (config.ckpt.resume_step, config.orchestrator.ckpt.resume_step, config.ckpt.interval) == (50, 50, 5)


def test_the_runs_of_trainer_and_orchestrator_are_named_after_the_shared_name():
    config = rl("--wandb.name", "example", "--wandb.dir", "d", "--wandb.offline")
    assert config.wandb.project == config.trainer.wandb.project == "prime-rl"
    assert (config.trainer.wandb.name, config.orchestrator.wandb.name) == ("example-trainer", "example-orchestrator")
    assert config.trainer.wandb.dir == config.orchestrator.wandb.dir == Path("d")
    assert config.trainer.wandb.offline
    assert rl("--wandb.name", "example", "--trainer.wandb.name", "mine").trainer.wandb.name == "mine"


def test_a_run_id_is_of_one_run_only():
    config = rl("--trainer.wandb.id", "t", "--orchestrator.wandb.id", "o")
    assert (config.trainer.wandb.id, config.orchestrator.wandb.id) == ("t", "o")


def test_the_server_has_the_model_of_the_run():
    assert rl("--model.name", "m", "--inference").inference.model.name == "m"
    assert rl("--inference.model.name", "m").trainer.model.name == "m"
    assert rl("--orchestrator.model.name", "m", "--inference").inference.model.name == "m"


def test_the_server_may_have_a_copy_of_the_model_and_says_so():
    argv = ("--model.name", "m", "--inference.model.name", "m-fp8")
    assert rl(*argv).inference.model.name == "m-fp8"
    assert rl(*argv).trainer.model.name == "m"
    assert "'m-fp8' and model.name 'm'" in notices(*argv)[0]
    assert "they are one value" in complaint(RLConfig, "--model.name", "m", "--trainer.model.name", "n")
    assert "trainer.tokenizer.name" in complaint(RLConfig, "--model.name", "m", "--trainer.tokenizer.name", "n")
    assert rl("--model.name", "m", "--trainer.tokenizer.name", "m").trainer.tokenizer.name == "m"


def test_the_servers_context_is_seq_len_unless_it_is_given():
    assert rl("--inference", "--seq-len", "512").inference.model.max_model_len == 512
    assert rl("--inference").max_model_len == 2048
    smaller = ("--inference", "--seq-len", "512", "--max-model-len", "256")
    assert rl(*smaller).inference.model.max_model_len == 256
    assert notices(*smaller) == []
    assert "dropped and counted" in notices("--inference", "--max-model-len", "131072", "--seq-len", "65536")[0]
    larger = ("--seq-len", "512", "--inference.model.max-model-len", "1024")
    assert rl(*larger).max_model_len == 1024
    assert "dropped and counted" in notices(*larger)[0]


def test_gpus_decide_over_copies_of_the_model_and_ranks_of_the_trainer():
    config = rl("--inference", "--inference-gpu-ids", "0,1,2,3,4,5", "--trainer-gpu-ids", "6,7")
    assert config.inference.parallel.dp == 6
    assert config.orchestrator.num_train_workers == 2
    assert rl("--inference.parallel.tp", "2", "--inference-gpu-ids", "0,1,2,3").inference.parallel.dp == 2
    config = rl("--trainer-gpu-ids", "0,1,2,3", "--trainer.model.cp", "2")
    assert config.orchestrator.num_train_workers == 2


def test_copies_of_the_trained_model_divide_its_ranks():
    ids = ("--trainer-gpu-ids", "0,1,2,3,4,5")
    assert rl(*ids, "--trainer.model.dp-replicate", "3").trainer.model.dp_replicate == 3


def test_a_step_has_a_rollout_for_every_rank_of_the_trainer():
    ids = ("--trainer-gpu-ids", "0,1,2,3,4,5,6,7", "--orchestrator.rollouts-per-example", "4")
    assert rl(*ids, "--orchestrator.batch-size", "8").orchestrator.num_train_workers == 8
    assert "give the trainer fewer GPUs" in complaint(RLConfig, *ids, "--orchestrator.batch-size", "4")


def test_a_trainer_that_measures_itself_is_no_part_of_a_run():
    assert rl("--bench", "--trainer.bench").trainer.bench is not None


def test_an_adapter_that_is_trained_can_be_served():
    config = rl("--trainer.model.lora.rank", "12", "--inference")
    assert config.inference.enable_lora
    assert config.inference.max_lora_rank == 16


def test_beside_whole_modules_servers_are_given_no_adapters():
    config = rl("--trainer.model.lora.modules-to-save", "norm", "--inference")
    assert not config.inference.enable_lora


def test_adapters_are_not_sent_over_nccl():
    assert "adapters reach the servers as files" in complaint(
        RLConfig, "--trainer.model.lora.rank", "8", "--weight-broadcast.type", "nccl"
    )


def test_weights_over_nccl_know_the_size_of_the_server():
    config = rl(
        "--weight-broadcast.type", "nccl", "--inference-gpu-ids", "0,1", "--trainer-gpu-ids", "2", "--inference"
    )
    assert config.trainer.weight_broadcast.type == config.inference.weight_broadcast.type == "nccl"
    assert config.trainer.weight_broadcast.inference_world_size == 2


@pytest.mark.parametrize("section", ["trainer", "orchestrator", "inference"])
def test_a_value_for_a_whole_process_is_not_covered_by_what_follows_from_elsewhere(section):
    flags = ("--bench", "--inference-gpu-ids", "0", "--trainer-gpu-ids", "1", "--model.name", "m", "--wandb.name", "n")
    text = complaint(RLConfig, "--inference", *flags, f"--{section}", "x.toml")
    assert text == (
        f"{section}: is a table, not 'x.toml' (--{section}); to read a file into it, write --{section} @ x.toml"
    )


def test_a_written_run_says_each_shared_fact_once_so_that_a_flag_can_change_it(tmp_path: Path):
    argv = ("--max-steps", "20", "--ckpt.interval", "5", "--wandb.name", "n", "--inference", "--seed", "3")
    config = rl(*argv)
    (tmp_path / "rl.toml").write_text(to_toml(config))
    assert (tmp_path / "rl.toml").read_text().count("max_steps") == 1
    assert rl("@", str(tmp_path / "rl.toml")) == config
    again = rl("@", str(tmp_path / "rl.toml"), "--max-steps", "40", "--ckpt.resume-step", "20")
    assert (again.trainer.max_steps, again.orchestrator.max_steps) == (40, 40)
    assert (again.trainer.ckpt.resume_step, again.orchestrator.ckpt.interval) == (20, 5)
    off = rl("--inference")
    (tmp_path / "off.toml").write_text(to_toml(off))
    assert rl("@", str(tmp_path / "off.toml"), "--ckpt").trainer.ckpt is not None


def test_deterministic_is_one_fact_of_all_processes():
    taught = ("--teacher-inference.model.name", "t", "--orchestrator.teacher-model.kl-weight", "1")
    config = rl("--deterministic", "--max-async-level", "0", "--inference", *taught)
    parts = (config, config.trainer, config.orchestrator, config.inference, config.teacher_inference)
    assert all(part.deterministic for part in parts)
    assert rl("--trainer.deterministic", "--max-async-level", "0").orchestrator.deterministic
    assert not rl().trainer.deterministic


@pytest.mark.parametrize(
    ("argv", "key"),
    [
        ((), "orchestrator.max_async_level = 1 (default)"),
        (("--max-async-level", "0", "--inference.backend", "vllm"), "inference.backend = vllm"),
        (("--max-async-level", "0", "--inference.device", "cuda"), "inference.device = cuda"),
        (("--max-async-level", "0", "--trainer.device", "cuda"), "trainer.device = cuda"),
        (("--max-async-level", "0", "--bench"), "orchestrator.bench = true"),
        (
            ("--max-async-level", "0", "--orchestrator.client.base-url", "http://a:1/v1,http://b:1/v1"),
            "orchestrator.client.base_url",
        ),
    ],
)
def test_what_cannot_be_deterministic_is_refused_by_its_key(argv: tuple[str, ...], key: str):
    text = complaint(RLConfig, "--deterministic", *argv)
    assert key in text
    assert "deterministic = true (--deterministic)" in text
