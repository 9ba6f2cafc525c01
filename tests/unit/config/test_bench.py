from pathlib import Path

import pytest

from prime_rl.config.bench import BENCH_STEPS, bench_dir, generation_bench, training_bench
from prime_rl.config.load import load
from prime_rl.config.orchestrator import OrchestratorConfig
from prime_rl.config.roots import RLConfig
from prime_rl.config.trainer import TrainerConfig


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
    assert (config.max_steps, config.output_dir) == (BENCH_STEPS, bench_dir(Path("out")))


def test_made_up_data_of_the_configuration_stay():
    config = training_bench(
        trainer("--data.fake.batch-size", "6", "--data.fake.seq-len", "9"), batch_size=128, mean_tokens=25, seq_len=64
    )
    assert config.data.fake is not None
    assert (config.data.fake.batch_size, config.data.fake.seq_len) == (6, 9)


def test_rl_bench_measures_generation_with_the_orchestrator():
    assert load(RLConfig, ["--bench", "--inference"], {}).orchestrator.bench
    assert not load(RLConfig, ["--inference"], {}).orchestrator.bench
