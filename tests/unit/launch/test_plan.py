from dataclasses import replace

import pytest

from prime_rl.config.evals import EvalConfig
from prime_rl.config.load import load
from prime_rl.config.roots import RLConfig
from prime_rl.errors import ConfigError
from prime_rl.launch.machine import Machine
from prime_rl.launch.plan import plan_eval, plan_rl

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
    said, *_ = plan_rl(rl("--inference.gpu-memory-utilization", "0.6"), Machine(gpus=("0",), num_cpus=8))
    assert said.config.gpu_memory_utilization == 0.6


def test_gpus_that_are_not_there_are_refused_with_a_way_out():
    with pytest.raises(ConfigError, match=r"trainer_gpu_ids asks for GPU 1, but only 1 .*reverse_text_cpu"):
        plan_rl(rl("--trainer-gpu-ids", "1"), Machine(gpus=("0",), num_cpus=8))


def test_several_gpus_of_the_trainer_are_as_many_ranks_that_share_its_cores():
    flags = ("--inference", "--inference-gpu-ids", "0", "--trainer-gpu-ids", "1,3")
    *_, orchestrator, trainer = plan_rl(rl(*flags), FOUR)
    assert (trainer.num_ranks, trainer.env["CUDA_VISIBLE_DEVICES"]) == (2, "5,7")
    assert trainer.env["OMP_NUM_THREADS"] == "2"
    assert orchestrator.num_ranks == 1
    assert orchestrator.config.num_train_workers == 2


def test_a_trainer_on_the_cpu_has_as_many_ranks_as_ids_and_no_gpu():
    flags = ("--inference", "--trainer-gpu-ids", "0,1,2", "--trainer.device", "cpu")
    for machine in (LAPTOP, Machine(gpus=("0",), num_cpus=8)):
        *_, trainer = plan_rl(rl(*flags), machine)
        assert (trainer.num_ranks, trainer.env["CUDA_VISIBLE_DEVICES"]) == (3, "")
        assert trainer.env["OMP_NUM_THREADS"] == "1"
    server, *_, trainer = plan_rl(rl(*flags[:1], *flags[3:]), Machine(gpus=("0",), num_cpus=8))
    assert (trainer.num_ranks, trainer.env["CUDA_VISIBLE_DEVICES"]) == (1, "")
    assert server.config.gpu_memory_utilization == 0.9, "nobody shares its GPU"


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
    machine = Machine(gpus=("4", "5", "6", "7"), num_cpus=8, has_vllm=True)
    specs = plan_rl(rl("--inference.parallel.tp", "2"), machine)
    assert [spec.env["CUDA_VISIBLE_DEVICES"] for spec in specs] == ["4,5", "", "6"]
    with pytest.raises(ConfigError, match=r"dp x tp = 4 GPUs, but only 2"):
        plan_rl(rl("--inference.parallel.tp", "4"), Machine(gpus=("0", "1"), num_cpus=8))


def servers(specs):
    """Of the servers and the router: name, GPUs, and port."""
    return [
        (spec.name, spec.env["CUDA_VISIBLE_DEVICES"], spec.config.server.port if spec.config else spec.argv[4])
        for spec in specs
        if spec.is_service
    ]


def client(specs):
    (orchestrator,) = [spec for spec in specs if spec.name == "orchestrator"]
    return orchestrator.config.client


def broadcasts(specs):
    told = {spec.config.weight_broadcast.type for spec in specs if spec.command == "inference"}
    found = [spec.config.weight_broadcast for spec in specs if spec.name in ("orchestrator", "trainer")]
    assert not told or told == {broadcast.type for broadcast in found}, "the servers are told the same"
    return found


FOUR = Machine(gpus=("4", "5", "6", "7"), num_cpus=8)
FOUR_VLLM = Machine(gpus=("4", "5", "6", "7"), num_cpus=8, has_vllm=True, router="/bin/vllm-router")


