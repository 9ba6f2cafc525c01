import pytest


async def test_a_prompt_of_text_is_completed(serve, make_backend, say):
    async with serve(make_backend(script=say("hello"))) as running:
        answer = await running.openai.completions.create(model="tiny", prompt="hi")
    (choice,) = answer.choices
    assert (choice.text, choice.finish_reason, answer.versions) == ("hello", "stop", [[[0, 3]]])
    assert (answer.object, answer.usage.prompt_tokens, answer.usage.completion_tokens) == ("text_completion", 2, 3)


async def test_sixteen_tokens_are_the_default(serve, make_backend):
    async with serve(make_backend()) as running:
        answer = await running.openai.completions.create(model="tiny", prompt="hi")
        short = await running.openai.completions.create(model="tiny", prompt=[1] * 250)
    assert answer.usage.completion_tokens == 16
    assert short.usage.completion_tokens == 6


@pytest.mark.parametrize("stream", [False, True])
async def test_choices_of_several_prompts_are_numbered_by_prompt(serve, make_backend, stream):
    prompts = [[1, 2, 3], [4, 5]]
    async with serve(make_backend(script=lambda prompt, i: 32 + len(prompt))) as running:
        answer = await running.openai.completions.create(
            model="tiny",
            prompt=prompts,
            n=2,
            max_tokens=2,
            stream=stream,
            stream_options={"include_usage": True} if stream else None,
            extra_body={"return_token_ids": True},
        )
        if stream:
            chunks = [chunk async for chunk in answer]
            choices = [chunk.choices[0] for chunk in chunks if chunk.choices]
            usage = chunks[-1].usage
        else:
            choices, usage = answer.choices, answer.usage
    by_index: dict[int, list[int]] = {index: [] for index in range(4)}
    prompt_of = {}
    for choice in choices:
        by_index[choice.index] += choice.token_ids
        prompt_of.setdefault(choice.index, getattr(choice, "prompt_token_ids", None))
    assert by_index == {0: [35, 35], 1: [35, 35], 2: [34, 34], 3: [34, 34]}
    assert prompt_of == {0: prompts[0], 1: prompts[0], 2: prompts[1], 3: prompts[1]}
    assert (usage.prompt_tokens, usage.completion_tokens) == (5, 8)


async def test_logprobs_are_four_lists_whose_offsets_go_on_over_a_stream(serve, make_backend, say):
    async with serve(make_backend(script=say("hello!"))) as running:
        ask = running.openai.completions.create
        whole = (await ask(model="tiny", prompt="hi", logprobs=1)).choices[0].logprobs
        stream = await ask(model="tiny", prompt="hi", logprobs=1, stream=True)
        parts = [chunk.choices[0].logprobs async for chunk in stream]
    assert whole.tokens == ["he", "llo", "!", "<|im_end|>"]
    assert whole.token_logprobs == [-0.01, -0.02, -0.03, -0.04]
    assert whole.text_offset == [0, 2, 5, 6]
    assert whole.top_logprobs[0] == {"he": -0.01}
    assert [part.text_offset[0] for part in parts] == whole.text_offset
    assert [part.tokens[0] for part in parts] == whole.tokens


async def test_tokens_can_be_named_by_their_ids(serve, make_backend, say):
    async with serve(make_backend(script=say("hello"))) as running:
        answer = await running.openai.completions.create(
            model="tiny", prompt="hi", logprobs=0, extra_body={"return_tokens_as_token_ids": True}
        )
    assert answer.choices[0].logprobs.tokens == ["token_id:256", "token_id:257", "token_id:260"]


async def test_special_tokens_show_when_asked_for(serve, make_backend, say):
    async with serve(make_backend(script=say("a<|im_start|>b"))) as running:
        ask = running.openai.completions.create
        hidden = await ask(model="tiny", prompt="hi")
        shown = await ask(model="tiny", prompt="hi", extra_body={"skip_special_tokens": False})
    assert (hidden.choices[0].text, shown.choices[0].text) == ("ab", "a<|im_start|>b")


