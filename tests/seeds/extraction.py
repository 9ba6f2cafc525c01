"""Every command line of a document: the lines of its shell fences, and the commands that its prose names."""

import re
from typing import NamedTuple

_FENCE = re.compile(r"^\s*```(\w*)\s*$")
_SPAN = re.compile(r"`([^`\n]+)`")
_BARE = re.compile(r"\buv (?:run|sync|add)\b(?: -{1,2}[\w-]+)*")
_COMMENT = re.compile(r"(?:^|\s+)#\s.*$")
_TREE = "\u251c\u2514"  # the corners of a drawn directory tree

_PROGRAMS = {"bash", "curl", "export", "fuser", "git", "ip", "prime", "rl", "tmux", "torchrun", "uv", "vllm"}
"""First words that make a span of code in prose a command, when more words follow."""


class Command(NamedTuple):
    """One command as it is written, continuation lines and all, without comments."""

    line: int
    text: str
    is_prose: bool


def commands(document: str) -> list[Command]:
    """What `document` (Markdown) tells its reader to run, in order."""
    found: list[Command] = []
    fence: list[tuple[int, str]] | None = None
    is_shell = False
    for number, line in enumerate(document.splitlines(), start=1):
        if mark := _FENCE.match(line):
            if fence is not None and is_shell:
                found += _of_fence(fence)
            fence = [] if fence is None else None
            is_shell = mark[1] in ("bash", "sh", "shell", "console")
        elif fence is None:
            found += _of_prose(number, line)
        else:
            fence.append((number, line))
    return found


def _of_fence(lines: list[tuple[int, str]]) -> list[Command]:
    """One command a line; a line that ends in a backslash goes on in the next. A comment is prose."""
    if any(corner in line for _, line in lines for corner in _TREE):
        return []
    found: list[Command] = []
    parts: list[str] = []
    for number, line in lines:
        code = _COMMENT.sub("", line)
        found += _of_prose(number, line.removeprefix(code))
        if not parts and not code.strip():
            continue
        parts.append(code)
        if not code.rstrip().endswith("\\") or number == lines[-1][0]:
            found.append(Command(number - len(parts) + 1, "\n".join(parts), False))
            parts = []
    return found


def _of_prose(number: int, line: str) -> list[Command]:
    """The spans of code that call a program, and `uv` commands without any mark-up (document 001 has lost its)."""
    spans = [span for span in _SPAN.findall(line) if " " in span and span.split()[0] in _PROGRAMS]
    bare = _BARE.findall(_SPAN.sub("", line))
    return [Command(number, text, True) for text in spans + bare]
