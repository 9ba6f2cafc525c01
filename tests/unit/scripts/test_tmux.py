"""scripts/tmux.sh against a real tmux: a server of its own, in a directory of its own."""

import os
import pty
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[3] / "scripts" / "tmux.sh"
DEADLINE_S = 20.0

pytestmark = pytest.mark.skipif(shutil.which("tmux") is None, reason="tmux is not installed")


class Terminal:
    """A copy of the script in a repository of its own, and the tmux server that it talks to."""

    def __init__(self, root: Path, socket_dir: str) -> None:
        self.root = root
        self.environment = {
            **os.environ,
            "TMUX_TMPDIR": socket_dir,
            "SHELL": "/bin/bash",
            "HOME": str(root),
            "TERM": "xterm",
        }
        self.environment.pop("TMUX", None)
        (root / "scripts").mkdir()
        shutil.copy(SCRIPT, root / "scripts")

    def script(self, *words: str, code: int = 0) -> str:
        command = ["bash", "scripts/tmux.sh", *words]
        result = subprocess.run(
            command, cwd=self.root, env=self.environment, capture_output=True, text=True, check=False
        )
        assert result.returncode == code, result.stderr
        return result.stderr if code else result.stdout

    def tmux(self, *words: str, code: int = 0) -> str:
        result = subprocess.run(["tmux", *words], env=self.environment, capture_output=True, text=True, check=False)
        assert result.returncode == code, result.stderr
        return result.stdout

    def sessions(self) -> list[str]:
        result = subprocess.run(
            ["tmux", "list-sessions", "-F", "#{session_name}"],
            env=self.environment,
            capture_output=True,
            text=True,
            check=False,
        )
        return sorted(result.stdout.split())

    def panes(self, session: str, what: str) -> list[str]:
        return self.tmux("list-panes", "-t", f"={session}:", "-F", what).splitlines()

    def pane(self, session: str, title: str) -> str:
        (found,) = [line.split()[0] for line in self.panes(session, "#{pane_id} #{@title}") if line.endswith(title)]
        return found

    def command(self, pane: str) -> str:
        return self.tmux("display-message", "-p", "-t", pane, "#{pane_current_command}").strip()

    def text(self, pane: str) -> str:
        return self.tmux("capture-pane", "-p", "-t", pane)

    def close(self) -> None:
        subprocess.run(["tmux", "kill-server"], env=self.environment, capture_output=True, check=False)


def until(is_so: Callable[[], bool]) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not is_so():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.05)


@pytest.fixture
def terminal(tmp_path: Path) -> Iterator[Terminal]:
    with tempfile.TemporaryDirectory(prefix="tmux-") as socket_dir:  # tmp_path may be too long for a socket
        opened = Terminal(tmp_path, socket_dir)
        yield opened
        opened.close()


