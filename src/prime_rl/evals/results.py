"""The files of an evaluation, written as its rollouts end: nobody could hold thousands of long ones until the last.

evals/step_N/<environment>/results.jsonl     a rollout a line, in the order in which they ended
evals/step_N/<environment>/report.json       the figures

They lie in a hidden directory, which gets its name when all is in it (`transport.manifest`). An evaluation that is run
again, because the run was ended before it had told of it, takes the place of the one before in one move.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

from prime_rl.disk import refused
from prime_rl.environments.rollouts import Rollout
from prime_rl.errors import ArtifactError
from prime_rl.evals.report import EvalReport, report_json, result_line
from prime_rl.paths import step_dir
from prime_rl.transport.manifest import publish_dir


class _Discarded(Exception):
    """Leaves the directory that is being written without publishing it."""


class Results:
    """Those of one step. All methods wait for the disk; they may be called from any thread."""

    def __init__(self, evals: Path, step: int) -> None:
        self.directory = step_dir(evals, step)
        self._lock = threading.Lock()
        self._draft = ExitStack()
        self._hidden: Path | None = None
        self._files: dict[str, BinaryIO] = {}
        self._is_over = False

    def add(self, env: str, rollout: Rollout) -> None:
        """Write a rollout that ended. Raises: ArtifactError when it cannot be; then nothing of the step is kept."""
        line = result_line(rollout)
        with self._lock, self._writing():
            self._file(env).write(line)

    def publish(self, reports: Sequence[EvalReport]) -> None:
        """Every rollout was added: give the directory its name. Raises: ArtifactError as `add`."""
        with self._lock, self._writing():
            for report in reports:
                self._file(report.env)
                (self._begun() / report.env / "report.json").write_bytes(report_json(report))
            self._close_files()
            self._draft.close()
            self._is_over = True

    def discard(self) -> None:
        """Keep nothing, unless it was published."""
        with self._lock:
            self._discard()

    @contextmanager
    def _writing(self) -> Iterator[None]:
        if self._is_over:
            raise ArtifactError(f"{self.directory} is no longer written")
        try:
            yield
        except ArtifactError:
            self._discard()
            raise
        except OSError as error:
            self._discard()
            raise refused(error, self.directory) from error

    def _begun(self) -> Path:
        if self._hidden is None:
            self._hidden = self._draft.enter_context(publish_dir(self.directory, replaces=True))
        return self._hidden

    def _file(self, env: str) -> BinaryIO:
        if env not in self._files:
            folder = self._begun() / env
            folder.mkdir(parents=True, exist_ok=True)
            self._files[env] = (folder / "results.jsonl").open("wb")
        return self._files[env]

    def _close_files(self) -> None:
        files, self._files = self._files, {}
        for file in files.values():
            file.close()

    def _discard(self) -> None:
        self._is_over = True
        with suppress(OSError):
            self._close_files()
        with suppress(_Discarded), self._draft:
            raise _Discarded
