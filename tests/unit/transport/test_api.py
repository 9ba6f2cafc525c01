import subprocess
import sys

import pytest
from pydantic import ValidationError

from prime_rl.transport.api import (
    NEUTRAL_VALUES,
    ErrorResponse,
    GenerateRequest,
    GenerateResponse,
    HealthResponse,
    SamplingFields,
    UpdateWeightsRequest,
)


def test_a_generate_request_needs_only_ids_and_sampling():
    request = GenerateRequest.model_validate({"token_ids": [1, 2], "sampling_params": {}})
    assert (request.token_ids, request.model, request.stream) == ([1, 2], None, None)
    assert request.sampling_params.logprobs is None


def test_unknown_fields_of_a_request_are_ignored():
    body = {"token_ids": [1], "sampling_params": {"routed_experts_prompt_start": 3}, "kv_transfer_params": {}}
    assert GenerateRequest.model_validate(body).token_ids == [1]


@pytest.mark.parametrize(
    "fields",
    [
        {"temperature": float("nan")},
        {"temperature": float("inf")},
        {"temperature": 2.5},
        {"temperature": "1"},
        {"top_p": 0.0},
        {"top_k": -2},
        {"min_p": 1.5},
        {"repetition_penalty": 0.0},
        {"repetition_penalty": 1e-40},
        {"repetition_penalty": 100.1},
        {"max_tokens": 0},
        {"min_tokens": -1},
        {"n": 0},
        {"n": 100_000},
        {"seed": 2**63},
        {"stop_token_ids": ["a"]},
        {"stop": 3},
        {"ignore_eos": 1},
    ],
)
def test_sampling_out_of_range_or_type_is_refused(fields):
    with pytest.raises(ValidationError):
        SamplingFields.model_validate(fields)


def test_whole_numbers_are_good_floats():
    assert SamplingFields.model_validate({"temperature": 1, "top_p": 1}).temperature == 1.0


@pytest.mark.parametrize(
    "body", [{"weight_dir": "x"}, {"weight_dir": "", "version": 1}, {"weight_dir": "x", "version": True}]
)
def test_an_update_needs_a_directory_and_a_version(body):
    with pytest.raises(ValidationError):
        UpdateWeightsRequest.model_validate(body)


def test_answers_hold_nothing_unknown():
    choice = {"index": 0, "token_ids": [1], "finish_reason": "stop"}
    GenerateResponse.model_validate({"request_id": "r", "choices": [choice], "versions": [[(3, 1)]]})
    with pytest.raises(ValidationError):
        GenerateResponse.model_validate({"request_id": "r", "choices": [choice | {"text": "a"}]})
    with pytest.raises(ValidationError):
        HealthResponse.model_validate({"status": "ok", "version": 1, "more": 2})


def test_an_error_has_the_openai_form():
    error = ErrorResponse.model_validate({"error": {"message": "m", "type": "t", "param": None, "code": 400}})
    assert error.model_dump() == {"error": {"message": "m", "type": "t", "param": None, "code": 400}}


def test_no_implemented_field_is_refused():
    assert not NEUTRAL_VALUES.keys() & (SamplingFields.model_fields.keys() | GenerateRequest.model_fields.keys())


def test_clients_of_these_messages_need_no_torch():
    script = "import sys, prime_rl.transport.api; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", script], check=False).returncode == 0
