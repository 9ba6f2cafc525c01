import os
import subprocess
import sys

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from prime_rl.config.trainer import LossMaskConfig
from prime_rl.data.rendering import load_tokenizer, render_chat
from prime_rl.errors import DataError, ModelError

CHATML = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
HEADER = "{% if add_generation_prompt %}[assistant]{% endif %}"
NO_END = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}" + HEADER
ONLY_LAST = (
    "{% for m in messages %}{% if loop.last or m.role != 'assistant' %}"
    "[{{ m.role }}]{{ m.content }}{% endif %}{% endfor %}" + HEADER
)
STRICT = "{% if messages[0].role != 'user' %}{{ raise_exception('must start with user') }}{% endif %}" + NO_END
WITH_TOOLS = "{% for tool in tools or [] %}<{{ tool.name }}>{% endfor %}" + NO_END

USER = {"role": "user", "content": "hi"}
REPLY = {"role": "assistant", "content": "yo"}
ASSISTANT_ONLY = LossMaskConfig()


def tokenizer(template: str | None = CHATML) -> PreTrainedTokenizerFast:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {char: index for index, char in enumerate([*alphabet, "yo"])}
    core = Tokenizer(models.BPE(vocab=vocab, merges=[("y", "o")]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    core.add_special_tokens(["<|im_start|>", "<|im_end|>"])
    return PreTrainedTokenizerFast(tokenizer_object=core, eos_token="<|im_end|>", chat_template=template)


def trained_text(messages, template=CHATML, mask=ASSISTANT_ONLY) -> str:
    tok = tokenizer(template)
    chat = render_chat(tok, messages, mask)
    return tok.decode(chat.token_ids[chat.loss_mask])


def test_the_reply_and_its_end_are_trained_and_nothing_else():
    tok = tokenizer()
    chat = render_chat(tok, [USER, REPLY], ASSISTANT_ONLY)
    text = "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\nyo<|im_end|>\n"
    assert tok.decode(chat.token_ids) == text
    assert tok.decode(chat.token_ids[chat.loss_mask]) == "yo<|im_end|>"
    assert chat.loss_mask.tolist()[-3:] == [True, True, False]
    assert (chat.token_ids.dtype, chat.loss_mask.dtype) == ("int32", "bool")


def test_tokens_before_the_reply_are_those_a_server_is_given():
    tok = tokenizer()
    chat = render_chat(tok, [USER, REPLY], ASSISTANT_ONLY)
    prompt = tok.apply_chat_template([USER], tokenize=True, add_generation_prompt=True)["input_ids"]
    assert chat.token_ids[: len(prompt)].tolist() == prompt
    assert not chat.loss_mask[: len(prompt)].any()
    assert chat.loss_mask[len(prompt)]


def test_every_reply_of_a_conversation_is_trained():
    messages = [{"role": "system", "content": "s"}, USER, REPLY, USER, {"role": "assistant", "content": "no"}]
    assert trained_text(messages) == "yo<|im_end|>no<|im_end|>"


@pytest.mark.parametrize(
    ("mask", "text"),
    [
        (LossMaskConfig(assistant=False), ""),
        (LossMaskConfig(user=True, assistant=False), "user\nhi<|im_end|>"),
        (LossMaskConfig(user=True), "hi<|im_end|>yo<|im_end|>"),
    ],
)
def test_the_mask_follows_the_roles_that_are_asked_for(mask, text):
    assert trained_text([USER, REPLY], mask=mask).endswith(text)
    assert bool(trained_text([USER, REPLY], mask=mask)) == bool(text)


def test_the_first_token_is_never_trained():
    chat = render_chat(tokenizer(), [USER, REPLY], LossMaskConfig(user=True))
    assert not chat.loss_mask[0]
    assert chat.loss_mask[1]


def test_an_end_that_the_template_does_not_write_is_appended():
    assert trained_text([USER, REPLY], NO_END) == "yo<|im_end|>"
    tok = tokenizer(NO_END)
    assert tok.decode(render_chat(tok, [USER, REPLY], ASSISTANT_ONLY).token_ids) == "[user]hi[assistant]yo<|im_end|>"


def test_no_end_is_appended_where_the_last_word_is_not_the_models():
    tok = tokenizer(NO_END)
    chat = render_chat(tok, [USER, REPLY, USER], ASSISTANT_ONLY)
    assert tok.decode(chat.token_ids) == "[user]hi[assistant]yo[user]hi"


def test_a_template_that_rewrites_earlier_turns_is_refused():
    with pytest.raises(DataError, match=r"messages\[3\]: the chat template writes earlier turns differently"):
        render_chat(tokenizer(ONLY_LAST), [USER, REPLY, USER, REPLY], ASSISTANT_ONLY)


def test_a_template_is_only_shown_what_it_must_be():
    """Many templates refuse a conversation that is not yet one: a system message alone."""
    picky = "{% if messages[-1].role == 'system' %}{{ raise_exception('no user') }}{% endif %}" + NO_END
    messages = [{"role": "system", "content": "s"}, USER, REPLY]
    assert trained_text(messages, picky) == "yo<|im_end|>"
    assert trained_text([USER, REPLY], picky, LossMaskConfig(user=True)).endswith("user]hiyo<|im_end|>")


def test_a_refusal_of_the_template_is_passed_on():
    with pytest.raises(DataError, match=r"refuses these messages \(system, user\): must start with user"):
        render_chat(tokenizer(STRICT), [{"role": "system", "content": "s"}, USER, REPLY], ASSISTANT_ONLY)


def test_tools_reach_the_template():
    tok = tokenizer(WITH_TOOLS)
    chat = render_chat(tok, [USER, REPLY], ASSISTANT_ONLY, tools=[{"name": "search"}])
    assert tok.decode(chat.token_ids).startswith("<search>[user]hi")


def test_a_tokenizer_without_a_template_is_refused():
    with pytest.raises(DataError, match=r"has no chat template"):
        render_chat(tokenizer(None), [USER, REPLY], ASSISTANT_ONLY)


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        ([], "at least one message"),
        (["hi"], r'messages\[0\] must be an object with role and content, not "hi"'),
        ([{"role": "bot", "content": "hi"}], r'messages\[0\]\.role must be one of .*, not "bot"'),
        ([USER, {"role": "assistant", "content": 3}], r"messages\[1\]\.content must be a string, not 3"),
        ([USER, {"role": "assistant"}], r"messages\[1\]\.content must be a string, not null"),
        ([{"role": "user", "content": ["x" * 99]}], r"must be a string, not \[\"x+\.\.\."),
    ],
)
def test_a_malformed_conversation_is_named(messages, message):
    with pytest.raises(DataError, match=message):
        render_chat(tokenizer(), messages, ASSISTANT_ONLY)


