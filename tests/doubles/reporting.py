"""Processes that report what they are at, to be stopped and killed."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from prime_rl.activity.files import Report, read_reports


def await_true(what: str, condition: Callable[[], Any], timeout: float = 60.0) -> Any:
    end = time.monotonic() + timeout
    while not (answer := condition()):
        assert time.monotonic() < end, f"waited {timeout:g} s for {what}"
        time.sleep(0.02)
    return answer


@contextlib.contextmanager
def process(directory: Path, code: str, **env: str) -> Iterator[subprocess.Popen[str]]:
    """A process that reports to `directory` as trainer, and then runs `code`, in which it may `say` and `hear`."""
    frame = f"""
        import os, sys, time
        from pathlib import Path
        from prime_rl import activity
        def say(word): print(word, flush=True)
        def hear(): return sys.stdin.readline()
        activity.start(Path({str(directory)!r}), "trainer")
    """
    words = [sys.executable, "-c", textwrap.dedent(frame) + textwrap.dedent(code)]
    child = subprocess.Popen(words, stdin=-1, stdout=-1, text=True, env=os.environ | env)
    try:
        yield child
    finally:
        child.kill()
        child.communicate()


def read(directory: Path, name: str = "trainer") -> Report | None:
    return read_reports(directory).get(name)


def until_report(directory: Path, condition: Callable[[Report], Any], name: str = "trainer") -> Report:
    """The first report of which `condition` holds."""

    def look() -> Report | None:
        report = read(directory, name)
        return report if report is not None and condition(report) else None

    found: Report = await_true("a report", look)
    return found


def tell(child: subprocess.Popen[str], word: str = "go on") -> None:
    """One line of what it hears."""
    assert child.stdin is not None
    child.stdin.write(f"{word}\n")
    child.stdin.flush()
