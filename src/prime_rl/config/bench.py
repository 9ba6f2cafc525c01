"""What `--bench` makes of a configuration: a few steps in a directory of their own, each side alone. Pure."""

from pathlib import Path
from typing import Final

from prime_rl.config.artifacts import FilesystemBroadcastConfig
from prime_rl.config.orchestrator import OrchestratorConfig
from prime_rl.config.trainer import ConstantSchedulerConfig, FakeDataConfig, RLDataConfig, TrainerConfig

BENCH_STEPS: Final = 4
"""Steps that are made; the first warms up and is shown, but not counted."""


def bench_dir(output_dir: Path) -> Path:
    """Where a benchmark writes, so that no trainer takes its steps for those of the run in `output_dir`."""
    return output_dir / "bench"


def generation_bench(config: OrchestratorConfig) -> OrchestratorConfig:
    """The orchestrator that measures generation."""
    return config.model_copy(update={"max_steps": BENCH_STEPS, "output_dir": bench_dir(config.output_dir)})


def training_bench(config: TrainerConfig, *, batch_size: int, mean_tokens: float, seq_len: int) -> TrainerConfig:
    """The trainer that measures training on made-up batches, in place of those that an orchestrator would write.

    Such a batch holds `batch_size` samples of `mean_tokens` tokens, in rows of at most `seq_len`. Fake data that the
    configuration has stays.
    """
    tokens = min(max(2, round(mean_tokens)), seq_len)
    fitting = [size for size in range(1, batch_size + 1) if batch_size % size == 0 and size * tokens <= seq_len]
    fake = config.data.fake or FakeDataConfig(batch_size=batch_size, micro_batch_size=max(fitting), seq_len=tokens)
    update = {
        "data": RLDataConfig(fake=fake),
        "max_steps": BENCH_STEPS,
        "output_dir": bench_dir(config.output_dir),
        "scheduler": ConstantSchedulerConfig(),  # a schedule may not fit into so few steps
        "weight_broadcast": FilesystemBroadcastConfig(),  # nobody is there to receive
    }
    return config.model_copy(update=update)
