import asyncio

import pytest
from openai import BadRequestError, NotFoundError, OpenAI

from prime_rl.inference.replies import ReplyFormat

HI = [{"role": "user", "content": "hi"}]
RENDERED = "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"


async def test_a_chat_completion_has_what_the_stock_client_expects(serve, make_backend, say):
    async with serve(make_backend(script=say("hello"))) as running:
        answer = await running.openai.chat.completions.create(model="tiny", messages=HI)
    (choice,) = answer.choices
    assert (choice.message.role, choice.message.content) == ("assistant", "hello")
    assert (choice.finish_reason, choice.logprobs, choice.stop_reason) == ("stop", None, None)
    assert answer.versions == [[[0, 3]]]
    assert (answer.object, answer.model) == ("chat.completion", "tiny")
    assert answer.id.startswith("chatcmpl-")
    assert (answer.usage.completion_tokens, answer.usage.total_tokens) == (3, 3 + answer.usage.prompt_tokens)


async def test_the_synchronous_client_works_too(serve, make_backend, say):
    async with serve(make_backend(script=say("hello"))) as running:

        def ask():
            with OpenAI(base_url=f"{running.url}/v1", api_key="EMPTY") as client:
                stream = client.chat.completions.create(model="tiny", messages=HI, stream=True)
                return "".join(chunk.choices[0].delta.content for chunk in stream)

        assert await asyncio.to_thread(ask) == "hello"


async def test_token_ids_and_logprobs_come_along_when_asked_for(serve, make_backend, say, tokenizer):
    async with serve(make_backend(script=say("hello"))) as running:
        answer = await running.openai.chat.completions.create(
            model="tiny", messages=HI, logprobs=True, top_logprobs=2, extra_body={"return_token_ids": True}
        )
    (choice,) = answer.choices
    assert answer.prompt_token_ids == tokenizer.encode(RENDERED, add_special_tokens=False)
    assert choice.token_ids == [256, 257, 260]
    assert [entry.token for entry in choice.logprobs.content] == ["he", "llo", "<|im_end|>"]
    assert [entry.logprob for entry in choice.logprobs.content] == [-0.01, -0.02, -0.03]
    assert [len(entry.top_logprobs) for entry in choice.logprobs.content] == [2, 2, 2]
    assert bytes(choice.logprobs.content[0].bytes) == b"he"


async def test_a_stream_sends_the_role_then_the_pieces_then_the_usage(serve, make_backend, say):
    text = "w\u00f6rld \U0001f600!"
    async with serve(make_backend(script=say(text))) as running:
        stream = await running.openai.chat.completions.create(
            model="tiny",
            messages=HI,
            stream=True,
            stream_options={"include_usage": True},
            logprobs=True,
            extra_body={"return_token_ids": True},
        )
        chunks = [chunk async for chunk in stream]
    first, *middle, last = chunks
    assert first.choices[0].delta.role == "assistant"
    assert first.prompt_token_ids
    assert "".join(chunk.choices[0].delta.content for chunk in middle) == text
    assert all("\ufffd" not in chunk.choices[0].delta.content for chunk in middle)
    assert [chunk.choices[0].finish_reason for chunk in middle] == [None] * (len(middle) - 1) + ["stop"]
    num_tokens = sum(len(chunk.choices[0].token_ids) for chunk in middle)
    assert not any("versions" in chunk.model_extra for chunk in chunks)
    assert sum(len(chunk.choices[0].logprobs.content) for chunk in middle) == num_tokens
    assert last.choices == []
    assert last.usage.completion_tokens == num_tokens
    assert {chunk.id for chunk in chunks} == {first.id}


async def test_a_stream_is_server_sent_events_up_to_done(serve, make_backend, say):
    async with serve(make_backend(script=say("a"))) as running:
        answer = await running.http.post("/v1/chat/completions", json={"messages": HI, "stream": True})
    assert answer.headers["content-type"].startswith("text/event-stream")
    events = answer.text.strip().split("\n\n")
    assert all(event.startswith("data: ") for event in events)
    assert events[-1] == "data: [DONE]"


async def test_continuous_usage_counts_with_every_chunk(serve, make_backend, say):
    async with serve(make_backend(script=say("abc"))) as running:
        stream = await running.openai.chat.completions.create(
            model="tiny", messages=HI, stream=True, stream_options={"continuous_usage_stats": True}
        )
        usages = [chunk.usage.completion_tokens async for chunk in stream if chunk.usage]
    assert usages == [1, 2, 3, 4]


