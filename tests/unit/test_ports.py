import socket
import subprocess
import sys

import pytest

from prime_rl.errors import ConfigError
from prime_rl.ports import check_free

LISTENS = """
import socket, sys
server = socket.create_server(("127.0.0.1", int(sys.argv[1])))
print("listening", flush=True)
sys.stdin.read()
"""


def test_a_port_that_somebody_listens_on_is_refused_with_who_and_which_key(free_port):
    argv = [sys.executable, "-c", LISTENS, str(free_port)]
    with subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == "listening\n"
        with pytest.raises(ConfigError) as caught:
            check_free("127.0.0.1", free_port, "server.port")
    said = str(caught.value)
    assert said.startswith(f"port {free_port} on 127.0.0.1 is already in use, by pid {other.pid} ({sys.executable} -c")
    assert said.endswith("choose another port with server.port")
    assert len(said) < 350  # however long the command is
    check_free("127.0.0.1", free_port, "server.port")  # it has ended


def test_who_listens_is_left_out_where_it_cannot_be_seen(free_port, monkeypatch):
    monkeypatch.setattr("prime_rl.ports.psutil.net_connections", lambda kind: [])
    with socket.create_server(("127.0.0.1", free_port)), pytest.raises(ConfigError, match=r"is already in use: stop"):
        check_free("127.0.0.1", free_port, "server.port")


def test_a_connection_that_just_ended_does_not_take_the_port(free_port):
    address = ("127.0.0.1", free_port)
    with socket.create_server(address) as server, socket.create_connection(address), server.accept()[0] as ours:
        ours.shutdown(socket.SHUT_RDWR)  # this end closes first, and so keeps the port for a minute
    check_free("127.0.0.1", free_port, "server.port")
    check_free("127.0.0.1", 0, "server.port")
