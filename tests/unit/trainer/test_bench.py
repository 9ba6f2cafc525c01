import json
from pathlib import Path

import pytest

from prime_rl.config.bench import measured
from prime_rl.config.load import load
from prime_rl.config.trainer import SFTConfig, TrainerConfig
from prime_rl.errors import ArtifactError
from prime_rl.monitors.base import JsonlMonitor
from prime_rl.paths import RunPaths
from prime_rl.trainer.bench import clear, report


def run_dir(tmp_path: Path, *argv: str) -> tuple[TrainerConfig, RunPaths]:
    """What four steps of 3, 1, 2 and 6 seconds leave behind."""
    config = measured(load(TrainerConfig, ["--bench", "--output-dir", str(tmp_path), *argv], {}))
    paths = RunPaths(config.output_dir)
    (paths.weights / "step_4").mkdir(parents=True)
    monitor = JsonlMonitor(paths.metrics("trainer"))
    for step, seconds in enumerate((3.0, 1.0, 2.0, 6.0)):
        monitor.log({"time/step": seconds, "perf/throughput": 10 / seconds}, step=step)
    monitor.close()
    return config, paths


def test_the_table_tells_of_the_steps_and_the_weights_are_removed(tmp_path):
    config, paths = run_dir(tmp_path)
    lines = report("trainer", config).split("\n\n")[0].splitlines()
    assert [line.split()[0] for line in lines] == ["training", *["step"] * 4, "mean", "std", "min", "max"]
    assert lines[5].split()[1:3] == ["3.000", "6"]
    assert not paths.weights.exists()


def test_the_json_holds_every_step_and_what_counts_of_them(tmp_path):
    file = tmp_path / "deep" / "bench.json"
    config, _ = run_dir(tmp_path, "--bench.output-json", str(file))
    report("trainer", config)
    found = json.loads(file.read_text())
    assert (found["command"], found["model"], found["warm_up"]) == ("trainer", config.model.name, 1)
    assert [step["time/step"] for step in found["steps"]] == [3.0, 1.0, 2.0, 6.0]
    assert (found["mean"]["time/step"], found["median"]["time/step"]) == (3.0, 2.0)


def test_a_file_that_cannot_be_written_is_named(tmp_path):
    (tmp_path / "taken").write_text("")
    config, _ = run_dir(tmp_path, "--bench.output-json", str(tmp_path / "taken" / "bench.json"))
    with pytest.raises(ArtifactError, match=r"taken/bench\.json cannot be written"):
        report("trainer", config)


def test_what_an_earlier_benchmark_left_is_removed_and_nothing_else(tmp_path):
    config, paths = run_dir(tmp_path)
    paths.metrics("orchestrator").parent.mkdir()
    paths.metrics("orchestrator").write_text("{}\n")
    clear(config)
    clear(config)
    assert not paths.weights.exists()
    assert not paths.metrics("trainer").exists()
    assert paths.metrics("orchestrator").exists()


@pytest.mark.parametrize("root", [TrainerConfig, SFTConfig])
def test_every_key_of_a_benchmark_changes_it(tmp_path, root):
    file = tmp_path / "bench.json"
    keys = {"steps": 5, "warm_up": 2, "output_json": file}
    flags = [f"--bench.{key}={value}" for key, value in keys.items()]
    config = measured(load(root, [*flags, "--output-dir", str(tmp_path)], {}))
    assert config.max_steps == keys["steps"]
    monitor = JsonlMonitor(RunPaths(config.output_dir).metrics("trainer"))
    for step in range(5):
        monitor.log({"time/step": float(step)}, step=step)
    monitor.close()
    assert report("any", config).count("(warm-up)") == keys["warm_up"]
    assert json.loads(file.read_text())["mean"]["time/step"] == 3.0
