"""What the values of older keys are now: the functions that the table in `config.compat.table` names.

Each is given what was `Found` and returns the keys to write instead, as `(path below the class, value)`; none at all is
a key without effect. None declines: the key is meant as it stands.
"""

import itertools
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from prime_rl.config.literals import looks_like, whole_number
from prime_rl.config.schema import Path
from prime_rl.config.values import Setting, Values
from prime_rl.errors import ConfigError

Writes = list[tuple[Path, Any]]

DEFAULT_ADDRESS = "http://localhost:8000/v1"

ENVIRONMENT_OF_BENCHMARK = {"aime24": "aime2024", "aime25": "aime2025"}
"""Benchmarks whose environment has another name."""

MAX_GPUS = 1024
"""More than any machine has."""

_NULL = (None, "None")


@dataclass(frozen=True, slots=True)
class Found:
    """An older key where it was found: `base` is the path of its class, `tail` what stands below the key."""

    setting: Setting
    base: Path
    tail: Path
    values: Values
    """What is merged so far."""

    @property
    def value(self) -> Any:
        """The value that was written."""
        return self.setting.value


def truth(value: Any) -> Any:
    """True and False as TOML, the command line and the environment write them; anything else as it is."""
    return {"true": True, "false": False}.get(str(value).lower(), value)


def items(value: Any) -> list[Any]:
    """A list that may be written as text: `a,b`."""
    if isinstance(value, str):
        return [item.strip() for item in value.split(",") if item.strip()]
    return list(value) if isinstance(value, list | tuple) else [value]


# addresses


def port_alone(value: Any) -> Any:
    """The port of an address, where an address was given for a port."""
    address = re.fullmatch(r"(?:\w+://)?[^/:]+:(\d+)/?(?:v1/?)?", value) if isinstance(value, str) else None
    return int(address[1]) if address else value


def with_v1(value: Any) -> Any:
    """Addresses of servers as addresses of their API."""
    if isinstance(value, list | tuple):
        return [with_v1(address) for address in value]
    if isinstance(value, str) and re.fullmatch(r"https?://[^/]+/?", value):
        return f"{value.rstrip('/')}/v1"
    return value


def address_part(part: str) -> Callable[[Found], Writes]:
    """`client.host` or `client.port`: the other half is that of the address so far."""

    def write(found: Found) -> Writes:
        so_far = found.values.get((*found.base, "base_url"), default=DEFAULT_ADDRESS)
        try:
            url = urlsplit(str(items(so_far)[0]))
            halves = {"host": url.hostname, "port": url.port} | {part: found.value}
        except (ValueError, IndexError):  # no address: validation says so of the one that is there
            halves = {"host": "localhost", "port": 8000} | {part: found.value}
        return [(("base_url",), [f"http://{halves['host']}:{halves['port']}/v1"])]

    return write


def api_key(found: Found) -> Writes:
    """A key in plain text; the placeholder that used to stand for none asks for nothing."""
    if found.value in ("insecure", "EMPTY", *_NULL):
        return []
    raise ConfigError(
        f"{found.setting.origin}: a key does not belong into a configuration; put it into an environment variable and "
        "name that with client.api_key_var (default OPENAI_API_KEY)"
    )


# evaluation


def environments(found: Found) -> Writes:
    """`environment_ids` and `benchmarks`: one [[env]] each."""
    ids = [str(item) for item in items(found.value)] if found.value not in _NULL else []
    names = [ENVIRONMENT_OF_BENCHMARK.get(item, item) for item in ids]
    return [(("env",), []), *((("env", index, "id"), name) for index, name in enumerate(names))]


def environment_args(found: Found) -> Writes:
    """`environment_args.<id>.<argument>`: the args of the [[env]] with that id."""
    if found.value in ({}, *_NULL) and len(found.tail) < 2:
        return []
    known = [env.get("id") if isinstance(env, dict) else None for env in _environments_so_far(found)]
    if not found.tail or found.tail[0] not in known:
        raise ConfigError(
            f"{found.setting.origin}: environment_args is {{id: arguments}}, with ids of environment_ids, which are "
            f"{known}; write args in each [[env]] instead"
        )
    return [(("env", known.index(found.tail[0]), "args", *found.tail[1:]), found.value)]


def for_each_environment(key: str) -> Callable[[Found], Writes | None]:
    """A list with one value for each environment; a single value is meant for all, as it stands."""

    def write(found: Found) -> Writes | None:
        if not isinstance(found.value, list) and "," not in str(found.value):
            return None
        numbers, known = items(found.value), _environments_so_far(found)
        if len(numbers) == 1:
            return [((key,), numbers[0])]
        if len(numbers) != len(known) and numbers:
            raise ConfigError(
                f"{found.setting.origin}: {key} has {len(numbers)} values for {len(known)} environments; give one for "
                f"all, or write {key} in each [[env]]"
            )
        return [(("env", index, key), number) for index, number in enumerate(numbers)]

    return write


def _environments_so_far(found: Found) -> list[Any]:
    envs = found.values.get((*found.base, "env"), default=[])
    return envs if isinstance(envs, list) else []


def save_always(found: Found) -> Writes | None:
    """`save = true`: results are always written."""
    if truth(found.value) not in (True, False):
        return None
    return []


def opposite(key: str) -> Callable[[Found], Writes]:
    """The new key says the contrary."""

    def write(found: Found) -> Writes:
        value = truth(found.value)
        return [((key,), not value if isinstance(value, bool) else value)]

    return write


# data, sampling, advantages


