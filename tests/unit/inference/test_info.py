HI = [{"role": "user", "content": "hi"}]


async def test_models_lists_the_one_model_with_its_length(serve, make_backend):
    async with serve(make_backend(max_model_len=99)) as running:
        (card,) = (await running.openai.models.list()).data
    assert (card.id, card.max_model_len, card.root) == ("tiny", 99, "/models/tiny")


async def test_tokenize_takes_a_prompt_or_messages(serve, make_backend, tokenizer):
    async with serve(make_backend()) as running:
        text = (await running.http.post("/tokenize", json={"prompt": "hello", "return_token_strs": True})).json()
        chat = (await running.http.post("/tokenize", json={"messages": HI, "add_generation_prompt": False})).json()
        wrong = await running.http.post("/tokenize", json={"model": "tiny"})
    assert text == {"count": 2, "max_model_len": 256, "tokens": [256, 257], "token_strs": ["he", "llo"]}
    assert chat["tokens"] == tokenizer.encode("<|im_start|>user\nhi<|im_end|>\n", add_special_tokens=False)
    assert wrong.status_code == 400


async def test_metrics_count_under_vllms_names(serve, make_backend):
    async with serve(make_backend()) as running:
        running.backend.version = 5
        await running.openai.completions.create(model="tiny", prompt="hi", max_tokens=3)
        answer = await running.http.get("/metrics")
    lines = answer.text.splitlines()
    assert answer.headers["content-type"].startswith("text/plain; version=0.0.4")
    assert 'vllm:generation_tokens_total{model_name="tiny"} 3.0' in lines
    assert 'vllm:num_requests_running{model_name="tiny"} 0.0' in lines
    assert 'prime_rl:weights_version{model_name="tiny"} 5.0' in lines
    assert 'vllm:request_success_total{finished_reason="length",model_name="tiny"} 1.0' in lines
    assert 'vllm:e2e_request_latency_seconds_count{model_name="tiny"} 1.0' in lines
