"""Keys that are part of the schema, and whose reader is not built yet.

`--dry-run` accepts them, so that a file written for what is to come resolves; a real start refuses them with a
sentence, because a key without effect is worse than one that is missing. A neutral value is no wish for anything: the
default, and what the entry names besides it.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel

from prime_rl.config.reading.variants import owners
from prime_rl.config.schema import Path, default_of, find

TENSOR_PARALLEL = "tensor parallelism"
SPEED = "the trainer's matrix products in 8 bits"
VLLM = "the vLLM backend"
HF_CODE = "models of other architectures"
WEIGHT_FILES = "weights in other kinds of files"
MONITORS = "monitors"
EVALUATION = "the full evaluation"
SFT_DATA = "the full SFT data pipeline"
TENANTS = "several runs that share a trainer"
EXPERTS = "mixtures of experts and context parallelism"
CLUSTER = "runs over several machines"


@dataclass(frozen=True, slots=True)
class Pending:
    """What a key waits for, and its neutral values besides the default."""

    waits_for: str
    neutral: tuple[Any, ...] = ()


PENDING: dict[str, Pending] = {
    "TrainerModelConfig.tp": Pending(TENSOR_PARALLEL),
    "TrainerModelConfig.fp8": Pending(SPEED),
    "TrainerCheckpointConfig.weights": Pending(WEIGHT_FILES),
    "ModelConfig.trust_remote_code": Pending(HF_CODE),
    "TokenizerConfig.trust_remote_code": Pending(HF_CODE, neutral=(False,)),
    **dict.fromkeys(
        [
            *("TrainerModelConfig.ep", "TrainerModelConfig.ep_comm_backend", "TrainerModelConfig.cp"),
            *("TrainerModelConfig.moe_use_grouped_mm", "TrainerConfig.enable_router_replay"),
        ],
        Pending(EXPERTS),
    ),
    **dict.fromkeys(
        [
            *("PolicyModelConfig.lora", "OrchestratorConfig.optim", "TrainerConfig.max_concurrent_runs"),
        ],
        Pending(TENANTS),
    ),
    **dict.fromkeys(
        [
            *("RLConfig.deployment", "RLConfig.slurm", "SFTConfig.slurm", "InferenceConfig.deployment"),
            *("TrainerConfig.rollout_transport", "OrchestratorConfig.rollout_transport", "ClientConfig.elastic"),
        ],
        Pending(CLUSTER),
    ),
    **dict.fromkeys(
        [
            *("_BaseTrainerConfig.wandb", "OrchestratorConfig.wandb", "RLConfig.wandb", "EvalConfig.wandb"),
            *("OrchestratorConfig.prime_monitor", "_BaseTrainerConfig.heartbeat", "OrchestratorConfig.heartbeat"),
            "_BaseTrainerConfig.metrics_server",
        ],
        Pending(MONITORS),
    ),
    **dict.fromkeys(
        [
            *("SFTDataConfig.subsets", "SFTDataConfig.probabilities", "SFTDataConfig.stopping_strategy"),
            *("_BaseDataConfig.pack_function", "SFTConfig.loss_impl"),
            "TokenizerConfig.chat_template",
        ],
        Pending(SFT_DATA),
    ),
    **dict.fromkeys(
        [
            *("_BaseEvalConfig.save", "_BaseEvalConfig.retry", "_BaseEvalConfig.reasoning_field"),
            *("_BaseEvalConfig.per_rollout", "EvalConfig.use_tqdm", "EvalConfig.resume_path", "EvalConfig.watcher"),
            "EvalSamplingConfig.reasoning_effort",
        ],
        Pending(EVALUATION),
    ),
}
"""`Class.field` (the class that declares it), or `Class.field:type` for one type of a section -> what it waits for."""


@dataclass(frozen=True, slots=True)
class Wish:
    """A key that was given a value nothing reads yet."""

    path: Path
    value: Any
    waits_for: str


def wishes(config: BaseModel, path: Path = ()) -> Iterator[Wish]:
    """Every pending key of `config` whose value is not neutral; one for a section, not one for each of its keys."""
    for name, field in type(config).model_fields.items():
        value, here = getattr(config, name), (*path, name)
        pending = _pending(type(config), name, getattr(value, "type", ""))
        if pending is not None:
            if not _is_neutral(value, default_of(field), pending):
                yield Wish(here, value, pending.waits_for)
            continue
        for index, section in _sections(value):
            yield from wishes(section, here if index is None else (*here, index))


def note(cls: type[BaseModel], name: str, kind: str = "") -> str:
    """What to say of the key `name` of section `cls`, or of the type `kind` of the section that it is; "" if built."""
    pending = _pending(cls, name, kind)
    if pending is None:
        return ""
    default = default_of(cls.model_fields[name])
    is_default = default is not None and kind in ("", getattr(default, "type", ""))
    what = "other values come" if is_default else "comes"
    also = f" ({', '.join(map(str, pending.neutral))} works)" if pending.neutral else ""
    return f"Later: {what} with {pending.waits_for}{also}."


def note_at(root: type[BaseModel], path: Path, kind: str = "") -> str:
    """What to say of the key at `path`: its note, or that of a section around it. `kind`: the type of what is there."""
    for end, name in enumerate(path):
        owner, target = find(root, path[:end]), find(root, path[: end + 1])
        if isinstance(name, int) or owner is None or target is None:
            continue
        below = str(path[end + 1]) if end + 1 < len(path) else None
        kinds = owners(target.sections, below) if below and len(target.sections) > 1 else [kind]
        notes = [note(cls, name, kind) for cls in owner.sections if name in cls.model_fields for kind in kinds]
        if notes and all(notes):
            return notes[0]
    return ""


def _pending(cls: type, name: str, kind: str) -> Pending | None:
    for owner in cls.__mro__:
        for key in (f"{owner.__name__}.{name}", f"{owner.__name__}.{name}:{kind}"):
            if key in PENDING:
                return PENDING[key]
        if name in vars(owner).get("__annotations__", {}):
            return None  # a class that declares a key anew speaks for itself
    return None


def _is_neutral(value: Any, default: Any, pending: Pending) -> bool:
    return bool(value == default or value in pending.neutral)


def _sections(value: Any) -> Iterator[tuple[int | None, BaseModel]]:
    if isinstance(value, BaseModel):
        yield None, value
    elif isinstance(value, tuple):
        yield from ((index, item) for index, item in enumerate(value) if isinstance(item, BaseModel))
