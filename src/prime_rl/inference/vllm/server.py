"""vLLM as the inference server's engine: prepares this process, then starts vLLM's own server in it.

vLLM reads the environment when it is imported, so nothing here imports it; `serving`, which does, is imported last.
"""

import importlib
import os
import signal
import socket
import tempfile
from pathlib import Path
from types import FrameType
from typing import Final

import uvloop

from prime_rl import lifeline
from prime_rl.config.inference import InferenceConfig
from prime_rl.errors import InferenceError, ModelError, PrimeRLError
from prime_rl.imports import importing
from prime_rl.inference.vllm.arguments import FLOAT32
from prime_rl.inference.vllm.failures import OUT_OF_MEMORY, Causes, sentence

DEFAULTS: Final = {
    # vLLM's own command sets it, too: a forked engine inherits torch's threads and hangs.
    "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
    # Who uses this, and for what, is nobody's business.
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
}
"""Environment variables that vLLM reads, where the user has not set them."""

MODEL_FAULTS: Final = ("Model architectures", "max_model_len", "tokenizer", "safetensors", "config.json", "divisible")
"""Words of errors that come of the model rather than of vLLM or the machine."""


class _Stopped(BaseException):
    """SIGTERM or SIGINT came before the server served."""


def run(config: InferenceConfig, model_dir: Path, listener: socket.socket, api_key: str | None) -> None:
    """Serve on a bound socket until SIGTERM or SIGINT.

    Raises: ConfigError, ModelError or InferenceError, in a sentence, where vLLM does not start or its engine fails.
    """
    with tempfile.TemporaryDirectory(prefix="prime-rl-vllm-") as scratch:
        causes = Causes(Path(scratch))
        _prepare_environment(causes, config)
        told: list[int] = []

        def stop(number: int, frame: FrameType | None) -> None:
            told.append(number)
            raise _Stopped

        before = {number: signal.signal(number, stop) for number in (signal.SIGTERM, signal.SIGINT)}
        try:
            with importing():
                serving = importlib.import_module("prime_rl.inference.vllm.serving")
            if told:  # the exception was lost, as it is in the callbacks that importing a module runs
                return
            uvloop.run(serving.serve(config, model_dir, listener, api_key, causes))
        except _Stopped:
            return
        except PrimeRLError:
            raise
        except Exception as error:
            raise _in_a_sentence(error, causes) from error
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)


def _prepare_environment(causes: Causes, config: InferenceConfig) -> None:
    for name, value in DEFAULTS.items():
        os.environ.setdefault(name, value)
    if config.device == "cpu":
        # vLLM compiles its logprobs' kernel at the first request that asks for them: fifteen seconds of silence.
        os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")
    if config.vllm.get("dtype", config.model.dtype) in FLOAT32:
        # Triton, in which vLLM's attention for float32 is written, multiplies it as TF32: logprobs are off by 0.02.
        os.environ.setdefault("TRITON_F32_DEFAULT", "ieee")
    # The key is ours to ask for, on every route; vLLM would ask for this one below /v1 besides.
    os.environ.pop("VLLM_API_KEY", None)
    causes.install()
    # vLLM's processes watch this one (`scheduler`), as this one watches the launcher.
    os.environ[lifeline.VARIABLE] = lifeline.launcher_token()


def _in_a_sentence(error: Exception, causes: Causes) -> PrimeRLError:
    said = causes.said() or sentence(type(error).__name__, str(error))
    if not OUT_OF_MEMORY.search(said) and any(word in said for word in MODEL_FAULTS):
        return ModelError(f"vLLM cannot serve this model: {said}")
    return InferenceError(f"vLLM did not start: {said}")
