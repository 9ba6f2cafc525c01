"""Older spellings: every key of an earlier generation of configurations, and what it is now.

One table, `OLD`: configuration class -> old key (dotted, below that class) -> what it is now. A class's entries apply
wherever it, or a class derived from it, sits in a configuration. `config.translation` applies them, `config.old_values`
has the functions that compute values. To add a key that was renamed: one line under the class that has the new one.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from prime_rl.config.compat import old_values as old
from prime_rl.config.compat import vllm_flags
from prime_rl.config.compat.old_values import Found, Writes, truth
from prime_rl.config.schema import Kind


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

    @property
    def is_table(self) -> bool:
        """Whether it also takes what stands below the key."""
        return bool(self.like) or self.kind is Kind.MAPPING


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
        "loss.variant.type": Rule(old.loss_variant, Kind.SCALAR),
        "loss.variant.clip_ratio": To("loss.clip_ratio"),
        "loss.variant.epsilon_low": To("loss.clip_low"),
        "loss.variant.epsilon_high": To("loss.clip_high"),
        "loss.variant.highest_entropy_ratio_loss": Gone("every token is trained on", Kind.SCALAR, only=(1, 1.0)),
        "loss.mask_ratio_low": To("loss.token_mask_low"),
        "loss.mask_ratio_high": To("loss.token_mask_high"),
        "loss.sequence_mask_ratio_low": To("loss.sequence_mask_low"),
        "loss.ratio_length_norm": Refused("loss.type gspo weights by the geometric mean of a sequence's ratios"),
        "loss.ipo_mask_low": Refused("set loss.type to ipo, with one loss.ipo_threshold for both directions"),
        "loss.ipo_mask_high": Refused("set loss.type to ipo, with one loss.ipo_threshold for both directions"),
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
        "mask_truncated_completions": Gone(
            "truncated completions are trained on, unless [[filters]] of type truncated leave them out", only=(False,)
        ),
        "zero_truncated_completions": Rule(
            old.zero_truncated, Kind.FLAG, says="the default: truncated completions keep their reward"
        ),
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
        "top_p": Rule(old.unless_neutral(1.0), Kind.SCALAR, says="always 1, which training needs"),
        "top_k": Rule(old.unless_neutral(-1), Kind.SCALAR, says="always -1, which training needs"),
        "min_p": Rule(old.unless_neutral(0.0), Kind.SCALAR, says="always 0, which training needs"),
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
    "TrainerLogConfig": {
        "vf_level": Gone("the trainer runs no environments", Kind.SCALAR),
        "env_worker_logs": Gone("the trainer runs no environments"),
    },
    "TrainerLogExtrasConfig": {"samples": Gone("samples are logged by the orchestrator")},
    "SharedLogConfig": {
        "path": _LOGS,
        "utc": Gone("times are local", only=(False,)),
        "level": Repair(lambda value: "info" if value in ("sucess", "success") else value),
    },
}

READ_FIRST = ("environment_ids", "environment-ids", "benchmarks")
"""Older keys that others beside them refer to (`environment_args`): a source's are read before those."""