@pytest.mark.parametrize("stream", [False, True])
async def test_n_choices_are_sampled_apart(serve, make_backend, say, stream):
    async with serve(make_backend(script=say("abc"))) as running:
        answer = await running.openai.chat.completions.create(
            model="tiny", messages=HI, n=3, seed=5, stream=stream, max_tokens=2
        )
        texts = ["", "", ""]
        if stream:
            async for chunk in answer:
                texts[chunk.choices[0].index] += chunk.choices[0].delta.content
        else:
            texts = [choice.message.content for choice in answer.choices]
            assert answer.usage.completion_tokens == 6
        assert [request.sampling.seed for request in running.backend.requests] == [5, 6, 7]
    assert texts == ["ab", "ab", "ab"]


@pytest.mark.parametrize("stream", [False, True])
async def test_a_stop_string_across_tokens_ends_the_choice_and_frees_the_request(serve, make_backend, say, stream):
    async with serve(make_backend(script=say("one END two"))) as running:
        answer = await running.openai.chat.completions.create(
            model="tiny", messages=HI, stop=["END"], stream=stream, extra_body={"return_token_ids": True}
        )
        if stream:
            choices = [chunk.choices[0] async for chunk in answer][1:]
            text = "".join(choice.delta.content for choice in choices)
            token_ids = [token for choice in choices for token in choice.token_ids]
        else:
            choices = answer.choices
            text, token_ids = choices[0].message.content, choices[0].token_ids
        assert running.backend.running == set()
        assert len(running.backend.cancelled) == 1
    assert text == "one "
    assert len(token_ids) == len("one END")
    assert (choices[-1].finish_reason, choices[-1].stop_reason) == ("stop", "END")


async def test_a_stop_token_is_named_and_left_out_of_the_text(serve, make_backend, say, tokenizer):
    (bang,) = tokenizer.encode("!", add_special_tokens=False)
    async with serve(make_backend(script=say("hi! there"))) as running:
        ask = running.openai.chat.completions.create
        answer = await ask(model="tiny", messages=HI, extra_body={"stop_token_ids": [bang]})
        kept = await ask(
            model="tiny", messages=HI, extra_body={"stop_token_ids": [bang], "include_stop_str_in_output": True}
        )
    assert (answer.choices[0].message.content, answer.choices[0].stop_reason) == ("hi", bang)
    assert kept.choices[0].message.content == "hi!"


async def test_sampling_reaches_the_backend_and_max_completion_tokens_wins(serve, make_backend):
    async with serve(make_backend()) as running:
        answer = await running.openai.chat.completions.create(
            model="tiny",
            messages=HI,
            temperature=0.5,
            top_p=0.9,
            max_tokens=50,
            max_completion_tokens=3,
            extra_body={"top_k": 4, "min_p": 0.1, "repetition_penalty": 1.1, "min_tokens": 2, "ignore_eos": True},
        )
        (request,) = running.backend.requests
    sampling = request.sampling
    assert (sampling.max_tokens, sampling.min_tokens, sampling.ignore_eos) == (3, 2, True)
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.min_p) == (0.5, 0.9, 4, 0.1)
    assert sampling.repetition_penalty == 1.1
    assert answer.choices[0].finish_reason == "length"


async def test_without_max_tokens_a_choice_may_fill_the_context(serve, make_backend):
    async with serve(make_backend(max_model_len=64)) as running:
        answer = await running.openai.chat.completions.create(model="tiny", messages=HI)
    assert answer.usage.total_tokens == 64
    assert answer.choices[0].finish_reason == "length"


async def test_whole_answers_are_taken_from_the_backend_in_one_piece(serve, make_backend):
    async with serve(make_backend()) as running:
        await running.openai.chat.completions.create(model="tiny", messages=HI, max_tokens=3)
        await running.openai.chat.completions.create(model="tiny", messages=HI, max_tokens=3, stop="xyz")
        assert [request.stream for request in running.backend.requests] == [False, True]


