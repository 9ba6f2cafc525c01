import pytest

from tests.seeds.listed import COMMANDS, Command
from tests.seeds.shell import SCRIPTS, Outcome, Shell, dry, finish


@pytest.fixture(scope="session")
def shell(tmp_path_factory: pytest.TempPathFactory) -> Shell:
    assert (SCRIPTS / "rl").exists(), f"{SCRIPTS} has no command `rl`: install the package there (make dev)"
    return Shell(tmp_path_factory.mktemp("seeds"))


class DryRuns:
    """The outcome of every listed command; one that several documents have in the same words is run once."""

    def __init__(self, shell: Shell) -> None:
        self._shell = shell
        self._outcomes: dict[str, Outcome] = {}

    def of(self, command: Command) -> Outcome:
        if command.text not in self._outcomes:
            texts = [COMMANDS[at].text for at in command.together] or [command.text]
            directory = self._shell.directory()
            variables = self._shell.variables()
            processes = [self._shell.start(dry(text), directory, variables) for text in texts]
            for text, process in zip(texts, processes, strict=True):
                self._outcomes[text] = finish(process, directory)
        return self._outcomes[command.text]


@pytest.fixture(scope="session")
def dry_runs(shell: Shell) -> DryRuns:
    return DryRuns(shell)
