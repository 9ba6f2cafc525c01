"""Plan, then launch: a configuration becomes a list of process specifications, and nothing happens yet.

Pure functions of their arguments, so that a test can compare a plan with a golden file, and so that a cluster launcher
can consume the same plan. `launch.local` starts one on this machine.
"""

from collections.abc import Sequence
from pathlib import Path

from prime_rl.config.artifacts import AutoBroadcastConfig, NCCLBroadcastConfig, WeightBroadcastConfig
from prime_rl.config.evals import EvalConfig
from prime_rl.config.orchestrator import TeacherConfig
from prime_rl.config.roots import RLConfig
from prime_rl.config.shared import ClientConfig
from prime_rl.errors import ConfigError
from prime_rl.launch.machine import Machine, ProcessSpec, placed
from prime_rl.launch.servers import Serving, plan_servers, uses_vllm
from prime_rl.paths import RunPaths

SHARED_GPU_UTILIZATION = 0.4
CPU_EXAMPLE = "rl @ examples/reverse_text_cpu/rl.toml"


def plan_rl(config: RLConfig, machine: Machine | None) -> list[ProcessSpec]:
    """The processes of `rl`, in the order in which they are started. ConfigError where the GPUs do not suffice.

    `machine` None: one that is not known yet and has whatever the configuration names.
    """
    is_known = machine is not None
    if machine is None:
        named = [gpu for ids in _named_gpus(config).values() for gpu in ids]
        gpus = tuple(map(str, range(max(named, default=-1) + 1)))
        machine = Machine(gpus=gpus, num_cpus=1, has_vllm=True, router="vllm-router")
    inference_ids, trainer_ids = _gpu_ids(config, machine)
    num_ranks = len(config.trainer_gpu_ids or (0,))
    is_apart = bool(inference_ids) and not set(inference_ids) & set(trainer_ids)
    is_vllm = config.inference is not None and uses_vllm(config.inference, machine, inference_ids)
    over_nccl = is_apart and is_vllm and machine.has_vllm and config.trainer.device != "cpu"
    over_nccl = over_nccl and config.trainer.model.lora is None  # adapters are files, of megabytes
    if isinstance(config.trainer.weight_broadcast, NCCLBroadcastConfig) and is_known:
        _check_nccl(config, machine, inference_ids, trainer_ids)
    num_shares = 2 if config.teacher_inference is None else 3  # trainer, policy's server and teacher's
    serving = Serving(client=config.orchestrator.client)
    if config.inference is not None:
        server = config.inference
        is_said = "gpu_memory_utilization" in server.model_fields_set
        if set(inference_ids) & set(trainer_ids) and not is_said:  # the trainer on the same GPU needs memory too
            server = server.model_copy(update={"gpu_memory_utilization": SHARED_GPU_UTILIZATION})
        kind = _resolved(config.trainer.weight_broadcast, 1, None, over_nccl=over_nccl).type
        told = server.weight_broadcast.model_copy(update={"type": kind})
        server = server.model_copy(update={"weight_broadcast": told})
        serving = plan_servers(server, config.orchestrator.client, machine, inference_ids, num_others=num_shares - 1)
    teacher = _plan_teacher(config, machine, {*inference_ids, *trainer_ids}, num_others=num_shares - 1)
    both = (config.trainer.weight_broadcast, config.orchestrator.weight_broadcast)
    port = None if any("port" in broadcast.model_fields_set for broadcast in both) else machine.free_port
    broadcasts = {
        name: {"weight_broadcast": _resolved(component.weight_broadcast, len(inference_ids), port, over_nccl=over_nccl)}
        for name, component in (("trainer", config.trainer), ("orchestrator", config.orchestrator))
    }
    orchestrator = config.orchestrator.model_copy(
        update={"client": serving.client, **broadcasts["orchestrator"], **_teacher_model(config, teacher)}
    )
    interval = config.trainer.recovery_interval or (config.recovery_interval if config.supervise else None)
    trainer = config.trainer.model_copy(update=broadcasts["trainer"] | {"recovery_interval": interval})
    env = placed(machine, trainer_ids, num_shares=num_shares, num_ranks=num_ranks)
    in_control = placed(machine, ()) | _client_keys(config)
    return [
        *serving.specs,
        *teacher.specs,
        ProcessSpec(name="orchestrator", command="orchestrator", config=orchestrator, env=in_control),
        ProcessSpec(name="trainer", command="trainer", config=trainer, env=env, num_ranks=num_ranks),
    ]


def plan_eval(config: EvalConfig, machine: Machine) -> list[ProcessSpec]:
    """The processes of an `eval` that starts its own server."""
    model = config.inference.model.model_copy(update={"name": config.model.name})
    server = config.inference.model_copy(update={"model": model, "output_dir": config.output_dir})
    client = ClientConfig(base_url=(f"http://localhost:{server.server.port}/v1",))
    ids = tuple(range(min(len(machine.gpus), server.parallel.dp * server.parallel.tp)))
    serving = plan_servers(server, client, machine, ids, num_others=0)
    runner = config.model_copy(update={"client": serving.client})
    env = placed(machine, ()) | _client_key(server.api_key, client)
    return [*serving.specs, ProcessSpec(name="eval", command="eval", config=runner, env=env, owns_terminal=True)]


def _plan_teacher(config: RLConfig, machine: Machine, taken: set[int], *, num_others: int) -> Serving:
    """The processes of the teacher's server, if one is started. `taken`: GPUs of policy's server and trainer."""
    model = config.orchestrator.teacher_model
    client = ClientConfig() if model is None else model.client
    server = config.teacher_inference
    if server is None:
        return Serving(client=client)
    ids = config.teacher_gpu_ids or ()
    if taken & set(ids) and "gpu_memory_utilization" not in server.model_fields_set:
        server = server.model_copy(update={"gpu_memory_utilization": SHARED_GPU_UTILIZATION})
    return plan_servers(server, client, machine, ids, num_others=num_others, name="teacher")