def write_log(path: Path, line: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as file:
        file.write(line + "\n")


def test_a_session_has_a_pane_for_each_process_from_top_to_bottom(terminal: Terminal) -> None:
    said = terminal.script()

    assert said == "session prime-rl follows outputs\nattach to it: tmux attach -t prime-rl\n"
    assert terminal.sessions() == ["prime-rl"]
    assert terminal.panes("prime-rl", "#{@title}") == ["Trainer", "Orchestrator", "Inference"]
    assert set(terminal.panes("prime-rl", "#{pane_current_path}")) == {str(terminal.root)}
    assert terminal.panes("prime-rl", "#{pane_active}") == ["1", "0", "0"]


def test_logs_show_up_that_are_written_after_the_session_was_opened(terminal: Terminal) -> None:
    terminal.script()
    for process in ("orchestrator", "inference"):
        write_log(terminal.root / "outputs" / "logs" / f"{process}.log", f"the {process} speaks")

    until(lambda: "the orchestrator speaks" in terminal.text(terminal.pane("prime-rl", "Orchestrator")))
    until(lambda: "the inference speaks" in terminal.text(terminal.pane("prime-rl", "Inference")))


def test_a_log_is_followed_again_after_its_directory_was_deleted(terminal: Terminal) -> None:
    log = terminal.root / "outputs" / "logs" / "orchestrator.log"
    write_log(log, "first run")
    terminal.script()
    pane = terminal.pane("prime-rl", "Orchestrator")
    until(lambda: "first run" in terminal.text(pane))

    shutil.rmtree(terminal.root / "outputs")  # what `--clean` does
    write_log(log, "second run")

    until(lambda: "second run" in terminal.text(pane))


def test_ctrl_c_in_a_pane_with_a_log_gives_a_shell(terminal: Terminal) -> None:
    terminal.script()
    pane = terminal.pane("prime-rl", "Inference")
    until(lambda: terminal.command(pane) == "tail")

    terminal.tmux("send-keys", "-t", pane, "C-c")

    until(lambda: terminal.command(pane) == "bash")


@pytest.mark.parametrize("title", ["Trainer", "Orchestrator", "Inference"])
def test_the_virtual_environment_is_active_in_every_pane(terminal: Terminal, title: str) -> None:
    activate = terminal.root / ".venv" / "bin" / "activate"
    activate.parent.mkdir(parents=True)
    activate.write_text("export ACTIVE_ENVIRONMENT=ours\n")
    terminal.script()
    pane = terminal.pane("prime-rl", title)
    if title != "Trainer":
        until(lambda: terminal.command(pane) == "tail")
        terminal.tmux("send-keys", "-t", pane, "C-c")

    terminal.tmux("send-keys", "-t", pane, 'echo "<$ACTIVE_ENVIRONMENT>"', "Enter")

    until(lambda: "<ours>" in terminal.text(pane))


@pytest.mark.parametrize(
    ("words", "session", "directory"),
    [
        (["-s", "exp-1", "-o", "outputs1"], "exp-1", "outputs1"),
        (["--session-name", "exp-1", "--output-dir", "outputs1"], "exp-1", "outputs1"),
        (["--output-dir=out", "--session-name=exp-1"], "exp-1", "out"),
        (["-o", "outputs1"], "prime-rl", "outputs1"),
        (["-s", "exp-1"], "exp-1", "outputs"),
        (["exp-1"], "exp-1", "outputs/exp-1"),
        (["exp-1", "here"], "exp-1", "here"),
        (["exp-1", "-o", "here"], "exp-1", "here"),
        (["exp-1", "two words"], "exp-1", "two words"),
    ],
    ids=" ".join,
)
def test_session_and_directory_are_named_in_every_way_the_documents_know(
    terminal: Terminal, words: list[str], session: str, directory: str
) -> None:
    write_log(terminal.root / directory / "logs" / "orchestrator.log", "here it is")

    said = terminal.script(*words)

    assert said.startswith(f"session {session} follows {directory}\n")
    assert terminal.sessions() == [session]
    until(lambda: "here it is" in terminal.text(terminal.pane(session, "Orchestrator")))


def test_a_session_that_exists_is_left_as_it_is(terminal: Terminal) -> None:
    terminal.script()
    before = terminal.panes("prime-rl", "#{pane_pid}")

    said = terminal.script("-o", "elsewhere")

    assert said == "session prime-rl exists\nattach to it: tmux attach -t prime-rl\n"
    assert terminal.panes("prime-rl", "#{pane_pid}") == before


def test_a_session_is_not_mistaken_for_one_whose_name_is_longer(terminal: Terminal) -> None:
    terminal.script("exp-10")

    terminal.script("exp-1")
    assert terminal.sessions() == ["exp-1", "exp-10"]
    terminal.script("kill", "exp-1")
    assert "no session exp-1 is running" in terminal.script("kill", "exp-1", code=1)
    assert terminal.sessions() == ["exp-10"]


def test_kill_ends_the_default_session_or_the_one_that_is_named(terminal: Terminal) -> None:
    for words in ([], ["exp-1"], ["exp-2"]):
        terminal.script(*words)

    terminal.script("kill")
    assert terminal.sessions() == ["exp-1", "exp-2"]
    terminal.script("kill", "exp-2")
    assert terminal.sessions() == ["exp-1"]
    terminal.script("kill", "-s", "exp-1")
    assert terminal.sessions() == []


def test_tmux_itself_ends_the_session_by_its_name(terminal: Terminal) -> None:
    terminal.script()

    terminal.tmux("kill-session", "-t", "prime-rl")

    assert terminal.sessions() == []


def test_a_session_is_attached_to_where_there_is_a_terminal(terminal: Terminal) -> None:
    terminal.script()
    ours, theirs = pty.openpty()
    command = ["bash", "scripts/tmux.sh"]
    with subprocess.Popen(
        command, cwd=terminal.root, env=terminal.environment, stdin=theirs, stdout=theirs, stderr=theirs
    ) as attached:
        until(lambda: terminal.panes("prime-rl", "#{session_attached}") == ["1", "1", "1"])
        terminal.script("kill")
        assert attached.wait(DEADLINE_S) == 0
    os.close(ours)
    os.close(theirs)


@pytest.mark.parametrize("flag", ["-h", "--help"])
def test_help_tells_the_defaults_and_opens_nothing(terminal: Terminal, flag: str) -> None:
    said = terminal.script(flag)

    assert "default: prime-rl" in said
    assert "default: outputs" in said
    assert terminal.sessions() == []


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (["-s"], "-s needs a name"),
        (["--output-dir"], "--output-dir needs a directory"),
        (["--session", "x"], "unknown option --session"),
        (["a", "b", "c"], "one word too many: c"),
        (["-s", "a", "b"], "two names for one session: a and b"),
        (["a", "b", "-o", "c"], "two directories for one session: c and b"),
        (["exp.1"], "cannot hold '.' or ':', got exp.1"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else None,
)
def test_a_mistake_is_named_and_opens_nothing(terminal: Terminal, words: list[str], complaint: str) -> None:
    assert complaint in terminal.script(*words, code=1)
    assert terminal.sessions() == []