def test_several_copies_in_the_embedded_engine_are_servers_of_their_own_which_the_orchestrator_knows():
    specs = plan_rl(rl("--inference.parallel.dp", "2", "--inference.server.port", "8100"), LAPTOP)
    assert servers(specs) == [("inference-0", "", 8100), ("inference-1", "", 8101)]
    assert [spec.command for spec in specs] == ["inference", "inference", "orchestrator", "trainer"]
    assert [spec.config.parallel.dp for spec in specs[:2]] == [1, 1]
    assert client(specs).base_url == ("http://localhost:8100/v1", "http://localhost:8101/v1")
    assert client(specs).admin_base_url is None
    assert [spec.env["OMP_NUM_THREADS"] for spec in specs] == ["2", "2", "4", "4"]


def test_each_of_several_embedded_servers_has_a_gpu_of_its_own():
    specs = plan_rl(rl("--inference", "--inference-gpu-ids", "0,1,2", "--trainer-gpu-ids", "3"), FOUR)
    assert servers(specs) == [("inference-0", "4", 8000), ("inference-1", "5", 8001), ("inference-2", "6", 8002)]


def test_vllm_spreads_its_copies_itself_behind_one_address():
    specs = plan_rl(rl("--inference", "--inference-gpu-ids", "0,1,2", "--trainer-gpu-ids", "3"), FOUR_VLLM)
    assert servers(specs) == [("inference", "4,5,6", 8000)]
    assert specs[0].config.parallel.dp == 3
    assert client(specs).base_url == ("http://localhost:8000/v1",)


@pytest.mark.parametrize(
    ("backend", "machine", "expected"),
    [
        pytest.param("auto", FOUR_VLLM, 1, id="vLLM where it is installed and there are GPUs"),
        pytest.param("auto", FOUR, 2, id="else the embedded engine"),
        pytest.param("auto", Machine(gpus=(), num_cpus=8, has_vllm=True), 2, id="no GPUs"),
        pytest.param("embedded", FOUR_VLLM, 2, id="embedded by name"),
        pytest.param("vllm", LAPTOP, 1, id="vLLM by name"),
    ],
)
def test_the_backend_that_will_serve_decides_how_copies_are_served(backend, machine, expected):
    specs = plan_rl(rl("--inference.parallel.dp", "2", "--inference.backend", backend), machine)
    assert len(servers(specs)) == expected


def test_tensor_parallelism_without_vllm_is_refused_with_what_there_is_instead():
    with pytest.raises(ConfigError, match=r"inference\.parallel\.tp = 2 needs vLLM.*inference\.parallel\.dp"):
        plan_rl(rl("--inference.parallel.tp", "2"), FOUR)


def test_servers_are_reached_where_the_client_says_the_first_is():
    argv = ("--inference.parallel.dp", "2", "--orchestrator.client.base-url")
    specs = plan_rl(rl(*argv, "http://10.0.0.5:8000/v1"), LAPTOP)
    assert client(specs).base_url == ("http://10.0.0.5:8000/v1", "http://10.0.0.5:8001/v1")
    specs = plan_rl(rl(*argv, "http://a:8000/v1,http://b:8001/v1"), LAPTOP)
    assert client(specs).base_url == ("http://a:8000/v1", "http://b:8001/v1")
    with pytest.raises(ConfigError, match="names 3 servers and 2 are started"):
        plan_rl(rl(*argv, "http://a:8000/v1,http://a:8001/v1,http://a:8002/v1"), LAPTOP)


def test_ports_end():
    with pytest.raises(ConfigError, match="need ports up to 65536"):
        plan_rl(rl("--inference.parallel.dp", "2", "--inference.server.port", "65535"), LAPTOP)


def test_a_router_has_the_port_and_the_servers_those_after_it():
    argv = ("--inference.router", "--inference.parallel.dp", "2", "--inference.backend", "embedded")
    specs = plan_rl(rl(*argv), Machine(gpus=(), num_cpus=8, router="/bin/vllm-router"))
    assert servers(specs) == [("inference-0", "", 8001), ("inference-1", "", 8002), ("router", "", "8000")]
    assert [spec.config.router for spec in specs[:2]] == [False, False], "they have one before them, and start none"
    assert specs[2].argv[:9] == (
        "/bin/vllm-router", "--host", "127.0.0.1", "--port", "8000", "--worker-urls", "http://localhost:8001",
        "http://localhost:8002", "--policy",
    )  # fmt: skip
    assert client(specs).base_url == ("http://localhost:8000/v1",)
    assert client(specs).admin_base_url == ("http://localhost:8001/v1", "http://localhost:8002/v1")
    with pytest.raises(ConfigError, match="pip install vllm-router"):
        plan_rl(rl("--inference.router"), LAPTOP)