def _teacher_model(config: RLConfig, serving: Serving) -> dict[str, TeacherConfig]:
    """What changes in the orchestrator's configuration: where the teacher is reached."""
    model = config.orchestrator.teacher_model
    return {} if model is None else {"teacher_model": model.model_copy(update={"client": serving.client})}


def config_path(spec: ProcessSpec, output_dir: Path) -> Path:
    """Where the resolved configuration of a process is written."""
    return RunPaths(output_dir).config(spec.name)


def _resolved(
    broadcast: WeightBroadcastConfig, num_gpus: int, port: int | None, *, over_nccl: bool
) -> WeightBroadcastConfig:
    """How weights reach the servers; where they go over NCCL with the number of their GPUs, and where all meet.

    `port`: a free one; None: the one of the configuration.
    """
    said = broadcast.model_fields_set
    if isinstance(broadcast, AutoBroadcastConfig):
        broadcast = broadcast.resolved(over_nccl=over_nccl)
    if not isinstance(broadcast, NCCLBroadcastConfig):
        return broadcast
    found = {} if "inference_world_size" in said else {"inference_world_size": max(num_gpus, 1)}
    return broadcast.model_copy(update=found | ({} if port is None else {"port": port}))


def _check_nccl(config: RLConfig, machine: Machine, inference_ids: Sequence[int], trainer_ids: Sequence[int]) -> None:
    """Raises: ConfigError naming what NCCL lacks on this machine."""
    shared = sorted(set(inference_ids) & set(trainer_ids))
    missing = None
    if not machine.gpus:
        missing = "no GPU can be seen on this machine (CUDA_VISIBLE_DEVICES counts)"
    elif config.trainer.device == "cpu":
        missing = "the trainer runs on the CPU (trainer.device)"
    elif not machine.has_vllm:
        missing = "vLLM is not installed with a torch for GPUs (pip install 'prime-rl[vllm]')"
    elif config.inference is not None and not uses_vllm(config.inference, machine, inference_ids):
        missing = f"the embedded engine would serve (inference.backend = {config.inference.backend!r})"
    elif shared:
        missing = f"server and trainer share GPU {shared[0]} (inference_gpu_ids, trainer_gpu_ids)"
    if missing is not None:
        raise ConfigError(
            f"weight_broadcast.type = 'nccl' sends weights from the trainer's GPU to vLLM's, and {missing}; set it to "
            "filesystem, or to auto"
        )


def _gpu_ids(config: RLConfig, machine: Machine) -> tuple[Sequence[int], Sequence[int]]:
    """GPU ids of server and trainer; explicit ones must be visible, absent ones take what there is."""
    num_gpus = len(machine.gpus)
    for key, given in _named_gpus(config).items():
        missing = [gpu for gpu in given if gpu >= num_gpus]
        if missing:
            seen = f"only {num_gpus} of them" if num_gpus else "none"
            raise ConfigError(
                f"{key} asks for GPU {missing[0]}, but {seen} can be seen on this machine "
                f"(CUDA_VISIBLE_DEVICES counts); without GPUs, this runs anywhere: {CPU_EXAMPLE}"
            )
    inference = config.inference_gpu_ids or _first_gpus(config, num_gpus)
    if config.trainer.device == "cpu":
        return inference, ()
    taken = {*inference, *(config.teacher_gpu_ids or ())}
    free = [gpu for gpu in range(num_gpus) if gpu not in taken]
    trainer = config.trainer_gpu_ids or ((free[0] if free else num_gpus - 1,) if num_gpus else ())
    return inference, trainer


def _named_gpus(config: RLConfig) -> dict[str, Sequence[int]]:
    """The GPUs that must be there, by key. A trainer on the CPU has a rank for each of its ids, and no GPU."""
    on_cpu = config.trainer.device == "cpu"
    return {
        "inference_gpu_ids": config.inference_gpu_ids or (),
        "trainer_gpu_ids": () if on_cpu else config.trainer_gpu_ids or (),
        "teacher_gpu_ids": config.teacher_gpu_ids or (),
    }


def _first_gpus(config: RLConfig, num_gpus: int) -> Sequence[int]:
    """What the server gets when nobody says: as many of the first GPUs as its copies and shards need."""
    if config.inference is None or num_gpus == 0:
        return ()
    needed = config.inference.parallel.dp * config.inference.parallel.tp
    if needed > num_gpus:
        raise ConfigError(
            f"inference.parallel needs dp x tp = {needed} GPUs, but only {num_gpus} can be seen on this machine "
            "(CUDA_VISIBLE_DEVICES counts)"
        )
    return range(needed)


def _client_keys(config: RLConfig) -> dict[str, str]:
    """The keys of the servers that are started, for the orchestrator. Raises: ConfigError for two in one variable."""
    keys = _client_key(config.inference.api_key if config.inference else None, config.orchestrator.client)
    model = config.orchestrator.teacher_model
    if config.teacher_inference is None or model is None:
        return keys
    of_teacher = _client_key(config.teacher_inference.api_key, model.client)
    if any(keys.get(name, key) != key for name, key in of_teacher.items()):
        raise ConfigError(
            f"the policy's server and the teacher's have different keys, and both are sent from the variable "
            f"{model.client.api_key_var}; set orchestrator.teacher_model.client.api_key_var to another name"
        )
    return keys | of_teacher


def _client_key(api_key: str | None, client: ClientConfig) -> dict[str, str]:
    return {client.api_key_var: api_key} if api_key else {}
