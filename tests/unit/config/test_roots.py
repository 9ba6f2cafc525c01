"""What follows from what in the `rl` configuration, and what does not go together."""

from pathlib import Path

import pytest

from prime_rl.config.evals import EvalConfig
from prime_rl.config.load import load, resolve
from prime_rl.config.roots import RLConfig
from prime_rl.config.trainer import SFTConfig, TrainerConfig
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


def test_an_adapter_that_is_trained_can_be_served():
    config = rl("--trainer.model.lora.rank", "12", "--inference")
    assert config.inference.enable_lora
    assert config.inference.max_lora_rank == 16


def test_weights_over_nccl_know_the_size_of_the_server():
    config = rl(
        "--weight-broadcast.type", "nccl", "--inference-gpu-ids", "0,1", "--trainer-gpu-ids", "2", "--inference"
    )
    assert config.trainer.weight_broadcast.type == config.inference.weight_broadcast.type == "nccl"
    assert config.trainer.weight_broadcast.inference_world_size == 2


@pytest.mark.parametrize(
    ("root", "argv", "expected"),
    [
        pytest.param(
            RLConfig, ["--inference-gpu-ids", "0,1", "--inference.parallel.dp", "3"], "names 2; drop", id="dp"
        ),
        pytest.param(
            RLConfig,
            ["--weight-broadcast.type", "nccl", "--inference-gpu-ids", "0", "--trainer-gpu-ids", "0"],
            "needs a GPU for each side",
            id="nccl on one GPU",
        ),
        pytest.param(
            RLConfig,
            ["--weight-broadcast.type", "nccl", "--max-async-level", "2"],
            "needs max_async_level 1",
            id="nccl",
        ),
        pytest.param(RLConfig, ["--teacher-gpu-ids", "1"], "are for [teacher_inference]", id="teacher"),
        pytest.param(RLConfig, ["--trainer.loss.teacher-tau", "1"], "needs a teacher", id="no teacher"),
        pytest.param(
            TrainerConfig, ["--model.ac", "full"], "is a table with the keys freq, mode, targets", id="ac as text"
        ),
        pytest.param(TrainerConfig, ["--model.cp", "2", "--model.attn", "sdpa"], "needs flash attention", id="cp"),
        pytest.param(
            TrainerConfig, ["--model.fsdp-cpu-offload", "--model.optim-cpu-offload"], "set only one", id="offload twice"
        ),
        pytest.param(TrainerConfig, ["--optim.type", "muon", "--model.fsdp-cpu-offload"], "use adamw", id="muon"),
        pytest.param(TrainerConfig, ["--trace-path", "t", "--max-steps", "10"], "below 10", id="trace"),
        pytest.param(
            TrainerConfig, ["--loss.token-mask-low", "2", "--loss.token-mask-high", "1"], "must be below", id="masks"
        ),
        pytest.param(
            TrainerConfig, ["--loss.type", "custom"], "loss.import_path: must be given (--loss.type)", id="custom loss"
        ),
        pytest.param(
            TrainerConfig,
            ["--data.fake.batch-size", "9", "--data.fake.micro-batch-size", "4"],
            "try batch_size 8",
            id="fake",
        ),
        pytest.param(TrainerConfig, ["--ckpt.weights.save-adapter-separately"], "add [model.lora]", id="adapter"),
        pytest.param(TrainerConfig, ["--model.fused-lm-head-chunk-size", "100"], "512 or more", id="head chunk"),
        pytest.param(
            SFTConfig, ["--data.batch-size", "9", "--data.micro-batch-size", "4"], "try batch_size 8", id="sft"
        ),
        pytest.param(SFTConfig, ["--data.pack-function", "stack"], "divisible by 256", id="stack"),
        pytest.param(SFTConfig, ["--data.splits", "a,b", "--data.probabilities", "1"], "belong together", id="splits"),
        pytest.param(SFTConfig, ["--data.probabilities", "1"], "set one of these too", id="probabilities"),
        pytest.param(SFTConfig, ["--model.cp", "3"], "divisible by it", id="sft cp"),
        pytest.param(
            RLConfig, ["--orchestrator.buffer.env-ratios", "1,2"], "2 numbers for 1 environments", id="env ratios"
        ),
        pytest.param(
            RLConfig,
            ["--orchestrator.buffer.easy-threshold", "0.1", "--orchestrator.buffer.hard-threshold", "0.2"],
            "easy_threshold must be above",
            id="thresholds",
        ),
        pytest.param(
            RLConfig,
            ["--orchestrator.sampling.repetition-penalty", "1.1"],
            "importance ratio",
            id="penalty in training",
        ),
        pytest.param(
            RLConfig,
            ["--orchestrator.eval.sampling.top-p", "0.9", "--orchestrator.eval.sampling.extra-body", "{'top_p': 1}"],
            "top_p stands in extra_body and is a key of its own here",
            id="said twice",
        ),
        pytest.param(
            RLConfig,
            [
                "--orchestrator.sampling.temperature",
                "0.5",
                "--orchestrator.sampling.temp-scheduler.start-temperature",
                "1",
            ],
            "temp_scheduler.end_temperature: must be given",
            id="schedule without an end",
        ),
        pytest.param(
            RLConfig,
            ["--orchestrator.batch-size", "8", "--orchestrator.token-batch-size", "9"],
            "set either",
            id="two sizes",
        ),
        pytest.param(EvalConfig, ["--num-examples", "0"], "-1 for all examples, or 1 or more", id="no examples"),
        pytest.param(EvalConfig, ["--env.num-examples", "0"], "-1 for all examples, or 1 or more", id="none of one"),
        pytest.param(RLConfig, ["--inference.max-lora-rank", "12"], "the next is 16", id="rank"),
        pytest.param(
            RLConfig, ["--inference.enable-lora", "--inference.api-server-count", "2"], "one API server", id="lora"
        ),
    ],
)
def test_what_does_not_go_together_is_refused_with_the_way_out(root, argv, expected):
    assert expected in complaint(root, *argv)


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
