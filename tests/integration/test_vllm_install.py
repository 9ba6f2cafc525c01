"""vLLM and verifiers in one environment: what each asks for is there, both load, and vLLM receives what we send.

The environment is the one that `make vllm-venv` builds, with vLLM for CPUs in it; it is never skipped. One process
(`in_vllm.py`) answers all questions, because importing vLLM takes half a minute of one core.
"""

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.contract.servers import VLLM_PYTHON


@pytest.fixture(scope="module")
def answers() -> dict[str, Any]:
    if not VLLM_PYTHON.exists():
        pytest.fail(f"{VLLM_PYTHON} does not exist: build it with `make vllm-venv`")
    words = [VLLM_PYTHON, Path(__file__).with_name("in_vllm.py")]
    done = subprocess.run(words, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def test_nothing_that_vllm_or_verifiers_or_we_ask_for_is_missing_or_of_another_version(answers):
    assert answers["unmet"] == []


def test_vllms_own_parser_reads_our_arguments(answers):
    assert answers["arguments_as_vllm_reads_them"] == {
        "read": {
            "model": "/models/m",
            "logprobs_mode": "processed_logprobs",
            "generation_config": "vllm",
            "seed": 42,
        },
        "unknown": [],
    }


def test_an_environment_of_verifiers_loads_beside_vllm(answers):
    assert answers["environment_is_one_of_verifiers"] is True


def test_the_first_piece_of_a_stream_names_every_choice(answers):
    for asked, none_yet in {"none": None, "some": []}.items():  # vLLM looks for logprobs even where there is no token
        first, second = answers["pieces_of_a_stream"][asked]
        assert first == [[1, [5], None], [0, [], none_yet], [2, [], none_yet]]
        assert second == [[0, [6], None]]


def test_what_our_nccl_sender_broadcasts_is_what_vllms_receiver_unpacks(answers):
    arrived = {"all were received": True, "in order": True, "bit for bit": True, "checksums": True}
    buffers = {"torch.bfloat16": 7, "torch.float16": 7, "torch.float32": 9}
    assert answers["transferred"] == {dtype: {"buffers": count, **arrived} for dtype, count in buffers.items()}
