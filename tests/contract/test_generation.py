"""Text and tokens: whole answers and streams, several choices, where they end, and how the shapes fit together."""

import json
from collections.abc import Sequence
from typing import Any

import pytest

from tests.contract.model import END, SMILE

WORDS = "The quick brown fox"


async def streamed(api, route: str, **body: Any) -> list[dict[str, Any]]:
    """The chunks of a stream, which must end as the OpenAI API says."""
    chunks = []
    async with api.http.stream("POST", route, json={"model": api.model, "stream": True} | body) as answer:
        assert answer.status_code == 200, await answer.aread()
        assert answer.headers["content-type"].startswith("text/event-stream")
        lines = [line async for line in answer.aiter_lines() if line]
    assert lines.pop() == "data: [DONE]"
    for line in lines:
        assert line.startswith("data: "), line
        chunks.append(json.loads(line.removeprefix("data: ")))
    assert all("error" not in chunk for chunk in chunks), chunks
    return chunks


def joined(chunks: Sequence[dict[str, Any]], num_choices: int = 1) -> list[dict[str, Any]]:
    """Choices of a stream as a whole answer has them: text, token ids, logprobs, finish reason."""
    choices: list[dict[str, Any]] = [
        {"text": "", "token_ids": [], "logprobs": [], "finish_reason": None} for _ in range(num_choices)
    ]
    for chunk in chunks:
        for part in chunk["choices"]:
            whole = choices[part["index"]]
            assert whole["finish_reason"] is None, "nothing comes after the end of a choice"
            whole["text"] += part.get("text") or (part.get("delta") or {}).get("content") or ""
            whole["token_ids"] += part.get("token_ids") or []
            logprobs = part.get("logprobs") or {}
            whole["logprobs"] += [e["logprob"] for e in logprobs.get("content") or []] or logprobs.get(
                "token_logprobs", []
            )
            whole["finish_reason"] = part.get("finish_reason")
    return choices


async def test_a_chat_answer_has_the_shape_that_the_stock_client_reads(client, api, tokenizer):
    answer = await client.chat.completions.create(
        model=api.model,
        messages=[{"role": "user", "content": "hi"}],
        max_tokens=12,
        seed=7,
        extra_body={"return_token_ids": True, "ignore_eos": True},
    )
    (choice,) = answer.choices
    assert (answer.object, answer.model) == ("chat.completion", api.model)
    assert (choice.index, choice.finish_reason, choice.message.role) == (0, "length", "assistant")
    assert choice.message.content == tokenizer.decode(choice.token_ids, skip_special_tokens=True)
    assert choice.message.tool_calls is None
    usage = answer.usage
    assert (usage.prompt_tokens, usage.completion_tokens) == (len(answer.prompt_token_ids), 12)
    assert usage.total_tokens == usage.prompt_tokens + usage.completion_tokens


@pytest.mark.parametrize("n", [1, 3])
async def test_a_stream_joins_to_the_whole_chat_answer(api, n):
    body = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 20, "seed": 5, "n": n}
    body |= {"logprobs": True, "top_logprobs": 2, "return_token_ids": True}
    whole = await api.post("/v1/chat/completions", model=api.model, **body)
    chunks = await streamed(api, "/v1/chat/completions", stream_options={"include_usage": True}, **body)
    assert {chunk["object"] for chunk in chunks} == {"chat.completion.chunk"}
    assert len({chunk["id"] for chunk in chunks}) == 1
    assert chunks[0]["choices"][0]["delta"]["role"] == "assistant"
    assert chunks[0]["prompt_token_ids"] == whole["prompt_token_ids"]
    usage = chunks.pop()
    assert usage["choices"] == []
    for name in ("prompt_tokens", "completion_tokens", "total_tokens"):
        assert usage["usage"][name] == whole["usage"][name]
    for got, expected in zip(joined(chunks, n), whole["choices"], strict=True):
        assert got["text"] == expected["message"]["content"]
        assert got["token_ids"] == expected["token_ids"]
        assert got["finish_reason"] == expected["finish_reason"]
        assert got["logprobs"] == pytest.approx([e["logprob"] for e in expected["logprobs"]["content"]], abs=1e-5)