AUTO = ("--inference", "--weight-broadcast.type", "auto")


@pytest.mark.parametrize(
    ("argv", "machine", "expected"),
    [
        pytest.param((), FOUR_VLLM, "nccl", id="vLLM beside the trainer"),
        pytest.param((), FOUR, "filesystem", id="the embedded engine"),
        pytest.param(("--trainer-gpu-ids", "0"), FOUR_VLLM, "filesystem", id="on one GPU"),
        pytest.param((), LAPTOP, "filesystem", id="no GPUs"),
        pytest.param(("--trainer.model.lora.rank", "8"), FOUR_VLLM, "filesystem", id="adapters"),
    ],
)
def test_weights_go_over_nccl_where_they_can(argv, machine, expected):
    specs = plan_rl(rl(*AUTO, *argv), machine)
    assert [broadcast.type for broadcast in broadcasts(specs)] == [expected, expected]


def test_the_group_that_weights_are_sent_to_has_the_gpus_of_the_servers():
    specs = plan_rl(rl(*AUTO, "--inference-gpu-ids", "0,1,2", "--trainer-gpu-ids", "3"), FOUR_VLLM)
    assert [broadcast.inference_world_size for broadcast in broadcasts(specs)] == [3, 3]
    specs = plan_rl(rl("--inference.parallel.tp", "2", "--weight-broadcast.type", "nccl"), FOUR_VLLM)
    assert [broadcast.inference_world_size for broadcast in broadcasts(specs)] == [2, 2]


NCCL = ("--inference", "--weight-broadcast.type", "nccl")


@pytest.mark.parametrize(
    ("argv", "machine", "missing"),
    [
        pytest.param((), LAPTOP, "no GPU can be seen", id="no GPUs"),
        pytest.param((), FOUR, "vLLM is not installed", id="no vLLM"),
        pytest.param(("--inference.backend", "embedded"), FOUR_VLLM, "the embedded engine would serve", id="embedded"),
        pytest.param((), Machine(gpus=("0",), num_cpus=8, has_vllm=True), "share GPU 0", id="one GPU"),
        pytest.param(("--trainer.device", "cpu"), FOUR_VLLM, "the trainer runs on the CPU", id="trainer on the CPU"),
    ],
)
def test_nccl_is_refused_where_it_cannot_work_with_what_is_missing(argv, machine, missing):
    with pytest.raises(ConfigError, match=rf"weight_broadcast\.type = 'nccl'.*{missing}.*filesystem"):
        plan_rl(rl(*NCCL, *argv), machine)


def test_nccl_by_name_is_no_matter_of_a_machine_that_nobody_has_looked_at():
    assert [broadcast.type for broadcast in broadcasts(plan_rl(rl(*NCCL), None))] == ["nccl", "nccl"]


def test_trainer_and_servers_meet_at_a_port_that_is_free_unless_one_is_given():
    machine = replace(FOUR_VLLM, free_port=23456)
    assert [broadcast.port for broadcast in broadcasts(plan_rl(rl(*NCCL), machine))] == [23456, 23456]
    assert [broadcast.port for broadcast in broadcasts(plan_rl(rl(*AUTO), machine))] == [23456, 23456]
    given = tuple(word for part in ("trainer", "orchestrator") for word in (f"--{part}.weight-broadcast.port", "29777"))
    assert [broadcast.port for broadcast in broadcasts(plan_rl(rl(*NCCL, *given), machine))] == [29777, 29777]
    assert [broadcast.port for broadcast in broadcasts(plan_rl(rl(*NCCL), FOUR_VLLM))] == [29501, 29501]


def test_without_a_server_to_start_weights_are_files():
    specs = plan_rl(rl("--weight-broadcast.type", "auto"), FOUR_VLLM)
    assert [broadcast.type for broadcast in broadcasts(specs)] == ["filesystem", "filesystem"]


