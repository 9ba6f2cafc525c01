"""Older spellings: every key of an earlier generation of configurations, and what it is now.

One table, `OLD`: configuration class -> old key (dotted, below that class) -> what it is now. A class's entries apply
wherever it, or a class derived from it, sits in a configuration. `translate` works on single settings, before they are
merged, so that precedence between an old and a new spelling in different places stays what it was.
"""

import functools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from pydantic import BaseModel

from prime_rl.config import old_values as old
from prime_rl.config import vllm_flags
from prime_rl.config.old_values import Found, GpuCount, Writes, resolve_gpu_counts, truth
from prime_rl.config.schema import Kind, Path, field_at, find, is_optional, target_of
from prime_rl.config.values import Setting, Values
from prime_rl.errors import ConfigError


@dataclass(frozen=True, slots=True)
class To:
    """The same value, and what stands below it, under another name."""

    new: str
    is_old: bool = True
    """False for another program's name, which gets no notice."""


@dataclass(frozen=True, slots=True)
class Rule:
    """Other keys, computed from the value."""

    write: Callable[[Found], Writes | None]
    kind: Kind | None = None
    """How the command line reads it. None: as the key `like`, or as the key of today that it still is."""
    like: str = ""
    says: str = ""
    """What the notice says the key is now, where no other key is written for it."""
    is_old: bool = True


@dataclass(frozen=True, slots=True)
class Repair:
    """The same key; the value put right."""

    read: Callable[[Any], Any]


@dataclass(frozen=True, slots=True)
class Gone:
    """Accepted without effect; the notice says what happens instead."""

    instead: str
    kind: Kind = Kind.FLAG
    only: tuple[Any, ...] = ()
    """The values that ask for what happens anyway; others are refused. Empty: any."""

    def accepts(self, value: Any) -> bool:
        """Whether the value asks for what happens anyway."""
        return not self.only or str(truth(value)) in map(str, self.only)


@dataclass(frozen=True, slots=True)
class Refused:
    """Without counterpart: an unknown key, with a hint."""

    hint: str


Notice = tuple[str, str]
"""The place in a file (empty for a flag, which names itself), and what to say of it."""

__all__ = [
    "READ_FIRST",
    "GpuCount",
    "hint",
    "kind",
    "kind_at",
    "old_keys",
    "renamed",
    "resolve_gpu_counts",
    "translate",
]

Entry = To | Rule | Repair | Gone | Refused

_LOGS = Refused("logs are written to logs/ in the run directory: set output_dir")

_MONITOR: dict[str, Entry] = {
    "monitor.wandb": To("wandb"),
    "monitor.file": Gone("metrics are always written to a JSONL file in the run directory", Kind.SECTION),
    "monitor.socket": Refused("metrics go to a JSONL file in the run directory, and to W&B with [wandb]"),
    "monitor.api": Refused("metrics go to a JSONL file in the run directory, and to W&B with [wandb]"),
    "monitor.system_log_frequency": Gone("the machine is not measured", Kind.SCALAR, only=(0,)),
}


def _in_vllm(name: str, kind: Kind) -> Rule:
    return Rule(old.for_vllm(name), kind, is_old=False)


