"""Tool calls: the model calls a tool in Hermes' form where its prompt offers tools, and the server reads the call."""

import json

import pytest

from tests.contract.model import ARGUMENTS

QUESTION = [{"role": "user", "content": "What is the weather in Paris?"}]
WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Tell the weather.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
MARKUP = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call>'


async def test_a_call_is_parsed(client, api):
    answer = await client.chat.completions.create(
        model=api.model, messages=QUESTION, tools=[WEATHER], max_tokens=30, n=2
    )
    for choice in answer.choices:
        assert choice.finish_reason == "tool_calls"
        assert not choice.message.content
        (call,) = choice.message.tool_calls
        assert (call.type, call.function.name) == ("function", "get_weather")
        assert json.loads(call.function.arguments) == json.loads(ARGUMENTS)
    assert len({choice.message.tool_calls[0].id for choice in answer.choices}) == 2


async def test_a_call_is_parsed_with_the_tokens_and_logprobs_that_made_it(api, tokenizer):
    body = {"messages": QUESTION, "tools": [WEATHER], "max_tokens": 30, "logprobs": True, "return_token_ids": True}
    answer = await api.post("/v1/chat/completions", model=api.model, **body)
    (choice,) = answer["choices"]
    assert tokenizer.decode(choice["token_ids"], skip_special_tokens=True) == MARKUP
    assert len(choice["logprobs"]["content"]) == len(choice["token_ids"])
    assert choice["message"]["tool_calls"][0]["function"]["name"] == "get_weather"
    assert answer["versions"] == [[[0, len(choice["token_ids"])]]]


async def test_a_streamed_call_comes_in_pieces_that_the_stock_client_joins(client, api):
    stream = await client.chat.completions.create(
        model=api.model, messages=QUESTION, tools=[WEATHER], max_tokens=30, stream=True
    )
    names, arguments, content, reasons = [], "", "", []
    async for chunk in stream:
        for choice in chunk.choices:
            content += choice.delta.content or ""
            reasons.append(choice.finish_reason)
            for call in choice.delta.tool_calls or []:
                assert call.index == 0
                if call.function.name:
                    names.append((call.type, call.function.name, bool(call.id)))
                arguments += call.function.arguments or ""
    assert names == [("function", "get_weather", True)]
    assert json.loads(arguments) == json.loads(ARGUMENTS)
    assert content == ""
    assert reasons[-1] == "tool_calls"
    assert set(reasons[:-1]) == {None}


async def test_a_call_comes_as_text_where_none_is_wanted(api):
    body = {"messages": QUESTION, "tools": [WEATHER], "tool_choice": "none", "max_tokens": 30}
    answer = await api.post("/v1/chat/completions", model=api.model, **body)
    (choice,) = answer["choices"]
    assert choice["message"]["content"] == MARKUP
    assert not choice["message"].get("tool_calls")
    assert choice["finish_reason"] == "stop"


async def test_a_call_that_is_cut_off_is_no_call(api):
    body = {"messages": QUESTION, "tools": [WEATHER], "max_tokens": 3}
    answer = await api.post("/v1/chat/completions", model=api.model, **body)
    (choice,) = answer["choices"]
    assert choice["finish_reason"] == "length"
    assert not choice["message"].get("tool_calls")


async def test_without_tools_text_is_text(api):
    messages = [{"role": "user", "content": "say it"}, {"role": "assistant", "content": "<tool_call>"}]
    fields = {"continue_final_message": True, "add_generation_prompt": False, "max_tokens": 30}
    answer = await api.post("/v1/chat/completions", model=api.model, messages=messages, **fields)
    (choice,) = answer["choices"]
    assert choice["message"]["content"] == MARKUP.removeprefix("<tool_call>")
    assert choice["finish_reason"] == "stop"


async def test_calls_and_their_results_are_rendered_by_the_chat_template(api, tokenizer):
    call = {"id": "call-1", "type": "function", "function": {"name": "get_weather", "arguments": ARGUMENTS}}
    messages = [
        *QUESTION,
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call-1", "content": "sunny"},
    ]
    answer = await api.post("/tokenize", model=api.model, messages=messages, tools=[WEATHER])
    text = tokenizer.decode(answer["tokens"], skip_special_tokens=False)
    assert MARKUP in text
    assert "<tool_response>\nsunny\n</tool_response>" in text


@pytest.mark.parametrize(
    "tools", [5, ["x"], [{}], [{"type": "function"}], [{"type": "function", "function": {}}]], ids=str
)
async def test_a_tool_that_is_none_is_refused(api, tools):
    answer = await api.http.post("/v1/chat/completions", json={"messages": QUESTION, "tools": tools, "max_tokens": 1})
    assert answer.status_code == 400
    assert answer.json()["error"]["message"]
