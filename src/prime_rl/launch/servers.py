"""The plan of the inference servers of a run: which processes serve, where they listen, and how they are reached.

    backend     parallel.dp = n         GPUs                         reached at
    embedded    n servers, one each     one each, or shared cores    port .. port + n - 1
    vllm        one server, its own n   all of them                  port

With `inference.router`, vllm-router listens at the port and the servers on the ports after it.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from urllib.parse import urlsplit, urlunsplit

from prime_rl.config.inference import InferenceConfig
from prime_rl.config.shared import ClientConfig
from prime_rl.errors import ConfigError
from prime_rl.launch.machine import Machine, ProcessSpec, placed
from prime_rl.ports import check_free

MAX_PORT = 65535
ROUTER = "vllm-router"
SECTIONS = {"inference": "inference", "teacher": "teacher_inference"}
"""Name of the processes -> where they are configured."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Serving:
    """The servers' processes, and the client that reaches them."""

    client: ClientConfig
    specs: list[ProcessSpec] = field(default_factory=list)


def uses_vllm(config: InferenceConfig, machine: Machine, gpu_ids: Sequence[int]) -> bool:
    """Which backend `inference` will choose on its GPUs."""
    if config.backend == "auto":
        return machine.has_vllm and config.device != "cpu" and bool(gpu_ids)
    return config.backend == "vllm"


def plan_servers(
    config: InferenceConfig,
    client: ClientConfig,
    machine: Machine,
    gpu_ids: Sequence[int],
    *,
    num_others: int = 1,
    name: str = "inference",
) -> Serving:
    """The processes that serve with `config` on these GPUs, called `name`.

    `num_others`: processes that need cores of a machine without GPUs beside them.
    Raises: ConfigError where the embedded engine cannot be spread so, ports end, or there is no router.
    """
    section = SECTIONS[name]
    is_vllm = uses_vllm(config, machine, gpu_ids)
    if not is_vllm and config.parallel.tp > 1:
        raise ConfigError(
            f"{section}.parallel.tp = {config.parallel.tp} needs vLLM, and the embedded engine would serve; set "
            f"{section}.parallel.tp to 1 ({section}.parallel.dp starts several servers)"
        )
    number = 1 if is_vllm else config.parallel.dp
    first_port = config.server.port + config.router
    if first_port + number - 1 > MAX_PORT:
        raise ConfigError(
            f"{number} servers need ports up to {first_port + number - 1}; set {section}.server.port lower"
        )
    specs = []
    for index in range(number):
        listening = {"server": config.server.model_copy(update={"port": first_port + index}), "router": False}
        one = config.model_copy(update=listening)
        if number > 1:
            one = one.model_copy(update={"parallel": config.parallel.model_copy(update={"dp": 1})})
        ids = gpu_ids if number == 1 else gpu_ids[index : index + 1]
        env = placed(machine, ids, num_shares=number * (1 + num_others))
        own = name if number == 1 else f"{name}-{index}"
        service = ProcessSpec(name=own, command="inference", config=one, env=env, pool=name, is_service=True)
        specs.append(replace(service, port=first_port + index))
    addresses = _addresses(client, config, first_port, number)
    if not config.router:
        return Serving(specs=specs, client=client.model_copy(update={"base_url": addresses}))
    specs.append(_router(config, machine, addresses, section))
    behind = client.model_copy(update={"admin_base_url": addresses})
    return Serving(specs=specs, client=behind)


def check_ports(specs: Iterable[ProcessSpec]) -> None:
    """See whether every server of a plan can listen. Raises: ConfigError saying on which port somebody else does."""
    for spec in specs:
        if spec.port is not None:
            check_port(spec, spec.port)


def check_port(spec: ProcessSpec, port: int) -> None:
    """As `check_ports`, of one server: at the address where it listens, and at no other."""
    section = SECTIONS["teacher" if spec.name.startswith("teacher") else "inference"]
    is_open = isinstance(spec.config, InferenceConfig) and spec.config.api_key
    host = getattr(getattr(spec.config, "server", None), "host", None)
    check_free(host or ("0.0.0.0" if is_open else "127.0.0.1"), port, f"{section}.server.port")


def _addresses(client: ClientConfig, config: InferenceConfig, first_port: int, number: int) -> tuple[str, ...]:
    """Addresses of the servers, as the client spells the first: with its host."""
    given = client.base_url
    if len(given) > 1 and not config.router:
        if len(given) == number:
            return given
        raise ConfigError(
            f"client.base_url names {len(given)} servers and {number} are started; leave it out, or name the first"
        )
    parts = urlsplit(given[0])
    host = parts.netloc.rpartition(":")[0] if parts.port else parts.netloc
    return tuple(urlunsplit(parts._replace(netloc=f"{host}:{first_port + index}")) for index in range(number))


def _router(config: InferenceConfig, machine: Machine, addresses: Sequence[str], section: str) -> ProcessSpec:
    """vllm-router before the servers; turns of a conversation go to the same one (`X-Session-ID`).

    It asks nobody for a key: whoever reaches it can add servers, and is sent the client's key. So it listens on
    loopback alone.
    """
    host = config.server.host
    if host is not None and not config.server.is_loopback:
        raise ConfigError(
            f"{section}.router: vllm-router asks nobody for a key, so it may not be reached from other machines, and "
            f"{section}.server.host = {host!r}; leave the host out, or the router"
        )
    if machine.router is None:
        raise ConfigError(
            f"{section}.router needs vllm-router, which is not installed: pip install vllm-router, or leave the router "
            "out (the orchestrator spreads rollouts over several servers itself)"
        )
    roots = [address.removesuffix("/v1") for address in addresses]
    argv = [machine.router, "--host", "127.0.0.1", "--port", str(config.server.port)]
    argv += ["--worker-urls", *roots, "--policy", "consistent_hash", "--worker-startup-check-interval", "1"]
    argv += ["--health-check-interval-secs", "1", "--health-failure-threshold", "2", "--log-level", "warning"]
    name = "router" if section == "inference" else "teacher-router"
    router = ProcessSpec(name=name, command=ROUTER, argv=tuple(argv), env=placed(machine, ()), is_service=True)
    return replace(router, port=config.server.port)