OLD: Mapping[str, Mapping[str, Entry]] = {
    "RLConfig": {
        "exp_id": Rule(old.run_directory, Kind.SCALAR),
        "async_level": To("max_async_level"),
        "clean_output_dir": To("clean"),
        "trainer_gpus": Rule(old.gpu_count("trainer_gpu_ids"), Kind.SCALAR, is_old=False),
        "inference_gpus": Rule(old.gpu_count("inference_gpu_ids"), Kind.SCALAR, is_old=False),
        "deployment.num_train_gpus": Rule(old.gpu_count("trainer_gpu_ids"), Kind.SCALAR, is_old=False),
        "deployment.num_infer_gpus": Rule(old.gpu_count("inference_gpu_ids"), Kind.SCALAR, is_old=False),
        "deployment.type": Gone("a run is on one machine", Kind.SCALAR, only=("single_node",)),
        "deployment.gpus_per_node": Gone("the visible GPUs are counted", Kind.SCALAR),
    },
    "_BaseTrainerConfig": {
        **_MONITOR,
        "profile_path": To("memory_profiler_path"),
        "model.liger_kernel": Gone("the trainer has its own kernels"),
        "model.fused_lm_head_token_chunk_size": To("model.fused_lm_head_chunk_size"),
        "weights.path": Refused("weights are written to weights/ in the run directory: set output_dir"),
        "weights.save_async": Gone("weights are written before the next step begins"),
    },
    "TrainerConfig": {
        "async_level": To("max_async_level"),
        "recompute_logprobs": Gone("the importance ratio is to the engine's own logprobs"),
        "data.path": Refused("batches are read from rollouts/ in the run directory: set output_dir"),
        "weight_broadcast.save_format": Gone("weights are safetensors", Kind.SCALAR, only=("safetensors",)),
        "weight_broadcast.save_sharded": Gone("large models are written as several files", only=(True,)),
        "loss.max_norm": To("optim.max_norm"),
        "loss.type": Repair(lambda value: "default" if value == "grpo" else value),
        "loss.variant": Refused(
            "there is one loss with masks: loss.token_mask_low and loss.token_mask_high bound the ratio"
        ),
        "loss.clip_ratio": Refused("loss.token_mask_high leaves tokens of a larger ratio out, instead of clipping it"),
        "loss.norm_type": Gone("the loss is the mean over tokens", Kind.SCALAR, only=("token",)),
    },
    "SFTConfig": {
        "clean_output_dir": To("clean"),
        "data.fake": Rule(old.fake_data, like="data"),
        "deployment.num_gpus": Refused("start one process a GPU: torchrun --nproc-per-node N"),
    },
    "OrchestratorConfig": {
        **_MONITOR,
        "environment": To("env.0"),
        "async_level": To("max_async_level"),
        "rollouts_per_prompt": To("rollouts_per_example"),
        "group_size": To("rollouts_per_example"),
        "max_inflight_rollouts": To("max_concurrent"),
        "advantage_type": Rule(old.advantage, Kind.SCALAR),
        "advantage.length_weighted_baseline": To("advantage.length_weighted_mean"),
        "collate_mode": Gone("samples are packed", Kind.SCALAR, only=("packing",)),
        "micro_batch_size": Gone("samples are packed into micro-batches of seq_len tokens", Kind.SCALAR),
        "mask_truncated_completions": Gone("truncated completions are trained on", only=(False,)),
        "zero_truncated_completions": Gone("truncated completions keep their reward", only=(False,)),
        "length_bonus": Gone("rewards are the environment's own", Kind.SCALAR, only=(0, 0.0, None)),
        "rollout_path": Refused("batches are written to rollouts/ in the run directory: set output_dir"),
        "weights_path": Refused("weights are read from weights/ in the run directory: set output_dir"),
        "buffer.type": Rule(old.buffer_type, Kind.SCALAR, says="the one kind of buffer"),
        "buffer.oversampling_factor": To("oversampling_factor"),
        "buffer.easy_border": To("buffer.easy_threshold"),
        "buffer.hard_border": To("buffer.hard_threshold"),
        "buffer.min_reward": Gone("groups of mean reward 0 are filtered", Kind.SCALAR, only=(0.01, None)),
        "buffer.max_reward": Gone("groups of mean reward 1 are filtered", Kind.SCALAR, only=(0.99, None)),
        "buffer.from_scratch": Gone("a resumed run keeps its buffer unless ckpt.skip_buffer is set", only=(True,)),
        "training_mode": Gone("a run learns from rewards", Kind.SCALAR, only=("rl",)),
        "student.model": To("model"),
        "student.client": To("client"),
        "teacher": To("teacher_model"),
        "train.env": To("env"),
        "train.sampling": To("sampling"),
        "train.num_workers": Rule(old.workers, Kind.SCALAR),
        "train.max_retries": Rule(old.one_more("max_attempts"), Kind.SCALAR),
        "post_batch_filters": To("filters"),
    },
    "TrainEnvConfig": {
        "group_size": Refused("all environments have groups of one size: set orchestrator.rollouts_per_example"),
        "timeout": Refused("all environments share orchestrator.rollout_timeout"),
        "num_workers": Refused("all environments have orchestrator.workers_per_env workers"),
        "max_retries": Refused("all environments share orchestrator.max_attempts"),
    },
    "TrainSamplingConfig": {
        "top_p": Rule(old.unless_neutral("top_p", 1.0), Kind.SCALAR, says="always 1, which training needs"),
        "top_k": Rule(old.unless_neutral("top_k", -1), Kind.SCALAR, says="always -1, which training needs"),
        "min_p": Rule(old.unless_neutral("min_p", 0.0), Kind.SCALAR, says="always 0, which training needs"),
    },
    "SamplingConfig": {"max_completion_tokens": To("max_tokens")},
    "_BaseEvalConfig": {
        "benchmarks": Rule(old.environments, Kind.LIST),
        "environment_ids": Rule(old.environments, Kind.LIST),
        "environment_args": Rule(old.environment_args, Kind.MAPPING),
        "num_examples": Rule(old.for_each_environment("num_examples")),
        "rollouts_per_example": Rule(old.for_each_environment("rollouts_per_example")),
        "group_size": To("rollouts_per_example"),
        "save": Rule(old.save_always, says="evals/ in the run directory"),
    },
    "EvalEnvConfig": {"group_size": To("rollouts_per_example")},
    "OnlineEvalConfig": {
        "skip_eval_on_restart": To("skip_eval_on_resume"),
        "skip_first_step": Rule(old.opposite("eval_base_model"), Kind.FLAG),
    },
    "EvalConfig": {
        **_MONITOR,
        "wandb.log_extras": Gone("an evaluation logs its scores", Kind.SECTION),
        "wandb.log_samples": Gone("an evaluation logs its scores", Kind.SECTION),
        "online": Refused("set weights_dir to a run's weights, and watcher to wait for further steps"),
    },
    "InferenceConfig": {
        "vllm_extra": To("vllm"),
        "server.port": Repair(old.port_alone),
        "model": Rule(old.model_name, is_old=False),
        **{name: To(ours, is_old=False) for name, ours in vllm_flags.OURS.items() if name != "model"},
        **{f"vllm.{name}": To(ours, is_old=False) for name, ours in vllm_flags.OURS.items()},
        **{name: To(f"vllm.{name}", is_old=False) for name in vllm_flags.SINGLE - set(vllm_flags.OURS)},
        **{name: _in_vllm(name, Kind.FLAG) for name in vllm_flags.SWITCHES - set(vllm_flags.OURS)},
        **{name: _in_vllm(name, Kind.LIST) for name in vllm_flags.LISTS - set(vllm_flags.OURS)},
    },
    "ClientConfig": {
        "host": Rule(old.address_part("host"), Kind.SCALAR),
        "port": Rule(old.address_part("port"), Kind.SCALAR),
        "api_key": Rule(old.api_key, Kind.SCALAR, says="read from the variable that client.api_key_var names"),
        "base_url": Repair(old.with_v1),
        "server_type": Gone("every server is asked what it can do", Kind.SCALAR, only=("vllm",)),
        "wait_for_ready_timeout": To("ready_timeout"),
    },
    "SharedCheckpointConfig": {
        "path": To("output_dir"),
        "keep": To("keep_last"),
    },
    "TrainerWandbConfig": {"log_samples": To("log_extras")},
    "OrchestratorWandbConfig": {"log_samples": To("log_extras")},
    "TrainerLogExtrasConfig": {"samples": Gone("samples are logged by the orchestrator")},
    "SharedLogConfig": {
        "path": _LOGS,
        "utc": Gone("times are local", only=(False,)),
        "level": Repair(lambda value: "info" if value in ("sucess", "success") else value),
    },
}