async def test_a_stream_joins_to_the_whole_completion(api):
    body = {"prompt": WORDS, "max_tokens": 20, "seed": 5, "n": 2, "logprobs": 1, "return_token_ids": True}
    whole = await api.post("/v1/completions", model=api.model, **body)
    chunks = await streamed(api, "/v1/completions", **body)
    assert len(chunks) > 2, "tokens come as they are sampled"
    offsets: dict[int, list[int]] = {0: [], 1: []}
    for chunk in chunks:
        for part in chunk["choices"]:
            offsets[part["index"]] += (part["logprobs"] or {}).get("text_offset", [])
    for got, expected in zip(joined(chunks, 2), whole["choices"], strict=True):
        assert (got["text"], got["token_ids"]) == (expected["text"], expected["token_ids"])
        assert got["finish_reason"] == expected["finish_reason"]
        assert got["logprobs"] == pytest.approx(expected["logprobs"]["token_logprobs"], abs=1e-5)
        assert offsets[expected["index"]] == expected["logprobs"]["text_offset"]


async def test_a_stream_joins_to_the_whole_generate_answer(api):
    body = {"token_ids": [65, 66, 67], "sampling_params": {"max_tokens": 20, "seed": 5, "n": 2, "logprobs": 1}}
    whole = await api.post("/inference/v1/generate", model=api.model, **body)
    chunks = await streamed(api, "/inference/v1/generate", stream_options={"include_usage": True}, **body)
    assert chunks.pop()["usage"]["completion_tokens"] == whole["usage"]["completion_tokens"]
    for got, expected in zip(joined(chunks, 2), whole["choices"], strict=True):
        assert got["token_ids"] == expected["token_ids"]
        assert got["finish_reason"] == expected["finish_reason"]
        assert got["logprobs"] == pytest.approx([e["logprob"] for e in expected["logprobs"]["content"]], abs=1e-5)


async def test_the_generate_route_names_tokens_by_their_ids(api):
    answer = await api.generate([65, 66], max_tokens=6, seed=1, logprobs=2, ignore_eos=True)
    assert answer["model"] == api.model
    assert answer["request_id"]
    (choice,) = answer["choices"]
    assert (choice["index"], choice["finish_reason"]) == (0, "length")
    for token, entry in zip(choice["token_ids"], choice["logprobs"]["content"], strict=True):
        assert entry["token"] == f"token_id:{token}"
        assert entry["top_logprobs"][0]["token"] == entry["token"]
        assert entry["top_logprobs"][0]["logprob"] == entry["logprob"]
        assert len(entry["top_logprobs"]) <= 2
    usage = {name: answer["usage"][name] for name in ("prompt_tokens", "completion_tokens", "total_tokens")}
    assert usage == {"prompt_tokens": 2, "completion_tokens": 6, "total_tokens": 8}
    assert (await api.generate([65], max_tokens=1))["choices"][0]["logprobs"] is None


async def test_a_request_keeps_its_own_id(api):
    body = {"token_ids": [65], "sampling_params": {"max_tokens": 1}, "request_id": "mine-7"}
    assert "mine-7" in (await api.post("/inference/v1/generate", **body))["request_id"]


async def test_the_generate_route_samples_to_the_end_of_the_context(api):
    for asked in ({}, {"max_tokens": 5000}):
        answer = await api.generate([65] * 1000, ignore_eos=True, **asked)
        assert len(answer["choices"][0]["token_ids"]) == 24
        assert answer["choices"][0]["finish_reason"] == "length"


async def test_a_completion_is_sixteen_tokens_unless_told_otherwise(api):
    answer = await api.complete("hi", ignore_eos=True, return_token_ids=True)
    assert len(answer["choices"][0]["token_ids"]) == 16


