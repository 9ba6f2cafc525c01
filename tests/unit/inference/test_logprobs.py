import math

from prime_rl.inference.backend import TokenOutput
from prime_rl.inference.logprobs import (
    chat_logprobs,
    completion_logprobs,
    generate_logprobs,
    prompt_logprobs,
    prompt_tokens,
    sampled_tokens,
)

HE, LLO = 256, 257


def token(token_id, logprob, *tops):
    return TokenOutput(token_id=token_id, logprob=logprob, version=0, top_logprobs=tops)


TOKENS = [token(HE, -0.5, (LLO, -0.25), (HE, -0.5), (0, -3.0)), token(LLO, -math.inf, (LLO, -math.inf))]


def test_chat_has_the_most_likely_tokens_and_the_bytes(tokenizer):
    first, second = chat_logprobs(TOKENS, tokenizer, num_top=2, as_ids=False)["content"]
    assert first == {
        "token": "he",
        "logprob": -0.5,
        "bytes": [104, 101],
        "top_logprobs": [
            {"token": "llo", "logprob": -0.25, "bytes": [108, 108, 111]},
            {"token": "he", "logprob": -0.5, "bytes": [104, 101]},
        ],
    }
    assert second["logprob"] == -9999.0


def test_chat_names_tokens_by_id_when_asked(tokenizer):
    (entry,) = chat_logprobs(TOKENS[:1], tokenizer, num_top=1, as_ids=True)["content"]
    assert (entry["token"], entry["top_logprobs"][0]["token"]) == ("token_id:256", "token_id:257")


def test_completions_have_four_lists(tokenizer):
    assert completion_logprobs(sampled_tokens(TOKENS), tokenizer, num_top=1, as_ids=False, text_offset=4) == {
        "tokens": ["he", "llo"],
        "token_logprobs": [-0.5, -9999.0],
        "top_logprobs": [{"he": -0.5, "llo": -0.25}, {"llo": -9999.0}],
        "text_offset": [4, 6],
    }


def test_generate_has_the_sampled_token_first():
    (entry,) = generate_logprobs(TOKENS[:1], num_top=3)["content"]
    assert entry["token"] == "token_id:256"
    assert [(top["token"], top["logprob"]) for top in entry["top_logprobs"]] == [
        ("token_id:256", -0.5),
        ("token_id:257", -0.25),
        ("token_id:0", -3.0),
    ]


def test_generate_with_one_logprob_has_the_sampled_token_only():
    (entry,) = generate_logprobs([token(5, -1.0)], num_top=1)["content"]
    assert entry["top_logprobs"] == [{"token": "token_id:5", "logprob": -1.0}]


SCORES = [None, [(LLO, -math.inf, 9), (HE, -0.5, 1)]]


def test_prompt_logprobs_have_vllms_form(tokenizer):
    assert prompt_logprobs(SCORES, tokenizer) == [
        None,
        {
            LLO: {"logprob": -9999.0, "rank": 9, "decoded_token": "llo"},
            HE: {"logprob": -0.5, "rank": 1, "decoded_token": "he"},
        },
    ]
    assert prompt_logprobs(SCORES, None)[1][HE]["decoded_token"] is None
    assert prompt_logprobs(None, tokenizer) is None


def test_completions_can_begin_with_the_prompt_whose_first_token_has_no_logprob(tokenizer):
    lists = completion_logprobs(prompt_tokens([HE, LLO], SCORES), tokenizer, num_top=1, as_ids=False)
    assert lists == {
        "tokens": ["he", "llo"],
        "token_logprobs": [None, -9999.0],
        "top_logprobs": [None, {"llo": -9999.0, "he": -0.5}],
        "text_offset": [0, 2],
    }