READ_FIRST = ("environment_ids", "environment-ids", "benchmarks")
"""Older keys that others beside them refer to (`environment_args`): a source's are read before those."""

_PROCESSES = {"TrainerConfig", "SFTConfig", "OrchestratorConfig", "InferenceConfig", "EvalConfig"}
"""Classes that are the root of a process's own file."""

_MAX_ROUNDS = 8
"""More renamings of one key than any has behind it."""

_find = functools.cache(find)


def translate(root: type[BaseModel], setting: Setting, values: Values) -> tuple[list[Setting], list[Notice]]:
    """The settings that `setting` stands for today, and what to tell the user.

    `values` is what is merged so far, for old keys that are a part of a new one.
    Raises: ConfigError for an old key whose value has no counterpart.
    """
    settings, notices = [setting], []
    for _ in range(_MAX_ROUNDS):
        found = [_apply(root, current, values) for current in settings]
        notices += [notice for _, notice in found if notice]
        before, settings = settings, [new for news, _ in found for new in news]
        if settings == before:
            return settings, notices
    raise AssertionError(f"{setting.path}: the table of older spellings runs in a circle")


def kind(root: type[BaseModel], path: Path) -> Kind | None:
    """How the command line reads an older key; None for one that is none, or has no counterpart."""
    for base, end, entry in _entries(root, path):
        tail = path[end:]
        if isinstance(entry, To):
            return kind_at(root, (*base, *_parts(entry.new), *tail))
        if isinstance(entry, Rule) and entry.kind is None:
            target = _find(root, (*base, *_parts(entry.like), *tail) if entry.like else path)
            return target.kind if target else None
        if isinstance(entry, Rule | Gone) and entry.kind is not None:
            holds_any = entry.kind in (Kind.SECTION, Kind.MAPPING)
            return entry.kind if not tail else Kind.FREE if holds_any else None
    return Kind.SECTION if _is_around_old_keys(root, path) else None


