"""Text to token ids and back. The engine knows token ids only; the model's tokenizer is known here."""

import asyncio
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jinja2
from tokenizers import Tokenizer
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from prime_rl.errors import ModelError

VOCABULARY_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json")
"""A directory with none of these has no tokenizer; transformers makes an empty one for it and says nothing."""

LONG_TEXT = 8192
"""Characters from which on a text is encoded beside the event loop; it takes some milliseconds."""

RESERVED_TEMPLATE_KEYS = frozenset(
    {
        "conversation",
        "messages",
        "tools",
        "chat_template",
        "tokenize",
        "padding",
        "truncation",
        "max_length",
        "return_tensors",
        "return_dict",
        "return_assistant_tokens_mask",
        "sanitize_control_tokens",
        "tokenizer_kwargs",
    }
)
"""Arguments of `apply_chat_template` that a request's `chat_template_kwargs` may not set."""


class ChatTemplateError(ValueError):
    """The messages of a request cannot be rendered; the message says why."""


class TextTokenizer:
    """A fast tokenizer with its chat template, and the bytes of every token, exact in a byte-level vocabulary."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast) -> None:
        self._tokenizer = tokenizer
        self._core: Tokenizer = tokenizer.backend_tokenizer
        self._special_ids = frozenset(
            token_id for token_id, added in self._core.get_added_tokens_decoder().items() if added.special
        )
        self._bytes: dict[int, bytes] = {}
        self._char_to_byte = _byte_level_alphabet()
        self.is_byte_level = _is_byte_level(self._core)

    @classmethod
    def load(cls, directory: Path) -> "TextTokenizer":
        """The tokenizer of a model directory; ModelError where there is none or it is not a fast one."""
        if not any((directory / name).is_file() for name in VOCABULARY_FILES):
            raise ModelError(f"no usable tokenizer in {directory}: it has none of {', '.join(VOCABULARY_FILES)}")
        try:
            tokenizer = AutoTokenizer.from_pretrained(str(directory), use_fast=True)
        except (OSError, ValueError, KeyError, ImportError) as error:
            raise ModelError(f"no usable tokenizer in {directory}: {error}") from error
        if not isinstance(tokenizer, PreTrainedTokenizerFast):
            raise ModelError(
                f"the tokenizer in {directory} is not a fast one ({type(tokenizer).__name__}); "
                "the server needs a tokenizer.json: save the tokenizer with transformers to make one"
            )
        return cls(tokenizer)

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """The token ids of a text."""
        return self._core.encode(text, add_special_tokens=add_special_tokens).ids

    async def encode_aside(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """`encode`; of a long text in a thread, so that the event loop goes on meanwhile."""
        if len(text) < LONG_TEXT:
            return self.encode(text, add_special_tokens=add_special_tokens)
        return await asyncio.to_thread(self.encode, text, add_special_tokens=add_special_tokens)

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        """The text of token ids; bytes that are not UTF-8 become U+FFFD."""
        return self._core.decode(list(ids), skip_special_tokens=skip_special_tokens)

    def is_special(self, token_id: int) -> bool:
        """Whether the token is left out of text when special tokens are skipped."""
        return token_id in self._special_ids

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes that a token stands for: exact in a byte-level vocabulary, else those of its own decoding.

        Empty for an id that the model has and the tokenizer has not (padding of the vocabulary).
        """
        known = self._bytes.get(token_id)
        if known is None:
            known = self._bytes[token_id] = self._find_bytes(token_id)
        return known

    def token_text(self, token_id: int) -> str:
        """One token as text, special tokens included; an incomplete character shows as U+FFFD."""
        return self.token_bytes(token_id).decode("utf-8", errors="replace")

    def render_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None,
        arguments: Mapping[str, Any],
    ) -> str:
        """The prompt of a conversation by the model's chat template; ChatTemplateError says why there is none.

        Its special tokens are spelled out: none are to be added when it is encoded.
        """
        if not self._tokenizer.chat_template:
            raise ChatTemplateError(
                "this model's tokenizer has no chat template, so it cannot take messages: "
                "use /v1/completions, or serve a model directory with a chat template"
            )
        reserved = sorted(RESERVED_TEMPLATE_KEYS & arguments.keys())
        if reserved:
            raise ChatTemplateError(f"chat_template_kwargs may not set {', '.join(reserved)}")
        render: Callable[..., Any] = self._tokenizer.apply_chat_template
        try:
            text: str = render(
                [dict(message) for message in messages],
                tools=[dict(tool) for tool in tools] if tools else None,
                tokenize=False,
                **arguments,
            )
        except jinja2.TemplateError as error:
            raise ChatTemplateError(f"the chat template refuses these messages: {error}") from error
        except (TypeError, ValueError, KeyError, IndexError, AttributeError, RecursionError) as error:
            # A template is a program over what the client sent; what it cannot process is the client's error.
            raise ChatTemplateError(
                f"the chat template cannot render these messages ({type(error).__name__}: {error})"
            ) from error
        return text

    def _find_bytes(self, token_id: int) -> bytes:
        token = self._core.id_to_token(token_id)
        if token is None:
            return b""
        if not self.is_byte_level:
            return self._core.decode([token_id], skip_special_tokens=False).encode("utf-8", errors="replace")
        values = [self._char_to_byte.get(char) for char in token]
        if None in values:  # an added token, spelled as it is
            return token.encode("utf-8", errors="replace")
        return bytes(value for value in values if value is not None)


def _is_byte_level(core: Tokenizer) -> bool:
    """Whether decoding is nothing but joining the bytes of the tokens."""
    if core.decoder is None:
        return False
    description = json.loads(core.decoder.__getstate__())
    steps = description.get("decoders", [description])
    return [step.get("type") for step in steps] == ["ByteLevel"]


def _byte_level_alphabet() -> dict[str, int]:
    """The printable character that stands for each byte in a byte-level vocabulary (GPT-2's mapping), reversed."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    alphabet = {chr(byte): byte for byte in printable}
    others = (byte for byte in range(256) if byte not in set(printable))
    return alphabet | {chr(256 + index): byte for index, byte in enumerate(others)}
