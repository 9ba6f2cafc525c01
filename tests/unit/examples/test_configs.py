"""configs/: every path that the documents name is there, resolves, and means what the document says."""

import runpy
import tomllib
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel

from prime_rl.config.inference import InferenceConfig
from prime_rl.config.load import load
from prime_rl.config.orchestrator import OrchestratorConfig
from prime_rl.config.roots import RLConfig
from prime_rl.config.trainer import SFTConfig, TrainerConfig

ROOT = Path(__file__).parents[3]
CONFIGS = ROOT / "configs"
PROCESSES = {"trainer": TrainerConfig, "orchestrator": OrchestratorConfig, "inference": InferenceConfig}
SHORT = {"train": "trainer", "orch": "orchestrator", "infer": "inference"}
TASKS = ("reverse_text", "hendrycks_math/1b", "intellect_math/1b")
PATHS: dict[str, type[BaseModel]] = {
    **{f"{process}/{task}": root for process, root in PROCESSES.items() for task in ("debug", *TASKS)},
    **{f"{task}/{part}": PROCESSES[process] for part, process in SHORT.items() for task in ("debug", *TASKS)},
    **{f"{task}/sft": SFTConfig for task in ("debug", "reverse_text")},
    "prime-rl/my-config": RLConfig,
}


@pytest.fixture(autouse=True)
def _in_the_repository(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)


def resolved(path: str) -> Any:
    return load(PATHS[path], ["@", f"configs/{path}.toml"], {})


def test_there_are_28_paths_and_no_others() -> None:
    there = {str(path.relative_to(CONFIGS)) for path in CONFIGS.rglob("*") if path.is_file() and path.suffix != ".pyc"}

    assert len(PATHS) + 1 == 28
    assert there == {*(f"{path}.toml" for path in PATHS), "endpoints.py", "endpoints.toml", "README.md"}


@pytest.mark.parametrize("path", PATHS)
def test_each_resolves_for_its_process(path: str) -> None:
    assert isinstance(resolved(path), PATHS[path])


@pytest.mark.parametrize("task", ["debug", "hendrycks_math/1b", "intellect_math/1b"])
@pytest.mark.parametrize(("part", "process"), SHORT.items())
def test_both_older_layouts_mean_the_same(task: str, part: str, process: str) -> None:
    assert resolved(f"{process}/{task}") == resolved(f"{task}/{part}")


@pytest.mark.parametrize("example", ["reverse_text", "hendrycks_math", "intellect_math"])
def test_the_files_of_a_task_are_the_run_of_its_example(example: str) -> None:
    task = example if example == "reverse_text" else f"{example}/1b"
    whole = load(RLConfig, ["@", f"examples/{example}/rl.toml"], {})
    counts = {"--inference-gpus": whole.inference_gpu_ids or (), "--trainer-gpus": whole.trainer_gpu_ids or ()}
    words = [word for key, ids in counts.items() for word in (key, str(len(ids)))]
    for part, process in SHORT.items():
        words += [f"--{process}", "@", f"configs/{task}/{part}.toml"]

    assert load(RLConfig, words, {}) == whole


def test_the_first_reverse_text_starts_from_a_model_of_its_own() -> None:
    words = [word for process in PROCESSES for word in (f"--{process}", "@", f"configs/{process}/reverse_text.toml")]
    first = load(RLConfig, words, {})
    later = load(RLConfig, ["@", "examples/reverse_text/rl.toml"], {})

    assert first.model.name == "willcb/Qwen2.5-0.5B-Reverse-SFT"
    assert later.model.name == "PrimeIntellect/Qwen3-0.6B-Reverse-Text-SFT"
    assert (first.max_steps, later.max_steps) == (30, 20)
    assert first.trainer.optim == later.trainer.optim
    assert first.orchestrator.env == later.orchestrator.env


