"""What `--bench` makes of a configuration: a few steps in a directory of their own, each side alone. Pure."""

from pathlib import Path
from typing import Any, Final, TypeVar, cast

from prime_rl.config.artifacts import FilesystemBroadcastConfig, WeightsConfig
from prime_rl.config.optim import ConstantSchedulerConfig
from prime_rl.config.orchestrator import OrchestratorConfig
from prime_rl.config.trainer import BenchConfig, FakeDataConfig, RLDataConfig, SFTConfig, TrainerConfig

BENCH_STEPS: Final = 4
"""Steps that generation makes; the first warms up and is shown, but not counted."""

Config = TypeVar("Config", bound=TrainerConfig | SFTConfig)


def bench_dir(output_dir: Path) -> Path:
    """Where a benchmark writes, so that no trainer takes its steps for those of the run in `output_dir`."""
    return output_dir / "bench"


def generation_bench(config: OrchestratorConfig) -> OrchestratorConfig:
    """The orchestrator that measures generation."""
    return config.model_copy(update={"max_steps": BENCH_STEPS, "output_dir": bench_dir(config.output_dir)})


def training_bench(config: TrainerConfig, *, batch_size: int, mean_tokens: float, seq_len: int) -> TrainerConfig:
    """The trainer that measures itself on made-up batches, in place of those that an orchestrator would write.

    Such a batch holds `batch_size` samples of `mean_tokens` tokens, in rows of at most `seq_len`. Fake data that the
    configuration has stays.
    """
    tokens = min(max(2, round(mean_tokens)), seq_len)
    fitting = [size for size in range(1, batch_size + 1) if batch_size % size == 0 and size * tokens <= seq_len]
    fake = config.data.fake or FakeDataConfig(batch_size=batch_size, micro_batch_size=max(fitting), seq_len=tokens)
    return config.model_copy(update={"data": RLDataConfig(fake=fake), "bench": config.bench or BenchConfig()})


def measured(config: Config) -> Config:
    """What a trainer with `bench` runs: its steps, alone, in a directory of their own, and nothing that is to stay."""
    assert config.bench is not None
    update: dict[str, Any] = {
        "max_steps": config.bench.steps,
        "output_dir": bench_dir(config.output_dir),
        "scheduler": ConstantSchedulerConfig(),  # a schedule may not fit into so few steps
        "weights": WeightsConfig(),
        "ckpt": None,
    }
    return cast("Config", config.model_copy(update=update | _alone(config)))


def _alone(config: TrainerConfig | SFTConfig) -> dict[str, Any]:
    """Without the processes that an RL trainer takes batches from and sends weights to."""
    if isinstance(config, SFTConfig):
        return {}
    fake = config.data.fake or FakeDataConfig()
    none_of_a_run = {"recover": False, "recovery_interval": None, "replay": None}
    return {"weight_broadcast": FilesystemBroadcastConfig(), "data": RLDataConfig(fake=fake)} | none_of_a_run
