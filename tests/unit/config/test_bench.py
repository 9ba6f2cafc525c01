from pathlib import Path

import pytest

from prime_rl.config.bench import BENCH_STEPS, bench_dir, generation_bench, measured, training_bench
from prime_rl.config.load import load
from prime_rl.config.orchestrator import OrchestratorConfig
from prime_rl.config.roots import RLConfig
from prime_rl.config.trainer import SFTConfig, TrainerConfig
from prime_rl.errors import ConfigError


def trainer(*argv):
    return load(TrainerConfig, list(argv), {})


def test_generation_is_measured_over_a_few_steps_in_a_directory_of_its_own():
    config = generation_bench(load(OrchestratorConfig, ["--max-steps", "500", "--output-dir", "out"], {}))
    assert (config.max_steps, config.output_dir) == (BENCH_STEPS, Path("out/bench"))


@pytest.mark.parametrize(
    ("mean_tokens", "tokens", "micro_batch_size"), [(25.2, 25, 64), (2000.0, 2000, 1), (5000.0, 2048, 1), (1.0, 2, 128)]
)
def test_made_up_batches_have_the_size_and_the_rows_of_real_ones(mean_tokens, tokens, micro_batch_size):
    config = training_bench(trainer("--output-dir", "out"), batch_size=128, mean_tokens=mean_tokens, seq_len=2048)
    fake = config.data.fake
    assert fake is not None
    assert (fake.batch_size, fake.seq_len, fake.micro_batch_size) == (128, tokens, micro_batch_size)
    assert micro_batch_size * tokens <= 2048
    assert config.bench is not None
    assert (measured(config).max_steps, measured(config).output_dir) == (BENCH_STEPS, bench_dir(Path("out")))


def test_made_up_data_of_the_configuration_stay():
    config = training_bench(
        trainer("--data.fake.batch-size", "6", "--data.fake.seq-len", "9"), batch_size=128, mean_tokens=25, seq_len=64
    )
    assert config.data.fake is not None
    assert (config.data.fake.batch_size, config.data.fake.seq_len) == (6, 9)


def test_rl_bench_measures_generation_with_the_orchestrator():
    assert load(RLConfig, ["--bench", "--inference"], {}).orchestrator.bench
    assert not load(RLConfig, ["--inference"], {}).orchestrator.bench


def test_a_trainer_measures_a_few_steps_alone_and_keeps_nothing():
    flags = ["--bench", "--max-steps", "100", "--weights.interval", "1", "--scheduler.type", "cosine"]
    config = measured(trainer(*flags, "--output-dir", "out"))
    assert (config.max_steps, config.output_dir) == (4, Path("out/bench"))
    kinds = (config.weights.interval, config.scheduler.type, config.weight_broadcast.type)
    assert kinds == (None, "constant", "filesystem")
    assert config.data.fake is not None


def test_sft_is_measured_on_the_data_that_it_names():
    config = measured(load(SFTConfig, ["--bench.steps", "9", "--data.name", "mine.jsonl"], {}))
    assert (config.max_steps, config.data.type) == (9, "sft")


def test_a_benchmark_in_which_no_step_counts_is_refused():
    with pytest.raises(ConfigError, match="all steps are for warming up"):
        trainer("--bench.warm-up", "4")


def test_a_benchmark_of_few_steps_may_be_traced():
    assert trainer("--bench.steps", "5", "--trace-path", "traces").trace_path == Path("traces")
