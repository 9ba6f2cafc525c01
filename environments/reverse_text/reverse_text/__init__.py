"""reverse-text: answer with the given text reversed, character by character.

The classic form is `load_environment(...)`, the v1 form `ReverseTextTaskset`. Each half of verifiers takes seconds to
import and the classic one is gone in 0.4, so a form is imported only when somebody asks for it.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from reverse_text.reward import lcs_ratio
from reverse_text.texts import sft_rows

if TYPE_CHECKING:
    from reverse_text.classic import load_environment
    from reverse_text.taskset import ReverseTextConfig, ReverseTextTaskset

__all__ = ["ReverseTextConfig", "ReverseTextTaskset", "lcs_ratio", "load_environment", "sft_rows"]

_FORMS = {"load_environment": "classic", "ReverseTextConfig": "taskset", "ReverseTextTaskset": "taskset"}


def __getattr__(name: str) -> Any:
    if name not in _FORMS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_FORMS[name]}"), name)
