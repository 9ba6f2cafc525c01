"""Plan, then launch: a configuration becomes a list of process specifications, and nothing happens yet.

Pure functions of their arguments, so that a test can compare a plan with a golden file, and so that a cluster launcher
can consume the same plan. `launch.local` starts one on this machine.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from pydantic import BaseModel

from prime_rl.config.evals import EvalConfig
from prime_rl.config.roots import RLConfig
from prime_rl.config.shared import ClientConfig
from prime_rl.errors import ConfigError
from prime_rl.paths import RunPaths

SHARED_GPU_UTILIZATION = 0.4
CPU_EXAMPLE = "rl @ examples/reverse_text_cpu/rl.toml"


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessSpec:
    """One process of a run.

    Example: ProcessSpec(name="trainer", command="trainer", config=trainer, env={"CUDA_VISIBLE_DEVICES": "1"})
    """

    name: str
    command: str
    """The `prime-rl` command that it runs on its resolved configuration."""
    config: BaseModel
    env: Mapping[str, str] = field(default_factory=dict)
    """Added to the environment of the launcher."""
    is_service: bool = False
    """Runs until the others are done, and is then stopped; the others end by themselves."""
    owns_terminal: bool = False
    """Writes to the terminal instead of its log file."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """What the plan must know of the machine."""

    gpus: tuple[str, ...]
    """Visible GPUs, as CUDA_VISIBLE_DEVICES names them."""
    num_cpus: int


def plan_rl(config: RLConfig, machine: Machine | None) -> list[ProcessSpec]:
    """The processes of `rl`, in the order in which they are started. ConfigError where the GPUs do not suffice.

    `machine` None: one that is not known yet and has whatever the configuration names.
    """
    if machine is None:
        named = (*(config.inference_gpu_ids or ()), *(config.trainer_gpu_ids or ()), *(config.teacher_gpu_ids or ()))
        machine = Machine(gpus=tuple(map(str, range(max(named, default=-1) + 1))), num_cpus=1)
    inference_ids, trainer_ids = _gpu_ids(config, len(machine.gpus))
    specs = []
    if config.inference is not None:
        server = config.inference
        if set(inference_ids) & set(trainer_ids):  # the trainer on the same GPU needs memory too
            share = min(server.gpu_memory_utilization, SHARED_GPU_UTILIZATION)
            server = server.model_copy(update={"gpu_memory_utilization": share})
        env = _placed(machine, inference_ids)
        specs.append(ProcessSpec(name="inference", command="inference", config=server, env=env, is_service=True))
    key = _client_key(config.inference.api_key if config.inference else None, config.orchestrator.client)
    specs += [
        ProcessSpec(
            name="orchestrator", command="orchestrator", config=config.orchestrator, env=_placed(machine, ()) | key
        ),
        ProcessSpec(name="trainer", command="trainer", config=config.trainer, env=_placed(machine, trainer_ids)),
    ]
    return specs


def plan_eval(config: EvalConfig, machine: Machine) -> list[ProcessSpec]:
    """The processes of an `eval` that starts its own server."""
    model = config.inference.model.model_copy(update={"name": config.model.name})
    server = config.inference.model_copy(update={"model": model, "output_dir": config.output_dir})
    client = ClientConfig(base_url=(f"http://localhost:{server.server.port}/v1",))
    runner = config.model_copy(update={"client": client})
    ids = (0,) if machine.gpus else ()
    alone = Machine(gpus=machine.gpus, num_cpus=2 * machine.num_cpus)  # nobody trains beside it
    key = _client_key(server.api_key, client)
    return [
        ProcessSpec(name="inference", command="inference", config=server, env=_placed(alone, ids), is_service=True),
        ProcessSpec(name="eval", command="eval", config=runner, env=_placed(machine, ()) | key, owns_terminal=True),
    ]


def config_path(spec: ProcessSpec, output_dir: Path) -> Path:
    """Where the resolved configuration of a process is written."""
    return RunPaths(output_dir).config(spec.name)


def _gpu_ids(config: RLConfig, num_gpus: int) -> tuple[Sequence[int], Sequence[int]]:
    """GPU ids of server and trainer; explicit ones must be visible, absent ones take what there is."""
    ids = {key: getattr(config, key) for key in ("inference_gpu_ids", "trainer_gpu_ids", "teacher_gpu_ids")}
    for key, given in ids.items():
        missing = [gpu for gpu in given or () if gpu >= num_gpus]
        if missing:
            seen = f"only {num_gpus} of them" if num_gpus else "none"
            raise ConfigError(
                f"{key} asks for GPU {missing[0]}, but {seen} can be seen on this machine "
                f"(CUDA_VISIBLE_DEVICES counts); without GPUs, this runs anywhere: {CPU_EXAMPLE}"
            )
    inference = config.inference_gpu_ids or _first_gpus(config, num_gpus)
    free = [gpu for gpu in range(num_gpus) if gpu not in inference]
    trainer = config.trainer_gpu_ids or ((free[0] if free else num_gpus - 1,) if num_gpus else ())
    return inference, trainer


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


def _placed(machine: Machine, gpu_ids: Sequence[int]) -> dict[str, str]:
    """Environment of a process on these GPUs; on a CPU, server and trainer share the cores half and half."""
    env = {
        "CUDA_VISIBLE_DEVICES": ",".join(machine.gpus[gpu] for gpu in gpu_ids),
        "PYTHONUNBUFFERED": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }
    if not machine.gpus:
        env["OMP_NUM_THREADS"] = str(max(1, machine.num_cpus // 2))
    return env


def _client_key(api_key: str | None, client: ClientConfig) -> dict[str, str]:
    return {client.api_key_var: api_key} if api_key else {}
