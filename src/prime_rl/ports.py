"""TCP ports of this machine: whether one can be listened on, and who does."""

import errno
import socket
from typing import Final

import psutil

from prime_rl.errors import ConfigError

MAX_COMMAND: Final = 100
"""Characters of a command line that are shown."""


def check_free(host: str, port: int, key: str) -> None:
    """See whether a server could listen at `port`, which the configuration `key` names; 0 is always free.

    Connections that just ended do not count. Raises: ConfigError saying who listens there.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
            probe.listen(1)
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise in_use(host, port, key) from None


def in_use(host: str, port: int, key: str) -> ConfigError:
    """That a port is taken, by whom, and what to change."""
    return ConfigError(
        f"port {port} on {host} is already in use{_by_whom(port)}: stop the process that listens there, or choose "
        f"another port with {key}"
    )


def _by_whom(port: int) -> str:
    """`, by pid 4711 (python -m http.server 8000)`; nothing where this user may not see it."""
    try:
        found = [one for one in psutil.net_connections("tcp") if one.status == psutil.CONN_LISTEN]
        pid = next((one.pid for one in found if one.laddr and one.laddr.port == port and one.pid), None)
        if pid is None:
            return ""
        command = " ".join(psutil.Process(pid).cmdline())
    except (psutil.Error, OSError):
        return ""
    shown = command if len(command) <= MAX_COMMAND else f"{command[:MAX_COMMAND]}..."
    return f", by pid {pid} ({shown})"
