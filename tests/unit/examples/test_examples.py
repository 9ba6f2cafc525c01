"""The examples: each resolves, trains with the settings it is known for, and says the same in all of its files."""

import json
import re
import shlex
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
EXAMPLES = sorted(path.parent for path in (ROOT / "examples").glob("*/README.md"))
BY_PROCESS = {
    "train": ("trainer", TrainerConfig),
    "orch": ("orchestrator", OrchestratorConfig),
    "infer": ("inference", InferenceConfig),
}
SPLIT = [example for example in EXAMPLES if (example / "rl").is_dir()]
FOLLOWS_FROM_GPUS = {"trainer": {}, "orchestrator": {"num_train_workers"}, "inference": {"parallel"}}


@pytest.fixture(autouse=True)
def _in_the_repository(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)


def rl(example: str) -> RLConfig:
    return load(RLConfig, ["@", f"examples/{example}/rl.toml"], {})


def named(example: Path) -> str:
    return example.name


def test_there_is_an_example_for_every_task_of_the_documents() -> None:
    assert {path.name for path in EXAMPLES} == {
        *("alphabet_sort", "hendrycks_math", "intellect_math", "reverse_text", "wordle"),
        *("higher_lower_cpu", "reverse_text_cpu", "shop_total_cpu"),
    }
    assert [path for path in (ROOT / "examples").iterdir() if path.is_dir() and path not in EXAMPLES] == []


@pytest.mark.parametrize("example", SPLIT, ids=named)
def test_a_file_a_process_is_the_same_run_as_the_one_file(example: Path) -> None:
    whole = rl(example.name)
    gpus = {"--inference-gpu-ids": whole.inference_gpu_ids, "--trainer-gpu-ids": whole.trainer_gpu_ids}
    split = [word for key, ids in gpus.items() if ids is not None for word in (key, ",".join(map(str, ids)))]
    for part, (section, _) in BY_PROCESS.items():
        split += [f"--{section}", "@", f"{example}/rl/{part}.toml"]

    assert load(RLConfig, split, {}) == whole


@pytest.mark.parametrize("part", BY_PROCESS)
@pytest.mark.parametrize("example", SPLIT, ids=named)
def test_each_of_these_files_starts_its_process_as_the_one_file_does(example: Path, part: str) -> None:
    section, root = BY_PROCESS[part]
    alone: BaseModel = load(root, ["@", f"{example}/rl/{part}.toml"], {})
    among_others: BaseModel = getattr(rl(example.name), section)
    follows = set(FOLLOWS_FROM_GPUS[section])

    assert alone.model_dump(exclude=follows) == among_others.model_dump(exclude=follows)


def test_reverse_text_trains_with_the_published_settings() -> None:
    run = rl("reverse_text")

    assert (run.max_steps, run.seq_len) == (20, 2048)
    assert (run.orchestrator.batch_size, run.orchestrator.rollouts_per_example) == (128, 16)
    assert run.model.name == "PrimeIntellect/Qwen3-0.6B-Reverse-Text-SFT"
    assert run.trainer.optim.lr == 3e-6
    assert run.orchestrator.sampling.max_tokens == 128
    assert (run.inference_gpu_ids, run.trainer_gpu_ids) == ((0,), (1,))


@pytest.mark.parametrize(
    ("example", "steps", "batch", "seq_len", "environment"),
    [
        ("hendrycks_math", 500, 512, 2048, "hendrycks-math"),
        ("intellect_math", 1000, 2048, 8192, "intellect-math"),
    ],
)
def test_mathematics_trains_with_the_published_settings(
    example: str, steps: int, batch: int, seq_len: int, environment: str
) -> None:
    run = rl(example)

    assert (run.max_steps, run.seq_len, run.max_model_len) == (steps, seq_len, seq_len)
    assert (run.orchestrator.batch_size, run.orchestrator.rollouts_per_example) == (batch, 16)
    assert run.model.name == "willcb/DeepSeek-R1-Distill-Qwen-1.5B"
    assert run.trainer.optim.lr == 1e-6
    assert (len(run.inference_gpu_ids or ()), len(run.trainer_gpu_ids or ())) == (6, 2)
    assert [env.id for env in run.orchestrator.env] == [environment]
    assert run.orchestrator.sampling.max_tokens is not None
    assert run.orchestrator.sampling.max_tokens < seq_len


def test_hendrycks_math_is_evaluated_on_the_published_benchmarks() -> None:
    evaluation = rl("hendrycks_math").orchestrator.eval

    assert evaluation is not None
    assert evaluation.interval == 50
    assert [env.id for env in evaluation.env] == ["math500", "aime2024", "aime2025"]


def test_intellect_math_leaves_out_what_is_too_easy_or_too_hard() -> None:
    assert rl("intellect_math").orchestrator.env[0].args == {"min_solve_rate": 0.4, "max_solve_rate": 0.9}


