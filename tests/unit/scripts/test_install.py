"""scripts/install.sh: what it does, step by step, and what it refuses. `make install` itself is the Makefile's."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
SCRIPT = ROOT / "scripts" / "install.sh"
TOOLS = ("bash", "git", "make", "grep", "dirname", "cat")


class Machine:
    """A directory to install in, the programs that are found there, and a repository to clone."""

    def __init__(self, home: Path) -> None:
        self.home = home
        self.bin = home / "bin"
        self.work = home / "work"
        self.repository = home / "repository"
        for directory in (self.bin, self.work, self.repository):
            directory.mkdir()
        for tool in TOOLS:
            self.provide(tool)
        for name in ("pyproject.toml", "Makefile"):
            shutil.copy(ROOT / name, self.repository)
        self._commit()

    def _commit(self) -> None:
        as_somebody = ["-c", "user.name=somebody", "-c", "user.email=somebody@example.com"]
        for words in (["init", "-q"], ["add", "."], [*as_somebody, "commit", "-q", "-m", "All there is"]):
            subprocess.run(["git", *words], cwd=self.repository, check=True)

    def provide(self, tool: str, script: str | None = None) -> None:
        """Put a program on the PATH: the real one, or a shell script in its place."""
        place = self.bin / tool
        place.unlink(missing_ok=True)
        if script is not None:
            place.write_text(f"#!{shutil.which('bash')}\n{script}\n")
            place.chmod(0o755)
        else:
            place.symlink_to(str(shutil.which(tool)))

    def remove(self, tool: str) -> None:
        (self.bin / tool).unlink()

    def install(self, *words: str, code: int = 0, piped: bool = True, **variables: str) -> str:
        """Run the script as `curl | bash` does, without a terminal; its output, or its complaint."""
        environment = {"PATH": str(self.bin), "HOME": str(self.home), "REPO": str(self.repository), "LC_ALL": "C"}
        result = subprocess.run(
            ["bash", "-s", "--", *words] if piped else ["bash", str(SCRIPT), *words],
            input=SCRIPT.read_text() if piped else "",
            cwd=self.work,
            env={**environment, **variables},
            capture_output=True,
            text=True,
            check=False,
            start_new_session=True,  # no terminal to ask at
        )
        assert result.returncode == code, result.stdout + result.stderr
        return result.stderr if code else result.stdout

    def steps(self, *words: str, **variables: str) -> list[str]:
        """The commands of a dry run."""
        return [
            line[2:] for line in self.install("--dry-run", *words, **variables).splitlines() if line.startswith("+")
        ]


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


PYTHON = {"PYTHON": sys.executable}


@pytest.mark.parametrize("script", ["install.sh", "tmux.sh"])
def test_the_script_is_well_formed(script: str) -> None:
    subprocess.run(["bash", "-n", str(ROOT / "scripts" / script)], check=True)


def test_a_dry_run_tells_every_step_and_takes_none(machine: Machine) -> None:
    clone = machine.work / "prime-rl"

    assert machine.steps(**PYTHON) == [
        f"git clone {machine.repository} {clone}",
        f"{sys.executable} -m venv {clone}/.venv",
        f"make -C {clone} install",
    ]
    assert list(machine.work.iterdir()) == []


def test_it_clones_makes_an_environment_and_installs_and_the_next_time_changes_nothing(machine: Machine) -> None:
    clone = machine.work / "prime-rl"
    machine.provide("make", f'echo "$@" >> {machine.home}/made')

    said = machine.install(**PYTHON)
    again = machine.install(PYTHON="")

    assert (clone / ".git").is_dir()
    version = subprocess.run(
        [clone / ".venv/bin/python", "-m", "pip", "--version"], capture_output=True, text=True, check=True
    )
    assert str(clone) in version.stdout
    assert (machine.home / "made").read_text() == 2 * f"-C {clone} install\n"
    assert said.endswith("source .venv/bin/activate     # then: rl --help\n")
    assert f"using {clone}/.venv as it is" in again
    assert "git clone" not in again


def test_the_makefile_has_what_is_left_to_it() -> None:
    result = subprocess.run(["make", "-n", "install"], cwd=ROOT, capture_output=True, text=True, check=False)

    assert result.returncode == 0, result.stderr


def test_in_a_checkout_it_installs_that_one(machine: Machine) -> None:
    shutil.copytree(machine.repository, machine.work, dirs_exist_ok=True)

    steps = machine.steps(**PYTHON)

    assert steps == [f"{sys.executable} -m venv {machine.work}/.venv", f"make -C {machine.work} install"]


def test_run_as_a_file_it_installs_the_checkout_it_lies_in(machine: Machine) -> None:
    said = machine.install("--dry-run", piped=False, **PYTHON)

    assert f"==> installing into {ROOT}\n" in said
    assert f"+ make -C {ROOT} install\n" in said
    assert "git clone" not in said


def test_another_directory_is_cloned_to_even_from_a_checkout(machine: Machine) -> None:
    shutil.copytree(machine.repository, machine.work, dirs_exist_ok=True)

    assert machine.steps("--dir", "else", **PYTHON)[0] == f"git clone {machine.repository} {machine.work}/else"


def test_extras_are_installed_together(machine: Machine) -> None:
    clone = machine.work / "prime-rl"

    assert machine.steps("wandb", "hub", **PYTHON)[2] == (
        f"{clone}/.venv/bin/python -m pip install -q --disable-pip-version-check -e {clone}\\[wandb\\,hub\\]"
    )


@pytest.mark.parametrize(("words", "is_with_vllm"), [([], True), (["none"], False)], ids=["asked nothing", "none"])
def test_vllm_comes_by_itself_where_a_gpu_is_seen(machine: Machine, words: list[str], is_with_vllm: bool) -> None:
    machine.provide("nvidia-smi", 'echo "GPU 0: NVIDIA H100 80GB HBM3 (UUID: GPU-0)"')

    assert any("[vllm" in step.replace("\\", "") for step in machine.steps(*words, **PYTHON)) == is_with_vllm


def test_vllm_does_not_come_where_the_driver_sees_no_gpu(machine: Machine) -> None:
    machine.provide("nvidia-smi", 'echo "No devices were found"; exit 6')

    assert not any("[vllm" in step.replace("\\", "") for step in machine.steps(**PYTHON))


def test_every_extra_it_takes_is_one_of_the_package(machine: Machine) -> None:
    for extra in ("vllm", "wandb", "tensorboard", "hub", "flash-attn", "all"):
        assert f"\n{extra} = [" in (ROOT / "pyproject.toml").read_text()
        assert any(f"\\[{extra}\\]" in step for step in machine.steps(extra, **PYTHON))


def test_without_a_suitable_python_uv_brings_one(machine: Machine) -> None:
    clone = machine.work / "prime-rl"
    machine.provide("curl")
    machine.provide("python3", 'echo "Python 3.9" && exit 1')

    *_, get_uv, make_venv, install = machine.steps()

    assert "https://astral.sh/uv/install.sh" in get_uv
    assert make_venv == f"uv venv --seed --python 3.12 {clone}/.venv"
    assert install == f"make -C {clone} install"


def test_a_uv_that_is_there_is_used_unasked(machine: Machine) -> None:
    machine.provide("uv", f'echo "$@" >> {machine.home}/uv')
    machine.provide("make", "true")

    machine.install()

    assert (machine.home / "uv").read_text() == f"venv --seed --python 3.12 {machine.work}/prime-rl/.venv\n"


def test_nothing_is_fetched_from_elsewhere_unasked(machine: Machine) -> None:
    machine.provide("curl", f"touch {machine.home}/fetched")

    complaint = machine.install(code=1)

    assert "Install uv" in complaint
    assert "run it with --yes" in complaint
    assert not (machine.home / "fetched").exists()


def test_with_yes_uv_is_fetched_and_used(machine: Machine) -> None:
    machine.provide("make", "true")
    machine.provide("sh", "exec bash")
    place = machine.home / ".local" / "bin"
    place.mkdir(parents=True)
    machine.provide("uv", f'echo "$@" >> {machine.home}/uv')
    (machine.bin / "uv").rename(machine.home / "uv-to-be")
    machine.provide("mv")
    machine.provide("curl", f'echo "mv {machine.home}/uv-to-be {place}/uv"')

    machine.install("--yes")

    assert (machine.home / "uv").read_text().startswith("venv --seed")


@pytest.mark.parametrize("tool", ["git", "make"])
def test_a_tool_that_is_missing_is_named_with_the_way_to_get_it(machine: Machine, tool: str) -> None:
    machine.remove(tool)

    complaint = machine.install(code=1, **PYTHON)

    assert complaint.startswith(f"install.sh: {tool} is not installed (apt-get install {tool}")


def test_a_python_that_does_not_fit_is_refused_by_its_name(machine: Machine) -> None:
    machine.provide("python2", "exit 1")

    complaint = machine.install(code=1, PYTHON="python2")

    assert complaint.endswith("install.sh: PYTHON=python2 is no Python 3.11, 3.12 or 3.13 with venv and ensurepip\n")


def test_a_directory_with_something_else_is_left_alone(machine: Machine) -> None:
    (machine.work / "prime-rl").mkdir()
    (machine.work / "prime-rl" / "mine").write_text("mine")

    complaint = machine.install(code=1, **PYTHON)

    assert "holds no prime-rl; choose another place with --dir" in complaint
    assert [path.name for path in (machine.work / "prime-rl").iterdir()] == ["mine"]


def test_an_environment_that_cannot_be_used_is_left_alone(machine: Machine) -> None:
    shutil.copytree(machine.repository, machine.work, dirs_exist_ok=True)
    (machine.work / ".venv" / "bin").mkdir(parents=True)

    complaint = machine.install(code=1, **PYTHON)

    assert f"{machine.work}/.venv holds no Python 3.11, 3.12 or 3.13 with pip; remove it" in complaint


@pytest.mark.parametrize("words", [["--dir"], ["--force"], ["vlm"]], ids=" ".join)
def test_an_argument_it_does_not_know_is_refused(machine: Machine, words: list[str]) -> None:
    complaint = machine.install(*words, code=1)

    assert words[0] in complaint
    assert list(machine.work.iterdir()) == []


def test_help_changes_nothing(machine: Machine) -> None:
    assert "--dry-run   print the steps" in machine.install("--help")
    assert list(machine.work.iterdir()) == []


def test_a_failing_step_ends_it(machine: Machine) -> None:
    complaint = machine.install(code=128, REPO=f"{machine.home}/nowhere", **PYTHON)

    assert "nowhere' does not exist" in complaint
    assert list(machine.work.iterdir()) == []
