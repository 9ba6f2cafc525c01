"""What `benchmarks/trainer.py` reports, and how it takes a step apart: right, whatever it measures."""

import importlib
import json
import sys
import time
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

ROOT = Path(__file__).parents[3]


@pytest.fixture(scope="module")
def modules() -> SimpleNamespace:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(ROOT / "benchmarks"))
        names = ("step_profile", "trainer")
        return SimpleNamespace(**{name: importlib.import_module(name) for name in names})


def event(name, start, end, cat="cpu_op", thread=1, **args):
    return {"ph": "X", "name": name, "cat": cat, "ts": start, "dur": end - start, "pid": 1, "tid": thread, "args": args}


def kernel(name, start, end, number):
    return event(name, start, end, "kernel", thread=7, correlation=number)


def launch(at, number, thread=1):
    return event("cudaLaunchKernel", at, at + 1, "cuda_runtime", thread, correlation=number)


TRACE = [
    event("TokenLogprobs", 0, 100),
    event("aten::mm", 10, 90),
    launch(20, 1),
    kernel("nvjet_hsh_128x256", 1000, 4000, 1),
    event("aten::mm", 110, 130),
    launch(120, 2),
    kernel("nvjet_hsh_128x256", 4000, 9000, 2),
    event("Torch-Compiled Region", 140, 200, thread=2),
    launch(150, 3, thread=2),
    kernel("triton_poi_fused_mul_silu", 9500, 10000, 3),
    launch(160, 4, thread=2),
    kernel("cudnn_generated_fort_native_sdpa_sm90_flash_bprop", 10000, 12000, 4),
    event("Optimizer.step#AdamW.step", 210, 300, "user_annotation"),
    launch(220, 5),
    kernel("multi_tensor_apply_kernel", 12000, 13000, 5),
    kernel("ncclDevKernel_ReduceScatter", 12500, 13500, 6),
    {"ph": "i", "name": "an instant", "ts": 99999},
]


def test_a_kernel_belongs_to_the_code_that_launched_it(modules):
    step = modules.step_profile.take_apart(TRACE)
    found = {name: (round(part.seconds * 1e6), part.num_kernels) for name, part in step.parts.items()}
    assert found == {
        "head": (3000, 1),  # a product, but within the head's own function
        "matmul": (5000, 1),
        "other": (500, 1),
        "attention": (2000, 1),
        "optimizer": (1000, 1),
        "communication": (1000, 1),
    }
    assert step.parts["matmul"].largest == "nvjet_hsh_128x256"


def test_time_in_which_no_kernel_runs_is_what_is_left_of_the_step(modules):
    step = modules.step_profile.take_apart(TRACE)
    assert step.seconds == pytest.approx(13500e-6)
    assert step.busy_s == pytest.approx((13500 - 1000 - 500) * 1e-6)  # overlapping kernels count once


def test_without_a_gpu_operators_count_by_the_time_they_spend_in_themselves(modules):
    step = modules.step_profile.take_apart([event for event in TRACE if event.get("cat") == "cpu_op"])
    assert step.parts["head"].seconds == pytest.approx(100e-6)
    assert step.parts["matmul"].seconds == pytest.approx(20e-6)


def median(tokens_per_s: float) -> dict[str, float]:
    return {
        **{"perf/throughput": tokens_per_s, "perf/throughput_compute": 2 * tokens_per_s},
        **{"perf/mfu_compute": 40.0, "perf/mfu_published_compute": 50.0, "perf/peak_memory_gib": 9.5},
        **{"time/step": 2.0, "time/forward_backward": 1.0, "time/publish": 0.5},
    }


def outcome(trainer: ModuleType, name: str, **values):
    (row,) = trainer.chosen_rows([name])
    return trainer.Outcome(**({"row": row, "status": "ok", "median": median(23_792.0)} | values))


def test_whole_steps_are_compared_with_whole_steps_and_computation_with_computation(modules):
    trainer = modules.trainer
    lines = trainer.comparison([outcome(trainer, "rl-0.6b-16k")]).splitlines()
    cells = lines[1].split()
    assert cells[:5] == ["rl-0.6b-16k", "23,792", "11,896", "2.00", "3.0"]
    # 2 x 16,384 tokens in the 1.992 s of the published JSON
    assert cells[5:8] == ["47,584", "16,450", "2.89"]
    assert cells[8:] == ["50.0", "11.1", "40.0", "9.5", "12.5", "2.000", "1.000", "0.500"]


