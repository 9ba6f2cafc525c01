"""What a plan is made of: processes, and the machine that they are placed on."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from pydantic import BaseModel


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessSpec:
    """One process of a run.

    Example: ProcessSpec(name="trainer", command="trainer", config=trainer, env={"CUDA_VISIBLE_DEVICES": "1"})
    """

    name: str
    command: str
    """The `prime-rl` command that it runs on its resolved configuration, or the name of somebody else's (`argv`)."""
    config: BaseModel | None = None
    argv: tuple[str, ...] = ()
    """The words of a command that is not ours."""
    env: Mapping[str, str] = field(default_factory=dict)
    """Added to the environment of the launcher."""
    num_ranks: int = 1
    """Processes that do its work together on this machine; more than one are started and watched by torchrun."""
    pool: str = ""
    """Services of one pool do the same work: one may end while another runs."""
    port: int | None = None
    """Where it listens on this machine."""
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
    has_vllm: bool = False
    """Whether vLLM is installed, beside a torch that computes on GPUs."""
    router: str | None = None
    """The vllm-router command, where it is installed."""
    free_port: int | None = None
    """A TCP port that nobody used a moment ago. None: nobody looked."""


def placed(machine: Machine, gpu_ids: Sequence[int], *, num_shares: int = 2, num_ranks: int = 1) -> dict[str, str]:
    """Environment of a process on these GPUs; without, it gets one of `num_shares` equal shares of the cores.

    Each of several ranks gets an equal part of that, beside GPUs too, where torchrun would give it one core.
    """
    env = {
        "CUDA_VISIBLE_DEVICES": ",".join(machine.gpus[gpu] for gpu in gpu_ids),
        "PYTHONUNBUFFERED": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }
    if not machine.gpus or num_ranks > 1:
        env["OMP_NUM_THREADS"] = str(max(1, machine.num_cpus // num_shares // num_ranks))
    return env
