"""A bash of a reader of the documents: a clean environment, a `uv` that runs this environment's commands."""

import re
import signal
import socket
import subprocess
import sysconfig
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.seeds.listed import LIST

ROOT = Path(__file__).parents[2]
SCRIPTS = Path(sysconfig.get_path("scripts"))

_UV = f"""\
#!/bin/sh
# `uv run X ...` runs X with this environment's commands first on the PATH.
[ "$1" = run ] || {{ echo "uv: only run is here, not $1" >&2; exit 2; }}
shift
PATH="{SCRIPTS}:$PATH"; export PATH
exec "$@"
"""


@dataclass(frozen=True)
class Outcome:
    """What a command left behind."""

    status: int
    output: str
    errors: str
    directory: Path

    def configs(self, output_dir: str) -> Path:
        """Where the resolved configurations are."""
        return self.directory / output_dir / "configs"

    def written(self, output_dir: str) -> dict[str, dict[str, Any]]:
        """The resolved configurations by name of their file."""
        return {path.stem: tomllib.loads(path.read_text()) for path in self.configs(output_dir).glob("*")}

    def notices(self) -> list[str]:
        """What is said of the spelling of the command. (A dry run also says what a real start would refuse.)"""
        notices = [line.partition(": note: ")[2] for line in self.errors.splitlines()]
        return [notice for notice in notices if notice and not notice.startswith("a real start would refuse")]


class Shell:
    """Runs commands, each in a new directory that holds the repository's configs, examples, src and scripts."""

    def __init__(self, home: Path) -> None:
        self._home = home
        self._count = 0
        shim = home / "bin" / "uv"
        shim.parent.mkdir()
        shim.write_text(_UV)
        shim.chmod(0o755)

    def directory(self, files: Mapping[str, str] | None = None) -> Path:
        """A new working directory, with the files that the documents have their reader write, and `files`."""
        self._count += 1
        directory = self._home / f"{self._count:03}"
        (directory / "configs").mkdir(parents=True)
        for name in ("examples", "src", "scripts"):
            (directory / name).symlink_to(ROOT / name)
        for path in (ROOT / "configs").iterdir():
            (directory / "configs" / path.name).symlink_to(path)
        for name, text in {**LIST["files"], **(files or {})}.items():
            (directory / name).parent.mkdir(exist_ok=True)
            (directory / name).write_text(text)
        return directory

    def variables(self) -> dict[str, str]:
        """What a reader has exported, with a free port of this machine where nodes meet."""
        return {**LIST["variables"], "RDZV_ENDPOINT": f"127.0.0.1:{free_port()}"}

    def start(self, text: str, directory: Path, variables: Mapping[str, str] | None = None) -> subprocess.Popen[str]:
        """Start bash on `text`."""
        path = f"{self._home / 'bin'}:/usr/local/bin:/usr/bin:/bin"
        return subprocess.Popen(
            ["bash", "-c", text],
            cwd=directory,
            # one thread: the models are tiny, and the other tests that run at this time want a core, too
            env={"PATH": path, "HOME": str(self._home), "OMP_NUM_THREADS": "1", **(variables or {})},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def run(self, text: str, directory: Path, variables: Mapping[str, str] | None = None) -> Outcome:
        """Run `text` to its end."""
        return finish(self.start(text, directory, variables), directory)


def free_port() -> int:
    """A TCP port on loopback that nobody listens on just now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def finish(process: subprocess.Popen[str], directory: Path, timeout: float = 100.0) -> Outcome:
    """Wait for the end of a command, and no longer than `timeout` seconds."""
    try:
        output, errors = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        process.send_signal(signal.SIGTERM)
        output, errors = process.communicate(timeout=20)
        raise AssertionError(f"no end after {timeout} s:\n{output[-2000:]}\n{errors[-2000:]}") from None
    return Outcome(process.returncode, output, errors, directory)


def dry(text: str) -> str:
    """The command as it is typed for a dry run: placeholders replaced, no continuation into nothing."""
    text = re.sub(r"<([\w-]+)>", lambda match: LIST["placeholders"][match[1]], text)
    text = text.rstrip().removesuffix("\\").rstrip()
    return text if text.endswith("--help") else f"{text} --dry-run"
