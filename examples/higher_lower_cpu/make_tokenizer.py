"""Writes the tokenizer of the model that plays higher-lower and keeps the shop: a token a number, a word or a mark.

    python examples/higher_lower_cpu/make_tokenizer.py [DIRECTORY]

A model of half a million parameters has no room for arithmetic on digits, nor patience for JSON letter by letter. So
each number up to 99 is one token, and what always stands together in a tool call is one too.
"""

import json
import sys
from pathlib import Path
from typing import Final

from tokenizers import AddedToken, Tokenizer, decoders, models

from shop_total.shop import PRICES

END_OF_TEXT, TURN_START, TURN_END, UNKNOWN = "<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|unknown|>"
SPECIAL: Final = (END_OF_TEXT, TURN_START, TURN_END, UNKNOWN)
ROLES: Final = ("system", "user", "assistant", "tool")
NUMBERS: Final = tuple(str(number) for number in range(100))
GAME: Final = ("between ", " and ", "higher, ", "lower, ", "invalid, ")
SHOP: Final = (*PRICES, "price", "multiply", "item", "error")
CALL: Final = ("<tool_call>", "</tool_call>", '{"name": "', '", "arguments": {"', '": ', ', "', "}}")
CHARACTERS: Final = ' "\nab'

# Every message is rendered by itself, so a conversation that goes on begins with the tokens it had before. Tools are
# called in the form of Hermes and Qwen3. Their descriptions are left out: this model knows them from its warm-up.
CHAT_TEMPLATE: Final = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + (message['content'] or '') }}"
    "{% for call in message['tool_calls'] or [] %}"
    "{% set call = call['function'] or call %}"
    "{{ '\\n' if message['content'] or not loop.first else '' }}"
    """{{ '<tool_call>\\n{"name": "' + call['name'] + '", "arguments": ' }}"""
    "{{ call['arguments'] if call['arguments'] is string else call['arguments'] | tojson }}"
    "{{ '}\\n</tool_call>' }}"
    "{% endfor %}"
    "{{ '<|im_end|>\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


def build_tokenizer() -> Tokenizer:
    """BPE without a single merge: what is not a token as a whole is cut into characters."""
    tokens = [*SPECIAL, *ROLES, *CALL, *GAME, *SHOP, *NUMBERS, *CHARACTERS]
    vocabulary = {token: index for index, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[], unk_token=UNKNOWN))
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL])
    tokenizer.add_tokens([AddedToken(token, normalized=False) for token in (*ROLES, *CALL, *GAME, *SHOP, *NUMBERS)])
    return tokenizer


def tokenizer_config() -> dict[str, object]:
    """What `transformers` needs beside tokenizer.json."""
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": END_OF_TEXT,
        "eos_token": TURN_END,
        "pad_token": END_OF_TEXT,
        "unk_token": UNKNOWN,
        "model_max_length": 256,
        "clean_up_tokenization_spaces": False,
        "chat_template": CHAT_TEMPLATE,
    }


def write(directory: Path) -> None:
    """Write tokenizer.json and tokenizer_config.json; the same bytes every time."""
    directory.mkdir(parents=True, exist_ok=True)
    build_tokenizer().save(str(directory / "tokenizer.json"))
    (directory / "tokenizer_config.json").write_text(json.dumps(tokenizer_config(), indent=2) + "\n")


if __name__ == "__main__":
    write(Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parent / "model")