def kind_at(root: type[BaseModel], path: Path) -> Kind | None:
    """How the command line reads a key, of today or older; None where there is none."""
    target = _find(root, path)
    return target.kind if target else kind(root, path)


def renamed(root: type[BaseModel], path: Path) -> Path:
    """The path under today's names, as far as it stood under older ones."""
    for _ in range(_MAX_ROUNDS):
        new = next(
            ((*base, *_parts(e.new), *path[end:]) for base, end, e in _entries(root, path) if isinstance(e, To)), path
        )
        if new == path:
            break
        path = new
    return path


def hint(root: type[BaseModel], path: Path) -> str | None:
    """What to do instead of an old key that has no counterpart."""
    hints = (entry.hint for _, _, entry in _entries(root, path) if isinstance(entry, Refused))
    return next(hints, None)


def old_keys(root: type[BaseModel], prefix: tuple[str, ...] = ()) -> Iterator[str]:
    """Every older spelling below `root` that still works, dotted; vLLM's names included."""
    for key, entry in _table(root).items():
        if not isinstance(entry, Refused):
            yield ".".join((*prefix, key))
    for name, field in root.model_fields.items():
        for section in target_of(field.annotation).sections:
            yield from old_keys(section, (*prefix, name))


@functools.cache
def _table(cls: type[BaseModel]) -> dict[str, Entry]:
    """The entries of a class and of those that it is derived from; a key of its own is not old."""
    entries: dict[str, Entry] = {}
    for owner in reversed(cls.__mro__):
        entries |= OLD.get(owner.__name__, {})
    return {key: entry for key, entry in entries.items() if isinstance(entry, Rule | Repair) or not _is_key(cls, key)}


def _is_key(cls: type[BaseModel], key: str) -> bool:
    target = _find(cls, _parts(key))
    return target is not None and target.kind is not Kind.FREE


def _entries(root: type[BaseModel], path: Path) -> Iterator[tuple[Path, int, Entry]]:
    """Entries for `path` or a table around it: where the class sits, the end of the old key in `path`, the entry."""
    for start in range(len(path)):
        target = _find(root, path[:start])
        if target is None:
            return
        for section in target.sections if target.kind is Kind.SECTION else ():
            for end in range(len(path), start, -1):
                entry = _table(section).get(_dotted(path[start:end]))
                if entry is not None:
                    yield path[:start], end, entry