async def test_tools_are_rendered_and_calls_come_back_as_text(serve, make_backend, say, tokenizer):
    tool = {"type": "function", "function": {"name": "look", "description": "", "parameters": {}}}
    said = '<tool_call>{"name": "look"}</tool_call>'
    async with serve(make_backend(script=say(said))) as running:
        answer = await running.openai.chat.completions.create(model="tiny", messages=HI, tools=[tool])
        (request,) = running.backend.requests
    assert tokenizer.decode(request.prompt_ids, skip_special_tokens=False) == "[look]" + RENDERED
    assert answer.choices[0].message.content == said
    assert answer.choices[0].message.tool_calls is None


async def test_a_final_message_can_be_continued(serve, make_backend, say, tokenizer):
    messages = [*HI, {"role": "assistant", "content": "So"}]
    async with serve(make_backend(script=say("!"))) as running:
        await running.openai.chat.completions.create(
            model="tiny", messages=messages, extra_body={"continue_final_message": True}
        )
        (request,) = running.backend.requests
    assert tokenizer.decode(request.prompt_ids, skip_special_tokens=False).endswith("assistant\nSo")


async def test_the_versions_of_every_choice_follow_new_weights(serve, make_backend, eventually):
    def hold_at_five(prompt_ids, index):
        if index == 5 and backend.version == 0:
            backend.gate.clear()
        return 65

    backend = make_backend(script=hold_at_five)
    async with serve(backend) as running:
        request = asyncio.create_task(
            running.openai.chat.completions.create(model="tiny", messages=HI, n=2, max_tokens=50)
        )
        await eventually(lambda: not backend.gate.is_set())
        await backend.update_weights(lambda: None, 7)
        backend.gate.set()
        versions = (await request).versions
    for runs in versions:
        assert [version for version, _ in runs] == [0, 7]
        assert sum(count for _, count in runs) == 50


async def test_a_model_without_template_says_how_else_to_ask(serve, make_backend, templateless):
    async with serve(make_backend(), tokenizer=templateless) as running:
        with pytest.raises(BadRequestError, match="no chat template"):
            await running.openai.chat.completions.create(model="tiny", messages=HI)


async def test_another_model_is_not_found(serve, make_backend):
    async with serve(make_backend()) as running:
        with pytest.raises(NotFoundError, match="'gpt-4' does not exist; this server serves 'tiny'"):
            await running.openai.chat.completions.create(model="gpt-4", messages=HI)


async def test_the_verifiers_chat_client_reads_tokens_and_logprobs(serve, make_backend, say):
    from verifiers.legacy.clients.openai_chat_completions_client import OpenAIChatCompletionsClient
    from verifiers.legacy.types import UserMessage

    async with serve(make_backend(script=say("hello"))) as running:
        client = OpenAIChatCompletionsClient(running.openai)
        sampling = {"max_tokens": 8, "temperature": 1.0, "logprobs": True, "extra_body": {"return_token_ids": True}}
        response = await client.get_response([UserMessage(role="user", content="hi")], "tiny", sampling)
    tokens = response.message.tokens
    assert response.message.content == "hello"
    assert (response.message.finish_reason, response.message.is_truncated) == ("stop", False)
    assert tokens.completion_ids == [256, 257, 260]
    assert tokens.completion_logprobs == [-0.01, -0.02, -0.03]
    assert len(tokens.prompt_ids) == response.usage.prompt_tokens


async def test_the_verifiers_chat_client_recognises_a_prompt_that_is_too_long(serve, make_backend):
    from verifiers.legacy.clients.openai_chat_completions_client import OpenAIChatCompletionsClient
    from verifiers.legacy.errors import OverlongPromptError
    from verifiers.legacy.types import UserMessage

    async with serve(make_backend(max_model_len=32)) as running:
        client = OpenAIChatCompletionsClient(running.openai)
        with pytest.raises(OverlongPromptError):
            await client.get_response([UserMessage(role="user", content="hi " * 40)], "tiny", {"max_tokens": 8})


async def test_the_prompt_is_scored_on_demand(serve, make_backend):
    async with serve(make_backend()) as running:
        body = {"model": "tiny", "messages": HI, "max_tokens": 1}
        answer = (await running.http.post("/v1/chat/completions", json=body | {"prompt_logprobs": 0})).json()
        without = (await running.http.post("/v1/chat/completions", json=body)).json()
        echo = await running.http.post("/v1/chat/completions", json=body | {"echo": True})
        prompt = running.backend.requests[0].prompt_ids
    assert [entry and list(map(int, entry)) for entry in answer["prompt_logprobs"]] == [
        None,
        *([i] for i in prompt[1:]),
    ]
    assert without["prompt_logprobs"] is None
    assert (echo.status_code, echo.json()["error"]["param"]) == (400, "echo")


