"""The CPU examples learn, whatever the seed: one turn, several, tools. Two environments are mixed in their ratio."""

import json
import resource
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from prime_rl.config.load import load
from prime_rl.config.trainer import SFTConfig
from prime_rl.monitors.base import read_metrics
from prime_rl.paths import RunPaths, step_dir
from tests.integration.conftest import ROOT, rewards, run, train

LIMIT_S = 900
"""Of one command, on a machine that has other work too; alone on two cores, each takes about a minute."""
CPU_LIMIT_S = 2 * 240
"""Of all commands of an example: two cores for the four minutes that are promised. Other work on the machine makes a
run longer, but hardly dearer."""


def cpu_s() -> float:
    """CPU time of all processes that ended so far and were waited for, by the tests or by what they started."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


@contextmanager
def within_four_minutes(record: Callable[[str, object], None]) -> Iterator[None]:
    """What runs in here takes no more of two cores than that; how long it took is told and recorded."""
    began, used = time.monotonic(), cpu_s()
    yield
    seconds, used = time.monotonic() - began, cpu_s() - used
    record("wall_s", round(seconds, 1))
    record("cpu_s", round(used, 1))
    print(f"{seconds:.1f} s, {used:.1f} s of CPU time")
    assert used < CPU_LIMIT_S, f"{used:.0f} s of CPU time: no two cores do that within four minutes"


def learn(example: str, out: Path, port: int, seed: int) -> list[float]:
    """Demonstrations, warm-up and RL as the example's README has them; the reward of each step."""
    folder, data = f"examples/{example}", out / "sft.jsonl"
    subprocess.run([sys.executable, f"{folder}/make_sft_data.py", str(data)], cwd=ROOT, check=True, timeout=120)
    warm_up = ("sft", "@", f"{folder}/sft.toml", "--data.name", str(data), "--seed", str(seed))
    run(*warm_up, "--output-dir", str(out / "sft"), timeout=LIMIT_S)
    steps = load(SFTConfig, ["@", str(ROOT / folder / "sft.toml")], {}).max_steps
    assert steps is not None
    run(
        *("rl", "@", f"{folder}/rl.toml", "--model.name", str(step_dir(out / "sft" / "weights", steps))),
        *("--output-dir", str(out / "rl"), "--inference.server.port", str(port), "--seed", str(seed)),
        timeout=LIMIT_S,
    )
    return rewards(out / "rl")


def of_last_step(run_dir: Path, name: str) -> float:
    value = read_metrics(RunPaths(run_dir).metrics("orchestrator"))[-1][name]
    assert value is not None
    return value


def climb(curve: list[float]) -> float:
    """How much the mean reward of the last three steps is above that of the first three."""
    return sum(curve[-3:]) / 3 - sum(curve[:3]) / 3


SEEDS = (1, 2, 3)
EXAMPLES = ("reverse_text_cpu", "higher_lower_cpu", "shop_total_cpu")


@pytest.mark.slow
@pytest.mark.timeout(2 * LIMIT_S)
@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("example", EXAMPLES)
def test_the_reward_climbs_whatever_the_seed_within_four_minutes_of_two_cores(
    example: str, seed: int, tmp_path: Path, free_port: int, record_property: Callable[[str, object], None]
):
    with within_four_minutes(record_property):
        if example == "reverse_text_cpu":
            curve = rewards(train(tmp_path, seed=seed).run_dir)
        else:
            curve = learn(example, tmp_path, free_port, seed)
    if example == "reverse_text_cpu":
        assert curve[0] <= 0.5
        assert sum(curve[-3:]) / 3 >= 0.8
    else:
        assert of_last_step(tmp_path / "rl", "num_turns/mean") >= 2.5  # price, product and answer; guesses are four
    assert climb(curve) >= 0.15, curve


@pytest.mark.slow
def test_a_mixed_run_draws_every_batch_in_the_ratio_of_its_environments(tmp_path: Path, free_port: int):
    """Without asynchrony, so that a batch is what was drawn for it: 4 groups of 4, of which one is a game."""
    run(
        *("rl", "@", "examples/shop_total_cpu/mixed.toml", "--model.name", "examples/higher_lower_cpu/model"),
        *("--output-dir", str(tmp_path), "--inference.server.port", str(free_port), "--max-async-level", "0"),
        *("--max-steps", "5", "--trainer.scheduler.warmup-steps", "0", "--trainer.scheduler.decay-steps", "0"),
        *("--orchestrator.batch-size", "16", "--orchestrator.rollouts-per-example", "4"),
    )
    for step in range(5):
        lines = (step_dir(RunPaths(tmp_path).rollouts, step) / "rollouts.jsonl").read_text().splitlines()
        assert Counter(json.loads(line)["env"] for line in lines) == {"shop-total": 12, "higher-lower": 4}
