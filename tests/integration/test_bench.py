"""`--bench` of every command that has it, with a new model that knows nothing."""

import json
import subprocess
from pathlib import Path

import pytest

from prime_rl.config.bench import BENCH_STEPS, bench_dir
from prime_rl.monitors.base import read_metrics
from prime_rl.paths import RunPaths, found_results
from tests.integration.conftest import EXAMPLE, MODEL, ROOT, command, run

SMALL = ("--batch-size", "8", "--rollouts-per-example", "4", "--sampling.max-tokens", "8")


def statistics(table: str, title: str) -> dict[str, list[str]]:
    """Cells of the lines below the one that begins with `title`, by the first word of each line."""
    lines = table[table.index(title) :].split("\n\n")[0].splitlines()
    return {line.split()[0]: line.split()[1:] for line in lines[1 + BENCH_STEPS :]}


def test_generation_is_measured_against_a_running_server_and_leaves_no_batches(tmp_path: Path, free_port: int) -> None:
    flags = ("--model.name", MODEL, "--output-dir", str(tmp_path))
    server = subprocess.Popen(
        command("inference", *flags, "--server.port", str(free_port), "--backend", "embedded"), cwd=ROOT
    )
    try:
        address = ("--client.base-url", f"http://localhost:{free_port}/v1")
        text = run("orchestrator", "@", f"{EXAMPLE}/rl/orch.toml", *flags, *address, *SMALL, "--bench")
    finally:
        server.terminate()
        server.wait(timeout=30)

    measured = RunPaths(bench_dir(tmp_path))
    rows = read_metrics(measured.metrics("orchestrator"))
    assert [row["step"] for row in rows] == list(range(BENCH_STEPS))
    assert all((row["perf/throughput"] or 0) > 0 and (row["latency/p99"] or 0) > 0 for row in rows)
    assert found_results(tmp_path) == found_results(measured.output_dir) == []
    assert not RunPaths(tmp_path).metrics("orchestrator").exists()
    mean = statistics(text, "generation")["mean"]
    counted = [row["time/step"] or 0.0 for row in rows[1:]]
    assert float(mean[0]) == round(sum(counted) / len(counted), 2)


@pytest.mark.slow
def test_rl_bench_measures_generation_and_then_training_on_batches_of_that_size(tmp_path: Path, free_port: int) -> None:
    flags = [word if word[:2] != "--" else f"--orchestrator.{word[2:]}" for word in SMALL]
    text = run(
        *("rl", "@", f"{EXAMPLE}/rl.toml", "--model.name", MODEL, "--output-dir", str(tmp_path), *flags, "--bench"),
        *("--inference.server.port", str(free_port), "--inference.backend", "embedded"),
    )

    paths = RunPaths(bench_dir(tmp_path))
    generated, trained = (read_metrics(paths.metrics(process)) for process in ("orchestrator", "trainer"))
    assert (len(generated), len(trained)) == (BENCH_STEPS, BENCH_STEPS)
    assert {row["progress/sequences"] for row in trained} == {8.0}
    tokens = sum(row["seq_len/mean"] or 0.0 for row in generated[1:]) / (BENCH_STEPS - 1)
    assert trained[0]["progress/tokens"] == 8 * round(tokens)
    assert set(statistics(text, "generation")) == set(statistics(text, "training")) == {"mean", "std", "min", "max"}
    assert found_results(tmp_path) == found_results(paths.output_dir) == []


def test_the_trainer_is_measured_alone_on_made_up_batches(tmp_path: Path) -> None:
    sizes = ("--data.fake.micro_batch_size", "8", "--data.fake.batch_size", "16", "--data.fake.seq_len", "32")
    out = ("--output-dir", str(tmp_path), "--bench.output-json", str(tmp_path / "bench.json"))
    text = run("trainer", "@", "configs/reverse_text/train.toml", "--bench", *sizes, "--model.name", MODEL, *out)

    rows = read_metrics(RunPaths(bench_dir(tmp_path)).metrics("trainer"))
    assert {row["progress/tokens"] for row in rows} == {16.0 * 32}
    counted = [row["perf/throughput_compute"] or 0.0 for row in rows[1:]]
    content = json.loads((tmp_path / "bench.json").read_text())
    assert content["mean"]["perf/throughput_compute"] == pytest.approx(sum(counted) / len(counted), rel=1e-12)
    cells = statistics(text, "training")["mean"]
    assert cells[5] == f"{sum(counted) / len(counted):,.0f}"
    assert found_results(tmp_path) == found_results(bench_dir(tmp_path)) == []


def test_sft_is_measured_on_made_up_rows_and_saves_no_weights(tmp_path: Path) -> None:
    sizes = (
        "--data.fake.type",
        "fixed",
        "--data.micro-batch-size",
        "8",
        "--data.batch-size",
        "8",
        "--data.seq-len",
        "32",
    )
    flags = ("--bench.steps", "3", "--bench.warm-up", "2", "--model.name", MODEL, "--output-dir", str(tmp_path))
    text = run("sft", *sizes, *flags)

    rows = read_metrics(RunPaths(bench_dir(tmp_path)).metrics("trainer"))
    assert [row["progress/tokens"] for row in rows] == [8.0 * 32] * 3
    assert [line.split()[:2] for line in text.splitlines() if "(warm-up)" in line] == [["step", "0"], ["step", "1"]]
    assert found_results(tmp_path) == found_results(bench_dir(tmp_path)) == []