def test_wordle_trains_with_the_published_settings() -> None:
    run = rl("wordle")

    assert (run.max_steps, run.seq_len) == (200, 8192)
    assert (run.orchestrator.batch_size, run.orchestrator.rollouts_per_example) == (512, 16)
    assert (len(run.inference_gpu_ids or ()), len(run.trainer_gpu_ids or ())) == (6, 2)
    assert [env.id for env in run.orchestrator.env] == ["wordle"]


def test_wordle_goes_on_from_its_own_warm_up() -> None:
    warm_up = load(SFTConfig, ["@", "examples/wordle/sft.toml"], {})

    assert warm_up.max_steps == 20
    assert rl("wordle").model.name == f"{warm_up.output_dir}/weights/step_{warm_up.max_steps}"


def test_alphabet_sort_trains_an_adapter_with_the_published_settings() -> None:
    run = rl("alphabet_sort")
    adapter = run.trainer.model.lora

    assert adapter is not None
    assert (adapter.rank, adapter.alpha) == (32, 64)
    assert run.inference is not None
    assert (run.inference.enable_lora, run.inference.max_lora_rank) == (True, 32)
    assert run.model.name == "Qwen/Qwen3-4B-Instruct-2507"
    assert run.trainer.optim.lr == 1e-5
    assert run.max_steps == 200
    assert (run.orchestrator.batch_size, run.orchestrator.rollouts_per_example) == (512, 8)
    assert run.orchestrator.env[0].args == {"min_turns": 3, "max_turns": 5}
    assert (run.inference_gpu_ids, run.trainer_gpu_ids) == ((0,), (1,))


@pytest.mark.parametrize("example", EXAMPLES, ids=named)
def test_its_longest_turn_fits_into_the_context_and_the_context_into_a_sample(example: Path) -> None:
    run = rl(example.name)
    longest = run.orchestrator.sampling.max_tokens

    assert longest is not None
    assert run.max_model_len is not None
    assert longest < run.max_model_len <= run.seq_len


def commands(readme: Path) -> list[str]:
    """The command lines of a README's code blocks, with their continuations."""
    blocks = re.findall(r"```bash\n(.*?)```", readme.read_text(), flags=re.DOTALL)
    return [line for block in blocks for line in block.replace("\\\n", " ").splitlines() if line.strip()]


@pytest.mark.parametrize("example", EXAMPLES, ids=named)
def test_the_commands_of_its_readme_resolve(example: Path) -> None:
    roots: dict[str, Any] = {"rl": RLConfig, "sft": SFTConfig}
    roots |= dict(BY_PROCESS.values())
    lines = [shlex.split(line, comments=True) for line in commands(example / "README.md")]
    ours = [words for words in lines if words[0] in roots]

    assert any(words[0] == "rl" for words in ours)
    for command, *words in ours:
        load(roots[command], words, {})


@pytest.mark.parametrize("example", EXAMPLES, ids=named)
def test_its_readme_names_the_environment_that_it_needs(example: Path) -> None:
    environments = [env["id"] for env in tomllib.loads((example / "rl.toml").read_text())["orchestrator"]["env"]]

    assert all(environment in (example / "README.md").read_text() for environment in environments)


def test_the_gpu_run_goes_on_from_its_warm_up_and_sends_weights_the_fastest_way_there_is() -> None:
    run = load(RLConfig, ["@", "examples/reverse_text/rl_gpu.toml"], {})
    warm_up = load(SFTConfig, ["@", "examples/reverse_text/sft_gpu.toml"], {})

    assert run.model.name == f"{warm_up.output_dir}/weights/step_{warm_up.max_steps}"
    assert run.weight_broadcast.type == run.trainer.weight_broadcast.type == "auto"
    assert (run.max_steps, run.inference_gpu_ids, run.trainer_gpu_ids) == (20, None, None)
    assert run.trainer.model.optimization_dtype == warm_up.model.optimization_dtype == "bfloat16"


def test_the_model_of_the_gpu_run_has_50_to_150_million_parameters() -> None:
    config = json.loads(Path("examples/reverse_text/model/config.json").read_text())
    hidden, head = config["hidden_size"], config["head_dim"]
    attention = 2 * hidden * head * (config["num_attention_heads"] + config["num_key_value_heads"])
    layer = attention + 3 * hidden * config["intermediate_size"]

    assert config["model_type"] == "qwen3"
    assert 50e6 < config["num_hidden_layers"] * layer + config["vocab_size"] * hidden < 150e6


def test_the_gpu_run_is_warmed_up_on_texts_like_those_that_it_is_trained_on() -> None:
    text = Path("examples/reverse_text/README.md").read_text()
    args = load(RLConfig, ["@", "examples/reverse_text/rl_gpu.toml"], {}).orchestrator.env[0].args
    limits = {key: int(value) for key, value in re.findall(r"--(m\w+-(?:words|chars)) (\d+)", text)}

    assert limits == {key.replace("_", "-"): value for key, value in args.items() if key != "system_prompt"}
