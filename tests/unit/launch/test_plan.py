import pytest

from prime_rl.config.evals import EvalConfig
from prime_rl.config.load import load
from prime_rl.config.roots import RLConfig
from prime_rl.errors import ConfigError
from prime_rl.launch.plan import Machine, plan_eval, plan_rl

LAPTOP = Machine(gpus=(), num_cpus=8)


def rl(*argv: str) -> RLConfig:
    return load(RLConfig, argv, {})


def test_a_run_with_a_server_is_three_processes_and_only_the_server_is_a_service():
    specs = plan_rl(rl("--inference"), LAPTOP)
    assert [(spec.name, spec.command, spec.is_service) for spec in specs] == [
        ("inference", "inference", True),
        ("orchestrator", "orchestrator", False),
        ("trainer", "trainer", False),
    ]


def test_without_an_inference_section_no_server_is_started():
    assert [spec.name for spec in plan_rl(rl(), LAPTOP)] == ["orchestrator", "trainer"]


def test_on_a_cpu_server_and_trainer_share_the_cores():
    for spec in plan_rl(rl("--inference"), LAPTOP):
        assert spec.env["OMP_NUM_THREADS"] == "4"
        assert spec.env["CUDA_VISIBLE_DEVICES"] == ""


@pytest.mark.parametrize(
    ("gpus", "argv", "expected"),
    [
        pytest.param(("0",), (), ("0", "", "0"), id="one GPU is shared"),
        pytest.param(("0", "1"), (), ("0", "", "1"), id="two GPUs: one each"),
        pytest.param(
            ("4", "7"),
            ("--inference-gpu-ids", "1", "--trainer-gpu-ids", "0"),
            ("7", "", "4"),
            id="ids index into the visible",
        ),
    ],
)
def test_processes_are_placed_on_gpus(gpus, argv, expected):
    specs = plan_rl(rl("--inference", *argv), Machine(gpus=gpus, num_cpus=8))
    assert tuple(spec.env["CUDA_VISIBLE_DEVICES"] for spec in specs) == expected


def test_a_server_that_shares_its_gpu_leaves_memory_to_the_trainer():
    shared, *_ = plan_rl(rl("--inference"), Machine(gpus=("0",), num_cpus=8))
    alone, *_ = plan_rl(rl("--inference"), Machine(gpus=("0", "1"), num_cpus=8))
    assert shared.config.gpu_memory_utilization == 0.4
    assert alone.config.gpu_memory_utilization == 0.9


def test_gpus_that_are_not_there_are_refused_with_a_way_out():
    with pytest.raises(ConfigError, match=r"trainer_gpu_ids asks for GPU 1, but only 1 .*reverse_text_cpu"):
        plan_rl(rl("--trainer-gpu-ids", "1"), Machine(gpus=("0",), num_cpus=8))


def test_the_servers_key_reaches_the_orchestrator_and_nobody_else():
    inference, orchestrator, trainer = plan_rl(rl("--inference.api-key", "secret"), LAPTOP)
    assert orchestrator.env["OPENAI_API_KEY"] == "secret"
    assert "OPENAI_API_KEY" not in inference.env
    assert "OPENAI_API_KEY" not in trainer.env


def test_an_evaluation_serves_the_model_it_evaluates():
    config = load(EvalConfig, ["--model.name", "tiny", "--inference.server.port", "8123"], {})
    server, runner = plan_eval(config, LAPTOP)
    assert server.is_service
    assert server.config.model.name == "tiny"
    assert runner.config.client.base_url == ("http://localhost:8123/v1",)
    assert runner.owns_terminal


def test_without_a_look_at_the_machine_the_named_gpus_are_taken_to_be_there():
    specs = plan_rl(rl("--inference", "--inference-gpu-ids", "0,1,2,3,4,5", "--trainer-gpu-ids", "6,7"), None)
    assert [spec.env["CUDA_VISIBLE_DEVICES"] for spec in specs] == ["0,1,2,3,4,5", "", "6,7"]


def test_a_server_that_is_spread_over_gpus_takes_the_first_and_the_trainer_the_next():
    specs = plan_rl(rl("--inference.parallel.tp", "2"), Machine(gpus=("4", "5", "6", "7"), num_cpus=8))
    assert [spec.env["CUDA_VISIBLE_DEVICES"] for spec in specs] == ["4,5", "", "6"]
    with pytest.raises(ConfigError, match=r"dp x tp = 4 GPUs, but only 2"):
        plan_rl(rl("--inference.parallel.tp", "4"), Machine(gpus=("0", "1"), num_cpus=8))
