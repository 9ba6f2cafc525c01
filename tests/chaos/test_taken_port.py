"""A port that somebody else listens on is refused before anything is started or deleted."""

import os
import socket
import subprocess
from pathlib import Path

import psutil

from prime_rl.paths import RunPaths
from tests.integration.conftest import MODEL, ROOT, command


def refused(*argv: str) -> str:
    """What a command says that refuses to begin."""
    done = subprocess.run(command(*argv), cwd=ROOT, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 1, done.stderr
    assert "Traceback" not in done.stderr
    return done.stderr


def test_rl_with_clean_starts_and_deletes_nothing_where_its_port_is_taken(tmp_path: Path, free_port: int):
    kept = tmp_path / "weights" / "step_1" / "model.safetensors"
    kept.parent.mkdir(parents=True)
    kept.write_text("of the run before")
    flags = ("--inference.server.port", str(free_port), "--output-dir", str(tmp_path), "--clean")
    with socket.create_server(("127.0.0.1", free_port)):
        said = refused("rl", "--model.name", MODEL, *flags)
    assert said.startswith(f"rl: port {free_port} on 127.0.0.1 is already in use, by pid {os.getpid()} (")
    assert said.endswith("choose another port with inference.server.port\n")
    assert kept.read_text() == "of the run before"
    assert not RunPaths(tmp_path).config("inference").exists()
    assert psutil.Process().children() == []


def test_inference_says_who_has_its_port(tmp_path: Path, free_port: int):
    with socket.create_server(("127.0.0.1", free_port)):
        flags = ("--server.port", str(free_port), "--output-dir", str(tmp_path))
        said = refused("inference", "--model.name", MODEL, *flags)
    assert f"port {free_port} on 127.0.0.1 is already in use, by pid {os.getpid()} (" in said
    assert "choose another port with server.port (0 takes a free one)" in said