def fake_data(found: Found) -> Writes:
    """SFT's `data.fake` table: `data.type = "fake"`, and its keys beside it."""
    if not found.tail:
        value = truth(found.value)
        return [(("data", "type"), "sft" if value in (False, *_NULL) else "fake")]
    rest = ("length",) if found.tail == ("type",) else found.tail
    return [(("data", "type"), "fake"), (("data", *rest), found.value)]


def unless_neutral(neutral: float) -> Callable[[Found], Writes | None]:
    """A sampling parameter that training leaves alone; validation refuses another value."""

    def write(found: Found) -> Writes | None:
        try:
            is_neutral = found.value in _NULL or float(found.value) == neutral
        except (TypeError, ValueError):
            is_neutral = False
        return [] if is_neutral else None

    return write


def advantage(found: Found) -> Writes:
    """`advantage_type`: the switch of the advantage that made it differ from the plain one."""
    name = str(found.value).replace("_", "-")
    switches = {"drgrpo-negclipped": "neg_clipped", "rloo": "leave_one_out", "opo": "length_weighted_mean"}
    if name in switches:
        return [(("advantage", switches[name]), True)]
    return [(("advantage", "type"), "default" if name == "drgrpo" else found.value)]


def zero_truncated(found: Found) -> Writes:
    """`zero_truncated_completions`: a switch of the advantage."""
    return [(("advantage", "zero_truncated"), True)] if truth(found.value) is True else []


def loss_variant(found: Found) -> Writes:
    """`loss.variant.type`: variants are types of the loss now."""
    return [(("loss", "type"), {"ratio": "grpo", "clip": "ppo_clip"}.get(found.value, found.value))]


def buffer_type(found: Found) -> Writes:
    """The kinds of buffer are one buffer with switches now."""
    if found.value in ("simple", "difficulty-pool"):
        return []
    if found.value == "online-difficulty":
        return [(("buffer", "online_difficulty_filtering"), True)]
    raise ConfigError(
        f"{found.setting.origin}: there is no buffer of type {found.value!r}; the buffer has the switches "
        "online_difficulty_filtering, easy_threshold and hard_threshold instead"
    )


# run


def run_directory(found: Found) -> Writes:
    """`exp_id`: a directory of its own below outputs."""
    return [] if found.value in _NULL else [(("output_dir",), f"outputs/{found.value}")]


def model_name(found: Found) -> Writes | None:
    """vLLM's `--model NAME`; a table is the model section."""
    is_name = isinstance(found.value, str) and found.value not in _NULL
    return [(("model", "name"), found.value)] if is_name else None


def for_vllm(name: str) -> Callable[[Found], Writes]:
    """A switch or list of vLLM's, in the free table; what is text on the command line is what it looks like."""

    def write(found: Found) -> Writes:
        value = [looks_like(str(item)) for item in found.value] if isinstance(found.value, list) else truth(found.value)
        return [(("vllm", name), value)]

    return write


def workers(found: Found) -> Writes:
    """A number of workers; `auto` is what happens without one."""
    return [] if found.value == "auto" else [(("workers_per_env",), found.value)]


def one_more(key: str) -> Callable[[Found], Writes]:
    """Retries as tries: the first one counts too."""

    def write(found: Found) -> Writes:
        number = whole_number(found.value)
        return [((key,), found.value if number is None else number + 1)]

    return write


# numbers of GPUs


@dataclass(frozen=True, slots=True)
class GpuCount:
    """A number of GPUs where their indices belong, until `resolve_gpu_counts` has seen all sources."""

    count: Any
    origin: str
    key: str
    """The key it was written under."""

    @property
    def size(self) -> int:
        """The number. Raises: ConfigError for a value that is none."""
        size = whole_number(self.count)
        if not size or size > MAX_GPUS:
            raise ConfigError(f"{self.key}: must be a number of GPUs, 1 or more, got {self.count!r} ({self.origin})")
        return size


def gpu_count(key: str) -> Callable[[Found], Writes]:
    """`trainer_gpus` and its like: a number where `key` has indices."""

    def write(found: Found) -> Writes:
        name = ".".join(map(str, found.setting.path))
        return [((key,), GpuCount(count=found.value, origin=found.setting.origin, key=name))]

    return write


def resolve_gpu_counts(values: Values) -> None:
    """Turn numbers of GPUs into indices: the lowest that no list names; the server takes its own before the trainer.

    A trainer without a server beside it leaves the first GPU to the one that is running already.
    Raises: ConfigError for a number that is none.
    """
    keys = ("inference_gpu_ids", "trainer_gpu_ids", "teacher_gpu_ids")
    given = {key: values.tree.get(key) for key in keys}
    named = [items(ids) for ids in given.values() if ids not in _NULL and not isinstance(ids, GpuCount)]
    taken = {number for ids in named for index in ids if (number := whole_number(index)) is not None}
    if given["inference_gpu_ids"] in _NULL and isinstance(given["trainer_gpu_ids"], GpuCount):
        taken.add(0)
    for key, count in given.items():
        if not isinstance(count, GpuCount):
            continue
        free = (index for index in itertools.count() if index not in taken)
        ids = list(itertools.islice(free, count.size))
        taken.update(ids)
        values.put(Setting((key,), ids, count.origin))
        values.notices.append(_gpus_notice(key, count, ids))


def _gpus_notice(key: str, count: GpuCount, ids: list[int]) -> str:
    shown = ",".join(map(str, ids))
    if count.origin.startswith("--"):
        return f"{count.origin} {count.size} is now --{key.replace('_', '-')} {shown}"
    return f"{count.origin}: {count.key} = {count.size} is now {key} = [{shown}]"