async def test_chat_takes_either_name_of_the_limit(api):
    for name in ("max_tokens", "max_completion_tokens"):
        answer = await api.chat("hi", ignore_eos=True, **{name: 3})
        assert answer["usage"]["completion_tokens"] == 3


async def test_prompts_are_answered_in_order_each_n_times(api):
    prompts = ["ab", "cd", "ef"]
    answer = await api.complete(prompts, n=2, max_tokens=5, seed=3, return_token_ids=True)
    assert [choice["index"] for choice in answer["choices"]] == list(range(6))
    for number, prompt in enumerate(prompts):
        alone = await api.complete(prompt, n=2, max_tokens=5, seed=3)
        group = answer["choices"][2 * number : 2 * number + 2]
        assert [choice["text"] for choice in group] == [choice["text"] for choice in alone["choices"]]
        assert {tuple(choice["prompt_token_ids"]) for choice in group} == {tuple(map(ord_token, prompt))}
    assert answer["usage"]["prompt_tokens"] == 6


def ord_token(char: str) -> int:
    """The token of a printable ASCII character."""
    return ord(char) - 33


async def test_prompts_may_be_token_ids_too(api):
    as_text = await api.complete(["ab", "cd"], max_tokens=5, seed=3)
    as_ids = await api.complete([[64, 65], [66, 67]], max_tokens=5, seed=3)
    one = await api.complete([64, 65], max_tokens=5, seed=3)
    assert [c["text"] for c in as_ids["choices"]] == [c["text"] for c in as_text["choices"]]
    assert one["choices"][0]["text"] == as_text["choices"][0]["text"]


async def test_an_echo_begins_with_the_prompt(api):
    answer = await api.complete("hi", max_tokens=3, seed=1, ignore_eos=True, echo=True, logprobs=1)
    plain = await api.complete("hi", max_tokens=3, seed=1, ignore_eos=True)
    (choice,) = answer["choices"]
    assert choice["text"] == "hi" + plain["choices"][0]["text"]
    assert choice["logprobs"]["tokens"] == list(choice["text"])
    assert choice["logprobs"]["text_offset"] == [0, 1, 2, 3, 4]
    assert choice["logprobs"]["token_logprobs"][0] is None
    assert all(value < 0 for value in choice["logprobs"]["token_logprobs"][1:])


async def test_an_echo_without_new_tokens_measures_the_prompt(api):
    answer = await api.complete("hi there", max_tokens=0, echo=True, logprobs=0)
    (choice,) = answer["choices"]
    assert choice["text"] == "hi there"
    assert len(choice["logprobs"]["token_logprobs"]) == 8
    assert choice["logprobs"]["token_logprobs"][0] is None


async def test_a_stop_string_ends_the_text_before_it(api):
    free = (await api.complete(WORDS, max_tokens=40, seed=4, ignore_eos=True))["choices"][0]["text"]
    stop = free[20:23]  # three tokens
    where = free.index(stop)
    fields = {"max_tokens": 40, "seed": 4, "ignore_eos": True, "stop": ["\u2603", stop], "return_token_ids": True}
    (choice,) = (await api.complete(WORDS, **fields))["choices"]
    assert choice["text"] == free[:where]
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", stop)
    assert len(choice["token_ids"]) == where + 3, "the tokens that made the stop are there"
    (kept,) = (await api.complete(WORDS, include_stop_str_in_output=True, **fields))["choices"]
    assert kept["text"] == free[: where + 3]
    (part,) = joined(await streamed(api, "/v1/completions", prompt=WORDS, **fields))
    assert (part["text"], part["finish_reason"]) == (free[:where], "stop")


