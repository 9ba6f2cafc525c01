"""Why vLLM failed, in a sentence.

vLLM's engine runs in processes of its own, which log what happened and leave the server with "see root cause above".
`RecordCause` is a log handler in all of them (vLLM's own VLLM_LOGGING_CONFIG_PATH puts it there) and writes the
exception that ended a process to a file that the server reads. No vllm here: it is also loaded before vLLM is.
"""

import json
import logging
import os
import re
from pathlib import Path
from typing import Any

OUT_OF_MEMORY = re.compile(
    r"out of memory|desired GPU memory utilization|No available memory for the cache|Available memory on node", re.I
)

FATAL = (
    "EngineCore failed to start",
    "EngineCore encountered a fatal error",
    "WorkerProc failed",
    "RayWorkerProc failed",
    "AsyncLLM output_handler failed",
)
"""How log lines begin that vLLM writes when a process of it ends for an exception. What a worker was asked and could
not do ("WorkerProc hit an exception") need not end anything; where it does, the engine's own line quotes it."""

MAX_MESSAGE = 4000
"""Characters of an exception that are kept."""

CONSEQUENCES = frozenset({"EngineDeadError"})
"""What the server's own process logs when an engine process is gone: no cause."""


class RecordCause(logging.Handler):
    """Appends the type and text of every exception that ended a process to a file, a JSON object a line."""

    def __init__(self, path: str) -> None:
        super().__init__(logging.ERROR)
        self.path = path

    def emit(self, record: logging.LogRecord) -> None:
        error = record.exc_info[1] if record.exc_info else None
        if error is None or type(error).__name__ in CONSEQUENCES or not str(record.msg).startswith(FATAL):
            return
        line = json.dumps({"type": type(error).__name__, "message": str(error)[:MAX_MESSAGE]}) + "\n"
        try:
            with Path(self.path).open("a", encoding="utf-8") as file:
                file.write(line)
        except OSError:  # a full disk, most likely: the cause is then only in the log
            self.handleError(record)


def logging_config(path: Path, environ: dict[str, str]) -> dict[str, Any]:
    """vLLM's logging as it is without a configuration, and our handler beside it."""
    level = environ.get("VLLM_LOGGING_LEVEL", "INFO").upper()
    return {
        "version": 1,
        "disable_existing_loggers": False,
        "formatters": {
            "vllm": {
                "class": "vllm.logging_utils.NewLineFormatter",
                "datefmt": "%m-%d %H:%M:%S",
                "format": f"{environ.get('VLLM_LOGGING_PREFIX', '')}%(levelname)s %(asctime)s "
                "[%(fileinfo)s:%(lineno)d] %(message)s",
            }
        },
        "handlers": {
            "vllm": {
                "class": "logging.StreamHandler",
                "formatter": "vllm",
                "level": level,
                "stream": environ.get("VLLM_LOGGING_STREAM", "ext://sys.stdout"),
            },
            "cause": {"class": f"{__name__}.RecordCause", "path": str(path)},
        },
        "loggers": {"vllm": {"handlers": ["vllm", "cause"], "level": level, "propagate": False}},
    }


class Causes:
    """The exceptions that ended processes of vLLM, in a file of this server."""

    def __init__(self, directory: Path) -> None:
        self.path = directory / "causes.jsonl"
        self._config = directory / "logging.json"

    def install(self) -> None:
        """Record from now on, in processes that load vLLM after this; a logging configuration of the user's stays."""
        if "VLLM_LOGGING_CONFIG_PATH" in os.environ or os.environ.get("VLLM_CONFIGURE_LOGGING") == "0":
            return
        self._config.write_text(json.dumps(logging_config(self.path, dict(os.environ))), encoding="utf-8")
        os.environ["VLLM_LOGGING_CONFIG_PATH"] = str(self._config)

    def said(self) -> str | None:
        """The first cause as a sentence, with the way out where there is one; None where nothing was recorded."""
        if not self.path.exists():
            return None
        lines = self.path.read_text(encoding="utf-8").splitlines()
        entries = [json.loads(line) for line in lines if line.endswith("}")]
        return sentence(entries[0]["type"], entries[0]["message"]) if entries else None


def sentence(kind: str, message: str) -> str:
    """One line of an exception's text, its type where the text says too little, and what to do about full memory."""
    text = without_wrapping(re.sub(r"^\d+ validation errors? for \w+\s*", "", message))
    text = re.sub(r"\s*\[type=\w+, input_value=.*", "", text)
    text = re.sub(r"^Value error, ", "", text)
    if len(text) > 400:
        text = text[:400] + "..."
    said = text if len(text.split()) > 3 else f"{kind}: {text}" if text else kind
    if OUT_OF_MEMORY.search(text):
        said += " (inference.gpu_memory_utilization is the share of the GPU that the server takes; "
        said += "inference.kv_cache_memory_gb is the size of its cache; inference.model.max_model_len and "
        said += "inference.max_num_seqs lower what it needs)"
    return said


def without_wrapping(message: str) -> str:
    """One line of what a worker said, without what vLLM puts around it."""
    text = re.sub(r"^Call to \w+ method failed: ", "", " ".join(message.split()))
    return re.sub(r"^Worker failed with error '(.*)', please check .*$", r"\1", text)
