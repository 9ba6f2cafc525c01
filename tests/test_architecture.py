"""What the documents promise about the shape of the code, held by a machine."""

import ast
import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path

import pytest

from prime_rl.config.load import load
from prime_rl.config.reference import ROOTS, reference
from prime_rl.config.schema import all_sections, documentation, target_of

ROOT = Path(__file__).parents[1]
SOURCES = sorted((ROOT / "src" / "prime_rl").rglob("*.py")) + sorted((ROOT / "environments").rglob("*.py"))
MAX_FUNCTION_LINES, MAX_FILE_LINES = 60, 600
MODEL = str(ROOT / "examples/reverse_text_cpu/model")
COMMAND_OF_FILE = {
    "train": "trainer",
    "orch": "orchestrator",
    "infer": "inference",
    "rl_gpu": "rl",
    "mixed": "rl",
    "sft_gpu": "sft",
}


ALL_SECTIONS = sorted({s for root in ROOTS.values() for s in all_sections(root)}, key=lambda s: s.__name__)


def functions(path: Path) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node


def test_import_contracts_hold():
    lint = Path(sysconfig.get_path("scripts")) / "lint-imports"
    result = subprocess.run([lint, "--no-cache"], cwd=ROOT, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout[-3000:]


def test_no_function_is_longer_than_a_screen_and_no_file_longer_than_a_sitting():
    long_functions = [
        f"{path.relative_to(ROOT)}:{node.lineno} {node.name}"
        for path in SOURCES
        for node in functions(path)
        if (node.end_lineno or 0) - node.lineno + 1 > MAX_FUNCTION_LINES
    ]
    assert long_functions == []
    assert [str(path) for path in SOURCES if len(path.read_text().splitlines()) > MAX_FILE_LINES] == []


WALL_CLOCK = {
    "src/prime_rl/activity/__init__.py": "when something began, for people",
    "src/prime_rl/activity/states.py": "how long ago a process of another machine reported",
    "src/prime_rl/config/command.py": "when a rank failed, for torchrun",
    "src/prime_rl/inference/chat.py": "`created` of a reply",
    "src/prime_rl/inference/completions.py": "`created` of a reply",
    "src/prime_rl/inference/generate.py": "`created` of a reply",
    "src/prime_rl/inference/service.py": "`created` of a model",
    "src/prime_rl/journal.py": "the time of an entry",
    "src/prime_rl/monitors/base.py": "the time of a row",
    "src/prime_rl/monitors/events.py": "the time of an event",
    "src/prime_rl/view/status.py": "how long ago an entry was written",
}
"""Who may ask what time it is. A clock may be set: whatever is measured, waited for or due goes by another one."""


def test_the_clock_on_the_wall_gives_timestamps_alone():
    asked = {("time", "time"), ("time", "time_ns"), ("datetime", "now"), ("datetime", "utcnow"), ("date", "today")}
    found = {
        str(path.relative_to(ROOT))
        for path in SOURCES
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Attribute)
        and isinstance(node.value, ast.Name | ast.Attribute)
        and (node.value.id if isinstance(node.value, ast.Name) else node.value.attr, node.attr) in asked
    }
    imported = [
        f"{path.relative_to(ROOT)}:{node.lineno}"
        for path in SOURCES
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.ImportFrom) and node.module == "time"
    ]
    assert imported == [], "import the module time, so that one sees which clock is meant"
    assert found == set(WALL_CLOCK)


def test_there_is_no_drawer_for_odds_and_ends():
    names = {path.stem for path in SOURCES} | {path.parent.name for path in SOURCES}
    assert not names & {"utils", "util", "common", "helpers", "misc"}


def test_every_unit_test_file_mirrors_a_module():
    for path in (ROOT / "tests" / "unit").rglob("test_*.py"):
        relative = path.relative_to(ROOT / "tests" / "unit")
        if relative.parts[0] in ("examples", "higher_lower", "reverse_text", "shop_total", "benchmarks", "scripts"):
            continue  # these test things outside the package
        module = ROOT / "src" / "prime_rl" / relative.parent / (path.stem.removeprefix("test_") + ".py")
        package = module.with_suffix("")
        assert module.exists() or package.is_dir(), f"{relative} tests no module"


