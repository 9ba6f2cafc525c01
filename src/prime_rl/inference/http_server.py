"""The HTTP side of the server's process: a bound socket, signals, and an end that nobody has to wait for."""

import errno
import signal
import socket
from collections.abc import Awaitable, Callable
from types import FrameType

import uvicorn
from starlette.types import ASGIApp

from prime_rl import activity
from prime_rl.errors import ConfigError, InferenceError
from prime_rl.logs import get_logger
from prime_rl.ports import in_use

logger = get_logger(__name__)

SHUTDOWN_S = 1
"""Time that answers under way get to be sent when the server is told to stop."""

KEEP_ALIVE_S = 75
"""How long an idle connection stays: longer than a client keeps one (httpx: 5 s). Where the server closes first, a
request that is just being sent on it is lost."""

LOADING_S = 3600.0
"""Seconds after which a server hangs that loads its model still."""

BACKLOG = 2048
"""Connections that may wait to be accepted: a whole batch of rollouts connects at once."""


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
    """An HTTP server that closes its engine first when it stops, so that requests in flight end at once (503).

    `failure` tells why the engine stopped, None while it works; where it is given, a failed engine ends the server.
    """

    def __init__(
        self,
        app: ASGIApp,
        *,
        close: Callable[[], Awaitable[None]],
        failure: Callable[[], str | None] | None = None,
        lifespan: bool = False,
        gets_on: Callable[[], bool] = lambda: True,
    ) -> None:
        """`gets_on`: whether its engine did something since it was asked last, or has nothing to do."""
        config = uvicorn.Config(
            app,
            backlog=BACKLOG,
            log_config=None,
            access_log=False,
            lifespan="on" if lifespan else "off",
            timeout_keep_alive=KEEP_ALIVE_S,
            timeout_graceful_shutdown=SHUTDOWN_S,
        )
        super().__init__(config)
        self._close = close
        self._failure = failure
        self._gets_on = gets_on
        self.engine_failure: str | None = None
        """Why the engine stopped, where that ended the server."""
        self._is_told = False

    async def on_tick(self, counter: int) -> bool:
        """Whether to stop; uvicorn asks ten times a second."""
        activity.loop_beat()
        if self._gets_on():
            activity.engine_beat()
        if self._failure is not None:
            self.engine_failure = self.engine_failure or self._failure()
        return await super().on_tick(counter) or self.engine_failure is not None or self._is_told

    def stop(self, number: int, frame: FrameType | None) -> None:
        """A signal's handler: the server ends at its next tick, also where uvicorn does not listen to signals yet."""
        self._is_told = True
        logger.info("Stopped by %s", signal.Signals(number).name)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        await self._close()
        await super().shutdown(sockets)


async def serve_until_stopped(server: Server, listener: socket.socket) -> None:
    """Serve on a bound socket until SIGTERM or SIGINT.

    A failed engine serves no more, so it ends the server, too: requests in flight are answered, then InferenceError.
    """
    # uvicorn stops on a signal and then raises it again for the handler that was there before. Being told to stop is
    # no failure, so that handler does nothing then.
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, server.stop)
    host, port = listener.getsockname()[:2]
    try:
        await server.serve(sockets=[listener])
    except OSError as error:
        raise _cannot_listen(host, port, error) from error
    if server.engine_failure is not None:
        raise InferenceError(server.engine_failure)


def say_where(listener: socket.socket, model: str, api_key: str | None, engine: str = "") -> None:
    """One line in the log, once requests can be answered."""
    host, port = listener.getsockname()[:2]
    key = "API key" if api_key else "no key"
    logger.info("Serving %s on http://%s:%d (%s)%s", model, host, port, key, f" with {engine}" if engine else "")


def _cannot_listen(host: str, port: int, error: OSError) -> ConfigError:
    if error.errno == errno.EADDRINUSE:
        return in_use(host, port, "server.port (0 takes a free one)")
    return ConfigError(f"cannot listen on {host} port {port} (server.host, server.port): {error.strerror or error}")
