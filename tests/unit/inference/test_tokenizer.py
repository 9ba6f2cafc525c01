import json
import threading

import pytest

from prime_rl.errors import ModelError
from prime_rl.inference.tokenizer import LONG_TEXT, ChatTemplateError, TextTokenizer

USER = {"role": "user", "content": "hi"}


def test_it_knows_the_bytes_of_every_token(tokenizer):
    ids = tokenizer.encode("hello \u4f60<|im_end|><think>", add_special_tokens=False)
    pieces = [tokenizer.token_bytes(token_id) for token_id in ids]
    assert b"".join(pieces) == "hello \u4f60<|im_end|><think>".encode()
    assert pieces[:3] == [b"he", b"llo", b" "]


def test_an_id_that_the_tokenizer_lacks_has_no_bytes(tokenizer):
    assert tokenizer.token_bytes(100_000) == b""
    assert tokenizer.token_text(100_000) == ""


def test_chat_is_rendered_by_the_template(tokenizer):
    text = tokenizer.render_chat([USER], None, {"add_generation_prompt": True})
    assert text == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"


def test_tools_reach_the_template(tokenizer):
    text = tokenizer.render_chat([USER], [{"type": "function", "function": {"name": "look"}}], {})
    assert text.startswith("[look]<|im_start|>")


def test_a_tokenizer_without_template_says_so(templateless):
    with pytest.raises(ChatTemplateError, match="has no chat template"):
        templateless.render_chat([USER], None, {})


def test_a_request_may_not_take_over_the_rendering(tokenizer):
    with pytest.raises(ChatTemplateError, match="may not set return_tensors, tokenize"):
        tokenizer.render_chat([USER], None, {"tokenize": True, "return_tensors": "pt"})


@pytest.mark.parametrize("template", ["{{ raise_exception('no user') }}", "{{ messages[0].content.nothing.more }}"])
def test_a_template_that_refuses_is_the_clients_error(hf_tokenizer, template):
    copy = type(hf_tokenizer)(tokenizer_object=hf_tokenizer.backend_tokenizer)
    copy.chat_template = template
    with pytest.raises(ChatTemplateError, match="the chat template"):
        TextTokenizer(copy).render_chat([USER], None, {})


def test_it_loads_from_a_model_directory(hf_tokenizer, tmp_path):
    hf_tokenizer.save_pretrained(tmp_path)
    loaded = TextTokenizer.load(tmp_path)
    assert loaded.is_byte_level
    assert loaded.encode("hello", add_special_tokens=False) == [256, 257]
    assert loaded.render_chat([USER], None, {})


def test_a_directory_without_tokenizer_is_a_model_error(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen3"}))
    with pytest.raises(ModelError, match="no usable tokenizer"):
        TextTokenizer.load(tmp_path)


async def test_a_long_text_is_encoded_while_the_event_loop_goes_on(tokenizer, monkeypatch):
    threads = []
    encode = tokenizer.encode

    def noted(text, *, add_special_tokens):
        threads.append(threading.current_thread() is threading.main_thread())
        return encode(text, add_special_tokens=add_special_tokens)

    monkeypatch.setattr(tokenizer, "encode", noted)
    short = await tokenizer.encode_aside("hello", add_special_tokens=False)
    long = await tokenizer.encode_aside("hello" * LONG_TEXT, add_special_tokens=False)
    assert long == short * LONG_TEXT
    assert threads == [True, False]
