import json

import pytest
from renderers.client import OverlongPromptError
from renderers.client import generate as renderers_generate
from renderers.default import DefaultRenderer

from prime_rl.transport.api import GenerateResponse

ROUTE = "/inference/v1/generate"
HI = [{"role": "user", "content": "hi"}]


def ask(**sampling):
    return {"token_ids": [1, 2, 3], "sampling_params": sampling}


@pytest.mark.parametrize("route", [ROUTE, "/v1/generate"])
async def test_tokens_go_in_and_tokens_come_out(serve, make_backend, say, route):
    async with serve(make_backend(script=say("hello"))) as running:
        answer = await running.http.post(route, json=ask(logprobs=1) | {"model": "tiny", "request_id": "mine"})
    response = GenerateResponse.model_validate_json(answer.content)
    (choice,) = response.choices
    assert response.request_id == "mine"
    assert (choice.token_ids, response.versions) == ([256, 257, 260], [[(0, 3)]])
    assert (choice.finish_reason, choice.stop_reason) == ("stop", None)
    assert [(entry.token, entry.logprob) for entry in choice.logprobs.content] == [
        ("token_id:256", -0.01),
        ("token_id:257", -0.02),
        ("token_id:260", -0.03),
    ]
    assert [top.token for top in choice.logprobs.content[0].top_logprobs] == ["token_id:256"]
    assert response.usage.model_dump() == {"prompt_tokens": 3, "completion_tokens": 3, "total_tokens": 6}


async def test_one_logprob_costs_the_engine_no_alternatives(serve, make_backend):
    async with serve(make_backend()) as running:
        await running.http.post(ROUTE, json=ask(logprobs=1, max_tokens=1))
        wide = await running.http.post(ROUTE, json=ask(logprobs=3, max_tokens=1))
        assert [request.sampling.num_top_logprobs for request in running.backend.requests] == [0, 3]
    (entry,) = wide.json()["choices"][0]["logprobs"]["content"]
    assert len(entry["top_logprobs"]) == 3
    assert entry["top_logprobs"][0]["token"] == entry["token"]


async def test_max_tokens_is_at_most_the_room_behind_the_prompt(serve, make_backend):
    async with serve(make_backend(max_model_len=16)) as running:
        for sampling in ({}, {"max_tokens": 1000}):
            answer = await running.http.post(ROUTE, json=ask(**sampling))
            (choice,) = answer.json()["choices"]
            assert len(choice["token_ids"]) == 13
            assert choice["finish_reason"] == "length"
            assert choice["logprobs"] is None


async def test_n_choices_share_one_answer(serve, make_backend):
    async with serve(make_backend()) as running:
        answer = await running.http.post(ROUTE, json=ask(n=4, max_tokens=2))
    assert [choice["index"] for choice in answer.json()["choices"]] == [0, 1, 2, 3]
    assert answer.json()["usage"]["completion_tokens"] == 8


async def test_stop_strings_work_without_text_being_sent(serve, make_backend, say):
    async with serve(make_backend(script=say("hello world"))) as running:
        answer = await running.http.post(ROUTE, json=ask(stop="o w"))
    (choice,) = answer.json()["choices"]
    assert choice["stop_reason"] == "o w"
    assert choice["token_ids"] == [256, 257, 220, 86]
    assert "text" not in choice


async def test_a_stream_is_chunks_of_the_same_shape(serve, make_backend, say):
    async with serve(make_backend(script=say("hello"))) as running:
        body = ask(logprobs=0) | {"stream": True, "stream_options": {"include_usage": True}}
        answer = await running.http.post(ROUTE, json=body)
    *events, done = [line.removeprefix("data: ") for line in answer.text.split("\n\n") if line]
    assert done == "[DONE]"
    *chunks, last = [GenerateResponse.model_validate(json.loads(event)) for event in events]
    assert [chunk.choices[0].token_ids for chunk in chunks] == [[256], [257], [260]]
    assert [chunk.choices[0].finish_reason for chunk in chunks] == [None, None, "stop"]
    assert last.choices == []
    assert last.usage.total_tokens == 6


async def test_the_renderers_client_gets_text_ids_and_logprobs(serve, make_backend, say, hf_tokenizer):
    async with serve(make_backend(script=say("hello"))) as running:
        result = await renderers_generate(
            client=running.openai,
            renderer=DefaultRenderer(hf_tokenizer),
            messages=HI,
            model="tiny",
            sampling_params={"max_tokens": 8, "temperature": 1.0},
            cache_salt="3",
        )
        (request,) = running.backend.requests
    assert result["content"] == "hello"
    assert result["completion_ids"] == [256, 257, 260]
    assert result["completion_logprobs"] == [-0.01, -0.02, -0.03]
    assert (result["finish_reason"], result["prompt_ids"]) == ("stop", request.prompt_ids)
    assert request.sampling.stop_token_ids == (260,)


async def test_the_renderers_client_learns_the_context_length(serve, make_backend, hf_tokenizer):
    async with serve(make_backend(max_model_len=32)) as running:
        with pytest.raises(OverlongPromptError) as caught:
            await renderers_generate(
                client=running.openai,
                renderer=DefaultRenderer(hf_tokenizer),
                messages=[{"role": "user", "content": "hi " * 40}],
                model="tiny",
            )
        assert running.backend.requests == []
    assert caught.value.max_prompt_len == 32


async def test_the_prompt_is_scored_without_text(serve, make_backend):
    async with serve(make_backend()) as running:
        answer = await running.http.post(ROUTE, json=ask(prompt_logprobs=1, max_tokens=1, n=2))
    scores = GenerateResponse.model_validate_json(answer.content).prompt_logprobs
    assert scores[0] is None
    assert {i: entry.model_dump() for i, entry in scores[1].items()} == {
        2: {"logprob": -1.0, "rank": 2, "decoded_token": None},
        3: {"logprob": -0.5, "rank": 1, "decoded_token": None},
    }
