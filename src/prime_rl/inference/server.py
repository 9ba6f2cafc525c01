"""The inference server's process: bind, load, serve until told to stop or the engine fails.

    client --HTTP--> uvicorn --> app (routes) --> Service --> Backend (engine)

Whoever reaches the server can replace its weights, so without an API key only loopback is served; with one, all
interfaces unless a host is given.
"""

import asyncio
import errno
import gc
import ipaddress
import os
import signal
import socket
from pathlib import Path
from types import FrameType

import uvicorn
import uvloop

from prime_rl import lifeline
from prime_rl.config.inference import InferenceConfig
from prime_rl.errors import ConfigError, InferenceError
from prime_rl.inference.app import build_app
from prime_rl.inference.backend import Backend
from prime_rl.inference.embedded import EmbeddedAdministration
from prime_rl.inference.engine.build import build_engine
from prime_rl.inference.service import Service
from prime_rl.inference.tokenizer import TextTokenizer
from prime_rl.logs import get_logger
from prime_rl.models.hf import model_tensors, resolve_model

logger = get_logger(__name__)

API_KEY_VARIABLE = "VLLM_API_KEY"
"""Environment variable with the key where the configuration of a server that was not launched has none; vLLM reads the
same one."""

SHUTDOWN_S = 1
"""Time that answers under way get to be sent when the server is told to stop."""

BACKLOG = 2048
"""Connections that may wait to be accepted: a whole batch of rollouts connects at once."""


def run(config: InferenceConfig) -> None:
    """Serve until SIGTERM or SIGINT; InferenceError when the engine fails."""
    choose_backend(config)
    api_key = api_key_of(config)
    # Bound before the model is loaded, so that a taken port is known at once.
    with bind(host_of(config, api_key), config.server.port) as listener:
        directory = resolve_model(config.model.name)
        tokenizer = TextTokenizer.load(directory)
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(_load_and_serve(config, directory, tokenizer, listener, api_key))


def choose_backend(config: InferenceConfig) -> str:
    """The engine that serves: the one place that decides what `backend` means."""
    if config.backend == "vllm":
        raise ConfigError(
            "backend = 'vllm' comes with a later version of prime-rl; set backend = 'embedded', or leave it out"
        )
    return "embedded"


def build_backend(config: InferenceConfig) -> Backend:
    """The engine, with its model loaded."""
    assert choose_backend(config) == "embedded"
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
    if api_key is None and not _is_loopback(host):
        raise ConfigError(
            f"server.host = {host!r} can be reached from other machines, so an API key is needed: "
            f"set api_key (or, for `inference` alone, the environment variable {API_KEY_VARIABLE}), or leave "
            "server.host out"
        )
    return host


def bind(host: str, port: int) -> socket.socket:
    """A socket that is bound but does not listen yet; ConfigError where the address cannot be had."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listener = socket.socket(family, kind, protocol)
    except OSError as error:
        raise ConfigError(f"server.host = {host!r} is no address of this machine: {error}") from error
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind(address)
    except OSError as error:
        listener.close()
        raise _cannot_listen(host, port, error) from error
    return listener


class Server(uvicorn.Server):
    """An HTTP server that closes its backend first when it stops, so that requests in flight end at once (503)."""

    def __init__(self, config: uvicorn.Config, backend: Backend, *, ends_with_engine: bool) -> None:
        super().__init__(config)
        self._backend = backend
        self._ends_with_engine = ends_with_engine
        self.engine_failure: str | None = None
        """Why the engine stopped, where that ended the server."""

    async def on_tick(self, counter: int) -> bool:
        """Whether to stop; uvicorn asks ten times a second."""
        if self._ends_with_engine:
            self.engine_failure = self._backend.stats().error
        return await super().on_tick(counter) or self.engine_failure is not None

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        await self._backend.close()
        await super().shutdown(sockets)


def build_server(service: Service, api_key: str | None, *, ends_with_engine: bool = False) -> Server:
    """The HTTP server of a service, not started; it outlives a failed engine, answering 503, unless told otherwise."""
    config = uvicorn.Config(
        build_app(service, api_key),
        backlog=BACKLOG,
        log_config=None,
        access_log=False,
        lifespan="off",
        timeout_graceful_shutdown=SHUTDOWN_S,
    )
    return Server(config, service.backend, ends_with_engine=ends_with_engine)


async def serve(service: Service, listener: socket.socket, api_key: str | None) -> None:
    """Serve on a bound socket until SIGTERM or SIGINT; the backend is closed then.

    A failed engine serves no more, so it ends the server, too: requests in flight are answered, then InferenceError.
    """
    # uvicorn stops on a signal and then raises it again for the handler that was there before. Being told to stop is
    # no failure, so that handler does nothing.
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, _stopped)
    host, port = listener.getsockname()[:2]
    logger.info("Serving %s on http://%s:%d (%s)", service.model_name, host, port, "API key" if api_key else "no key")
    server = build_server(service, api_key, ends_with_engine=True)
    try:
        await server.serve(sockets=[listener])
    except OSError as error:
        raise _cannot_listen(host, port, error) from error
    if server.engine_failure is not None:
        raise InferenceError(server.engine_failure)


async def _load_and_serve(
    config: InferenceConfig,
    directory: Path,
    tokenizer: TextTokenizer,
    listener: socket.socket,
    api_key: str | None,
) -> None:
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
    )
    # Everything loaded so far stays to the end. Garbage collections that visit it would hold up the event loop, and
    # the last one, when the interpreter exits, takes seconds.
    gc.collect()
    gc.freeze()
    await serve(service, listener, api_key)


def _stopped(number: int, frame: FrameType | None) -> None:
    logger.info("Stopped by %s", signal.Signals(number).name)


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _cannot_listen(host: str, port: int, error: OSError) -> ConfigError:
    if error.errno == errno.EADDRINUSE:
        return ConfigError(
            f"port {port} on {host} is already in use: stop the process that listens there, or choose another port "
            "with server.port (0 takes a free one)"
        )
    return ConfigError(f"cannot listen on {host} port {port} (server.host, server.port): {error.strerror or error}")
