import json
import logging
import logging.config
import os

import pytest

from prime_rl.inference.vllm.failures import Causes, RecordCause, logging_config, sentence


@pytest.fixture(autouse=True)
def no_settings_of_the_user(monkeypatch):
    for name in ("VLLM_LOGGING_CONFIG_PATH", "VLLM_CONFIGURE_LOGGING"):
        monkeypatch.delenv(name, raising=False)


class EngineDeadError(Exception):
    """vLLM's, by its name."""


def logged(logger, message, error, *arguments):
    """Log an exception as vLLM does."""
    try:
        raise error
    except Exception:
        logger.exception(message, *arguments)


@pytest.fixture
def recorded(tmp_path):
    """A logger of vLLM's, and what was recorded of it."""
    causes = Causes(tmp_path)
    logger = logging.Logger("engine")
    logger.addHandler(RecordCause(str(causes.path)))
    return logger, causes


def test_what_ended_a_process_is_the_cause(recorded):
    logger, causes = recorded
    assert causes.said() is None
    logger.error("no exception")
    logged(logger, "AsyncLLM output_handler failed.", EngineDeadError("see above"))
    logged(logger, "WorkerProc failed to start.", ValueError("the model has too many heads"))
    logged(logger, "EngineCore failed to start.", RuntimeError("see root cause above"))
    assert causes.said() == "the model has too many heads"


def test_what_ended_nothing_is_no_cause_and_takes_no_room(recorded):
    logger, causes = recorded
    for _ in range(1000):
        logged(logger, "Invocation of %s method failed", ValueError("no such adapter"), "add_lora")
        logged(logger, "WorkerProc hit an exception.", ValueError("no such adapter"))
        logged(logger, "Error in preprocessing prompt inputs", TypeError("a prompt must be text"))
    assert not causes.path.exists()
    engine_says = "Worker failed with error 'the GPU fell off the bus', please check the stack trace above"
    logged(logger, "EngineCore encountered a fatal error.", RuntimeError(engine_says + " " * 10**6))
    assert causes.said() == "the GPU fell off the bus"
    assert causes.path.stat().st_size < 10_000


def test_it_is_recorded_by_any_process_that_vllm_starts(tmp_path, monkeypatch):
    monkeypatch.setenv("VLLM_LOGGING_LEVEL", "debug")
    causes = Causes(tmp_path)
    causes.install()
    config = json.loads((tmp_path / "logging.json").read_text())
    assert os.environ.pop("VLLM_LOGGING_CONFIG_PATH") == str(tmp_path / "logging.json")
    assert config["loggers"]["vllm"]["level"] == "DEBUG"
    # vLLM's own formatter is not here.
    config["formatters"]["vllm"] = {"format": "%(message)s"}
    config["loggers"] = {"test_failures": config["loggers"]["vllm"]}
    logging.config.dictConfig(config)
    logger = logging.getLogger("test_failures")
    try:
        raise KeyError("x")
    except KeyError:
        logger.exception("EngineCore failed to start.")
    finally:
        logger.handlers.clear()
    assert causes.said() == "KeyError: 'x'"


def test_a_logging_configuration_of_the_users_stays(tmp_path, monkeypatch):
    monkeypatch.setenv("VLLM_LOGGING_CONFIG_PATH", "/mine.json")
    Causes(tmp_path).install()
    assert os.environ["VLLM_LOGGING_CONFIG_PATH"] == "/mine.json"


def test_the_prefix_of_log_lines_is_the_users(tmp_path):
    written = logging_config(tmp_path / "c", {"VLLM_LOGGING_PREFIX": "<<", "VLLM_LOGGING_STREAM": "ext://sys.stderr"})
    assert written["formatters"]["vllm"]["format"].startswith("<<")
    assert written["handlers"]["vllm"]["stream"] == "ext://sys.stderr"


@pytest.mark.parametrize(
    ("message", "said"),
    [
        (
            "1 validation error for ModelConfig\n  Value error, Model architectures ['X'] are not supported for now. "
            "[type=value_error, input_value=ArgsKwargs((), {'m': 1}), input_type=ArgsKwargs]\n    For further ...",
            "Model architectures ['X'] are not supported for now.",
        ),
        ("a\n  b   c d", "a b c d"),
        ("'x'", "KeyError: 'x'"),
        ("", "KeyError"),
    ],
)
def test_a_cause_is_one_line(message, said):
    assert sentence("KeyError", message) == said


def test_full_memory_says_what_to_lower():
    said = sentence("OutOfMemoryError", "CUDA out of memory. Tried to allocate 2 GiB")
    assert said.startswith("CUDA out of memory. Tried to allocate 2 GiB (inference.gpu_memory_utilization")
    assert len(sentence("E", "word " * 1000)) < 700
