"""The inference server's process: choose the backend, bind, load, serve until told to stop or the engine fails.

    embedded:  client --HTTP--> uvicorn --> app (routes) --> Service --> Backend (engine)
    vllm:      client --HTTP--> uvicorn --> vLLM's own application, with our admin routes --> vLLM (`inference.vllm`)

Whoever reaches the server can replace its weights, so without an API key only loopback is served; with one, all
interfaces unless a host is given.
"""

import asyncio
import gc
import importlib.util
import os
import socket
from pathlib import Path
from typing import Literal

import torch
import uvloop

from prime_rl import activity, lifeline
from prime_rl.config.inference import InferenceConfig
from prime_rl.errors import ConfigError
from prime_rl.inference.app import build_app
from prime_rl.inference.backend import Backend
from prime_rl.inference.embedded import EmbeddedAdministration
from prime_rl.inference.engine.build import build_engine
from prime_rl.inference.http_server import LOADING_S, Server, bind, say_where, serve_until_stopped
from prime_rl.inference.replies import ReplyFormat
from prime_rl.inference.service import Service
from prime_rl.inference.tokenizer import TextTokenizer
from prime_rl.inference.vllm import server as vllm_server
from prime_rl.models.hf import model_tensors, resolve_model

API_KEY_VARIABLE = "VLLM_API_KEY"
"""Environment variable with the key where the configuration of a server that was not launched has none; vLLM reads the
same one."""

BackendName = Literal["embedded", "vllm"]

ONLY_VLLM: dict[str, object] = {
    "parallel.tp": 1,
    "parallel.dp": 1,
    "kv_cache_offload": None,
    "model.rope_scaling": None,
    "model.trust_remote_code": False,
    "enable_expert_parallel": False,
    "all2all_backend": "allgather_reducescatter",
    "enable_eplb": False,
    "enable_return_routed_experts": False,
    "vllm": {},
}
"""Keys that the embedded engine has no use for, and the values that ask it for nothing."""


def run(config: InferenceConfig) -> None:
    """Serve until SIGTERM or SIGINT; InferenceError when the engine fails."""
    check_alone(config)
    backend = choose_backend(config)
    api_key = api_key_of(config)
    # Bound before the model is loaded, so that a taken port is known at once.
    with bind(host_of(config, api_key), config.server.port) as listener:
        directory = resolve_model(config.model.name)
        if backend == "vllm":
            vllm_server.run(config, directory, listener, api_key)
            return
        tokenizer, replies = TextTokenizer.load(directory), ReplyFormat.of(config.model)
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(_load_and_serve(config, directory, tokenizer, replies, listener, api_key))


def check_alone(config: InferenceConfig) -> None:
    """Raise ConfigError for what only a launcher can do; one writes `router = false` for the servers that it starts."""
    if config.router:
        raise ConfigError(
            "router is for rl, which starts vllm-router in front of its servers, and `inference` is one server: leave "
            "the key out, start vllm-router yourself, and name it in the orchestrator's client.base_url and the "
            "servers in client.admin_base_url"
        )


def choose_backend(config: InferenceConfig) -> BackendName:
    """The engine that serves: the one place that decides what `backend` means.

    Raises: ConfigError where it is not installed, or cannot do what the configuration asks for.
    """
    is_installed = importlib.util.find_spec("vllm") is not None
    may_be_vllm = config.backend == "auto" and is_installed and config.device != "cpu" and not config.deterministic
    wants_vllm = config.backend == "vllm" or (may_be_vllm and torch.cuda.is_available())
    if wants_vllm and not is_installed:
        raise ConfigError("backend = 'vllm', and vLLM is not installed: pip install 'prime-rl[vllm]'")
    if wants_vllm:
        return "vllm"
    if config.weight_broadcast.type == "nccl":
        raise ConfigError(
            "weight_broadcast.type = 'nccl' needs vLLM, and the embedded engine would serve "
            f"(backend = {config.backend!r}): {_way_to_vllm(config, is_installed)} (auto and filesystem work)"
        )
    for key, neutral in ONLY_VLLM.items():
        if (value := _value(config, key)) != neutral:
            raise ConfigError(
                f"{key} = {value!r} needs vLLM, and the embedded engine would serve (backend = {config.backend!r}): "
                + _way_to_vllm(config, is_installed)
            )
    return "embedded"