async def test_the_first_of_several_stops_counts_and_one_may_be_a_string(api):
    free = (await api.complete(WORDS, max_tokens=40, seed=4, ignore_eos=True))["choices"][0]["text"]
    late, early = free[30:33], free[10:13]
    fields = {"max_tokens": 40, "seed": 4, "ignore_eos": True}
    (choice,) = (await api.complete(WORDS, stop=[late, early], **fields))["choices"]
    assert choice["text"] == free[: free.index(early)]
    (single,) = (await api.complete(WORDS, stop=early, **fields))["choices"]
    assert single["text"] == choice["text"]


async def test_stop_strings_end_tokens_too(api):
    free = (await api.generate([65, 66], max_tokens=40, seed=4, ignore_eos=True))["choices"][0]["token_ids"]
    stop = chr(free[12] + 33)
    answer = await api.generate([65, 66], max_tokens=40, seed=4, ignore_eos=True, stop=[stop])
    (choice,) = answer["choices"]
    assert choice["token_ids"] == free[: free.index(free[12]) + 1]
    assert choice["finish_reason"] == "stop"


async def test_a_stop_token_ends_the_answer_and_is_its_last_token(api):
    free = (await api.generate([65, 66], max_tokens=40, seed=4, ignore_eos=True))["choices"][0]["token_ids"]
    stop = free[15]
    end = free.index(stop) + 1
    fields = {"max_tokens": 40, "seed": 4, "ignore_eos": True, "stop_token_ids": [stop, 268]}
    (choice,) = (await api.generate([65, 66], **fields))["choices"]
    assert (choice["token_ids"], choice["finish_reason"]) == (free[:end], "stop")
    (text,) = (await api.complete([65, 66], return_token_ids=True, **fields))["choices"]
    assert (text["token_ids"], text["stop_reason"]) == (free[:end], stop)
    assert len(text["text"]) == end - 1, "it is no part of the text"


async def test_the_end_of_sequence_ends_an_answer_unless_it_is_ignored(api, tokenizer):
    end = tokenizer.convert_tokens_to_ids(END)
    (choice,) = (await api.complete("<|smile|>", max_tokens=10, return_token_ids=True))["choices"]
    assert choice["token_ids"] == [*tokenizer.encode(SMILE), end]
    assert (choice["text"], choice["finish_reason"], choice["stop_reason"]) == (SMILE, "stop", None)
    fields = {"max_tokens": 10, "ignore_eos": True, "return_token_ids": True}
    (ignoring,) = (await api.complete("<|smile|>", **fields))["choices"]
    assert len(ignoring["token_ids"]) == 10
    assert ignoring["finish_reason"] == "length"


async def test_special_tokens_are_left_out_of_the_text_unless_they_are_asked_for(api, tokenizer):
    fields = {"max_tokens": 8, "ignore_eos": True, "seed": 1, "return_token_ids": True}
    (without,) = (await api.complete("<|smile|>", **fields))["choices"]
    (with_them,) = (await api.complete("<|smile|>", skip_special_tokens=False, **fields))["choices"]
    assert without["token_ids"] == with_them["token_ids"]
    assert without["text"] == tokenizer.decode(without["token_ids"], skip_special_tokens=True)
    assert with_them["text"] == tokenizer.decode(without["token_ids"], skip_special_tokens=False)


async def test_a_character_of_several_tokens_is_streamed_whole(api):
    chunks = await streamed(api, "/v1/completions", prompt="<|smile|>", max_tokens=10)
    assert {part["text"] for chunk in chunks for part in chunk["choices"]} <= {"", SMILE}
    (choice,) = joined(chunks)
    assert (choice["text"], choice["finish_reason"]) == (SMILE, "stop")


async def test_a_chat_can_be_continued_where_a_message_ends(api, tokenizer):
    messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "I say <|smile|>"}]
    answer = await api.post(
        "/v1/chat/completions",
        model=api.model,
        messages=messages,
        continue_final_message=True,
        add_generation_prompt=False,
        max_tokens=10,
    )
    assert answer["choices"][0]["message"]["content"] == SMILE
