import errno
import os

import httpx
import pytest

from prime_rl.config.evals import EvalSamplingConfig
from prime_rl.config.sampling import TrainSamplingConfig
from prime_rl.disk import max_handles
from prime_rl.environments.rollouts import Failure, FailureKind, Rollout, sampling_args


def test_what_is_not_set_is_left_to_the_server():
    assert sampling_args(TrainSamplingConfig(), rollout_id=3) == {"temperature": 1.0}
    assert sampling_args(EvalSamplingConfig(), rollout_id=3) == {}


def test_an_evaluation_sends_what_is_set_although_it_changes_nothing_here():
    neutral = {"temperature": 1.0, "repetition_penalty": 1.0, "min_tokens": 0, "top_p": 1.0, "top_k": -1, "min_p": 0.0}
    assert sampling_args(EvalSamplingConfig.model_validate(neutral), rollout_id=3) == neutral


def test_everything_that_is_set_is_sent():
    sampling = EvalSamplingConfig(
        temperature=0.5, max_tokens=9, min_tokens=2, top_p=0.9, top_k=-1, min_p=0.0, repetition_penalty=1.1,
        extra_body={"stop": ["."]},
    )  # fmt: skip
    assert sampling_args(sampling, rollout_id=3) == {
        "temperature": 0.5, "max_tokens": 9, "min_tokens": 2, "top_p": 0.9, "top_k": -1, "min_p": 0.0,
        "repetition_penalty": 1.1, "extra_body": {"stop": ["."]},
    }  # fmt: skip


@pytest.mark.parametrize("rollout_id", [0, 5])
def test_rollouts_with_one_seed_differ_and_each_is_the_same_again(rollout_id):
    assert sampling_args(TrainSamplingConfig(seed=7), rollout_id=rollout_id)["seed"] == 7 + rollout_id


def test_a_failure_for_want_of_files_or_connections_says_so_whatever_a_library_makes_of_it():
    try:
        try:
            raise httpx.ConnectError("All connection attempts failed") from OSError(errno.EMFILE, os.strerror(24))
        except httpx.ConnectError as error:
            raise RuntimeError("Connection error.") from error
    except RuntimeError as error:
        failure = Failure.of(FailureKind.INFERENCE, error)
    words = f"this process has as many files and connections open as it may, {max_handles()}: allow more in the shell"
    assert failure.message.startswith(words)
    assert Failure.of(FailureKind.INFERENCE, RuntimeError("Connection error.")).message == "Connection error."


def test_a_conversation_is_one_line():
    messages = [{"role": "user", "content": "two\nlines"}]
    assert Rollout(id=0, env="e", example=0, messages=messages).text == '[{"role":"user","content":"two\\nlines"}]'