def _is_around_old_keys(root: type[BaseModel], path: Path) -> bool:
    """Whether `path` is no key itself, but a table that old keys stood in."""
    for start in range(len(path)):
        target = _find(root, path[:start])
        around = f"{_dotted(path[start:])}."
        if target and any(key.startswith(around) for section in target.sections for key in _table(section)):
            return _find(root, path) is None
    return False


def _apply(root: type[BaseModel], setting: Setting, values: Values) -> tuple[list[Setting], Notice | None]:
    """One round of `translate`: the setting itself where no entry has anything to say."""
    for base, end, entry in _entries(root, setting.path):
        old_key, tail = setting.path[:end], setting.path[end:]
        if isinstance(entry, To):
            new = (*base, *_parts(entry.new))
            renamed = replace(setting, path=(*new, *tail))
            shown = _name(root, renamed.path if setting.is_flag else new, setting)
            return [renamed], _notice(root, setting, old_key, f"is now {shown}") if entry.is_old else None
        if isinstance(entry, Rule):
            writes = entry.write(Found(setting=setting, base=base, tail=tail, values=values))
            if writes is not None:
                settings = [replace(setting, path=(*base, *path), value=value) for path, value in writes]
                says = _written(root, settings) or entry.says
                return settings, _notice(root, setting, old_key, f"is now {says}") if entry.is_old and says else None
        if isinstance(entry, Repair) and not tail and (value := entry.read(setting.value)) != setting.value:
            return [replace(setting, value=value)], _notice(
                root, setting, old_key, f"{_text(setting.value)} is read as {_text(value)}"
            )
        if isinstance(entry, Gone):
            if not entry.accepts(setting.value):
                says = f"{_text(setting.value)} has no counterpart: {entry.instead}"
                raise ConfigError(": ".join(filter(None, _notice(root, setting, old_key, says))))
            return [], _notice(root, setting, old_key, f"is gone: {entry.instead}")
    if setting.value == {} and _is_around_old_keys(root, setting.path):
        return [], None
    return _switched(root, setting)


def _switched(root: type[BaseModel], setting: Setting) -> tuple[list[Setting], Notice | None]:
    """An optional section was a mere switch once: `ac = true`."""
    field, value = field_at(root, setting.path), truth(setting.value)
    if not isinstance(value, bool) or field is None or not is_optional(field.annotation):
        return [setting], None
    if target_of(field.annotation).kind is not Kind.SECTION:
        return [setting], None
    says = f"is a table now: {_text(value)} is read as {'an empty one' if value else 'none'}"
    return [replace(setting, value={} if value else None)], _notice(root, setting, setting.path, says)


def _notice(root: type[BaseModel], setting: Setting, key: Path, says: str) -> Notice:
    if setting.is_flag:
        return "", f"{setting.origin} {says}"
    return setting.origin, f"{_name(root, key, setting)} {says}"


def _written(root: type[BaseModel], settings: list[Setting]) -> str:
    """Settings as the user would write them: flags, or lines of a file."""
    shown = [setting for setting in settings if setting.value != []]
    if shown and shown[0].is_flag:
        return " ".join(f"{_name(root, s.path, s)} {_text(s.value)}" for s in shown)
    return ", ".join(f"{_name(root, s.path, s)} = {_text(s.value)}" for s in shown)


def _name(root: type[BaseModel], path: Path, setting: Setting) -> str:
    """A key as a flag, or as it would stand in the file of its process."""
    if setting.is_flag:
        is_negated = setting.origin.startswith("--no-") and setting.value in (False, None)
        return f"{'--no-' if is_negated else '--'}{_dotted(path).replace('_', '-')}"
    for start in range(len(path) - 1, 0, -1):
        target = _find(root, path[:start])
        if target and any(section.__name__ in _PROCESSES for section in target.sections):
            return _dotted(path[start:])
    return _dotted(path)


def _text(value: Any) -> str:
    if isinstance(value, list):
        return ",".join(map(_text, value))
    return str(value).lower() if isinstance(value, bool) else str(value)


def _parts(key: str) -> Path:
    return tuple(int(part) if part.isdigit() else part for part in key.split("."))


def _dotted(path: Path) -> str:
    return ".".join(map(str, path))
