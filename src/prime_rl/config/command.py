"""What every command does with its command line: help, explanation, dry run, and the checks before real work.

    argv -> [--help] -> resolve -> notices -> [--explain KEY] -> [--dry-run: write the files, stop] -> work

A PrimeRLError ends a command with its message and exit code 1, or FINAL where `rl` started it and no restart mends
that; a traceback only with `--log.level debug`.
"""

import json
import os
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path as FilePath
from typing import NoReturn, TypeVar

from pydantic import BaseModel

from prime_rl import activity, lifeline
from prime_rl.config.explain import explain
from prime_rl.config.help import help_text
from prime_rl.config.load import Resolved, resolve
from prime_rl.config.pending import Wish, wishes
from prime_rl.config.reads import start_recording
from prime_rl.config.shared import ProcessConfig
from prime_rl.config.values import dotted
from prime_rl.config.writing import to_toml, write_toml
from prime_rl.disk import allow_handles, check_writable, is_refusal, refusal
from prime_rl.errors import FINAL, ConfigError, DiskError, PrimeRLError
from prime_rl.logs import setup_logging, spare_streams
from prime_rl.paths import RunPaths, found_results

Config = TypeVar("Config", bound=ProcessConfig)
Files = Mapping[str, BaseModel]
"""Process -> its resolved configuration, written to `configs/<process>.toml`."""

SERVICES = ("inference", "eval")
"""Processes that may come and go beside a run's results with other configurations."""

FIRST_RANK_S = 5.0
"""Time that the first of several ranks gets to say why a start is refused."""

ERROR_FILE = "TORCHELASTIC_ERROR_FILE"
"""Names the file in which torchrun wants the reason of a failure."""

HELP, DRY_RUN, EXPLAIN = ("-h", "--help"), ("--dry-run", "--dry_run"), "--explain"


def run_command(
    name: str,
    root: type[Config],
    work: Callable[[Config], None],
    *,
    argv: Sequence[str] | None = None,
    files: Callable[[Config], Files] | None = None,
    check: Callable[[Config], None] | None = None,
) -> None:
    """Do what the command line of command `name` asks for; for a real start, that is `work`.

    `files` gives what a dry run writes, by default the configuration under the command's name. It may raise
    ConfigError, for what only a look at the machine can tell; so may `check`, before a real start.
    Exits with `exit_code` on a PrimeRLError, with 130 on Ctrl-C.
    """
    words = list(sys.argv[1:] if argv is None else argv)
    try:
        config = _front(name, root, words, files, check)
        if config is not None:
            _work(name, config, work)
    except KeyboardInterrupt:
        sys.exit(130)


def _front(
    name: str,
    root: type[Config],
    words: list[str],
    files: Callable[[Config], Files] | None,
    check: Callable[[Config], None] | None,
) -> Config | None:
    """The configuration of a real start; None where something else was asked for, which is done then."""
    is_debug = False
    try:
        if asked := [word for word in words if word in HELP]:
            section = words[words.index(asked[0]) + 1 :][:1]
            _show(help_text(root, name, section[0] if section and section[0][0] not in "-@" else None))
            return None
        is_dry = any(word in DRY_RUN for word in words)
        key, words = _take_key([word for word in words if word not in DRY_RUN])
        resolved = resolve(root, words)
        is_debug = resolved.config.log.level == "debug"
        for notice in resolved.notices if is_first_rank() else []:
            print(f"{name}: note: {notice}", file=sys.stderr)
        if key is not None:
            _show(explain(root, resolved, key))
        elif is_dry:
            _dry_run(name, resolved, files(resolved.config) if files else {name: resolved.config})
        else:
            _refuse_wishes(resolved)
            if check is not None:
                check(resolved.config)
            return resolved.config
    except PrimeRLError as error:  # the same on every rank
        if not is_first_rank() and not is_debug:
            time.sleep(FIRST_RANK_S)  # torchrun ends all ranks when one has ended: let the first one say why
            sys.exit(1)
        _end(name, error, is_debug=is_debug)
    return None


def _work(name: str, config: Config, work: Callable[[Config], None]) -> None:
    start_recording(name)
    spare_streams()
    if (few := allow_handles()) is not None and is_first_rank():
        print(f"{name}: note: {few}", file=sys.stderr)
    is_debug = config.log.level == "debug"
    try:
        if is_first_rank() and lifeline.VARIABLE not in os.environ:
            paths = RunPaths(config.output_dir)
            check_writable(paths.output_dir, *(root for root in paths.roots if root.is_dir()))
        work(config)
    except PrimeRLError as error:
        _end(name, error, is_debug=is_debug)
    except OSError as error:
        if is_debug or not is_refusal(error):
            raise
        where = error.filename or "the run cannot go on"
        disk = DiskError(f"{where}: {refusal(error, error.filename or config.output_dir)}")
        _end(name, disk, is_debug=False)


def _end(name: str, error: PrimeRLError, *, is_debug: bool) -> NoReturn:
    """Say why, and end; for who debugs, with a traceback."""
    code = exit_code(error)
    if is_debug and code == 1:
        raise error
    tell_torchrun(str(error))
    if is_debug:
        traceback.print_exception(error)
    said = f"{name}: {error}"
    if code == 1:
        sys.exit(said)
    print(said, file=sys.stderr)
    sys.exit(code)


