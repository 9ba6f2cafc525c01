import os
import signal
import socket
import sys
import weakref

import pytest

from prime_rl import lifeline
from prime_rl.config.inference import InferenceConfig
from prime_rl.errors import ConfigError, InferenceError, ModelError
from prime_rl.inference.vllm import server

CONFIG = InferenceConfig(device="cpu")


class Serving:
    """Stands for the module that starts vLLM: what it would see, and how it ends."""

    def __init__(self, ending):
        self.ending = ending
        self.environment = {}

    async def serve(self, config, model_dir, listener, api_key, causes):
        self.environment = dict(os.environ)
        self.ending(causes)


@pytest.fixture
def run(monkeypatch, tmp_path):
    """Run the server with an ending in place of vLLM; what vLLM would have seen of the environment."""

    def with_ending(ending, config=CONFIG):
        monkeypatch.setattr(server.os, "environ", {"VLLM_API_KEY": "theirs", "DO_NOT_TRACK": "0"})
        serving = Serving(ending)
        monkeypatch.setattr(server.importlib, "import_module", lambda name: serving)
        with socket.create_server(("127.0.0.1", 0)) as listener:
            server.run(config, tmp_path, listener, None)
        return serving.environment

    return with_ending


def raising(error):
    def ending(causes):
        raise error

    return ending


def test_vllm_sees_our_defaults_and_the_users_own(run):
    seen = run(lambda causes: None)
    assert seen["VLLM_WORKER_MULTIPROC_METHOD"] == "spawn"
    assert seen["VLLM_NO_USAGE_STATS"] == "1"
    assert seen["DO_NOT_TRACK"] == "0"
    assert seen["TORCHDYNAMO_DISABLE"] == "1"
    assert "VLLM_API_KEY" not in seen
    assert seen["VLLM_LOGGING_CONFIG_PATH"].endswith("logging.json")
    assert lifeline.is_alive(seen[lifeline.VARIABLE])


@pytest.mark.parametrize("fields", [{"model": {"dtype": "float32"}}, {"vllm": {"dtype": "float"}}])
def test_float32_is_multiplied_as_float32(run, fields):
    assert run(lambda causes: None, InferenceConfig.model_validate(fields))["TRITON_F32_DEFAULT"] == "ieee"
    assert "TRITON_F32_DEFAULT" not in run(lambda causes: None, InferenceConfig())


def test_compilers_are_only_kept_off_the_cpu(run):
    assert "TORCHDYNAMO_DISABLE" not in run(lambda causes: None, InferenceConfig())


def test_being_told_to_stop_while_it_starts_is_no_error(run):
    before = signal.getsignal(signal.SIGTERM)
    run(lambda causes: signal.raise_signal(signal.SIGTERM))
    assert signal.getsignal(signal.SIGTERM) is before


def test_errors_that_are_sentences_already_stay(run):
    with pytest.raises(ConfigError, match=r"^no such argument$"):
        run(raising(ConfigError("no such argument")))


def test_the_cause_that_an_engine_process_logged_is_said(run):
    def ending(causes):
        causes.path.write_text('{"type": "OutOfMemoryError", "message": "CUDA out of memory."}\n')
        raise RuntimeError("Engine core initialization failed. See root cause above.")

    with pytest.raises(InferenceError, match=r"^vLLM did not start: CUDA out of memory\. \(inference\.gpu_memory"):
        run(ending)


def test_what_comes_of_the_model_is_a_model_error(run):
    with pytest.raises(ModelError, match="Model architectures"):
        run(raising(ValueError("Model architectures ['X'] are not supported for now.")))


def test_being_told_to_stop_where_python_drops_the_exception_is_not_lost(monkeypatch, tmp_path):
    """As in the callback of a weak reference, of which imports run hundreds."""

    def importing(name):
        monkeypatch.setattr(sys, "unraisablehook", lambda dropped: None)
        referent = Serving(None)
        reference = weakref.ref(referent, lambda _: signal.raise_signal(signal.SIGTERM))
        del referent
        assert reference() is None
        return Serving(raising(AssertionError("it serves")))

    monkeypatch.setattr(server.os, "environ", {})
    monkeypatch.setattr(server.importlib, "import_module", importing)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        server.run(CONFIG, tmp_path, listener, None)
