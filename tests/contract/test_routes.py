"""What a server says of itself, and that all routes to the model lead to the same model."""

import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.contract.servers import MAX_MODEL_LEN

HI = [{"role": "user", "content": "hi"}]


async def test_health_tells_what_is_served_and_which_start_of_the_server_this_is(api, second_api):
    health = await api.get("/health")
    assert set(health) == {"status", "version", "digest", "instance", "paused"}
    assert (health["status"], health["version"], health["digest"], health["paused"]) == ("ok", 0, None, False)
    assert health["instance"] == (await api.get("/health"))["instance"]
    assert health["instance"] != (await second_api.get("/health"))["instance"]


async def test_the_stock_client_finds_the_model_under_its_name(client, api, model):
    (card,) = (await client.models.list()).data
    assert (card.id, card.object, card.max_model_len) == (api.model, "model", MAX_MODEL_LEN)
    assert card.root == str(model)


async def test_text_becomes_the_tokenizers_tokens(api, tokenizer):
    text = 'caf\u00e9 \U0001f642 <|im_end|> {"a": 1}\n'
    answer = await api.post("/tokenize", model=api.model, prompt=text, return_token_strs=True)
    assert answer["tokens"] == tokenizer.encode(text)
    assert (answer["count"], answer["max_model_len"]) == (len(answer["tokens"]), MAX_MODEL_LEN)
    assert len(answer["token_strs"]) == len(answer["tokens"])


@pytest.mark.parametrize("fields", [{}, {"add_generation_prompt": False}], ids=["to-answer", "as-it-is"])
async def test_messages_become_the_tokens_of_the_chat_template(api, tokenizer, fields):
    messages = [{"role": "system", "content": "be brief"}, *HI]
    answer = await api.post("/tokenize", model=api.model, messages=messages, **fields)
    text = tokenizer.apply_chat_template(messages, tokenize=False, **({"add_generation_prompt": True} | fields))
    assert answer["tokens"] == tokenizer.encode(text)


async def test_content_in_parts_is_the_same_as_in_one(api):
    parts = [{"role": "user", "content": [{"type": "text", "text": "hi"}]}]
    whole = await api.post("/tokenize", model=api.model, messages=HI)
    assert await api.post("/tokenize", model=api.model, messages=parts) == whole


async def test_every_route_serves_the_same_model(api):
    prompt = (await api.post("/tokenize", model=api.model, messages=HI))["tokens"]
    sampling = {"temperature": 0, "max_tokens": 16}
    chat = await api.chat("hi", return_token_ids=True, **sampling)
    assert chat["prompt_token_ids"] == prompt
    ids = chat["choices"][0]["token_ids"]
    assert 1 <= len(ids) <= 16
    completion = await api.complete(prompt, return_token_ids=True, **sampling)
    assert completion["choices"][0]["token_ids"] == ids
    body = {"model": api.model, "token_ids": prompt, "sampling_params": sampling}
    for route in ("/inference/v1/generate", "/v1/generate"):
        assert (await api.post(route, **body))["choices"][0]["token_ids"] == ids


async def test_metrics_are_prometheus_text_and_count_what_was_served(api):
    before = [await api.metric(f"vllm:{name}_tokens_total") for name in ("prompt", "generation")]
    await api.generate([65] * 7, max_tokens=5, ignore_eos=True)
    answer = await api.http.get("/metrics")
    assert answer.headers["content-type"].startswith("text/plain")
    families = {family.name: family for family in text_string_to_metric_families(answer.text)}
    assert {"vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:kv_cache_usage_perc"} <= families.keys()
    assert {"vllm:request_success", "vllm:e2e_request_latency_seconds"} <= families.keys()
    assert {s.labels["model_name"] for s in families["vllm:num_requests_running"].samples} == {api.model}
    await api.await_metric("vllm:prompt_tokens_total", lambda count: count == before[0] + 7)
    await api.await_metric("vllm:generation_tokens_total", lambda count: count == before[1] + 5)
    assert await api.metric("prime_rl:weights_version") == 0


@pytest.mark.parametrize(
    "route",
    [
        "/v1/responses",
        "/v1/messages",
        "/v1/chat/completions/batch",
        "/generative_scoring",
        "/invocations",
        "/v1/load_lora_adapter",
        "/collective_rpc",
        "/reset_prefix_cache",
    ],
)
async def test_no_other_route_samples_or_changes_what_is_served(api, route):
    """What samples is tied to weights and versions, on the routes that promise it, or it is not there."""
    answer = await api.http.post(route, json={"model": api.model, "input": "hi", "messages": HI, "max_tokens": 4})
    error = answer.json()["error"]
    assert (answer.status_code, error["code"]) == (404, 404)
    assert route in error["message"]