LOOK = {"type": "function", "function": {"name": "look", "description": "", "parameters": {}}}
CALL = '<tool_call>\n{"name": "look", "arguments": {"at": "me"}}\n</tool_call>'
REPLIES = ReplyFormat(tool_parser="hermes", reasoning_parser="qwen3")


async def test_tool_calls_and_reasoning_are_told_apart(serve, make_backend, say):
    script = say(f"<think>hm</think>So:\n{CALL}{CALL}")
    async with serve(make_backend(script=script), replies=REPLIES) as running:
        ask = running.openai.chat.completions.create
        (choice,) = (await ask(model="tiny", messages=HI, tools=[LOOK])).choices
        (first,) = (await ask(model="tiny", messages=HI, tools=[LOOK], parallel_tool_calls=False)).choices
        (cut,) = (
            await ask(model="tiny", messages=HI, tools=[LOOK], max_tokens=len(f"<think>hm</think>So:\n{CALL}") - 5)
        ).choices
        (plain,) = (await ask(model="tiny", messages=HI, tools=[LOOK], tool_choice="none")).choices
    assert (choice.finish_reason, choice.message.content, choice.message.reasoning) == ("tool_calls", "So:\n", "hm")
    calls = choice.message.tool_calls
    assert [(one.type, one.function.name, one.function.arguments) for one in calls] == [
        ("function", "look", '{"at": "me"}')
    ] * 2
    assert len({one.id for one in calls}) == 2
    assert len(first.message.tool_calls) == 1
    assert cut.finish_reason == "length"
    assert (plain.finish_reason, plain.message.content, plain.message.tool_calls) == (
        "stop",
        f"So:\n{CALL}{CALL}",
        None,
    )


async def test_a_stream_of_calls_joins_to_the_whole_with_every_token_accounted_for(serve, make_backend, say):
    text = f"<think>hm</think>So:\n{CALL}\n{CALL}"
    async with serve(make_backend(script=say(text)), replies=REPLIES) as running:
        ask = running.openai.chat.completions.create
        whole = (await ask(model="tiny", messages=HI, tools=[LOOK])).choices[0].message
        usage = {"include_usage": True}
        chunks = [
            c async for c in await ask(model="tiny", messages=HI, tools=[LOOK], stream=True, stream_options=usage)
        ]
        full = [c async for c in await ask(model="tiny", messages=HI, tools=[LOOK], stream=True, logprobs=True)]
    deltas = [chunk.choices[0].delta for chunk in chunks if chunk.choices]
    assert "".join(delta.content or "" for delta in deltas) == whole.content
    assert "".join(getattr(delta, "reasoning", "") for delta in deltas) == whole.reasoning
    calls = [one for delta in deltas for one in delta.tool_calls or []]
    assert [(one.index, one.function.name, one.function.arguments) for one in calls] == [
        (index, one.function.name, one.function.arguments) for index, one in enumerate(whole.tool_calls)
    ]
    assert [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices][-1] == "tool_calls"
    num_tokens = chunks[-1].usage.completion_tokens
    assert len(chunks) < num_tokens  # nothing is sent for what is held back
    assert sum(len(chunk.choices[0].logprobs.content) for chunk in full[1:]) == num_tokens


@pytest.mark.parametrize("choice", ["required", "any", {"type": "function", "function": {"name": "look"}}])
async def test_a_choice_of_tools_that_needs_constrained_sampling_is_refused(serve, make_backend, choice):
    async with serve(make_backend(), replies=REPLIES) as running:
        body = {"messages": HI, "tools": [LOOK], "tool_choice": choice}
        answer = await running.http.post("/v1/chat/completions", json=body)
        without = await running.http.post("/v1/chat/completions", json={"messages": HI, "tool_choice": "auto"})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "tool_choice")
    assert "backend = 'vllm'" in answer.json()["error"]["message"]
    assert (without.status_code, without.json()["error"]["param"]) == (400, "tool_choice")