def exit_code(error: Exception) -> int:
    """That of a process that ends with `error`: FINAL tells `rl` not to start it again."""
    is_final = isinstance(error, PrimeRLError) and error.is_final
    return FINAL if is_final and lifeline.VARIABLE in os.environ else 1


def tell_torchrun(reason: str) -> None:
    """Leave the reason of a failure where torchrun's summary takes it from; nothing where torchrun started nothing."""
    if file := os.environ.get(ERROR_FILE):
        extra = {"py_callstack": reason, "timestamp": str(int(time.time()))}
        content = json.dumps({"message": {"message": reason, "extraInfo": extra}})
        FilePath(file).write_text(content, encoding="utf-8")


def this_rank() -> int:
    """Which this is of the processes that `torchrun` started with the same command line; 0 for one alone."""
    return int(os.environ.get("RANK", "0"))


def is_first_rank() -> bool:
    """Whether this process speaks for all that `torchrun` started with the same command line."""
    return this_rank() == 0


def record_config(config: BaseModel, process: str, paths: RunPaths) -> None:
    """Write `configs/<process>.toml`.

    Raises: ConfigError rather than overwrite the configuration that results in the run directory were made with, unless
        the configuration says that these are to be deleted (`clean`), or gone on from.
    """
    path = paths.config(process)
    is_free = getattr(config, "clean", False) or _goes_on(config)
    if _tells_of_results(path, config, paths) and not is_free:
        raise ConfigError(
            f"{path} tells how the run in {paths.output_dir} was made, and differs from this configuration; choose "
            "another directory with --output-dir, or delete that run"
        )
    write_toml(config, path)


def _goes_on(config: BaseModel) -> bool:
    """Whether the process takes up what the run directory holds."""
    resume_step = getattr(getattr(config, "ckpt", None), "resume_step", None)
    return getattr(config, "recover", False) or resume_step is not None


def _tells_of_results(path: FilePath, config: BaseModel, paths: RunPaths) -> bool:
    """Whether the file at `path` is another configuration, under which results were made that are still there."""
    if not path.is_file() or path.read_text(encoding="utf-8") == to_toml(config):
        return False
    return bool(found_results(paths.output_dir))


def begin(process: str, config: ProcessConfig) -> None:
    """What every process does before its work: record its configuration, log, watch its launcher.

    The log of a process that was launched is its standard error, which the launcher sends to a file. Ranks behind the
    first record nothing, and log warnings only, to files of their own.
    """
    if not is_first_rank():
        _begin_behind_the_first(process, config)
        return
    paths = RunPaths(config.output_dir)
    is_launched = lifeline.VARIABLE in os.environ
    if is_launched:
        pass  # its launcher has, under the name that it gave it
    elif process in SERVICES and _tells_of_results(paths.config(process), config, paths):
        print(f"{process}: note: {paths.config(process)} stays as the run here was made with", file=sys.stderr)
    else:
        record_config(config, process, paths)
    file = paths.log(process) if config.log.file and not is_launched else None
    setup_logging(process, config.log.level, file, as_json=config.log.json_logging)
    lifeline.watch_launcher()
    activity.start(paths.activity, process)


def _begin_behind_the_first(process: str, config: ProcessConfig) -> None:
    rank, log = this_rank(), config.log
    file = RunPaths(config.output_dir).rank_log(process, rank) if log.file else None
    level = "warning" if log.level == "info" else log.level
    setup_logging(f"{process}[{rank}]", level, file, to_terminal=file is None, as_json=log.json_logging)
    lifeline.watch_launcher()
    activity.start(RunPaths(config.output_dir).activity, process, rank=rank)


def _dry_run(name: str, resolved: Resolved[Config], files: Files) -> None:
    if not is_first_rank():
        return
    paths = RunPaths(resolved.config.output_dir)
    for process, config in files.items():
        record_config(config, process, paths)
    _show("\n".join(f"{name}: wrote {paths.config(process)}" for process in files))
    for wish in wishes(resolved.config):
        print(f"{name}: note: a real start would refuse {_refusal(wish, resolved)}", file=sys.stderr)


def _refuse_wishes(resolved: Resolved[Config]) -> None:
    refusals = [_refusal(wish, resolved) for wish in wishes(resolved.config)]
    if refusals:
        raise ConfigError("\n".join([*refusals, "--dry-run accepts these; to start, leave them out"]))


def _refusal(wish: Wish, resolved: Resolved[Config]) -> str:
    shown = "" if isinstance(wish.value, BaseModel) else f" = {wish.value!r}"
    where = resolved.values.origin(wish.path)
    return f"{dotted(wish.path)}{shown} ({where}): needs {wish.waits_for}, which a later version brings"


def _take_key(words: list[str]) -> tuple[str | None, list[str]]:
    """The key after --explain, and the other words."""
    for index, word in enumerate(words):
        if word == EXPLAIN or word.startswith(f"{EXPLAIN}="):
            inline = word.partition("=")[2]
            end = index + 1 if inline else index + 2
            key = inline or "".join(words[index + 1 : end])
            if not key or key.startswith(("-", "@")):
                raise ConfigError("--explain needs a key, like --explain trainer.optim.lr")
            return key, words[:index] + words[end:]
    return None, words


def _show(text: str) -> None:
    """Print a long text; a reader that has seen enough (`| head`) is no error."""
    try:
        if is_first_rank():
            print(text, flush=True)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