@pytest.mark.parametrize("section", ALL_SECTIONS, ids=lambda s: s.__name__)
def test_every_configuration_key_is_documented(section):
    texts = documentation(section)
    for name, field in section.model_fields.items():
        is_section = bool(target_of(field.annotation).sections)
        is_obvious = name in ("type", "system", "user", "assistant", "tool")
        assert texts[name] or is_section or is_obvious, f"{section.__name__}.{name} has no docstring"


def test_the_configuration_reference_is_up_to_date():
    assert (ROOT / "docs" / "config.md").read_text() == reference(), "stale: run `make docs`"


EXAMPLES = sorted((ROOT / "examples").rglob("*.toml"))


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda p: str(p.relative_to(ROOT)))
def test_every_example_loads(path, monkeypatch):
    monkeypatch.chdir(ROOT)
    load(ROOTS[COMMAND_OF_FILE.get(path.stem, path.stem)], ["@", str(path)], {})


def test_there_are_examples():
    assert {path.parent.name for path in EXAMPLES} >= {"reverse_text", "reverse_text_cpu", "rl"}


def test_the_configuration_classes_load_without_torch():
    code = "import sys, prime_rl.config.reference; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize("command", ["rl", "sft", "eval", "inference", "orchestrator", "trainer"])
def test_help_loads_neither_torch_nor_verifiers(command):
    code = (
        "import sys; from prime_rl.cli import main; main([sys.argv[1], '--help'])\n"
        "heavy = {'torch', 'transformers', 'verifiers', 'datasets', 'fastapi'} & set(sys.modules)\n"
        "sys.exit(f'--help loaded {heavy}' if heavy else 0)"
    )
    result = subprocess.run([sys.executable, "-c", code, command], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    assert result.stdout.startswith(f"usage: {command}")


FINDS_SLOW = """
slow = {'sympy', 'torch._dynamo', 'torch.distributed.tensor', 'transformers.modeling_utils'}
if found := slow & set(sys.modules): sys.exit(f'loaded {found}')
"""
SERVES = f"import prime_rl.inference.embedded; from prime_rl.models.hf import load_decoder; load_decoder({MODEL!r})"
TRAINS = f"""
from prime_rl.config.load import load
from prime_rl.config.trainer import TrainerConfig
from prime_rl.trainer.rl.build import train_rl
from prime_rl.trainer.trainer import Trainer

def train(name, *flags):
    run = ["@", "configs/debug/train.toml", "--model.name", {MODEL!r}, "--device", "cpu", "--max-steps", "2"]
    train_rl(load(TrainerConfig, [*run, "--output-dir", f"{{sys.argv[1]}}/{{name}}", *flags], {{}}))
"""
CHECKPOINTS = """
run = Trainer.run
def runs_without_imports(trainer):
    before = set(sys.modules)
    run(trainer)
    found = sorted({*sys.modules} - before)
    if len(found) > 9: sys.exit(f'{len(found)} modules were imported: {found[:9]}')  # `torch.save` brings two
Trainer.run = runs_without_imports
"""


def in_a_process(code: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", f"import sys\n{code}", *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)


def test_a_server_is_made_without_what_takes_seconds_to_import():
    result = in_a_process(SERVES + FINDS_SLOW)
    assert result.returncode == 0, result.stderr


def test_a_trainer_of_one_process_trains_without_what_takes_seconds_to_import(tmp_path):
    """With any optimizer, with an adapter, and publishing."""
    others = "train('adamw')\ntrain('muon', '--optim.type', 'muon')\ntrain('lora', '--model.lora.rank', '2')"
    result = in_a_process(TRAINS + others + FINDS_SLOW, str(tmp_path))
    assert result.returncode == 0, result.stderr


@pytest.mark.parametrize("flags", [("--ckpt.interval", "1"), ("--recovery-interval", "0.001")])
def test_what_checkpoints_need_is_imported_before_training_begins(tmp_path, flags):
    """Later it would hold up a step, and be looked through by every full collection of garbage."""
    result = in_a_process(f"{TRAINS}{CHECKPOINTS}train('saves', *{flags})", str(tmp_path))
    assert result.returncode == 0, result.stderr
    assert '"checkpoint_complete"' in (tmp_path / "saves" / "journal.jsonl").read_text()


def test_the_eval_command_is_ours():
    script = Path(sysconfig.get_path("scripts")) / "eval"
    assert "prime_rl" in script.read_text()
