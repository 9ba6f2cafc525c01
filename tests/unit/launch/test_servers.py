"""`plan_servers` itself is tested with the plans that it is part of (`test_plan`)."""

import socket

import pytest

from prime_rl.config.inference import InferenceConfig
from prime_rl.config.shared import ClientConfig
from prime_rl.errors import ConfigError
from prime_rl.launch.machine import Machine, placed
from prime_rl.launch.servers import check_ports, plan_servers, uses_vllm


@pytest.mark.parametrize(
    ("fields", "has_vllm", "gpu_ids", "expected"),
    [
        ({}, True, (0,), True),
        ({}, False, (0,), False),
        ({}, True, (), False),
        ({"device": "cpu"}, True, (0,), False),
        ({"backend": "vllm"}, False, (), True),
        ({"backend": "embedded"}, True, (0,), False),
    ],
)
def test_the_plan_knows_which_backend_will_serve(fields, has_vllm, gpu_ids, expected):
    machine = Machine(gpus=("0",), num_cpus=4, has_vllm=has_vllm)
    assert uses_vllm(InferenceConfig(**fields), machine, gpu_ids) is expected


def test_cores_are_shared_only_where_there_are_no_gpus():
    assert placed(Machine(gpus=(), num_cpus=9), (), num_shares=3)["OMP_NUM_THREADS"] == "3"
    assert placed(Machine(gpus=(), num_cpus=1), (), num_shares=3)["OMP_NUM_THREADS"] == "1"
    assert "OMP_NUM_THREADS" not in placed(Machine(gpus=("0",), num_cpus=9), (0,))


@pytest.mark.parametrize("host", [None, "127.0.0.1", "localhost", "::1"])
def test_a_router_listens_on_loopback_alone(host):
    machine = Machine(gpus=(), num_cpus=4, router="/bin/vllm-router")
    config = InferenceConfig(router=True, api_key="secret", server={"host": host})
    router = plan_servers(config, ClientConfig(), machine, ()).specs[-1]
    assert router.argv[1:5] == ("--host", "127.0.0.1", "--port", "8000")


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "10.0.0.5", "gpu0"])
def test_a_router_that_others_could_reach_is_refused(host):
    machine = Machine(gpus=(), num_cpus=4, router="/bin/vllm-router")
    config = InferenceConfig(router=True, api_key="secret", server={"host": host})
    with pytest.raises(ConfigError, match=rf"vllm-router asks nobody for a key.*server.host = '{host}'"):
        plan_servers(config, ClientConfig(), machine, ())


@pytest.mark.parametrize(("name", "key"), [("inference", "inference.server.port"), ("teacher", "teacher_inference")])
def test_a_port_of_any_server_that_is_taken_is_refused_by_its_key(free_port, name, key):
    config = InferenceConfig(server={"port": free_port})
    specs = plan_servers(config, ClientConfig(), Machine(gpus=(), num_cpus=4), (), name=name).specs
    check_ports(specs)
    with (
        socket.create_server(("127.0.0.1", free_port)),
        pytest.raises(ConfigError, match=f"port {free_port} on 127.0.0.1 is already in use.* with {key}"),
    ):
        check_ports(specs)


def test_all_ports_of_several_servers_are_looked_at(free_port):
    config = InferenceConfig(server={"port": free_port - 1}, parallel={"dp": 2})
    specs = plan_servers(config, ClientConfig(), Machine(gpus=(), num_cpus=4), ()).specs
    with (
        socket.create_server(("127.0.0.1", free_port)),
        pytest.raises(ConfigError, match=f"port {free_port} on 127.0.0.1 is already in use"),
    ):
        check_ports(specs)