def _way_to_vllm(config: InferenceConfig, is_installed: bool) -> str:
    if not is_installed:
        return "pip install 'prime-rl[vllm]', or leave the key out"
    return "set backend = 'vllm', or leave the key out"


def _value(config: InferenceConfig, key: str) -> object:
    found: object = config
    for part in key.split("."):
        found = getattr(found, part)
    return found


def build_backend(config: InferenceConfig) -> Backend:
    """The embedded engine, with its model loaded."""
    return build_engine(config)


def api_key_of(config: InferenceConfig) -> str | None:
    """The key that clients must send; None asks for none.

    It is the configuration's, else the environment's. A launcher tells its orchestrator the configuration's alone, so
    a server that was launched does not read the environment's.
    """
    is_launched = lifeline.VARIABLE in os.environ
    return config.api_key or (None if is_launched else os.environ.get(API_KEY_VARIABLE)) or None


def host_of(config: InferenceConfig, api_key: str | None) -> str:
    """The address to listen on. Whoever can reach the server can replace its weights, so it is not open by default."""
    host = config.server.host
    if host is None:
        return "0.0.0.0" if api_key else "127.0.0.1"
    if api_key is None and not config.server.is_loopback:
        raise ConfigError(
            f"server.host = {host!r} can be reached from other machines, so an API key is needed: "
            f"set api_key (or, for `inference` alone, the environment variable {API_KEY_VARIABLE}), or leave "
            "server.host out"
        )
    return host


def build_server(service: Service, api_key: str | None, *, ends_with_engine: bool = False) -> Server:
    """The HTTP server of a service, not started; it outlives a failed engine, answering 503, unless told otherwise."""
    backend = service.backend
    failure = (lambda: backend.stats().error) if ends_with_engine else None
    return Server(build_app(service, api_key), close=backend.close, failure=failure, gets_on=_Steps(service))


class _Steps:
    """Whether the engine takes steps while it has requests and is not paused. A server without work is told to get on
    as well, but not one that loads weights, for which somebody waits."""

    def __init__(self, service: Service) -> None:
        self._backend, self._administration = service.backend, service.administration
        self._num_steps = -1

    def __call__(self) -> bool:
        stats = self._backend.stats()
        before, self._num_steps = self._num_steps, stats.steps_total
        has_work = stats.num_running + stats.num_waiting > 0 or self._administration.lock.locked()
        if stats.steps_total > max(before, 0) or not has_work:
            activity.beat()
        return stats.paused or stats.num_running == 0 or stats.steps_total != before


async def serve(service: Service, listener: socket.socket, api_key: str | None) -> None:
    """Serve on a bound socket until SIGTERM or SIGINT; the backend is closed then.

    A failed engine serves no more, so it ends the server, too: requests in flight are answered, then InferenceError.
    """

    def serving() -> str:
        stats = service.backend.stats()
        return f"serving weights {stats.version}, {stats.num_running + stats.num_waiting} requests"

    say_where(listener, service.model_name, api_key)
    with activity.doing(serving):
        await serve_until_stopped(build_server(service, api_key, ends_with_engine=True), listener)


async def _load_and_serve(
    config: InferenceConfig,
    directory: Path,
    tokenizer: TextTokenizer,
    replies: ReplyFormat,
    listener: socket.socket,
    api_key: str | None,
) -> None:
    with activity.doing("loading the model", deadline_s=LOADING_S):
        backend = build_backend(config)
    administration = EmbeddedAdministration(
        backend,
        first=lambda: model_tensors(directory, config.seed),
        recompute=config.kv_cache_on_update == "recompute",
    )
    service = Service.build(
        backend,
        tokenizer,
        model_name=config.model.name,
        model_root=str(directory),
        administration=administration,
        replies=replies,
    )
    # Everything loaded so far stays to the end. Garbage collections that visit it would hold up the event loop, and
    # the last one, when the interpreter exits, takes seconds.
    gc.collect()
    gc.freeze()
    await serve(service, listener, api_key)
