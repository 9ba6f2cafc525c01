"""Writes the tokenizer of the demo model: one token a character of the environment's texts, and the chat's own tokens.

    python examples/reverse_text_cpu/make_tokenizer.py [DIRECTORY]

A character is a token because a model that reverses characters must see them; a word piece would hide its letters.
"""

import json
import sys
from pathlib import Path
from typing import Final

from tokenizers import AddedToken, Tokenizer, decoders, models

from reverse_text.texts import SYSTEM_PROMPT, WORDS

END_OF_TEXT, TURN_START, TURN_END, UNKNOWN = "<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|unknown|>"
SPECIAL: Final = (END_OF_TEXT, TURN_START, TURN_END, UNKNOWN)
ROLES: Final = ("system", "user", "assistant", "tool")

# Every message is rendered by itself, so a conversation that goes on begins with the tokens it had before.
CHAT_TEMPLATE: Final = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


def build_tokenizer() -> Tokenizer:
    """BPE without a single merge, over the characters that occur, in sorted order."""
    alphabet = sorted(set("".join(WORDS) + SYSTEM_PROMPT + " \n"))
    vocabulary = {token: index for index, token in enumerate([*SPECIAL, *ROLES, *alphabet])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[], unk_token=UNKNOWN))
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL])
    tokenizer.add_tokens([AddedToken(role, normalized=False) for role in ROLES])
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
