"""What differs between vLLM 0.26 and 0.29, and nothing else.

0.29 moved the parts of its server below `vllm.entrypoints.launchers`; the old place still works there, with a
deprecation warning. To be simplified when 0.26 is no longer supported (the extra `vllm` in pyproject.toml).
"""

import importlib
import importlib.util
from collections.abc import Callable
from dataclasses import fields
from typing import Any

IS_MOVED = importlib.util.find_spec("vllm.entrypoints.launchers") is not None


def _from(new: str, old: str, name: str) -> Callable[..., Any]:
    found: Callable[..., Any] = getattr(importlib.import_module(new if IS_MOVED else old), name)
    return found


_OLD = "vllm.entrypoints.openai.api_server"
build_app = _from("vllm.entrypoints.launchers.app", _OLD, "build_app")
init_app_state = _from("vllm.entrypoints.launchers.api_server.app_state", _OLD, "init_app_state")
validate_api_server_args = _from("vllm.entrypoints.launchers.launcher", _OLD, "validate_api_server_args")

_OLD_ARGS = "vllm.entrypoints.openai.cli_args"
make_arg_parser = _from("vllm.entrypoints.launchers.cli_args", _OLD_ARGS, "make_arg_parser")
validate_parsed_serve_args = _from("vllm.entrypoints.launchers.cli_args", _OLD_ARGS, "validate_parsed_serve_args")


def known_fields(cls: type[Any], values: dict[str, Any]) -> dict[str, Any]:
    """Those of `values` that a dataclass of vLLM has: 0.26 asks how tensors are packed at every transfer, 0.29 once."""
    names = {field.name for field in fields(cls)}
    return {name: value for name, value in values.items() if name in names}
