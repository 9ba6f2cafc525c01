import pytest

from prime_rl.inference.http import HttpError
from prime_rl.inference.requests import (
    ChatRequest,
    CompletionRequest,
    Limits,
    bad_word_tokens,
    checked_prompt,
    fitting_max_tokens,
    num_choices,
    parse,
    sampling_params,
    stop_strings,
)
from prime_rl.transport.api import SamplingFields

LIMITS = Limits(max_model_len=16, vocab_size=100)


def engine(choice=0, max_tokens=8, **fields):
    body = SamplingFields(**fields)
    return sampling_params(
        body, max_tokens=max_tokens, num_top_logprobs=0, num_prompt_logprobs=3, choice=choice, limits=LIMITS
    )


def test_sampling_that_is_not_given_takes_the_models_own_distribution():
    params = engine()
    assert (params.temperature, params.top_p, params.top_k, params.min_p) == (1.0, 1.0, -1, 0.0)
    assert (params.repetition_penalty, params.seed, params.min_tokens, params.ignore_eos) == (1.0, None, 0, False)


def test_given_sampling_reaches_the_engine():
    params = engine(temperature=0.5, top_p=0.9, top_k=5, min_p=0.1, repetition_penalty=1.2, stop_token_ids=[7])
    assert (params.temperature, params.top_p, params.top_k, params.min_p) == (0.5, 0.9, 5, 0.1)
    assert (params.repetition_penalty, params.stop_token_ids, params.max_tokens) == (1.2, (7,), 8)


def test_bans_biases_and_penalties_reach_the_engine():
    params = engine(
        presence_penalty=0.5, frequency_penalty=-1, logit_bias={"7": 300, "3": -2}, allowed_token_ids=[3, 7]
    )
    assert (params.presence_penalty, params.frequency_penalty) == (0.5, -1.0)
    assert (params.logit_bias, params.allowed_token_ids) == (((7, 100.0), (3, -2.0)), (3, 7))


def test_a_bad_word_is_one_after_a_space_too_where_that_is_another_token():
    def encode(text):  # a space is a token of its own before any letter but "b"
        return [2] if text == " b" else [ord(char) for char in text]

    assert bad_word_tokens(SamplingFields(bad_words=["ab", " b"]), encode) == ((97, 98), (98,), (2,))
    assert bad_word_tokens(SamplingFields(), encode) == ()
    with pytest.raises(HttpError, match="empty"):
        bad_word_tokens(SamplingFields(bad_words=["  "]), encode)


def test_choices_of_a_seeded_request_differ():
    assert [engine(choice=i, seed=4).seed for i in range(3)] == [4, 5, 6]


def test_the_first_choice_scores_the_prompt_for_all():
    assert [engine(choice=i).num_prompt_logprobs for i in range(3)] == [3, None, None]


@pytest.mark.parametrize(("given", "meant"), [(0.0, 0.0), (1e-9, 0.0), (0.01, 0.01)])
def test_tiny_temperatures_are_greedy(given, meant):
    assert engine(temperature=given).temperature == meant


@pytest.mark.parametrize("top_k", [0, -1, None])
def test_top_k_off_is_written_in_three_ways(top_k):
    assert engine(top_k=top_k).top_k == -1


@pytest.mark.parametrize(
    "fields",
    [
        *({"stop_token_ids": [100]}, {"stop_token_ids": [-1]}, {"min_tokens": 9}, {"allowed_token_ids": [100]}),
        *({"logit_bias": {"100": 1.0}}, {"logit_bias": {"-1": 1.0}}, {"logit_bias": {"the": 1.0}}),
    ],
)
def test_sampling_that_does_not_fit_is_refused(fields):
    with pytest.raises(HttpError) as caught:
        engine(**fields)
    assert caught.value.param in fields


def test_a_prompt_must_leave_room_for_one_token():
    assert checked_prompt([1] * 15, LIMITS, param="prompt") == [1] * 15
    with pytest.raises(HttpError, match="maximum context length is 16 tokens"):
        checked_prompt([1] * 16, LIMITS, param="prompt")


@pytest.mark.parametrize("prompt", [[], [100], [-1], [10**30]])
def test_prompts_that_the_engine_cannot_take_are_refused(prompt):
    with pytest.raises(HttpError):
        checked_prompt(prompt, LIMITS, param="prompt")


def test_asking_for_more_tokens_than_fit_is_refused():
    assert fitting_max_tokens(12, [1] * 4, LIMITS) == 12
    with pytest.raises(HttpError, match="maximum context length"):
        fitting_max_tokens(13, [1] * 4, LIMITS)


def test_stop_is_one_string_or_several_but_never_empty():
    assert stop_strings(SamplingFields(stop="a")) == ("a",)
    assert stop_strings(SamplingFields(stop=["a", "b"])) == ("a", "b")
    assert stop_strings(SamplingFields()) == ()
    with pytest.raises(HttpError, match="empty string"):
        stop_strings(SamplingFields(stop=["a", ""]))


def test_the_number_of_choices_is_bounded():
    assert num_choices(SamplingFields(n=4), 2) == 4
    with pytest.raises(HttpError, match="above 1024"):
        num_choices(SamplingFields(n=600), 2)


def test_unknown_fields_are_ignored():
    body = parse({"prompt": "a", "user": "me", "priority": 0, "invented": 3}, CompletionRequest)
    assert body.prompt == "a"


@pytest.mark.parametrize(
    "field",
    [
        {"logprob_token_ids": [1]},
        {"response_format": {"type": "json_object"}},
        {"echo": True},
        {"chat_template": "x"},
        {"priority": 1},
    ],
)
def test_fields_that_would_change_the_result_are_refused(field):
    with pytest.raises(HttpError, match="not supported") as caught:
        parse({"messages": [{}], **field}, ChatRequest)
    assert caught.value.param in field


def test_the_same_fields_are_accepted_where_they_ask_for_nothing():
    neutral = {"frequency_penalty": 0.0, "logit_bias": None, "response_format": {"type": "text"}}
    assert parse({"messages": [{"role": "user"}], **neutral}, ChatRequest).n is None


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"prompt": "a", "temperature": "hot"}, "temperature"),
        ({"prompt": "a", "temperature": True}, "temperature"),
        ({"prompt": "a", "max_tokens": 1.5}, "max_tokens"),
        ({"prompt": "a", "max_tokens": "5"}, "max_tokens"),
        ({"prompt": "a", "stop": [1]}, "stop"),
        ({"prompt": "a", "seed": 2**63}, "seed"),
        ({"prompt": "a", "logprobs": 21}, "logprobs"),
        ({}, "prompt"),
        ({"prompt": [1, "a"]}, "prompt"),
        ({"prompt": "a", "stream_options": {"include_usage": 1}}, "stream_options.include_usage"),
    ],
)
def test_the_wrong_field_is_named(body, param):
    with pytest.raises(HttpError) as caught:
        parse(body, CompletionRequest)
    assert caught.value.param == param
    assert caught.value.message.startswith(f"{param}: ")


@pytest.mark.parametrize("body", [[], "text", None, 3])
def test_a_body_that_is_no_object_is_refused(body):
    with pytest.raises(HttpError, match="must be a JSON object"):
        parse(body, CompletionRequest)