def test_a_saved_tokenizer_loads_with_its_template(tmp_path):
    tokenizer().save_pretrained(tmp_path)
    loaded = load_tokenizer(tmp_path)
    assert loaded.eos_token == "<|im_end|>"
    expected = render_chat(tokenizer(), [USER, REPLY], ASSISTANT_ONLY)
    assert render_chat(loaded, [USER, REPLY], ASSISTANT_ONLY).token_ids.tolist() == expected.token_ids.tolist()


def test_a_directory_without_a_tokenizer_is_refused_in_one_sentence(tmp_path):
    with pytest.raises(ModelError, match=r"no tokenizer\.json could be loaded for") as caught:
        load_tokenizer(tmp_path)
    assert "\n" not in str(caught.value)


def test_rendering_needs_no_torch(tmp_path):
    tokenizer().save_pretrained(tmp_path)
    code = (
        "import sys\n"
        "from prime_rl.config.trainer import LossMaskConfig\n"
        "from prime_rl.data.rendering import load_tokenizer, render_chat\n"
        "from prime_rl.data import packing, samples\n"
        "from prime_rl.transport import batches, manifest\n"
        f"tokenizer = load_tokenizer({str(tmp_path)!r})\n"
        f"render_chat(tokenizer, [{USER!r}, {REPLY!r}], LossMaskConfig())\n"
        "assert 'torch' not in sys.modules\n"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