def test_the_warm_up_of_reverse_text_is_that_of_the_example() -> None:
    assert resolved("reverse_text/sft") == load(SFTConfig, ["@", "examples/reverse_text/sft.toml"], {})
    assert resolved("reverse_text/sft").model.name == "PrimeIntellect/Qwen3-0.6B"


@pytest.mark.parametrize("part", [*SHORT, "sft"])
def test_a_debug_run_needs_no_hub_and_a_directory_of_its_own(part: str) -> None:
    debug = resolved(f"debug/{part}")
    others = {resolved(f"debug/{other}").output_dir for other in (*SHORT, "sft") if other != part}

    assert (ROOT / debug.model.name / "config.json").is_file()
    assert debug.output_dir not in others


def test_a_debug_run_ends() -> None:
    steps = {part: resolved(f"debug/{part}").max_steps for part in ("train", "sft", "orch")}

    assert all(1 <= count <= 5 for count in steps.values())
    assert resolved("debug/train").data.fake is not None
    assert resolved("debug/sft").data.type == "fake"


def test_the_debug_orchestrator_waits_for_no_trainer() -> None:
    orchestrator = resolved("debug/orch")

    assert orchestrator.max_async_level >= orchestrator.max_steps
    assert orchestrator.model.name == resolved("debug/infer").model.name
    assert orchestrator.client.base_url[0] == f"http://localhost:{resolved('debug/infer').server.port}/v1"


def test_my_config_says_what_the_guide_says() -> None:
    run = resolved("prime-rl/my-config")
    lora = run.trainer.model.lora

    assert (run.inference_gpu_ids, run.trainer_gpu_ids) == ((0, 1, 2), (3,))
    assert (run.max_steps, run.seq_len, run.max_model_len) == (500, 16384, 16384)
    assert (run.wandb.project, run.wandb.name) == ("my-project", "my-run")
    assert run.model.name == run.trainer.tokenizer.name == run.inference.model.name == "Qwen/Qwen2.5-7B-Instruct"
    assert (run.trainer.optim.lr, run.trainer.optim.weight_decay) == (1e-5, 0.0)
    assert run.trainer.model.ac.freq == 1
    assert (lora.rank, lora.alpha, lora.dropout) == (32, 32, 0.05)
    assert lora.target_modules == ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
    assert (run.orchestrator.batch_size, run.orchestrator.rollouts_per_example) == (32, 16)
    assert run.orchestrator.oversampling_factor == 2
    assert (run.orchestrator.sampling.max_tokens, run.orchestrator.sampling.temperature) == (1024, 0.5)
    assert run.orchestrator.buffer.online_difficulty_filtering is True
    assert [(env.id, env.args) for env in run.orchestrator.env] == [
        ("my-env", {"dataset_name": "train", "difficulty": "hard"})
    ]
    assert run.inference.gpu_memory_utilization == 0.6
    assert (run.inference.model.enable_auto_tool_choice, run.inference.model.tool_call_parser) == (True, "hermes")
    assert run.inference.parallel.dp == 3


def test_my_config_is_a_file_without_parents() -> None:
    assert "toml_files" not in tomllib.loads((CONFIGS / "prime-rl" / "my-config.toml").read_text())


def test_endpoints_are_written_once_and_read_by_both_of_their_readers() -> None:
    from verifiers.legacy.utils.eval_utils import load_endpoints

    as_python = runpy.run_path(str(CONFIGS / "endpoints.py"))["ENDPOINTS"]

    assert as_python["Qwen/Qwen2.5-7B-Instruct"] == {
        "model": "Qwen/Qwen2.5-7B-Instruct",
        "url": "http://0.0.0.0:8007/v1",
        "key": "local",
    }
    endpoints = load_endpoints(str(CONFIGS / "endpoints.toml"))
    assert {name: [(e.model, e.base_url, e.api_key_var) for e in group] for name, group in endpoints.items()} == {
        name: [(endpoint["model"], endpoint["url"], endpoint["key"])] for name, endpoint in as_python.items()
    }