def test_a_row_without_figures_says_why(modules):
    trainer = modules.trainer
    lines = trainer.comparison([outcome(trainer, "sft-0.6b-64k", status="out of memory", median={})]).splitlines()
    assert lines[1].split() == ["sft-0.6b-64k", "out", "of", "memory"]


def test_scaling_is_tokens_of_a_gpu_among_several_over_those_of_one_alone(modules):
    trainer = modules.trainer
    speeds = {"sft-4b-8k-x1": 1000.0, "sft-4b-8k-x2": 1900.0, "sft-4b-8k-x4": 3600.0}
    lines = trainer.scaling([outcome(trainer, name, median=median(speed)) for name, speed in speeds.items()])
    assert [line.split() for line in lines.splitlines()[1:]] == [
        ["1", "2,000", "2,000", "1.000"],
        ["2", "3,800", "1,900", "0.950"],
        ["4", "7,200", "1,800", "0.900"],
    ]


@pytest.mark.parametrize(
    ("code", "text", "status"),
    [
        (0, "all is well", "ok"),
        (1, "trainer: the GPU's memory is full. What takes less", "out of memory"),
        (1, "torch.OutOfMemoryError: CUDA out of memory. Tried", "out of memory"),
        (None, "Step 1", "deadline"),
        (1, "words\ntrainer: no such model\n", "failed: trainer: no such model"),
        (-9, "", "failed: exit code -9"),
    ],
)
def test_why_a_row_has_no_figure_is_told_in_a_few_words(modules, tmp_path, code, text, status):
    (tmp_path / "log.txt").write_text(text)
    assert modules.trainer.status_of(code, tmp_path / "log.txt") == status


def test_a_command_that_hangs_is_ended_with_all_that_it_started(modules, tmp_path):
    words = ["bash", "-c", "sleep 60 & echo $!; wait"]
    assert modules.trainer.run_until(words, 1.0, tmp_path / "log.txt", {"PATH": "/usr/bin:/bin"}) is None
    child = Path("/proc") / (tmp_path / "log.txt").read_text().strip() / "stat"
    give_up_at = time.monotonic() + 10
    while is_running(child) and time.monotonic() < give_up_at:  # it was killed, and must be scheduled once more to end
        time.sleep(0.02)
    assert not is_running(child)


def is_running(stat: Path) -> bool:
    try:
        return stat.read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def test_every_published_row_is_measured_at_its_own_length_and_setting(modules):
    trainer = modules.trainer
    rows = {row.name: row for row in trainer.ROWS}
    assert len(rows) == len(trainer.ROWS)
    for name, published in trainer.PUBLISHED.items():
        assert rows[name].published is published
        assert rows[name].flags[2:4] == trainer.FULL_AC
        assert ("lora" in name) == ("--model.lora.rank" in rows[name].flags)
    with pytest.raises(SystemExit, match="no rows fast; there are"):
        trainer.chosen_rows(["fast"])


def test_the_command_line_of_a_row_is_one_that_the_trainer_takes(modules, tmp_path):
    from prime_rl.config.load import load
    from prime_rl.config.trainer import SFTConfig, TrainerConfig

    directory = tmp_path / "models"
    for name in ("0.6b", "4b"):
        (directory / name).mkdir(parents=True)
        (directory / name / "config.json").write_text(json.dumps({}))
    bench = modules.trainer.Bench(logs=tmp_path, models=directory, device="cuda", is_tiny=False, python=sys.executable)
    for row in modules.trainer.ROWS:
        words = bench.words(row, tmp_path, 8, [])
        flags = words[next(index for index, word in enumerate(words) if word.startswith("--model")) :]
        config = load(TrainerConfig if row.command == "trainer" else SFTConfig, flags, {})
        assert config.bench is not None
        assert (config.bench.steps, config.bench.warm_up) == (8, 3)
        assert config.model.seq_len == (row.row_len or row.seq_len)
        data = config.data.fake if row.command == "trainer" else config.data
        tokens = data.batch_size * data.seq_len
        assert tokens == (row.mixed or 2 * row.ranks) * row.seq_len