async def test_min_tokens_holds_off_stop_strings(serve, make_backend, say):
    async with serve(make_backend(script=say("xaxbx"))) as running:
        answer = await running.openai.completions.create(
            model="tiny", prompt="hi", stop="x", extra_body={"min_tokens": 3}
        )
    assert answer.choices[0].text == "xaxb"


async def test_the_verifiers_completions_client_reads_tokens_and_logprobs(serve, make_backend, say):
    from verifiers.legacy.clients.openai_completions_client import OpenAICompletionsClient
    from verifiers.legacy.types import TextMessage

    async with serve(make_backend(script=say("hello"))) as running:
        client = OpenAICompletionsClient(running.openai)
        sampling = {"max_tokens": 8, "logprobs": 0, "extra_body": {"return_token_ids": True}}
        response = await client.get_response([TextMessage(role="text", content="hi")], "tiny", sampling)
    assert response.message.content == "hello"
    assert response.message.tokens.completion_ids == [256, 257, 260]
    assert response.message.tokens.completion_logprobs == [-0.01, -0.02, -0.03]
    assert len(response.message.tokens.prompt_ids) == 2


async def test_the_prompt_is_scored_once_for_all_of_its_choices(serve, make_backend):
    async with serve(make_backend()) as running:
        body = {"model": "tiny", "prompt": [[1, 2, 3], [4, 5]], "n": 2, "max_tokens": 1, "prompt_logprobs": 1}
        answer = (await running.http.post("/v1/completions", json=body)).json()
        asked = [request.sampling.num_prompt_logprobs for request in running.backend.requests]
    first, second, third, fourth = [choice["prompt_logprobs"] for choice in answer["choices"]]
    assert first == second
    assert third == fourth
    assert first[0] is None
    assert [list(entry) for entry in first[1:]] == [["2", "3"], ["3", "4"]]
    assert first[1]["2"] == {"logprob": -1.0, "rank": 2, "decoded_token": "#"}
    assert (len(third), asked) == (2, [1, None, 1, None])


@pytest.mark.parametrize("prompt", ["hello", [256, 257]])
async def test_echo_begins_text_and_logprobs_with_the_prompt(serve, make_backend, say, prompt):
    async with serve(make_backend(script=say("he"))) as running:
        ask = running.openai.completions.create
        (choice,) = (await ask(model="tiny", prompt=prompt, echo=True, logprobs=1)).choices
        (alone,) = (await ask(model="tiny", prompt=prompt, echo=True, logprobs=1, max_tokens=0)).choices
        chunks = [chunk async for chunk in await ask(model="tiny", prompt=prompt, echo=True, stream=True)]
    assert choice.text == "hellohe"
    assert choice.logprobs.tokens == ["he", "llo", "he", "<|im_end|>"]
    assert choice.logprobs.token_logprobs == [None, -1.0, -0.01, -0.02]
    assert choice.logprobs.text_offset == [0, 2, 5, 7]
    assert (alone.text, alone.logprobs.token_logprobs) == ("hello", [None, -1.0])
    assert "".join(chunk.choices[0].text for chunk in chunks) == "hellohe"


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"max_tokens": 0}, "max_tokens"),
        ({"stream": True, "prompt_logprobs": 1}, "prompt_logprobs"),
        ({"stream": True, "echo": True, "logprobs": 1}, "prompt_logprobs"),
        ({"prompt_logprobs": -1}, "prompt_logprobs"),
        ({"prompt_logprobs": 21}, "prompt_logprobs"),
    ],
)
async def test_what_cannot_be_scored_is_refused(serve, make_backend, body, param):
    async with serve(make_backend()) as running:
        answer = await running.http.post("/v1/completions", json={"model": "tiny", "prompt": "hi"} | body)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == param
