"""The documents' debug commands, run to an end on CPU as they stand there, each alone."""

import json
import time
import urllib.error
import urllib.request
from collections.abc import Iterator

import pytest

from prime_rl.paths import RunPaths
from tests.seeds.listed import COMMANDS
from tests.seeds.shell import Shell, finish, free_port


def metrics(run: RunPaths, process: str) -> list[dict[str, float]]:
    return [json.loads(line) for line in run.metrics(process).read_text().splitlines()]


@pytest.mark.parametrize("at", ["002-L77", "002-L83"], ids=["sft", "trainer"])
def test_a_trainer_alone_takes_its_five_steps_on_made_up_data(at, shell: Shell):
    command, directory = COMMANDS[at], shell.directory()
    outcome = shell.run(command.text, directory)
    assert outcome.status == 0, outcome.errors
    run = RunPaths(directory / command.output_dir)
    rows = metrics(run, "trainer")
    assert [row["step"] for row in rows] == list(range(5))
    assert all(row["progress/tokens"] > 0 for row in rows)
    assert (run.weights / "step_5" / "config.json").exists()


@pytest.fixture(scope="module")
def server(shell: Shell) -> Iterator[str]:
    """Address of the debug server, on a free port by the weakest source there is; ends with SIGTERM, and well."""
    directory, port = shell.directory(), free_port()
    process = shell.start(COMMANDS["002-L89"].text, directory, {"PRIME_SERVER__PORT": str(port)})
    address = f"http://127.0.0.1:{port}"
    deadline = time.monotonic() + 90
    is_up = False
    while process.poll() is None and not is_up and time.monotonic() < deadline:
        time.sleep(0.1)
        is_up = is_healthy(address)
    if is_up:
        yield address
    process.terminate()
    outcome = finish(process, directory, timeout=20)
    assert is_up, outcome.errors
    assert outcome.status == 0, outcome.errors


def is_healthy(address: str) -> bool:
    try:
        with urllib.request.urlopen(f"{address}/health", timeout=5) as answer:
            return answer.status == 200
    except (urllib.error.URLError, ConnectionError):
        return False


def test_the_orchestrator_alone_makes_its_two_batches_from_the_debug_server(shell: Shell, server: str):
    command, directory = COMMANDS["002-L93"], shell.directory()
    outcome = shell.run(command.text, directory, {"PRIME_CLIENT__BASE_URL": f"{server}/v1"})
    assert outcome.status == 0, outcome.errors
    run = RunPaths(directory / command.output_dir)
    assert [row["step"] for row in metrics(run, "orchestrator")] == [0, 1]
    assert sorted(path.name for path in run.rollouts.iterdir()) == ["step_0", "step_1"]


def test_eval_without_an_address_measures_the_server_that_was_started_before_it(shell: Shell, server: str):
    """As in the documents' evaluations, whose models and environments need the network."""
    text = "uv run eval --model.name examples/reverse_text_cpu/model --environment-ids reverse-text"
    short = "--num-examples 2 --sampling.max-tokens 4"
    directory = shell.directory()
    outcome = shell.run(f"{text} {short}", directory, {"PRIME_INFERENCE__SERVER__PORT": server.rpartition(":")[2]})
    assert outcome.status == 0, outcome.errors
    run = RunPaths(directory / "outputs")
    assert list((run.evals / "step_0" / "reverse-text").iterdir()) != []
    assert not run.log("inference").exists()