def test_an_evaluation_has_as_many_servers_as_it_asks_for():
    config = load(EvalConfig, ["--model.name", "tiny", "--inference.parallel.dp", "2"], {})
    specs = plan_eval(config, LAPTOP)
    assert servers(specs) == [("inference-0", "", 8000), ("inference-1", "", 8001)]
    assert specs[2].config.client.base_url == ("http://localhost:8000/v1", "http://localhost:8001/v1")
    assert specs[0].env["OMP_NUM_THREADS"] == "4"


TEACHER = ("--inference", "--teacher-inference", "--orchestrator.teacher-model.kl-weight", "1")


def test_a_teacher_is_a_server_of_its_own_that_the_orchestrator_asks():
    flags = ("--orchestrator.teacher-model.model.name", "wise", "--seq-len", "512", "--log.level", "debug")
    policy, teacher, orchestrator, trainer = plan_rl(rl(*TEACHER, *flags), LAPTOP)
    assert (teacher.name, teacher.command, teacher.is_service) == ("teacher", "inference", True)
    assert teacher.config.model.name == orchestrator.config.teacher_model.model.name == "wise"
    assert teacher.config.model.max_model_len == 513  # a server samples one token behind the longest sample
    assert (policy.config.server.port, teacher.config.server.port) == (8000, 8100)
    assert orchestrator.config.teacher_model.client.base_url == ("http://localhost:8100/v1",)
    assert (teacher.config.log.level, teacher.config.output_dir) == ("debug", trainer.config.output_dir)
    assert {spec.env["OMP_NUM_THREADS"] for spec in (policy, teacher, trainer)} == {"2"}  # 8 cores for three
    assert policy.pool != teacher.pool


def test_a_teacher_has_the_gpus_that_are_named_for_it_and_the_trainer_another():
    specs = plan_rl(rl(*TEACHER, "--teacher-gpu-ids", "1,2"), FOUR)
    found = {spec.name: spec.env["CUDA_VISIBLE_DEVICES"] for spec in specs}
    assert found == {"inference": "4", "teacher-0": "5", "teacher-1": "6", "orchestrator": "", "trainer": "7"}
    orchestrator = specs[-2].config
    addresses = ("http://localhost:8100/v1", "http://localhost:8101/v1")
    assert orchestrator.teacher_model.client.base_url == addresses
    shared = plan_rl(rl(*TEACHER, "--teacher-gpu-ids", "0"), FOUR)[1]
    assert shared.config.gpu_memory_utilization == 0.4


def test_a_teacher_that_runs_already_is_not_started():
    flags = ("--inference", "--orchestrator.teacher-model.kl-weight", "1")
    assert [spec.name for spec in plan_rl(rl(*flags), LAPTOP)] == ["inference", "orchestrator", "trainer"]


def test_two_keys_need_two_variables():
    keys = ("--inference.api-key", "a", "--teacher-inference.api-key", "b")
    with pytest.raises(ConfigError, match=r"different keys.*teacher_model.client.api_key_var to another name"):
        plan_rl(rl(*TEACHER, *keys), LAPTOP)
    own = ("--orchestrator.teacher-model.client.api-key-var", "TEACHER_KEY")
    *_, orchestrator, _ = plan_rl(rl(*TEACHER, *keys, *own), LAPTOP)
    assert (orchestrator.env["OPENAI_API_KEY"], orchestrator.env["TEACHER_KEY"]) == ("a", "b")


@pytest.mark.parametrize(
    ("argv", "expected"),
    [
        ((), 300.0),
        (("--recovery-interval", "60"), 60.0),
        (("--no-supervise",), None),
        (("--no-supervise", "--trainer.recovery-interval", "7"), 7.0),
        (("--trainer.recovery-interval", "7"), 7.0),
    ],
)
def test_a_trainer_that_is_supervised_has_recovery_checkpoints(argv, expected):
    *_, trainer = plan_rl(rl(*argv), LAPTOP)
    assert trainer.config.recovery_interval == expected


def test_servers_and_router_say_where_they_listen():
    machine = Machine(gpus=(), num_cpus=8, router="vllm-router")
    specs = plan_rl(
        rl("--inference.parallel.dp", "2", "--inference.server.port", "8100", "--inference.router"), machine
    )
    ports = {spec.name: spec.port for spec in specs}
    assert ports == {"inference-0": 8101, "inference-1": 8102, "router": 8100, "orchestrator": None, "trainer": None}
